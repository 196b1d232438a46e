"""Relations between parameters: values that are valid one by one, but contradict each other or are hardly intended.

A failure certainly stops the run or leaves it nothing to learn from; a warning wastes some of the run.
"""

from __future__ import annotations

import math

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.envs.inspection import Check
from geo_sokoban_pipeline.grpo.schedules import DECAY_TO, is_eval_due, is_save_due
from geo_sokoban_pipeline.preflight.checks import find_cases
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
    text = f"{run}.rollout.max_conversations={held}: {episodes} episodes need {math.ceil(episodes / held)} waves"
    return find_cases(_GROUP, (episodes > held, "conversations", "warning", text, "raise it if memory allows"))


def check_counts(
    run: str, options: TrainOptions, train: int | None, validation: int | None, evaluation: int | None
) -> list[Check]:
    """Findings about the number of prompts, compared with the run's demand.

    Args:
        train, validation, evaluation: prompts of each split; None: not known.
    """
    loop, groups, units = options.loop, options.grpo.groups, task_of(options.task).words.units
    no_validation = find_cases(
        _GROUP,
        (
            validation == 0 and options.warm_start.steps,
            units,
            "failure",
            f"{run}.warm_start.steps={options.warm_start.steps}: its validations have no validation {units}",
            f"raise the count, or set {run}.warm_start.steps=0",
        ),
        (
            validation == 0 and options.evaluation.checkpoint == "best",
            units,
            "failure",
            f"{run}.evaluation.checkpoint=best: without validation {units} no checkpoint can be the best",
            "raise the count of the split validation, or take final",
        ),
        (
            validation == 0 and loop.eval_interval,
            units,
            "warning",
            f"{run}.loop.eval_interval={loop.eval_interval}: there are no validation {units}, so nothing is validated",
            "raise the count of the split validation",
        ),
    )
    wanted = (
        ("loop.eval_prompts", loop.eval_prompts, validation),
        ("evaluation.prompts", options.evaluation.prompts, evaluation),
    )
    found = [
        *find_cases(
            _GROUP,
            (
                train == 0,
                units,
                "failure",
                f"there are no training {units}",
                "raise the count of the split train",
            ),
            (
                train and train < groups,
                units,
                "warning",
                f"{run}.grpo.groups={groups}: more than the {train} training {units}, so that {units} repeat",
                "raise the count of the split train, or lower groups",
            ),
        ),
        *no_validation[:1],
        *find_cases(
            _GROUP,
            (
                evaluation == 0,
                units,
                "warning",
                f"there are no evaluation {units}: the evaluation at the end is empty",
                "raise the count of the split eval",
            ),
            *(
                (
                    there and most is not None and there < most,
                    units,
                    "warning",
                    f"{run}.{name}={most}: there are {there}, and all of them are used",
                    "lower it, or raise the count of the split",
                )
                for name, most, there in wanted
            ),
        ),
    ]
    known = ["as many as there are" if count is None else str(count) for count in (train, validation, evaluation)]
    text = f"{known[0]} for training, {known[1]} for validation, {known[2]} for the evaluation"
    return found or [Check(_GROUP, units, "ok", text)]


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
    rollout, budget = options.rollout, options.optimizer.max_tokens
    room = min(context, rollout.max_context_tokens or context)
    too_long = find_cases(
        _GROUP,
        (
            prompt >= room,
            "tokens of an episode",
            "failure",
            f"a prompt takes {prompt} tokens, the context holds {room}",
            f"make the images smaller, or raise {run}.rollout.max_context_tokens",
        ),
    )
    found = too_long or find_cases(
        _GROUP,
        (
            episode is None,
            "tokens of an episode",
            "warning",
            f"no limit but the model's context of {context} tokens",
            f"set {run}.rollout.max_tokens_per_turn, max_response_tokens or max_context_tokens",
        ),
        (
            episode is not None and episode > context,
            "tokens of an episode",
            "warning",
            f"up to {episode} with {run}.rollout.max_turns={rollout.max_turns}; the model holds {context}; matters "
            "only if all turns are used",
            f"lower max_turns, or set {run}.rollout.max_context_tokens={context} to truncate episodes there",
        ),
        (
            rollout.max_tokens_per_turn is not None and response > rollout.max_tokens_per_turn,
            "tokens of a response",
            "warning",
            f"the expert's responses take {response} tokens; max_tokens_per_turn={rollout.max_tokens_per_turn} "
            "truncates them",
            f"raise {run}.rollout.max_tokens_per_turn",
        ),
        (
            episode is not None and episode > budget,
            "tokens of a micro-batch",
            "warning",
            f"{run}.optimizer.max_tokens={budget}: the longest episode has {episode} tokens and is a micro-batch by "
            "itself",
            "raise it if memory allows",
        ),
    )
    text = f"{prompt} in the prompt, up to {episode} in total; the model holds {context}"
    return found or [Check(_GROUP, "tokens of an episode", "ok", text)]


