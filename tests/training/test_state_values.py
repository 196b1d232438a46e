"""Values of states by continuations: which states get how many, and what is stored of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.estimators import VineArguments
from geo_sokoban_pipeline.evaluation.forks import history_of
from geo_sokoban_pipeline.evaluation.replay import RegradeError, Replayer, prompts_by_key, regrade_episodes
from geo_sokoban_pipeline.grpo.scoring import STATE_VALUE, apply_scores, assistant_turns, score_groups, state_values
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, responses_of
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.state_values import measure_states
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories, trajectories_to_table
from task_options import TrainOptions
from training.setup import Setup, settings

TASK = task_of("sokoban")


def with_forks(setup: Setup, **args: Any) -> TrainOptions:
    return settings(setup.options, {"grpo.advantage": "vine", "grpo.advantage_args": args})


def collect(setup: Setup, options: TrainOptions) -> tuple[list[Trajectory], dict[str, Any]]:
    engine = build_engine(setup.policy, options.rollout)
    collector = Collector("train_sokoban", 0, options, setup.rows, setup.policy, engine)
    found = collector.collect(0, build_sampler(setup.rows, options, 0, None))
    engine.close()
    return found


def scored(setup: Setup) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """The episodes of the setup as an iteration scores them before anything is measured, and the row of each group."""
    episodes = copy.deepcopy(setup.episodes)
    apply_scores(episodes, score_groups(episodes, with_forks(setup).grpo, TASK, setup.options.reward.args))
    known = prompts_by_key(setup.rows, TASK)
    return episodes, [dict(known[episodes[3 * group].task_id][0]) for group in range(4)]


class Coins:
    """Ends of continuations by the history that they begin with: always 1, always 0, or by the number."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.requests: list[EpisodeRequest] = []

    def roll_out(self, requests: Sequence[EpisodeRequest]) -> Any:
        self.requests += requests
        ends = []
        for request in requests:
            name = request.trajectory_id.rpartition("/")[0]
            self.asked[name] += 1
            reward = float(request.sample_index % 2 if len(request.past) == 0 else len(request.past) % 2)
            ends.append(SimpleNamespace(group_index=request.group_index, reward=reward, metrics={"success": reward}))
        return ends


def histories(episodes: list[Trajectory]) -> list[list[str]]:
    return [
        [history_of(episode, number) for number, turn in enumerate(episode.turns) if turn.role == "assistant"]
        for episode in episodes
    ]


def test_every_state_gets_a_few_and_those_whose_ends_differ_get_the_rest(setup: Setup) -> None:
    episodes, rows = scored(setup)
    coins = Coins()
    metrics = measure_states(episodes, rows, VineArguments(continuations=1000, first=4), 5, coins.roll_out)
    rewards = np.array([episode.reward for episode in episodes]).reshape(4, 3)
    groups = np.flatnonzero(np.ptp(rewards, axis=1) > 1e-6)
    chosen = [episode for episode in episodes if episode.group_index in groups]
    assert len(chosen) > 0
    states = {history for own in histories(chosen) for history in own}
    assert metrics["rollout/forks/states"] == len(states) == len(coins.asked)
    # Ends differ at the prompts alone.
    more = (1000 - 4 * len(states)) // len(groups)
    counts = Counter(coins.asked.values())
    assert counts == {4: len(states) - len(groups), 4 + more: len(groups)}
    assert metrics["rollout/forks/continuations"] == 4 * len(states) + more * len(groups) <= 1000
    for episode in episodes:
        values = state_values(episode)
        if episode in chosen:
            assert values[0] == pytest.approx(0.5, abs=1 / 8)
            assert values[1:].tolist() == [place % 2 for place in range(1, len(values))]
        else:
            assert np.isnan(values).all()
    # A continuation begins with the responses before the state, has a seed of its own, and one place for new chance.
    by_name = {episode.trajectory_id: episode for episode in episodes}
    assert len({request.seed for request in coins.requests}) == len(coins.requests)
    for request in coins.requests:
        parent = by_name[request.trajectory_id.rsplit("/", 2)[0]]
        assert request.prompt == rows[parent.group_index] and request.reseed_at == len(request.past)
        for given, own in zip(request.past, responses_of(parent), strict=False):
            assert given.token_ids.tolist() == own.token_ids.tolist()


