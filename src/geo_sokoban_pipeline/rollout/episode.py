"""An episode from a prompt row to a trajectory, one response of the policy at a time.

Its tokens grow in one place, the `TokenLedger`: every append adds to ids, mask and log-probs at once, so
`len(token_ids) == len(loss_mask) == len(log_probs)` holds by construction. Nothing is ever re-tokenised: the trainer
sees the tokens that the policy saw.

A function decides what happens between the responses: `play`, or a user's. It reaches tokens, mask, log-probs and
images through its session alone, which is the `Episode`.

In order: `EpisodeRequest` is the input, `play` the loop, `Episode` the running episode, `EpisodeResult` the input of
reward functions; the result is a `Trajectory`, whose `responses_of` may be the `past` of another request.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import queue
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Any, Literal, TypeVar

import numpy as np
from PIL import Image

from geo_sokoban_pipeline.config.rollout import EnvOptions, RewardOptions, RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.envs.base import reset
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.grpo.scoring import REWARD_PART, adds_up
from geo_sokoban_pipeline.policies.chat import join_placeholders, split_placeholders
from geo_sokoban_pipeline.policies.patches import EncodedImage, decode_image
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.progress import waiting
from geo_sokoban_pipeline.rollout.engines.base import FinishReason, Request, Result, RolloutEngine, join_results
from geo_sokoban_pipeline.rollout.functions import (
    EnvCalls,
    EnvTimeoutError,
    InlineRun,
    LoopRun,
    is_async,
    own_loop,
)
from geo_sokoban_pipeline.runs.own_code import explain
from geo_sokoban_pipeline.tasks import difficulty_text, task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

logger = logging.getLogger(__name__)

_ENV_METHODS = ("reset", "step", "format_observation", "close")
_STEP_VALUES = 3  # observation, done, info
Returned = TypeVar("Returned")
Moved = Callable[["Episode"], None]
Generate = Callable[["Episode", "EpisodeRequest"], Coroutine[Any, Any, None]]
Status = Literal["pending", "completed", "truncated", "aborted", "failed"]
ImageFilter = Callable[[Image.Image], Image.Image]
# (row, arguments) → an environment
EnvFactory = Callable[[dict[str, Any], dict[str, Any]], Any]


# Input.


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to be rolled out.

    Attributes:
        trajectory_id: unique name of the episode.
        prompt: row of a prompts dataset.
        group_index: GRPO group within the iteration.
        sample_index: number within the group.
        seed: seed of the episode: of its sampling, and of what its environment draws.
        past: responses with which the episode begins, as an engine gave them. They are carried out as they are; after
            the last one, if it was aborted, its sampling continues.
        reseed_at: number of the response, from 0, before whose step the environment draws its randomness anew
            (`InteractionEnv.reseed`), by the seed above. None: never.
        env_seed: seed with which the environment begins, of a fork that of its episode; None: the seed above.
    """

    trajectory_id: str
    prompt: dict[str, Any]
    group_index: int
    sample_index: int
    seed: int
    past: Sequence[Result] = ()
    reseed_at: int | None = None
    env_seed: int | None = None

    def reset(self, env: Any) -> Any:
        """Start an environment's episode, by its seed."""
        return reset(env, self.seed if self.env_seed is None else self.env_seed)


@dataclass(frozen=True)
class RolloutSettings:
    """Settings that all episodes of one rollout share.

    Attributes:
        iteration: recorded in the trajectories.
        task: name of the task; no object, because settings are sent to other processes.
        version: of the engine's weights.
        image_filter: changes every image before the policy sees it (image ablations); None: images stay.
    """

    env: EnvOptions
    reward: RewardOptions
    rollout: RolloutOptions
    sampling: SamplingOptions
    iteration: int
    task: str
    version: int = 0
    image_filter: ImageFilter | None = None


# The loop of one episode.


async def play(session: Episode, request: EpisodeRequest) -> None:
    """The built-in function: a prompt, then response, step and observation, until the episode is over."""
    await session.open()
    session.prompt(request.prompt)
    while (text := await session.respond()) is not None:
        observation, done, info = await session.step(text)
        session.end_turn(info, done=done)
        if session.is_pending:
            session.observe(await session.call(session.env.format_observation, observation))


