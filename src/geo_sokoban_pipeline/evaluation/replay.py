"""Replay: stored episodes are rolled out again from their prompts and stored responses, by the code of the rollout.

The environment steps with the same responses and the reward grades them, so ids, mask, turns, images, metrics and
rewards must come out again, value for value. No model is needed: the responses are those of the file.

The states between the responses come out on the way; `forks.py` samples on from them.

Regrading replays episodes under another reward and other advantages. Tokens, mask and images must come out as stored:
options that change what the policy saw are refused, since it would have answered otherwise. Log-probs, seeds and
timings stay those of the rollout.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from geo_sokoban_pipeline.config.grpo import GrpoOptions
from geo_sokoban_pipeline.config.rollout import EnvOptions, RewardOptions, RolloutOptions
from geo_sokoban_pipeline.envs.base import Task, takes_seed
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.grpo.estimators import load_estimator
from geo_sokoban_pipeline.grpo.scoring import STATE_VALUE, apply_scores, score_groups
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.episode import (
    Episode,
    EpisodeRequest,
    RolloutSettings,
    load_generate,
    responses_of,
)
from geo_sokoban_pipeline.trajectories.arrow import to_json
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

_FIELDS = ("task_id", "status", "error", "prompt_length", "weight_spans", "image_grid_thw", "label", "response")
_TURN_FIELDS = ("role", "text", "token_start", "token_end", "image_indices", "action", "reward", "info")
_SHOWN = 80  # characters of a value in a finding
# Only names the engine in `sampling`, which is not compared.
_ENGINE: Any = SimpleNamespace(name="replay", software_version="", seeded=True)


@dataclass
class Replayer:
    """Rolls stored episodes of one run out again.

    Attributes:
        policy: its tokenizer and image processor; a policy without a model will do.
        env, reward, rollout: options that the run was made with.
        task: of the run.

    Raises:
        PluginError: environment, reward or rollout function cannot be loaded.
    """

    policy: Policy
    env: EnvOptions
    reward: RewardOptions
    rollout: RolloutOptions
    task: Task

    def __post_init__(self) -> None:
        self._build_env = load_object(self.env.factory, default_name="build_env")
        self._reward = load_object(self.reward.function, default_name="reward")
        self._generate = load_generate(self.rollout)

    def differences(
        self, episodes: Sequence[Trajectory], rows: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> list[tuple[str, str]]:
        """(trajectory id, what differs) for each episode that comes out otherwise, or whose prompt is missing.

        Args:
            episodes: failed ones are left out, because an error need not occur again.
            rows: prompts of the split that the episodes belong to, see `prompts_by_key`.
        """
        replayed = self.replay(episodes, rows)
        found: list[tuple[str, str]] = []
        for stored in episodes:
            again = replayed.get(stored.trajectory_id)
            problem = next(_compare(stored, again), None) if isinstance(again, Trajectory) else again
            if problem is not None:
                found.append((stored.trajectory_id, problem))
        return found

    def replay(
        self, episodes: Sequence[Trajectory], rows: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, Trajectory | str]:
        """By trajectory id, the episode as it comes out now, or why it cannot be replayed; see `differences`."""
        most = self.rollout.max_environments or max(1, len(episodes))
        parts = (episodes[first : first + most] for first in range(0, len(episodes), most))
        return {name: found for part in parts for name, found in self._replay(part, rows).items()}

    def _replay(
        self, episodes: Sequence[Trajectory], rows: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, Trajectory | str]:
        """The environments of all are open at the same time."""
        found: dict[str, Trajectory | str] = {}
        replayed: list[Episode] = []
        for stored in episodes:
            if stored.status == "failed":
                continue
            if (row := self._row_of(stored, rows)) is None:
                found[stored.trajectory_id] = f"task_id {stored.task_id!r} is no prompt of this split"
            else:
                episode = self._begin(stored, row)
                for response in responses_of(stored):
                    if episode.is_pending:
                        episode.advance(response)
                replayed.append(episode)
        # All rewards start before the first one is waited for, as in the rollout.
        for episode in replayed:
            episode.finalize(self._reward)
        finished = [episode.finish(_ENGINE) for episode in replayed]
        return {**found, **{episode.trajectory_id: episode for episode in finished}}

    def states(self, stored: Trajectory, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> ReplayedStates:
        """The states between the responses of an episode, as far as they come out as stored."""
        if (row := self._row_of(stored, rows)) is None:
            return ReplayedStates({}, [], False, f"task_id {stored.task_id!r} is no prompt of this split")
        episode, steps, problem = self._begin(stored, row), list[int | None](), None
        turns = [number for number, turn in enumerate(stored.turns) if turn.role == "assistant"]
        for number, response in zip(turns, responses_of(stored), strict=True):
            if (problem := _departure(stored, number, episode)) is not None:
                break
            steps.append(self._steps_to_goal(episode))
            episode.advance(response)
        else:
            if episode.status == stored.status:
                steps.append(self._steps_to_goal(episode))
            else:
                problem = f"the replay is {episode.status} after the last response, the episode {stored.status}"
        episode.close()
        is_random = hasattr(episode.env, "reseed")
        seed = stored.seed if episode.env is not None and takes_seed(episode.env) else None
        return ReplayedStates(row, steps, is_random, problem, episode.stepped, seed)

    def _steps_to_goal(self, episode: Episode) -> int | None:
        return None if episode.env is None else self.task.steps_to_goal(episode.env)

    def _row_of(self, stored: Trajectory, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any] | None:
        """Prompt of an episode; a problem may occur with several answers."""
        known = rows.get(stored.task_id, ())
        return (
            next((dict(row) for row in known if self.task.label_of(row) == stored.label), dict(known[0]))
            if known
            else None
        )

    def _begin(self, stored: Trajectory, row: dict[str, Any]) -> Episode:
        request = EpisodeRequest(stored.trajectory_id, row, stored.group_index, stored.sample_index, stored.seed)
        settings = RolloutSettings(
            self.env,
            self.reward,
            self.rollout,
            self.rollout.sampling,
            stored.iteration,
            self.task.name,
            stored.policy_version,
        )
        episode = Episode(0, request, self.policy, settings)
        episode.start(self._build_env, self._generate)
        return episode


@dataclass(frozen=True)
class ReplayedStates:
    """The states of a stored episode before each of its responses, and at its end.

    Attributes:
        row: its prompt.
        steps: of each state that comes out as stored, in order: `Task.steps_to_goal`.
        is_random: whether the environment draws random numbers, which `reseed` changes.
        problem: why the following states do not come out; None: all do.
        stepped: responses that the environment has carried out.
        seed: with which the environment began; None: it takes none.
    """

    row: dict[str, Any]
    steps: list[int | None]
    is_random: bool
    problem: str | None
    stepped: int = 0
    seed: int | None = None


def prompts_by_key(rows: Sequence[Mapping[str, Any]], task: Task) -> dict[str, list[Mapping[str, Any]]]:
    """Prompts by the `task_id` that their episodes have."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[task.key_of(row)].append(row)
    return dict(found)


