"""How fast geometry rows become prompts: 2,000 rows of the size of Geometry3K's, from a parquet file to three tables.

Run with `pytest benchmarks/test_geometry_data.py -s`. The rows are the real ones of the sample, each several times with
another question, so every image is decoded and encoded as often as there are rows. Threshold: 60
CPU-seconds for the whole pipeline, which runs in one process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.envs.rows import BadRow, read_rows
from task_tables import run_data

ROOT = Path(__file__).parents[1]
ROWS, THRESHOLD = 2000, 60.0


@pytest.fixture(scope="module")
def real_size_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample = ROOT / os.environ.get("GEO_SOKOBAN_SHARED_DATA", "../shared/data") / "geometry3k_small.parquet"
    if not sample.is_file():
        pytest.skip(f"no real rows at {sample}; set GEO_SOKOBAN_SHARED_DATA")
    real = [row for _, row in read_rows(str(sample)) if not isinstance(row, BadRow)]
    rows = [{**real[i % len(real)], "problem": f"{real[i % len(real)]['problem']} ({i})"} for i in range(ROWS)]
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100, use_dictionary=False)
    return path


@pytest.mark.parametrize(("task", "instruction"), [("geo3k", "question"), ("geo3k_multi_turn", "tool")])
def test_rows_per_second(real_size_rows: Path, tmp_path: Path, task: str, instruction: str) -> None:
    counts = {"train": None, "validation": None, "eval": None}
    source = {"source": "file", "file": {"path": str(real_size_rows)}}
    wall, spent = time.perf_counter(), time.process_time()
    catalog = run_data(tmp_path, {**source, "counts": counts, "instruction": instruction}, task)
    wall, spent = time.perf_counter() - wall, time.process_time() - spent
    assert catalog.load(f"{task}.data_report")["problems"] == ROWS
    megabytes = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet")) / 1e6
    print(
        f"\n{task}: {ROWS} rows ({real_size_rows.stat().st_size / 1e6:.0f} MB) in {wall:.1f} s, {spent:.1f} s of the "
        f"processor, {ROWS / spent:.0f} rows per CPU-second; {megabytes:.0f} MB written"
    )
    assert spent < THRESHOLD
