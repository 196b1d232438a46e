"""The root of all parameters."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.config import ParameterError, validate_parameters
from geo_sokoban_pipeline.parameters import ProjectParameters


@pytest.mark.parametrize(
    ("given", "run_id"), [("seed2", "seed2"), ("2", "2"), ("1.10", "1.10"), ("a.b-c_d", "a.b-c_d")]
)
def test_run_ids_are_text(given, run_id):
    assert validate_parameters({"run_id": given}, ProjectParameters).run_id == run_id


@pytest.mark.parametrize("given", ["", "../other", "a/b", ".hidden", "-x", "a b", "x" * 101])
def test_run_ids_are_names_of_folders(given):
    with pytest.raises(ParameterError, match="run_id.*name of a folder"):
        validate_parameters({"run_id": given}, ProjectParameters)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (2, "run_id=2: a text is needed, and YAML reads a number. Quote it"),
        (1.10, "run_id=1.1: a text is needed, and YAML reads a number. Quote it"),
        (True, "run_id=true: a text is needed, and YAML reads true or false. Quote it"),
        (None, "run_id=null: input should be a valid string"),
        (["a"], 'run_id=["a"]: input should be a valid string'),
    ],
)
def test_run_ids_are_quoted_where_yaml_reads_something_else(given, said):
    with pytest.raises(ParameterError) as caught:
        validate_parameters({"run_id": given}, ProjectParameters)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("given", ["", "../../etc", "/etc", "a/b", "Train", "..", ".", "train_sokoban/seed2", 3, None])
@pytest.mark.parametrize("section", ["evaluate_sokoban", "rollout_geo3k", "update_sokoban", "control_sokoban"])
def test_sources_are_names_of_pipelines(section, given):
    with pytest.raises(ParameterError) as caught:
        validate_parameters({section: {"source": {"run": given}}}, ProjectParameters)
    assert str(caught.value).startswith(f"{section}.source.run=")
    assert "the name of the pipeline that made the run, train_<task>" in str(caught.value)
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


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://u:swordfish@h/db",
        "mysql+pymysql://u:sword/fish@h:3306/db",
        "http://u:swordfish@h:5000",
        "postgresql://h/db?user=u&password=swordfish",
        "mssql+pyodbc:///?odbc_connect=UID%3Du%3BPWD%3Dswordfish",
    ],
)
def test_a_tracking_uri_holds_no_password(uri):
    with pytest.raises(ParameterError, match=r"MLFLOW_TRACKING_PASSWORD; for a database .* ~/\.pgpass") as caught:
        validate_parameters({"tracking": {"uri": uri}}, ProjectParameters)
    assert "fish" not in str(caught.value) and str(caught.value).startswith("tracking: uri=")


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////data/a@b/mlflow.db",
        "http://h:5000",
        "http://u@h:5000/mlflow",
        "postgresql://u@h:5432/db?sslmode=require&passfile=/p",
        "databricks://profile",
    ],
)
def test_tracking_uris_without_a_password(uri):
    assert validate_parameters({"tracking": {"uri": uri}}, ProjectParameters).tracking.uri == uri


def test_no_message_shows_a_password_of_an_address():
    for wrong in ({"tracking": {"url": "http://u:swordfish@h"}}, {"tracking": {"uri": ["http://u:swordfish@h"]}}):
        with pytest.raises(ParameterError, match=r"://\*\*\*@h") as caught:
            validate_parameters(wrong, ProjectParameters)
        assert "swordfish" not in str(caught.value)
