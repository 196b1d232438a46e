"""A run that goes on: its page from the first iteration, the index and the site of what is committed, at any time."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing

import pytest

from geo_sokoban_pipeline.runs.folders import committed_iteration
from geo_sokoban_pipeline.runs.lock import RunLock
from geo_sokoban_pipeline.runs.storage import read_json
from kill_hook import kill_at
from runs import Project, assert_same_run, finish, kedro_command, read_run

pytestmark = pytest.mark.slow
GOES_ON = "The training goes on: 1 of 3 iterations is stored."


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Address of the MLflow store, which is of no data root."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def words(store):
    """The command: other runs of the tests have a page at the end alone, and are not tracked."""
    params = f"train_sokoban.loop.report_share=0.01,tracking.enabled=true,tracking.uri={store}"
    return "--pipelines=train_sokoban", f"--params={params}"


@pytest.fixture(scope="module")
def killed(words, tmp_path_factory):
    """A run that was killed in its second iteration, before the checkpoint: its episodes are stored, not committed."""
    root = tmp_path_factory.mktemp("killed")
    # A rewind comes first, and an iteration saves twice: with its episodes, where no row of metrics is due, and again.
    kill = kill_at("after_save:train_sokoban.metrics", 5)
    finish(kedro_command(*words, data_root=root, **kill), expected=-9)
    return root


def copy_of(root, place):
    shutil.copytree(root, place, ignore=shutil.ignore_patterns("*.lock"))
    return place


def headline(page):
    return re.search(r"<h1>(.*?)</h1>", page.read_text(encoding="utf-8"))[1]


def test_the_page_is_there_from_the_first_iteration(killed):
    """Killed before the second checkpoint, the run has the page of the first."""
    page = killed / "08_reporting/train_sokoban/default/report.html"
    assert headline(page) == GOES_ON
    text = page.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>")
    assert "· 1 iteration</p>" in text
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]


def test_a_killed_run_with_pages_continues_bit_for_bit(killed, words, store, finished_run, tmp_path):
    """Its processes have other hash seeds than that of the finished run, which has one page, at its end. MLflow has one
    run of both commands, and each iteration once.
    """
    from mlflow.tracking import MlflowClient

    root = copy_of(killed, tmp_path / "data")
    Project(root).succeed(*words)
    client = MlflowClient(tracking_uri=store)
    (logged,) = client.search_runs([found.experiment_id for found in client.search_experiments()])
    points = client.get_metric_history(logged.info.run_id, "rollout/raw_reward")
    assert (logged.info.status, [point.step for point in points]) == ("FINISHED", [0, 1, 2])
    assert_same_run(read_run(finished_run.root), read_run(root))
    for name in ("01_raw/sokoban/*/raw_levels.parquet", "05_model_input/sokoban/*/prompts.parquet"):
        (one,), (other,) = root.glob(name), finished_run.root.glob(name)
        assert one.parent.name == other.parent.name
        assert one.read_bytes() == other.read_bytes()
    assert "goes on" not in headline(root / "08_reporting/train_sokoban/default/report.html")


def test_site_and_report_of_a_running_run_show_what_is_committed(killed, tmp_path, project):
    """The lock is held, as by the command that trains; both commands work beside it."""
    copy_of(killed, project.root)
    outputs = project.folder("07_model_output")
    assert (outputs / "trajectories/iter=00001").is_dir()  # stored, but committed by no checkpoint
    with closing(RunLock(project.folder("06_models"))):
        assert committed_iteration(project.folder("06_models")) == 0
        project.run("browse_sokoban")
        project.run("report_sokoban")
    site = project.folder("08_reporting", "browse_sokoban") / "site"
    assert read_json(site / "manifest.json")["runs"] == ["train_sokoban/default"]
    index = project.load("train_sokoban.episodes").to_pylist()
    # Checkpoint 0 holds policy version 1, so the validations of the versions 0 and 1 are committed.
    committed = [row for row in index if row["iteration"] <= (row["split"] == "validation")]
    assert {row["iteration"] for row in index if row["split"] == "train"} == {0, 1}
    assert {row["iteration"] for row in index if row["split"] == "validation"} == {0, 1, 2}
    assert read_json(site / "manifest.json")["episodes"] == len(committed)
    page = project.folder("08_reporting", "report_sokoban") / "report.html"
    assert headline(page) == "The training goes on: 1 iteration is stored."
    text = page.read_text(encoding="utf-8")
    assert "../../browse_sokoban/default/site/index.html" in text
    assert "· 1 iteration</p>" in text and "group_size" in text
    # The run itself is as it was.
    assert (outputs / "trajectories/iter=00001").is_dir()


def test_a_run_that_has_just_begun_has_nothing_to_show(killed, project):
    copy_of(killed, project.root)
    shutil.rmtree(project.folder("06_models") / "checkpoints")
    with closing(RunLock(project.folder("06_models"))):
        assert committed_iteration(project.folder("06_models")) == -1
    assert committed_iteration(project.folder("06_models")) is None  # nobody works on it: all that is stored counts


def test_the_report_of_a_finished_run_is_the_one_at_its_end(clone):
    clone.run("report_sokoban")
    ours = (clone.folder("08_reporting", "report_sokoban") / "report.html").read_text(encoding="utf-8")
    theirs = (clone.folder("08_reporting") / "report.html").read_text(encoding="utf-8")
    assert headline(clone.folder("08_reporting", "report_sokoban") / "report.html") in theirs
    charts = [re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL) for page in (ours, theirs)]
    assert charts[0] == charts[1] and charts[0]
    players = [json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
               for page in (ours, theirs)]  # fmt: skip
    assert players[0] == players[1]


def test_a_page_that_fails_ends_no_training(clone, monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("no page today")

    monkeypatch.setattr("geo_sokoban_pipeline.reporting.live.read_report_inputs", refuse)
    clone.run(params={"train_sokoban": {"loop": {"iterations": 4, "report_share": 0.01}}})
    assert "the report of train_sokoban is written at the end alone. RuntimeError: no page today" in caplog.text
    assert "· 4 iterations</p>" in (clone.folder("08_reporting") / "report.html").read_text(encoding="utf-8")
