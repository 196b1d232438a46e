"""Steps of data_geo3k and data_geo3k_multi_turn: streams and frames in and out.

Tables with images are streams: no node holds more than a few rows of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.envs.geo3k.config import DATA_OPTIONS, Geo3kDataOptions
from geo_sokoban_pipeline.envs.rows import SPLITS, HubReader, as_frame
from geo_sokoban_pipeline.runs.row_stream import RowStream

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)


def read_problems(
    parameters: Mapping[str, Any] | Geo3kDataOptions, section: str, hub: HubReader | None = None
) -> RowStream:
    """Rows of the chosen source as they are, invalid ones included.

    Args:
        parameters: `params:geo3k` or `params:geo3k_multi_turn`, see `Geo3kDataOptions`.
        section: name of the parameters.
        hub: reads rows from the hub; needed for `source=hub`.
    """
    from geo_sokoban_pipeline.envs.geo3k.sources import open_source

    return open_source(as_options(parameters, section), section, hub)


def check_problems(
    raw: RowStream, parameters: Mapping[str, Any] | Geo3kDataOptions, section: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Index of all rows with hashes, state and split, and the rejected rows.

    Raises:
        ValueError: there is not one problem.
    """
    from geo_sokoban_pipeline.envs.geo3k.data import PROBLEM_INDEX, REJECTED, index_problems

    index, rejected = index_problems(raw, as_options(parameters, section), section)
    if rejected:
        logger.warning("%d of %d rows rejected (see %s.rejected)", len(rejected), len(index), section)
    return as_frame(index, PROBLEM_INDEX.names), as_frame([asdict(row) for row in rejected], REJECTED.names)


def make_prompts(
    raw: RowStream, index: pd.DataFrame, parameters: Mapping[str, Any] | Geo3kDataOptions, section: str
) -> tuple[RowStream, RowStream, RowStream]:
    """Processed rows for training, validation and evaluation, in the order of the raw rows."""
    from geo_sokoban_pipeline.envs.geo3k.data import prompt_rows

    options = as_options(parameters, section)
    found = {row["row_id"]: row for row in index.to_dict("records")}
    train, validation, evaluation = (RowStream(prompt_rows(raw, found, split, options)) for split in SPLITS)
    return train, validation, evaluation


def report_data(
    index: pd.DataFrame, rejected: pd.DataFrame, parameters: Mapping[str, Any] | Geo3kDataOptions, section: str
) -> dict[str, Any]:
    """Data report: rows read, rejected, repaired and excluded, problems by split, overlaps."""
    from geo_sokoban_pipeline.envs.geo3k.data import summarise_data

    report = summarise_data(index.to_dict("records"), list(rejected["reason"]), as_options(parameters, section))
    for pair, found in report["published_overlaps"]["images"].items():
        if found["shared"]:
            logger.warning(
                "%s: images in both %s as published: %d; exclude_overlaps=images leaves out the rows that share one",
                section,
                pair.replace("+", " and "),
                found["shared"],
            )
    if report["rows_images_first"]:
        logger.info(
            "%s: %d of %d rows have no <image> in their text; their images come first",
            section,
            report["rows_images_first"],
            report["rows_read"],
        )
    splits = report["splits"]
    sizes = ", ".join(f"{split} {found['problems']} ({found['repeated']} copies)" for split, found in splits.items())
    held_out = any(splits[split]["repeated"] for split in ("validation", "eval"))
    logger.log(
        logging.WARNING if held_out else logging.INFO,
        "%s: problems, and copies among them (same images and question): %s",
        section,
        sizes,
    )
    return report


def as_options(parameters: Mapping[str, Any] | Geo3kDataOptions, section: str) -> Geo3kDataOptions:
    """Checked options; errors name the full parameter path."""
    return validate_parameters(dict(parameters), DATA_OPTIONS[section], prefix=section)
