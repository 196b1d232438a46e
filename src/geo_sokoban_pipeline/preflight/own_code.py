"""User code before a run: signatures, one expert episode as in a rollout, and trials of what the parameters name.

Every failure names file and line of the user's code. The module imports the episode code, and torch with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.base import make_expert, reset, takes_seed
from geo_sokoban_pipeline.envs.inspection import Check, State, guard
from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.formats import type_name
from geo_sokoban_pipeline.grpo.estimators import (
    Estimator,
    EstimatorError,
    estimate_advantages,
    estimate_loss,
    estimate_weights,
    load_estimator,
)
from geo_sokoban_pipeline.grpo.groups import Episodes
from geo_sokoban_pipeline.grpo.loss import token_batch
from geo_sokoban_pipeline.grpo.scoring import REWARD_PART, refuse_reward, turn_rewards
from geo_sokoban_pipeline.grpo.sequences import TokenBatch
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.preflight.checks import is_own, made_of_turns, needs_turns
from geo_sokoban_pipeline.rollout.engines.base import Result
from geo_sokoban_pipeline.rollout.episode import (
    Episode,
    EpisodeRequest,
    EpisodeResult,
    RolloutSettings,
    begin_reward,
    check_environment,
    check_reward,
    check_step,
    check_turns,
    close_environment,
    finalize_environment,
    load_generate,
)
from geo_sokoban_pipeline.rollout.functions import is_async
from geo_sokoban_pipeline.runs.fingerprint import own_estimators
from geo_sokoban_pipeline.runs.own_code import explain
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table

# One episode as in a rollout, and its size in tokens.


_GROUP = "own code"
_PROMPTS = 32  # that are encoded to find the longest one


@dataclass(frozen=True)
class EpisodeShape:
    """Tokens, images and bytes of an episode's parts; tokens of a message include those of its images.

    Attributes:
        prompt: tokens of the longest encoded prompt.
        observation: tokens of the longest observation; without any, of the prompt.
        response: tokens of the expert's longest response, end token included; 0 without a response or an expert.
        patches: patches of the largest image; 0 without images.
        image_tokens: language tokens of the largest image.
        image_bytes: of the largest image's PNG.
        images: of an episode at most; None: one of its prompt and one of each observation.
    """

    prompt: int
    observation: int
    response: int
    patches: int
    image_tokens: int
    image_bytes: int
    images: int | None = None

    def seen(self, turns: int) -> int:
        """Images of an episode behind that of its prompt, which its group shares, at most."""
        if not self.patches or turns == 1:
            return 0
        return turns if self.images is None else max(self.images - 1, 0)

    def longest(self, options: TrainOptions) -> int | None:
        """Tokens of the longest episode under the run's limits; None if only the context limits it."""
        rollout, turn = options.rollout, options.rollout.max_tokens_per_turn
        budget = rollout.max_response_tokens
        limits = (
            rollout.max_context_tokens,
            # By default the observation that exceeds the budget is kept, so it comes on top.
            None if budget is None else self.prompt + budget + self.observation,
            None if turn is None else self.prompt + rollout.max_turns * (turn + self.observation),
        )
        return min((limit for limit in limits if limit is not None), default=None)


def check_signatures(run: str, options: TrainOptions) -> list[Check]:
    """Whether the objects that the parameters name exist and accept the run's arguments."""
    wanted: list[tuple[str, str, str, tuple[Any, ...], dict[str, Any]]] = [
        ("env.factory", options.env.factory, "build_env", ("sample", "args"), {}),
        ("reward.function", options.reward.function, "reward", ("result", "args"), {}),
        ("rollout.function", options.rollout.function, "rollout", ("engine", "policy", [], "settings", None), {}),
    ]
    if options.warm_start.steps:  # without steps, no expert is needed
        expert = options.warm_start.teacher
        wanted.append(("warm_start.teacher.factory", expert.factory, "build_teacher", ("name", 1, 0.0), expert.args))
    found: list[Check] = []
    for name, spec, default, arguments, named in wanted:
        check = partial(_check_call, f"{run}.{name}", spec, default, arguments, named)
        found += guard(_GROUP, f"{run}.{name}", lambda check=check: [check()])  # type: ignore[misc]
    return found


