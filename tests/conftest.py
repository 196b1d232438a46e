"""Fixtures shared by all tests: real data, the tiny policy, prompt rows, the default options."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from geo_sokoban_pipeline.policies.policy import Policy
    from ray_cluster import RayCluster
    from task_options import TrainOptions

ROOT = Path(__file__).parents[1]
SHARED_SERVERS: set[str] = set()  # addresses
RAY_CLUSTERS: list[RayCluster] = []  # the one that runs


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one `xdist_group` run in one process; a file without that mark is a group.

    So the server of the `sglang` tests and the cluster of the `ranks` tests start once, and ranks do not wait for cores
    that other ranks use. Ranks come first, because they take longest, and of them those of the cluster. The other
    process has groups without slow tests meanwhile. Groups with slow tests follow, those of SGLang and of resumed runs
    first, so that neither process waits long for the other at the end.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
    slow = {group_of(item) for item in items if item.get_closest_marker("slow")}
    of_cluster = {item.path for item in items if may_use_ray(item)}
    items.sort(
        key=lambda item: (
            group_of(item) != "ranks",
            group_of(item) in slow,
            group_of(item) not in ("sglang", "resumed"),
            item.path not in of_cluster,
        )
    )


def group_of(item: pytest.Item) -> str:
    """Name of the tests that run in one process with this one."""
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return str(mark.args[0])


def may_use_ray(item: pytest.Item) -> bool:
    """Whether a test may use the Ray cluster."""
    return item.get_closest_marker("ray") is not None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A Ray cluster ends with the last of its tests: its idle processes take time from the others."""
    if RAY_CLUSTERS:
        items = item.session.items
        if nextitem is None or not any(map(may_use_ray, items[items.index(nextitem) :])):
            RAY_CLUSTERS.pop().close()


@pytest.fixture(scope="module", autouse=True)
def _servers_of_a_file_end_with_it() -> Iterator[None]:
    """Servers that wait for a next engine take memory, 0.6 GB each; that of the session stays."""
    yield
    module = sys.modules.get("geo_sokoban_pipeline.rollout.engines.sglang.servers")
    for server in module.IDLE if module else ():
        if server.url not in SHARED_SERVERS:
            server.end()


@pytest.fixture(scope="session")
def sglang_server(tiny_policy: Policy) -> Iterator[str]:
    """Address of a real SGLang server that serves the tiny policy; every engine gives it its own weights.

    `GEO_SOKOBAN_SGLANG_URL` names one that runs already, so that nobody who works on the client waits for its start.
    """
    from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import IDLE
    from servers import descendants, launch_options, need_environment

    need_environment()
    if running := os.environ.get("GEO_SOKOBAN_SGLANG_URL"):
        yield running
        return
    engine = SglangEngine(tiny_policy, launch_options())
    url = engine.urls[0]
    engine.close()
    SHARED_SERVERS.add(url)
    yield url
    IDLE.end()
    assert descendants() == []


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> RayCluster:
    """A Ray cluster of two nodes for a rank each, and one for the drivers of submitted jobs.

    Ray takes one of the two for a node with four GPUs. A file that has lost a node leaves it to the next one to add
    another. `hidden` is a folder for data roots: the processes of the nodes for ranks see it empty where this system
    allows it.
    """
    from mounts import may_hide
    from ray_cluster import RayCluster

    if not RAY_CLUSTERS:
        place = tmp_path_factory.mktemp("ray")
        (place / "hidden").mkdir()
        RAY_CLUSTERS.append(RayCluster(place / "nodes", place / "hidden", is_hiding=may_hide()))
    RAY_CLUSTERS[0].fill()
    return RAY_CLUSTERS[0]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real rows and oracle traces (`GEO_SOKOBAN_SHARED_DATA`, default `../shared/data`).

    Skips where it is missing, but fails in continuous integration, which has it.
    """
    folder = (ROOT / os.environ.get("GEO_SOKOBAN_SHARED_DATA", "../shared/data")).resolve()
    if not folder.is_dir():
        message = f"no real data at {folder}; set GEO_SOKOBAN_SHARED_DATA"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Results of torch depend on the number of threads; the tests take one, which is also fastest side by side."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _forks_are_of_one_server() -> None:
    """Commands and the ranks that tests start are forks of one server, which has the imports of both."""
    from multiprocessing import forkserver

    from forked import fork_server

    fork_server()
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def tiny_policy() -> Policy:
    """The tiny policy with random weights (seed 0); tests that train it take a deep copy."""
    from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
    from task_options import TinyPolicyOptions

    return build_tiny_policy(TinyPolicyOptions(), seed=0)


@pytest.fixture(scope="session")
def sokoban_rows() -> Callable[..., list[dict[str, Any]]]:
    """Factory of prompt rows: `sokoban_rows(count, **data options)`, 6×6 levels with one box by default."""
    from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
    from geo_sokoban_pipeline.envs.sokoban.data_steps import make_prompts, read_levels

    def make(count: int, **changes: Any) -> list[dict[str, Any]]:
        counts = {"train": count, "validation": 8, "eval": 8}
        base = {"cell_px": 16, "instruction": "brief", "inner_walls": [1, 4], "max_solution": 8, "counts": counts}
        options = SokobanDataOptions.model_validate(base | changes)
        levels, _, _ = read_levels(options)
        return make_prompts(levels, options)[0].to_dict("records")

    return make


@pytest.fixture(scope="session")
def geometry_rows() -> Callable[..., list[dict[str, Any]]]:
    """Factory of prompt rows: `geometry_rows(count, task, **data options)`, tiny generated problems by default."""
    from geo_sokoban_pipeline.envs.geo3k.config import DATA_OPTIONS
    from geo_sokoban_pipeline.envs.geo3k.data_steps import check_problems, make_prompts, read_problems

    def make(count: int, task: str = "geo3k", **changes: Any) -> list[dict[str, Any]]:
        counts = {"train": count, "validation": 0, "eval": 0}
        options: Any = DATA_OPTIONS[task].model_validate({"counts": counts} | changes)
        raw = read_problems(options, task)
        index, _ = check_problems(raw, options, task)
        return list(make_prompts(raw, index, options, task)[0])

    return make


@pytest.fixture(scope="session")
def train_options() -> TrainOptions:
    """Options of `conf/base/parameters/train_sokoban.yml`, in one process."""
    from task_options import conf_options

    options: TrainOptions = conf_options("sokoban")
    return options
