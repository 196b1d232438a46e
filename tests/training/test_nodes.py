"""Nodes on a small stored run, without Kedro: each uses the tables, the policy and the checkpoint that are meant.

What the core does with them is tested elsewhere; here a swapped table, an iteration beside the right one, or a best
checkpoint that retention deletes would show.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.config.grpo import (
    EvaluatePipelineOptions,
    EvaluationOptions,
    RolloutPipelineOptions,
    TrainOptions,
    UpdatePipelineOptions,
)
from geo_sokoban_pipeline.datasets import (
    CheckpointsDataset,
    MetricsDataset,
    SourceDataset,
    TrajectoriesDataset,
)
from geo_sokoban_pipeline.datasets.iterations import read_resume_state
from geo_sokoban_pipeline.grpo import loss
from geo_sokoban_pipeline.pipelines.stored.nodes import collect_trajectories, evaluate_stored, update_on_stored
from geo_sokoban_pipeline.pipelines.train.nodes import evaluate_policies, select_policy, train_grpo
from geo_sokoban_pipeline.runs.fingerprint import hash_rows
from geo_sokoban_pipeline.runs.folders import START
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, open_policy, write_policy
from geo_sokoban_pipeline.runs.storage import Rewind
from geo_sokoban_pipeline.training import grpo_loop
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from training.setup import Setup, settings

IDENTITY: dict[str, Any] = {"id": "levels", "settings": {}}
RUN = {"run": "train_sokoban", "run_id": "default"}
SMALL = {"grpo.groups": 2, "grpo.group_size": 3, "rollout.max_turns": 2, "loop.keep_last": None}
SEED = 3


@dataclass(frozen=True)
class Stored:
    """A finished run of three iterations, and its tables."""

    root: Path
    options: TrainOptions
    start: PolicyFolder
    prompts: pd.DataFrame
    validation: pd.DataFrame
    evaluation: pd.DataFrame

    @property
    def models(self) -> Path:
        return self.root / "06_models/train_sokoban/default"

    def source(self, *parts: str, **given: Any) -> list[Any]:
        """What nodes get of the source's parts."""
        sources = {"run": {**RUN, **given}}
        return [SourceDataset(str(self.root), part, "run", sources).load() for part in parts]

    def checkpoint(self, iteration: int) -> Path:
        return self.models / f"checkpoints/iter={iteration:05d}"

    def episodes(self, kind: str, iteration: int) -> list[Trajectory]:
        parts = TrajectoriesDataset(str(self.root / f"07_model_output/train_sokoban/default/{kind}")).load()
        return [
            episode
            for name, read in parts.items()
            if name.startswith(f"iter={iteration:05d}/")
            for episode in table_to_trajectories(read())
        ]


def train(setup: Setup, root: Path, changes: dict[str, Any], stop_after: int | None = None) -> Stored:
    """Train a run below a data root, or continue the one that is there; `stop_after` so many iterations."""
    options = settings(setup.options, SMALL | changes)
    folder = root / "06_models/train_sokoban/default"
    if not folder.exists():
        shutil.copytree(setup.folder.path, folder / "policy")
    tables = [pd.DataFrame(setup.rows[part]) for part in (slice(0, 12), slice(12, 18), slice(18, 24))]
    stored = Stored(root, options, open_policy(folder / "policy"), *tables)
    outputs = root / "07_model_output/train_sokoban/default"
    places = [
        TrajectoriesDataset(str(outputs / "trajectories")),
        TrajectoriesDataset(str(outputs / "eval_trajectories")),
        MetricsDataset(str(outputs / "metrics")),
        CheckpointsDataset(str(folder / "checkpoints")),
    ]
    resume: Any = read_resume_state(folder / "checkpoints")
    chunks = train_grpo(stored.start, *tables[:2], resume, stored.options, IDENTITY, SEED)
    for number, chunk in enumerate(chunks):
        for place, parts in zip(places, chunk, strict=True):
            place.save(parts)
        if stop_after is not None and number == 2 * stop_after:
            chunks.close()
            break
    return stored


Call = tuple[str, str]  # file and function


@pytest.fixture(scope="module")
def stacks() -> list[list[Call]]:
    """Calls in which the loss that `grpo.loss` names was called, the innermost first, in the training of `stored`."""
    return []


@pytest.fixture(scope="module")
def stored(setup: Setup, tmp_path_factory: pytest.TempPathFactory, stacks: list[list[Call]]) -> Stored:
    changes = {"loop.iterations": 3, "loop.eval_interval": 1, "loop.eval_prompts": 4, "evaluation.samples": 1}
    estimate_loss = loss.estimate_loss

    def noted(*arguments: Any) -> Any:
        stacks.append([(Path(frame.filename).name, frame.function) for frame in inspect.stack(context=0)[1:]])
        return estimate_loss(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "estimate_loss", noted)
        return train(setup, tmp_path_factory.mktemp("stored"), changes)


def keys(rows: pd.DataFrame) -> set[str]:
    return set(rows["level_hash"])