def load_generate(options: RolloutOptions) -> Generate:
    """The function of one episode: `rollout.function` if that is one, else the built-in one."""
    function = load_object(options.function, default_name="rollout")
    return function if is_async(function) else play


# The running episode.


class TokenLedger:
    """Tokens of one episode, prompt included: every append adds to ids, mask and log-probs at once."""

    def __init__(self, prompt_ids: np.ndarray) -> None:
        self.prompt_length = len(prompt_ids)
        self.length = 0
        self.sampled = 0
        self._ids: list[np.ndarray] = []
        self._sampled: list[tuple[int, np.ndarray]] = []
        self.append(prompt_ids, trainable=False)

    def append(self, token_ids: np.ndarray, log_probs: np.ndarray | None = None, *, trainable: bool) -> None:
        """Add tokens.

        Args:
            token_ids: (T,) ids.
            log_probs: (T,) required for sampled tokens, forbidden for others.
            trainable: whether the policy sampled them (mask 1).

        Raises:
            ValueError: log-probs are missing, unwanted, or of another length.
        """
        if trainable and log_probs is None:
            raise ValueError("sampled tokens need log_probs, one per token.")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that were not sampled take no log_probs; theirs are 0.0.")
        if log_probs is not None and len(log_probs) != len(token_ids):
            raise ValueError(f"{len(token_ids)} token ids came with {len(log_probs)} log_probs.")
        count = len(token_ids)
        self._ids.append(np.asarray(token_ids, np.int32))
        if log_probs is not None:
            self._sampled.append((self.length, np.asarray(log_probs, np.float32)))
            self.sampled += count
        self.length += count

    @property
    def token_ids(self) -> np.ndarray:
        """(L,) int32 ids so far."""
        if len(self._ids) > 1:
            self._ids = [np.concatenate(self._ids)]
        return self._ids[0]

    @property
    def loss_mask(self) -> np.ndarray:
        """(L,) int8, 1 exactly on sampled tokens."""
        mask = np.zeros(self.length, np.int8)
        for start, log_probs in self._sampled:
            mask[start : start + len(log_probs)] = 1
        return mask

    @property
    def log_probs(self) -> np.ndarray:
        """(L,) float32, 0.0 where the mask is 0."""
        values = np.zeros(self.length, np.float32)
        for start, log_probs in self._sampled:
            values[start : start + len(log_probs)] = log_probs
        return values


