"""Runs all cells of a notebook: in a fresh kernel, as a person would who opens it, or in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat


def execute_here(path: Path, env: dict[str, str], change: tuple[str, str] = ("", "")) -> None:
    """Run all code cells of a notebook in this process, with its folder as the working directory.

    Args:
        change: what stands in the cells, and what a reader puts in its place.

    Raises:
        Exception: the one that a cell raised; its traceback is printed.
    """
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell(user_ns={})
    before = Path.cwd()
    with mock.patch.dict(os.environ, env):
        os.chdir(path.parent)
        try:
            for cell in nbformat.read(path, as_version=4).cells:
                if cell.cell_type == "code":
                    shell.run_cell(cell.source.replace(*change)).raise_error()
        finally:
            os.chdir(before)


def execute(notebook: Any, folder: Path, env: dict[str, str]) -> None:
    """Run all cells of a notebook in a folder."""
    from nbclient import NotebookClient

    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    # The kernel inherits the environment of the process that starts it.
    with mock.patch.dict(os.environ, env):
        client.execute()
