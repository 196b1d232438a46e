"""The trajectory contract as rules, each one a check over whole columns.

Episodes of unequal length are flat arrays with row offsets, so a rule costs a few passes over memory and no Python
loop over tokens. Every check finds the first offender and names column, trajectory id and value. A rule may assume
the ones before it: the list starts with nulls and lengths, on which all others rest.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import pyarrow as pa

from geo_sokoban_pipeline.contract import rows, spans, tokens, values
from geo_sokoban_pipeline.contract.columns import Episodes, TrajectoryError, check_nulls
from geo_sokoban_pipeline.contract.values import PART_COLUMNS

__all__ = ["CHECKS", "PART_COLUMNS", "TrajectoryError", "check_episodes"]

CHECKS: tuple[Callable[[Episodes], None], ...] = (
    rows.check_identity,
    rows.check_outcome,
    values.check_named_values,
    values.check_value_columns,
    tokens.check_lengths,
    tokens.check_mask,
    tokens.check_log_probs,
    tokens.check_images,
    tokens.check_image_pads,
    spans.check_turns,
    values.check_credits,
    spans.check_generated_runs,
    spans.check_weight_spans,
    rows.check_group_advantages,
)


def check_episodes(table: pa.Table, nullable: Set[str], *, image_pad_id: int, merge_size: int) -> None:
    """Run every check on a table whose types are already known to be those of the trajectory schema.

    Args:
        table: N episodes.
        nullable: names of the columns that may be null.
        image_pad_id, merge_size: as in the table's context.

    Raises:
        TrajectoryError: the first broken rule.
    """
    episodes = Episodes(table, image_pad_id, merge_size)
    check_nulls(episodes, nullable)
    for check in CHECKS:
        check(episodes)
