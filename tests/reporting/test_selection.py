"""Which episodes are shown."""

from __future__ import annotations

import json

import pytest

from builders import PAD, make_trajectories
from geo_sokoban_pipeline.reporting.episodes import is_solved
from geo_sokoban_pipeline.reporting.training_episodes import choose_extremes, choose_gallery
from reporting.material import lazily, make_played, make_trained


def test_gallery_covers_lengths_and_both_ends():
    pairs = choose_gallery(make_played(), 2)
    kinds = [pair.after.difficulty for pair in pairs]
    assert kinds == sorted(kinds)
    assert set(kinds) == {str(length) for length in range(1, 9)}
    assert {is_solved(pair.after) for pair in pairs} == {True, False}
    assert len(pairs) <= 12
    for pair in pairs:
        assert not json.loads(pair.after.sampling)["greedy"]
        assert pair.after.group_index == pair.before.group_index
        assert "final" in pair.after.trajectory_id and "warm_start" in pair.before.trajectory_id


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_gallery_keeps_its_limit(limit):
    pairs = choose_gallery(make_played(24), 2, limit)
    assert len(pairs) == limit
    assert len({pair.after.difficulty for pair in pairs}) == limit


def test_galleries_of_one_policy_and_of_a_task_without_lengths():
    played = make_played(8)
    pairs = choose_gallery({"iter=00000/part-000": played["iter=00000/part-000"]}, 1)
    assert pairs and all(pair.before is None for pair in pairs)
    episodes = make_trajectories(20, group_size=1, evaluation=True)
    pairs = choose_gallery({"iter=00000/part-000": lazily(episodes)}, 1, 5)
    assert [(pair.after.group_index, pair.after.difficulty) for pair in pairs] == [(at, None) for at in range(5)]


@pytest.mark.parametrize("parts", [{}, {"iter=00001/part-000": lazily([])}])
def test_nothing_stored(parts):
    assert choose_gallery(parts, 2) == [] and choose_extremes(parts) is None


def test_extremes_come_from_the_newest_part_alone():
    extremes = choose_extremes(make_trained())  # the older part refuses to be read
    shown = (*extremes.best, *reversed(extremes.worst))
    above = [episode.reward - extremes.means[episode.trajectory_id] for episode in shown]
    assert above == sorted(above, reverse=True) and above[0] > 0 > above[-1]
    assert (extremes.iteration, extremes.image_pad_id) == (199, PAD)
    for episodes in (extremes.best, extremes.worst):
        assert len({episode.group_index for episode in episodes}) == len(episodes) == 3


def test_graded_and_trained_episodes_are_preferred():
    failed, graded = make_trajectories(2, iteration=1), make_trajectories(8, iteration=0)
    for episode in failed:
        episode.reward = episode.advantage = None
    best = max(graded, key=lambda episode: episode.reward)
    best.trained = False
    extremes = choose_extremes({"iter=00000/part-000": lazily(graded), "iter=00001/part-000": lazily(failed)})
    assert extremes.iteration == 0
    assert best.trajectory_id not in [episode.trajectory_id for episode in extremes.best]