def _departure(stored: Trajectory, number: int, replayed: Episode) -> str | None:
    """The first difference between the replay and the stored episode before a turn; None: a policy sees the same."""
    if not replayed.is_pending:
        return f"the replay is {replayed.status} before turn {number}" + (
            f": {replayed.error}" if replayed.error else ""
        )
    request, end = replayed.next_request(), stored.turns[number].token_start
    if (problem := _first_difference(stored.token_ids[:end], request.token_ids)) is not None:
        return f"token_ids, {problem}"
    seen = sum(len(turn.image_indices) for turn in stored.turns[:number])
    return next(_compare_images(stored.images[:seen], [image.png for image in request.images]), None)


def _compare(stored: Trajectory, replayed: Trajectory) -> Iterator[str]:
    """The differences, in the order of an episode's causes: turns, images, tokens, rewards."""
    if stored.status != replayed.status and replayed.error:
        yield f"the replay failed: {replayed.error}"
    yield from _compare_turns(stored.turns, replayed.turns)
    yield from _compare_images(stored.images, replayed.images)
    for name in ("token_ids", "loss_mask"):
        if (problem := _first_difference(getattr(stored, name), getattr(replayed, name))) is not None:
            yield f"{name}, {problem}"
    for name in ("reward_parts", "metrics"):
        values, others = getattr(stored, name), getattr(replayed, name)
        for part in sorted({*values, *others}):
            if values.get(part) != others.get(part):
                yield _difference(f"{name}, {part}", values.get(part), others.get(part))
    for name in ("reward", *_FIELDS):
        if getattr(stored, name) != getattr(replayed, name):
            yield _difference(name, getattr(stored, name), getattr(replayed, name))


def _compare_turns(stored: Sequence[Turn], replayed: Sequence[Turn]) -> Iterator[str]:
    for number, (one, other) in enumerate(zip(stored, replayed, strict=False)):
        for name in _TURN_FIELDS:
            before, now = getattr(one, name), getattr(other, name)
            if name == "info":  # values are no part of the episode
                before = {key: value for key, value in before.items() if key != STATE_VALUE}
            if before != now and (name != "info" or before != json.loads(to_json(now))):
                yield _difference(f"turn {number}, {name}", before, now)
    if len(stored) != len(replayed):
        yield _difference("number of turns", len(stored), len(replayed))


