"""Files that are not ours and remains of killed processes: the first are left alone, the second are taken away."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.runs.storage import CorruptFolderError
from runs import assert_same_run, read_run

pytestmark = pytest.mark.slow

LONGER = {"train_sokoban": {"loop": {"iterations": 4}}}


def litter(outputs, models):
    """Put foreign files, and what a killed process leaves, into all folders of a run; (foreign, remains)."""
    foreign, remains = [], []
    for folder in (
        outputs / "trajectories",
        outputs / "eval_trajectories",
        outputs / "metrics",
        models / "checkpoints",
    ):
        for name, text in (("notes.txt", "mine"), ("iter=copy.json", "[]"), ("iter=00001 (1).parquet", "PAR1")):
            (folder / name).write_text(text)
            foreign.append(folder / name)
        copy = folder / "iter=copy"
        copy.mkdir()
        for name in ("manifest.json", "part-000.parquet", "mine.parquet"):
            (copy / name).write_text("{}")
            foreign.append(copy / name)
        remains.append(folder / ".iter=00003.0123abcd.tmp")
        remains[-1].mkdir()
        (remains[-1] / "model.safetensors").write_bytes(b"half")
    inside = outputs / "trajectories" / "iter=00001"
    (inside / "mine.parquet").write_text("no parquet")
    (inside / ".part-000.parquet.0123abcd.tmp").write_bytes(b"half")
    unsealed = models / "checkpoints" / "iter=00003"
    unsealed.mkdir()
    (unsealed / "model.safetensors").write_bytes(b"half")
    return [*foreign, inside / "mine.parquet"], [*remains, inside / ".part-000.parquet.0123abcd.tmp"]


def test_a_run_goes_on_beside_foreign_files(finished_run, clone, tmp_path):
    other = finished_run.clone(tmp_path / "other")
    other.run(params=LONGER)
    foreign, remains = litter(clone.folder("07_model_output"), clone.folder("06_models"))
    clone.run(params=LONGER)
    assert all(path.is_file() for path in foreign)
    assert not any(path.exists() for path in remains)
    for path in foreign:
        path.unlink()
    assert_same_run(read_run(other.root), read_run(clone.root))
    clone.run("update_sokoban")
    clone.run("check_sokoban", params={**LONGER, "check_sokoban": {"timed": False}})


def test_a_control_reads_its_run_beside_foreign_files(clone):
    litter(clone.folder("07_model_output"), clone.folder("06_models"))
    clone.run("control_sokoban", params={"control_sokoban": {"share": 0.1}})
    assert clone.load("control_sokoban.eval_summary")["policies"] == ["control_teacher"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics/iter=00001.json", '{"iteration": 1, "rollout/'),
        ("metrics/iter=00001.json", "[1, 2]"),
        ("trajectories/iter=00001/part-000.parquet", "PAR1 torn"),
        ("eval_trajectories/iter=00001/part-000.parquet", ""),
    ],
)
def test_torn_rows_stop_a_continued_run_before_any_work(finished_run, clone, name, content):
    path = clone.folder("07_model_output") / name
    before = path.read_bytes()
    path.unlink()
    path.write_text(content)
    stamps = clone.stamps()
    with pytest.raises(CorruptFolderError) as error:
        clone.run(params=LONGER)
    assert str(path) in str(error.value)
    assert "estore" in str(error.value)
    assert clone.stamps() == stamps
    path.write_bytes(before)
    clone.run(params=LONGER, to_nodes=["train_sokoban.train_grpo"])
    assert len(clone.load("train_sokoban.metrics")) == 4


ENGINE = '''
"""A rollout whose engine dies while a file is there."""
from pathlib import Path
from geo_sokoban_pipeline.rollout.rollout import rollout as play

def rollout(engine, policy, tasks, settings, progress=None):
    if settings.iteration == 1 and Path(__file__).with_name("dead").exists():
        engine.poll = die
    return play(engine, policy, tasks, settings, progress)

def die():
    raise ConnectionError("the engine is gone")
'''


def test_an_engine_that_raises_costs_its_iteration_only(project, tmp_path):
    file = tmp_path / "rollout.py"
    file.write_text(ENGINE)
    parameters = {"train_sokoban": {"rollout": {"function": str(file)}, "loop": {"iterations": 2, "eval_interval": 0}}}
    project.run(params={**parameters, "run_id": "calm"})
    (tmp_path / "dead").touch()
    with pytest.raises(ConnectionError, match="the engine is gone"):
        project.run(params=parameters)
    assert project.load("train_sokoban.resume_state")["iteration"] == 0
    (tmp_path / "dead").unlink()
    project.run(params=parameters)
    calm, stormy = read_run(project.root, run_id="calm"), read_run(project.root)
    assert_same_run(calm, stormy)
