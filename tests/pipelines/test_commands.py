"""The commands of the project, typed as a user types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.study import StudyOptions
from geo_sokoban_pipeline.parameters import TrackingOptions, section_model
from geo_sokoban_pipeline.pipelines.study.nodes import plan_study
from geo_sokoban_pipeline.runs.lock import RunLock
from geo_sokoban_pipeline.runs.own_code import forget_edited
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.studies.plan import Command
from geo_sokoban_pipeline.studies.run import StudyError
from runs import ROOT, finish, kedro_command


def start(*words, cwd=ROOT, **environment):
    """Output of `python -m words`, which must end well."""
    env = {**os.environ, "KEDRO_DISABLE_TELEMETRY": "1", **{name: str(value) for name, value in environment.items()}}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_catalog_describe_datasets(tmp_path):
    words = ("catalog", "describe-datasets", "--env=test", "--pipeline=train_sokoban")
    text = start("kedro", *words, GEO_SOKOBAN_DATA_ROOT=tmp_path)
    for name in ("train_sokoban.checkpoints", "train_sokoban.resume_state", "sokoban.prompts", "train_sokoban.report"):
        assert name in text
    assert "geo_sokoban_pipeline.datasets" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_older_spelling_of_pipelines(tmp_path):
    finish(kedro_command("--pipeline=data_sokoban", data_root=tmp_path))
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    newest = read_json(tmp_path / "05_model_input" / "sokoban" / "newest.json")["id"]
    tables = ("prompts.parquet", "validation_prompts.parquet", "eval_prompts.parquet")
    assert files == {
        f"01_raw/sokoban/{newest}/raw_levels.parquet",
        *(f"02_intermediate/sokoban/{newest}/{name}" for name in ("data_report.json", "reading.json")),
        f"02_intermediate/sokoban/{newest}/rejected.parquet",
        *(f"05_model_input/sokoban/{newest}/{name}" for name in (*tables, "data.json")),
        "05_model_input/sokoban/newest.json",
    }


@pytest.mark.slow
def test_without_a_name_the_default_pipeline_trains(project):
    project.succeed("--to-nodes=train_sokoban.prepare_policy")
    assert (project.folder("06_models") / "base_policy" / "manifest.json").is_file()


# Two processes


@pytest.mark.slow
def test_a_second_process_on_the_same_run_stops_at_once(project, tmp_path):
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom geo_sokoban_pipeline.runs.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(120)"
    )
    words = [sys.executable, "-c", holder, str(project.folder("06_models"))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        result = project.command("--pipelines=train_sokoban")
        beside = project.command("--pipelines=data_sokoban")
        process.kill()
    assert result.exit_code == 1
    assert f"is in use by process {process.pid} on " in result.output
    assert "run_id=" in result.output
    assert beside.exit_code == 0
    # The lock ends with its holder, although nobody has tidied up.
    RunLock(project.folder("06_models")).close()


# Other tools of Kedro


@pytest.mark.slow
def test_viz_builds_a_page_with_previews(finished_run, tmp_path):
    # The page goes to `build` below the folder that holds conf, so the project lies in a folder of the test.
    project = copy_project(tmp_path / "project")
    environment = {"GEO_SOKOBAN_DATA_ROOT": finished_run.root, "PYTHONPATH": project / "src", "KEDRO_ENV": "test"}
    start("kedro", "viz", "build", "--include-previews", cwd=project, **environment)
    page = project / "build"
    assert (page / "index.html").is_file()
    found = [json.loads(path.read_text()) for path in (page / "api" / "nodes").iterdir()]
    kinds = Counter(node.get("preview_type") for node in found if node.get("preview"))
    assert kinds["HTMLPreview"] >= 6 and kinds["PlotlyPreview"] == 1 and kinds["TablePreview"] >= 3
    shown = [json.dumps(node["preview"]) for node in found if node.get("preview")]
    assert any("draw prompts" in text for text in shown)  # the loop, at train_grpo
    assert any("rollout/raw_reward" in text for text in shown)
    galleries = [text for text in shown if "data:image/png;base64," in text]
    assert len(galleries) >= 5  # three tables of prompts, episodes of training and of the evaluation
    assert any("GRPO" in text and "95 % interval" in text for text in shown)  # the report


@pytest.mark.slow
def test_package_and_a_run_from_the_wheel(tmp_path):
    project = copy_project(tmp_path / "project")
    start("kedro", "package", cwd=project, PYTHONPATH=project / "src")
    (wheel,) = (project / "dist").glob("*.whl")
    (conf,) = (project / "dist").glob("conf-*.tar.gz")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    start("pip", "install", "--quiet", "--no-deps", "--no-index", f"--target={site}", str(wheel))
    words = ("--pipelines=data_sokoban", "--env=test", f"--conf-source={conf}")
    environment = {"PYTHONPATH": site, "GEO_SOKOBAN_DATA_ROOT": tmp_path / "data"}
    start("geo_sokoban_pipeline", *words, cwd=elsewhere, **environment)
    assert list((tmp_path / "data" / "05_model_input" / "sokoban").glob("*/prompts.parquet"))
    # Every file that the code reads beside itself is in the wheel.
    packed = {path.relative_to(site).as_posix() for path in site.rglob("geo_sokoban_pipeline/**/*") if path.is_file()}
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("geo_sokoban_pipeline/**/*")}
    assert {name for name in source if (ROOT / "src" / name).is_file() and "__pycache__" not in name} <= packed


def test_a_study_needs_a_project_folder(tmp_path):
    """An installed package has no folder from which a study could start `kedro run`."""
    command = Command(tmp_path, "conf", None, tmp_path / "data", lambda root: root)
    sections = {name: section_model(name)() for name in ("study_default", "train_sokoban", "sokoban")}
    with pytest.raises(StudyError, match=r"no project folder: it has no pyproject\.toml"):
        plan_study(command, StudyOptions(), TrackingOptions(), studies=("default",), **sections)


def test_a_study_calls_a_recipes_own_code_before_it_runs_anything(tmp_path):
    """The first run of a recipe would find the error only after that of the study itself."""
    file = tmp_path / "mine.py"
    file.write_text("def advantage(episodes, args):\n    return args['scale'] * episodes.reward\n")
    command = Command(ROOT, "conf", None, tmp_path / "data", lambda root: root)

    def plan(**mine):
        recipes = {"mine": {"grpo": {"advantage": str(file), **mine}}}
        study = section_model("study_estimators").model_validate({"seeds": [3, 4], "recipes": recipes})
        sections = {name: section_model(name)() for name in ("train_sokoban", "sokoban")}
        options = StudyOptions(name="estimators", docs=None)
        return plan_study(
            command, options, TrackingOptions(), studies=("estimators",), study_estimators=study, **sections
        )

    with pytest.raises(ParameterError, match=r"study_estimators\.recipes\.mine\.grpo\.advantage=.*KeyError: 'scale'"):
        plan()
    before = {member.run_id: member.parameters for member in plan(advantage_args={"scale": 1.0}).members}
    file.write_text(file.read_text() + "    # edited\n")
    forget_edited()
    after = {member.run_id: member.parameters for member in plan(advantage_args={"scale": 1.0}).members}
    changed = [run_id for run_id in before if before[run_id] != after[run_id]]
    assert changed == ["estimators-seed3-mine", "estimators-seed4-mine"]


def copy_project(folder):
    """The project without its history, data and environment."""
    for name in ("conf", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder
