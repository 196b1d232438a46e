"""`geo-sokoban-pipeline browse`: the site of any trajectory files, without a Kedro project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


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
