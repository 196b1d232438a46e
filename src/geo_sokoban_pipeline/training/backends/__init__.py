"""Training backends: what turns samples and an objective into new weights."""
