"""Ten times the rows take no more memory: images pass through, none stays.

The images are noise, so that the rows are as large as they look; kept in any form, those of the larger file would
take twice what is allowed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from problem_rows import drawing, image_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from Linux's /proc"),
]

ROOT = Path(__file__).parents[2]
FEW, MANY, ALLOWED = 100, 1000, 45_000_000
SCRIPT = """
import re, sys
from pathlib import Path
from problem_rows import ALL
from task_tables import run_data
for name in sys.argv[1:]:
    file = {"path": name, "validation_path": None, "eval_path": None}
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    options = {"source": "file", "file": file, "counts": ALL, "instruction": "boxed"}
    run_data(Path(name).with_suffix(""), options, "geo3k")
    print(1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


def write_noise(path: Path, count: int) -> None:
    """A file in row groups of 100, as `datasets` writes rows with images; equal images are stored anew."""
    noise = [image_file(drawing(number, (200, 150))) for number in range(10)]
    rows = [{"images": [noise[i % 10]], "problem": f"<image>Find {i}.", "answer": str(i)} for i in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100, use_dictionary=False)
    assert path.stat().st_size > 90_000 * count


def test_memory_does_not_grow_with_the_rows(tmp_path):
    paths = [str(ROOT / name) for name in ("src", "tests")]
    # The first file is for what a first run imports and keeps.
    files = [tmp_path / f"{number}.parquet" for number in range(3)]
    for file, count in zip(files, (FEW, FEW, MANY), strict=True):
        write_noise(file, count)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, files)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    _, few, many = map(int, done.stdout.split())
    assert many <= few + ALLOWED, f"{few / 1e6:.0f} MB for {FEW} rows, {many / 1e6:.0f} MB for {MANY}"
