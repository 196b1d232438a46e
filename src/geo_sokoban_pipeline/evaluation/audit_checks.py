"""Checks of stored episodes and prompts that need neither a model nor a replay, one function each.

A finding breaks a guarantee. A trait that a sound run may have too (a group without a signal, a text that repeats
itself) is counted in a note and never a finding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.formats import plural
from geo_sokoban_pipeline.grpo.scoring import EpisodeScore, assistant_turns, is_constant, score_groups
from geo_sokoban_pipeline.policies.patches import PatchReader
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories.index import count_repeats
from geo_sokoban_pipeline.trajectories.types import Trajectory

# (trajectory id, what is wrong); no id where no single episode is concerned
Found = list[tuple[str | None, str]]

ADVANTAGE_TOLERANCE = 1e-9  # of its magnitude: another processor may add float64 in another order
_COUNTED_TEXT = 400  # characters of a response up to which it is kept as a text


def check_response_ends(episodes: Iterable[Trajectory], end_ids: Collection[int]) -> Found:
    """Each response has its end token last and once; only the last one may lack it, where it was cut off.

    Args:
        end_ids: ids that end a response.
    """
    found: Found = []
    wanted = np.asarray(sorted(end_ids))
    for episode in episodes:
        # Once for all responses of an episode: a call of numpy takes longer than the few tokens of one.
        ends = np.flatnonzero(np.isin(episode.token_ids, wanted)).tolist()
        responses = assistant_turns(episode)
        for number, turn in enumerate(responses):
            length, place = turn.token_end - turn.token_start, bisect_left(ends, turn.token_start)
            first = ends[place] - turn.token_start if place < len(ends) else length
            cut = number == len(responses) - 1 and episode.finish_reason != "stop"
            if first < length - 1:
                found.append((episode.trajectory_id, f"response {number}: an end token at {first} of {length}"))
            elif first >= length and not cut:
                found.append((episode.trajectory_id, f"response {number}: no end token, though it was not cut off"))
    return found


def check_image_grids(episodes: Iterable[Trajectory], reader: PatchReader) -> Found:
    """Each grid is the one that the image processor gives an image of this size; equal products are not enough."""
    return [
        (
            episode.trajectory_id,
            f"image {number}: image_grid_thw is {tuple(grid)}, the image processor gives {expected}",
        )
        for episode in episodes
        for number, (png, grid) in enumerate(zip(episode.images, episode.image_grid_thw, strict=True))
        if tuple(grid) != (expected := reader.grid_of_png(png))
    ]


# Scores: what training has computed from rewards, and the rewards themselves by group.


def check_advantages(
    episodes: Sequence[Trajectory], grpo: GrpoOptions, task: Task, reward_args: Mapping[str, Any], *, over_sampled: bool
) -> Found:
    """Advantages, credit, drop reasons and `trained` follow from the stored rewards.

    Args:
        episodes: all of one iteration, in the order of the file.
        over_sampled: whether groups beyond `grpo.groups` were started, of which the surplus is dropped.
    """
    try:
        scores = score_groups(
            episodes, grpo, task, reward_args, max_trained_groups=grpo.groups if over_sampled else None
        ).episodes
    except ValueError as error:
        return [(None, str(error))]
    return [
        (episode.trajectory_id, problem)
        for episode, score in zip(episodes, scores, strict=True)
        if score is not None and (problem := _score_problem(episode, score)) is not None
    ]


def _score_problem(episode: Trajectory, score: EpisodeScore) -> str | None:
    pairs: list[tuple[str, Any, Any]] = [
        ("trained", episode.trained, score.trained),
        ("drop_reason", episode.drop_reason, score.drop_reason),
        ("advantage", episode.advantage, score.advantage),
    ]
    for name, values in (("credit", score.turn_credits), ("advantage", score.turn_advantages)):
        for number, turn in enumerate(assistant_turns(episode)):
            computed = None if values is None else float(values[number])
            pairs.append((f"{name} of response {number}", getattr(turn, name), computed))
    return next(
        (
            f"{name}: stored {stored}, the rewards give {computed}"
            for name, stored, computed in pairs
            if not _equal(stored, computed)
        ),
        None,
    )


def _equal(stored: Any, computed: Any) -> bool:
    if isinstance(stored, float) and isinstance(computed, float):
        return abs(stored - computed) <= ADVANTAGE_TOLERANCE * max(1.0, abs(computed))
    return bool(stored == computed)


def check_untrained(episodes: Iterable[Trajectory]) -> Found:
    """Episodes of an evaluation were not trained and have no advantages."""
    return [
        (episode.trajectory_id, "an episode of an evaluation was trained or has an advantage")
        for episode in episodes
        if episode.trained
        or episode.advantage is not None
        or any(turn.advantage is not None or turn.credit is not None for turn in episode.turns)
    ]


def check_groups(episodes: Sequence[Trajectory], size: int) -> Found:
    """The groups of an iteration are numbered from 0 without a gap, and each one is whole."""
    samples: dict[int, list[int]] = defaultdict(list)
    for episode in episodes:
        samples[episode.group_index].append(episode.sample_index)
    found: Found = []
    if sorted(samples) != list(range(len(samples))):
        missing = sorted(set(range(max(samples))) - set(samples))
        found.append((None, f"groups {missing} are missing, of {max(samples) + 1}"))
    for group, numbers in sorted(samples.items()):
        if sorted(numbers) != list(range(size)):
            found.append((None, f"group {group} has the samples {sorted(numbers)}, of {size}"))
    return found


def has_no_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are equal, so that GRPO learns nothing from it."""
    return is_constant(np.asarray(rewards, np.float64))


