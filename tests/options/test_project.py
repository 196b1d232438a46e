"""The root of all parameters."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.options import ParameterError, validate_parameters
from geo_sokoban_pipeline.options.project import ProjectParameters


@pytest.mark.parametrize(("given", "run_id"), [("seed2", "seed2"), (2, "2"), (1.5, "1.5"), ("a.b-c_d", "a.b-c_d")])
def test_run_ids_are_text(given, run_id):
    assert validate_parameters({"run_id": given}, ProjectParameters).run_id == run_id


@pytest.mark.parametrize("given", ["", "../other", "a/b", ".hidden", "-x", "a b", True, None, "x" * 101, ["a"], 1e30])
def test_run_ids_are_names_of_folders(given):
    with pytest.raises(ParameterError, match="run_id.*name of a folder"):
        validate_parameters({"run_id": given}, ProjectParameters)


def test_unknown_section_is_an_error():
    with pytest.raises(ParameterError, match=r"train_sokobann: unknown name\. Did you mean train_sokoban\?"):
        validate_parameters({"train_sokobann": {}}, ProjectParameters)


def test_defaults():
    parameters = validate_parameters({}, ProjectParameters)
    assert (parameters.run_id, parameters.seed, parameters.fresh) == ("default", 0, False)
    assert parameters.tracking.enabled
