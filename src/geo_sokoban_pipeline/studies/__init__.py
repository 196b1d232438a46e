"""Studies: several runs with their controls, planned, run side by side, and read into one table of results."""
