"""Token ledger: the one place where an episode's tokens, masks and log-probs grow.

Masks and log-probs are derived from where sampled tokens were appended, so `len(token_ids) == len(loss_mask) ==
len(log_probs)` holds by construction, and nothing is ever re-tokenised: what the policy saw is what the trainer sees.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from PIL import Image

from geo_sokoban_pipeline.config.rollout import EnvOptions, RewardOptions, RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.envs.base import prompt_key
from geo_sokoban_pipeline.envs.images import read_data_uri
from geo_sokoban_pipeline.policies.chat import join_placeholders, split_placeholders
from geo_sokoban_pipeline.policies.images import EncodedImage
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.background import BackgroundLoop
from geo_sokoban_pipeline.rollout.engines.base import Request, Result, RolloutEngine, join_results
from geo_sokoban_pipeline.runs.own_code import explain
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.tasks import difficulty_text
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine


class TokenLedger:
    """Tokens of one episode, from the prompt on."""

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
            log_probs: (T,) of sampled tokens; sampled tokens must have them, other tokens must not.
            trainable: whether the policy sampled them (mask 1).

        Raises:
            ValueError: log-probs are missing, unwanted, or of another length.
        """
        if trainable and log_probs is None:
            raise ValueError("sampled tokens need log_probs, one per token.")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that were not sampled take no log_probs; they count as 0.0.")
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


# What a reward function sees of a finished episode: plain values, no tokens, no engine.


@dataclass(frozen=True)
class EpisodeResult:
    """A finished episode.

    Attributes:
        prompt: the prompt's row.
        status: `completed` or `truncated`; aborted and failed episodes get no reward.
        replies: text of each reply, without end tokens.
        response: decoded text of everything after the prompt, observations and special tokens included.
        infos: what the environment reported of each turn that it was stepped with: fewer than replies where the last
            one was cut off, none where the first one was.
        env: `env.metadata()` where the environment has it: turn rewards, final bonus, distances, …
        measure: gives `metrics`.
    """

    prompt: dict[str, Any]
    status: str
    replies: list[str]
    response: str
    infos: list[dict[str, Any]]
    env: dict[str, Any] = field(default_factory=dict)
    measure: Callable[[], dict[str, float]] = field(default=dict, repr=False, compare=False)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """`env.final_metrics()`, `success` among them; `{}` where the environment has none.

        They are asked for when they are read: an environment may have to wait for them.
        """
        return self.measure()


ImageFilter = Callable[[Image.Image], Image.Image]


@dataclass(frozen=True)
class RolloutSettings:
    """What one call of the episode loop is played with; `version` is that of the engine's weights."""

    env: EnvOptions
    reward: RewardOptions
    rollout: RolloutOptions
    sampling: SamplingOptions
    iteration: int
    task: str
    version: int = 0
    image_filter: ImageFilter | None = None


# What environments say of turns, held once where they say the same.


_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def share_infos(turns: Iterable[Turn]) -> None:
    """Give turns with equal `info` one and the same dict, which nobody may change from then on.

    An info that is empty, holds None, or holds anything but plain JSON stays as it is.
    """
    first: dict[bytes, dict[str, Any]] = {}
    for turn in turns:
        if turn.info:
            try:
                text = orjson.dumps(turn.info, option=_PLAIN)
            except TypeError:
                continue
            # NaN reads as null too, and must not become None, or None NaN.
            if b"null" not in text:
                turn.info = first.setdefault(text, turn.info)


# Transcript: what was said in an episode, as tokens, pictures and turns that always cover one another.


if TYPE_CHECKING:
    pass

# Rows were checked against the limits of the data options; these only guard against what never passed them.
_MAX_IMAGE_BYTES = 64 << 20
_MAX_IMAGE_PIXELS = 1 << 26


