"""Rules on tokens: equal lengths, masks, log-probs, and the number of image pads."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.contract.columns import Episodes, Ragged, flags, list_lengths, nulls

LOG_PROB_SLACK = 1e-6  # float32: the log-prob of a saturated token may come out just above 0
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def check_lengths(episodes: Episodes) -> None:
    """Ids, mask and log-probs of every kind are equally long; the prompt lies within them."""
    lengths = episodes.token_ids.lengths
    for name in ("loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs"):
        column = episodes.column(name)
        if column.null_count == len(column):
            continue
        found = list_lengths(column)
        bad = (found != lengths) & ~nulls(column)
        text = lambda row, found=found: f"{found[row]} entries for {lengths[row]} token_ids"  # noqa: E731
        episodes.fail_row(bad, name, "as long as token_ids", text)
    prompt = episodes.numbers("prompt_length")
    episodes.fail_row((prompt < 0) | (prompt > lengths), "prompt_length", "from 0 to the number of token_ids")


def check_mask(episodes: Episodes) -> None:
    """The mask is 0 or 1, and 0 in the prompt."""
    mask = episodes.loss_mask
    episodes.fail_token((mask != 0) & (mask != 1), "loss_mask", mask, "0 or 1")
    starts = episodes.token_ids.offsets[:-1]
    early = episodes.mask_sums[starts + episodes.numbers("prompt_length")] - episodes.mask_sums[starts]
    episodes.fail_row(early > 0, "loss_mask", "0 before prompt_length", lambda row: f"1 on {early[row]} prompt tokens")


def check_log_probs(episodes: Episodes) -> None:
    """Rollout log-probs are exactly 0.0 off the mask; every kind is finite and at most 1e-6 on it."""
    off = episodes.loss_mask == 0
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs"):
        column = episodes.column(name)
        values = Ragged.of(column).values
        if name == "rollout_log_probs":
            episodes.fail_token(off & (values != 0), name, values, "exactly 0.0 where loss_mask is 0")
        elif column.null_count == len(column):
            continue
        elif column.null_count:
            values = _with_zeros(values, np.repeat(~nulls(column), episodes.token_ids.lengths))
        inside = (values <= LOG_PROB_SLACK) & (values > -np.inf)  # false for NaN too
        episodes.fail_token(~off & ~inside, name, values, "finite and at most 1e-6 where loss_mask is 1")


def _with_zeros(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    whole = np.zeros(len(present), values.dtype)
    whole[present] = values
    return whole


def check_images(episodes: Episodes) -> None:
    """Images are PNG files with one grid of three positive sizes each."""
    images, grids, sizes = episodes.images, episodes.grids, episodes.grid_sizes
    signed = _starts_as_png(images.values.field("bytes"))
    episodes.fail_row(_any_in_row(~signed, images), "images", "PNG files", lambda row: "other bytes than a PNG's")
    bad = grids.lengths != images.lengths
    text = lambda row: f"{grids.lengths[row]} grids for {images.lengths[row]} images"  # noqa: E731
    episodes.fail_row(bad, "image_grid_thw", "one grid per image", text)
    episodes.fail_row(_any_in_row(sizes.lengths != 3, grids), "image_grid_thw", "three sizes t, h, w per image")
    positive = (sizes.values.reshape(-1, 3) > 0).all(axis=1)
    episodes.fail_row(_any_in_row(~positive, grids), "image_grid_thw", "positive sizes")


def _starts_as_png(data: pa.Array) -> np.ndarray:
    if pa.types.is_dictionary(data.type):
        indices = data.indices.to_numpy(zero_copy_only=False)
        return _starts_as_png(data.dictionary)[indices]
    return flags(pc.equal(pc.binary_slice(data, 0, len(PNG_SIGNATURE)), pa.scalar(PNG_SIGNATURE, pa.binary())))


def _any_in_row(bad: np.ndarray, items: Ragged) -> np.ndarray:
    return np.bincount(items.rows[bad], minlength=len(items.lengths)) > 0


def check_image_pads(episodes: Episodes) -> None:
    """The number of image pads equals the sum of t·h·w / merge_size² over the grids."""
    ids, grids = episodes.token_ids, episodes.grids
    pads = np.flatnonzero(ids.values == episodes.image_pad_id)
    found = np.diff(np.searchsorted(pads, ids.offsets))
    patches = episodes.grid_sizes.values.reshape(-1, 3).astype(np.int64).prod(axis=1)
    total = np.bincount(grids.rows, weights=patches, minlength=len(ids.lengths))  # float64: exact below 2**53
    expected = total / episodes.merge_size**2
    text = lambda row: f"{found[row]} image pads, {expected[row]:g} by image_grid_thw"  # noqa: E731
    episodes.fail_row(found != expected, "token_ids", "sum of t*h*w / merge_size**2 image pads", text)
