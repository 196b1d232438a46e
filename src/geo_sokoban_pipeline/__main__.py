"""The installed package as a command: `geo-sokoban-pipeline`, or `python -m geo_sokoban_pipeline`.

`browse` and paths write a site of stored episodes, without a project. Everything else is `kedro run` without a project
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
    if words[:1] == ["browse"]:
        return browse(words[1:], prog_name="geo-sokoban-pipeline browse")
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


if __name__ == "__main__":
    main()
