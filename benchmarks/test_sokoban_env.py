"""Speed of Sokoban: levels per minute, moves, observations, images.

Run with `pytest benchmarks/test_sokoban_env.py`. Rates are in `extra_info`. One threshold is asserted: 6,000
verified 6×6 one-box levels a minute.
"""

from __future__ import annotations

import itertools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from geo_sokoban_pipeline.envs.sokoban import Board, SokobanEnv, generate_levels, render, render_png
from geo_sokoban_pipeline.envs.sokoban.board import canonical_bytes

BOARD = Board.from_text("######\n#@   #\n# $ .#\n#    #\n#    #\n######")


@pytest.mark.parametrize(
    ("height", "width", "boxes", "count", "threshold"),
    [(6, 6, 1, 1000, 6000), (8, 8, 2, 100, None), (10, 10, 4, 15, None)],
    ids=["6x6-1", "8x8-2", "10x10-4"],
)
def test_levels_per_minute(
    benchmark: BenchmarkFixture, height: int, width: int, boxes: int, count: int, threshold: float | None
) -> None:
    seeds = itertools.count()
    benchmark.pedantic(lambda: generate_levels(count, next(seeds), height, width, boxes), rounds=3, iterations=1)
    assert benchmark.stats is not None
    rate = 60 * count / benchmark.stats["mean"]
    benchmark.extra_info["levels_per_minute"] = round(rate)
    assert threshold is None or rate >= threshold


def test_move(benchmark: BenchmarkFixture) -> None:
    assert benchmark(BOARD.move, "right").moved


def test_canonical_form_of_a_new_board(benchmark: BenchmarkFixture) -> None:
    benchmark(canonical_bytes, BOARD.codes(), BOARD.height, BOARD.width)


@pytest.mark.parametrize("cell_px", [16, 64])
def test_image(benchmark: BenchmarkFixture, cell_px: int) -> None:
    assert benchmark(render, BOARD, cell_px).width == 6 * cell_px


def test_png_of_a_new_board(benchmark: BenchmarkFixture) -> None:
    benchmark(render_png, BOARD, 16)


def test_turn_with_observation(benchmark: BenchmarkFixture) -> None:
    env = SokobanEnv(BOARD, 1, 10**9, 16, observation_style="brief")
    responses = itertools.cycle(["<answer>Right</answer>", "<answer>Left</answer>"])
    benchmark(lambda: env.step(next(responses)))
