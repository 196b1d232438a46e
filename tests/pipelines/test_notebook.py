"""The notebooks run from top to bottom on a finished run; Kedro's own ways into a notebook work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebook_runner import execute, execute_here
from runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]


# That of the ten questions has one run here; test_questions.py executes it on two.
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
FIRST = NOTEBOOKS[0]


def environment_of(project: Any) -> dict[str, str]:
    return {"GEO_SOKOBAN_ENV": "test", "GEO_SOKOBAN_DATA_ROOT": str(project.root)}


@pytest.mark.parametrize("name", NOTEBOOKS[1:])
def test_notebook_runs(name: str, stored_run: Any) -> None:
    """In this process, which has the libraries: a kernel of its own imports them for ten seconds."""
    project = stored_run("geo3k" if "geo3k" in name else "sokoban")
    if name.startswith("05"):
        project.run("score_sokoban", params={"score_sokoban": {"limit": 8, "occlusion": 2}})
    execute_here(ROOT / "notebooks" / name, environment_of(project))


def test_the_notebook_of_problems_runs_on_the_task_with_the_tool(stored_run: Any) -> None:
    path, change = ROOT / "notebooks" / "03_geo3k_grading.ipynb", ('TASK = "geo3k"', 'TASK = "geo3k_multi_turn"')
    assert change[0] in path.read_text(encoding="utf-8").replace('\\"', '"')
    execute_here(path, environment_of(stored_run("geo3k_multi_turn")), change)


KEDRO = """\
%load_ext kedro.ipython
%reload_kedro --env=test --params=run_id=1.10,sokoban.inner_walls=[0;2],runs=[a,007]
assert context.params["run_id"] == "1.10"
assert context.params["sokoban"]["inner_walls"] == [0, 2] and context.params["runs"] == ["a", "007"]
assert "/1.10/" in str(catalog["train_sokoban.metrics"])
%reload_kedro --env=test
assert len(catalog.load("train_sokoban.metrics")) == 3 and "train_sokoban" in pipelines
session.run(pipeline_names=["train_sokoban"], from_nodes=["train_sokoban.write_report"])
"""


def test_a_kernel_runs_the_first_notebook_and_the_extension_of_kedro(clone: Any) -> None:
    """The extension opens a run and goes on with it."""
    path = ROOT / "notebooks" / FIRST
    few = {"player": "random_legal", "limit": 8, "continuations": 6, "first_continuations": 3}
    clone.run("fork_sokoban", params={"fork_sokoban": few})
    notebook = nbformat.read(path, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(line) for line in KEDRO.splitlines()]
    report = clone.folder("08_reporting") / "report.html"
    report.unlink()
    execute(notebook, path.parent, environment_of(clone))
    assert report.is_file()
    (cell,) = (cell for cell in notebook.cells if cell.id == "where-lost-code")
    assert "flagged" in cell.outputs[-1].data["text/plain"]


def test_kedro_starts_jupyter_and_ipython(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "JUPYTER_DATA_DIR": str(tmp_path)}

    def kedro(*words: str) -> str:
        command = [sys.executable, "-m", "kedro", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "train_sokoban" in kedro("ipython", "--env=test", "-c", "print(*pipelines)")
    kedro("jupyter", "lab", "--version")
    assert list(tmp_path.glob("kernels/kedro_*/kernel.json"))
