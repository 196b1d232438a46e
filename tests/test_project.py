"""The project as a whole: it starts fast, its commands work, its files agree with each other."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
HEAVY = (
    "datasets",
    "gymnasium",
    "huggingface_hub",
    "matplotlib",
    "mlflow",
    "numpy",
    "pandas",
    "PIL",
    "plotly",
    "pyarrow",
    "ray",
)
HEAVY += ("sglang", "sympy", "torch", "transformers")

REGISTRY = f"""
import json, sys, time
import kedro.pipeline, kedro.framework.session
start = time.process_time()
import geo_sokoban_pipeline.settings
from geo_sokoban_pipeline.pipeline_registry import register_pipelines
names = list(register_pipelines())
seconds = time.process_time() - start
print(json.dumps([names, seconds, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_registry_is_light_and_fast():
    """Seconds of the processor, the least of three at most: what else the machine does must not decide."""
    for _ in range(3):
        done = run(sys.executable, "-c", REGISTRY)
        assert done.returncode == 0, done.stderr
        names, seconds, heavy = json.loads(done.stdout)
        assert "__default__" in names and heavy == []
        if seconds < 1:
            return
    pytest.fail("each of three took a second")


def test_kedro_lists_the_pipelines_and_logs_plain_lines_where_nobody_looks():
    done = run(sys.executable, "-m", "kedro", "registry", "list")
    assert done.returncode == 0, done.stderr
    kinds = ("data", "train", "evaluate", "rollout", "update")
    assert {"- __default__", *(f"- {kind}_sokoban" for kind in kinds)} <= set(done.stdout.splitlines())
    assert "\x1b" not in done.stdout + done.stderr
    script = "import kedro.framework.project as p, logging; p.LOGGING; logging.getLogger(p.__name__).warning('here')"
    done = run(sys.executable, "-c", script)
    assert re.search(r"^\d\d:\d\d:\d\d WARNING +kedro\.framework\.project: here$", done.stderr, flags=re.MULTILINE)


def test_every_requirement_is_pinned_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {re.sub(r"[._]", "-", name.lower()): version for name, version in (line.split("==") for line in lines)}
    extras = project["optional-dependencies"]
    words = project["dependencies"] + [line for lines in extras.values() for line in lines]
    for requirement in map(Requirement, words):
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pins[requirement.name]), requirement
    assert "+" not in pins["torch"]  # a local suffix would tie the project to one index


# Import names that differ from those of the packages.
MODULES = {
    "ipython": "IPython",
    "megatron-core": "megatron",
    "mkdocs-material": "mkdocs",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
# Modules of environments of their own, whose packages are in `requirements`.
ELSEWHERE = {"trl", "accelerate", "openenv", "uvicorn"}
# Tools that nothing imports, each with a file and what in it needs the tool.
TOOLS = {
    "ibis-framework": ("conf/base/catalog/07_model_output.yml", "ibis.FileDataset"),
    "kedro-viz": ("README.md", "kedro viz run"),
    "ipykernel": ("notebooks/01_explore_trajectories.ipynb", '"kernelspec"'),
    "jupyterlab": ("README.md", "jupyter lab"),
    "import-linter": ("Makefile", "lint-imports"),
    "minigrid": ("docs/examples/minigrid/conf/base/parameters/minigrid.yml", "imports: [minigrid]"),
    "mypy": ("Makefile", "-m mypy"),
    "pre-commit": (".pre-commit-config.yaml", "repos:"),
    "pytest-xdist": ("Makefile", "--dist loadgroup"),
    "ruff": ("Makefile", "-m ruff"),
}


@cache
def imports_in(path: Path) -> set[str]:
    """First names of the modules that a Python file or notebook imports."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        text = re.sub(r"^[%!].*", "", code, flags=re.MULTILINE)
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def imports_of(*folders: str) -> set[str]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return set().union(*(imports_in(path) for path in paths if path.suffix in (".py", ".ipynb")))


def modules_of(*groups: str) -> set[str]:
    """Import names of the packages in these groups of requirements; `dependencies` is one of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    names = {Requirement(line).name for group in groups for line in lists[group]} - {project["name"]}
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def foreign(modules: set[str]) -> set[str]:
    """Those modules that neither Python nor the package is."""
    return modules - set(sys.stdlib_module_names) - {"geo_sokoban_pipeline"}


def test_every_requirement_is_used():
    for tool, (path, words) in TOOLS.items():
        assert words in (ROOT / path).read_text(encoding="utf-8"), f"{path} does not need {tool}"
    tools = {name.replace("-", "_") for name in TOOLS}
    assert modules_of("dependencies") <= imports_of("src")
    extras = modules_of("viz", "notebooks", "dev", "gym", "wandb", "inspect", "megatron", "ray")
    assert extras - tools <= imports_of("src", "tests", "benchmarks", "notebooks")


def test_everything_imported_is_required():
    own_extras = modules_of("gym", "ray", "wandb", "megatron") | {"IPython"}  # the latter inside a notebook alone
    assert foreign(imports_of("src")) <= modules_of("dependencies") | own_extras
    others = foreign(imports_of("tests", "benchmarks", "notebooks", "scripts", "docs"))
    folders = ("", "tests", "benchmarks", "scripts", "scripts/gpu_check", "scripts/sglang_cpu")
    own = {path.stem for folder in folders for path in (ROOT / folder).iterdir()}
    known = modules_of(
        "dependencies", "viz", "notebooks", "dev", "gym", "wandb", "inspect", "reasoning", "megatron", "ray"
    )
    assert others - own - ELSEWHERE <= known


def test_what_the_notebooks_import_comes_with_their_extra():
    assert foreign(imports_of("notebooks")) <= modules_of("dependencies", "notebooks")


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("sglang-cpu", {"sglang==0.5.21", "torch==2.13.0", "transformers==5.12.1"}),
        ("openenv", {"openenv==0.10.0", "fastapi==0.165.0", "uvicorn==0.54.0"}),
    ],
)
def test_environments_of_servers_are_pinned_wholly(name, pins):
    lines = [line for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines() if line[:1] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert pins <= set(lines)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "run",
            [
                "train_sokoban '--params=run_id=seed2,tracking.experiment=it'\\''s'",
                "08_reporting/train_sokoban/seed2/report.html",
            ],
        ),
        ("run-geo3k", ["kedro run --pipelines=train_geo3k '", "08_reporting/train_geo3k/seed2/report.html"]),
        (
            "run-geo3k-multi-turn",
            ["kedro run --pipelines=train_geo3k_multi_turn '", "08_reporting/train_geo3k_multi_turn/seed2/report.html"],
        ),
        ("test", ["ruff format --check", "ruff check", "mypy", "lint-imports", "-m pytest"]),
        ("test-fast", ['-m pytest -m "not slow"']),
        (
            "sglang-env",
            ["--no-deps -r requirements/sglang-cpu.txt", "scripts/sglang_cpu", "forked_processes", "sglang_cpu.pth"],
        ),
        ("openenv-env", ["--no-deps -r requirements/openenv.txt"]),
        ("chromium", ["tests/chromium.py", "apt-get", "chromium-headless-shell"]),
        ("clean-data", ["runs --data-root data remove --all"]),
    ],
)
def test_make_targets(target, words):
    done = run("make", "--dry-run", "--always-make", target, "RUN_ID=seed2", "PARAMS=tracking.experiment=it's")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