def _signal(run: str, options: TrainOptions) -> list[Check]:
    grpo, step = options.grpo, options.grpo.groups_per_step
    return find_cases(
        _GROUP,
        (
            grpo.group_size == 1,
            "group size",
            "failure",
            f"{run}.grpo.group_size=1: an episode alone in its group has advantage 0, so nothing is ever learnt",
            "give 2 or more",
        ),
        (
            grpo.min_groups > grpo.groups,
            "filter",
            "warning",
            f"{run}.grpo.min_groups={grpo.min_groups}: above groups={grpo.groups}, so the filter never drops a group",
            "lower it, or set filter=none",
        ),
        (
            step is not None and step > grpo.groups * max(1.0, grpo.max_refill),
            "optimizer steps",
            "warning",
            f"{run}.grpo.groups_per_step={step}: above groups={grpo.groups}",
            "every iteration has one step; null means the same",
        ),
    )


def _unused(run: str, options: TrainOptions) -> list[Check]:
    """Settings that have no effect with the others."""
    policy, grpo, warm = options.policy, options.grpo, options.warm_start
    divisor, server = grpo.constant_denominator, options.rollout.server
    return find_cases(
        _GROUP,
        (
            policy.source == "tiny" and policy.path,
            "policy",
            "warning",
            f"{run}.policy.path={policy.path}: not used, because {run}.policy.source=tiny builds a policy",
            "give policy.source=folder or hub, or leave the path out",
        ),
        (
            options.rollout.takes_turns and options.placement == "local" and server.first_gpu >= options.processes,
            "servers",
            "warning",
            f"{run}.rollout.server.colocated=true: servers begin at first_gpu={server.first_gpu}, behind the ranks' "
            f"{options.processes} GPUs, so they sleep during updates for nothing",
            f"give {run}.rollout.server.colocated=false, or first_gpu=0",
        ),
        (
            divisor is not None and grpo.reduction != "constant",
            "reduction",
            "warning",
            f"{run}.grpo.constant_denominator={divisor or 0:g}: not used with reduction={grpo.reduction}",
            "give reduction=constant, or null",
        ),
        (
            0 < warm.steps <= warm.warmup_steps,
            "warm start",
            "warning",
            f"{run}.warm_start.warmup_steps={warm.warmup_steps}: not below the {warm.steps} steps, so the full "
            "learning rate is never reached",
            "shorten the warm-up",
        ),
    )


def _schedule(run: str, options: TrainOptions) -> list[Check]:
    iterations, optimizer = options.loop.iterations, options.optimizer
    schedule = optimizer.schedule_iterations
    beyond = iterations > schedule and optimizer.decay_fraction > 0
    return find_cases(
        _GROUP,
        (
            beyond,
            "learning rate",
            "warning",
            f"{run}.loop.iterations={iterations}: beyond optimizer.schedule_iterations={schedule} the learning rate "
            f"stays at {DECAY_TO:g} of its highest",
            "make the schedule as long as the run; a stored run keeps its own, so a new one needs a new run_id",
        ),
        (
            not beyond and iterations <= schedule * (1 - optimizer.decay_fraction),
            "learning rate",
            "warning",
            f"{run}.optimizer.schedule_iterations={schedule}: with {iterations} iterations the learning rate never "
            "falls",
            "shorten the schedule, unless the run is to be extended",
        ),
        (
            optimizer.warmup_iterations >= iterations,
            "learning rate",
            "warning",
            f"{run}.optimizer.warmup_iterations={optimizer.warmup_iterations}: not below the {iterations} iterations, "
            "so the full learning rate is never reached",
            "shorten the warm-up",
        ),
    )


def _cadence(run: str, options: TrainOptions) -> list[Check]:
    loop = options.loop
    saved = [k for k in range(loop.iterations) if is_save_due(k, loop.save_interval, num_iterations=loop.iterations)]
    return find_cases(
        _GROUP,
        (
            options.evaluation.checkpoint == "best" and not any(is_eval_due(k, loop.eval_interval) for k in saved),
            "best checkpoint",
            "failure",
            f"{run}.evaluation.checkpoint=best: with eval_interval={loop.eval_interval}, "
            f"save_interval={loop.save_interval} and {loop.iterations} iterations no saved policy is validated",
            "make loop.eval_interval a multiple of loop.save_interval",
        ),
        (
            loop.eval_interval > loop.iterations,
            "validation",
            "warning",
            f"{run}.loop.eval_interval={loop.eval_interval}: above the {loop.iterations} iterations, so only the "
            "policy before training is validated",
            "lower it, or set 0",
        ),
        (
            loop.save_interval > loop.iterations,
            "checkpoints",
            "warning",
            f"{run}.loop.save_interval={loop.save_interval}: only the last of {loop.iterations} iterations is saved, "
            "and a killed run starts over",
            "lower it",
        ),
    )
