"""Rollouts of an evaluation: their seeds, what a row says of how it was sampled, and what of what cannot be played."""

from __future__ import annotations

import json
from typing import Any

import pytest

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.evaluation.rollouts import describe_rates, read_finished, rollout_prompts
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.types import Trajectory
from rollout.scripted import PROMPT, CharacterPolicy, ScriptedEngine
from task_options import TrainOptions

STOP = ("abcd", "stop")


@pytest.fixture
def options(train_options: TrainOptions) -> TrainOptions:
    values = train_options.model_dump()
    values["env"] = {"factory": "rollout.scripted.build_env", "args": {"ends_after": 1}}
    values["reward"] = {"function": "rollout.scripted.one_per_response"}
    limits = {"max_turns": 2, "max_tokens_per_turn": 8, "max_response_tokens": 99, "max_context_tokens": None}
    values["rollout"] |= limits | {"max_failed_share": 1.0}
    return TrainOptions.model_validate(values)


def play(
    options: TrainOptions, rows: list[dict[str, Any]], seed: int = 0, samples: int = 1, **sampling: Any
) -> list[Trajectory]:
    policy: Any = CharacterPolicy()
    engine: Any = ScriptedEngine({number: [STOP] for number in range(len(rows) * samples)})
    engine.version = 7
    rows = [{"prompt": PROMPT, **row} for row in rows]
    return rollout_prompts(
        "final", seed, options, rows, policy, engine, sampling=SamplingOptions(**sampling), samples=samples, iteration=7
    )


def test_seeds_of_an_evaluation_stay_as_they_are(options: TrainOptions) -> None:
    """Policies, runs and versions are compared on equal draws, so what is written here never changes."""
    rows = [{"id": "row0"}, {"id": "row1"}]
    seeds = {seed: [episode.seed for episode in play(options, rows, seed, samples=2)] for seed in (0, 7)}
    assert seeds[0][:3] == [2652062887092113182, 6618175272467953254, 2319938884726280722]
    assert (seeds[7][0], seeds[7][3]) == (4044504957638071050, 6032789395483183136)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "greedy": False},
        {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "greedy": True},
    ],
)
def test_a_row_says_how_it_was_sampled(options: TrainOptions, sampling: dict[str, Any]) -> None:
    (episode,) = play(options, [{"id": "a"}], **sampling)
    assert json.loads(episode.sampling) == {
        "engine": "scripted",
        "engine_version": "1",
        "seeded": True,
        **sampling,
        "max_turns": 2,
        "max_tokens_per_turn": 8,
        "max_response_tokens": 99,
        "max_context_tokens": None,
    }


def test_rows_of_what_was_played_and_what_could_not_be(options: TrainOptions) -> None:
    episodes = play(options, [{"id": "a"}, {"id": "b", "env": {"raises": "reset"}}])
    found = [(e.trajectory_id, e.status, e.drop_reason, e.reward, e.policy_version) for e in episodes]
    # Who sampled a token names its weights (3); an episode without one has the version that was to play it (7).
    assert found == [
        ("final/p0000/s00", "completed", None, 1.0, 3),
        ("final/p0001/s00", "failed", "failed", None, 7),
    ]
    assert all((e.iteration, e.advantage, e.trained) == (7, None, False) for e in episodes)
    # Neither a complete nor a truncated episode has a reason to be dropped.
    short = options.rollout.model_copy(update={"max_response_tokens": 5})
    rows = [{"id": "a"}, {"id": "b", "env": {"ends_after": 2}}]
    episodes = play(options.model_copy(update={"rollout": short}), rows)
    assert [(e.status, e.drop_reason) for e in episodes] == [("completed", None), ("truncated", None)]
    finished = [read_finished(task_or_plain("talk"), *pair) for pair in zip(episodes, rows, strict=True)]
    assert [(one.truncated, one.tokens, len(one.responses)) for one in finished] == [(False, 4, 1), (True, 4, 1)]
    sokoban = task_or_plain("sokoban")
    assert read_finished(sokoban, episodes[0], {sokoban.apart[0]: "one"}).cluster == "one"


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"sampled_solve_rate": 0.53125, "greedy_solve_rate": 0.5}, "53.1 % sampled, 50.0 % greedy"),
        ({"greedy_solve_rate": 1.0, "greedy_mean_return": 2.0}, "100.0 % greedy"),
        ({"sampled_solve_rate": 0.0}, "0.0 % sampled"),
        ({}, ""),
    ],
)
def test_rates_in_words(metrics: dict[str, float], text: str) -> None:
    assert describe_rates({f"eval/validation/{name}": value for name, value in metrics.items()}) == text
