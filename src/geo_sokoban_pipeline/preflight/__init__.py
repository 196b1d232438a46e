"""Pre-flight: what a run needs is looked at before it begins, and everything that would fail later is said at once.

Each check is a function that returns small frozen records and changes nothing. Every training run refuses what the
cheap ones among them find (`fingerprints`, `plugins`, `policies`); the pipelines check_* run them all and print a
table.
"""
