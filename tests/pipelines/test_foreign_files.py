"""Files that are not ours and remains of killed processes: the first are left alone, the second are taken away."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.runs.storage import CorruptFolderError
from pipelines.conftest import LONGER
from runs import assert_same_run, read_run

pytestmark = pytest.mark.slow

TRAINED = ["train_sokoban.train_grpo"]


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


def test_a_run_goes_on_beside_foreign_files(longer_run, clone):
    foreign, remains = litter(clone.folder("07_model_output"), clone.folder("06_models"))
    clone.run("control_sokoban", to_nodes=["control_sokoban.plan_control"])
    clone.run(params=LONGER)
    assert all(path.is_file() for path in foreign)
    assert not any(path.exists() for path in remains)
    clone.run("update_sokoban")
    clone.run("check_sokoban", params={**LONGER, "check_sokoban": {"timed": False}})
    for path in foreign:
        path.unlink()
    assert_same_run(read_run(longer_run.root), read_run(clone.root))


def test_torn_rows_stop_a_continued_run_before_any_work(clone):
    stamps = clone.stamps()
    for name, content in (
        ("metrics/iter=00001.json", '{"iteration": 1, "rollout/'),
        ("metrics/iter=00001.json", "[1, 2]"),
        ("trajectories/iter=00001/part-000.parquet", "PAR1 torn"),
        ("eval_trajectories/iter=00001/part-000.parquet", ""),
    ):
        path = clone.folder("07_model_output") / name
        before = path.read_bytes()
        path.write_text(content)
        with pytest.raises(CorruptFolderError) as error:
            clone.run(params=LONGER)
        assert str(path) in str(error.value)
        assert "estore" in str(error.value)
        assert clone.stamps() == stamps
        path.write_bytes(before)
    clone.run(params=LONGER, to_nodes=TRAINED)
    assert len(clone.load("train_sokoban.metrics")) == 4


def test_an_engine_that_raises_costs_its_iteration_only(longer_run, clone):
    def die(engine):
        raise ConnectionError("the engine is gone")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConnectionError, match="the engine is gone"):
        patch.setattr(TransformersEngine, "poll", die)
        clone.run(params=LONGER)
    assert clone.load("train_sokoban.resume_state")["iteration"] == 2
    clone.run(params=LONGER, to_nodes=TRAINED)
    whole, mended = read_run(longer_run.root), read_run(clone.root)
    assert whole["metrics"] == mended["metrics"]
    checkpoint = "checkpoints/iter=00003/model.safetensors"
    assert whole["weights"][checkpoint] == mended["weights"][checkpoint]
