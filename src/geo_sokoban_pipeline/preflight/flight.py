"""The pre-flight as a whole: every check in the order in which a run would meet what it looks at.

What a check needs from another one (the shape of the model, a few prompts, one episode) is handed on; where it could
not be had, the checks that need it are skipped and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.envs.sokoban.sources import HubLoader, Reading
from geo_sokoban_pipeline.preflight.checks import Check, failure_of, guard
from geo_sokoban_pipeline.preflight.disk import check_paths, check_space, check_writable, plan_disk
from geo_sokoban_pipeline.preflight.episode import EpisodeShape, check_signatures, play_one
from geo_sokoban_pipeline.preflight.levels import (
    check_stored_prompts,
    check_yields,
    expected_counts,
    sample_levels,
    sample_prompts,
)
from geo_sokoban_pipeline.preflight.machine import check_accelerator, check_libraries, check_threads, check_torchvision
from geo_sokoban_pipeline.preflight.memory import check_memory, free_memory, plan_memory
from geo_sokoban_pipeline.preflight.model import ModelShape, inspect_model
from geo_sokoban_pipeline.preflight.network import check_keys, check_servers, needed_servers
from geo_sokoban_pipeline.preflight.plugins import check_plugins
from geo_sokoban_pipeline.preflight.relations import check_counts, check_lengths, check_relations
from geo_sokoban_pipeline.preflight.stored_run import (
    check_run,
    stored_checkpoint_bytes,
    stored_iteration_bytes,
    stored_iterations,
)
from geo_sokoban_pipeline.preflight.subject import Subject


@dataclass
class Findings:
    """What was found so far, and what later checks need of it.

    Attributes:
        checks: one record per row of the table.
        rows: training prompts to try things with.
        validation, evaluation: prompts that the run will play, in between and at its end.
        model: shape of the model; None where it could not be had.
        shape: of an episode; None likewise.
    """

    checks: list[Check] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    validation: int = 0
    evaluation: int = 0
    model: ModelShape | None = None
    shape: EpisodeShape | None = None


def inspect_run(subject: Subject, load_hub_rows: HubLoader | None) -> Findings:
    """Everything that is looked at before a weight is loaded.

    Args:
        load_hub_rows: gives the rows of a data set of the hub, see `read_source`.
    """
    findings = Findings()
    options, parameters = subject.options, subject.parameters
    timeout = subject.settings.network_timeout
    findings.checks += check_relations(subject.run, options)
    _inspect_data(subject, load_hub_rows, findings)
    _inspect_model(subject, findings)
    findings.checks += guard("own code", "arguments", lambda: _check_arguments(subject))
    findings.checks += check_signatures(subject.run, options)
    _inspect_episode(subject, findings)
    findings.checks += guard("run", subject.run, lambda: check_run(subject))
    findings.checks += guard("disk", "space", lambda: _check_disk(subject, findings))
    findings.checks += guard("memory", "in all", lambda: _check_memory(subject, findings))
    findings.checks += guard("libraries", "versions", lambda: [*check_libraries(), check_torchvision()])
    findings.checks += guard("machine", "accelerator", lambda: check_accelerator(options.policy))
    findings.checks += [check_threads(options.threads)]
    findings.checks += guard("network", "ports", lambda: check_servers(needed_servers(parameters), timeout))
    findings.checks += guard("network", "keys", lambda: check_keys(parameters, subject.run, timeout))
    return findings


def _inspect_data(subject: Subject, load_hub_rows: HubLoader | None, findings: Findings) -> None:
    stored = _prompts(subject)
    reading: Reading | None = None
    try:
        checks, reading = sample_levels(subject.data, subject.settings.rows, load_hub_rows)
        findings.checks += checks
        findings.rows = sample_prompts(subject.data, reading, stored)
    except Exception as error:  # files, a hub and a generator: each has errors of its own, and the rest still counts
        findings.checks.append(failure_of("data", "source", error))
    findings.checks += guard("data", "counts", lambda: check_yields(subject.data))
    findings.checks += guard("data", "stored prompts", lambda: check_stored_prompts(subject.data, stored))
    if reading is not None:
        counts = expected_counts(subject.data, reading)
        findings.checks += check_counts(
            subject.run, subject.options, counts["train"], counts["validation"], counts["eval"]
        )
        asked = subject.options.loop.eval_prompts, subject.options.evaluation.prompts
        findings.validation = min(asked[0] or counts["validation"], counts["validation"])
        findings.evaluation = min(asked[1] or counts["eval"], counts["eval"])


def _inspect_model(subject: Subject, findings: Findings) -> None:
    try:
        checks, findings.model = inspect_model(subject.options.policy)
        findings.checks += checks
    except Exception as error:  # a foreign folder may break its libraries in any way
        findings.checks.append(failure_of("model", "policy", error))


def _inspect_episode(subject: Subject, findings: Findings) -> None:
    options, model = subject.options, findings.model
    if model is None or not findings.rows:
        findings.checks.append(_skipped("own code", "one episode"))
        return
    try:
        checks, findings.shape = play_one(model.encoding, findings.rows, options, subject.parameters.seed)
        findings.checks += checks
    except Exception as error:  # own environments, rewards and teachers may raise anything
        findings.checks.append(failure_of("own code", "one episode", error))
        return
    shape = findings.shape
    longest = shape.longest(options, model.context)
    findings.checks += check_lengths(subject.run, options, longest, model.context, shape.prompt, shape.reply)


def _check_arguments(subject: Subject) -> list[Check]:
    check_plugins(subject.run, subject.parameters)
    return [Check("own code", "arguments", "ok", "env.args and reward.args are accepted")]


def _check_disk(subject: Subject, findings: Findings) -> list[Check]:
    folders = [subject.models, subject.outputs, subject.data_root / "08_reporting" / subject.run, _prompts(subject)]
    found = [*check_writable(folders), check_paths(subject.outputs)]
    if findings.model is None or findings.shape is None:
        return [*found, _skipped("disk", "space")]
    plan = plan_disk(
        subject.options,
        findings.model.weight_bytes,
        findings.shape,
        validation=findings.validation,
        evaluation=findings.evaluation,
        checkpoint_bytes=stored_checkpoint_bytes(subject.models),
        iteration_bytes=stored_iteration_bytes(subject.outputs),
        done=0 if subject.parameters.fresh else stored_iterations(subject.models),
    )
    return [*found, check_space(plan, subject.data_root)]


def _check_memory(subject: Subject, findings: Findings) -> list[Check]:
    model, shape = findings.model, findings.shape
    if model is None or shape is None:
        return [_skipped("memory", "in all")]
    longest = shape.longest(subject.options, model.context)
    plan = plan_memory(subject.options, model, shape, model.context if longest is None else longest)
    free, where = free_memory()
    return check_memory(plan, free, subject.settings.memory_share, where)


def _prompts(subject: Subject) -> Path:
    return subject.data_root / "05_model_input" / subject.task


def _skipped(group: str, name: str) -> Check:
    return Check(group, name, "skipped", "needs the model and the data, which could not be had")