class Transcript:
    """Tokens, pictures and turns of one episode.

    Attributes:
        ledger: all tokens, with masks and log-probs.
        images: all pictures, in the order of their pads.
        turns: all messages, in order.
        replies: texts of the policy's messages.
    """

    def __init__(self, policy: Policy, settings: RolloutSettings) -> None:
        self.ledger = TokenLedger(np.empty(0, np.int32))
        self.images: list[EncodedImage] = []
        self.turns: list[Turn] = []
        self.replies: list[str] = []
        self._policy = policy
        self._filter = settings.image_filter
        self._rollout, self._rules = settings.rollout, settings.rollout.effective_rules
        self._versions: list[tuple[int, int, int]] = []

    def add_prompt(self, row: dict[str, Any]) -> None:
        """Begin with a row of a prompts data set."""
        images = [_decode(source) for source in row.get("images") or []]
        # Images without any placeholder column stay text: a null list never splits the prompt (seed defect 8).
        content = split_placeholders(row["prompt"], images) if images else [{"type": "text", "text": row["prompt"]}]
        encoded = self._read_images(content)
        messages = [{"role": "user", "content": content}]
        self.ledger = TokenLedger(self._policy.codec.encode_prompt(messages, [image.grid for image in encoded]))
        self._add_turn("user", row["prompt"], 0, encoded)

    def add_reply(self, result: Result) -> str:
        """Add what the engine has sampled; returns it as text."""
        start = self.ledger.length
        self.ledger.append(result.token_ids, result.log_probs, trainable=True)
        text = self.read_reply(result)
        self.replies.append(text)
        self._add_turn("assistant", text, start, [])
        self._versions += [(version, start + first, start + last) for version, first, last in result.spans]
        return text

    def read_reply(self, result: Result) -> str:
        """What the engine has sampled, as text without its end."""
        ids = result.token_ids
        return self._policy.codec.decode_reply(ids[:-1] if len(ids) and int(ids[-1]) in self._policy.end_ids else ids)

    def add_observation(self, message: dict[str, Any]) -> bool:
        """Add a message of the environment; False where the rules leave it out because it exceeds the budget."""
        encoded = self._read_images(message["content"])
        ids = self._policy.codec.encode_observation(
            message, [image.grid for image in encoded], separator=self._rules.turn_separator
        )
        budget = self.tokens_left()
        if self._rules.drop_overflowing_observation and budget is not None and len(ids) > budget:
            return False
        start = self.ledger.length
        self.ledger.append(ids, trainable=False)
        self._add_turn("user", join_placeholders(message["content"]), start, encoded)
        return True

    def tokens_left(self) -> int | None:
        """Tokens that may still be added, or None without a limit."""
        rollout, ledger = self._rollout, self.ledger
        limits = []
        if rollout.max_context_tokens is not None:
            limits.append(rollout.max_context_tokens - ledger.length)
        if rollout.max_response_tokens is not None:
            counted = ledger.sampled if self._rules.budget_counts == "sampled" else ledger.length - ledger.prompt_length
            if self._rules.budget_counts_prompt and rollout.max_context_tokens is None:
                counted += ledger.prompt_length
            limits.append(rollout.max_response_tokens - counted)
        return min(limits) if limits else None

    def response(self) -> str:
        """Everything after the prompt, as text with its markup."""
        return self._policy.codec.decode(self.ledger.token_ids[self.ledger.prompt_length :])

    def first_version(self) -> int | None:
        """Version of the weights that sampled the first reply; None without one."""
        return self._versions[0][0] if self._versions else None

    def weight_spans(self) -> list[tuple[int, int, int]]:
        """(version, start, end) of sampled tokens; neighbours of one version are one span."""
        spans: list[tuple[int, int, int]] = []
        for version, start, end in self._versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], end)
            else:
                spans.append((version, start, end))
        return spans

    def _add_turn(self, role: str, text: str, start: int, images: list[EncodedImage]) -> None:
        shown = list(range(len(self.images), len(self.images) + len(images)))
        self.images.extend(images)
        turn = Turn(role=role, text=text, token_start=start, token_end=self.ledger.length, image_indices=shown)
        self.turns.append(turn)

    def _read_images(self, content: list[dict[str, Any]]) -> list[EncodedImage]:
        images = [item["image"] for item in content if item["type"] == "image"]
        if self._filter is not None:
            images = [self._filter(image) for image in images]
        return [self._policy.reader.read(image) for image in images]


@lru_cache(maxsize=256)
def _decode(uri: str) -> Image.Image:
    """Picture of a prompt; the episodes of a group share it."""
    image = read_data_uri(uri, max_bytes=_MAX_IMAGE_BYTES, max_pixels=_MAX_IMAGE_PIXELS)
    image.info["content_key"] = f"uri:{content_hash(uri)}"
    return image


# Closing an episode: its numbers, its reward, and how its tokens were sampled. Every number that is kept is finite.


logger = logging.getLogger(__name__)

_METHODS = ("reset", "step", "format_observation", "close")
_STEP = 3  # observation, done, info


def conclude_episode(env: Any, outcome: EpisodeResult) -> EpisodeResult:
    """Tell an environment that its episode is over (`InteractionEnv.conclude`), and take its state into the outcome."""
    if hasattr(env, "conclude"):
        env.conclude(outcome.replies, outcome.status)
    known = env.metadata() if hasattr(env, "metadata") else {}
    return replace(outcome, env=known, measure=partial(measure_episode, env))


def measure_episode(env: Any) -> dict[str, float]:
    """An environment's own numbers; `{}` where it has none.

    Raises:
        ValueError: one is not finite; the message names it.
    """
    return _finite("final_metrics of the environment", env.final_metrics()) if hasattr(env, "final_metrics") else {}


