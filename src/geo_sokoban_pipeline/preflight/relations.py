"""Relations between parameters: values that are allowed one by one, but not together, or that hardly can be meant.

A failure here is what stops a run for certain, or leaves it nothing to learn from; what merely wastes some of it is a
warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from geo_sokoban_pipeline.config.grpo import LoopOptions, TrainOptions
from geo_sokoban_pipeline.envs.inspection import Check, State
from geo_sokoban_pipeline.grpo.schedules import is_eval_due, is_save_due
from geo_sokoban_pipeline.tasks import task_of

_GROUP = "parameters"


def check_relations(run: str, options: TrainOptions) -> list[Check]:
    """Findings about a run's options alone, one for each relation that is broken, or one `ok`.

    Args:
        run: namespace of the run, for the names in the messages.
    """
    found = [*_signal(run, options), *_schedule(run, options), *_cadence(run, options), *_batches(run, options)]
    found += _unused(run, options)
    return found or [Check(_GROUP, "values together", "ok", "all fit each other")]


def check_playing(run: str, options: TrainOptions) -> list[Check]:
    """Findings about what decides how episodes are played, for commands that only play; nothing where all is well."""
    return [*_batches(run, options)]


def check_counts(
    run: str, options: TrainOptions, train: int | None, validation: int | None, evaluation: int | None
) -> list[Check]:
    """Findings about the prompts that there will be, against what the run draws from them.

    Args:
        train, validation, evaluation: prompts of each split; None: not known.
    """
    loop, units = options.loop, task_of(options.task).words.units
    found = _training_prompts(run, options, train)
    if validation == 0 and options.warm_start.steps:
        text = f"{run}.warm_start.steps={options.warm_start.steps}: its validations have no validation {units}"
        found.append(_check(units, "failure", text, f"raise the count, or set {run}.warm_start.steps=0"))
    elif validation == 0 and options.evaluation.checkpoint == "best":
        text = f"{run}.evaluation.checkpoint=best: without validation {units} none is ever the best"
        found.append(_check(units, "failure", text, "raise the count of the split validation, or take final"))
    elif validation == 0 and loop.eval_interval:
        text = (
            f"{run}.loop.eval_interval={loop.eval_interval}: there are no validation {units}, so nothing is validated"
        )
        found.append(_check(units, "warning", text, "raise the count of the split validation"))
    if evaluation == 0:
        text = f"there are no evaluation {units}: the evaluation at the end says nothing"
        found.append(_check(units, "warning", text, "raise the count of the split eval"))
    for name, wanted, there in (
        ("loop.eval_prompts", loop.eval_prompts, validation),
        ("evaluation.prompts", options.evaluation.prompts, evaluation),
    ):
        if wanted is not None and there is not None and 0 < there < wanted:
            text = f"{run}.{name}={wanted}: there are {there}, which are played"
            found.append(_check(units, "warning", text, "lower it, or raise the count of the split"))
    known = ["as many as there are" if count is None else str(count) for count in (train, validation, evaluation)]
    text = f"{known[0]} for training, {known[1]} for validation, {known[2]} for the evaluation"
    return found or [_check(units, "ok", text)]


def check_lengths(
    run: str, options: TrainOptions, episode: int | None, context: int, prompt: int, response: int
) -> list[Check]:
    """Findings about the tokens of an episode, against the model's context and the budgets.

    Args:
        episode: tokens of the longest episode that the limits allow; None: nothing limits it but the context.
        context: positions of the model.
        prompt: tokens of the longest prompt that was looked at.
        response: tokens of the longest response of the expert, its end token included.
    """
    rollout = options.rollout
    found: list[Check] = []
    if prompt >= context or (rollout.max_context_tokens is not None and prompt >= rollout.max_context_tokens):
        room = min(context, rollout.max_context_tokens or context)
        text = f"a prompt takes {prompt} tokens, the context holds {room}"
        way_out = f"make the images smaller, or raise {run}.rollout.max_context_tokens"
        return [_check("tokens of an episode", "failure", text, way_out)]
    if episode is None:
        text = f"no limit but the model's context of {context} tokens"
        way_out = f"set {run}.rollout.max_tokens_per_turn, max_response_tokens or max_context_tokens"
        found.append(_check("tokens of an episode", "warning", text, way_out))
    elif episode > context:
        text = f"up to {episode} with {run}.rollout.max_turns={rollout.max_turns}; the model holds {context}"
        way_out = f"lower max_turns, or set {run}.rollout.max_context_tokens={context} to cut episodes there"
        found.append(_check("tokens of an episode", "warning", f"{text}, and only if all turns are used", way_out))
    if (limit := rollout.max_tokens_per_turn) is not None and response > limit:
        text = f"the expert's responses take {response} tokens; max_tokens_per_turn={limit} cuts them"
        found.append(_check("tokens of a response", "warning", text, f"raise {run}.rollout.max_tokens_per_turn"))
    if episode is not None and episode > options.optimizer.max_tokens:
        text = f"{run}.optimizer.max_tokens={options.optimizer.max_tokens}: the longest episode has {episode} tokens "
        text += "and is a micro-batch of its own"
        found.append(_check("tokens of a micro-batch", "warning", text, "raise it where memory allows"))
    text = f"{prompt} in the prompt, up to {episode} in all; the model holds {context}"
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
        yield _check("optimizer steps", "warning", text, "one step is made each time; null says the same")


def _unused(run: str, options: TrainOptions) -> Iterator[Check]:
    """Settings that are given and have no effect beside the others."""
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
        text += f"rate stays at {optimizer.decay_to:g} of its highest"
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
        text += "saved, and a killed run begins anew"
        yield _check("checkpoints", "warning", text, "lower it")


def _any_best(loop: LoopOptions) -> bool:
    """Whether any iteration is both validated and saved."""
    return any(
        is_eval_due(k, loop.eval_interval) and is_save_due(k, loop.save_interval, num_iterations=loop.iterations)
        for k in range(loop.iterations)
    )


def _batches(run: str, options: TrainOptions) -> Iterator[Check]:
    episodes = options.grpo.groups * options.grpo.group_size
    held = options.rollout.max_conversations
    if episodes > held:
        text = f"{run}.rollout.max_conversations={held}: {episodes} episodes are played in "
        text += f"{math.ceil(episodes / held)} waves"
        yield _check("conversations", "warning", text, "raise it where memory allows")
