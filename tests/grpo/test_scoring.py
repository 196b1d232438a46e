"""Scoring: credit, filter and normalisation end in the trajectories, and turns add up to the episode's reward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import make_trajectories
from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.grpo.scoring import adds_up, apply_scores, assistant_turns, newest_version, score_groups
from geo_sokoban_pipeline.training.batch import sampled_by
from geo_sokoban_pipeline.trajectories.types import Trajectory

SUM = {"aggregate": "sum", "distance_weight": 0.1}


def play(rewards: list[list[float]], solved: list[bool], group: int = 0, dist0: float = 3.0) -> list[Trajectory]:
    """Episodes of one group whose turns earned `rewards`; each turn brings the box one cell nearer."""
    episodes = make_trajectories(episodes=len(rewards), turns=max(map(len, rewards)), group_size=len(rewards))
    for number, (episode, earned, success) in enumerate(zip(episodes, rewards, solved, strict=True)):
        episode.trajectory_id = f"g{group}/s{number}"
        episode.group_index, episode.sample_index = group, number
        episode.advantage, episode.trained, episode.drop_reason = None, False, None
        turns = assistant_turns(episode)
        for index, turn in enumerate(turns):
            turn.reward = earned[index] if index < len(earned) else None
            turn.advantage = None
            turn.info = {"box_target_distance": dist0 - 1 - index}
        bonus = 1.0 if success else 0.0
        episode.metrics = {"success": float(success), "turns": float(len(turns))}
        episode.reward_parts = {"dist0": dist0, "final_bonus": bonus}
        episode.reward = sum(earned) + bonus + 0.1 * len(earned)
    return episodes


def score(episodes: list[Trajectory], options: GrpoOptions, args: dict[str, Any], **limits: int) -> dict[str, float]:
    """Score and apply, as the loop does; the metrics."""
    scores = score_groups(episodes, options, SOKOBAN, args, **limits)
    apply_scores(episodes, scores)
    return scores.metrics


@pytest.mark.parametrize("advantage", ["turn_return", "dr_grpo"])
def test_scoring_changes_nothing_and_applying_it_twice_is_applying_it_once(advantage: str) -> None:
    episodes = play([[0.2, 0.1], [0.2, -0.1]], [True, False])
    failed = play([[0.1], [0.3]], [False, False], group=1)
    failed[0].status, failed[0].reward, failed[0].drop_reason = "failed", None, "failed"
    episodes += failed
    options = GrpoOptions(advantage=advantage, normalize="rms", filter="zero_variance", min_groups=0)
    before = [repr(episode) for episode in episodes]
    scores = score_groups(episodes, options, SOKOBAN, SUM)
    assert [repr(episode) for episode in episodes] == before
    assert [score is None for score in scores.episodes] == [False, False, True, False]
    apply_scores(episodes, scores)
    once = [repr(episode) for episode in episodes]
    assert once != before and once[2] == before[2], "an episode without a reward stays as it is"
    apply_scores(episodes, score_groups(episodes, options, SOKOBAN, SUM))
    assert [repr(episode) for episode in episodes] == once
    assert scores.trained_groups == 1


@pytest.mark.parametrize(
    ("scale", "normalize", "clip", "expected"),
    [
        ("std", "none", 4.0, 0.70711),
        ("std", "rms", 4.0, 0.70711),
        ("none", "none", 0.6, 0.6),
        ("none", "rms", 0.6, 1.6),
    ],
)
def test_beside_advantages_of_turns_the_episode_has_its_own(
    scale: str, normalize: str, clip: float, expected: float
) -> None:
    """On the scale of the turns, clipped unless that is the root mean square: so have runs always stored it."""
    episodes = play([[3.2], [0.0]], [False, False])
    options = {"advantage_args": {"scale": scale}, "normalize": normalize, "advantage_clip": clip}
    score(episodes, GrpoOptions(**options, filter="none"), SUM)
    assert episodes[0].advantage == pytest.approx(expected, abs=1e-4)


def test_mixed_groups_alone_are_trained_and_rms_scales_over_them() -> None:
    mixed = play([[0.0, 0.0], [0.0, 0.0]], [True, False], group=0)
    solved = play([[0.0, 0.5], [0.0, 0.0]], [True, True], group=1)
    options = GrpoOptions(advantage_args={"gamma": 1.0}, normalize="rms", filter="mixed_success", min_groups=0)
    score([*mixed, *solved], options, SUM)
    assert all(episode.trained for episode in mixed)
    assert {episode.drop_reason for episode in solved} == {"all_solved"}
    values = np.array([turn.advantage for episode in mixed for turn in assistant_turns(episode)])
    assert np.isclose(np.sqrt((values**2).mean()), 1.0)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("normalize", ["none", "rms"])
@pytest.mark.parametrize(
    ("advantage", "args"),
    [("turn_return", {"scale": "none"}), ("turn_return", {"scale": "std"}), ("grpo", {}), ("dr_grpo", {})],
)
def test_the_clip_comes_last(advantage: str, args: dict[str, Any], normalize: str, clip: float | None) -> None:
    """With every scale, advantages with a clip are those without one, clipped once."""

    def advantages(limit: float | None) -> np.ndarray:
        episodes = play([[3.0, 0.0], [0.0, 0.1], [0.0, 0.0], [0.5, 0.0]], [True, False, False, False])
        options = {"advantage": advantage, "advantage_args": args, "normalize": normalize}
        score(episodes, GrpoOptions(**options, filter="none", advantage_clip=limit), SUM)
        turns = [turn for one in episodes for turn in assistant_turns(one)]
        values = turns if advantage == "turn_return" else episodes
        assert {turn.advantage is None for turn in turns} == {values is episodes}
        return np.array([value.advantage for value in values])

    whole = advantages(None)
    limit = np.inf if clip is None else clip
    np.testing.assert_allclose(advantages(clip), whole.clip(-limit, limit), rtol=1e-12)
    if normalize == "rms":
        assert np.sqrt((whole**2).mean()) == pytest.approx(1.0)
    assert np.abs(whole).max() > 1.2 and np.abs(whole).min() < 0.8, "some are clipped, others are not"


def test_a_response_the_environment_never_saw_is_worth_nothing() -> None:
    episodes = play([[0.2], [0.2, 0.2]], [False, False])
    score(episodes, GrpoOptions(advantage_args={"gamma": 1.0}, normalize="none", filter="none"), SUM)
    cut = assistant_turns(episodes[0])
    assert cut[1].reward is None
    assert cut[1].advantage < 0 < assistant_turns(episodes[1])[1].advantage


@pytest.mark.parametrize("advantage", ["turn_return", "dr_grpo"])
def test_turns_keep_the_credit_that_was_trained_on(advantage: str) -> None:
    episodes = play([[0.2, -0.01], [0.2]], [True, False])
    score(episodes, GrpoOptions(advantage=advantage, normalize="none", filter="none"), SUM)
    given = [[turn.credit for turn in episode.turns] for episode in episodes]
    if advantage == "dr_grpo":
        assert given == [[None] * 4] * 2
        return
    # Turn reward and a cell nearer each; the bonus in the turn that solved; nothing for a response that was cut off.
    assert [value is None for value in given[0]] == [True, False, True, False]
    assert np.allclose(given[0][1::2], [0.3, -0.01 + 0.1 + 1.0])
    assert np.allclose(given[1][1::2], [0.3, 0.0])
    assert [sum(row[1::2]) for row in given] == pytest.approx([episode.reward for episode in episodes])


@pytest.mark.parametrize(
    ("rewards", "parts", "values"),
    [([0.5, 1.0], {"final_bonus": 2.0}, [0.5, 3.0]), ([0.5], {}, [0.5]), ([], {"final_bonus": 2.0}, [])],
)
def test_turns_of_a_task_that_says_nothing_about_credit(rewards: Any, parts: Any, values: Any) -> None:
    assert Task.turn_values(SOKOBAN, rewards, [{} for _ in rewards], parts, {}) == values


@pytest.mark.parametrize(
    ("values", "reward", "equal"),
    [
        ([1e7 / 7] * 7, 1e7, True),  # the sum is 2e-9 off
        ([0.1] * 3, 0.3, True),
        ([0.1] * 3, 0.3 + 1e-5, False),
        ([1e7], 1e7 + 100.0, False),
    ],
)
def test_credit_adds_up_to_the_reward_but_for_rounding(values: list[float], reward: float, equal: bool) -> None:
    assert adds_up(np.array(values), reward) is equal


def test_turns_that_do_not_add_up_are_an_error() -> None:
    episodes = play([[0.2], [0.1]], [False, False])
    episodes[1].reward += 1.0
    with pytest.raises(ValueError, match="g0/s1: a reward of .* grpo.advantage=grpo"):
        score(episodes, GrpoOptions(), SUM)


def test_failed_episodes_leave_the_group_to_the_others() -> None:
    episodes = play([[1.0], [0.0], [0.0]], [True, False, False])
    episodes[2].status, episodes[2].reward, episodes[2].error = "failed", None, "boom"
    score(episodes, GrpoOptions(advantage="dr_grpo", normalize="none", filter="none"), SUM)
    assert [episode.trained for episode in episodes] == [True, True, False]
    assert episodes[2].advantage is None
    assert np.isclose(episodes[0].advantage + episodes[1].advantage, 0.0)


def test_no_more_groups_than_wanted_and_whole_ones_only() -> None:
    groups = [play([[1.0], [0.0]], [True, False], group=number) for number in range(4)]
    broken = groups[0][1]
    broken.status, broken.reward = "aborted", None
    episodes = [episode for group in groups for episode in group]
    score(episodes, GrpoOptions(advantage="dr_grpo", filter="none"), SUM, max_trained_groups=2)
    assert [episode.trained for episode in episodes] == [False, False, True, True, True, True, False, False]
    assert {episode.drop_reason for episode in (groups[0][0], *groups[3])} == {"surplus"}


@pytest.mark.parametrize(
    ("rule", "trained", "reasons"),
    [
        ("drop", [True, False, False], [None, "mixed_versions", "mixed_versions"]),
        ("mask", [True, True, False], [None, None, "stale"]),
        ("keep", [True, True, True], [None, None, None]),
    ],
)
def test_tokens_of_older_weights(rule: str, trained: list[bool], reasons: list[str | None]) -> None:
    episodes = play([[1.0], [0.0], [0.5]], [True, False, False])
    for episode, versions in zip(episodes, ([4, 4], [3, 4], [3, 3]), strict=True):
        start, end = (int(np.flatnonzero(episode.loss_mask)[index]) for index in (0, -1))
        middle = start + 1
        episode.weight_spans = [(versions[0], start, middle), (versions[1], middle, end + 1)]
    score(episodes, GrpoOptions(advantage="dr_grpo", filter="none", mixed_versions=rule), SUM)
    assert [episode.trained for episode in episodes] == trained
    assert [episode.drop_reason for episode in episodes] == reasons
    masks = [sampled_by(episode, 4) * episode.loss_mask for episode in episodes]
    totals = [int(episode.loss_mask.sum()) for episode in episodes]
    assert [int(mask.sum()) for mask in masks] == [totals[0], totals[1] - 1, 0]


def test_an_episode_that_was_given_up_may_have_the_newest_tokens() -> None:
    """What is not trained still says which weights are the newest: the update masks by them."""
    episodes = play([[1.0], [0.0]], [True, False])
    for episode, version in zip(episodes, (3, 4), strict=True):
        episode.weight_spans = [(version, int(np.flatnonzero(episode.loss_mask)[0]), len(episode.token_ids))]
    episodes[0].weight_spans.append((4, len(episodes[0].token_ids), len(episodes[0].token_ids)))  # added no token
    episodes[1].status, episodes[1].reward, episodes[1].drop_reason = "aborted", None, "aborted"
    options = GrpoOptions(advantage="dr_grpo", filter="none", min_groups=0, mixed_versions="mask")
    score(episodes, options, SUM)
    assert [(episode.trained, episode.drop_reason) for episode in episodes] == [(False, "stale"), (False, "aborted")]


@pytest.mark.parametrize(
    ("rewards", "trained"),
    [([0.0, 1.0], True), ([0.0, -1.0], True), ([0.0, 0.0], False), ([1.0, 1.0], False)],
)
def test_a_reward_of_zero_is_a_reward(rewards: list[float], trained: bool) -> None:
    """The filter sees it as the number that it is: beside another number there is a signal."""
    episodes = play([[0.1]] * len(rewards), [False] * len(rewards))
    for episode, reward in zip(episodes, rewards, strict=True):
        episode.reward = reward
    metrics = score(episodes, GrpoOptions(advantage="grpo", filter="zero_variance", min_groups=0), SUM)
    assert [episode.trained for episode in episodes] == [trained] * len(rewards)
    assert {episode.drop_reason for episode in episodes} == {None if trained else "zero_std"}
    assert trained or {episode.advantage for episode in episodes} == {0.0}
    for name in ("zero_std/count", "dynamic_filter/drop_zero_std"):
        assert (f"rollout/{name}_{rewards[0]}" in metrics) == (not trained)


def test_newest_version_without_a_token() -> None:
    episodes = play([[0.1]], [False])
    assert newest_version(episodes) == episodes[0].policy_version
    episodes[0].weight_spans = []
    assert newest_version(episodes) == newest_version([]) == -1
