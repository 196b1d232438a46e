"""Rows of a data set of the Hugging Face hub, or of a local folder of parquet files with the same layout.

Either the whole split opens before the first row is handed on, or an error says what to set without a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class HubSource(Protocol):
    """What names a data set: hub id or folder, revision, split."""

    @property
    def dataset(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def split(self) -> str: ...


class SourceUnavailableError(RuntimeError):
    """A data set cannot be loaded; the message says what to set, and the choice without a network."""


def hub_rows(options: HubSource, *, section: str, streaming: bool = False) -> Iterator[dict[str, Any]]:
    """Rows as plain Python values; pictures stay as they are stored, nothing is decoded.

    Args:
        options: which data set.
        section: name of the parameters it came from, for messages: `sokoban` or `geo3k`.
        streaming: fetch rows as they are asked for, where only the first ones are wanted; nothing is cached.

    Raises:
        SourceUnavailableError: offline, unknown data set or split, or files that `datasets` cannot read.
    """
    dataset = _load(options, section, streaming)
    return (row for batch in dataset.with_format("arrow").iter(batch_size=1024) for row in batch.to_pylist())


def _load(options: HubSource, section: str, streaming: bool) -> Any:
    from datasets.exceptions import DatasetsError

    from datasets import load_dataset

    try:
        return load_dataset(options.dataset, revision=options.revision, split=options.split, streaming=streaming)
    # RuntimeError is what the hub client raises once its connection is closed.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise SourceUnavailableError(
            f"{section}.hub.dataset={options.dataset!r}, split={options.split!r}: cannot be loaded "
            f"({type(error).__name__}: {reason}). Check network, name, revision and split. Without a network: "
            f"{section}.source=generate needs no data; or set {section}.hub.dataset to a local folder of its parquet "
            f"files, or {section}.source=file with {section}.file.path."
        ) from error
