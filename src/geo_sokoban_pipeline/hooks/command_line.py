"""The command line: lists and texts in parameters, refusals before any work, and errors that end in one line.

Kedro's own `run` command stays as it is. Three places around it are used: before click reads the words (parameters,
the runner, the file of `--config`), when the context exists (names of pipelines, nodes, tags, datasets), and after the
command has failed. None of them is reached in a notebook, where exceptions stay exceptions.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import threading
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
import yaml
from kedro.framework.cli.hooks import cli_hook_impl, get_cli_hook_manager
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.framework.startup import ProjectMetadata
from kedro.pipeline import Pipeline
from omegaconf import OmegaConf

from geo_sokoban_pipeline.config.base import ParameterError, allowed_types, nearest
from geo_sokoban_pipeline.console import enrich_logging, quieten_libraries, refuse, refusing
from geo_sokoban_pipeline.envs.rows import SPLITS
from geo_sokoban_pipeline.runs.own_code import explain as explain_own_code
from geo_sokoban_pipeline.runs.own_code import where
from geo_sokoban_pipeline.runs.provenance import option_values
from geo_sokoban_pipeline.tasks import TASKS, TaskError, check_registry, task_of

log = logging.getLogger(__name__)

PACKAGE = "geo_sokoban_pipeline"
TRACEBACK = "GEO_SOKOBAN_TRACEBACK"  # in the environment: show the whole traceback of an error, too
_RUNNERS = ("ParallelRunner", "ThreadRunner")  # run nodes side by side
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTIONS = tuple(128 + number for number in _ENDINGS)
_NULL = ("", "~", "null", "Null", "NULL")
_NOT_FINITE = (".inf", "-.inf", ".nan")
_INTEGER = re.compile(r"0|[1-9]\d*")
_UNLIKE_NUMBERS = re.compile(r".*_|[-+]?0\d")
_CONFIGURED = ".run.params."  # before the names of parameters in a file of `--config`
ROW_SOURCES = frozenset({"source", "file", "hub"})  # options of a task's data that say where its rows come from
_COMMA = "\\x2c"  # a comma within double quotes of YAML
_ORDER = (
    "the parts of a GRPO iteration must be saved one after the other, the checkpoint last, because it commits the "
    "iteration. Leave it out; train_….processes is what uses more cores."
)
_MISSING = (
    "only_missing_outputs: it would leave an evaluation and a report of an older checkpoint in place. Leave it out: "
    "every pipeline continues after what is stored, and evaluates the checkpoint that it ends with."
)


class CommandLineHooks:
    """Hooks of Kedro's command line and of its sessions: errors that a user can cause end in one line.

    Args:
        tell_interrupted: returns lines for the user about what an interrupted command has stored.
    """

    def __init__(self, tell_interrupted: Callable[[], list[str]]) -> None:
        self._tell_interrupted = tell_interrupted

    def register(self) -> None:
        """Join the command line of this process; a registration that is there already is replaced."""
        manager = get_cli_hook_manager()
        if manager.has_plugin(PACKAGE):
            manager.unregister(name=PACKAGE)
        manager.register(self, name=PACKAGE)

    @cli_hook_impl
    def before_command_run(self, project_metadata: ProjectMetadata | None, command_args: list[str]) -> None:
        """Refuse a wrong registry of tasks and options that no run can have; keep the words typed in `--params`."""
        try:
            check_registry()
        except TaskError as error:
            stop(str(error))
        if project_metadata is None:
            return
        # In place: a command of our own, the place that Kedro has for other options, would be a copy of its `run`.
        if command_args[:1] == ["run"]:
            prepare_words(command_args)
        else:
            prepare_params(command_args)  # kedro viz run

    @cli_hook_impl
    def after_command_run(self, exit_code: int) -> None:
        """Print an error that a user can cause in one line."""
        self.end_command(sys.exc_info()[1], exit_code)

    def end_command(self, error: BaseException | None, exit_code: int) -> None:
        """End a failed command in one line if a user can have caused the error; Python prints every other one."""
        if isinstance(error, SystemExit):
            if exit_code in _INTERRUPTIONS:
                # Ends the loop, whose progress bar would be drawn again over the last lines.
                traceback.clear_frames(error.__traceback__)
                for line in self._tell_interrupted():
                    click.echo(line, err=True)
                raise SystemExit(exit_code)
            return
        if error is not None and (message := explain(error)) is not None:
            if os.environ.get(TRACEBACK):
                traceback.print_exception(error)
            stop(message)

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Refuse an environment, pipelines, nodes, tags and datasets that do not exist, and runners that save at once.

        The terminal's log handler comes first, and lines of libraries are shortened from then on.

        Raises:
            ParameterError, TaskError: as a plain message where Kedro's command line runs.
        """
        enrich_logging()
        quieten_libraries()
        command = click.get_current_context(silent=True)
        notebook: Any = sys.modules.get("kedro.ipython")
        if notebook is not None:
            notebook._split_params = split_params  # from now on; the first %reload_kedro has been read by Kedro
        with refusing(ParameterError, TaskError):
            check_registry()
            check_environment(Path(context.config_loader.conf_source), context.env)
            if command is not None and "pipelines" in command.params:
                check_selection(command.params)

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline) -> None:
        """Refuse runners and the choice of missing outputs in a notebook, too."""
        names = [name for name in _RUNNERS if name in str(run_params.get("runner"))]
        with refusing(ParameterError):
            check_way(pipeline, *names, only_missing=bool(run_params.get("only_missing_outputs")))

    @hook_impl(tryfirst=True)
    def before_node_run(self, is_async: bool) -> None:
        """Refuse saving in threads in a notebook, too; Kedro passes that option to no earlier hook."""
        if is_async:
            refuse(ParameterError(f"is_async=true: {_ORDER}"))


