"""What an audit without a model takes of 10,000 episodes: seconds and memory of the whole command.

Run with `pytest benchmarks/test_audit.py -s`, three minutes. Four iterations of the default run are stored, after a
short warm start, and repeated under further iterations and ids until there are 10,240 episodes; then
`kedro run --pipelines=audit_sokoban --params=audit.versions=0` checks them. Thresholds, with the start of the command:
60 seconds of one core, which on an idle machine are those of the clock, and 1 GiB.
`BENCH_DOCS=1` writes the figures into docs/benchmarks.md.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import keep
from benchmarks.runs import measure_python, repeat_iterations, run_training

from geo_sokoban_pipeline.runs.storage import read_json

ITERATIONS, EPISODES = 4, 10_000
SECONDS, GIB = 60.0, 1.0


def test_an_audit_without_a_model(tmp_path: Path) -> None:
    run_training(
        tmp_path,
        "default",
        {"warm_start": {"steps": 240}, "loop": {"iterations": ITERATIONS, "eval_interval": 0}},
    )
    root = tmp_path / "data"
    folder = root / "07_model_output/train_sokoban/default/trajectories"
    episodes = repeat_iterations(folder, ITERATIONS, EPISODES)
    words = ("--pipelines=audit_sokoban", "--params=audit.versions=0")
    _, usage = measure_python("-m", "kedro", "run", *words, data_root=root)
    seconds, gib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20
    audit = read_json(root / "08_reporting/audit_sokoban/default/audit.json")
    found = {"episodes": episodes, "cpu_seconds": seconds, "gib": gib}
    assert audit["findings"] == 0
    assert seconds < SECONDS
    assert gib < GIB
    keep("audit", found)