def played(parts: dict[str, Any]) -> list[Trajectory]:
    return [episode for table in parts.values() for episode in table_to_trajectories(table)]


def tokens(episodes: Sequence[Trajectory]) -> list[list[int]]:
    return [episode.token_ids.tolist() for episode in episodes]


def test_training_plays_its_prompts_and_validates_on_others(stored: Stored) -> None:
    for iteration in range(3):
        drawn = {episode.task_id for episode in stored.episodes("trajectories", iteration)}
        assert drawn and drawn <= keys(stored.prompts)
    for version in range(4):
        validated = [episode.task_id for episode in stored.episodes("eval_trajectories", version)]
        assert set(validated) == set(stored.validation["level_hash"][:4]) and len(validated) == 2 * 4


def test_from_the_node_to_the_estimator_are_six_calls(stored: Stored, stacks: list[list[Call]]) -> None:
    """Who reads how a step is computed opens five files, one after the other."""
    calls = stacks[0][: [function for _, function in stacks[0]].index("train_grpo") + 1]
    assert len(calls) <= 6, calls
    assert len({file for file, _ in calls}) <= 5, calls


@pytest.mark.parametrize("iteration", [0, 2])
def test_an_update_starts_from_the_checkpoint_before(stored: Stored, tmp_path: Path, iteration: int) -> None:
    options = UpdatePipelineOptions.model_validate({"source": {**RUN, "iteration": iteration}})
    parts = stored.source("trajectories", "before", "start", iteration=iteration)
    rewind, (metrics, checkpoint) = update_on_stored(*parts, options, stored.options, seed=9)
    assert rewind == (Rewind(-1), Rewind(-1))
    name = f"iter={iteration:05d}"
    (tmp_path / name).mkdir()
    checkpoint[name].write(tmp_path / name)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / name / file).read_bytes() == (stored.checkpoint(iteration) / file).read_bytes(), file
    rows = MetricsDataset(str(stored.root / "07_model_output/train_sokoban/default/metrics")).load()
    assert metrics[name]["train/loss"] == rows[iteration]["train/loss"]


@pytest.mark.parametrize(("checkpoint", "iteration"), [("start", 0), (0, 1), (1, 2)])
def test_a_rollout_plays_the_iteration_after_a_checkpoint(
    stored: Stored, checkpoint: str | int, iteration: int
) -> None:
    options = RolloutPipelineOptions.model_validate({"source": {**RUN, "checkpoint": checkpoint}})
    source = stored.source("policy", "prompts", checkpoint=checkpoint)
    chunks = collect_trajectories(*source, stored.prompts, options, stored.options, SEED)
    next(chunks)
    parts, rows = next(chunks)
    assert list(rows) == [f"iter={iteration:05d}"] and rows[f"iter={iteration:05d}"]["policy_version"] == iteration
    before = stored.episodes("trajectories", iteration)
    assert tokens(played(parts)) == tokens(before)
    assert [episode.policy_version for episode in played(parts)] == [iteration] * len(before)


@pytest.mark.parametrize(
    ("run", "checkpoint", "version", "name"),
    [
        ("train_sokoban", "start", 0, "default@start"),
        ("train_sokoban", 0, 1, "default@0"),
        ("control_sokoban", "latest", 3, "control_sokoban/default@latest"),
    ],
)
def test_an_evaluation_plays_the_named_policy(
    stored: Stored, run: str, checkpoint: str | int, version: int, name: str
) -> None:
    options = EvaluatePipelineOptions.model_validate({"source": {**RUN, "run": run, "checkpoint": checkpoint}})
    source = stored.source("policy", "prompts", checkpoint=checkpoint)
    tables = (stored.prompts, stored.evaluation)
    summary, parts = evaluate_stored(*source, *tables, IDENTITY, options, stored.options, SEED)
    episodes = played(parts)
    assert {episode.policy_version for episode in episodes} == {version}
    assert {episode.task_id for episode in episodes} == keys(stored.evaluation)
    assert summary["prompts_hash"] == hash_rows(stored.evaluation.to_dict("records"))
    assert summary["policies"] == [name]


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"),  # of the hub
        ("data/06_models/train_sokoban/other/final_policy", "data/06_models/train_sokoban/other/final_policy"),
        ("solver", "solver/"),  # a folder, and no baseline
        ("a/final_blank", "a/final_blank/"),  # nor an ablation
    ],
)
def test_a_foreign_policy_is_named_by_itself_alone(stored: Stored, checkpoint: str, name: str) -> None:
    """And by no run id of the command."""
    few = {"prompts": 1, "greedy": False, "blank_images": False}
    settings_of = stored.options.model_copy(update={"evaluation": stored.options.evaluation.model_copy(update=few)})
    options = EvaluatePipelineOptions.model_validate({"source": {**RUN, "checkpoint": checkpoint}})
    (policy_of,) = stored.source("policy", checkpoint="start")
    tables = (stored.prompts, stored.evaluation)
    summary, _ = evaluate_stored(policy_of, lambda: (None, None), *tables, IDENTITY, options, settings_of, SEED)
    assert summary["policies"] == [name]


