"""What the docs say of the benchmarks is what the stored results say."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmarks import records
from benchmarks.planted_faults import render_faults
from benchmarks.records import ROOT, keep, shown_texts

from geo_sokoban_pipeline.reporting.study_docs import read_section

SCALING = {
    "sizes": [64, 1024],
    "seconds": {
        "64": {"rollout": 0.64, "scoring": 0.0, "update": 0.32, "writing": 0.064},
        "1024": {"rollout": 10.24, "scoring": 0.0, "update": 6.144, "writing": 1.024},
    },
    "usual": {"episodes": 256, "seconds": {"rollout": 1.2, "scoring": 0.1, "update": 0.65, "writing": 0.05}},
}


WRITING = {
    "iterations": 40,
    "episodes": 256,
    "processes": 2,
    "seconds": {
        "step_time": 1.9,
        "save_time": 0.1,
        "write_time": 0.05,
        "cpu_time": 3.5,
        "save_cpu_time": 0.5,
        "write_cpu_time": 0.06,
    },
}


BUILDING = {"episodes": 10_000, "pages": 10_000, "images": 5, "seconds": 12.34, "site_mb": 30.4}
CURVE = [[0.1, 0.2, 0.3], [0.2, 0.3, 0.4]]
CURVES = {"fsdp, 1 rank": CURVE, "fsdp, 2 ranks": [CURVE[0], [0.2, 0.3, 0.7]], "megatron": [[0.1, 0.5, 0.6], CURVE[1]]}
NORMS = {name: [[2.0, 2.0, 2.0]] * 2 for name in CURVES} | {"megatron": [[2.0, 2.0002, 2.0]] * 2}
ENGINE = [{"turns": 8, "cached": 200.0, "uncached": 100.0}, {"turns": 30, "cached": 120.0, "uncached": 20.0}]
SHARES = {
    "observing": {"fresh": 0.031, "again": 0.004},
    "environments": {"fresh": 0.101, "again": 0.065},
    "new": {"prompts": 1.0, "boards": 0.984},
}
# What was measured, what the section of the page says of it, and what README does.
MEASURED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "scaling": (
        SCALING,
        [
            "| rollout | 10.00 | 10.00 |",
            "| in all | 16.00 | 17.00 |",
            "costs 1.06 times one of the smallest",
            "Writing takes 2.5 % of the default recipe's iteration of 256 episodes (50 of 2,000 ms).",
            "(commit unknown), Python",
        ],
        "",
    ),
    "writing": (
        WRITING,
        ["50 ms on writing: 2.5 % of its 2.00 s, and 1.5 % of its CPU-seconds"],
        "writing every episode takes 2.5 % of the default run",
    ),
    "browser": (
        {
            "building": {**BUILDING, "run_mb": {"trajectories": 25.0, "episodes": 1.55}},
            "list": {"episodes": 100_000, "seconds": 1.234, "mb": 9.6, "query_seconds": 0.056},
            "episode": {"seconds": 0.0449, "by_address_seconds": 0.345},
        },
        [
            "10,000 episodes with a page each is built in 12.3 s (30 MB; ",
            "25 MB of trajectories, 2.5 kB an episode",
            "100,000 episodes (10 MB) opens in 1.23 s, and a query with an order takes 0.06 s",
            "An episode opens in 0.04 s from the list, in 0.34 s by its address",
        ],
        "",
    ),
    "notebook": (
        {"episodes": 384_000, "gib": 0.567, "seconds": 12.3},
        ["run of 384,000 episodes", "0.57 GiB at most, libraries included, and 12 s."],
        "",
    ),
    "memory": (
        {
            "recipes": [
                {"name": "default", "memory_gb": [[20, 1.6], [60, 1.62], [200, 1.64]]},
                {"name": "from_zero", "memory_gb": [[20, 2.0], [60, 1.9], [200, 1.98]]},
            ]
        },
        [
            "| resident memory, GB, after iteration | 20 | 60 | 200 | growth |",
            "| `default` | 1.60 | 1.62 | 1.64 | +2.5 % |",
            "| `from_zero` | 2.00 | 1.90 | 1.98 | -1.0 % |",
        ],
        "",
    ),
    "engine": (
        {"engine": ENGINE, "episodes": 256, **SHARES},
        [
            "100.0 % of an iteration's prompts and 98.4 % of its boards are new.",
            "takes 3.1 % of a rollout of 256 episodes, environments as a whole 10.1 %;",
            "repeated at once, 0.4 % and 6.5 %.",
        ],
        "2.0× at 8 turns and 6.0× at 30 turns.\n",
    ),
    "plan": (
        {
            "rows": [
                {"command": "a --env=b", "model": "2B", "ranks": 8, "phase": "head", "planned": 9e9, "traced": 1e10}
            ]
        },
        ["| `a --env=b` | 2B | 8 | head | 9.00 | 10.00 | 0.900 |"],
        "",
    ),
    "weights": (
        {
            "bytes": 1.04e9,
            "ranks": 2,
            "seconds": {"tensors": 20.0, "disk": 4.0, "group": 3.0, "before": 5.0},
            "cpu_seconds": {"tensors": [5.0, 15.0], "disk": [3.0, 0.3], "group": [0.7, 0.8], "before": [2.0, 1.0]},
        },
        ["| 1.04 GB from 2 ranks to a server |", "| by a process group, `group` | 3.00 | 0.70 | 0.80 | 0.50 |"],
        "",
    ),
    "backends": (
        {"seeds": [0, 1], "episodes": 128, "curves": CURVES, "norms": NORMS},
        [
            "| fsdp, 1 rank | 0.200, 0.300 | 0.200, 0.300 | – | – | – | – |",
            "| fsdp, 2 ranks | 0.200, 0.400 | 0.200, 0.400 | never, 2 | 0.0500 | 0e+00 | 0e+00 |",
            "| megatron | 0.400, 0.300 | 0.400, 0.300 | 1, never | 0.1000 | 1e-04 | 1e-04 |",
        ],
        "",
    ),
}


def test_docs_show_what_was_measured() -> None:
    for place, text in shown_texts(ROOT).items():
        assert place.read_text(encoding="utf-8") == text, f"{place}: `make bench BENCH_DOCS=1` or its kin write it"
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert all(f"<!-- bench:{name}:begin -->" in page for name in records.RENDERERS)


def test_docs_show_the_planted_faults() -> None:
    page = ROOT / "docs" / "credit.md"
    found = json.loads((ROOT / "docs/results/planted_faults.json").read_text(encoding="utf-8"))
    assert read_section(page.read_text(encoding="utf-8"), "faults", page) == render_faults(found)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("README.md", "docs/benchmarks.md", "docs/results", "docs/img"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def section(project: Path, name: str) -> str:
    page = project / "docs/benchmarks.md"
    return read_section(page.read_text(encoding="utf-8"), f"bench:{name}", page)


@pytest.mark.parametrize("name", MEASURED)
def test_results_are_told(project: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values, told, in_readme = MEASURED[name]
    monkeypatch.setenv("BENCH_DOCS", "1")
    keep(name, values, project)
    assert [text for text in told if text not in section(project, name)] == []
    assert in_readme in (project / "README.md").read_text(encoding="utf-8")


def test_results_are_kept_where_docs_are_asked_for(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [project / name for name in ("docs/benchmarks.md", "docs/results/bench_scaling.json")]
    before = [place.exists() and place.read_bytes() for place in places]
    monkeypatch.delenv("BENCH_DOCS", raising=False)
    keep("scaling", SCALING, project)
    assert [place.exists() and place.read_bytes() for place in places] == before
    monkeypatch.setenv("BENCH_DOCS", "1")
    keep("scaling", SCALING, project)
    kept = json.loads(places[1].read_text(encoding="utf-8"))
    maker = kept.pop("made_with")
    assert kept == SCALING
    assert (maker["commit"], maker["cores"]) == (None, len(os.sched_getaffinity(0)))  # the copy is no checkout
    assert f"Python {maker['python']}, torch {maker['torch']}" in section(project, "scaling")
    assert "<svg" in (project / "docs/img/scaling.svg").read_text(encoding="utf-8")
    keep("backends", MEASURED["backends"][0], project)
    figure = (project / "docs/img/backends.svg").read_text(encoding="utf-8")
    assert "128 episodes" in figure and all(name in figure for name in CURVES)
    keep("engine", {"engine": ENGINE}, project)
    assert "observations" not in section(project, "engine")
