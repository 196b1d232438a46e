"""Relations between parameters: values that are valid one by one, but contradict each other or are hardly intended.

A failure certainly stops the run or leaves it nothing to learn from; a warning wastes some of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from geo_sokoban_pipeline.config.grpo import LoopOptions, TrainOptions
from geo_sokoban_pipeline.envs.inspection import Check, State
from geo_sokoban_pipeline.grpo.schedules import DECAY_TO, is_eval_due, is_save_due
from geo_sokoban_pipeline.tasks import task_of

_GROUP = "parameters"


def check_relations(run: str, options: TrainOptions) -> list[Check]:
    """Findings about a run's options alone, one for each broken relation, or one `ok`.

    Args:
        run: namespace of the run, for the names in the messages.
    """
    found = [*_signal(run, options), *_schedule(run, options), *_cadence(run, options)]
    found += [*check_conversations(run, options), *_unused(run, options)]
    return found or [Check(_GROUP, "values together", "ok", "all fit each other")]


def check_conversations(run: str, options: TrainOptions) -> list[Check]:
    """A warning if a rollout needs several waves of conversations."""
    episodes, held = options.grpo.groups * options.grpo.group_size, options.rollout.max_conversations
    if episodes <= held:
        return []
    text = f"{run}.rollout.max_conversations={held}: {episodes} episodes need {math.ceil(episodes / held)} waves"
    return [_check("conversations", "warning", text, "raise it if memory allows")]


def check_counts(
    run: str, options: TrainOptions, train: int | None, validation: int | None, evaluation: int | None
) -> list[Check]:
    """Findings about the number of prompts, compared with the run's demand.

    Args:
        train, validation, evaluation: prompts of each split; None: not known.
    """
    loop, units = options.loop, task_of(options.task).words.units
    found = _training_prompts(run, options, train)
    if validation == 0 and options.warm_start.steps:
        text = f"{run}.warm_start.steps={options.warm_start.steps}: its validations have no validation {units}"
        found.append(_check(units, "failure", text, f"raise the count, or set {run}.warm_start.steps=0"))
    elif validation == 0 and options.evaluation.checkpoint == "best":
        text = f"{run}.evaluation.checkpoint=best: without validation {units} no checkpoint can be the best"
        found.append(_check(units, "failure", text, "raise the count of the split validation, or take final"))
    elif validation == 0 and loop.eval_interval:
        text = (
            f"{run}.loop.eval_interval={loop.eval_interval}: there are no validation {units}, so nothing is validated"
        )
        found.append(_check(units, "warning", text, "raise the count of the split validation"))
    if evaluation == 0:
        text = f"there are no evaluation {units}: the evaluation at the end is empty"
        found.append(_check(units, "warning", text, "raise the count of the split eval"))
    for name, wanted, there in (
        ("loop.eval_prompts", loop.eval_prompts, validation),
        ("evaluation.prompts", options.evaluation.prompts, evaluation),
    ):
        if wanted is not None and there is not None and 0 < there < wanted:
            text = f"{run}.{name}={wanted}: there are {there}, and all of them are used"
            found.append(_check(units, "warning", text, "lower it, or raise the count of the split"))
    known = ["as many as there are" if count is None else str(count) for count in (train, validation, evaluation)]
    text = f"{known[0]} for training, {known[1]} for validation, {known[2]} for the evaluation"
    return found or [_check(units, "ok", text)]


def check_lengths(
    run: str, options: TrainOptions, episode: int | None, context: int, prompt: int, response: int
) -> list[Check]:
    """Findings about the tokens of an episode, compared with the model's context and the budgets.

    Args:
        episode: tokens of the longest episode under the limits; None: only the context limits it.
        context: positions of the model.
        prompt: tokens of the longest prompt that was encoded.
        response: tokens of the longest response of the expert, end token included.
    """
    rollout = options.rollout
    found: list[Check] = []
    room = min(context, rollout.max_context_tokens or context)
    if prompt >= room:
        text = f"a prompt takes {prompt} tokens, the context holds {room}"
        way_out = f"make the images smaller, or raise {run}.rollout.max_context_tokens"
        return [_check("tokens of an episode", "failure", text, way_out)]
    if episode is None:
        text = f"no limit but the model's context of {context} tokens"
        way_out = f"set {run}.rollout.max_tokens_per_turn, max_response_tokens or max_context_tokens"
        found.append(_check("tokens of an episode", "warning", text, way_out))
    elif episode > context:
        text = f"up to {episode} with {run}.rollout.max_turns={rollout.max_turns}; the model holds {context}"
        way_out = f"lower max_turns, or set {run}.rollout.max_context_tokens={context} to truncate episodes there"
        found.append(_check("tokens of an episode", "warning", f"{text}; matters only if all turns are used", way_out))
    if (limit := rollout.max_tokens_per_turn) is not None and response > limit:
        text = f"the expert's responses take {response} tokens; max_tokens_per_turn={limit} truncates them"
        found.append(_check("tokens of a response", "warning", text, f"raise {run}.rollout.max_tokens_per_turn"))
    if episode is not None and episode > options.optimizer.max_tokens:
        text = f"{run}.optimizer.max_tokens={options.optimizer.max_tokens}: the longest episode has {episode} tokens "
        text += "and is a micro-batch by itself"
        found.append(_check("tokens of a micro-batch", "warning", text, "raise it if memory allows"))
    text = f"{prompt} in the prompt, up to {episode} in total; the model holds {context}"
    return found or [_check("tokens of an episode", "ok", text)]


def _training_prompts(run: str, options: TrainOptions, train: int | None) -> list[Check]:
    groups, units = options.grpo.groups, task_of(options.task).words.units
    if train == 0:
        return [_check(units, "failure", f"there are no training {units}", "raise the count of the split train")]
    if train is not None and train < groups:
        text = f"{run}.grpo.groups={groups}: more than the {train} training {units}, so that {units} repeat"
        return [_check(units, "warning", text, "raise the count of the split train, or lower groups")]
    return []


def _check(name: str, state: State, found: str, way_out: str = "") -> Check:
    return Check(_GROUP, name, state, found, way_out)


def _signal(run: str, options: TrainOptions) -> Iterator[Check]:
    grpo = options.grpo
    if grpo.group_size == 1:
        text = f"{run}.grpo.group_size=1: an episode alone in its group has advantage 0, so nothing is ever learnt"
        yield _check("group size", "failure", text, "give 2 or more")
    if grpo.min_groups > grpo.groups:
        text = f"{run}.grpo.min_groups={grpo.min_groups}: above groups={grpo.groups}, so the filter never drops a group"
        yield _check("filter", "warning", text, "lower it, or set filter=none")
    if grpo.groups_per_step is not None and grpo.groups_per_step > grpo.groups * max(1.0, grpo.max_refill):
        text = f"{run}.grpo.groups_per_step={grpo.groups_per_step}: above groups={grpo.groups}"
        yield _check("optimizer steps", "warning", text, "every iteration has one step; null means the same")


def _unused(run: str, options: TrainOptions) -> Iterator[Check]:
    """Settings that have no effect with the others."""
    policy, grpo, warm = options.policy, options.grpo, options.warm_start
    if policy.source == "tiny" and policy.path:
        text = f"{run}.policy.path={policy.path}: not used, because {run}.policy.source=tiny builds a policy"
        yield _check("policy", "warning", text, "give policy.source=folder or hub, or leave the path out")
    if grpo.constant_denominator is not None and grpo.reduction != "constant":
        text = f"{run}.grpo.constant_denominator={grpo.constant_denominator:g}: not used with reduction="
        yield _check("reduction", "warning", f"{text}{grpo.reduction}", "give reduction=constant, or null")
    if 0 < warm.steps <= warm.warmup_steps:
        text = f"{run}.warm_start.warmup_steps={warm.warmup_steps}: not below the {warm.steps} steps, so the full "
        yield _check("warm start", "warning", f"{text}learning rate is never reached", "shorten the warm-up")


def _schedule(run: str, options: TrainOptions) -> Iterator[Check]:
    loop, optimizer = options.loop, options.optimizer
    schedule = optimizer.schedule_iterations
    if loop.iterations > schedule and optimizer.decay_fraction > 0:
        text = f"{run}.loop.iterations={loop.iterations}: beyond optimizer.schedule_iterations={schedule} the learning "
        text += f"rate stays at {DECAY_TO:g} of its highest"
        yield _check(
            "learning rate",
            "warning",
            text,
            "make the schedule as long as the run; a stored run keeps its own, so a new one needs a new run_id",
        )
    elif loop.iterations <= schedule * (1 - optimizer.decay_fraction):
        text = f"{run}.optimizer.schedule_iterations={schedule}: with {loop.iterations} iterations the learning rate "
        text += "never falls"
        yield _check("learning rate", "warning", text, "shorten the schedule, unless the run is to be extended")
    if optimizer.warmup_iterations >= loop.iterations:
        text = f"{run}.optimizer.warmup_iterations={optimizer.warmup_iterations}: not below the {loop.iterations} "
        text += "iterations, so the full learning rate is never reached"
        yield _check("learning rate", "warning", text, "shorten the warm-up")


def _cadence(run: str, options: TrainOptions) -> Iterator[Check]:
    loop = options.loop
    if options.evaluation.checkpoint == "best" and not _any_best(loop):
        text = f"{run}.evaluation.checkpoint=best: with eval_interval={loop.eval_interval}, "
        text += f"save_interval={loop.save_interval} and {loop.iterations} iterations no saved policy is validated"
        yield _check("best checkpoint", "failure", text, "make loop.eval_interval a multiple of loop.save_interval")
    if loop.eval_interval > loop.iterations:
        text = f"{run}.loop.eval_interval={loop.eval_interval}: above the {loop.iterations} iterations, so only the "
        text += "policy before training is validated"
        yield _check("validation", "warning", text, "lower it, or set 0")
    if loop.save_interval > loop.iterations:
        text = f"{run}.loop.save_interval={loop.save_interval}: only the last of {loop.iterations} iterations is "
        text += "saved, and a killed run starts over"
        yield _check("checkpoints", "warning", text, "lower it")


def _any_best(loop: LoopOptions) -> bool:
    """Whether any iteration is both validated and saved."""
    return any(
        is_eval_due(k, loop.eval_interval) and is_save_due(k, loop.save_interval, num_iterations=loop.iterations)
        for k in range(loop.iterations)
    )