def test_a_small_budget_measures_states_after_unlikely_responses(setup: Setup) -> None:
    episodes, rows = scored(setup)
    likely: dict[str, float] = {}
    with_signal = {
        group
        for group in range(4)
        if np.ptp([episode.reward for episode in episodes if episode.group_index == group]) > 1e-6
    }
    for episode, own in zip(episodes, histories(episodes), strict=True):
        if episode.group_index in with_signal:
            chances = [float(np.exp(one.log_probs.sum())) for one in responses_of(episode)]
            likely |= dict(zip(own, [0.0, *chances], strict=False))
    coins = Coins()
    metrics = measure_states(episodes, rows, VineArguments(continuations=48, first=3), 5, coins.roll_out)
    order = sorted(likely, key=likely.__getitem__)
    assert likely[order[7]] < likely[order[8]]
    measured = {
        history
        for episode, own in zip(episodes, histories(episodes), strict=True)
        for history, value in zip(own, state_values(episode), strict=True)
        if np.isfinite(value)
    }
    assert measured == set(order[:8])  # 48 / 2 / 3
    assert metrics["rollout/forks/cutpoint"] == pytest.approx(likely[order[7]], rel=1e-5)


def test_continuations_that_fail_leave_a_state_without_a_value(setup: Setup) -> None:
    episodes, rows = scored(setup)

    def roll_out(requests: Sequence[EpisodeRequest]) -> Any:
        return [
            SimpleNamespace(
                group_index=request.group_index,
                reward=None if len(request.past) == 1 else 1.0,
                metrics={},
            )
            for request in requests
        ]

    measure_states(episodes, rows, VineArguments(), 5, roll_out)
    found = [values for episode in episodes if np.isfinite((values := state_values(episode))[0])]
    assert found
    for values in found:
        assert values[0] == 1.0 and np.isnan(values[1:2]).all() and (values[2:] == 1.0).all()


def test_an_iteration_with_forks(setup: Setup) -> None:
    """It differs from one without in its advantages alone, repeats, and follows from what is stored."""
    options = with_forks(setup, continuations=200)
    plain, _ = collect(setup, setup.options)
    episodes, metrics = collect(setup, options)
    again, _ = collect(setup, options)
    assert 100 < metrics["rollout/forks/continuations"] <= 200
    measured = 0
    for one, other, without in zip(episodes, again, plain, strict=True):
        assert one.token_ids.tolist() == without.token_ids.tolist() and one.reward == without.reward
        assert state_values(one).tolist() == pytest.approx(state_values(other).tolist(), nan_ok=True, abs=0)
        values = np.append(state_values(one), one.reward or 0.0)
        if np.isfinite(values[0]):
            measured += 1
            turns = [turn.advantage for turn in assistant_turns(one)]
            known = np.flatnonzero(np.isfinite(values))
            assert all(-0.5 < value < 2 for value in values[known])
            # Over an iteration all advantages have one scale.
            scale = turns[-1] / (values[-1] - values[known[-2]])
            assert turns == pytest.approx(np.repeat(np.diff(values[known]), np.diff(known)) * scale)
    assert measured
    # As an audit computes them from a file.
    stored = table_to_trajectories(trajectories_to_table(episodes, setup.policy.table_context))
    bare = copy.deepcopy(stored)
    apply_scores(bare, score_groups(bare, options.grpo, TASK, options.reward.args))
    for one, other in zip(stored, bare, strict=True):
        assert [turn.advantage for turn in one.turns] == [turn.advantage for turn in other.turns]
    # Values are no part of what is replayed, and regrading has none of its own.
    replayer = Replayer(setup.policy, options.env, options.reward, options.rollout, TASK)
    known_rows = prompts_by_key(setup.rows, TASK)
    assert any(STATE_VALUE in turn.info for episode in stored for turn in episode.turns)
    assert replayer.differences(stored, known_rows) == []
    with pytest.raises(RegradeError, match="advantage=vine"):
        regrade_episodes(stored, replayer, known_rows, options.grpo)


def test_values_are_means_of_continuations_of_the_policy(setup: Setup) -> None:
    """Of a prompt with 400 continuations and of 400 episodes of other seeds."""
    from geo_sokoban_pipeline.rollout.episode import RolloutSettings
    from geo_sokoban_pipeline.rollout.rollout import rollout

    options = with_forks(setup, continuations=1700, first=4)
    engine = build_engine(setup.policy, options.rollout)
    rules = RolloutSettings(options.env, options.reward, options.rollout, options.rollout.sampling, 0, "sokoban")
    episodes, rows = scored(setup)
    measure_states(
        episodes, rows, VineArguments(continuations=1700), 5, lambda asked: rollout(engine, setup.policy, asked, rules)
    )
    group = next(episode.group_index for episode in episodes if np.isfinite(state_values(episode)[0]))
    fresh = [
        EpisodeRequest(f"x{number}", rows[group], 0, number, derive_seed(9, "fresh", number)) for number in range(400)
    ]
    rewards = np.array([episode.reward for episode in rollout(engine, setup.policy, fresh, rules)])
    engine.close()
    value = state_values(episodes[3 * group])[0]
    assert value == pytest.approx(rewards.mean(), abs=4 * rewards.std() * np.sqrt(1 / 400 + 1 / 100))
