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


@pytest.mark.parametrize("given", ["", "../../etc", "/etc", "a/b", "Train", "..", ".", "train_sokoban/seed2", 3, None])
@pytest.mark.parametrize("section", ["evaluate_sokoban", "rollout_geo3k", "update_sokoban", "control_sokoban"])
def test_sources_are_names_of_pipelines(section, given):
    with pytest.raises(ParameterError) as caught:
        validate_parameters({section: {"source": {"run": given}}}, ProjectParameters)
    assert str(caught.value).startswith(f"{section}.source.run=")
    assert "the name of the pipeline that made the run, such as train_sokoban" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_sources_of_all_kinds_of_runs():
    for run in ("train_sokoban", "rollout_geo3k", "update_geo3k_multi_turn", "control_sokoban"):
        parameters = validate_parameters({"evaluate_sokoban": {"source": {"run": run}}}, ProjectParameters)
        assert parameters.evaluate_sokoban.source.run == run


def test_unknown_section_is_an_error():
    with pytest.raises(ParameterError, match=r"train_sokobann: unknown name\. Did you mean train_sokoban\?"):
        validate_parameters({"train_sokobann": {}}, ProjectParameters)


def test_defaults():
    parameters = validate_parameters({}, ProjectParameters)
    assert (parameters.run_id, parameters.seed, parameters.fresh) == ("default", 0, False)
    assert parameters.tracking.enabled
