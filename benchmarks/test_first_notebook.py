"""What the first notebook takes of a run of 384,000 episodes, the size of the long run: memory of its kernel, seconds.

Run with `pytest benchmarks/test_first_notebook.py -s`. Ten iterations of the default run, after a short warm start, are
repeated under further iterations and ids; the index is made before the notebook opens, as a run makes it. All cells run
in a process of their own; its largest resident size counts, libraries included. Threshold: 1 GiB. `BENCH_DOCS=1` writes
the figures into docs/benchmarks.md.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.records import ROOT, keep
from benchmarks.runs import measure_python, repeat_iterations, run_training

from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.index import read_index

EPISODES, ITERATIONS, GIB = 384_000, 10, 1.0
NOTEBOOK = ROOT / "notebooks" / "01_explore_trajectories.ipynb"
CELLS = """
import sys
from pathlib import Path
from notebook_runner import execute_here
execute_here(Path(sys.argv[1]), {})
"""


def test_memory_of_the_first_notebook(tmp_path: Path) -> None:
    loop = {"iterations": ITERATIONS, "eval_interval": 5}
    run_training(tmp_path, "default", {"warm_start": {"steps": 240}, "loop": loop}, whole=True)
    outputs = tmp_path / "data/07_model_output/train_sokoban/default"
    episodes = repeat_iterations(outputs / "trajectories", ITERATIONS, EPISODES)
    read_index(outputs, task_or_plain)
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]), "MPLBACKEND": "agg"}
    seconds, usage = measure_python(
        "-c", CELLS, str(NOTEBOOK), data_root=tmp_path / "data", is_quiet=True, **environment
    )
    found = {"episodes": episodes, "gib": usage.ru_maxrss / 2**20, "seconds": seconds}
    keep("notebook", found)
    assert found["gib"] < GIB
