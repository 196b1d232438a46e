"""The browser of episodes: building a site of 10,000 episodes, opening one of 100,000.

Run with `pytest benchmarks/test_browser.py -s`; opening needs a Chromium. Episodes are drawn at random: five turns with
a board of 96 pixels, 40 sampled tokens, groups of 8. A time of opening is from the address to what a reader sees: the
list with its first rows, or the episode with its tokens; least of three, in a new document each.
`BENCH_DOCS=1` writes the figures into docs/benchmarks.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from benchmarks.records import keep

from builders import CONTEXT, make_trajectories
from chromium import Page, open_page
from geo_sokoban_pipeline.reporting.viewer.site import write_site
from geo_sokoban_pipeline.reporting.viewer.sources import BrowsedRun, open_run
from geo_sokoban_pipeline.trajectories.parquet import name_parts, write_trajectories

PER_ITERATION, ITERATIONS = 256, 40
BUILDING, LIST, EPISODE = 120.0, 2.0, 1.0  # thresholds, seconds
PREFIX = "train_sokoban/i"


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """The figures of all tests here, kept when the last one has ended."""
    collected: dict[str, Any] = {}
    yield collected
    if {"building", "list", "episode"} <= set(collected):
        keep("browser", collected)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> BrowsedRun:
    """A run of 10,240 episodes."""
    outputs = tmp_path_factory.mktemp("data") / "07_model_output" / "train_sokoban" / "default"
    for iteration in range(ITERATIONS):
        episodes = make_trajectories(
            PER_ITERATION, 5, iteration=iteration, group_size=8, distinct_images=2000, seed=iteration
        )
        for name, table in name_parts(iteration, episodes, CONTEXT).items():
            write_trajectories(outputs / "trajectories" / f"{name}.parquet", table)
    return open_run(outputs)


@pytest.fixture(scope="module")
def large(stored: BrowsedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of 100,000 episodes, ten times those of the run under other iterations; a tenth has pages."""
    parts = []
    for copy in range(10):
        index = stored.index.slice(0, 10_000)
        iteration = index["iteration"].to_numpy() + copy * ITERATIONS
        rows = zip(iteration.tolist(), index["group_index"].to_pylist(), index["sample_index"].to_pylist(), strict=True)
        changed = {
            "iteration": iteration,
            "policy_version": iteration,
            "trajectory_id": [f"{PREFIX}{i:05d}/g{g:03d}/s{s:02d}" for i, g, s in rows],
        }
        changed["reward"] = np.random.default_rng(copy).normal(size=10_000)
        for name, values in changed.items():
            place = index.schema.get_field_index(name)
            index = index.set_column(place, index.schema.field(name), pa.array(values, index.schema.field(name).type))
        parts.append(index)
    site = tmp_path_factory.mktemp("large")
    write_site(site, [BrowsedRun(stored.name, pa.concat_tables(parts), stored.folder)], pages=10_000)
    return site


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_page() as found:
        found.look(1300)
        yield found


def test_building_a_site_of_10_000_episodes(stored: BrowsedRun, tmp_path: Path, found: dict[str, Any]) -> None:
    began = time.perf_counter()
    counts = write_site(tmp_path, [stored])
    seconds = time.perf_counter() - began
    run = {name: size_of(stored.folder / name) for name in ("trajectories", "episodes")}
    found["building"] = {**counts, "seconds": seconds, "site_mb": size_of(tmp_path), "run_mb": run}
    assert seconds < BUILDING


def size_of(folder: Path) -> float:
    """Megabytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def test_opening_the_list_of_100_000_episodes(large: Path, page: Page, found: dict[str, Any]) -> None:
    seconds = least_seconds(page, large, "", "document.querySelectorAll('#rows .row').length > 10")
    assert page.text(".summary").startswith("100,000 episodes")
    began = time.perf_counter()
    page.follow("#/list?q=reward>1 tag:out_of_turns split:train&sort=-reward")
    page.wait("!document.querySelector('.summary').innerText.startsWith('100,000 episodes')")
    asked = time.perf_counter() - began
    size = size_of(large / "data" / "list")
    found["list"] = {"episodes": 100_000, "seconds": seconds, "mb": size, "query_seconds": asked}
    assert seconds < LIST


def test_opening_an_episode(large: Path, page: Page, found: dict[str, Any]) -> None:
    """In the list that is open; and by its address, where the list is read first."""
    page.open(f"file://{large}/index.html")
    page.wait("document.documentElement.dataset.ready")
    shown = page.run("Array.from({length: rows}, (_, row) => row).filter(row => cell('chunk', row) >= 0).slice(-3)")
    links = [page.run(f"episodeLink({row})") for row in shown]
    times = []
    for link in links:
        began = time.perf_counter()
        page.follow(link)
        page.wait(f"location.hash === {json.dumps(link)} && document.querySelectorAll('.tok.made').length === 40")
        times.append(time.perf_counter() - began)
        page.follow("#/list")
        page.wait("document.querySelector('#rows') !== null")
    whole = least_seconds(page, large, links[0], "document.querySelectorAll('.tok.made').length === 40")
    found["episode"] = {"seconds": min(times), "by_address_seconds": whole}
    assert min(times) < EPISODE


def least_seconds(page: Page, site: Path, route: str, shown: str) -> float:
    times = []
    for _ in range(3):
        page.open("about:blank")
        began = time.perf_counter()
        page.open(f"file://{site}/index.html{route}")
        page.wait(shown)
        times.append(time.perf_counter() - began)
    assert not page.errors
    return min(times)
