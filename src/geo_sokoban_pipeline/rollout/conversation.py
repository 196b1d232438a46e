"""One episode in play: environment and transcript move together, one reply at a time.

The state changes in one place (`advance`), in the order of the seed's algorithm: append the reply, check how it
finished, check the budget, step the environment, append the observation, check the budget and the turn limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from geo_sokoban_pipeline.own_code import explain
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.closing import (
    begin_reward,
    check_environment,
    check_reward,
    check_step,
    close_environment,
    conclude_episode,
    describe_sampling,
    measure_episode,
)
from geo_sokoban_pipeline.rollout.engines.base import Request, Result, RolloutEngine, join_results
from geo_sokoban_pipeline.rollout.outcome import Outcome
from geo_sokoban_pipeline.rollout.transcript import Transcript
from geo_sokoban_pipeline.tasks import difficulty_text, prompt_key
from geo_sokoban_pipeline.trajectories import Trajectory

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.episode import PlaySettings


@dataclass(frozen=True)
class EpisodeTask:
    """One episode to be played.

    Attributes:
        trajectory_id: unique name of the episode.
        prompt: row of a prompts data set.
        group_index: GRPO group within the iteration.
        sample_index: number within the group.
        seed: seed of the episode's sampling.
        past: what an earlier, aborted try has sampled of its only reply; the episode goes on from there. None: nothing.
    """

    trajectory_id: str
    prompt: dict[str, Any]
    group_index: int
    sample_index: int
    seed: int
    past: Result | None = None


class Conversation:
    """An episode between its start and its trajectory."""

    def __init__(self, identity: int, task: EpisodeTask, policy: Policy, settings: PlaySettings) -> None:
        self.id = identity
        self.task = task
        self.status = "pending"
        self._settings = settings
        self._rules = settings.rollout.effective_rules
        self._env: Any = None
        self._said = Transcript(policy, settings)
        self._infos: list[dict[str, Any]] = []
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._begun: list[Future[Any]] = []
        self._outcome: Outcome | None = None
        self._parts: Callable[[], Mapping[str, float]] | None = None
        self._env_seconds = 0.0

    def start(self, build_env: Callable[[dict[str, Any], dict[str, Any]], Any]) -> bool:
        """Build the environment and the first prompt; returns whether a reply is wanted."""
        began = time.perf_counter()
        try:
            self._env = build_env(self.task.prompt, self._settings.env.args)
            check_environment(self._env, self._settings.env.factory)
            self._env.reset()
            self._said.add_prompt(self.task.prompt)
        except Exception as error:  # an own environment may raise anything; the episode keeps it as a row
            self._fail(error)
        self._env_seconds += time.perf_counter() - began
        if self.status == "pending" and self._spent():
            self.status = "truncated"
        past = self.task.past
        if self.status == "pending" and past is not None and past.finish_reason != "abort":
            return self._take(past)  # its group was aborted, but this reply was whole
        return self.status == "pending"

    def request(self) -> Request:
        """What the engine is asked for next."""
        said, per_turn = self._said, self._settings.rollout.max_tokens_per_turn
        limits = [limit for limit in (said.tokens_left(), per_turn) if limit is not None]
        past = self._past_ids()
        return Request(
            id=self.id,
            token_ids=np.concatenate([said.ledger.token_ids, past]) if len(past) else said.ledger.token_ids,
            images=said.images,
            sampling=self._settings.sampling,
            max_new_tokens=min(limits) - len(past) if limits else None,
            seed=self.task.seed,
            sampled=said.ledger.sampled + len(past),
        )

    def prepare(self, result: Result) -> None:
        """Let the environment begin what it will need to be stepped with a reply (`InteractionEnv.prepare`)."""
        if hasattr(self._env, "prepare"):
            try:
                self._begun = list(self._env.prepare(self._said.read_reply(self._whole(result))) or ())
            except Exception as error:  # an own environment may raise anything; the episode keeps it as a row
                self._fail(error)

    @property
    def is_prepared(self) -> bool:
        """Whether `advance` need not wait for what `prepare` has begun."""
        return all(work.done() for work in self._begun)

    def advance(self, result: Result) -> bool:
        """Take a reply; returns whether another one is wanted."""
        return self._take(self._whole(result))

    def _whole(self, result: Result) -> Result:
        """A reply with what of it was there already."""
        past = self.task.past
        return result if past is None or not len(self._past_ids()) else join_results(past, result)

    def _past_ids(self) -> np.ndarray:
        """What of the next reply is there already."""
        past = self.task.past
        return past.token_ids if past is not None and not self._said.replies else np.empty(0, np.int32)

    def _take(self, result: Result) -> bool:
        text = self._said.add_reply(result)
        self._finish_reason = result.finish_reason
        if self.status == "failed":
            return False
        ended = self._ended_by(result)
        if ended is not None and not self._rules.step_before_finish_check:
            self.status = ended
        else:
            began = time.perf_counter()
            try:
                self._step(text, result)
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
        return self._trajectory("", {}, measure_episode(self._env), {})

    def conclude(self, reward: Callable[..., dict[str, float]]) -> None:
        """Tell the environment that the episode is over, and begin its reward; for all episodes before one is finished,
        so that their slow work goes on side by side.
        """
        if self._outcome is not None or self.status == "failed" or self._env is None:
            return
        try:
            said = self._said
            outcome = Outcome(self.task.prompt, self.status, said.replies, said.response(), self._infos)
            self._outcome = conclude_episode(self._env, outcome)
            if self.status != "aborted":
                self._parts = begin_reward(reward, self._outcome, self._settings.reward.args)
        except Exception as error:  # own code may raise anything; the episode keeps it as a row
            self._fail(error)

    def finish(
        self, reward: Callable[..., dict[str, float]], engine: RolloutEngine, engine_seconds: float
    ) -> Trajectory:
        """Close the environment, compute the reward, and give the episode as a trajectory."""
        self.conclude(reward)
        response = self._outcome.response if self._outcome else self._said.response()
        parts, metrics = self._score()
        close_environment(self._env, self.task.trajectory_id)
        trajectory = self._trajectory(response, parts, metrics, {"engine": engine_seconds, "env": self._env_seconds})
        trajectory.sampling = describe_sampling(engine, self._settings)
        return trajectory

    def _trajectory(
        self, response: str, parts: dict[str, float], metrics: dict[str, float], timings: dict[str, float]
    ) -> Trajectory:
        said, ledger, row = self._said, self._said.ledger, self.task.prompt
        version = said.first_version()
        return Trajectory(
            trajectory_id=self.task.trajectory_id,
            task=self._settings.task,
            task_id=prompt_key(row),
            iteration=self._settings.iteration,
            group_index=self.task.group_index,
            sample_index=self.task.sample_index,
            policy_version=self._settings.version if version is None else version,
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
            weight_spans=said.weight_spans(),
            turns=said.turns,
            images=[image.png for image in said.images],
            image_grid_thw=[image.grid for image in said.images],
            label=None if row.get("answer") is None else str(row["answer"]),
            response=response,
            difficulty=difficulty_text(self._settings.task, row),
            reward=parts.get("reward"),
            reward_parts={name: value for name, value in parts.items() if name != "reward"},
            metrics=metrics,
            timings=timings,
        )

    def _step(self, text: str, result: Result) -> None:
        observation, done, info = check_step(self._env.step(text), self._settings.env.factory)
        self._infos.append(info)
        turn = self._said.turns[-1]
        turn.action = ",".join(info.get("parsed_actions") or []) or None
        turn.reward = info.get("turn_reward")
        turn.info = info
        ended = "completed" if done else self._ended_by(result)
        if ended is not None:
            self.status = ended
        else:
            self._observe(observation)

    def _observe(self, observation: dict[str, Any]) -> None:
        if not self._said.add_observation(self._env.format_observation(observation)) or self._spent():
            self.status = "truncated"
        elif len(self._said.replies) >= self._settings.rollout.max_turns:
            self.status = "truncated" if self._rules.truncate_at_max_turns else "completed"

    def _ended_by(self, result: Result) -> str | None:
        """Status of an episode that ends with this reply whatever the environment says; None: it may go on."""
        if result.finish_reason == "abort":
            return "aborted"
        return "truncated" if result.finish_reason == "length" or self._spent() else None

    def _spent(self) -> bool:
        budget = self._said.tokens_left()
        return budget is not None and budget <= 0

    def _score(self) -> tuple[dict[str, float], dict[str, float]]:
        metrics: dict[str, float] = {"turns": float(len(self._said.replies))}
        if self.status == "failed" or self._env is None:
            return {}, metrics
        try:
            metrics |= measure_episode(self._env) if self._outcome is None else self._outcome.metrics
            return {} if self._parts is None else check_reward(self._parts(), self._settings.reward.function), metrics
        except Exception as error:  # an own reward may raise anything; the episode keeps it as a row
            self._fail(error)
            return {}, metrics

    def _fail(self, error: Exception) -> None:
        self.status = "failed"
        self._error = explain(error)
