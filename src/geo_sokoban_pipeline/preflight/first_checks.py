"""First checks: the cheap checks, which every command runs before any work, without importing torch.

Failures end the command with one line each; warnings are logged once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.launcher_env import NUM_GPUS
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.envs.data_identity import SOURCE_FILES
from geo_sokoban_pipeline.envs.inspection import Check, guard
from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.envs.rows import split_slice
from geo_sokoban_pipeline.formats import is_number
from geo_sokoban_pipeline.hub import fetch_config, find_no_dataset
from geo_sokoban_pipeline.parameters import ProjectParameters, source_of
from geo_sokoban_pipeline.preflight.checks import Subject, is_own
from geo_sokoban_pipeline.preflight.machine import (
    check_byte_code,
    check_libraries,
    check_ray,
    check_threads,
    check_torchvision,
    check_variables,
)
from geo_sokoban_pipeline.preflight.relations import check_conversations, check_counts, check_relations
from geo_sokoban_pipeline.preflight.servers import check_launch, check_servers, needed_environment_servers
from geo_sokoban_pipeline.preflight.stored import TRAINING
from geo_sokoban_pipeline.runs.fingerprint import named_code, own_estimators
from geo_sokoban_pipeline.runs.folders import RunFolders, RunStore, SourceError
from geo_sokoban_pipeline.runs.own_code import explain
from geo_sokoban_pipeline.runs.policy_folder import check_model_type, check_policy_files, find_policy_folder
from geo_sokoban_pipeline.runs.storage import MANIFEST, read_json
from geo_sokoban_pipeline.tasks import TASKS, task_of
from geo_sokoban_pipeline.training.backends.megatron.limits import find_obstacles


def check_starting_policy(run: str, models: Path | None, parameters: ProjectParameters) -> None:
    """Check that the policies of a training run are available: its start, unless the run has its own copy, its teacher.

    Args:
        run: namespace; only `train_*` is checked.
        models: folder of the run id in 06_models; None: the run begins anew.

    Raises:
        FileNotFoundError, ValueError: the folder is missing or holds no supported policy.
        PolicyUnavailableError: the hub has no such policy, or cannot be reached and nothing is cached.
    """
    if not run.startswith(TRAINING):
        return
    if (teacher := getattr(parameters, run).grpo.teacher) is not None:
        if (folder := Path(teacher).expanduser()).is_dir():
            check_policy_files(folder)
        else:
            check_model_type(f"{run}.grpo.advantage_args.teacher={teacher}", fetch_config(teacher, None))
    if _own_copy(models) is not None:
        return
    options: PolicyOptions = getattr(parameters, run).policy
    if options.path is not None and options.source == "hub":
        check_model_type(f"{run}.policy.path={options.path}", fetch_config(options.path, options.revision))
    elif options.path is not None and options.source == "folder":
        check_policy_files(find_policy_folder(options.path, f"{run}.policy"))


def _own_copy(models: Path | None) -> Path | None:
    """A run's copy of the policy that it starts from; None: it has none yet."""
    return models / "base_policy" if models is not None and (models / "base_policy" / MANIFEST).is_file() else None


def check_source(run: str, read: Collection[str], parameters: ProjectParameters, store: RunStore) -> None:
    """Check that the inputs of a pipeline on a stored run exist; `hooks.parameters.plan_data` has found the run itself.

    Args:
        run: namespace, such as `score_sokoban`.
        read: datasets that its nodes read.

    Raises:
        SourceError: the run, or one that it is shown with, has no episodes; or neither a folder nor a policy of the hub
            has the name in `source.checkpoint`.
        FileNotFoundError, ValueError: the folder holds no supported policy.
    """
    if (source := source_of(run, parameters)) is None:
        return
    if not {f"{run}.source_{part}" for part in ("outputs", "episodes", "root")}.isdisjoint(read):
        store.outputs(source)
        for name in getattr(getattr(parameters, run), "runs", ()):
            other, _, run_id = name.rpartition("/")
            outputs = RunFolders.of(store.root, other or source.run, run_id).outputs
            if not any(outputs.glob("*trajectories/iter=*")):
                raise SourceError(f"runs: {outputs.parent.name}/{run_id} has no stored episodes in {outputs}.")
    if f"{run}.source_policy" in read and source.checkpoint != "tiny" and not store.is_own(source):
        store.find_foreign(source)