def _check_call(path: str, spec: str, default: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Check:
    function = load_object(spec, default_name=default)
    if not callable(function):
        return Check(_GROUP, path, "failure", f"{spec}: is {type_name(function)}", "name a function or a class")
    if default == "rollout" and is_async(function):  # of one episode
        arguments = ("session", "request")
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        text = f"{spec}: cannot be called with {len(arguments) + len(named)} arguments ({error})"
        return Check(_GROUP, path, "failure", text, "see the description of the option for its arguments")
    except ValueError:  # a built-in without a signature
        return Check(_GROUP, path, "ok", f"{spec} (its arguments are unknown)")
    return Check(_GROUP, path, "ok", spec)


class _Expert:
    """The engine's attributes that a trajectory records, for an episode without an engine."""

    name, software_version, seeded = "expert", "", True


def _no_env(sample: Any, args: Any) -> SimpleNamespace:
    """A dummy environment, for encoding prompts."""
    return SimpleNamespace(**dict.fromkeys(("reset", "step", "format_observation", "close"), lambda *_: None))


def try_episode(
    encoding: Policy, rows: list[dict[str, Any]], options: TrainOptions, seed: int
) -> tuple[list[Check], EpisodeShape]:
    """Run one episode with the expert, or with one plain response if there is no warm start; validate its row.

    Args:
        encoding: a policy, whose model may be None.
        rows: prompts; the episode uses the hardest one if the task orders them, and a few dozen are encoded.

    Raises:
        RuntimeError: the environment, the expert or the reward raised; the message has the error.
    """
    task = task_of(options.task)
    row = max(rows, key=lambda one: task.difficulty_of(one) or 0) if task.ordered else rows[0]
    episode = _run_episode(encoding, row, options, seed)
    if episode.status == "failed":
        raise RuntimeError(f"the episode failed: {episode.error}")
    validate_trajectories(trajectories_to_table([episode], encoding.table_context))
    prompts = [_encode_prompt(encoding, one, options) for one in rows[:: -(-len(rows) // _PROMPTS)]]
    shape = _shape(episode, prompts, encoding, options)
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:.2f}"
    turns = int(episode.metrics.get("turns", 0))
    agent = f"expert {options.warm_start.teacher.name}" if options.warm_start.steps else "one plain response"
    text = f"{agent}: {turns} turns, {len(episode.token_ids)} tokens, {reward}"
    return [Check(_GROUP, "one episode", "ok", text)], shape


def _run_episode(encoding: Policy, row: dict[str, Any], options: TrainOptions, seed: int) -> Trajectory:
    reward = load_object(options.reward.function, default_name="reward")
    episode = _begin(encoding, row, options, seed)
    codec = encoding.codec
    episode.start(load_object(options.env.factory, default_name="build_env"), load_generate(options.rollout))
    responses = _responses(episode.env, row, options, seed)
    while episode.is_pending and (text := next(responses, None)) is not None:
        ids = np.append(codec.encode_text(text), np.int32(codec.end_id))
        episode.advance(Result(0, ids, np.zeros(len(ids), np.float32), "stop", 0))
    if episode.is_pending:
        episode.status = "completed"  # the expert gave up
    episode.finalize(reward)
    return episode.finish(_Expert())  # type: ignore[arg-type]  # has all that is read of an engine


def _begin(encoding: Policy, row: dict[str, Any], options: TrainOptions, seed: int) -> Episode:
    # Limits per turn are for the policy's responses: an expert's response is never truncated.
    rollout = options.rollout.model_copy(update={"max_tokens_per_turn": None})
    settings = RolloutSettings(options.env, options.reward, rollout, SamplingOptions(), 0, options.task)
    return Episode(0, EpisodeRequest("preflight/episode", row, 0, 0, seed), encoding, settings)


def _responses(env: Any, row: dict[str, Any], options: TrainOptions, seed: int) -> Iterator[str]:
    """Responses of the expert until it gives up; one plain response if the run has no warm start."""
    if not options.warm_start.steps:
        yield task_of(options.task).plain_response
        return
    expert, generator = make_expert(options.warm_start.teacher, row), python_generator(seed, "preflight")
    while (text := expert.respond(env, generator)) is not None:
        if not isinstance(text, str):
            raise TypeError(
                f"warm_start.teacher.factory={options.warm_start.teacher.factory}: respond must return a str, or None "
                f"to end the episode; it returned {type_name(text)}"
            )
        yield text


def _encode_prompt(encoding: Policy, row: dict[str, Any], options: TrainOptions) -> Trajectory:
    episode = _begin(encoding, row, options, 0)
    episode.start(_no_env)
    if episode.error is not None:
        raise RuntimeError(f"the prompt {row.get('id')} cannot be encoded: {episode.error}")
    return episode.snapshot()


def _shape(episode: Trajectory, prompts: list[Trajectory], encoding: Policy, options: TrainOptions) -> EpisodeShape:
    spans = {
        role: [t.token_end - t.token_start for t in episode.turns if t.role == role] for role in ("user", "assistant")
    }
    patches = max((t * h * w for one in (episode, *prompts) for t, h, w in one.image_grid_thw), default=0)
    return EpisodeShape(
        prompt=max(spans["user"][0], *(one.prompt_length for one in prompts)),
        observation=max(spans["user"][1:], default=spans["user"][0]),
        response=max(spans["assistant"], default=0) if options.warm_start.steps else 0,
        patches=patches,
        image_tokens=patches // encoding.codec.merge_size**2,
        image_bytes=max((len(image) for one in (episode, *prompts) for image in one.images), default=0),
    )


# A trial of estimators of the user's own on made-up numbers.


def try_estimators(run: str, options: TrainOptions) -> list[Check]:
    """Findings about the estimators that are the user's own code: two groups of episodes, two rows of tokens."""
    calls: dict[str, Callable[[], Any]] = {
        "advantage": lambda: _try_advantage(load_estimator("advantage", options.grpo)),
        "loss": lambda: _try_loss(load_estimator("loss", options.grpo)),
        "importance": lambda: estimate_weights(load_estimator("importance", options.grpo), _made_up_tokens()),
    }
    found = []
    for option, spec in own_estimators(options.grpo).items():
        try:
            calls[option.partition(".")[2]]()
            found.append(Check(_GROUP, option, "ok", spec))
        except Exception as error:  # user code may raise anything when it is imported
            why = str(error) if isinstance(error, PluginError) else f"it cannot be loaded. {explain(error)}"
            text = str(error) if isinstance(error, EstimatorError) else f"{option}={spec}: {why}"
            found.append(Check(_GROUP, option, "failure", f"{run}.{text}", "see docs/your_own_estimator.md"))
    return found


def _try_advantage(estimator: Estimator) -> None:
    found = estimate_advantages(estimator, _made_up_episodes())
    if estimator.zero_on_equal_groups and not found.per_turn and any(value.any() for value in found.values[3:]):
        raise estimator.refuse("it promises zero_on_equal_groups, but a group of equal rewards has other advantages")


def _try_loss(estimator: Estimator) -> None:
    batch = _made_up_tokens()
    terms, _ = estimate_loss(estimator, batch)
    first = TokenBatch(**{name: value[:1] for name, value in vars(batch).items()})
    if not torch.allclose(estimate_loss(estimator, first)[0], terms[:1], rtol=1e-4, atol=1e-6):
        raise estimator.refuse("terms of a row change with the other rows, so a step would depend on its micro-batches")


def _made_up_episodes() -> Episodes:
    """Two groups of three episodes with one to three responses, of which one group has equal rewards."""
    turns = [np.full(count, 1.0 / count) for count in (1, 2, 3)]
    worths = [turns[0], 0.5 * turns[1], -turns[2], *turns]
    return Episodes(
        group=np.repeat([0, 1], 3),
        reward=np.array([worth.sum() for worth in worths]),
        trained=np.ones(6, bool),
        lengths=[np.arange(2, 2 + len(worth)) for worth in worths],
        turn_rewards=worths,
        state_keys=[["start", "left", "right"][: len(worth)] for worth in worths],
        success=[worth.sum() > 0.5 for worth in worths],
        versions=np.zeros(6, np.int64),
        teacher_gaps=[np.zeros(0)] * 6,
    )


def _made_up_tokens() -> TokenBatch:
    """Two rows of four tokens with two responses each, of which the last token of the second row is masked."""
    new = torch.linspace(-3.0, -0.1, 8).reshape(2, 4).requires_grad_()
    mask = torch.ones(2, 4)
    mask[1, 3] = 0
    turns = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    return token_batch(new, new.detach() - 0.1, new.detach() - 0.2, torch.tensor([1.0, -0.5]), mask, turns)


# A trial of user code on one prompt without a policy: a complete episode, and one whose first response is truncated.


Row = dict[str, Any]


def try_own_code(run: str, row: Row, options: TrainOptions, seed: int) -> list[Check]:
    """Findings about a complete and a truncated episode on a prompt; none without user code.

    Args:
        run: namespace of the run, for the names in the messages.
        row: a prompt of the run.
    """
    if not is_own(options):
        return []
    # With max_failed_share=1 a run tolerates failed episodes.
    worst: State = "warning" if options.rollout.max_failed_share >= 1 else "failure"
    try:
        parts, turns, seen = _try_episode(row, options, seed)
    except Exception as error:  # user code may raise anything
        return [Check(_GROUP, "whole episode", worst, f"{run}: an episode of {row.get('id')} fails: {explain(error)}")]
    found = [Check(_GROUP, "whole episode", "ok", f"reward {parts['reward']:g}")]
    if seen and _try_episode(row, options, seed)[2] != seen:
        text = f"{run}.env.factory={options.env.factory}: two episodes with one seed and the same responses differ"
        way_out = "draw by the seed of reset alone; else replays, forks and a run that continues see something else"
        found.append(Check(_GROUP, "seed", "warning", text, way_out))
    if needs_turns(options) and not made_of_turns(options):
        found += _check_credit(run, options, parts, turns)
    try:
        parts, *_ = _try_episode(row, options, seed, truncated=True)
    except Exception as error:  # user code may raise anything
        text = f"{run}: an episode whose first response is truncated, so that result.infos is empty, fails: "
        way_out = "see docs/your_own_reward.md for the result of such an episode"
        return [*found, Check(_GROUP, "truncated episode", worst, text + explain(error), way_out)]
    text = f"reward {parts['reward']:g} where the first response is truncated, without infos"
    return [*found, Check(_GROUP, "truncated episode", "ok", text)]


def _try_episode(
    row: Row, options: TrainOptions, seed: int, *, truncated: bool = False
) -> tuple[dict[str, float], list[Any], list[Any]]:
    """Parts of the reward, the info of each turn with the part that the reward gave it, and what was seen.

    Seen are the observations and the rewards of turns, in order; nothing in an environment without a seed.

    Args:
        truncated: cut the first response to half its length, so that the environment is never stepped.
    """
    build_env = load_object(options.env.factory, default_name="build_env")
    reward = load_object(options.reward.function, default_name="reward")
    env = build_env(row, options.env.args)
    check_environment(env, options.env.factory)
    try:
        first = reset(env, seed)
        seen: list[Any] = []
        if takes_seed(env) and isinstance(first, tuple) and first[0] is not None:
            seen.append(env.format_observation(first[0]))
        responses: list[str] = []
        infos: list[dict[str, Any]] = []
        for text in _responses(env, row, options, seed):
            responses.append(text[: len(text) // 2] if truncated else text)
            if truncated:
                break
            observation, done, info = check_step(env.step(text), options.env.factory)
            infos.append(info)
            if takes_seed(env):
                seen += [info.get("turn_reward"), None if done else env.format_observation(observation)]
            if done or len(responses) >= options.rollout.max_turns:
                break
        result = EpisodeResult(row, "truncated" if truncated else "completed", responses, "".join(responses), infos)
        result = finalize_environment(env, result)
        given, name = begin_reward(reward, result, options.reward.args)(), options.reward.function
        parts = check_reward(given, name)
        shares = check_turns(given, parts["reward"], len(infos), name)
        infos = [{**info, REWARD_PART: share} for info, share in zip(infos, shares, strict=True)] if shares else infos
        _ = result.metrics
    finally:
        close_environment(env, "preflight")
    return parts, infos, seen


def _check_credit(run: str, options: TrainOptions, parts: dict[str, float], infos: list[Any]) -> list[Check]:
    """Whether the rewards of the turns, or the parts that the reward gave them, add up to the reward."""
    if any(REWARD_PART in info for info in infos):
        return []  # `check_turns` has added them up
    stepped = [info for info in infos if info.get("turn_reward") is not None]
    own = {name: value for name, value in parts.items() if name != "reward"}
    rewards, task = [info["turn_reward"] for info in stepped], task_of(options.task)
    try:
        values = turn_rewards(task, rewards, stepped, own, options.reward.args, parts["reward"])
        if infos and not stepped:  # a reward of 0 adds up by chance
            raise refuse_reward(task, parts["reward"], values)
    except ValueError as error:
        text = f"{run}.grpo.advantage={options.grpo.advantage}: {error}"
        return [Check(_GROUP, "credit", "failure", text)]
    return []