def _compare_images(stored: Sequence[bytes], replayed: Sequence[bytes]) -> Iterator[str]:
    for number, (one, other) in enumerate(zip(stored, replayed, strict=False)):
        if one != other and not _shows_the_same(one, other):
            yield f"image {number} shows something else than the replay"
    if len(stored) != len(replayed):
        yield _difference("number of images", len(stored), len(replayed))


def _difference(what: str, stored: Any, replayed: Any) -> str:
    return f"{what}: stored {_short(stored)}, replayed {_short(replayed)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _first_difference(stored: np.ndarray, replayed: np.ndarray) -> str | None:
    if np.array_equal(stored, replayed):
        return None
    length = min(len(stored), len(replayed))
    places = np.flatnonzero(stored[:length] != replayed[:length])
    if not len(places):
        return f"length: stored {len(stored)}, replayed {len(replayed)}"
    place = int(places[0])
    return f"token {place}: stored {stored[place]}, replayed {replayed[place]}"


def _shows_the_same(one: bytes, other: bytes) -> bool:
    """Whether two PNGs have the same pixels: another version of the library may compress them otherwise."""
    try:
        with Image.open(io.BytesIO(one)) as first, Image.open(io.BytesIO(other)) as second:
            return first.size == second.size and first.convert("RGB").tobytes() == second.convert("RGB").tobytes()
    except OSError:
        return False


class RegradeError(ValueError):
    """A stored episode cannot be graded again under these options."""


def regrade_episodes(
    stored: Sequence[Trajectory],
    replayer: Replayer,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    grpo: GrpoOptions,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The episodes of one iteration with new rewards and advantages, and how far they differ.

    Args:
        replayer: with the new options of environment and reward.
        rows: prompts of the split that the episodes belong to, see `prompts_by_key`.
        grpo: new options of the advantages.

    Returns:
        New episodes in order; failed ones are as they were. `regrade/*`: episodes; how many rewards, signs of
        advantages and choices for the update changed; means of the old and the new rewards.

    Raises:
        RegradeError: an episode's prompt is missing, its replay fails, or the policy would have seen something else.
    """
    if load_estimator("advantage", grpo).forks is not None:
        raise RegradeError(
            f"grpo.advantage={grpo.advantage}: the stored values of states are of the stored rewards, and regrading "
            "samples no continuations; choose another advantage, or roll out again with rollout_*."
        )
    replayed = replayer.replay(stored, rows)
    regraded = [_merge(episode, replayed.get(episode.trajectory_id)) for episode in stored]
    apply_scores(regraded, score_groups(regraded, grpo, replayer.task, replayer.reward.args))
    pairs = list(zip(stored, regraded, strict=True))
    graded = [(old, new) for old, new in pairs if old.reward is not None and new.reward is not None]
    return regraded, {
        "regrade/episodes": float(len(pairs)),
        "regrade/changed_rewards": float(sum(old.reward != new.reward for old, new in pairs)),
        "regrade/changed_signs": float(sum(_sign(old) != _sign(new) for old, new in graded)),
        "regrade/changed_trained": float(sum(old.trained != new.trained for old, new in pairs)),
        "regrade/old_reward": float(np.mean([old.reward for old, _ in graded])) if graded else 0.0,
        "regrade/new_reward": float(np.mean([new.reward for _, new in graded])) if graded else 0.0,
    }


def _merge(stored: Trajectory, replayed: Trajectory | str | None) -> Trajectory:
    """The stored episode with what the replay has graded."""
    if replayed is None:  # it had failed
        return replace(stored)
    if isinstance(replayed, str):
        raise RegradeError(f"{stored.trajectory_id}: {replayed}")
    if replayed.status == "failed":
        raise RegradeError(f"{stored.trajectory_id}: the replay failed: {replayed.error}")
    same = np.array_equal(stored.token_ids, replayed.token_ids) and stored.images == replayed.images
    if not same or stored.status != replayed.status:
        raise RegradeError(
            f"{stored.trajectory_id}: with these options the policy would have seen something else than what is "
            "stored. Regrading takes options that change rewards and advantages alone: leave those out that change "
            "observations, limits or the end of an episode, and roll out again with rollout_* to try them."
        )
    return replace(
        stored,
        turns=[
            replace(old, reward=new.reward, info=new.info, credit=None, advantage=None)
            for old, new in zip(stored.turns, replayed.turns, strict=True)
        ],
        reward=replayed.reward,
        reward_parts=replayed.reward_parts,
        metrics=replayed.metrics,
    )


def _sign(episode: Trajectory) -> float:
    return float(np.sign(episode.advantage or 0.0))