class Episode:
    """One episode: environment, tokens, images and turns advance together, one response at a time.

    It has two sides. The function of the episode, `play` or a user's, has it as its session: `open`, `prompt`,
    `respond`, `step`, `end_turn`, `observe`, `call`. The loop over episodes calls the others.

    `status` is its state:

    - `pending`: the next response is due. `next_request` makes the engine's request, `advance` takes its result.
    - `completed`: the environment is done, the function has returned, or `max_turns` is reached (`truncated` under
      slime's rules).
    - `truncated`: a token budget is used up, or a response was cut off at its limit.
    - `aborted`: the engine stopped a response. No reward.
    - `failed`: the environment or the reward raised; `error` has the message. No reward, no training.

    `start` and `advance` lead from `pending` to any state (in `start` the prompt may fill the budget, and
    `EpisodeRequest.past` may hold whole responses). All other states are final, except that an error in `finalize` or
    `finish` leads to `failed`. `finalize` ends the environment's episode and starts the reward; `finish` waits for the
    reward and returns the trajectory.
    """

    def __init__(self, identity: int, request: EpisodeRequest, policy: Policy, settings: RolloutSettings) -> None:
        self.id = identity
        self.request = request
        self.engine_seconds = 0.0  # its part of those of its batches
        self.status: Status = "pending"
        self.env: Any = None
        self.env_calls = EnvCalls(settings.rollout.env_timeout)
        self.error: str | None = None
        self.ledger = TokenLedger(np.empty(0, np.int32))
        self._policy = policy
        self._settings = settings
        self._rules = settings.rollout.effective_rules
        # Turns cover the ledger's tokens without gaps; images are in the order of their pads.
        self._turns: list[Turn] = []
        self._images: list[EncodedImage] = []
        self._responses: list[str] = []
        self._infos: list[dict[str, Any]] = []
        self._versions: list[tuple[int, int, int]] = []
        self._finish_reason: str | None = None
        self._prepared: list[Future[Any]] = []
        self._function: InlineRun | LoopRun
        self._wait: Callable[[], Any] | None = None
        self._resumed = 0.0
        self._last: Result | None = None
        self._is_asked = self._has_ended = False
        self._due: str | None = None
        self._is_told = False  # that the episode is over
        self._result: EpisodeResult | None = None
        self._reward: Callable[[], Any] | None = None
        self._env_seconds = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether the next response is due."""
        return self.status == "pending"

    @property
    def stepped(self) -> int:
        """Responses that the environment has carried out."""
        return len(self._infos)

    # The loop's side: start, request, result.

    def start(self, build_env: EnvFactory, generate: Generate = play, moved: Moved | None = None) -> None:
        """Begin the function of the episode; it runs to its first response.

        Args:
            build_env: used by `open`.
            generate: the function.
            moved: called with the episode whenever its function waits for a response or has ended; a function of the
                user's is then still at work when `start` and `advance` return. None: they wait for it.
        """
        self._build_env = build_env
        idle: queue.SimpleQueue[Episode] = queue.SimpleQueue()
        tell = partial(moved or idle.put, self)
        work, limit = self._run(generate), self._settings.rollout.env_timeout
        late = EnvTimeoutError(f"the rollout function took longer than rollout.env_timeout={limit} s")
        self._tell = tell
        self._function = InlineRun(work, tell) if generate is play else LoopRun(work, tell, self._fail, limit, late)
        self._wait = idle.get if moved is None else None
        self._go_on()

    async def _run(self, generate: Generate) -> None:
        with self._failing():
            await generate(self, self.request)
            if not self._turns:
                raise RuntimeError("the rollout function ended without a prompt; call session.prompt(request.prompt)")
            if self.is_pending:
                self.status = self._cut_off or "completed"
        self._has_ended = True
        self._env_seconds += time.perf_counter() - self._resumed

    def _fail(self, error: BaseException) -> None:
        self.status, self.error, self._has_ended = "failed", explain(error), True

    def _go_on(self) -> None:
        self._resumed = time.perf_counter()
        self._function.go_on()
        if self._wait is not None:
            self._wait()

    def cancel(self) -> None:
        """End the function where it waits."""
        self._function.cancel()

    def next_request(self) -> Request:
        """The engine's request for the next response."""
        limits = [
            limit for limit in (self._tokens_left(), self._settings.rollout.max_tokens_per_turn) if limit is not None
        ]
        past = np.empty(0, np.int32) if self._begun is None else self._begun.token_ids
        return Request(
            id=self.id,
            token_ids=np.concatenate([self.ledger.token_ids, past]) if len(past) else self.ledger.token_ids,
            images=self._images,
            sampling=self._settings.sampling,
            max_new_tokens=min(limits) - len(past) if limits else None,
            seed=self.request.seed,
            sampled=self.ledger.sampled + len(past),
        )

    def prepare(self, result: Result) -> None:
        """Start the environment's slow work for stepping with a response (`InteractionEnv.prepare`)."""
        if hasattr(self.env, "prepare"):
            with self._failing():
                self._prepared = list(self.env_calls(self.env.prepare, self._decode(self._with_past(result))) or ())

    @property
    def is_prepared(self) -> bool:
        """Whether the work that `prepare` started is done, so that `advance` need not wait."""
        return all(work.done() for work in self._prepared)

    def advance(self, result: Result) -> None:
        """Take a response, and let the function go on to the next one; nothing if it has ended meanwhile."""
        if self._has_ended:
            self._tell()
            return
        self._take(self._with_past(result))
        self._go_on()

    def _take(self, result: Result) -> None:
        text = self._add_response(result)
        self._finish_reason, self._last = result.finish_reason, result
        if self.is_pending and not self._rules.step_before_finish_check:
            self.status = self._ended_by(result) or self.status
        self._due = text if self.is_pending else None

    # The function's side.

    async def open(self) -> Any:
        """Build the environment of `env.factory`, as `env`; returns what its `reset` returns.

        Raises:
            ValueError: it lacks a method of `InteractionEnv`.
            RuntimeError: it is open.
        """
        if self.env is not None:
            raise RuntimeError("open is called a second time")
        self.env = await self.call(self._build_env, self.request.prompt, self._settings.env.args)
        check_environment(self.env, self._settings.env.factory)
        return await self.call(self.request.reset, self.env)

    def prompt(self, row: Mapping[str, Any]) -> None:
        """Begin the conversation, once, before the first response.

        Args:
            row: `prompt`, a text, and `images`, data URIs in the order of its placeholders; as a row of the data set.

        Raises:
            RuntimeError: there is one.
        """
        if self._turns:
            raise RuntimeError("prompt is called a second time")
        sources = row.get("images") or []
        # Without images the prompt is not split: placeholders stay text, as in slime (docs/deviations.md).
        content = split_placeholders(row["prompt"], sources) if sources else [{"type": "text", "text": row["prompt"]}]
        encoded = [self._encode_source(source) for source in sources]
        messages = [{"role": "user", "content": content}]
        self.ledger = TokenLedger(self._policy.codec.encode_prompt(messages, [image.grid for image in encoded]))
        self._add_turn("user", row["prompt"], 0, encoded)
        if self._is_budget_spent():
            self.status = "truncated"

    async def respond(self) -> str | None:
        """The policy's next response, without its end token; None: the episode is over.

        A response that was cut off or aborted ends the episode, unless `rollout.rules` has it carried out.

        Raises:
            RuntimeError: there is no prompt yet, no observation after the last response, or another call waits; or the
                last one returned None.
        """
        if self._is_told:
            raise RuntimeError("respond is called after None")
        if not self._turns:
            raise RuntimeError("respond is called before prompt")
        if self._is_asked:
            raise RuntimeError("respond is called while another call waits")
        if self.is_pending and self._turns[-1].role == "assistant":
            raise RuntimeError("respond is called twice without observe between")
        if self.is_pending and (past := self._finished_past) is not None:
            self._take(past)
        elif self.is_pending:
            self._env_seconds += time.perf_counter() - self._resumed
            self._is_asked = True
            await self._function.pause()
            self._is_asked = False
        text, self._due = self._due, None
        self._is_told = text is None
        return text

    async def step(self, text: str) -> tuple[Any, bool, dict[str, Any]]:
        """Carry out a response in the environment: observation, whether the episode is over, info.

        Raises:
            ValueError: the environment returned something else.
        """
        if self.request.reseed_at == len(self._infos) and hasattr(self.env, "reseed"):
            await self.call(self.env.reseed, self.request.seed)
        return check_step(await self.call(self.env.step, text), self._settings.env.factory)

    async def call(self, function: Callable[..., Returned], *arguments: Any) -> Returned:
        """Call what may block, within `rollout.env_timeout`; calls of an episode come one after the other.

        Raises:
            EnvTimeoutError: it takes longer.
        """

        @wraps(function)
        def plain() -> Returned:
            try:
                return function(*arguments)
            except StopIteration as error:  # no coroutine can raise it
                raise RuntimeError("StopIteration was raised") from error

        return await self._function.call(self.env_calls, plain)

    def end_turn(self, info: dict[str, Any], *, done: bool = False) -> None:
        """Note what a response has led to.

        Args:
            info: stored with the response; `turn_reward` is its reward, `parsed_actions` its actions.
            done: whether the episode is over.

        Raises:
            RuntimeError: the last turn is no response, it has an info, or the episode was over before.
        """
        turn = self._turns[-1]
        if len(self._infos) != len(self._responses) - 1 or self._is_told:
            raise RuntimeError("end_turn must be called once after each response that respond has returned")
        self._infos.append(info)
        turn.action = ",".join(info.get("parsed_actions") or []) or None
        turn.reward = info.get("turn_reward")
        turn.info = info
        self.status = ("completed" if done else self._cut_off) or self.status

    def observe(self, message: dict[str, Any]) -> None:
        """Append an observation, and set the status if no further response is due; nothing once the episode is over.

        Args:
            message: `{"role": …, "content": [{"type": "image", "image": PIL image}, {"type": "text", "text": …}]}`.

        Raises:
            RuntimeError: there is no prompt yet.
        """
        if not self._turns:
            raise RuntimeError("observe is called before prompt")
        self.status = self._cut_off or self.status
        if not self.is_pending:
            return
        encoded = [self._encode_image(item["image"]) for item in message["content"] if item["type"] == "image"]
        ids = self._policy.codec.encode_observation(
            message, [image.grid for image in encoded], separator=self._rules.turn_separator
        )
        budget = self._tokens_left()
        if self._rules.drop_overflowing_observation and budget is not None and len(ids) > budget:
            self.status = "truncated"
            return
        start = self.ledger.length
        self.ledger.append(ids, trainable=False)
        self._add_turn("user", join_placeholders(message["content"]), start, encoded)
        if self._is_budget_spent():
            self.status = "truncated"
        elif len(self._responses) >= self._settings.rollout.max_turns:
            self.status = "truncated" if self._rules.truncate_at_max_turns else "completed"

    @property
    def _cut_off(self) -> Status | None:
        """Status of an episode that its last response ends; None: it may continue."""
        return None if self._last is None else self._ended_by(self._last)

    def _ended_by(self, result: Result) -> Status | None:
        """Status of an episode that this response ends, regardless of the environment; None: it may continue."""
        if result.finish_reason == "abort":
            return "aborted"
        return "truncated" if result.finish_reason == "length" or self._is_budget_spent() else None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A user's environment or reward may raise anything; the trajectory records it."""
        try:
            yield
        except Exception as error:  # user code may raise anything
            self.status, self.error = "failed", explain(error)

    # Tokens, images, turns.

    def _add_response(self, result: Result) -> str:
        start = self.ledger.length
        self.ledger.append(result.token_ids, result.log_probs, trainable=True)
        text = self._decode(result)
        self._responses.append(text)
        self._add_turn("assistant", text, start, [])
        self._versions += [(version, start + first, start + last) for version, first, last in result.spans]
        return text

    def _add_turn(self, role: str, text: str, start: int, images: list[EncodedImage]) -> None:
        shown = list(range(len(self._images), len(self._images) + len(images)))
        self._images.extend(images)
        self._turns.append(
            Turn(role=role, text=text, token_start=start, token_end=self.ledger.length, image_indices=shown)
        )

    def _decode(self, result: Result) -> str:
        """A response as text, without its end token."""
        ids = result.token_ids
        return self._policy.codec.decode_response(
            ids[:-1] if len(ids) and int(ids[-1]) in self._policy.end_ids else ids
        )

    def _encode_source(self, source: str) -> EncodedImage:
        """An image of a prompt, given as a data URI."""
        plain = self._settings.image_filter is None
        return self._policy.reader.read_uri(source) if plain else self._encode_image(decode_image(source))

    def _encode_image(self, image: Image.Image) -> EncodedImage:
        change = self._settings.image_filter
        return self._policy.reader.read(image if change is None else change(image))

    def _with_past(self, result: Result) -> Result:
        """A response, joined to the tokens that an earlier attempt sampled of it."""
        return join_results(self._begun, result) if self._begun is not None else result

    @property
    def _finished_past(self) -> Result | None:
        """The next response, where it is given."""
        number = len(self._responses)
        past = self.request.past[number] if number < len(self.request.past) else None
        return past if past is not None and past.finish_reason != "abort" else None

    @property
    def _begun(self) -> Result | None:
        """The part of the next response that an earlier attempt has sampled; None: there is none."""
        past = self.request.past
        return past[-1] if len(past) == len(self._responses) + 1 and len(past[-1].token_ids) else None

    def _tokens_left(self) -> int | None:
        """Tokens that may still be added, or None without a limit."""
        rollout, ledger = self._settings.rollout, self.ledger
        limits = []
        if rollout.max_context_tokens is not None:
            limits.append(rollout.max_context_tokens - ledger.length)
        if rollout.max_response_tokens is not None:
            counted = ledger.sampled if self._rules.budget_counts == "sampled" else ledger.length - ledger.prompt_length
            if self._rules.budget_counts_prompt and rollout.max_context_tokens is None:
                counted += ledger.prompt_length
            limits.append(rollout.max_response_tokens - counted)
        return min(limits) if limits else None

    def _is_budget_spent(self) -> bool:
        budget = self._tokens_left()
        return budget is not None and budget <= 0

    # End.

    def finalize(self, reward: Callable[..., Any]) -> None:
        """End the environment's episode and start the reward.

        Call it for all episodes before `finish` of the first, so that their slow work runs in parallel.
        """
        if self.status == "failed":
            return
        with self._failing():
            result = EpisodeResult(self.request.prompt, self.status, self._responses, self._text(), self._infos)
            self._result = finalize_environment(self.env, result, self.env_calls)
            if self.status != "aborted":
                self._reward = begin_reward(reward, self._result, self._settings.reward.args)

    def finish(self, engine: RolloutEngine) -> Trajectory:
        """Wait for the reward, close the environment, and return the trajectory."""
        metrics: dict[str, float] = {"turns": float(len(self._responses))}
        parts: dict[str, float] = {}
        if self.status != "failed":
            with self._failing():
                metrics |= self.env_calls(measure_episode, self.env) if self._result is None else self._result.metrics
                if self._reward is not None:
                    with waiting():  # a judge may be slow, and has a limit of its own
                        given = self._reward()
                    parts = check_reward(given, self._settings.reward.function)
                    self._share(check_turns(given, parts["reward"], len(self._infos), self._settings.reward.function))
        self.close()
        trajectory = self._trajectory(parts, metrics, {"engine": self.engine_seconds, "env": self._env_seconds})
        trajectory.sampling = describe_sampling(engine, self._settings)
        return trajectory

    def close(self) -> None:
        """End the function, and close the environment."""
        self.cancel()
        close_environment(self.env, self.request.trajectory_id, self.env_calls)

    def _share(self, parts: Sequence[float]) -> None:
        """Note the part of the reward that the reward function gave to each stepped response."""
        responses = (turn for turn in self._turns if turn.role == "assistant")
        for turn, part in zip(responses, parts, strict=False):
            turn.info = {**turn.info, REWARD_PART: part}

    def snapshot(self) -> Trajectory:
        """The episode so far, without a reward."""
        return self._trajectory({}, measure_episode(self.env), {})

    def _text(self) -> str:
        """Everything after the prompt, as text with its markup."""
        return self._policy.codec.decode(self.ledger.token_ids[self.ledger.prompt_length :])

    def _weight_spans(self) -> list[tuple[int, int, int]]:
        """(version, start, end) of sampled tokens; neighbours of one version are one span."""
        spans: list[tuple[int, int, int]] = []
        for version, start, end in self._versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], end)
            else:
                spans.append((version, start, end))
        return spans

    def _trajectory(self, parts: dict[str, float], metrics: dict[str, float], timings: dict[str, float]) -> Trajectory:
        ledger, row, task = self.ledger, self.request.prompt, task_or_plain(self._settings.task)
        return Trajectory(
            trajectory_id=self.request.trajectory_id,
            task=self._settings.task,
            task_id=task.key_of(row),
            iteration=self._settings.iteration,
            group_index=self.request.group_index,
            sample_index=self.request.sample_index,
            policy_version=self._versions[0][0] if self._versions else self._settings.version,
            seed=self.request.seed,
            sampling="{}",
            status=self.status,
            finish_reason=self._finish_reason,
            error=self.error,
            drop_reason=None if self.status in ("completed", "truncated") else self.status,
            prompt_length=ledger.prompt_length,
            token_ids=ledger.token_ids,
            loss_mask=ledger.loss_mask,
            rollout_log_probs=ledger.log_probs,
            weight_spans=self._weight_spans(),
            turns=self._turns,
            images=[image.png for image in self._images],
            image_grid_thw=[image.grid for image in self._images],
            label=task.label_of(row),
            response=self._text() if self._result is None else self._result.response,
            difficulty=difficulty_text(self._settings.task, row),
            reward=parts.get("reward"),
            reward_parts={name: value for name, value in parts.items() if name != "reward"},
            metrics=metrics,
            timings=timings,
        )


