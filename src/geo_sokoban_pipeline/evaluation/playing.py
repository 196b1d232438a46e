"""Playing for evaluation: every prompt a fixed number of times, in chunks, with seeds of their own, nothing trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from geo_sokoban_pipeline.options.rollout import SamplingOptions
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.progress import track
from geo_sokoban_pipeline.rollout.conversation import EpisodeTask
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.episode import Play, PlaySettings, load_player
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.trajectories import Trajectory

Rows = Sequence[dict[str, Any]]


def play_prompts(
    label: str,
    seed: int,
    options: TrainOptions,
    prompts: Rows,
    policy: Policy,
    engine: RolloutEngine,
    *,
    sampling: SamplingOptions,
    samples: int = 1,
    iteration: int = 0,
    blank: bool = False,
    play: Play | None = None,
) -> list[Trajectory]:
    """Play prompts under the run's own limits.

    Args:
        label: first part of the trajectory ids, unique within a file.
        samples: episodes of a prompt; they are its `sample_index`.
        iteration: recorded as the iteration; the engine knows the version of its weights.
        blank: replace every picture by a black one of its size.
        play: plays the episodes; None: `rollout.function`, in this process.

    Returns:
        Trajectories, prompt by prompt; `group_index` is the number of the prompt.
    """
    tasks = [
        EpisodeTask(
            trajectory_id=f"{label}/p{index:04d}/s{sample:02d}",
            prompt=row,
            group_index=index,
            sample_index=sample,
            seed=derive_seed(seed, "evaluation", str(row["id"]), sample),
        )
        for index, row in enumerate(prompts)
        for sample in range(samples)
    ]
    settings = PlaySettings(
        options.env,
        options.reward,
        options.rollout,
        sampling,
        iteration,
        options.task,
        engine.version,
        blank_image if blank else None,
    )
    play = play or load_player(options.rollout)
    with track(f"evaluating {label}", len(tasks), keep=False) as progress:
        played: list[Trajectory] = play(engine, policy, tasks, settings, progress.advance)
    return played


def blank_image(image: Image.Image) -> Image.Image:
    """A black picture of the same size: what a policy sees that does not see."""
    return Image.new("RGB", image.size)
