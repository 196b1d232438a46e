"""Queries over an index of 1,000,000 episodes, in the files of a run.

Run with `pytest benchmarks/test_index.py -s`. Rows are drawn at random; iterations have 1,000 and 256 episodes. Past
iterations lie in blocks, the newest 64 in a file each. A query takes the shares of solved and of oscillating episodes
by iteration. Times are seconds of the clock, least of five. Threshold: under 1 s.
`BENCH_DOCS=1` writes the figures into docs/benchmarks.md.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.records import keep

from geo_sokoban_pipeline.trajectories.index import BLOCK, INDEX_SCHEMA, index_folder

EPISODES, THRESHOLD, ROUNDS = 1_000_000, 1.0, 5
SIZES = (1000, 256)  # episodes of an iteration


def draw_rows(count: int, first: int, size: int) -> pa.Table:
    """Rows of the iterations from `first` on, of `size` episodes each."""
    generator = np.random.default_rng(first)
    made: dict[str, Any] = {
        "iteration": first + np.arange(count) // size,
        "split": ["train"] * count,
        "success": generator.random(count) < 0.5,
        "tags": [["deadlock", "oscillation"][: int(number)] for number in generator.integers(0, 3, count)],
    }
    texts = [f"{number:032x}" for number in generator.integers(0, 1 << 60, count).tolist()]
    for field in INDEX_SCHEMA:
        if field.name not in made:
            numbers = generator.random(count) * 1000
            kind = field.type.to_pandas_dtype()
            made[field.name] = texts if pa.types.is_string(field.type) else numbers.astype(kind)
    made["tag_counts"] = [[1] * len(tags) for tags in made["tags"]]
    return pa.table([pa.array(made[field.name], field.type) for field in INDEX_SCHEMA], schema=INDEX_SCHEMA)


def make_index(outputs: Path, size: int) -> None:
    """Index files of a run of iterations of this size, as the run leaves them."""
    folder, iterations = index_folder(outputs / "trajectories"), -(-EPISODES // size)
    whole = (iterations - 1) // BLOCK * BLOCK
    folder.mkdir(parents=True)
    for first in range(0, whole, BLOCK):
        pq.write_table(draw_rows(BLOCK * size, first, size), folder / f"block-{first:05d}.parquet", compression="none")
    for iteration in range(whole, iterations):
        path = folder / f"iter={iteration:05d}" / "part-000.parquet"
        path.parent.mkdir()
        pq.write_table(draw_rows(size, iteration, size), path, compression="none")


def ask_duckdb(outputs: Path) -> int:
    shares = duckdb.sql(
        "SELECT iteration, avg(success::int), avg(list_contains(tags, 'oscillation')::int) FROM "
        f"read_parquet('{outputs}/episodes/**/*.parquet') WHERE split = 'train' GROUP BY 1 ORDER BY 1"
    )
    return len(shares.fetchall()) if shares is not None else 0


def ask_polars(outputs: Path) -> int:
    rows = pl.scan_parquet(outputs / "episodes", hive_partitioning=False).filter(pl.col("split") == "train")
    shares = pl.col("success").mean(), pl.col("tags").list.contains("oscillation").mean()
    return len(rows.group_by("iteration").agg(*shares).sort("iteration").collect())


def least_seconds(ask: Callable[[Path], int], outputs: Path) -> float:
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        assert ask(outputs) >= 1000  # iterations
        found.append(time.perf_counter() - began)
    return min(found)


def test_queries_over_a_million_episodes(tmp_path: Path) -> None:
    found: dict[str, Any] = {"episodes": EPISODES, "mb": 0.0, "iterations": []}
    for size in SIZES:
        make_index(tmp_path, size)
        files = list(tmp_path.rglob("*.parquet"))
        seconds = {ask.__name__.removeprefix("ask_"): least_seconds(ask, tmp_path) for ask in (ask_duckdb, ask_polars)}
        found["mb"] = max(found["mb"], sum(path.stat().st_size for path in files) / 1e6)
        found["iterations"].append({"size": size, "files": len(files), "seconds": seconds})
        shutil.rmtree(tmp_path)
    keep("index", found)
    assert max(max(one["seconds"].values()) for one in found["iterations"]) < THRESHOLD
