"""Equal seeds give equal levels, prompts and first iterations in processes that hash strings differently."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runs import assert_same_run, finish, kedro_command, read_run

pytestmark = pytest.mark.slow

LEVEL_FILES = ("01_raw/sokoban/*/raw_levels.parquet", "05_model_input/sokoban/*/prompts.parquet")


def test_two_processes_with_other_hash_seeds(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("one", "two")]
    words = ("--pipelines=train_sokoban", "--params=train_sokoban.loop.iterations=1")
    for salt, root in enumerate(roots, start=1):
        finish(kedro_command(*words, data_root=root, PYTHONHASHSEED=str(salt)))
    for name in LEVEL_FILES:
        (one,), (other,) = (root.glob(name) for root in roots)
        assert one.relative_to(roots[0]) == other.relative_to(roots[1])
        assert pq.ParquetFile(one).read().equals(pq.ParquetFile(other).read()), name
    assert_same_run(read_run(roots[0]), read_run(roots[1]))
