"""The installed package as a command: `geo-sokoban-pipeline`, or `python -m geo_sokoban_pipeline`.

`browse` and paths write a site of stored episodes, `audit` and paths check rollouts that other trainers have written;
both need no project. Everything else is `kedro run` without a project
folder: it takes the words of `kedro run`; the configuration comes from `--conf-source`, a folder or the archive that
`kedro package` writes. Paths are relative to the current folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


def main(*args: Any, **kwargs: Any) -> Any:
    """Run Kedro's `run` command; in an interactive session it returns the outputs instead of leaving Python."""
    words = list(args[0] if args else kwargs.get("args") or sys.argv[1:])
    for command in (browse, audit):
        if words[:1] == [command.name]:
            return command(words[1:], prog_name=f"geo-sokoban-pipeline {command.name}")
    # Not before: Kedro announces at its import how it logs.
    from kedro.framework.cli.utils import find_run_command
    from kedro.framework.project import configure_project, settings

    from geo_sokoban_pipeline.hooks.command_line import PACKAGE, CommandLineHooks, prepare_words

    configure_project(PACKAGE)
    kwargs.setdefault("standalone_mode", not hasattr(sys, "ps1"))
    if not kwargs["standalone_mode"]:
        return find_run_command(PACKAGE)(*args, **kwargs)
    kwargs.pop("args", None)
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
        counts = write_site(folder, runs, pages=pages)
        click.echo("{episodes:,} episodes, {pages:,} with a page, {images:,} images".format(**counts))
        return {"runs": [run.name for run in runs], **counts}

    try:
        runs = find_runs(paths, tokenizer)
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


if __name__ == "__main__":
    main()
