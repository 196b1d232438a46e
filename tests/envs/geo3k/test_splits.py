"""Splits: what is assigned, what is excluded, what is shared, by image and question together."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.envs.geo3k.data import count_repeats, find_overlaps, settle_splits
from geo_sokoban_pipeline.envs.rows import SPLITS
from problem_rows import options


def row(name, split="train", images=("a",), question="q", **changes):
    found = {
        "row_id": name,
        "source_split": split,
        "status": "kept",
        "split": None,
        "image_hashes": list(images),
        "problem_hash": f"{question}/{'+'.join(images)}",
        "answer": "1",
    }
    return found | changes


def splits_of(rows, published=SPLITS, **changes):
    settled = settle_splits(rows, published, options(**changes))
    assert [one["row_id"] for one in settled] == [one["row_id"] for one in rows]
    return {one["row_id"]: one["split"] or one["status"] for one in settled}


# One image in train and eval, one in train and validation, one in validation and eval, one pair in train and eval.
PUBLISHED = [
    row("t1", "train", "A", "x"),
    row("t2", "train", "B", "x"),
    row("t3", "train", "C", "x"),
    row("t4", "train", "D", "x"),
    row("v1", "validation", "B", "y"),
    row("v2", "validation", "E", "x"),
    row("e1", "eval", "A", "y"),
    row("e2", "eval", "E", "y"),
    row("e3", "eval", "D", "x"),
    row("e4", "eval", "F", "x"),
]


@pytest.mark.parametrize(
    ("rule", "excluded"), [("none", set()), ("pairs", {"t4"}), ("images", {"t1", "t2", "t4", "v2"})]
)
def test_exclusion(rule, excluded):
    splits = splits_of(PUBLISHED, exclude_overlaps=rule)
    assert {name for name, split in splits.items() if split == "excluded"} == excluded
    assert all(split == one["source_split"] for one in PUBLISHED if (split := splits[one["row_id"]]) != "excluded")


def test_overlaps_are_named():
    found = find_overlaps([{**one, "split": one["source_split"]} for one in PUBLISHED])
    shared = {kind: [one["shared"] for one in pairs.values()] for kind, pairs in found.items()}
    assert list(found["images"]) == ["train+validation", "train+eval", "validation+eval"]
    assert shared == {"images": [1, 2, 1], "problems": [0, 1, 0]}  # neither an image nor a question alone is a problem
    assert found["images"]["train+eval"] == {
        "shared": 2,
        "rows": {"train": 2, "eval": 2},
        "examples": [{"train": ["t1"], "eval": ["e1"]}, {"train": ["t4"], "eval": ["e3"]}],
    }
    kept = settle_splits(PUBLISHED, SPLITS, options(exclude_overlaps="images"))
    assert all(one["shared"] == 0 for pairs in find_overlaps(kept).values() for one in pairs.values())


MANY = [row(f"r{i:03d}", "train", [f"p{i // 2}"], f"q{i}") for i in range(200)]


@pytest.mark.parametrize(
    ("published", "sizes"),
    [
        (["train"], {"train": 160, "validation": 20, "eval": 20}),
        (["train", "eval"], {"train": 178, "validation": 22}),
        (["train", "validation"], {"train": 178, "eval": 22}),
        (SPLITS, {"train": 200}),
    ],
)
def test_dealing_by_image(published, sizes):
    splits = splits_of(MANY, published)
    assert {split: list(splits.values()).count(split) for split in sizes} == sizes
    assert all(splits[f"r{i:03d}"] == splits[f"r{i + 1:03d}"] for i in range(0, 200, 2))
    assert splits_of(MANY[::-1], published) == splits  # not by place
    assert (splits_of(MANY, published, seed=1) != splits) == (len(published) < 3)


def test_rows_with_several_images_are_dealt_with_all_that_hangs_together():
    chains = [[row(f"{n}{part}", images=(f"{n}/{part}", f"{n}/{part + 1}")) for part in (2, 0, 1)] for n in range(40)]
    splits = splits_of([one for chain in chains for one in chain], published=())
    together = [{splits[one["row_id"]] for one in chain} for chain in chains]
    assert all(len(found) == 1 for found in together)
    assert set().union(*together) == set(SPLITS)


def test_problems_without_an_image_are_dealt_one_by_one_and_rejected_ones_are_not():
    bad = row("bad", "train", (), status="rejected", problem_hash=None)
    splits = splits_of([bad, *(row(f"r{i}", "train", (), f"q{i}") for i in range(100))], ["train"])
    assert [list(splits.values()).count(split) for split in (*SPLITS, "rejected")] == [80, 10, 10, 1]


def test_counts_are_limits():
    limited = splits_of(MANY, ["train"], counts={"train": 50, "validation": None, "eval": 0})
    free = splits_of(MANY, ["train"])
    kept = {name for name, split in limited.items() if split in SPLITS}
    assert [list(limited.values()).count(split) for split in (*SPLITS, "left_out")] == [50, 20, 0, 130]
    assert all(limited[name] == free[name] for name in kept)
    more = splits_of(MANY, ["train"], counts={"train": 60, "validation": None, "eval": 0})
    assert kept <= {name for name, split in more.items() if split in SPLITS}


def test_repeats():
    rows = [row("a"), row("b"), row("c", answer="2"), row("d", images="B"), row("e", images="B")]
    assert count_repeats(rows) == {"repeated": 3, "with_several_answers": 1}
