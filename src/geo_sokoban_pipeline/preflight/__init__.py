"""Pre-flight: checks before a run, which report everything that would fail later at once.

A check is a function that returns `Check` records and changes nothing. Every command runs the cheap checks
(`first_checks`) and stops at failures; the pipelines check_* run all checks and print a table (`flight`).
"""