def check_data_source(task: str, data: Any) -> None:
    """Check that the files that a task's data are read from are there, or that the hub has the data set.

    Args:
        data: options of the task's data.

    Raises:
        ParameterError: they are not; names the parameter, the value and the way out.
    """
    is_remote = data.source == "hub" and not Path(data.hub.dataset).is_dir()
    if is_remote and (reason := find_no_dataset(data.hub.dataset, data.hub.revision)) is not None:
        raise ParameterError(
            f"{task}.hub.dataset={data.hub.dataset}: {reason}. Check the name, set HF_TOKEN for a gated one, or give a "
            f"local folder of its parquet files, or {task}.source=generate, which needs no data."
        )
    if data.source == "file":
        for field in SOURCE_FILES:
            given = getattr(data.file, field, None)
            place = split_slice(given)[0] if given else None
            if place is not None and not place.exists():
                raise ParameterError(
                    f"{task}.file.{field}={given}: no file at {place}; relative paths start at the working folder."
                )
    folder = getattr(data, "image_folder", None)
    if data.source != "generate" and folder is not None and not Path(folder).is_dir():
        raise ParameterError(f"{task}.image_folder={folder}: no such folder; relative paths start at {Path.cwd()}.")


def check_replaced(
    run: str, folders: RunFolders, parameters: ProjectParameters, others: Sequence[RunFolders] = ()
) -> None:
    """Check that a run that begins anew reads nothing of the run that it replaces.

    Args:
        others: further runs that the command replaces.

    Raises:
        ParameterError: it does.
    """
    options = getattr(parameters, run, None)
    source = source_of(run, parameters)
    named: dict[str, str | None] = {}
    if source is not None and f"{source.run}/{source.run_id}" == folders.name:
        raise ParameterError(
            f"{run}.source.run={source.run}, run_id={source.run_id}: fresh=true replaces {folders.name}, which this "
            "names. Give the new run a run_id of its own."
        )
    if source is not None and not RunStore.is_own(source):
        named[f"{run}.source.checkpoint"] = str(source.checkpoint)
    if isinstance(options, TrainOptions):
        named[f"{run}.policy.path"] = options.policy.path if options.policy.source == "folder" else None
        named[f"{run}.grpo.advantage_args.teacher"] = options.grpo.teacher
        named |= {
            f"{run}.{name}": spec.partition(":")[0] for name, spec in named_code(options).items() if ".py" in spec
        }
        data = getattr(parameters, options.task)
        if data.source == "file":
            named |= {f"{options.task}.file.{field}": getattr(data.file, field, None) for field in SOURCE_FILES}
    for name, given in named.items():
        if not given:
            continue
        place = split_slice(given)[0].expanduser().resolve()
        for replaced in (folders, *others):
            if any(place.is_relative_to(folder.resolve()) for folder in replaced.layers):
                raise ParameterError(
                    f"{name}={given}: fresh=true replaces {replaced.name}, in which this lies. Give the new run a "
                    "run_id of its own, or copy what it needs elsewhere."
                )


def check_megatron(run: str, models: Path | None, parameters: ProjectParameters) -> None:
    """Check that Megatron-Core can train the policy of a training run in its layout, where it is the backend.

    Args:
        run: namespace; only `train_*` is checked.
        models: folder of the run id in 06_models; None: the run begins anew.

    Raises:
        ParameterError: it cannot.
    """
    options: TrainOptions | None = getattr(parameters, run) if run.startswith(TRAINING) else None
    if options is None or options.megatron_layout is None:
        return
    text = _text_config(options.policy, _own_copy(models))
    if obstacles := find_obstacles(text, options.megatron_layout, options.processes):
        raise ParameterError("\n".join(f"{run}.{obstacle}." for obstacle in obstacles))


