"""A policy of 132,000 weights that knows the form of a response, and episodes that it played."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.grpo import OptimizerOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.runs.policy_folder import write_policy
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample, build_sample
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.sft import run_sft
from runs import finish, kedro_command, params, read_run
from task_options import TinyPolicyOptions, TrainOptions, conf_options
from training.four_ranks import FourRanks
from training.setup import MEGATRON, SIZES, SPLITTABLE, Setup, StoredRun, copied, settings, shaken


@pytest.fixture(scope="session")
def four_ranks(setup: Setup) -> Iterator[FourRanks]:
    """Ranks that all tests of several ranks share."""
    ranks = FourRanks(copied(setup.policy), setup.options)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def megatron_run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """The run of `MEGATRON` on this machine, which nobody disturbs."""
    return undisturbed(MEGATRON, tmp_path_factory.mktemp("megatron"))


def undisturbed(options: dict[str, Any], root: Path) -> StoredRun:
    finish(kedro_command(*params(options), data_root=root))
    return StoredRun(root, read_run(root))


@pytest.fixture(scope="session")
def splittable() -> Policy:
    """A policy that ranks of Megatron can split, with the vocabulary of the one in `setup`."""
    return shaken(build_tiny_policy(TinyPolicyOptions.model_validate(SPLITTABLE), seed=0))


@pytest.fixture(scope="session")
def batches(setup: Setup, diagrams: list[TrainSample]) -> dict[str, list[TrainSample]]:
    """Batches of real episodes with values for every term of the objective, among them awkward ones."""
    rng = np.random.default_rng(0)

    def valued(sample: TrainSample) -> TrainSample:
        advantages, ref = rng.normal(size=(2, len(sample.targets))).astype(np.float32)
        return replace(sample, advantages=advantages, ref_log_probs=sample.old_log_probs + 0.1 * ref)

    made = [valued(build_sample(episode, setup.policy)) for episode in setup.episodes]
    text = []
    for sample in made[:3]:
        # What was an image becomes text of the same length.
        ids = np.where(sample.input_ids == setup.policy.codec.image_pad_id, sample.labels[0], sample.input_ids)
        text.append(replace(sample, input_ids=ids, images=[]))
    return {
        "boards": made,
        "diagrams": [valued(sample) for sample in diagrams],
        "uneven": made[:7],
        "one": made[:1],
        "mixed": [*text, *made[:2]],
        "text": text,
    }


@pytest.fixture(scope="session")
def diagrams(setup: Setup, geometry_rows: Any, shared_data: Path) -> list[TrainSample]:
    """Answers to real problems of Geometry3K, whose images are the twelve smallest of different sizes."""
    source = {"source": "file", "file": {"path": str(shared_data / "geometry3k_small.parquet")}}
    rows = geometry_rows(60, **source)
    expert = Demonstrator(rows, setup.policy, conf_options("geo3k"), 0, "test")
    by_size: dict[int, TrainSample] = {}
    for number in range(len(rows)):
        sample = expert.demonstrate(number)
        (image,) = sample.images
        by_size.setdefault(math.prod(image.grid), sample)
    chosen = [by_size[size] for size in sorted(by_size)[:12]]
    assert len(chosen) == 12
    scores = TorchBackend(setup.policy, OptimizerOptions()).log_probs(chosen)
    return [
        replace(sample, old_log_probs=own, rollout_log_probs=own) for sample, own in zip(chosen, scores, strict=True)
    ]


@pytest.fixture(scope="session")
def setup(sokoban_rows: Any, train_options: TrainOptions, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Policy, episodes and rows, made once; nothing in it may be changed."""
    rows = sokoban_rows(24, max_solution=3)
    options = settings(train_options, {})
    policy = build_tiny_policy(TinyPolicyOptions.model_validate(SIZES), seed=0)
    run_sft(policy, rows, rows, options, seed=0)
    folder = write_policy(tmp_path_factory.mktemp("start") / "policy", policy_writer(policy, {}))
    engine = build_engine(policy, options.rollout)
    collector = Collector("train_sokoban", 0, options, rows, policy, engine)
    episodes, _ = collector.collect(0, build_sampler(rows, options, 0, None))
    engine.close()
    for episode in episodes:
        episode.advantage, episode.trained = None, False
        for turn in episode.turns:
            turn.advantage = None
    return Setup(policy, shaken(copied(policy)), folder, rows, options, episodes)
