"""Reports for people: the HTML page of a run, episodes frame by frame, and small displays for notebooks.

Everything here reads what a run has stored and computes nothing that training depends on.
"""
