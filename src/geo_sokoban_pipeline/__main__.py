"""The installed package as a command: `geo-sokoban-pipeline`, or `python -m geo_sokoban_pipeline`.

`browse` and paths write a site of stored episodes, `audit` and paths check rollouts that other trainers have written,
`runs` lists, removes and restores stored runs; none of them needs a project. Everything else is `kedro run` without a
project folder: it takes the words of `kedro run`; the configuration comes from `--conf-source`, a folder or the archive
that `kedro package` writes. Paths are relative to the current folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from geo_sokoban_pipeline.runs.folders import RunFolders


def main(*args: Any, **kwargs: Any) -> Any:
    """Run Kedro's `run` command; in an interactive session it returns the outputs instead of leaving Python."""
    words = list(args[0] if args else kwargs.get("args") or sys.argv[1:])
    for command in (browse, audit, runs):
        if words[:1] == [command.name]:
            return command(words[1:], prog_name=f"geo-sokoban-pipeline {command.name}")
    # Not before: Kedro announces at its import how it logs.
    from kedro.framework.cli.utils import find_run_command
    from kedro.framework.project import configure_project, settings

    from geo_sokoban_pipeline.hooks.command_line import PACKAGE, CommandLineHooks, prepare_params, prepare_words
    from geo_sokoban_pipeline.runs.provenance import option_values

    configure_project(PACKAGE)
    kwargs.pop("args", None)
    kwargs.setdefault("standalone_mode", not hasattr(sys, "ps1"))
    if any(option_values(words, "--config", "-c")):
        kwargs["prog_name"] = "run"  # Kedro reads the section of the file that has the name of the program
    if not kwargs["standalone_mode"]:
        prepare_params(words)
        return find_run_command(PACKAGE)(words, **kwargs)
    prepare_words(words)
    hooks: CommandLineHooks = next(hook for hook in settings.HOOKS if isinstance(hook, CommandLineHooks))
    try:
        return find_run_command(PACKAGE)(words, **kwargs)
    except SystemExit as error:
        hooks.end_command(error, error.code if isinstance(error.code, int) else 1)
        raise
    except Exception as error:
        hooks.end_command(error, 1)
        raise


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the site.  [default: site]")
@click.option(
    "--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with tokenizer.json."
)
@click.option(
    "--pages", type=click.IntRange(min=1), help="Episodes at most that get a page of their own.  [default: all]"
)
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
def browse(paths: tuple[Path, ...], output: Path | None, tokenizer: Path | None, pages: int | None, show: bool) -> None:
    """Write a site that shows the episodes of trajectory files; index.html opens it from a file, offline.

    PATHS are parquet files of the trajectory contract, or folders that hold some at any depth: an iteration, a run's
    outputs, a data root. Tokens are shown as text where a run's policy lies in the same data root.
    """
    from geo_sokoban_pipeline.reporting.viewer.site import ENTRY, write_site
    from geo_sokoban_pipeline.reporting.viewer.sources import NothingToBrowseError, find_runs
    from geo_sokoban_pipeline.runs.storage import MANIFEST, CorruptFolderError, write_folder

    place = output or Path("site")
    if place.exists() and not (place / MANIFEST).is_file() and (not place.is_dir() or any(place.iterdir())):
        raise click.ClickException(f"{place} exists and is no site: give --output another folder.")

    def write(folder: Path) -> dict[str, Any]:
        counts = write_site(folder, found, pages=pages)
        click.echo("{episodes:,} episodes, {pages:,} with a page, {images:,} images".format(**counts))
        return {"runs": [run.name for run in found], **counts}

    try:
        found = find_runs(paths, tokenizer)
        write_folder(place, write)
    except (NothingToBrowseError, CorruptFolderError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    address = (place / ENTRY).absolute().as_uri()
    click.echo(address)
    if show:
        click.launch(address)


@click.command()
@click.argument("dumps", nargs=-1, required=True, metavar="[SPLIT=]PATH...")
@click.option("--task", help="Task whose default reward grades the responses again.  [default: none]")
@click.option(
    "fields", "--field", multiple=True, metavar="FIELD=NAME",
    help="Name that a field has here: step, prompt, response, reward, advantage, label or images.",
)  # fmt: skip
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON file for all that is found.")
def audit(dumps: tuple[str, ...], task: str | None, fields: tuple[str, ...], output: Path | None) -> None:
    """Check rollouts that TRL or verl have written; exit code 1 where there is a finding.

    A PATH is a .jsonl or .parquet file, or a folder of them. Prompts that two splits share are a finding, so name them:
    train=rollouts validation=validation. A path alone is `train`.
    """
    from geo_sokoban_pipeline.evaluation.audit import as_record, print_audit
    from geo_sokoban_pipeline.evaluation.audit_dump import FIELDS, DumpError, audit_dumps
    from geo_sokoban_pipeline.runs.storage import write_json
    from geo_sokoban_pipeline.tasks import TASKS, task_of

    paths: dict[str, Path] = {}
    for word in dumps:
        split, sign, path = word.partition("=") if not Path(word).exists() else ("train", "=", word)
        if not sign:
            raise click.ClickException(f"{word} does not exist.")
        if split in paths:
            raise click.ClickException(f"{split} is given twice: name another split, such as validation={path}.")
        paths[split] = Path(path)
    names = dict(field.partition("=")[::2] for field in fields)
    if unknown := sorted(set(names) - set(FIELDS)):
        raise click.ClickException(f"--field {unknown[0]}: must be one of {', '.join(FIELDS)}.")
    if task is not None and task not in TASKS:
        raise click.ClickException(f"--task {task}: must be one of {', '.join(TASKS)}.")
    try:
        checks = audit_dumps(paths, None if task is None else task_of(task), names)
    except (DumpError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    print_audit(f"Audit of {', '.join(map(str, paths.values()))}", checks)
    record = as_record(checks)
    if output is not None:
        write_json(output, {"dumps": {split: str(path) for split, path in paths.items()}, **record})
    if record["findings"]:
        raise click.ClickException(f"{record['findings']} finding(s)")


_WORD = "delete"  # that a user types before anything is deleted


@click.group(invoke_without_command=True)
@click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    envvar="GEO_SOKOBAN_DATA_ROOT",
    default="data",
    show_default=True,
    show_envvar=True,
    help="Folder of all data.",
)
@click.pass_context
def runs(context: click.Context, data_root: Path) -> None:
    """List the stored runs: task, run id, iterations, size, state.

    A run is finished, interrupted, running, damaged, or set aside: a command with fresh=true was to replace it and
    ended before its first result. The next command on that run id puts it back, and so does `restore`.
    """
    from geo_sokoban_pipeline.console import print_table
    from geo_sokoban_pipeline.formats import size
    from geo_sokoban_pipeline.preflight.stored import read_state
    from geo_sokoban_pipeline.runs.folders import find_all_runs

    context.obj = data_root.expanduser()
    if context.invoked_subcommand is not None:
        return
    rows = [
        (*state.name.split("/"), "" if state.iterations is None else str(state.iterations), size(state.size),
         state.state, state.note)
        for state in map(read_state, find_all_runs(context.obj))
    ]  # fmt: skip
    colours = {"finished": "green", "running": "cyan", "damaged": "bold red"}
    print_table(f"Runs in {context.obj}", ("pipeline", "run id", "iterations", "size", "state", "note"), rows, colours)


@runs.command()
@click.argument("names", nargs=-1, metavar="PIPELINE/RUN_ID...")
@click.option(
    "--all", "everything", is_flag=True, help="All that the pipelines stored, data of tasks and logs of tracking too."
)
@click.option("--yes", is_flag=True, help="Ask for no word.")
@click.pass_obj
def remove(root: Path, names: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Delete runs, such as train_sokoban/default, once the word that is asked for is typed.

    Files below the data root that no pipeline has written stay.
    """
    from geo_sokoban_pipeline.formats import size
    from geo_sokoban_pipeline.runs.folders import OWN_ENTRIES, find_all_runs
    from geo_sokoban_pipeline.runs.storage import held_bytes

    if bool(names) == everything:
        raise click.UsageError("give runs, or --all.")
    if everything:
        roots = [root, *root.glob("studies/*"), *root.glob("studies/*/*")]  # studies with data of their own
        chosen = [folders for place in roots for folders in find_all_runs(place)]
    else:
        chosen = [_find_run(root, name) for name in dict.fromkeys(names)]
    with ExitStack() as locks:
        for folders in chosen:
            locks.enter_context(_locked(folders))
        entries = [entry for pattern in OWN_ENTRIES for entry in sorted(root.glob(pattern))] if everything else []
        doomed = [entry for entry in entries if not entry.is_dir() or any(_doomed_files(entry))]
        if not chosen and not doomed:
            click.echo(f"Nothing is stored in {root}.")
            return
        for folders in chosen:
            beside = ", and the run that is set aside there" if folders.has_replaced else ""
            click.echo(f"{folders.name}{beside}: {size(held_bytes(folders.layers))}")
        for entry in doomed:
            click.echo(f"all of {entry}: {size(held_bytes([entry]) if entry.is_dir() else entry.lstat().st_size)}")
        if not yes and click.prompt(f'Type "{_WORD}" to delete this', default="", show_default=False) != _WORD:
            raise click.ClickException("nothing was deleted.")
        for folders in chosen:
            folders.remove()
        for entry in doomed:
            _delete_entry(entry)


@runs.command()
@click.argument("name", metavar="PIPELINE/RUN_ID")
@click.pass_obj
def restore(root: Path, name: str) -> None:
    """Put back a run that is set aside, in place of what fresh=true has begun."""
    from geo_sokoban_pipeline.runs.folders import ASIDE

    folders = _find_run(root, name)
    with _locked(folders):
        if not folders.has_replaced:
            raise click.ClickException(f"{name}: no run is set aside there.")
        if not folders.can_restore:
            raise click.ClickException(
                f"{name}: the new run has stored its first result, so the next command on it deletes the old run. "
                f"To keep that, copy {ASIDE} from its folders first."
            )
        folders.settle()
    click.echo(f"{name} is put back.")


def _find_run(root: Path, name: str) -> RunFolders:
    from geo_sokoban_pipeline.runs.folders import find_all_runs

    found = {folders.name: folders for folders in find_all_runs(root)}
    if name not in found:
        raise click.ClickException(f"{name}: no such run in {root}. There are {', '.join(found) or 'none'}.")
    return found[name]


@contextmanager
def _locked(folders: RunFolders) -> Iterator[None]:
    """Hold a run's lock for the `with` block, whose errors about files end the command in one line."""
    from geo_sokoban_pipeline.runs.lock import RunLock, RunLockedError
    from geo_sokoban_pipeline.runs.storage import CorruptFolderError

    try:
        with closing(RunLock(folders.models, way_out=".")):
            yield
    except (RunLockedError, CorruptFolderError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _doomed_files(folder: Path) -> list[Path]:
    """Files and links of a folder, but for those of a checkout."""
    return [path for path in folder.rglob("*") if (path.is_symlink() or path.is_file()) and path.name != ".gitkeep"]


def _delete_entry(entry: Path) -> None:
    if not entry.is_dir():
        entry.unlink(missing_ok=True)
        return
    for path in _doomed_files(entry):
        path.unlink(missing_ok=True)
    for folder in sorted(entry.glob("**/"), reverse=True):
        if not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


if __name__ == "__main__":
    main()
