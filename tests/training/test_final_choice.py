"""Which policy a run ends with, and when an earlier one is named as the better choice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.grpo import EvaluationOptions, SourceOptions
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K
from geo_sokoban_pipeline.pipelines.train.nodes import select_policy
from geo_sokoban_pipeline.runs.folders import START, RunStore, best_iteration
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder
from geo_sokoban_pipeline.runs.storage import write_folder
from geo_sokoban_pipeline.training.checkpoint import better_choice


def manifest(start: float | None, best: tuple[int, float] | None, newest: float, episodes: int = 256) -> dict[str, Any]:
    """Of the checkpoint of iteration 9."""
    validated: dict[str, Any] = {"newest": {"iteration": 9, "solve_rate": newest, "episodes": episodes}}
    if start is not None:
        validated["start"] = {"iteration": -1, "solve_rate": start, "episodes": episodes}
    return {
        "iteration": 9,
        "policy_version": 10,
        "sampler": {},
        "best": best and {"iteration": best[0], "solve_rate": best[1]},
        "validated": validated,
        "files": {"model.safetensors": {"blake2b": "0"}},
    }


CASES = [
    # start, best checkpoint, newest → best policy, what is named as better than the newest
    (1.0, (9, 0.85), 0.85, START, "the policy before GRPO has 100.0 %, the final policy 85.0 %"),
    (0.4, (4, 0.95), 0.7, 4, "the checkpoint of iteration 4 has 95.0 %, the final policy 70.0 %"),
    (0.4, (4, 0.91), 0.9, 4, None),  # no more than chance
    (0.4, (9, 0.9), 0.9, 9, None),
    (0.9, (9, 0.9), 0.9, 9, None),  # a tie: what was trained
    (None, (9, 0.9), 0.9, 9, None),
]


@pytest.mark.parametrize(("start", "best", "newest", "number", "sentence"), CASES)
def test_the_best_policy_and_the_better_choice(start, best, newest, number, sentence):
    stored = manifest(start, best, newest)
    assert best_iteration(stored) == number
    better = better_choice(stored, 9, GEO3K)
    assert (better is None) == (sentence is None)
    if sentence is not None:
        assert sentence in better and "train_geo3k.evaluation.checkpoint=best" in better
    assert better_choice(stored, 4, GEO3K) is None  # the newest one is not the final policy


def test_copies_among_the_validation_prompts_are_no_proof():
    stored = manifest(0.4, (4, 0.95), 0.85)
    assert better_choice(stored, 9, GEO3K) is not None
    stored["validated"]["newest"]["error"] = 0.15  # half of an interval over clusters, of which there are few
    assert better_choice(stored, 9, GEO3K) is None


def test_without_validations_nothing_is_best():
    assert best_iteration({"best": None, "validated": {}, "iteration": 9}) is None
    assert best_iteration({"best": {"iteration": 3, "solve_rate": 0.5}}) == 3  # of a pipeline update_*
    assert better_choice({"best": None, "validated": {}, "iteration": 9}, 9, GEO3K) is None


def written(writer: Any, folder: Path) -> tuple[dict[str, Any], str]:
    folder.mkdir()
    entries = writer(folder)
    return entries, (folder / "model.safetensors").read_text()


@pytest.mark.parametrize(
    ("choice", "start", "best", "newest", "weights", "iteration", "message"),
    [
        ("final", 1.0, (9, 0.85), 0.85, "i9", 9, "evaluation.checkpoint=best ends with the better one"),
        ("best", 1.0, (9, 0.85), 0.85, "start", START, "no checkpoint solves more validation prompts"),
        ("best", 0.4, (4, 0.95), 0.7, "i4", 4, None),
        ("final", 0.4, (4, 0.95), 0.7, "i9", 9, "the checkpoint of iteration 4 has 95.0 %"),
        ("final", 0.4, (9, 0.95), 0.95, "i9", 9, None),
    ],
)
def test_the_final_policy(tmp_path, caplog, choice, start, best, newest, weights, iteration, message):
    caplog.set_level(logging.WARNING)
    folders = {}
    for name in ("start", "i4", "i9"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "model.safetensors").write_text(name)
    stored = manifest(start, best, newest)
    earlier = {**stored, "iteration": 4, "policy_version": 5}
    checkpoints = {
        "iter=00004": {"iteration": 4, "dir": folders["i4"], "manifest": earlier},
        "iter=00009": {"iteration": 9, "dir": folders["i9"], "manifest": stored},
    }
    begun = PolicyFolder(folders["start"], {"files": {"model.safetensors": {"blake2b": "0"}}})
    final = select_policy(checkpoints, begun, EvaluationOptions(checkpoint=choice), "geo3k")
    entries, text = written(final, tmp_path / "final")
    assert (text, entries["iteration"], entries["policy_version"]) == (weights, iteration, iteration + 1)
    assert [message in record.message for record in caplog.records] == [True] * (message is not None)
    assert ("better" in entries) == (choice == "final" and message is not None)


@pytest.mark.parametrize(
    ("start", "best", "words", "weights"),
    [
        (1.0, (9, 0.85), "train_geo3k/r, the policy after its warm start (best)", "start"),
        (0.4, (4, 0.95), "train_geo3k/r, checkpoint 4 (best)", "i4"),
        (0.4, (9, 0.95), "train_geo3k/r, checkpoint 9 (best)", "i9"),
    ],
)
def test_commands_on_the_best_policy_use_the_same_one(tmp_path, start, best, words, weights):
    """`source.checkpoint=best` is the policy that `evaluation.checkpoint=best` would have made the final one."""
    entries = {key: value for key, value in manifest(start, best, 0.8).items() if key != "files"}

    def write(name: str) -> Any:
        def fill(folder: Path) -> dict[str, Any]:
            (folder / "model.safetensors").write_text(name)
            return entries

        return fill

    models = tmp_path / "06_models" / "train_geo3k" / "r"
    for name, folder in (("start", "policy"), ("i4", "checkpoints/iter=00004"), ("i9", "checkpoints/iter=00009")):
        (models / folder).parent.mkdir(parents=True, exist_ok=True)
        write_folder(models / folder, write(name))
    source, store = SourceOptions(run="train_geo3k", run_id="r", checkpoint="best"), RunStore(tmp_path)
    assert store.describe(source).words == words
    assert (store.policy(source).path / "model.safetensors").read_text() == weights
