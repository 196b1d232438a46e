"""Which checkpoints stay, and which one is the best: only what is saved can be chosen later."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.training.checkpoint import CheckpointHistory


def rate(value: float) -> dict[str, float]:
    return {"eval/validation/sampled_solve_rate": value}


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [
        (None, True, [None, None, None, None]),
        (1, False, [[0], [1], [2], [3]]),
        (2, False, [[0], [0, 1], [1, 2], [2, 3]]),
        (1, True, [[0], [1], [1, 2], [1, 3]]),
        (9, True, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
    ],
)
def test_the_newest_and_the_best_stay(keep_last: int | None, keep_best: bool, kept: list[list[int] | None]) -> None:
    history = CheckpointHistory()
    found = []
    for iteration, solved in enumerate([0.25, 0.5, 0.5, 0.25]):
        history.note_validation(iteration + 1, rate(solved), 8, is_saved=True)
        found.append(history.add(iteration, keep_last, keep_best=keep_best))
    assert found == kept
    assert history.best == {"iteration": 1, "solve_rate": 0.5}, "the first of equals"


def test_a_policy_that_is_not_saved_is_never_the_best() -> None:
    history = CheckpointHistory()
    history.note_validation(0, rate(0.75), 8, is_saved=False)
    history.note_validation(1, rate(1.0), 8, is_saved=False)
    history.note_validation(2, rate(0.5), 8, is_saved=True)
    history.note_validation(3, {}, 0, is_saved=True)
    assert history.start_rate == 0.75
    assert history.best == {"iteration": 1, "solve_rate": 0.5}
    assert history.validated["newest"] == {"iteration": 1, "solve_rate": 0.5, "episodes": 8}


def test_a_continued_run_goes_on_from_the_manifest() -> None:
    before = CheckpointHistory()
    before.note_validation(0, rate(0.25), 8, is_saved=False)
    before.note_validation(1, rate(0.5), 8, is_saved=True)
    before.add(0, 1, keep_best=True)
    after = CheckpointHistory.of({"best": before.best, "validated": before.validated}, before.stored)
    assert after == before
    after.note_validation(2, rate(1.0), 8, is_saved=True)
    assert before.validated["newest"]["solve_rate"] == 0.5, "the manifest is not changed behind its back"
    assert CheckpointHistory.of({}, []) == CheckpointHistory()


def test_the_way_out_of_a_divergence_names_the_last_good_checkpoint() -> None:
    assert "fresh=true" in CheckpointHistory().way_out("train_sokoban")
    assert "iter=00007 of train_sokoban.checkpoints" in CheckpointHistory([3, 7]).way_out("train_sokoban")
