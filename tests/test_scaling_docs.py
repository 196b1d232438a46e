"""docs/scaling.md: its tables are the plan's, for the models as they are published."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.scaling_docs.page import (
    ADAPTED,
    DENSE,
    MACHINES,
    PAGE,
    PRESETS_PAGE,
    TENSOR_AND_DATA,
    Layout,
    adapter_layout,
    fits,
    layouts,
    plan,
    shape_of,
    write_page,
    write_presets,
)

from geo_sokoban_pipeline.config.launcher_env import VARIABLES
from geo_sokoban_pipeline.preflight.memory import MEMORY_SHARE, Gpu, check_memory, place_on_gpus
from geo_sokoban_pipeline.preflight.published_sizes import PUBLISHED

# As the hub counts the weights of the published files.
WEIGHTS = {"2B": 2_127_532_032, "4B": 4_437_815_808, "8B": 8_767_123_696, "30B-A3B": 31_070_754_032}
# By hand, of the language model: layers of attention, norms and MLP or experts, embeddings and head, last norm.
LANGUAGE = {
    "32B": 64 * (2 * 5120 * 128 * 72 + 2 * 128 + 2 * 5120 + 3 * 5120 * 25_600) + 2 * 151_936 * 5120 + 5120,
    "235B-A22B": 94 * (2 * 4096 * 128 * 68 + 2 * 128 + 2 * 4096 + 4096 * 128 + 128 * 3 * 4096 * 1536)
    + 2 * 151_936 * 4096 + 4096,
}  # fmt: skip


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


def test_models_are_those_that_are_published() -> None:
    assert {*WEIGHTS, *LANGUAGE} == set(PUBLISHED)
    assert {name: shape_of(name).parameters for name in WEIGHTS} == WEIGHTS
    shapes = {name: shape_of(name) for name in LANGUAGE}
    assert {name: shape.layers.parameters + shape.root.parameters for name, shape in shapes.items()} == LANGUAGE
    assert [round(shape.parameters / 1e9) for shape in shapes.values()] == [33, 236]  # as they are called


def test_the_presets_are_current_and_fit() -> None:
    """Each task of full size on one GPU and on eight, and two adapters; what the largest models lack is said."""
    page = PRESETS_PAGE.read_text(encoding="utf-8")
    assert page == write_presets(page), "docs/full_size.md is not current; `make docs` writes it"
    rows = [line.split(" | ") for line in page.split("presets:")[1].splitlines() if "--env=" in line]
    assert [(row[0].strip("| "), row[1][0], row[-1][:3]) for row in rows[:8]] == [
        *(("2B", count, "yes") if number < 2 else ("8B", count, "yes") for count in "18" for number in range(3)),
        ("2B", "1", "yes"),
        ("8B", "1", "yes"),
    ]
    assert [(row[0].strip("| "), row[-1][:6]) for row in rows[8:]] == [
        ("30B-A3B", "yes |"), ("30B-A3B", "no, by"), ("235B-A22B", "no, by"), ("235B-A22B", "no, by"),
    ]  # fmt: skip


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
    wide = {size: {layout.servers["tensor_parallel"] for layout in layouts(mixture, 8, size)} for size in (84, 42, 21)}
    assert wide == {84: {1}, 42: {2}, 21: {4}}


@pytest.mark.parametrize(("name", "gigabytes", "expected"), [("2B", 24, True), ("8B", 80, True), ("8B", 24, False)])
def test_an_adapter_fits_where_all_weights_do_not(name: str, gigabytes: int, expected: bool) -> None:
    """With a server on the same GPU."""
    layout = adapter_layout(name, gigabytes)
    assert fits(name, layout, 1, gigabytes) is expected
    assert not fits(name, Layout({}, layout.servers), 1, gigabytes)


OFFLOAD = {"optimizer": {"offload": True}}


@pytest.mark.parametrize("total", [80e9, 84.9e9, 150e9])  # a data sheet; an H100 and an H200 as torch sees them
def test_a_real_gpu_has_room_for_the_preset(total: float) -> None:
    """Whose share of the server grows with the GPU; 0.6 GB are taken before a run."""
    rank, options = plan("8B", Layout(OFFLOAD, {}))
    places = place_on_gpus(options, rank, [Gpu(int(total - 0.6e9), int(total))])
    assert [check.state for check in check_memory(rank, places, MEMORY_SHARE) if check.name == "GPU 0"] == ["ok"]


@pytest.mark.parametrize(("training", "gigabytes", "expected"), [({}, 141, True), ({}, 80, False), (OFFLOAD, 80, True)])
def test_a_layout_fits_where_every_gpu_has_room(training: dict[str, Any], gigabytes: int, expected: bool) -> None:
    """4B takes 80 GB alone."""
    layout = Layout(training, {"colocated": False, "memory_fraction": 0.2})
    assert fits("4B", layout, 1, gigabytes) is expected
    # A server that takes turns may have nearly all of it, one beside the rank may not.
    assert not fits("4B", Layout(training, {**layout.servers, "memory_fraction": 0.85}), 1, gigabytes)
    assert fits("4B", Layout(training, {"memory_fraction": 0.85}), 1, gigabytes) is expected
