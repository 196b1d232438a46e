"""Gold: a few runs hold every pair of settings; digests leave out what depends on the clock, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks import gold

from geo_sokoban_pipeline.runs.storage import write_json


def test_few_runs_hold_each_pair_that_any_run_holds():
    combinations = gold.list_combinations()
    chosen = gold.choose_pairwise(combinations)
    assert len(chosen) <= 12 and all(one in combinations for one in chosen)
    assert set().union(*map(gold.pairs_of, chosen)) == set().union(*map(gold.pairs_of, combinations))


def store(root: Path, *, tokens=2, seconds=0.5, loss=1, step_time=2, solved=3, weights="a") -> dict[str, str]:
    """Digests of files as a run stores them, in small."""
    (root / "trajectories").mkdir(parents=True)
    pq.write_table(pa.table({"token_ids": [[1, tokens]], "timings": [seconds]}), root / "trajectories/part-000.parquet")
    write_json(root / "metrics/iter=00000.json", {"loss": loss, "perf/step_time": step_time})
    write_json(root / "eval_summary.json", {"n": solved})
    (root / "model.safetensors").write_text(weights)
    return dict(gold.digest_files(root))


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"seconds": 0.7}, []),
        ({"step_time": 5}, []),
        ({"tokens": 3}, ["trajectories/part-000.parquet:token_ids"]),
        ({"loss": 4}, ["metrics/iter=00000.json"]),
        ({"solved": 4}, ["eval_summary.json"]),
        ({"weights": "b"}, ["model.safetensors"]),
    ],
)
def test_what_does_not_depend_on_the_clock_is_compared(tmp_path: Path, change: dict[str, Any], differing: list[str]):
    before, after = store(tmp_path / "before"), store(tmp_path / "after", **change)
    found = gold.compare({"runs": {"one": before}}, {"runs": {"one": after}})
    assert list(found) == [f"one: {place}" for place in differing]


def test_a_run_that_the_other_record_lacks_is_a_difference():
    run = {"model.safetensors": "a"}
    assert list(gold.compare({"runs": {"one": run}}, {"runs": {"one": run, "two": run}})) == ["two: not recorded"]
