"""Trajectories, index and exports open with `datasets`, DuckDB and polars where this package cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.config.grpo import ExportPipelineOptions, SourceOptions
from geo_sokoban_pipeline.datasets.iterations import TrajectoriesDataset
from geo_sokoban_pipeline.runs.storage import Thin
from geo_sokoban_pipeline.trajectories.exports import write_export
from geo_sokoban_pipeline.trajectories.index import trajectory_files
from geo_sokoban_pipeline.trajectories.parquet import name_parts

SCRIPT = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "geo_sokoban_pipeline":
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import datasets, duckdb, polars

root, cache = sys.argv[1:]
places = {
    "trajectories": f"{root}/trajectories/*/*.parquet",
    "index": f"{root}/episodes/**/*.parquet",
    **{name: f"{root}/export/{name}/*.parquet" for name in ("tokens", "chat", "pairs")},
}
found = {}
for name, place in places.items():
    in_duckdb = duckdb.sql(f"select count(*), min(task), max(task) from read_parquet('{place}')").fetchall()[0]
    frame = polars.scan_parquet(place, hive_partitioning=False).collect()
    rows = datasets.load_dataset("parquet", data_files=place, split="train", cache_dir=cache)
    seen = None
    if "images" in rows.column_names:  # decoded by the features in the file
        seen = [image.size for image in rows[0]["images"]]
    found[name] = [list(in_duckdb), frame.height, frame["task"].unique().to_list(), rows.num_rows, seen]
for name in ("tokens", "chat", "pairs"):  # by the card of the folder
    found[name].append(datasets.load_dataset(f"{root}/export", name, split="train", cache_dir=cache).num_rows)
assert not [name for name in sys.modules if name.startswith("geo_sokoban")]
print(json.dumps(found))
"""


def opened(root: Path, cache: Path) -> dict[str, list]:
    words = [sys.executable, "-c", SCRIPT, str(root), str(cache)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_others_open_all_of_it(tmp_path: Path) -> None:
    """Also where the tokens of an older iteration were left out."""
    root = tmp_path / "run"
    dataset = TrajectoriesDataset(str(root / "trajectories"), tasks="geo_sokoban_pipeline.tasks.task_or_plain")
    for iteration in range(2):
        dataset.save(name_parts(iteration, make_trajectories(8, iteration=iteration), CONTEXT))
    export = root / "export"
    export.mkdir()
    files = trajectory_files(root / "trajectories")
    options = ExportPipelineOptions(source=SourceOptions(run="train_sokoban"), solved=False)
    counts = write_export(files, export, options, {})
    assert counts.rows == {"tokens": 16, "chat": 16, "pairs": 4}
    dataset.save(Thin(0, 0, tokens=False, episodes=1, images="file"))
    found = opened(root, tmp_path / "cache")
    boards = [[96, 96]] * 3
    assert found == {
        "trajectories": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, boards],
        "index": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, None],
        "tokens": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, boards, 16],
        "chat": [[16, "sokoban", "sokoban"], 16, ["sokoban"], 16, boards, 16],
        "pairs": [[4, "sokoban", "sokoban"], 4, ["sokoban"], 4, boards[:1], 4],
    }
