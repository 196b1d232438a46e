"""The loop as a whole: its weights are those of the written-out update on the episodes that it stored.

So whatever the loop hands to sampler, engine, trainer and scorer is in force: temperature, the iteration's learning
rate, the gradient clip, old log-probs, the warm-start policy as reference, moments from one iteration to the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from geo_sokoban_pipeline.runs.storage import Rewind
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.training.collecting import build_sampler
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories
from task_options import TrainOptions
from training import reference
from training.setup import NOTHING_STORED, Setup, by_iteration, copied, run_loop, settings

FRESH = {
    "grpo.old_log_probs": "recompute",
    "grpo.importance": "truncated",
    "grpo.importance_args.cap": 0.9999999,
    "grpo.kl_coefficient": 0.3,
    "grpo.kl_kind": "k2",
    "grpo.passes": 2,
    "grpo.groups_per_step": 2,
    "rollout.sampling.temperature": 0.7,
    "optimizer.clip": 0.05,
    "optimizer.weight_decay": 0.1,
}
OF_THE_ENGINE = {
    "grpo.reduction": "sample_mean",
    "grpo.entropy_coefficient": 0.1,
    "grpo.advantage_args.scale": "std",
    "grpo.normalize": "none",
    "grpo.advantage_clip": 0.8,
    "rollout.sampling.temperature": 1.5,
    "optimizer.matrices": "muon",
    "prompts.order": "prompt_solve_rate",
}


def run(setup: Setup, options: TrainOptions, folder: Path, resume: dict[str, Any] | None = None) -> list[Any]:
    """Chunks of a run; checkpoints are written to folders of their partition's name."""
    chunks = []
    for chunk in by_iteration(run_loop(setup, options, resume or NOTHING_STORED, seed=3)):
        for name, checkpoint in chunk[3].items() if isinstance(chunk[3], dict) else ():
            (folder / name).mkdir()
            checkpoint.write(folder / name)
        chunks.append(chunk)
    return chunks


def episodes_of(chunk: Any) -> list[Trajectory]:
    """Episodes of an iteration, as a table stores them."""
    return [episode for table in chunk[0].values() for episode in table_to_trajectories(table)]


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint by name."""
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def fresh(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("fresh")
    return folder, run(setup, settings(setup.options, FRESH | {"loop.iterations": 2}), folder)


def test_two_iterations_with_fresh_log_probs_equal_the_written_out_ones(
    setup: Setup, fresh: tuple[Path, list[Any]]
) -> None:
    assert_written_out(setup, FRESH, *fresh)


def test_two_iterations_with_log_probs_of_the_engine_equal_the_written_out_ones(setup: Setup, tmp_path: Path) -> None:
    options = settings(setup.options, OF_THE_ENGINE | {"loop.iterations": 2})
    assert_written_out(setup, OF_THE_ENGINE, tmp_path, run(setup, options, tmp_path))


def assert_written_out(setup: Setup, changes: dict[str, Any], folder: Path, chunks: list[Any]) -> None:
    options = settings(setup.options, changes)
    policy, moments = copied(setup.policy), reference.Moments.empty()
    sampler = build_sampler(setup.rows, options, 3, None)
    for iteration, chunk in enumerate(chunks[1:-1]):
        episodes = episodes_of(chunk)
        given = [[turn.advantage for turn in reference.responses(episode)] for episode in episodes]
        for episode in episodes:
            mask = episode.loss_mask == 1
            # What the engine stored is at the temperature too.
            temperature = options.rollout.sampling.temperature
            values, _ = reference.log_probs_and_entropy(policy, episode, torch.tensor(mask), temperature)
            stored = [episode.rollout_log_probs]
            if options.grpo.old_log_probs == "recompute":
                assert episode.old_log_probs is not None and episode.ref_log_probs is not None
                stored += [episode.old_log_probs, *([episode.ref_log_probs] if iteration == 0 else [])]
            for log_probs in stored:
                np.testing.assert_allclose(log_probs[mask], values.detach(), atol=1e-4)
            assert episode.seed == derive_seed(3, "rollout", iteration, episode.group_index, episode.sample_index)
            assert episode.policy_version == episode.iteration == iteration
            assert {version for version, _, _ in episode.weight_spans} == {iteration}
        # The loop draws with the run's seed and options, and its solve rates follow what was played.
        drawn = sampler.draw(iteration, options.grpo.groups)
        groups = [[e for e in episodes if e.group_index == group] for group in range(options.grpo.groups)]
        assert [group[0].task_id for group in groups] == [setup.rows[index]["level_hash"] for index in drawn]
        sampler.update(drawn, [float(np.mean([e.metrics["success"] for e in group])) for group in groups])
        assert chunk[3][f"iter={iteration:05d}"].write.entries["sampler"] == sampler.state()
        reference.score(episodes, options.grpo, options.reward.args)
        for before, episode in zip(given, episodes, strict=True):
            np.testing.assert_allclose(before, [turn.advantage for turn in reference.responses(episode)], atol=1e-6)
        metrics = reference.train(
            policy,
            episodes,
            options.grpo,
            options.optimizer,
            temperature=options.rollout.sampling.temperature,
            iteration=iteration,
            seed=3,
            reference=setup.policy,
            moments=moments,
        )
        row = chunk[2][f"iter={iteration:05d}"]
        # A token at the edge of the clip range, or of the cap, falls on either side by rounding.
        for edge in ("train/pg_clipfrac", "train/tis_clipfrac"):
            metrics.pop(edge, None)
        for name, value in metrics.items():
            assert np.isclose(row[name], value, rtol=1e-2, atol=1e-4), (iteration, name, row[name], value)
        weights = stored_weights(folder / f"iter={iteration:05d}")
        for name, parameter in policy.model.named_parameters():
            error = float((weights[name] - parameter.detach()).abs().max())
            assert error <= 1e-5, (iteration, name, error)


def test_the_loop_goes_on_from_a_checkpoint(setup: Setup, fresh: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Weights, moments, solve rates and prompts after a restart are those of the loop that never stopped."""
    folder, (rewind, first, second, _) = fresh
    assert rewind == (Rewind(-1),) * 4, "a new run keeps nothing"
    entries = first[3]["iter=00000"].write.entries
    resume = NOTHING_STORED | {"iteration": 0, "dir": folder / "iter=00000", "manifest": entries, "stored": [0]}
    rewind, again, _ = run(setup, settings(setup.options, FRESH | {"loop.iterations": 2}), tmp_path, resume)
    # Validations are numbered by the weights that played: the stored checkpoint's is one further.
    assert rewind == (Rewind(0), Rewind(1), Rewind(0), Rewind(0))
    one, other = (stored_weights(place / "iter=00001") for place in (folder, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [e.task_id for e in episodes_of(again)] == [e.task_id for e in episodes_of(second)]
    assert again[3]["iter=00001"].write.entries == second[3]["iter=00001"].write.entries