def test_the_final_evaluation_names_each_policy_by_its_own_row(stored: Stored) -> None:
    """The policy before GRPO comes first."""
    newest = open_policy(stored.checkpoint(2))
    tables = (stored.prompts, stored.evaluation)
    summary, parts = evaluate_policies(stored.start, newest, *tables, stored.options, IDENTITY, SEED)
    versions = {name: {e.policy_version for e in table_to_trajectories(table)} for name, table in parts.items()}
    assert versions == {"iter=00000/part-000": {0}, "iter=00001/part-000": {3}}
    assert {e.task_id for e in played(parts)} == keys(stored.evaluation)
    names = dict.fromkeys(row["policy"] for row in summary["rows"] if row["mode"] != "-")
    assert list(names) == ["warm_start", "final", "final_blank"]
    for row in summary["rows"]:
        if row["policy"] in ("warm_start", "final"):
            part = parts[f"iter={summary['policies'].index(row['policy']):05d}/part-000"]
            own = [e for e in table_to_trajectories(part) if f"/{row['policy']}/{row['mode']}/" in e.trajectory_id]
            assert row["mean_return"] == pytest.approx(np.mean([e.reward for e in own]))
    few = {"prompts": 1, "greedy": False, "blank_images": False}
    without = {
        "warm_start": stored.options.warm_start.model_copy(update={"steps": 0}),
        "evaluation": stored.options.evaluation.model_copy(update=few),
    }
    options = stored.options.model_copy(update=without)
    summary, _ = evaluate_policies(stored.start, newest, *tables, options, IDENTITY, SEED)
    assert summary["policies"] == ["start", "final"]


# Sampled solve rate by version of the policy, interval of checkpoints → iteration of the best one, what stays stored;
# iterations after which the run is stopped and continued.
BEST = {
    "every one is saved": ([0.2, 0.4, 0.9, 0.6, 0.9, 0.5], 1, 1, [1, 4], None),
    "not every one is saved": ([0.2, 0.95, 0.6, 0.9, 0.7, 0.5], 2, 3, [3, 4], 4),
    "the newest": ([0.2, 0.4, 0.5, 0.6, 0.6, 0.7], 1, 4, [4], 4),
    "none is better than the start": ([0.97, 0.4, 0.9, 0.6, 0.8, 0.5], 1, START, [1, 4], None),
}


@pytest.mark.parametrize(("rates", "interval", "best", "kept", "stop_after"), BEST.values(), ids=BEST)
def test_the_best_policy_is_kept_and_becomes_the_final_one(
    setup: Setup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rates: list[float],
    interval: int,
    best: int,
    kept: list[int],
    stop_after: int | None,
) -> None:
    def validate(*given: Any) -> tuple[list[Trajectory], dict[str, float]]:
        *_, version, _ = given
        names = {"sampled": rates[version], "greedy": 1 - rates[version]}
        return [], {f"eval/validation/{mode}_solve_rate": rate for mode, rate in names.items()}

    monkeypatch.setattr(grpo_loop, "validate_policy", validate)
    changes = {"loop.iterations": 5, "loop.eval_interval": 1, "loop.save_interval": interval, "loop.keep_last": 1}
    changes |= {"grpo.groups": 1, "grpo.group_size": 2, "rollout.max_turns": 1, "evaluation.checkpoint": "best"}
    if stop_after is not None:
        train(setup, tmp_path, changes, stop_after)
    run = train(setup, tmp_path, changes)
    checkpoints = CheckpointsDataset(str(run.models / "checkpoints")).load()
    assert list(checkpoints) == [f"iter={iteration:05d}" for iteration in kept]
    final = write_policy(tmp_path / "final", select_policy(checkpoints, run.start, run.options.evaluation, "sokoban"))
    expected = run.start.path if best == START else run.checkpoint(best)
    weights = {
        name: load_file(path / "model.safetensors") for name, path in (("final", final.path), ("best", expected))
    }
    assert all((weights["final"][name] == value).all() for name, value in weights["best"].items())
    assert (final.manifest["iteration"], final.manifest["policy_version"]) == (best, best + 1)


def test_a_best_checkpoint_that_is_gone_is_no_other_one(stored: Stored) -> None:
    """A run without `keep_best` deletes it; the newest one in its place would be a wrong number in silence."""
    manifest = open_policy(stored.checkpoint(2)).manifest
    gone = {**manifest, "best": {"iteration": 1, "solve_rate": 0.9}, "validated": {}}
    checkpoints = {"iter=00002": {"iteration": 2, "dir": stored.checkpoint(2), "manifest": gone}}
    options = EvaluationOptions(checkpoint="best")
    with pytest.raises(
        ParameterError, match=r"checkpoint=best: .* iteration 1 .* not stored; stored are 2\. Give .*checkpoint=final"
    ):
        select_policy(checkpoints, stored.start, options, "sokoban")
