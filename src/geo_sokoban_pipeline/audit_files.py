"""Audit of a run's files: only formats from an allow-list, each one opened by its own reader.

Every format listed here is data: none can carry code that runs when the file is opened.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path


def _read_parquet(path: Path) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for _ in file.iter_batches(batch_size=256):
            pass


def _read_safetensors(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        file.keys()


def _read_image(path: Path) -> None:
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as image:
        image.load()


def _read_text(path: Path) -> None:
    path.read_text(encoding="utf-8")


def _read_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _read_json_lines(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            json.loads(line)


def _read_database(path: Path) -> None:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        connection.close()


def _read_yaml(path: Path) -> None:
    import yaml

    yaml.safe_load(path.read_text(encoding="utf-8"))


READERS: dict[str, Callable[[Path], None]] = {
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".png": _read_image,
    ".db": _read_database,
    ".yml": _read_yaml,
    ".yaml": _read_yaml,
    **dict.fromkeys((".html", ".txt", ".jinja", ".md", ".csv", ".svg", ".xsb", ".log", ".lock"), _read_text),
}
UNSUFFIXED = frozenset({".gitkeep"})


def audit_files(folder: Path) -> list[str]:
    """Findings on the files below a folder, sorted by path; an empty list is a clean folder.

    Args:
        folder: of a run, or of all data; hidden files and temporary names are audited too.

    Returns:
        One line per file whose suffix is not in the allow-list, or that its format's reader refuses, with the reason.
    """
    findings = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in UNSUFFIXED):
        reason = _refusal(path)
        if reason is not None:
            findings.append(f"{path.relative_to(folder).as_posix()}: {reason}")
    return findings


def _refusal(path: Path) -> str | None:
    reader = READERS.get(path.suffix)
    if reader is None:
        return f"suffix {path.suffix!r} is not in the allow-list"
    try:
        reader(path)
    except Exception as error:  # noqa: BLE001 - each reader has its own error types; every one is a finding
        return f"its format's reader refuses it ({type(error).__name__}: {error})"
    return None
