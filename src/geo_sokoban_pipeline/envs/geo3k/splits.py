"""Which problem goes to training, validation and evaluation, and what splits share.

Problems are compared by picture and question together: a third of Geometry3K's questions repeat a text, a fifth of its
rows repeat a picture. What no split publishes is dealt out by picture, so that no picture is in two of the dealt ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from geo_sokoban_pipeline.envs.splits import SPLITS, share_out
from geo_sokoban_pipeline.options.data import SplitCounts, SplitShares
from geo_sokoban_pipeline.options.geo3k import Geo3kDataOptions
from geo_sokoban_pipeline.seeding import derive_seed, python_generator

IndexRow = Mapping[str, Any]
# Overlaps that are named one by one in the report; all of them are in the index.
_NAMED = 20


def settle_splits(rows: Sequence[IndexRow], published: Iterable[str], options: Geo3kDataOptions) -> list[IndexRow]:
    """The index with `split` and `status` of every row.

    Args:
        rows: rows of the index, kept ones without a split.
        published: splits that the source itself has; the others are dealt out of its training rows.
        options: shares, counts, seed, and what splits may share.
    """
    dealt = _deal(rows, set(published), options)
    kept = _exclude(dealt, options.exclude_overlaps)
    return _limit(kept, options.counts, options.seed)


def find_overlaps(rows: Iterable[IndexRow]) -> dict[str, Any]:
    """What splits share: pictures and problems (picture and question), counted and named by row id.

    Args:
        rows: rows with a split.

    Returns:
        `{"images": …, "problems": …}`, each `{"train+eval": {"shared": 3, "rows": {"train": 4, "eval": 3}, "examples":
        [{"train": [ids], "eval": [ids]}, …]}}` for every two splits.
    """
    members = [row for row in rows if row["split"] is not None]
    return {
        "images": _shared(members, lambda row: row["image_hashes"]),
        "problems": _shared(members, lambda row: [row["problem_hash"]]),
    }


def count_repeats(rows: Iterable[IndexRow]) -> dict[str, int]:
    """Rows of a split that repeat an earlier problem of it, and problems whose rows have several answers."""
    answers: dict[str, set[str]] = {}
    repeated = 0
    for row in rows:
        known = answers.setdefault(row["problem_hash"], set())
        repeated += bool(known)
        known.add(row["answer"])
    return {"repeated": repeated, "with_several_answers": sum(len(found) > 1 for found in answers.values())}


def _deal(rows: Sequence[IndexRow], published: set[str], options: Geo3kDataOptions) -> list[IndexRow]:
    shares = _remaining_shares(options.shares, published)
    open_rows = [row for row in rows if row["status"] == "kept" and row["source_split"] == "train"]
    leads = _link_pictures(open_rows)
    pool = sorted({_deal_key(row, leads) for row in open_rows})
    dealt = share_out(pool, shares, python_generator(options.seed, "geo3k", "splits"))
    split_of = {key: split for split, keys in dealt.items() for key in keys}
    settled: list[IndexRow] = []
    for row in rows:
        split = None
        if row["status"] == "kept":
            split = row["source_split"] if row["source_split"] != "train" else split_of[_deal_key(row, leads)]
        settled.append({**row, "split": split})
    return settled


def _link_pictures(rows: Iterable[IndexRow]) -> dict[str, str]:
    """The least picture that each one hangs together with, through rows that hold several."""
    leads: dict[str, str] = {}

    def lead(picture: str) -> str:
        while (above := leads.setdefault(picture, picture)) != picture:
            picture = above
        return picture

    for row in rows:
        found = sorted({lead(picture) for picture in row["image_hashes"]})
        leads.update(dict.fromkeys(found, found[0]) if found else {})
    return {picture: lead(picture) for picture in leads}


def _deal_key(row: IndexRow, leads: Mapping[str, str]) -> str:
    """What a row's pictures hang together with; for a problem without one the problem."""
    return leads[row["image_hashes"][0]] if row["image_hashes"] else str(row["problem_hash"])


def _remaining_shares(shares: SplitShares, published: set[str]) -> SplitShares:
    """Shares of training and of the splits that are not published, in their relation."""
    open_shares = {split: getattr(shares, split) for split in SPLITS if split == "train" or split not in published}
    total = sum(open_shares.values())
    if not total:
        return SplitShares(train=1, validation=0, eval=0)
    return SplitShares(**{split: open_shares.get(split, 0) / total for split in SPLITS})


def _exclude(rows: Sequence[IndexRow], rule: str) -> list[IndexRow]:
    """Training rows that share something with a later split are left out, and validation rows with evaluation."""
    if rule == "none":
        return list(rows)
    seen: set[str] = set()
    excluded: set[str] = set()
    for split in reversed(SPLITS):
        members = [row for row in rows if row["split"] == split]
        excluded.update(row["row_id"] for row in members if not seen.isdisjoint(_keys(row, rule)))
        seen.update(key for row in members for key in _keys(row, rule))
    return [{**row, "status": "excluded", "split": None} if row["row_id"] in excluded else row for row in rows]


def _keys(row: IndexRow, rule: str) -> list[str]:
    return [row["problem_hash"], *(row["image_hashes"] if rule == "images" else ())]


def _limit(rows: Sequence[IndexRow], counts: SplitCounts, seed: int) -> list[IndexRow]:
    """At most so many rows of each split; which ones depends on seed and row id alone."""
    left_out: set[str] = set()
    for split in SPLITS:
        members = [row["row_id"] for row in rows if row["split"] == split]
        count = getattr(counts, split)
        if count is not None and count < len(members):
            order = sorted(members, key=lambda name: derive_seed(seed, "geo3k", "pick", name))
            left_out.update(order[count:])
    return [{**row, "status": "left_out", "split": None} if row["row_id"] in left_out else row for row in rows]


def _shared(rows: Sequence[IndexRow], keys: Callable[[IndexRow], Iterable[str]]) -> dict[str, Any]:
    holders: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for key in dict.fromkeys(keys(row)):
            holders.setdefault(key, {}).setdefault(row["split"], []).append(row["row_id"])
    found = {}
    for first, second in combinations(SPLITS, 2):
        both = [by_split for by_split in holders.values() if first in by_split and second in by_split]
        found[f"{first}+{second}"] = {
            "shared": len(both),
            "rows": {split: len({name for by_split in both for name in by_split[split]}) for split in (first, second)},
            "examples": [{split: by_split[split] for split in (first, second)} for by_split in both[:_NAMED]],
        }
    return found


def count_forms(rows: Iterable[Mapping[str, Any]], column: str) -> dict[str, int]:
    """Rows by the value of a column, the most frequent first; null is `unknown`."""
    return dict(Counter(str(row[column] or "unknown") for row in rows).most_common())