def responses_of(episode: Trajectory) -> tuple[Result, ...]:
    """The responses of a stored episode as the engine gave them; only the last one may have been cut off."""
    turns = [turn for turn in episode.turns if turn.role == "assistant"]
    cut_off: dict[str | None, FinishReason] = {"length": "length", "abort": "abort"}
    found = []
    for number, turn in enumerate(turns, start=1):
        start, end = turn.token_start, turn.token_end
        spans = tuple(
            (version, max(first, start) - start, min(last, end) - start)
            for version, first, last in episode.weight_spans
            if first < end and last > start
        )
        found.append(
            Result(
                id=-1,
                token_ids=episode.token_ids[start:end],
                log_probs=episode.rollout_log_probs[start:end],
                finish_reason=cut_off.get(episode.finish_reason, "stop") if number == len(turns) else "stop",
                weight_version=spans[0][0] if spans else episode.policy_version,
                weight_spans=spans,
            )
        )
    return tuple(found)


# The end: the input of reward functions, and their start.


@dataclass(frozen=True)
class EpisodeResult:
    """A finished episode as input of a reward function: plain values, no tokens, no engine.

    Attributes:
        prompt: the prompt's row.
        status: `completed` or `truncated`; aborted and failed episodes get no reward.
        responses: text of each response, without end tokens.
        response: decoded text of everything after the prompt, observations and special tokens included.
        infos: the environment's info of each step; a response that was cut off is not stepped and has none.
        env: `env.metadata()` if the environment has it: turn rewards, final bonus, distances, …
        measure: computes `metrics`.
    """

    prompt: dict[str, Any]
    status: Status
    responses: list[str]
    response: str
    infos: list[dict[str, Any]]
    env: dict[str, Any] = field(default_factory=dict)
    measure: Callable[[], dict[str, float]] = field(default=dict, repr=False, compare=False)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """`env.final_metrics()`, `success` among them; `{}` if the environment has none.

        Computed on first use, because an environment may have to wait for them.
        """
        return self.measure()


