"""Rows of data sets of the Hugging Face hub, or of local folders of parquet files with the same layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from geo_sokoban_pipeline.envs.rows import HubReader, plain_rows
from geo_sokoban_pipeline.runs.row_stream import BATCH_ROWS, RowStream


class HubSource(Protocol):
    """Name of a data set."""

    @property
    def dataset(self) -> str:
        """Hub id or folder."""

    @property
    def revision(self) -> str | None:
        """None: the default branch."""


class SourceUnavailableError(RuntimeError):
    """A data set cannot be loaded; the message says what to set, and the choice without a network."""


def hub_rows(hub: HubSource, split: str, *, section: str, streaming: bool = False, batch_rows: int = 1024) -> RowStream:
    """Rows as plain Python values; images stay as they are stored, nothing is decoded.

    Args:
        hub: which data set.
        split: of it.
        section: name of the parameters it came from, for messages: `sokoban` or `geo3k`.
        streaming: fetch rows as they are asked for, where only the first ones are wanted; nothing is cached.
        batch_rows: rows that are in memory at once.

    Raises:
        SourceUnavailableError: offline, unknown data set or split, or files that `datasets` cannot read; with
            `streaming` also while the rows are walked through.
    """
    from datasets import load_dataset

    with _explain(section, hub.dataset, f", split={split!r}"):
        dataset = load_dataset(hub.dataset, revision=hub.revision, split=split, streaming=streaming)

    def rows() -> Iterator[dict[str, Any]]:
        with _explain(section, hub.dataset, f", split={split!r}"):
            for batch in dataset.with_format("arrow").iter(batch_size=batch_rows):
                yield from plain_rows(batch)

    return RowStream(rows)


def hub_splits(section: str, hub: HubSource) -> list[str]:
    """Names of a data set's splits.

    Raises:
        SourceUnavailableError: offline, unknown data set, or files that `datasets` cannot read.
    """
    from datasets import get_dataset_split_names

    with _explain(section, hub.dataset):
        return list(get_dataset_split_names(hub.dataset, revision=hub.revision))


@contextmanager
def _explain(section: str, dataset: str, split: str = "") -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        yield
    # RuntimeError is what the hub client raises once its connection is closed.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise SourceUnavailableError(
            f"{section}.hub.dataset={dataset!r}{split}: cannot be loaded "
            f"({type(error).__name__}: {reason}). Check network, name, revision and split. Without a network: "
            f"{section}.source=generate needs no data; or set {section}.hub.dataset to a local folder of its parquet "
            f"files, or {section}.source=file with {section}.file.path."
        ) from error


def hub_reader(section: str) -> HubReader:
    """The reader of the hub for a section of the parameters; a source with `streaming` is not kept in the cache."""

    def rows(hub: HubSource, split: str) -> RowStream:
        streaming = bool(getattr(hub, "streaming", False))
        return hub_rows(hub, split, section=section, streaming=streaming, batch_rows=BATCH_ROWS)

    return HubReader(partial(hub_splits, section), rows)


def first_rows_reader(section: str) -> HubReader:
    """The same for a look at the first rows, without fetching a data set as a whole; from the cache without the hub."""

    def rows(hub: HubSource, split: str) -> Iterable[dict[str, Any]]:
        from huggingface_hub import constants

        if not constants.HF_HUB_OFFLINE:
            with suppress(SourceUnavailableError):
                return hub_rows(hub, split, section=section, streaming=True)
        return hub_rows(hub, split, section=section)

    return HubReader(partial(hub_splits, section), rows)
