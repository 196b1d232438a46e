"""Gold: a few runs hold every pair of settings; digests leave out what depends on the clock, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks import gold


def test_few_runs_hold_each_pair_that_any_run_holds():
    combinations = gold.list_combinations()
    chosen = gold.choose_pairwise(combinations)
    assert len(chosen) <= 12 and all(one in combinations for one in chosen)
    assert set().union(*map(gold.pairs_of, chosen)) == set().union(*map(gold.pairs_of, combinations))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files as a run stores them, in small."""
    episodes = tmp_path / "05_model_input" / "trajectories" / "part-000.parquet"
    episodes.parent.mkdir(parents=True)
    pq.write_table(pa.table({"token_ids": [[1, 2]], "timings": [0.5]}), episodes)
    for name, values in {
        "metrics/iter=00000.json": {"loss": 1, "perf/step_time": 2},
        "eval_summary.json": {"n": 3},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def rewrite(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(change((root / name).read_text()))


def change_column(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "05_model_input" / "trajectories" / "part-000.parquet"
        table = pq.read_table(path)
        place = table.schema.names.index(name)
        value = {"token_ids": [[1, 3]], "timings": [0.7]}[name]
        pq.write_table(table.set_column(place, name, pa.array(value, table.schema.field(name).type)), path)

    return change


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (change_column("timings"), []),
        (rewrite("metrics/iter=00000.json", lambda text: text.replace('time": 2', 'time": 5')), []),
        (change_column("token_ids"), ["05_model_input/trajectories/part-000.parquet:token_ids"]),
        (rewrite("metrics/iter=00000.json", lambda text: text.replace("1", "4")), ["metrics/iter=00000.json"]),
        (rewrite("eval_summary.json", lambda text: text.replace("3", "4")), ["eval_summary.json"]),
        (rewrite("model.safetensors", lambda text: text + "!"), ["model.safetensors"]),
    ],
)
def test_what_does_not_depend_on_the_clock_is_compared(
    root: Path, change: Callable[[Path], None], differing: list[str]
):
    before = {"runs": {"one": dict(gold.digest_files(root))}}
    change(root)
    after = {"runs": {"one": dict(gold.digest_files(root))}}
    assert list(gold.compare(before, after)) == [f"one: {place}" for place in differing]


def test_a_run_that_the_other_record_lacks_is_a_difference():
    run = {"model.safetensors": "a"}
    assert list(gold.compare({"runs": {"one": run}}, {"runs": {"one": run, "two": run}})) == ["two: not recorded"]
