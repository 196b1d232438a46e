"""The configuration loader: data ids in the catalog, for each loader by its own parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader
from geo_sokoban_pipeline.hooks.parameters import check_parameters, settings_of
from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS
from runs import ROOT


def make_loader(**given):
    return ProjectConfigLoader(str(ROOT / "conf"), "test", given, **CONFIG_LOADER_ARGS)


def paths(loader):
    catalog = loader["catalog"]
    return catalog["{task}.prompts"]["data"]["sokoban"]["id"], catalog["{run}.policy"]["path"].split("/")[-2]


def test_the_catalog_has_the_id_of_the_loaders_own_parameters():
    default, run_id = paths(make_loader())
    options = SokobanDataOptions.model_validate(make_loader()["parameters"]["sokoban"])
    assert (default, run_id) == (identify_data("sokoban", options).id, "default")
    assert paths(make_loader(sokoban={"cell_px": 12}))[0] not in (default, None)


def test_a_loader_that_is_made_later_changes_nothing_for_this_one():
    first, other = make_loader(run_id="mine", sokoban={"cell_px": 12}), make_loader()
    wanted, others = paths(first), paths(other)
    assert wanted[1] == "mine" and wanted[0] != others[0]
    make_loader()
    assert (paths(first), paths(other)) == (wanted, others)


def test_a_source_names_its_run():
    """No default of another run id slips in where a file leaves it out."""
    given = {"run_id": "seed2", "evaluate_dots": {"source": {"run": "train_dots"}}}
    with pytest.raises(ParameterError, match=r"evaluate_dots\.source\.run_id: is missing\. Write run_id: \$\{run_id\}"):
        check_parameters(make_loader(**given)["parameters"], given)


def test_the_data_root_of_another_environment_is_read_without_setting_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", str(tmp_path / "mine"))
    loader = make_loader()
    there = {"GEO_SOKOBAN_DATA_ROOT": str(tmp_path / "theirs")}
    assert loader.globals_with(there)["data_root"] == str(tmp_path / "theirs")
    assert loader["globals"]["data_root"] == str(tmp_path / "mine")
    assert paths(loader)[1] == "default"
    monkeypatch.delenv("GEO_SOKOBAN_DATA_ROOT")
    for variable in (None, ""):  # compose and .env files set it without a value
        if variable is not None:
            monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", variable)
        assert make_loader()["globals"]["data_root"] == loader.globals_with({})["data_root"] == "data/test"


def test_the_home_folder_in_the_data_root_is_one_folder_for_all(tmp_path, monkeypatch):
    """As a .env file or a unit gives it, without a shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", "~/runs")
    loader = make_loader()
    home = str(tmp_path / "runs")
    assert loader["globals"]["data_root"] == home
    assert loader.globals_with({"GEO_SOKOBAN_DATA_ROOT": "~/runs"})["data_root"] == home
    paths = [entry[key] for entry in loader["catalog"].values() for key in ("path", "filepath") if key in entry]
    assert any(path.startswith(f"{home}/") for path in paths) and not any("~" in path for path in paths)
    _, root = settings_of(SimpleNamespace(config_loader=loader, project_path=ROOT))
    assert root == tmp_path / "runs"
