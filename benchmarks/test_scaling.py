"""What an episode costs as an iteration grows, and what writing costs beside it.

Run with `pytest benchmarks/test_scaling.py -s`. With the default policy after its warm start and one thread,
iterations of 64, 256 and 1,024 episodes are rolled out, scored, updated and written, all groups trained; the table says
milliseconds of CPU time per episode. Thresholds: an episode of the largest iteration costs at most 1.3 times one of the
smallest; writing (tables, the contract's check, files) takes under 3 % of an iteration of the default recipe, whose
filter trains only a part of the episodes. Times are CPU-seconds, least of three.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.records import keep
from benchmarks.setup import Rows, default_options, make_rows, warmed_policy
from benchmarks.tables import PHASES, growth, writing_share

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.datasets import TrajectoriesDataset
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.grpo.scoring import score_groups
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.grpo_loop import update_policy
from geo_sokoban_pipeline.trajectories.parquet import name_parts
from geo_sokoban_pipeline.trajectories.schema import TrajectoryContract
from geo_sokoban_pipeline.trajectories.types import Trajectory

SIZES, ROUNDS = (64, 256, 1024), 3
GROWTH_THRESHOLD, WRITING_THRESHOLD = 1.3, 0.03
Costs = dict[str, float]


@pytest.fixture(scope="module")
def options() -> TrainOptions:
    """Default options, with hardly any validation in the warm start."""
    steps = default_options({}).warm_start.steps
    return default_options(
        {"processes": 1, "warm_start": {"validate_every": steps, "validation_episodes": 8, "play_every": 0}}
    )


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows(512)


@pytest.fixture(scope="module")
def policy(options: TrainOptions, rows: Rows) -> Policy:
    return warmed_policy(options, rows)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """CPU-seconds of an action, and its result."""
    began = time.process_time()
    result = action()
    return time.process_time() - began, result


def cost_of_iterations(
    policy: Policy, options: TrainOptions, rows: Rows, episodes: int, folder: Path, **changes: Any
) -> Costs:
    """CPU-seconds of each phase, the least of the rounds; every round has new weights, as iterations do.

    Args:
        changes: of the options of GRPO.
    """
    groups = episodes // options.grpo.group_size
    grpo = options.grpo.model_copy(update={"groups": groups, **changes})
    sized = options.model_copy(update={"grpo": grpo})
    policy = copy.deepcopy(policy)
    backend, engine = build_backend(policy, options.optimizer), build_engine(policy, sized.rollout)
    sampler = build_sampler(rows, options, 0, None)
    collector = Collector("scaling", 0, sized, rows, policy, engine)
    dataset = TrajectoriesDataset(str(folder / str(episodes)))
    found: list[Costs] = []
    for round_ in range(ROUNDS + 1):
        engine.update_weights(None, round_)
        costs: Costs = {}
        costs["rollout"], (episodes, _) = timed(lambda k=round_: collector.collect(k, sampler))  # type: ignore[misc]
        costs["scoring"], _ = timed(lambda p=episodes: score_groups(p, grpo, SOKOBAN, options.reward.args))  # type: ignore[misc]
        costs["rollout"] -= costs["scoring"]  # the collector has scored them already
        costs["update"], _ = timed(
            lambda p=episodes, k=round_: update_policy(p, policy, backend, grpo, options.optimizer, k, 0)  # type: ignore[misc]
        )
        costs["writing"], _ = timed(lambda p=episodes, k=round_: write(dataset, k, p, policy))  # type: ignore[misc]
        found.append(costs)
    engine.close()
    # The first round fills the caches of boards and images, as earlier iterations of a run have done.
    return {phase: min(costs[phase] for costs in found[1:]) for phase in PHASES}


def write(dataset: TrajectoriesDataset, iteration: int, episodes: Sequence[Trajectory], policy: Policy) -> None:
    """Write an iteration as Kedro does: tables, the contract's check, files."""
    dataset.save(TrajectoryContract().validate(name_parts(iteration, episodes, policy.table_context)))


def test_cost_per_episode(policy: Policy, options: TrainOptions, rows: Rows, tmp_path: Path) -> None:
    # All groups are trained, so that every size does the same work.
    costs = {str(size): cost_of_iterations(policy, options, rows, size, tmp_path, filter="none") for size in SIZES}
    episodes = options.grpo.groups * options.grpo.group_size
    usual = cost_of_iterations(policy, options, rows, episodes, tmp_path / "usual")
    found = {"sizes": list(SIZES), "seconds": costs, "usual": {"episodes": episodes, "seconds": usual}}
    keep("scaling", found)
    assert growth(found) <= GROWTH_THRESHOLD
    assert writing_share(found) < WRITING_THRESHOLD