def prepare_words(words: list[str]) -> None:
    """Make the words of `kedro run` ready for click, in place; stop at options that no run can have."""
    for name in option_values(words, "--runner", "-r"):
        if name not in ("SequentialRunner", *_RUNNERS) and "." not in name:
            stop(f"--runner={name}: no such runner; leave it out.")
    if "--async" in words:
        stop(f"--async: {_ORDER}")
    for file in option_values(words, "--config", "-c"):
        check_config(file)
    prepare_params(words)
    _leave_in_order()


def prepare_params(words: list[str]) -> None:
    """Prepare `--params` among the words of a command, in place; stop at a number that YAML reads otherwise."""
    if len([*option_values(words, "--params")]) > 1:  # a run_id in the first one would be lost
        stop("--params: it is given more than once, and Kedro reads the last one alone. Join them with commas.")
    named = [*option_values(words, "--pipelines"), *option_values(words, "--pipeline", "-p")]
    chosen = {name.strip() for text in named for name in text.split(",")}

    def prepared(text: str) -> str:
        return ",".join([protect_words(text), *_rows_to_play(text, chosen)])

    try:
        for number, word in enumerate(words):
            if word == "--params" and number + 1 < len(words):
                words[number + 1] = prepared(words[number + 1])
            elif word.startswith("--params="):
                words[number] = "--params=" + prepared(word.removeprefix("--params="))
    except ParameterError as error:
        stop(str(error))


def _rows_to_play(text: str, chosen: Collection[str]) -> Iterable[str]:
    """Parameters that a command needs besides those it names: where it evaluates alone, all rows of its source."""
    items = text.split(",")
    for task in TASKS:
        runs = {name for name in chosen if name.partition("_")[2] == task and not name.startswith("data_")}
        if runs == {f"evaluate_{task}"} and f"{task}.source=generate" not in items:
            names = (item.partition("=")[0].strip() for item in items)
            yield from all_rows(task, {name.split(".")[1] for name in names if name.startswith(f"{task}.")})


