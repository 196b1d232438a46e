"""One episode in play: environment, token ledger and turns move together, one reply at a time.

The state changes in one place (`advance`), in the order of the seed's algorithm: append the reply, check how it
finished, check the budget, step the environment, append the observation, check the budget and the turn limit.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from geo_sokoban_pipeline.envs.data_uris import read_data_uri
from geo_sokoban_pipeline.policies.chat import join_placeholders, split_placeholders
from geo_sokoban_pipeline.policies.images import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import Request, Result, RolloutEngine
from geo_sokoban_pipeline.rollout.ledger import TokenLedger
from geo_sokoban_pipeline.rollout.outcome import Outcome
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories import Trajectory, Turn

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.episode import PlaySettings

logger = logging.getLogger(__name__)
# Rows were checked against the limits of the data options; these only guard against what never passed them.
_MAX_IMAGE_BYTES = 64 << 20
_MAX_IMAGE_PIXELS = 1 << 26


@dataclass(frozen=True)
class EpisodeTask:
    """One episode to be played.

    Attributes:
        trajectory_id: unique name of the episode.
        prompt: row of a prompts data set.
        group_index: GRPO group within the iteration.
        sample_index: number within the group.
        seed: seed of the episode's sampling.
    """

    trajectory_id: str
    prompt: dict[str, Any]
    group_index: int
    sample_index: int
    seed: int


class Conversation:
    """An episode between its start and its trajectory."""

    def __init__(self, identity: int, task: EpisodeTask, policy: Policy, settings: PlaySettings) -> None:
        self.id = identity
        self.task = task
        self.status = "pending"
        self._policy = policy
        self._settings = settings
        self._rules = settings.rollout.effective_rules
        self._env: Any = None
        self._ledger = TokenLedger(np.empty(0, np.int32))
        self._images: list[EncodedImage] = []
        self._turns: list[Turn] = []
        self._infos: list[dict[str, Any]] = []
        self._replies: list[str] = []
        self._versions: list[tuple[int, int, int]] = []
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._env_seconds = 0.0

    def start(self, build_env: Callable[[dict[str, Any], dict[str, Any]], Any]) -> bool:
        """Build the environment and the first prompt; returns whether a reply is wanted."""
        began = time.perf_counter()
        try:
            self._env = build_env(self.task.prompt, self._settings.env.args)
            self._env.reset()
            self._append_prompt()
        except Exception as error:  # an own environment may raise anything; the episode keeps it as a row
            self._fail(error)
        self._env_seconds += time.perf_counter() - began
        if self.status == "pending" and self._spent():
            self.status = "truncated"
        return self.status == "pending"

    def request(self) -> Request:
        """What the engine is asked for next."""
        budget, per_turn = self._budget(), self._settings.rollout.max_tokens_per_turn
        limits = [limit for limit in (budget, per_turn) if limit is not None]
        return Request(
            id=self.id,
            token_ids=self._ledger.token_ids,
            images=self._images,
            sampling=self._settings.sampling,
            max_new_tokens=min(limits) if limits else None,
            seed=self.task.seed,
            sampled=self._ledger.sampled,
        )

    def advance(self, result: Result) -> bool:
        """Take a reply; returns whether another one is wanted."""
        self._append_reply(result)
        ended = self._ended_by(result)
        if ended is not None and not self._rules.step_before_finish_check:
            self.status = ended
        else:
            began = time.perf_counter()
            try:
                self._step(result)
            except Exception as error:  # an own environment may raise anything; the episode keeps it as a row
                self._fail(error)
            self._env_seconds += time.perf_counter() - began
        return self.status == "pending"

    @property
    def env(self) -> Any:
        """The environment, once the episode has started."""
        return self._env

    @property
    def error(self) -> str | None:
        """What the episode failed with, if it did."""
        return self._error

    def snapshot(self) -> Trajectory:
        """The episode so far, without a reward."""
        metrics = self._env.final_metrics() if hasattr(self._env, "final_metrics") else {}
        return self._trajectory("", {}, {name: float(value) for name, value in metrics.items()}, {})

    def finish(
        self, reward: Callable[..., dict[str, float]], engine: RolloutEngine, engine_seconds: float
    ) -> Trajectory:
        """Close the environment, compute the reward, and give the episode as a trajectory."""
        response = self._policy.codec.decode(self._ledger.token_ids[self._ledger.prompt_length :])
        parts, metrics = self._score(reward, response)
        self._close()
        trajectory = self._trajectory(response, parts, metrics, {"engine": engine_seconds, "env": self._env_seconds})
        trajectory.sampling = self._describe_sampling(engine)
        return trajectory

    def _trajectory(
        self, response: str, parts: dict[str, float], metrics: dict[str, float], timings: dict[str, float]
    ) -> Trajectory:
        ledger, row = self._ledger, self.task.prompt
        return Trajectory(
            trajectory_id=self.task.trajectory_id,
            task=self._settings.task,
            task_id=str(row.get("level_hash") or row["id"]),
            iteration=self._settings.iteration,
            group_index=self.task.group_index,
            sample_index=self.task.sample_index,
            policy_version=self._versions[0][0] if self._versions else self._settings.version,
            seed=self.task.seed,
            sampling="{}",
            status=self.status,
            finish_reason=self._finish_reason,
            error=self._error,
            drop_reason=None if self.status in ("completed", "truncated") else self.status,
            prompt_length=ledger.prompt_length,
            token_ids=ledger.token_ids,
            loss_mask=ledger.loss_mask,
            rollout_log_probs=ledger.log_probs,
            weight_spans=self._weight_spans(),
            turns=self._turns,
            images=[image.png for image in self._images],
            image_grid_thw=[image.grid for image in self._images],
            label=row.get("answer"),
            response=response,
            reward=parts.get("reward"),
            reward_parts={name: value for name, value in parts.items() if name != "reward"},
            metrics=metrics,
            timings=timings,
        )

    def _append_prompt(self) -> None:
        row = self.task.prompt
        images = [_decode(source) for source in row.get("images") or []]
        # Images without any placeholder column stay text: a null list never splits the prompt (seed defect 8).
        content = split_placeholders(row["prompt"], images) if images else [{"type": "text", "text": row["prompt"]}]
        encoded = self._read_images(content)
        messages = [{"role": "user", "content": content}]
        ids = self._policy.codec.encode_prompt(messages, [image.grid for image in encoded])
        self._ledger = TokenLedger(ids)
        self._images.extend(encoded)
        pictures = list(range(len(encoded)))
        self._turns.append(
            Turn(role="user", text=row["prompt"], token_start=0, token_end=len(ids), image_indices=pictures)
        )

    def _append_reply(self, result: Result) -> None:
        start = self._ledger.length
        self._ledger.append(result.token_ids, result.log_probs, trainable=True)
        self._finish_reason = result.finish_reason
        text = self._policy.codec.decode_reply(result.token_ids)
        self._replies.append(text)
        self._turns.append(Turn(role="assistant", text=text, token_start=start, token_end=self._ledger.length))
        self._versions.append((result.weight_version, start, self._ledger.length))

    def _step(self, result: Result) -> None:
        text = self._replies[-1]
        observation, done, info = self._env.step(text)
        self._infos.append(info)
        turn = self._turns[-1]
        turn.action = ",".join(info.get("parsed_actions") or []) or None
        turn.reward = info.get("turn_reward")
        turn.info = info
        ended = "completed" if done else self._ended_by(result)
        if ended is not None:
            self.status = ended
        else:
            self._append_observation(observation)

    def _append_observation(self, observation: dict[str, Any]) -> None:
        message = self._env.format_observation(observation)
        encoded = self._read_images(message["content"])
        ids = self._policy.codec.encode_observation(
            message, [image.grid for image in encoded], separator=self._rules.turn_separator
        )
        budget, rollout = self._budget(), self._settings.rollout
        if self._rules.drop_overflowing_observation and budget is not None and len(ids) > budget:
            self.status = "truncated"
            return
        start, first = self._ledger.length, len(self._images)
        self._ledger.append(ids, trainable=False)
        self._images.extend(encoded)
        pictures = list(range(first, len(self._images)))
        text = join_placeholders(message["content"])
        self._turns.append(
            Turn(role="user", text=text, token_start=start, token_end=self._ledger.length, image_indices=pictures)
        )
        if self._spent():
            self.status = "truncated"
        elif len(self._replies) >= rollout.max_turns:
            self.status = "truncated" if self._rules.truncate_at_max_turns else "completed"

    def _read_images(self, content: list[dict[str, Any]]) -> list[EncodedImage]:
        images = [item["image"] for item in content if item["type"] == "image"]
        if self._settings.image_filter is not None:
            images = [self._settings.image_filter(image) for image in images]
        return [self._policy.reader.read(image) for image in images]

    def _budget(self) -> int | None:
        """Tokens that may still be added, or None without a limit."""
        rollout, ledger = self._settings.rollout, self._ledger
        limits = []
        if rollout.max_context_tokens is not None:
            limits.append(rollout.max_context_tokens - ledger.length)
        if rollout.max_response_tokens is not None:
            counted = ledger.sampled if self._rules.budget_counts == "sampled" else ledger.length - ledger.prompt_length
            if self._rules.budget_counts_prompt and rollout.max_context_tokens is None:
                counted += ledger.prompt_length
            limits.append(rollout.max_response_tokens - counted)
        return min(limits) if limits else None

    def _ended_by(self, result: Result) -> str | None:
        """Status of an episode that ends with this reply whatever the environment says; None: it may go on."""
        if result.finish_reason == "abort":
            return "aborted"
        return "truncated" if result.finish_reason == "length" or self._spent() else None

    def _spent(self) -> bool:
        budget = self._budget()
        return budget is not None and budget <= 0

    def _score(
        self, reward: Callable[..., dict[str, float]], response: str
    ) -> tuple[dict[str, float], dict[str, float]]:
        metrics: dict[str, float] = {"turns": float(len(self._replies))}
        if self.status == "failed" or self._env is None:
            return {}, metrics
        try:
            if hasattr(self._env, "final_metrics"):
                metrics |= _finite("final_metrics of the environment", self._env.final_metrics())
            if self.status == "aborted":
                return {}, metrics
            env = self._env.metadata() if hasattr(self._env, "metadata") else {}
            outcome = Outcome(self.task.prompt, self.status, self._replies, response, self._infos, env)
            parts = _finite("reward.function", reward(outcome, self._settings.reward.args))
            if "reward" not in parts:
                raise ValueError(f"reward.function gave {sorted(parts)}, but no `reward`.")
            return parts, metrics
        except Exception as error:  # an own reward may raise anything; the episode keeps it as a row
            self._fail(error)
            return {}, metrics

    def _fail(self, error: Exception) -> None:
        self.status = "failed"
        self._error = f"{type(error).__name__}: {error}"

    def _close(self) -> None:
        try:
            if self._env is not None:
                self._env.close()
        except Exception:  # closing must not cost a finished episode (seed section 3.1)
            logger.warning("closing the environment of %s failed", self.task.trajectory_id, exc_info=True)

    def _describe_sampling(self, engine: RolloutEngine) -> str:
        sampling, rollout = self._settings.sampling, self._settings.rollout
        values = {
            "engine": engine.name,
            "engine_version": engine.software_version,
            "seeded": engine.seeded,
            **sampling.model_dump(),
            "max_turns": rollout.max_turns,
            "max_tokens_per_turn": rollout.max_tokens_per_turn,
            "max_response_tokens": rollout.max_response_tokens,
            "max_context_tokens": rollout.max_context_tokens,
        }
        return json.dumps(values)

    def _weight_spans(self) -> list[tuple[int, int, int]]:
        """(version, start, end) of sampled tokens; neighbours of one version are one span."""
        spans: list[tuple[int, int, int]] = []
        for version, start, end in self._versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], end)
            else:
                spans.append((version, start, end))
        return spans


def _finite(source: str, values: Mapping[str, float]) -> dict[str, float]:
    """Named numbers as floats.

    Raises:
        ValueError: one is not finite; the message names it.
    """
    numbers = {name: float(value) for name, value in values.items()}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{source} gave {name}={number}; numbers must be finite.")
    return numbers


@lru_cache(maxsize=256)
def _decode(uri: str) -> Image.Image:
    """Picture of a prompt; the episodes of a group share it."""
    image = read_data_uri(uri, max_bytes=_MAX_IMAGE_BYTES, max_pixels=_MAX_IMAGE_PIXELS)
    image.info["content_key"] = f"uri:{content_hash(uri)}"
    return image
