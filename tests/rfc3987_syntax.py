"""Stands before the package of this name on the tests' path, so that it counts as not installed.

That package compiles a grammar, for more than a second, whenever `jsonschema` is imported, and Ray imports that in each
of its processes. It checks addresses in schemas, which nothing here has.
"""

raise ImportError(f"{__name__} is left out by the tests")