def all_rows(task: str, given: Collection[str]) -> list[str]:
    """Parameters that put all rows of a source into evaluation but those that it publishes for another split.

    Args:
        given: options of the task's data that a command names; with `shares` among them nothing is added, and its
            `counts` stay.
    """
    if ROW_SOURCES.isdisjoint(given) or "shares" in given or "shares" not in task_of(task).data_config.model_fields:
        return []
    shares = [f"{task}.shares.{split}={int(split == 'eval')}" for split in SPLITS]
    return shares if "counts" in given else shares + [f"{task}.counts.{split}=null" for split in SPLITS]


def protect_words(text: str) -> str:
    """`a=[0,2],run_id=1.10` in a form from which Kedro reads what was typed.

    Kedro splits the text at every comma and reads each value as YAML. So a list becomes YAML's block form, which holds
    no comma, and the words for a text parameter are quoted, since YAML takes 1.10, 007, 12:30 or off for other values.

    Raises:
        ParameterError: YAML reads another number than the digits say, such as 8 for 010.
    """
    items: list[str] = []
    parts = text.split(",")
    while parts:
        # A bracket that nothing closes is a part of a name, and the next comma ends the item.
        joined = (",".join(parts[:count]) for count in range(1, len(parts) + 1))
        closed = (item for item in joined if sum(map(item.count, "[{")) <= sum(map(item.count, "]}")))
        items.append(next(closed, parts[0]))
        del parts[: items[-1].count(",") + 1]
    return ",".join(map(_protected, items))


def _protected(item: str) -> str:
    name, equals, value = item.partition("=")
    name, word = name.strip(), value.strip()
    allowed = _allowed_at(name)
    if allowed <= {str, type(None)} and str in allowed and word[:1] not in ("", "'", '"'):
        # No YAML at all: `[a]`, `a: b` or `#1` are names of folders, too.
        return item if type(None) in allowed and word in _NULL else f"{name}={_quoted(word)}"
    try:
        node = yaml.compose(value, yaml.SafeLoader)
    except yaml.YAMLError:
        return item  # Kedro says what is wrong with it
    if isinstance(node, yaml.ScalarNode):
        return f"{name}={_quoted(node.value)}" if _is_text(name, node) else item
    if not equals or node is None:
        return item
    for place, scalar in _scalars(name, node):
        if scalar.style is not None or _is_text(place, scalar):
            scalar.tag, scalar.style = "tag:yaml.org,2002:str", '"'
    text: str = yaml.serialize(node, Dumper=yaml.SafeDumper, width=math.inf, allow_unicode=True)
    return f"{name}={text.strip().replace(',', _COMMA)}"  # commas are left within quotes alone


def _scalars(name: str, node: yaml.Node) -> Iterable[tuple[str, yaml.ScalarNode]]:
    """Values within a value, each with its dotted name; lists and mappings get YAML's block form."""
    if isinstance(node, yaml.ScalarNode):
        yield name, node
    elif isinstance(node, yaml.SequenceNode):
        node.flow_style = False
        for index, inner in enumerate(node.value):
            yield from _scalars(f"{name}.{index}", inner)
    elif isinstance(node, yaml.MappingNode):
        node.flow_style = False
        for key, inner in node.value:
            yield from _scalars(f"{name}.{key.value}", inner)