def count_silent(episodes: Sequence[Trajectory]) -> tuple[int, int]:
    """How many groups of an iteration carry no signal, and how many have rewards."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.reward is not None:
            rewards[episode.group_index].append(episode.reward)
    return sum(map(has_no_signal, rewards.values())), len(rewards)


def describe_silent(silent: int, groups: int) -> str:
    """The same in words."""
    return f"{silent} of {plural(groups, 'group')} without a signal: all rewards are equal"


class TextCount:
    """Counts degenerate text: responses that end in repeats, and the response that is given most often."""

    def __init__(self) -> None:
        self.responses = self.repeating = 0
        self._texts: Counter[str] = Counter()

    def add(self, texts: Iterable[str]) -> None:
        """Count responses."""
        for text in texts:
            self.responses += 1
            self.repeating += count_repeats(text) > 0
            # By hash: long responses all differ, and the texts of a run need not fit in memory.
            self._texts[text if len(text) <= _COUNTED_TEXT else content_hash(text)] += 1

    def notes(self) -> list[str]:
        """The counts in words."""
        if not self.responses:
            return []
        text, times = self._texts.most_common(1)[0]
        return [
            f"{self.repeating} of {plural(self.responses, 'response')} end in repeats",
            f"{len(self._texts)} different responses; the most frequent one {times} times: {text[:60]!r}",
        ]


# Splits.


def check_splits(
    splits: Mapping[str, Sequence[Mapping[str, Any]]], key: str, apart: tuple[str, str], *, known: bool = False
) -> tuple[Found, list[str]]:
    """Findings and notes about what the prompts of two splits share.

    Args:
        splits: prompts by name of the split.
        key: column with the content hash of a prompt.
        apart: column whose values no two splits share, and its meaning.
        known: whether the data report names shared values of `apart`, as where there are too few of them; they are
            then a note.
    """
    found: Found = []
    notes: list[str] = []
    kinds: list[tuple[str, Any]] = [(f"rows with the same {key}", lambda row: row.get(key))]
    kinds.append(("rows with the same text and images", _content))
    if apart[0] != key:
        kinds.append((apart[1], lambda row: row.get(apart[0])))
    for meaning, value_of in kinds:
        values = {name: {value for row in rows if (value := value_of(row))} for name, rows in splits.items()}
        for one, other in combinations(values, 2):
            if shared := sorted(values[one] & values[other]):
                line = f"{one} and {other} share {len(shared)} {meaning}; first, {shared[0]}"
                if known and meaning == apart[1]:
                    notes.append(line)
                else:
                    found.append((None, line))
    for name, rows in splits.items():
        if repeated := len(rows) - len({row.get(key) or id(row) for row in rows}):
            notes.append(f"{name}: {repeated} of {plural(len(rows), 'row')} repeat another one of {name}")
    return found, notes


def _content(row: Mapping[str, Any]) -> str | None:
    """Hash of what the policy sees first; None for a prompt whose text alone says nothing, because it has no image."""
    if (images := row.get("images")) is None or not len(images):
        return None
    return content_hash(str(row.get("prompt")), *(str(image) for image in images))


def check_turn_values(rows: Sequence[Mapping[str, Any]], rewards: Mapping[str, float | None]) -> Found:
    """Values of turns agree with each other, and with the episodes that they are about.

    Args:
        rows: of `TURN_VALUES`, of one table.
        rewards: of the run's stored episodes, by trajectory id.
    """
    found: Found = []
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # of each state of a group, its first row's value
    for place, row in enumerate(rows):
        name, where = row["trajectory_id"], f"turn {row['turn']}"
        if name not in rewards:
            found.append((name, f"{where}: the run has no such episode"))
            continue
        if row["value"] is None:
            continue
        if not row["low"] <= row["value"] <= row["high"]:
            found.append((name, f"{where}: value {row['value']} outside of {row['low']} to {row['high']}"))
        of_state = (row["continuations"], row["value"], row["success"])
        state = tuple(row[name] for name in ("iteration", "group_index", "policy_version", "is_greedy", "history"))
        if known.setdefault(state, of_state) != of_state:
            found.append((name, f"{where}: another value than that of an equal history"))
        after = row["value_after"]
        if after is None:
            continue
        if row["advantage"] != after - row["value"]:
            found.append((name, f"{where}: advantage {row['advantage']}, values {row['value']} and {after}"))
        following = rows[place + 1] if place + 1 < len(rows) else None
        if row["continuations_after"] == 0:
            if after != rewards[name]:
                found.append((name, f"{where}: the episode ends with {after}, its reward is {rewards[name]}"))
        elif (
            following is not None
            and following["value"] is not None
            and not row["is_reseeded"]
            and (following["trajectory_id"], following["policy_version"]) == (name, row["policy_version"])
            and following["turns_left"] == row["turns_left"] - 1
            and following["value"] != after
        ):
            found.append((name, f"{where}: value {after} after it, {following['value']} before the next turn"))
    return found
