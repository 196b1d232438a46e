"""docs/scaling.md: its tables are the plan's, for the models as they are published."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.scaling_docs.page import (
    ADAPTED,
    DENSE,
    MACHINES,
    PAGE,
    TENSOR_AND_DATA,
    Layout,
    adapter_layout,
    fits,
    layouts,
    shape_of,
    write_page,
)

from geo_sokoban_pipeline.config.launcher_env import VARIABLES
from geo_sokoban_pipeline.preflight.published_sizes import PUBLISHED

# As the hub counts the weights of the published files.
WEIGHTS = {"2B": 2_127_532_032, "4B": 4_437_815_808, "8B": 8_767_123_696, "30B-A3B": 31_070_754_032}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == write_page(page), "docs/scaling.md is not current; `make docs` writes it"
    for name in PUBLISHED:
        for machine in MACHINES:
            assert page.count(f"| {name} | {machine} | ") == 1
    for name in DENSE:
        assert [page.count(f"| {name}, adapter | {machine} |") for machine in ADAPTED] == [1] * len(ADAPTED)
        assert [page.count(f"| {name} | {tensor} × {data} |") for tensor, data in TENSOR_AND_DATA] == [1] * 6


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_are_those_that_are_published(name: str) -> None:
    assert shape_of(name).parameters == WEIGHTS[name]


def test_layouts_are_tried_from_the_simplest_to_the_most_shared() -> None:
    model = shape_of("8B")
    assert [layout.training.get("optimizer") for layout in layouts(model, 1, 80)] == [
        None,
        {"offload": True},
        {"offload": True, "gradient_sync": "micro_batch"},
    ]
    several = list(layouts(model, 8, 80))
    assert [layout.ranks for layout in several] == [1, 2, 4, 6, 6, 6, 6]
    for layout in several:
        servers = layout.servers
        assert servers["first_gpu"] + servers["count"] * servers["tensor_parallel"] == 8
    mixture = shape_of("30B-A3B")
    wide = {size: {layout.servers["tensor_parallel"] for layout in layouts(mixture, 8, size)} for size in (80, 40)}
    assert wide == {80: {1}, 40: {2}}


@pytest.mark.parametrize(("name", "gigabytes", "expected"), [("2B", 24, True), ("8B", 80, True), ("8B", 24, False)])
def test_an_adapter_fits_where_all_weights_do_not(name: str, gigabytes: int, expected: bool) -> None:
    """With a server on the same GPU."""
    layout = adapter_layout(name, gigabytes)
    assert fits(name, layout, 1, gigabytes) is expected
    assert not fits(name, Layout({}, layout.servers), 1, gigabytes)


OFFLOAD = {"optimizer": {"offload": True}}


@pytest.mark.parametrize(("training", "gigabytes", "expected"), [({}, 141, True), ({}, 80, False), (OFFLOAD, 80, True)])
def test_a_layout_fits_where_every_gpu_has_room(training: dict[str, Any], gigabytes: int, expected: bool) -> None:
    """4B takes 80 GB alone."""
    layout = Layout(training, {"first_gpu": 0, "count": 1, "memory_fraction": 0.2})
    assert fits("4B", layout, 1, gigabytes) is expected
    assert not fits("4B", Layout(training, {**layout.servers, "memory_fraction": 0.9}), 1, gigabytes)
