"""The whole pre-flight: all checks, in the order in which a run would fail.

Checks pass results on (the shape of the model, a few prompts, one episode). If a result is missing, the checks that
need it are `skipped`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.envs.data_identity import identify_data
from geo_sokoban_pipeline.envs.inspection import Check, failure_of, guard
from geo_sokoban_pipeline.envs.rows import HubReader
from geo_sokoban_pipeline.policies.policy import device_of
from geo_sokoban_pipeline.preflight.checks import Subject
from geo_sokoban_pipeline.preflight.first_checks import check_plugins
from geo_sokoban_pipeline.preflight.machine import (
    check_accelerator,
    check_attention,
    check_byte_code,
    check_libraries,
    check_ray,
    check_threads,
    check_torchvision,
    check_type,
    check_variables,
)
from geo_sokoban_pipeline.preflight.memory import (
    MEMORY_SHARE,
    check_memory,
    free_memory,
    least_server_bytes,
    place_on_cpu,
    place_on_gpus,
    plan_run,
    visible_gpus,
)
from geo_sokoban_pipeline.preflight.model import ModelShape, inspect_model
from geo_sokoban_pipeline.preflight.own_code import (
    EpisodeShape,
    check_signatures,
    try_episode,
    try_estimators,
    try_own_code,
)
from geo_sokoban_pipeline.preflight.relations import check_counts, check_lengths, check_relations
from geo_sokoban_pipeline.preflight.resources import (
    check_paths,
    check_space,
    check_writable,
    plan_disk,
)
from geo_sokoban_pipeline.preflight.servers import (
    TIMEOUT,
    check_keys,
    check_sampling_servers,
    check_servers,
    needed_environment_servers,
    needed_sampling_servers,
    needed_servers,
)
from geo_sokoban_pipeline.preflight.stored import check_run, find_damaged_files, read_stored
from geo_sokoban_pipeline.runs.folders import prompts_folder
from geo_sokoban_pipeline.runs.storage import held_bytes, nearest_folder
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.backends.megatron.limits import find_obstacles


@dataclass
class Findings:
    """Findings so far, and results for later checks.

    Attributes:
        checks: one record per row of the table.
        rows: training prompts for trials.
        validation, evaluation: number of prompts of a validation and of the final evaluation.
        model: shape of the model; None: unknown.
        shape: of an episode; None: unknown.
    """

    checks: list[Check] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    validation: int = 0
    evaluation: int = 0
    model: ModelShape | None = None
    shape: EpisodeShape | None = None


def inspect_run(subject: Subject, hub: HubReader | None) -> Findings:
    """Run all checks that load no weights.

    Args:
        hub: reads rows of the hub; None: not available.
    """
    findings = Findings()
    options, parameters = subject.options, subject.parameters
    findings.checks += check_relations(subject.run, options)
    findings.checks += guard("launch variables", "all", lambda: check_variables(subject))
    _inspect_data(subject, hub, findings)
    _inspect_model(subject, findings)
    _inspect_own_code(subject, findings)
    findings.checks += guard("run", subject.run, lambda: check_run(subject))
    findings.checks += guard("disk", "space", lambda: _check_disk(subject, findings))
    findings.checks += guard("memory", "rank", lambda: _check_memory(subject, findings))
    findings.checks += guard(
        "libraries", "versions", lambda: [*check_libraries(), check_torchvision(), check_byte_code()]
    )
    if options.placement == "ray":  # its nodes compute, not this machine
        findings.checks += [check_ray(options)]
    else:
        findings.checks += guard("machine", "accelerator", lambda: [check_accelerator(options.policy.device)])
        findings.checks += guard("machine", "attention", lambda: [_check_attention(subject, findings)])
        findings.checks += guard("machine", "type", lambda: [check_type(options.policy.dtype)])
        findings.checks += [check_threads(options.threads, options.busy_processes)]
    longest = None if findings.shape is None or findings.model is None else findings.shape.longest(options)
    findings.checks += guard("servers", "sglang", lambda: check_sampling_servers(subject.run, options, longest))
    needed = [
        *needed_servers(parameters),
        *needed_sampling_servers(subject.run, options),
        *needed_environment_servers(subject.run, options),
    ]
    findings.checks += guard("network", "ports", lambda: check_servers(needed))
    has_policy = subject.base_policy is not None
    findings.checks += guard(
        "network", "keys", lambda: check_keys(parameters, subject.run, TIMEOUT, has_policy=has_policy)
    )
    return findings


def _inspect_data(subject: Subject, hub: HubReader | None, findings: Findings) -> None:
    task = task_of(subject.task)
    sample = task.inspect_data(subject.data, subject.settings.rows, hub, _prompts(subject))
    findings.checks += sample.checks
    findings.rows = sample.rows
    if sample.counts is None:
        return
    run, options, counts = subject.run, subject.options, sample.counts
    findings.checks += check_counts(run, options, counts["train"], counts["validation"], counts["eval"])
    if sample.longest is not None:
        findings.checks += task.check_limits(options, sample.longest)
    findings.validation = _least(options.loop.eval_prompts, counts["validation"])
    findings.evaluation = _least(options.evaluation.prompts, counts["eval"])


def _inspect_model(subject: Subject, findings: Findings) -> None:
    if (own := subject.base_policy) is not None and find_damaged_files(own):
        text = f"{own} is damaged: see the checks of the group `run`"
        findings.checks.append(Check("model", "files", "skipped", text))
        return
    try:
        checks, findings.model = inspect_model(subject.options.policy, own)
        findings.checks += checks
    except Exception as error:  # a foreign folder may break its libraries in any way
        findings.checks.append(failure_of("model", "policy", error))
    layout = subject.options.megatron_layout
    if findings.model is not None and layout is not None:
        text = findings.model.config.text_config.to_dict()
        obstacles = find_obstacles(text, layout, subject.options.processes)
        found = "; ".join(obstacles) or f"tensor_parallel={layout.tensor_parallel} divides heads, vocabulary and MLP"
        findings.checks.append(Check("model", "megatron", "failure" if obstacles else "ok", found))


def _inspect_own_code(subject: Subject, findings: Findings) -> None:
    """Signatures, arguments, one episode: each only if the one before passed."""
    found = [*check_signatures(subject.run, subject.options), *try_estimators(subject.run, subject.options)]
    if not _failed(found):
        found += guard("own code", "arguments", lambda: _check_arguments(subject))
    findings.checks += found
    if _failed(found):
        findings.checks.append(Check("own code", "one episode", "skipped", "needs the failed checks above"))
    else:
        _inspect_episode(subject, findings)


def _inspect_episode(subject: Subject, findings: Findings) -> None:
    options, model = subject.options, findings.model
    if findings.rows:
        tried = try_own_code(subject.run, findings.rows[0], options, subject.parameters.seed)
        findings.checks += tried
        if _failed(tried):
            return
    if model is None or model.encoding is None or not findings.rows:
        findings.checks.append(_skipped("own code", "one episode"))
        return
    try:
        checks, findings.shape = try_episode(model.encoding, findings.rows, options, subject.parameters.seed)
        findings.checks += checks
    except Exception as error:  # user code may raise anything
        findings.checks.append(failure_of("own code", "one episode", error))
        return
    shape, longest = findings.shape, findings.shape.longest(options)
    findings.checks += check_lengths(subject.run, options, longest, model.context, shape.prompt, shape.response)


def _check_arguments(subject: Subject) -> list[Check]:
    check_plugins(subject.run, subject.parameters)
    return [Check("own code", "arguments", "ok", "env.args and reward.args are accepted")]


def _check_disk(subject: Subject, findings: Findings) -> list[Check]:
    folders = subject.folders
    found = [*check_writable([*folders.layers, _prompts(subject)]), check_paths(folders.outputs)]
    model, root = findings.model, subject.data_root
    if model is None or findings.shape is None:
        return [*found, _skipped("disk", "space")]
    plan = plan_disk(
        subject.options,
        model.weight_bytes,
        findings.shape,
        validation=findings.validation,
        evaluation=findings.evaluation,
        stored=read_stored(subject),
        linked=model.folder is not None and model.folder.stat().st_dev == nearest_folder(root).stat().st_dev,
        adapter_bytes=None if subject.options.policy.adapter is None else model.value_bytes * model.trained,
    )
    replaced = held_bytes(folders.layers) if subject.parameters.fresh else 0
    return [*found, check_space(plan, root, replaced=replaced)]


def _check_memory(subject: Subject, findings: Findings) -> list[Check]:
    options, model, shape = subject.options, findings.model, findings.shape
    if model is None or shape is None:
        return [_skipped("memory", "rank")]
    counts = {"validation": findings.validation, "evaluation": findings.evaluation}
    is_elsewhere = options.placement == "ray"  # what its nodes have is not known here
    on_gpu = options.policy.device != "cpu" if is_elsewhere else device_of(options.policy) == "cuda"
    rank, worker = plan_run(options, model, shape, **counts, on_gpu=on_gpu)
    if is_elsewhere:
        of_task = f"estimate_{subject.task}"
        text = f"those of the Ray cluster's nodes are not known here; {of_task} compares the plan with {of_task}.gpu"
        return [*check_memory(rank, [], MEMORY_SHARE), Check("memory", "GPUs", "skipped", text)]
    places = [place_on_cpu(options, model, rank, *free_memory(), worker)]
    if on_gpu:
        least = least_server_bytes(options, model, shape.longest(options) or model.context)
        places = [*place_on_gpus(options, rank, visible_gpus(), worker, least), *places]
    return check_memory(rank, places, MEMORY_SHARE)


def _check_attention(subject: Subject, findings: Findings) -> Check:
    if findings.model is None:
        return _skipped("machine", "attention")
    return check_attention(subject.options.policy.attention, findings.model.config)


def _prompts(subject: Subject) -> Path:
    return prompts_folder(subject.data_root, subject.task, identify_data(subject.task, subject.data).id)


def _failed(found: list[Check]) -> bool:
    return any(check.state == "failure" for check in found)


def _least(*counts: int | None) -> int:
    """The least of the known counts; 0 without any."""
    return min((count for count in counts if count is not None), default=0)


def _skipped(group: str, name: str) -> Check:
    return Check(group, name, "skipped", "needs the model and the data, which are not available")
