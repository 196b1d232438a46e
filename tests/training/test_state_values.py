"""Values of states by continuations: which states get how many, and what is stored of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.estimators import VineArguments
from geo_sokoban_pipeline.evaluation.forks import history_of
from geo_sokoban_pipeline.evaluation.replay import RegradeError, Replayer, prompts_by_key, regrade_episodes
from geo_sokoban_pipeline.grpo.scoring import STATE_VALUE, apply_scores, assistant_turns, score_groups, state_values
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings, responses_of
from geo_sokoban_pipeline.rollout.rollout import rollout
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
    """The episodes of the setup as an iteration scores them before anything is measured, and the row of each group.

    The rewards of the last group are equal.
    """
    episodes = copy.deepcopy(setup.episodes)
    for episode in episodes[9:]:
        episode.reward = 0.5
    apply_scores(episodes, score_groups(episodes, with_forks(setup).grpo, TASK, setup.options.reward.args))
    known = prompts_by_key(setup.rows, TASK)
    return episodes, [dict(known[episodes[3 * group].task_id][0]) for group in range(4)]


def with_signal(episodes: list[Trajectory]) -> list[Trajectory]:
    rewards = np.array([episode.reward for episode in episodes]).reshape(4, 3)
    chosen = [one for one in episodes if np.ptp(rewards[one.group_index]) > 1e-6]
    assert 0 < len(chosen) < len(episodes)
    return chosen


def coins(asked: list[EpisodeRequest]) -> Callable[..., Any]:
    """Continuations that end by the number of responses before them and their own number; all are noted."""

    def roll_out(requests: Sequence[EpisodeRequest]) -> Any:
        asked.extend(requests)
        return [
            SimpleNamespace(group_index=one.group_index, reward=float(one.sample_index < len(one.past)), metrics={})
            for one in requests
        ]

    return roll_out


def histories(episodes: list[Trajectory]) -> list[list[str]]:
    return [
        [history_of(episode, number) for number, turn in enumerate(episode.turns) if turn.role == "assistant"]
        for episode in episodes
    ]


def test_every_state_behind_a_prompt_gets_equally_many(setup: Setup) -> None:
    episodes, rows = scored(setup)
    asked: list[EpisodeRequest] = []
    metrics = measure_states(episodes, rows, VineArguments(continuations=1000, each=4), 5, coins(asked))
    chosen = with_signal(episodes)
    states = {history for own in histories(chosen) for history in own[1:]}
    names = Counter(request.trajectory_id.rpartition("/")[0] for request in asked)
    assert metrics["rollout/forks/states"] == len(states) == len(names)
    assert set(names.values()) == {4} and metrics["rollout/forks/continuations"] == len(asked) == 4 * len(states)
    for episode in episodes:
        values = state_values(episode)
        wanted = [place / 4 for place in range(1, len(values))] if episode in chosen else [np.nan] * (len(values) - 1)
        assert values.tolist() == pytest.approx([np.nan, *wanted], nan_ok=True, abs=0)
    # A continuation begins with the responses before the state, has a seed of its own, and one place for new chance.
    by_name = {episode.trajectory_id: episode for episode in episodes}
    assert len({request.seed for request in asked}) == len(asked)
    for request in asked:
        parent = by_name[request.trajectory_id.rsplit("/", 2)[0]]
        assert request.prompt == rows[parent.group_index] and request.reseed_at == len(request.past) > 0
        for given, own in zip(request.past, responses_of(parent), strict=False):
            assert given.token_ids.tolist() == own.token_ids.tolist()


def test_episodes_that_are_not_trained_cost_nothing(setup: Setup) -> None:
    episodes, rows = scored(setup)
    left_out = with_signal(episodes)[0]
    left_out.trained = False
    asked: list[EpisodeRequest] = []
    measure_states(episodes, rows, VineArguments(continuations=1000, each=4), 5, coins(asked))
    assert asked and not any(one.trajectory_id.startswith(f"{left_out.trajectory_id}/") for one in asked)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_equal_histories_are_one_state_unless_the_draws_differ(setup: Setup, is_fixed: bool) -> None:
    """Continuations begin with the seed of their episode, which alone decides what some environments draw."""
    episodes, rows = scored(setup)
    first = max(with_signal(episodes), key=lambda one: len(assistant_turns(one)))
    twin = replace(copy.deepcopy(first), trajectory_id=f"{first.trajectory_id}-twin", seed=first.seed + 1)
    behind = [history for own in histories([*with_signal(episodes), twin]) for history in own[1:]]
    asked: list[EpisodeRequest] = []
    options = VineArguments(continuations=2000, each=4)
    metrics = measure_states([*episodes, twin], rows, options, 5, coins(asked), lambda row: is_fixed)
    assert len(behind) > len(set(behind)) == len(behind) - len(assistant_turns(first)) + 1
    assert metrics["rollout/forks/states"] == len(behind if is_fixed else set(behind))
    seeds = {episode.trajectory_id: episode.seed for episode in [*episodes, twin]}
    assert all(request.env_seed == seeds[request.trajectory_id.rsplit("/", 2)[0]] for request in asked)
    assert state_values(twin).tolist() == pytest.approx(state_values(first).tolist(), nan_ok=True, abs=0)


def test_an_environment_is_asked_about_its_draws_only_where_one_has_been_played(setup: Setup) -> None:
    """The environment of another prompt may be one that cannot be built."""
    episodes, rows = scored(setup)
    for episode in episodes[:3]:
        episode.reward, episode.trained = None, False  # as of a group whose environment failed
    asked: list[Any] = []
    measure_states(episodes, rows, VineArguments(), 5, coins([]), lambda row: bool(asked.append(row)))
    first = next(one for one in with_signal(scored(setup)[0]) if one.group_index)
    assert asked == [rows[first.group_index]]


@pytest.mark.parametrize("shift", [0.0, -900.0])  # a response of 2B may have a probability that is no float
def test_a_small_budget_measures_states_after_unlikely_responses(setup: Setup, shift: float) -> None:
    episodes, rows = scored(setup)
    likely: dict[str, float] = {}
    for episode in with_signal(episodes):
        for turn in assistant_turns(episode):
            episode.rollout_log_probs[turn.token_start] += shift
        (own,) = histories([episode])
        likely |= dict(zip(own[1:], [float(one.log_probs.sum()) for one in responses_of(episode)], strict=False))
    asked: list[EpisodeRequest] = []
    metrics = measure_states(episodes, rows, VineArguments(continuations=26, each=3), 5, coins(asked))
    order = sorted(likely, key=likely.__getitem__)
    assert likely[order[7]] < likely[order[8]] and len(asked) == 24  # 26 // 3 states
    measured = {
        history
        for episode, own in zip(episodes, histories(episodes), strict=True)
        for history, value in zip(own, state_values(episode), strict=True)
        if np.isfinite(value)
    }
    assert measured == set(order[:8])
    assert metrics["rollout/forks/cutpoint"] == pytest.approx(np.exp(likely[order[7]]), rel=1e-5)


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
    chosen = [state_values(episode) for episode in with_signal(episodes)]
    assert any(len(values) > 2 for values in chosen)
    for values in chosen:
        assert np.isnan(values[:2]).all() and (values[2:] == 1.0).all()


def test_an_iteration_with_forks(setup: Setup) -> None:
    """It differs from one without in its advantages alone, repeats, and follows from what is stored."""
    options = with_forks(setup, continuations=200)
    plain, _ = collect(setup, setup.options)
    episodes, metrics = collect(setup, options)
    again, _ = collect(setup, options)
    assert 0 < metrics["rollout/forks/continuations"] <= 200
    measured = 0
    for one, other, without in zip(episodes, again, plain, strict=True):
        assert one.token_ids.tolist() == without.token_ids.tolist() and one.reward == without.reward
        values = state_values(one)
        assert values.tolist() == pytest.approx(state_values(other).tolist(), nan_ok=True, abs=0)
        known = np.flatnonzero(np.isfinite(values))
        if len(known) > 1:
            measured += 1
            turns = [turn.advantage for turn in assistant_turns(one)]
            assert all(-0.5 < value < 2 for value in values[known])
            # Over an iteration all advantages have one scale; that of the first response has another baseline.
            gains = np.repeat(np.diff([*values[known], one.reward]), np.diff([*known, len(values)]))
            place = int(np.argmax(np.abs(gains)))
            scale = turns[known[0] + place] / gains[place] if gains[place] else 0.0
            assert turns[known[0] :] == pytest.approx(gains * scale)
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
    """Over all measured states, against as many continuations by other seeds."""
    options = with_forks(setup)
    engine = build_engine(setup.policy, options.rollout)
    rules = RolloutSettings(options.env, options.reward, options.rollout, options.rollout.sampling, 0, "sokoban")

    def roll_out(requests: Sequence[EpisodeRequest]) -> list[Trajectory]:
        return rollout(engine, setup.policy, requests, rules)

    found = []
    for root in (5, 6):
        episodes, rows = scored(setup)
        measure_states(episodes, rows, VineArguments(continuations=2000, each=64), root, roll_out)
        found.append(np.concatenate([state_values(episode) for episode in episodes]))
    engine.close()
    one, other = (values[np.isfinite(values)] for values in found)
    assert len(one) == len(other) > 8 and not np.array_equal(one, other)
    # A reward spans 1.4 at most, so a mean of 64 has a standard deviation of at most 0.09.
    assert np.abs(one - other).max() < 5 * 0.09 * np.sqrt(2) and np.abs((one - other).mean()) < 0.1
    assert np.ptp(one) > 0.1
