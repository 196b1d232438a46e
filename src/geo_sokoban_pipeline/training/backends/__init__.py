"""Training backends: they turn samples and an objective into new weights."""