def _text_config(options: PolicyOptions, own: Path | None) -> Mapping[str, Any]:
    """`text_config` of the policy that a training run starts from, as far as it is known without building one."""
    tiny = options.tiny
    if own is not None:
        place = own / "config.json"
    elif options.path is None or options.source == "tiny":
        return {
            "num_attention_heads": tiny.heads,
            "num_key_value_heads": tiny.kv_heads,
            "intermediate_size": tiny.mlp,
        }
    elif options.source == "hub":
        place = fetch_config(options.path, options.revision)
    else:
        place = find_policy_folder(options.path) / "config.json"
    return dict(read_json(place).get("text_config", {}))


log = logging.getLogger(__name__)


def look_first(run: str, parameters: ProjectParameters, data_root: Path) -> None:
    """Run the first checks of a command: log warnings, raise failures.

    Args:
        run: namespace, such as `train_sokoban` or `evaluate_geo3k`; others are not checked.

    Raises:
        ParameterError: a failure, or several, one line each, with the way out.
    """
    kind, _, task = run.partition("_")
    if kind not in _CHECKS or task not in TASKS:
        return
    checks = [partial(check, Subject(task, parameters, data_root)) for check in _CHECKS[kind]]
    _report(run, [found for check in checks for found in guard("before the run", run, check)])


def look_at_prompts(rows: Sequence[Mapping[str, Any]], options: TrainOptions, seed: int) -> None:
    """Run the first checks that need prompts: user code on the first one, and the actions that solutions take.

    Args:
        rows: training prompts.

    Raises:
        ParameterError: as `look_first`.
    """
    run, task = f"train_{options.task}", task_of(options.task)
    if not rows:
        return
    from geo_sokoban_pipeline.preflight.own_code import try_own_code

    found = try_own_code(run, dict(rows[0]), options, seed)
    if task.ordered:
        lengths = [int(length) for row in rows if is_number(length := task.difficulty_of(row))]
        found += task.check_limits(options, max(lengths), min(lengths)) if lengths else []
    _report(run, found)


def _report(run: str, found: Sequence[Check]) -> None:
    if warnings := [f"{check.name}: {_text(check)}" for check in found if check.state == "warning"]:
        log.warning("%s: %s", run, "\n  ".join(warnings))
    if failures := [_text(check) for check in found if check.state == "failure"]:
        raise ParameterError("\n".join(failures))


def _text(check: Check) -> str:
    return f"{check.found}. {check.way_out[:1].upper()}{check.way_out[1:]}." if check.way_out else check.found


def _own_code(subject: Subject) -> Sequence[Check]:
    """User code on a first prompt, if one is available without the hub; otherwise `look_at_prompts` tries it."""
    if not is_own(subject.options):
        return []
    # The episode code runs user code, and imports torch.
    from geo_sokoban_pipeline.preflight.own_code import try_own_code

    try:
        row = task_of(subject.task).sample_prompt(subject.data)
    except Exception:  # files may contain anything; the data nodes report their errors
        log.debug("no prompt to try user code on", exc_info=True)
        return []
    return [] if row is None else try_own_code(subject.run, row, subject.options, subject.parameters.seed)


def _environment_servers(run: str, options: TrainOptions) -> Sequence[Check]:
    return check_servers(needed_environment_servers(run, options))


def _data(subject: Subject) -> Sequence[Check]:
    """Counts and solution lengths of generated data, which are known in advance."""
    data, options = subject.data, subject.options
    if data.source != "generate":
        return []
    found = check_counts(subject.run, options, data.counts.train, data.counts.validation, data.counts.eval)
    fewest, most = data.steps() or (0, 0)
    return [*found, *task_of(subject.task).check_limits(options, most, fewest)]


def _machine(subject: Subject) -> Sequence[Check]:
    options = subject.options
    own = check_ray(options) if options.placement == "ray" else check_threads(options.threads, options.busy_processes)
    # Another version may be intended, so it is only a warning here.
    versions = [*check_libraries(), check_torchvision(), check_byte_code()]
    return [own, *(replace(c, state="warning") if c.state == "failure" else c for c in versions)]


