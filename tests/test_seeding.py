"""Seeds and keys that are hashed of several parts: other parts never share one, however they are cut."""

from __future__ import annotations

from itertools import product

from geo_sokoban_pipeline.seeding import content_hash, derive_seed, python_generator

PARTS = ("", "1", "2", "12", "1,2", '"', "ab", "a", "b", "\x00")


def test_no_two_lists_of_parts_have_one_hash() -> None:
    lists = [parts for count in range(3) for parts in product(PARTS, repeat=count)]
    assert len({content_hash(*parts) for parts in lists}) == len(lists)
    assert content_hash("é", b"1") == content_hash("é".encode(), "1"), "texts are hashed as UTF-8"


def test_no_two_uses_have_one_seed() -> None:
    uses = [
        (root, *names)
        for root in (0, 1, 12, -1)
        for count in range(3)
        for names in product((*PARTS, 1, 12), repeat=count)
    ]
    seeds = [derive_seed(*use) for use in uses]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert python_generator(3, "levels", 17).random() == python_generator(3, "levels", 17).random()


def test_stored_runs_keep_their_seeds_and_keys() -> None:
    assert derive_seed(0, "sokoban", "levels", 17) == 2879599809306496416
    assert content_hash("a", b"bc") == "f657d58ed59382298356d21c95353a31"