def _is_text(name: str, node: yaml.ScalarNode) -> bool:
    """Whether an unquoted value is meant as the words typed.

    Raises:
        ParameterError: it is meant as a number, and YAML reads another one than the digits say.
    """
    word, allowed = str(node.value), _allowed_at(name)
    if node.style is not None or (word in _NULL and type(None) in allowed):
        return False
    if str in allowed:
        return not (int in allowed and _INTEGER.fullmatch(word))
    if word in _NOT_FINITE or word.startswith("${"):
        return False  # a parameter that takes no such number refuses it
    read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={word}"]))["value"]
    is_number = isinstance(read, int | float) and not isinstance(read, bool)
    is_open = Any in allowed  # it might be meant as a text
    if is_number and (_decimal(word) != read or math.isinf(read) or is_open and _UNLIKE_NUMBERS.match(word)):
        text = f', or a text in quotes: "{word}", in a shell within further ones' if is_open else ""
        raise ParameterError(f"{name}={word}: YAML reads {read} here. Write a plain decimal number{text}.")
    return False


def _decimal(word: str) -> float | None:
    for kind in (int, float):  # not float alone, which has no 17th digit
        with suppress(ValueError):
            return kind(word)
    return None


def _allowed_at(name: str) -> set[Any]:
    from geo_sokoban_pipeline.parameters import ProjectParameters

    return allowed_types(ProjectParameters, name)


def _quoted(word: str) -> str:
    """A word as a YAML text without a comma."""
    text: str = yaml.dump(word, Dumper=yaml.SafeDumper, default_style='"', width=math.inf, allow_unicode=True)
    return text.strip().replace(",", _COMMA)


def split_params(context: Any, option: Any, value: Any) -> Any:
    """Parameters of `%reload_kedro --params`, as those of `kedro run`."""
    from kedro.framework.cli.utils import _split_params

    try:
        return _split_params(context, option, protect_words(value) if isinstance(value, str) else value)
    except ParameterError as error:
        raise ArgumentTypeError(str(error)) from error  # the only error whose text IPython shows


def check_config(file: str) -> None:
    """Stop if the file of `--config` is missing or holds no section `run:`."""
    if not Path(file).is_file():
        stop(f"--config={file}: no such file.")
    try:
        text = Path(file).read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        stop(f"--config={file}: it is not readable YAML ({' '.join(str(error).split())}).")
    if not isinstance(content, dict) or not isinstance(content.get("run"), dict):
        stop(f"--config={file}: it must hold a section `run:` with the options of the command, such as `pipelines`.")
    if not isinstance(content["run"].get("params", {}), dict):
        stop(f"--config={file}: `params:` must hold names and values, as in `params: {{seed: 2, run_id: seed2}}`.")
    try:
        for name, scalar in _scalars("", node):
            place = name.removeprefix(_CONFIGURED)
            if place == name or not _is_text(place, scalar):
                continue
            read = OmegaConf.to_container(OmegaConf.create(f"value: {scalar.value}"))  # 1e3 is a number to Kedro alone
            if not isinstance(read["value"], str):
                raise ParameterError(f"{place}={scalar.value}: a text is needed. Quote it: '{scalar.value}'.")
    except ParameterError as error:
        stop(f"--config={file}: {error}")


def check_environment(conf_source: Path, env: str | None) -> None:
    """See that `--env` names a folder of the configuration.

    Raises:
        ParameterError: it does not; the message lists what is there.
    """
    if env is None or not conf_source.is_dir() or (conf_source / env).is_dir():
        return
    known = sorted(path.name for path in conf_source.iterdir() if path.is_dir() and path.name not in ("base", "local"))
    raise ParameterError(f"--env={env}: no such environment. {_nearest(env, known)}")


