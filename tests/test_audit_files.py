"""The audit of a run's files: allowed formats that open pass, everything else is a finding."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from builders import CONTEXT, make_png, make_trajectories
from geo_sokoban_pipeline.evaluation.audit import audit_files
from geo_sokoban_pipeline.trajectories.parquet import write_trajectories
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    from safetensors.numpy import save_file

    write_trajectories(
        tmp_path / "iter=00000" / "part-000.parquet", trajectories_to_table(make_trajectories(2), CONTEXT)
    )
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "board.png").write_bytes(make_png(96, 0))
    texts = {
        "metrics.json": "{}",
        "log.jsonl": "{}\n\n[]\n",
        "report.html": "<p>√</p>",
        "chat_template.jinja": "{{ x }}",
        "conf.yml": "a: 1",
        ".gitkeep": "",
        **{f"a.{suffix}": "√" for suffix in ("txt", "md", "csv", "svg", "xsb", "log", "lock")},
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("create table t (a)")
    connection.close()
    return tmp_path


def test_a_clean_run_has_no_findings(run_folder: Path) -> None:
    assert audit_files(run_folder) == []
    assert audit_files(run_folder / "none") == []


@pytest.mark.parametrize("name", ["state.pt", "weights.bin", "a.pkl", "noext", "x.npz", ".iter=0.ab.tmp"])
def test_other_formats_are_findings(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    (finding,) = audit_files(tmp_path)
    assert finding.startswith(f"{name}: suffix ")


@pytest.mark.parametrize(
    "name",
    ["iter=00000/part-000.parquet", "model.safetensors", "board.png", "metrics.json", "log.jsonl", "mlflow.db"],
)
def test_files_that_do_not_open_are_findings(name: str, run_folder: Path) -> None:
    (run_folder / name).write_bytes(b"\x80\x04K\x01." * 40)
    (finding,) = audit_files(run_folder)
    assert finding.startswith(f"{name}: its format's reader refuses it")
