"""How fast geometry problems are drawn, laid out and rendered.

Run with `pytest benchmarks/test_problems.py -s`. Rates are in `extra_info`. Asserted are ratios, which hold on a busy
machine too: a textbook problem, its labels placed, takes at most three times its image's rendering, and a tiny
one at most as long as its image. Times are CPU-seconds, least of three.
"""

from __future__ import annotations

import itertools
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from geo_sokoban_pipeline.envs.geo3k.config import ProblemOptions
from geo_sokoban_pipeline.envs.geo3k.figures import generate_problems
from geo_sokoban_pipeline.envs.geo3k.figures.drawing import render_layout_png

ROUNDS = 3


@pytest.mark.parametrize(("difficulty", "count", "threshold"), [("tiny", 500, 1.0), ("mixed", 132, 3.0)])
def test_problems_per_second(benchmark: BenchmarkFixture, difficulty: str, count: int, threshold: float) -> None:
    options, seeds = ProblemOptions.model_validate({"difficulty": difficulty}), itertools.count()
    drawing, rendering = [], []
    for _ in range(ROUNDS):
        start = time.process_time()
        problems = generate_problems(count, next(seeds), options)
        drawn = time.process_time()
        for problem in problems:
            render_layout_png(problem.layout)
        drawing.append(drawn - start)
        rendering.append(time.process_time() - drawn)
    ratio = min(drawing) / min(rendering)
    rate = count / (min(drawing) + min(rendering))
    benchmark.extra_info.update(problems_per_second=round(rate), drawing_to_rendering=round(ratio, 2))
    print(f"\n{difficulty}: {rate:.0f} problems a second with images, drawing takes {ratio:.2f} of rendering")
    benchmark.pedantic(lambda: generate_problems(count, 0, options), rounds=1)
    assert ratio <= threshold