def check_selection(words: dict[str, Any]) -> None:
    """See that the options of `kedro run` name pipelines, nodes, tags and datasets that exist.

    Args:
        words: click's parameters of the command.

    Raises:
        ParameterError: one does not; the message has the nearest name.
    """
    if words.get("is_async") or (words.get("runner_params") or {}).get("is_async"):
        raise ParameterError(f"is_async: {_ORDER}")
    names = [*_listed(words.get("pipelines")), *_listed(words.get("pipeline"))]
    _see(names, list(pipelines.keys()), "--pipelines", "pipeline")
    chosen = sum((pipelines[name] for name in names or ["__default__"]), start=Pipeline([]))
    runner = str(words.get("runner")).rpartition(".")[2]
    check_way(chosen, runner, only_missing=bool(words.get("only_missing_outputs")))
    nodes, datasets = sorted(node.name for node in chosen.nodes), sorted(chosen.datasets())
    tags = sorted({tag for node in chosen.nodes for tag in node.tags})
    spaces = sorted({node.namespace for node in chosen.nodes if node.namespace})
    for given, known, option, kind in (
        ("node_names", nodes, "--nodes", "node"),
        ("from_nodes", nodes, "--from-nodes", "node"),
        ("to_nodes", nodes, "--to-nodes", "node"),
        ("tags", tags, "--tags", "tag"),
        ("from_inputs", datasets, "--from-inputs", "dataset"),
        ("to_outputs", datasets, "--to-outputs", "dataset"),
        ("namespaces", spaces, "--namespaces", "namespace"),
    ):
        found = _listed(words.get(given))
        _see([name.partition("@")[0] for name in found] if kind == "dataset" else found, known, option, kind)


def check_way(pipeline: Pipeline, *runners: str, only_missing: bool = False) -> None:
    """See that a pipeline can run in this way: nodes that make data may run side by side, in threads of this process,
    and only where their tables are missing.

    Raises:
        ParameterError: it cannot.
    """
    makes_data = all("data" in node.tags for node in pipeline.nodes)
    if only_missing and not makes_data:
        raise ParameterError(_MISSING)
    for name in runners:
        if name in _RUNNERS and not makes_data:
            raise ParameterError(f"runner={name}: {_ORDER}")
    if "ParallelRunner" in runners:
        raise ParameterError(
            "runner=ParallelRunner: the nodes hold open readers, which cannot be handed to other processes. Take "
            "ThreadRunner, or leave it out."
        )


def _see(names: Iterable[str], known: Sequence[str], option: str, kind: str) -> None:
    for name in names:
        if name not in known:
            raise ParameterError(f"{option}={name}: no such {kind}. {_nearest(name, known)}")


def _nearest(name: str, known: Sequence[str]) -> str:
    """`Did you mean …?` where one comes near, else what there is."""
    by_ending = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = nearest(name, known) or next(iter(by_ending), None)
    return f"Did you mean {near}?" if near else f"There are {', '.join(known)}."


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value or [])


def stop(message: str) -> NoReturn:
    """End the command with a line on standard error and exit code 1."""
    click.echo(f"Error: {message}", err=True)
    raise SystemExit(1)


def explain(error: BaseException) -> str | None:
    """Message for the user who caused an error; None: the error is a fault of this program.

    Errors of this package's own classes and the system's errors about files are written for users. For an error in a
    user's own code (reward, environment, rollout) the message has the file and line where it arose.
    """
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    for link in chain:
        if type(link).__module__.startswith(f"{PACKAGE}."):
            return str(link)
    if where(chain[-1]):
        return f"{explain_own_code(chain[-1])} ({TRACEBACK}=1 shows the way there)"
    return str(chain[-1]) if isinstance(chain[-1], OSError) else None


def _leave_in_order() -> None:
    """Turn Ctrl-C and requests to terminate into `SystemExit`, so that everything open is closed.

    Ignored signals (`nohup`) and handlers set by others stay. A second signal ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _ENDINGS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def read_lists(values: Any, name: str = "") -> Any:
    """`[0;2]` in parameters as the list it stands for: `%reload_kedro --params` splits at every comma.

    Args:
        name: of the values, with a dot at its end.
    """
    if isinstance(values, dict):
        return {key: read_lists(value, f"{name}{key}.") for key, value in values.items()}
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str) and ";" in values[0]:
        items = (f"{name}0={part}" for part in re.split(r";\s*", values[0]))
        return [yaml.safe_load(_protected(item).partition("=")[2]) for item in items]
    return values