@pytest.mark.parametrize(
    ("version", "said", "goes_on"),
    [
        (None, "there is no such program; install Python 3.11, or name it: make run PYTHON=", False),
        ("3.9", "this is Python 3.9, too old; install Python 3.11, or name it: make run PYTHON=", False),
        ("3.13", "this is Python 3.13, but 3.11 alone is tested; if the installation fails, install", True),
        ("3.11", "", True),
    ],
)
def test_make_says_in_one_line_which_python_it_needs(tmp_path, version, said, goes_on):
    """The interpreter only tells its version, and fails to make an environment."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    if version is not None:
        program = tmp_path / "python"
        minor = version.split(".")[1]
        program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {minor} || {{ echo venv wanted; exit 1; }}\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["make", "run", f"PYTHON={tmp_path}/python"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and ("venv wanted" in done.stdout) == goes_on
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert lines == [line for line in lines if line.startswith(f"PYTHON={tmp_path}/python: {said}")]
    assert len(lines) == bool(said)


def test_make_takes_torch_from_the_given_index():
    index = "https://download.pytorch.org/whl/cu129"
    plain, cuda = (
        run("make", "--dry-run", "--always-make", "install", *words).stdout for words in ([], [f"TORCH_INDEX={index}"])
    )
    assert "--no-index torch" in plain
    assert "whl/cpu torch" in plain
    assert f"--index-url {index} torch" in cuda
    assert "whl/cpu" not in cuda