def finalize_environment(env: Any, result: EpisodeResult, calls: EnvCalls | None = None) -> EpisodeResult:
    """Call `InteractionEnv.finalize`, and add the environment's state to the result.

    Args:
        calls: of the environment; None: without a limit.
    """
    calls = calls or EnvCalls(None)
    if hasattr(env, "finalize"):
        calls(env.finalize, result.responses, result.status)
    known = calls(env.metadata) if hasattr(env, "metadata") else {}
    return replace(result, env=known, measure=partial(calls, measure_episode, env))


def begin_reward(reward: Callable[..., Any], result: EpisodeResult, args: Mapping[str, Any]) -> Callable[[], Any]:
    """Start a reward; returns a function without arguments that waits for its value.

    A slow reward may have a method `begin` that takes the same arguments, starts the work without waiting, and returns
    such a function. An `async def` reward starts here too, so that the rewards of all episodes run in parallel.
    """
    if hasattr(reward, "begin"):
        return reward.begin(result, args)
    if is_async(reward):
        return own_loop().start(reward(result, args)).result
    return partial(_call_reward, reward, result, args)


def describe_sampling(engine: RolloutEngine, settings: RolloutSettings) -> str:
    """How an episode's tokens were sampled, as JSON."""
    rollout = settings.rollout
    return json.dumps(
        {
            "engine": engine.name,
            "engine_version": engine.software_version,
            "seeded": engine.seeded,
            **settings.sampling.model_dump(),
            "max_turns": rollout.max_turns,
            "max_tokens_per_turn": rollout.max_tokens_per_turn,
            "max_response_tokens": rollout.max_response_tokens,
            "max_context_tokens": rollout.max_context_tokens,
        }
    )


