"""Options: what may stand in `conf/*/parameters*` and behind `--params`, as pydantic models.

Unknown names fail at every level, and every error names the full path, the value and what is allowed there.
"""

from geo_sokoban_pipeline.config.base import ParameterError, StrictModel, validate_parameters

__all__ = ["ParameterError", "StrictModel", "validate_parameters"]