def _variables(subject: Subject) -> Sequence[Check]:
    # The check of NUM_GPUS needs torch, whose import takes seconds.
    return check_variables(subject, {name: value for name, value in os.environ.items() if name != NUM_GPUS})


def _of(check: Callable[[str, TrainOptions], Sequence[Check]]) -> Callable[[Subject], Sequence[Check]]:
    """A check of a run's options alone."""
    return lambda subject: check(subject.run, subject.options)


_SERVERS = (_of(_environment_servers), _of(check_launch))
# Data are checked for training runs only: other commands use the data of their source run.
_CHECKS: Mapping[str, Sequence[Callable[[Subject], Sequence[Check]]]] = {
    "train": (_of(check_relations), _own_code, _data, *_SERVERS, _machine, _variables),
    "rollout": (_of(check_conversations), _own_code, *_SERVERS, _machine, _variables),
    "update": (_machine,),
    "evaluate": (*_SERVERS, _machine, _variables),
    "control": (*_SERVERS, _machine),
}


def check_estimators(run: str, options: TrainOptions) -> None:
    """Call the user's own estimators, if a run has any, on made-up episodes and tokens.

    Raises:
        ParameterError: names the option and the line of an error.
    """
    if own_estimators(options.grpo):
        # It runs user code, and imports torch.
        from geo_sokoban_pipeline.preflight.own_code import try_estimators

        _report(run, try_estimators(run, options))


def check_plugins(run: str, parameters: ProjectParameters) -> None:
    """Check that the objects that a run names exist and accept their arguments.

    Raises:
        ParameterError: names the full parameter path, the value, and the nearest known name.
    """
    kind, _, task = run.partition("_")
    if kind not in (*_CHECKS, "regrade") or task not in TASKS:
        return
    run = f"{TRAINING}{task}"  # the other kinds use its options
    options: TrainOptions = getattr(parameters, run)
    if kind not in ("evaluate", "control"):  # those train by no advantage
        check_estimators(run, options)
    if kind == "update":
        # It rolls out nothing, but an advantage of turns uses the arguments of the project's reward.
        if options.reward.function.startswith("geo_sokoban_pipeline."):
            _try_reward(run, options)
        return
    factory = _find(f"{run}.env.factory", options.env.factory, "build_env")
    _try_reward(run, options)
    if kind != "regrade":  # it replays
        if options.warm_start.steps:  # without steps, no expert is needed
            _find(f"{run}.warm_start.teacher.factory", options.warm_start.teacher.factory, "build_teacher")
        _find_rollout(f"{run}.rollout.function", options.rollout.function)
    for one in TASKS.values():
        for own_factory, sample in one.trial_environments():
            if factory is own_factory:
                _try(run, "env.args", partial(own_factory, sample, options.env.args))
    try:
        task_of(task).check_data_fits(getattr(parameters, task), options)
    except ValueError as error:
        raise ParameterError(f"{run}.{error}") from error


def _try_reward(run: str, options: TrainOptions) -> None:
    reward = _find(f"{run}.reward.function", options.reward.function, "reward")
    for task in TASKS.values():
        for own_reward, result in task.trial_rewards():
            if reward is own_reward:
                _try(run, "reward.args", partial(own_reward, result, options.reward.args))


def _find(path: str, spec: str, default_name: str) -> Any:
    try:
        return load_object(spec, default_name=default_name)
    except PluginError as error:
        raise ParameterError(f"{path}={spec}: {error}") from error
    except Exception as error:  # user code may raise anything when it is imported
        raise ParameterError(f"{path}={spec}: it cannot be loaded. {explain(error)}") from error


def _find_rollout(path: str, spec: str) -> None:
    """A user's file is loaded; of a module it is only seen that it exists, since the project's own imports torch."""
    if spec.partition(":")[0].endswith(".py"):
        _find(path, spec, "rollout")
        return
    module = spec.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(module) if module else None
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ParameterError(f"{path}={spec}: there is no module {module or spec!r}; check the spelling.")


def _try(run: str, section: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except (ValueError, TypeError) as error:
        text = str(error)
        raise ParameterError(f"{run}.{text if text.startswith(section) else f'{section}.{text}'}") from error
