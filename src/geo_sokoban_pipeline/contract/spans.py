"""Rules on spans: turns in order, generated runs inside assistant turns, weights for every generated token."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.contract.columns import Episodes, Ragged, flags, nulls

ROLES = ("system", "user", "assistant", "tool")


def check_turns(episodes: Episodes) -> None:
    """Turns are in order, do not overlap and lie within the tokens; roles, numbers and image indices are sound."""
    turns = episodes.turns
    _check_order(episodes, "turns", turns, "token_start", "token_end")
    known = pc.is_in(turns.values.field("role"), pa.array(ROLES))
    episodes.fail_item(~flags(known), "turns", turns, f"role is one of {', '.join(ROLES)}")
    for name in ("reward", "credit", "advantage"):
        field = turns.values.field(name)
        bad = ~nulls(field) & ~np.isfinite(field.to_numpy(zero_copy_only=False))
        episodes.fail_item(bad, "turns", turns, f"{name} is finite or null")
    indices = Ragged.of(turns.values.field("image_indices"))
    available = episodes.images.lengths[turns.rows][indices.rows]
    bad = np.zeros(len(turns.values), bool)
    bad[indices.rows[(indices.values < 0) | (indices.values >= available)]] = True
    episodes.fail_item(bad, "turns", turns, "image_indices point into images")


def _check_order(episodes: Episodes, column: str, spans: Ragged, start: str, end: str) -> None:
    starts, ends = bounds(spans, start, end)
    limit = episodes.token_ids.lengths[spans.rows]
    inside = (starts >= 0) & (starts <= ends) & (ends <= limit)
    episodes.fail_item(~inside, column, spans, f"0 <= {start} <= {end} <= number of token_ids")
    same = spans.rows[1:] == spans.rows[:-1]
    overlap = np.zeros(len(starts), bool)
    overlap[1:] = same & (starts[1:] < ends[:-1])
    episodes.fail_item(overlap, column, spans, "in order, no overlap")


def bounds(spans: Ragged, start: str, end: str) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each span within its episode, int64."""
    fields = (spans.values.field(name).to_numpy(zero_copy_only=False).astype(np.int64) for name in (start, end))
    first, last = fields
    return first, last


def check_generated_runs(episodes: Episodes) -> None:
    """Each run of mask-1 tokens lies in one assistant turn."""
    turns, offsets = episodes.turns, episodes.token_ids.offsets
    starts, ends = bounds(turns, "token_start", "token_end")
    base = offsets[turns.rows]
    assistant = episodes.replies
    inside = np.where(assistant, episodes.mask_sums[base + ends] - episodes.mask_sums[base + starts], 0)
    covered = np.bincount(turns.rows, weights=inside, minlength=len(offsets) - 1)
    total = episodes.mask_sums[offsets[1:]] - episodes.mask_sums[offsets[:-1]]
    text = lambda row: f"1 on {int(total[row] - covered[row])} tokens outside assistant turns"  # noqa: E731
    episodes.fail_row(covered != total, "loss_mask", "1 only within assistant turns", text)
    # Two assistant turns may adjoin; a run that goes on over the border would lie in both.
    border = assistant & (ends > starts) & (ends > 0) & (ends < episodes.token_ids.lengths[turns.rows])
    before = (base + ends - 1)[border]
    crossing = np.zeros(len(border), bool)
    crossing[border] = (episodes.loss_mask[before] == 1) & (episodes.loss_mask[before + 1] == 1)
    episodes.fail_item(crossing, "turns", turns, "each run of generated tokens lies in one assistant turn")


def check_weight_spans(episodes: Episodes) -> None:
    """Weight spans are in order, do not overlap, and every generated token has its weights."""
    spans, offsets = Ragged.of(episodes.column("weight_spans")), episodes.token_ids.offsets
    _check_order(episodes, "weight_spans", spans, "start", "end")
    starts, ends = bounds(spans, "start", "end")
    base = offsets[spans.rows]
    inside = episodes.mask_sums[base + ends] - episodes.mask_sums[base + starts]
    covered = np.bincount(spans.rows, weights=inside, minlength=len(offsets) - 1)
    total = episodes.mask_sums[offsets[1:]] - episodes.mask_sums[offsets[:-1]]
    text = lambda row: f"{int(covered[row])} of {total[row]} generated tokens covered"  # noqa: E731
    episodes.fail_row(covered != total, "weight_spans", "every generated token lies in a span", text)