def begin_reward(reward: Callable[..., Any], outcome: EpisodeResult, args: Mapping[str, Any]) -> Callable[[], Any]:
    """What gives the parts of an episode's reward.

    A reward whose work is slow may have a method `begin` that takes the same arguments, sets the work going without
    waiting for it, and returns a function without arguments that gives the parts. One that is `async def` begins here,
    too, so that the rewards of all episodes wait for their servers side by side.
    """
    if hasattr(reward, "begin"):
        begun: Callable[[], Any] = reward.begin(outcome, args)
        return begun
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return _reward_loop().start(reward(outcome, args)).result
    return partial(_call_reward, reward, outcome, args)


def check_reward(given: Any, name: str) -> dict[str, float]:
    """Parts of an episode's reward, `reward` among them.

    Args:
        given: what the function returned: the parts, or the reward as a number.
        name: the value of `reward.function`.

    Raises:
        ValueError: it is neither, one is no finite number, or `reward` is missing; the message names it.
    """
    source = f"reward.function={name}"
    if not isinstance(given, Mapping) and _number(given) is not None:
        given = {"reward": given}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{source}: must return a dict with the key 'reward' (float), or a float; it returned {_type(given)}"
        )
    parts = _finite(source, given)
    if "reward" not in parts:
        keys = ", ".join(map(repr, sorted(parts))) or "no key"
        raise ValueError(f"{source}: must return a dict with the key 'reward' (float), or a float; its dict has {keys}")
    return parts


def check_environment(env: Any, name: str) -> None:
    """See that what a factory has built can be played.

    Args:
        name: the value of `env.factory`.

    Raises:
        ValueError: a method is missing; the message names it.
    """
    missing = [method for method in _METHODS if not callable(getattr(env, method, None))]
    if missing:
        raise ValueError(
            f"env.factory={name}: must return an environment with {', '.join(_METHODS)}; it returned {_type(env)} "
            f"without {', '.join(missing)}"
        )


def check_step(given: Any, name: str) -> tuple[Any, bool, dict[str, Any]]:
    """What an environment's `step` returned: observation, done, info.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(given, tuple) or len(given) != _STEP or not isinstance(given[2], dict):
        found = f"a tuple of {len(given)}" if isinstance(given, tuple) and len(given) != _STEP else _type(given)
        if found == "a tuple":
            found = f"{_type(given[2])} as info"
        raise ValueError(
            f"env.factory={name}: step must return (observation, done, info), info being a dict; it returned {found}"
        )
    return given[0], bool(given[1]), given[2]


def close_environment(env: Any, episode: str) -> None:
    """Close an episode's environment, if it has one; an error in it is logged and costs nothing."""
    try:
        if env is not None:
            env.close()
    except Exception:  # closing must not cost a finished episode (seed section 3.1)
        logger.warning("closing the environment of %s failed", episode, exc_info=True)


def describe_sampling(engine: RolloutEngine, settings: RolloutSettings) -> str:
    """How an episode's tokens were sampled, as JSON."""
    rollout = settings.rollout
    values = {
        "engine": engine.name,
        "engine_version": engine.software_version,
        "seeded": engine.seeded,
        **settings.sampling.model_dump(),
        "max_turns": rollout.max_turns,
        "max_tokens_per_turn": rollout.max_tokens_per_turn,
        "max_response_tokens": rollout.max_response_tokens,
        "max_context_tokens": rollout.max_context_tokens,
    }
    return json.dumps(values)


def _call_reward(reward: Callable[..., Any], outcome: EpisodeResult, args: Mapping[str, Any]) -> Any:
    given = reward(outcome, args)
    return _reward_loop().run(_await(given)) if inspect.isawaitable(given) else given


async def _await(work: Awaitable[Any]) -> Any:
    return await work


@cache
def _reward_loop() -> BackgroundLoop:
    """Where rewards that are `async def` run, all of a process in one, so that they can share their connections."""
    return BackgroundLoop("rewards")


def _finite(source: str, values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        number = _number(value)
        if number is None:
            raise ValueError(f"{source}: {name!r} must be a number; it is {_type(value)}")
        if not math.isfinite(number):
            raise ValueError(f"{source} gave {name}={number}; numbers must be finite.")
        numbers[name] = number
    return numbers


def _number(value: Any) -> float | None:
    """A number as a float, from whatever library; None: it is none, and a text is none either."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        return None


def _type(value: Any) -> str:
    """The type of a value in words."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


# One episode in play: environment and transcript move together, one reply at a time.


if TYPE_CHECKING:
    pass


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

    def __init__(self, identity: int, task: EpisodeTask, policy: Policy, settings: RolloutSettings) -> None:
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
        self._outcome: EpisodeResult | None = None
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
            outcome = EpisodeResult(self.task.prompt, self.status, said.replies, said.response(), self._infos)
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