def _call_reward(reward: Callable[..., Any], result: EpisodeResult, args: Mapping[str, Any]) -> Any:
    given = reward(result, args)
    return own_loop().run(_await(given)) if inspect.isawaitable(given) else given


async def _await(work: Awaitable[Any]) -> Any:
    return await work


# Checks of the values that environments and rewards return: both may be a user's code. Every number that is stored is
# finite.


def check_environment(env: Any, name: str) -> None:
    """Check that a factory's result is an environment.

    Args:
        name: the value of `env.factory`.

    Raises:
        ValueError: a method is missing; the message names it.
    """
    if missing := [method for method in _ENV_METHODS if not callable(getattr(env, method, None))]:
        raise ValueError(
            f"env.factory={name}: must return an environment with {', '.join(_ENV_METHODS)}; it returned "
            f"{type_name(env)} without {', '.join(missing)}"
        )


def check_step(given: Any, name: str) -> tuple[Any, bool, dict[str, Any]]:
    """Check the return value of an environment's `step`: (observation, done, info).

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(given, tuple) or len(given) != _STEP_VALUES or not isinstance(given[2], dict):
        found = type_name(given)
        if isinstance(given, tuple):
            found = f"a tuple of {len(given)}" if len(given) != _STEP_VALUES else f"{type_name(given[2])} as info"
        raise ValueError(
            f"env.factory={name}: step must return (observation, done, info), info being a dict; it returned {found}"
        )
    return given[0], bool(given[1]), given[2]


def measure_episode(env: Any) -> dict[str, float]:
    """`env.final_metrics()`; `{}` if the environment has none.

    Raises:
        ValueError: one is not finite; the message names it.
    """
    return _finite("final_metrics of the environment", env.final_metrics()) if hasattr(env, "final_metrics") else {}


def check_reward(given: Any, name: str) -> dict[str, float]:
    """Parts of an episode's reward, `reward` among them.

    Args:
        given: return value of the reward function: the parts, or the reward as a number.
        name: the value of `reward.function`.

    Raises:
        ValueError: it is neither, one is no finite number, or `reward` is missing; the message names it.
    """
    source = f"reward.function={name}"
    if not isinstance(given, Mapping) and _number(given) is not None:
        given = {"reward": given}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{source}: must return a dict with the key 'reward' (float), or a float; it returned {type_name(given)}"
        )
    parts = _finite(source, {name: value for name, value in given.items() if name != TURNS})
    if "reward" not in parts:
        keys = ", ".join(map(repr, sorted(parts))) or "no key"
        raise ValueError(f"{source}: must return a dict with the key 'reward' (float), or a float; its dict has {keys}")
    return parts


TURNS = "turns"  # in the dict of a reward: its parts by response


def check_turns(given: Any, reward: float, stepped: int, name: str) -> list[float]:
    """The parts that a reward gives to the stepped responses of an episode; empty where it gives none.

    Args:
        given: return value of the reward function, which `check_reward` has accepted.
        stepped: number of responses that the environment has carried out.
        name: the value of `reward.function`.

    Raises:
        ValueError: it is no list of so many finite numbers, or they do not add up to the reward.
    """
    turns = given.get(TURNS) if isinstance(given, Mapping) else None
    if turns is None:
        return []
    source = f"reward.function={name}"
    if not isinstance(turns, Sequence | np.ndarray) or isinstance(turns, str) or len(turns) != stepped:
        shown = type_name(turns) + (f" of {len(turns)}" if hasattr(turns, "__len__") else "")
        raise ValueError(f"{source}: turns must be one number for each of {stepped} stepped responses; it is {shown}")
    parts = list(_finite(source, {f"turns[{index}]": value for index, value in enumerate(turns)}).values())
    if not adds_up(np.array(parts, np.float64), reward):
        raise ValueError(f"{source}: turns add up to {sum(parts):g}, but the reward is {reward:g}")
    return parts


def close_environment(env: Any, episode: str, calls: EnvCalls | None = None) -> None:
    """Close an episode's environment, if it has one and is not stuck; an error is only logged.

    Args:
        calls: of the environment, which end here; None: without a limit.
    """
    calls = calls or EnvCalls(None)
    try:
        if env is not None and not calls.is_stuck:
            calls(env.close)
    except Exception:  # a finished episode stays valid
        logger.warning("closing the environment of %s failed", episode, exc_info=True)
    calls.end()


def _finite(source: str, values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        if (number := _number(value)) is None:
            raise ValueError(f"{source}: {name!r} must be a number; it is {type_name(value)}")
        if not math.isfinite(number):
            raise ValueError(f"{source} gave {name}={number}; numbers must be finite.")
        numbers[name] = number
    return numbers


def _number(value: Any) -> float | None:
    """A number of any library as a float; None for anything else, numeric texts included."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        return None
