"""Seeds: what changes a stream of random choices, and what does not, for each purpose and through the real functions.

Every test is a table of keys. Equal keys must give equal choices, different keys different ones: a name that is missing
from the derivation of a seed makes two of them equal.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from coins import rows_of
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.evaluation.rollouts import rollout_prompts, validate_policy
from geo_sokoban_pipeline.evaluation.summary import evaluate_baseline, shuffle_images
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from geo_sokoban_pipeline.training.grpo_loop import update_policy
from geo_sokoban_pipeline.trajectories.types import Trajectory
from task_options import ExpertOptions, TinyPolicyOptions, TrainOptions

Stream = tuple[int, ...]


@pytest.fixture(scope="module")
def smallest() -> Policy:
    return build_tiny_policy(TinyPolicyOptions(hidden=16, heads=2, kv_heads=2, head_dim=8, mlp=16, layers=1), seed=0)


@pytest.fixture
def options(train_options: TrainOptions) -> TrainOptions:
    """One response of six tokens, so that equal streams show and others differ."""
    values = train_options.model_dump()
    values["env"] = {"factory": "coins.build_env"}
    values["reward"] = {"function": "coins.solved_reward"}
    values["rollout"] |= {"max_turns": 1, "max_tokens_per_turn": 6}
    values["grpo"] |= {
        "groups": 2,
        "group_size": 2,
        "filter": "none",
        "advantage": "dr_grpo",
        "advantage_args": {},
        "max_refill": 1.0,
    }
    return TrainOptions.model_validate(values)


def changed(options: TrainOptions, section: str, **values: Any) -> TrainOptions:
    return options.model_copy(update={section: getattr(options, section).model_copy(update=values)})


def sampled(episode: Trajectory) -> Stream:
    return tuple(episode.token_ids[episode.loss_mask == 1].tolist())


def collect(
    policy: Policy, options: TrainOptions, seed: int = 0, iteration: int = 0, run: str = "train_sokoban"
) -> list[Trajectory]:
    rows = rows_of(8)
    engine = build_engine(policy, options.rollout)
    collector = Collector(run, seed, options, rows, policy, engine)
    return collector.collect(iteration, build_sampler(rows, options, seed, None))[0]


def streams(episodes: Sequence[Trajectory]) -> dict[tuple[int, int], Stream]:
    return {(episode.group_index, episode.sample_index): sampled(episode) for episode in episodes}


def test_a_rollout_is_of_run_seed_iteration_group_and_sample(smallest: Policy, options: TrainOptions) -> None:
    found: dict[tuple[int, ...], Stream] = {}
    for seed, iteration in itertools.product((0, 1), (0, 1)):
        for (group, sample), stream in streams(collect(smallest, options, seed, iteration)).items():
            found[seed, iteration, group, sample] = stream
    assert len(found) == 16
    assert len(set(found.values())) == 16, "two episodes with different names have sampled the same tokens"


@pytest.mark.parametrize(
    "other",
    [
        {"run": "train_other"},
        {"rollout": {"max_conversations": 1}},
        {"rollout": {"prefill_tokens": 1}},
        {"rollout": {"reuse_cache": False}},
        {"rollout": {"draft_share": None}},
        {"grpo": {"group_size": 3}},
        {"grpo": {"groups": 3}},
        {"prompts": {"order": "shuffle"}},
        {"evaluation": {"samples": 9}},
    ],
    ids=str,
)
def test_a_rollout_is_of_nothing_else(smallest: Policy, options: TrainOptions, other: dict[str, Any]) -> None:
    expected = streams(collect(smallest, options, 3, 4))
    (name, values), *_ = other.items()
    if name == "run":
        found = streams(collect(smallest, options, 3, 4, run=values))
    else:
        found = streams(collect(smallest, changed(options, name, **values), 3, 4))
    assert {key: found[key] for key in expected} == expected


def evaluate(
    policy: Policy, options: TrainOptions, rows: list[dict[str, Any]], seed: int, label: str = "run/final", **kw: Any
) -> dict[tuple[str, int], Stream]:
    engine = build_engine(policy, options.rollout)
    engine.update_weights(None, kw.get("iteration", 0))
    kw = {"sampling": SamplingOptions(), "samples": 2} | kw
    episodes = rollout_prompts(label, seed, options, rows, policy, engine, **kw)
    return {(rows[e.group_index]["id"], e.sample_index): sampled(e) for e in episodes}


def test_an_evaluation_is_of_run_seed_prompt_and_sample(smallest: Policy, options: TrainOptions) -> None:
    rows = rows_of(2)
    found = {(seed, *key): stream for seed in (0, 1) for key, stream in evaluate(smallest, options, rows, seed).items()}
    assert len(found) == 8
    rollouts = [stream for seed in (0, 1) for stream in streams(collect(smallest, options, seed)).values()]
    assert len({*found.values(), *rollouts}) == 8 + len(rollouts)
    # Policies are compared on equal draws: neither their name, nor the checkpoint, nor the order of prompts counts.
    expected = evaluate(smallest, options, rows, 1)
    assert expected == {key[1:]: stream for key, stream in found.items() if key[0] == 1}
    assert expected == evaluate(smallest, options, rows, 1, label="other/warm_start", iteration=5)
    assert expected == evaluate(smallest, options, rows[::-1], 1)
    assert {key: stream for key, stream in expected.items() if key[1] == 0} == evaluate(
        smallest, options, rows, 1, samples=1
    )


def test_greedy_episodes_draw_nothing(smallest: Policy, options: TrainOptions) -> None:
    greedy = {"sampling": SamplingOptions(greedy=True)}
    found = [evaluate(smallest, options, rows_of(2), seed, **greedy) for seed in (0, 1)]
    assert len({stream for one in found for stream in one.values()}) == 1


def test_a_validation_is_of_run_seed_and_prompt_the_same_each_time(smallest: Policy, options: TrainOptions) -> None:
    rows = rows_of(2)
    engine = build_engine(smallest, options.rollout)

    def validate(seed: int, version: int) -> dict[tuple[str, int], Stream]:
        engine.update_weights(None, version)
        episodes, _ = validate_policy("train_sokoban", seed, options, rows, smallest, engine, version)
        return {(e.trajectory_id.split("/")[2], e.group_index): sampled(e) for e in episodes}

    first, again, other = validate(0, 0), validate(0, 3), validate(1, 0)
    assert first == again
    assert sorted(first) == [("greedy", 0), ("greedy", 1), ("sampled", 0), ("sampled", 1)]
    draws = [one["sampled", number] for one in (first, other) for number in range(2)]
    assert len(set(draws)) == 4


def test_demonstrations_are_of_run_seed_purpose_and_number(
    tiny_policy: Policy, train_options: TrainOptions, sokoban_rows: Any
) -> None:
    rows = sokoban_rows(64)

    def demonstrate(seed: int, purpose: str, first: int) -> tuple[Any, ...]:
        expert = Demonstrator(rows, tiny_policy, train_options, seed, purpose)
        return tuple(identify(expert.demonstrate(number)) for number in range(first, first + 4))

    keys = list(itertools.product((0, 1), ("training", "validation"), (0, 4)))
    found = {key: demonstrate(*key) for key in keys}
    assert len(set(found.values())) == len(keys)
    assert len({sample for samples in found.values() for sample in samples}) > len(keys) * 2
    assert found[1, "training", 4] == demonstrate(1, "training", 4)
    # What was made before does not count: processes share the numbers out.
    assert demonstrate(0, "training", 2) == found[0, "training", 0][2:] + found[0, "training", 4][:2]


@pytest.mark.parametrize(
    ("seed", "purpose", "expected"),
    [
        (0, "training", ["10 up", "01 up", "07 up", "00 up", "07 up", "11 down"]),
        (0, "validation", ["06 up", "09 down", "10 up", "01 down", "02 up", "00 down"]),
        (7, "training", ["00 up", "03 up", "08 up", "10 up", "00 up", "04 up"]),
    ],
)
def test_demonstrations_of_a_seed_stay_as_they_are(
    smallest: Policy, options: TrainOptions, seed: int, purpose: str, expected: list[str]
) -> None:
    """Which prompt each one shows, and what the expert does: warm starts are continued by later versions."""
    expert = options.warm_start.teacher.model_copy(update={"factory": "coins.build_teacher"})
    options = changed(options, "warm_start", teacher=expert)
    rows = [{**row, "prompt": f"{number:02d}"} for number, row in enumerate(rows_of(12, (1, 2, 3)))]
    demonstrator = Demonstrator(rows, smallest, options, seed, purpose)
    texts = [smallest.codec.decode(demonstrator.demonstrate(number).input_ids) for number in range(6)]
    shown = [re.findall(r"\d\d|up|down", text) for text in texts]
    assert [" ".join(words) for words in shown] == expected


def test_an_episode_is_repeated_from_its_row(smallest: Policy, options: TrainOptions) -> None:
    """Its `sampling` says that its engine takes seeds, and its `seed` is all that its draws need."""
    for episode in collect(smallest, options, 5, 2):
        sampling = json.loads(episode.sampling)
        assert (sampling["engine"], sampling["seeded"]) == ("transformers", True)
        task = EpisodeRequest("again", rows_of(1)[0], 0, 0, episode.seed)
        engine = build_engine(smallest, options.rollout)
        drawn = SamplingOptions(**{name: sampling[name] for name in SamplingOptions.model_fields})
        again = RolloutSettings(options.env, options.reward, options.rollout, drawn, 9, options.task)
        (repeated,) = rollout(engine, smallest, [task], again)
        assert sampled(repeated) == sampled(episode)


def identify(sample: TrainSample) -> tuple[Any, ...]:
    """What tells samples apart: all tokens, and the images."""
    return tuple(sample.input_ids.tolist()), tuple(sample.labels.tolist()), tuple(image.key for image in sample.images)


class Recorder:
    """A trainer that keeps in which order episodes reach it."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def step(self, samples: Sequence[TrainSample], objective: Any, rate: float) -> dict[str, float]:
        self.steps.append(tuple(map(identify, samples)))
        return {"train_rollout_logprob_abs_diff": 0.0, "skipped": 0.0}


def test_minibatches_are_of_run_seed_iteration_and_pass(smallest: Policy, options: TrainOptions) -> None:
    options = changed(options, "grpo", groups=8, group_size=1, groups_per_step=1, passes=3)
    episodes = collect(smallest, options)
    for episode in episodes:
        episode.trained, episode.advantage = True, 1.0

    def orders(seed: int, iteration: int) -> list[tuple[Any, ...]]:
        backend: Any = Recorder()
        update_policy(copy.deepcopy(episodes), smallest, backend, options.grpo, options.optimizer, iteration, seed)
        assert len(backend.steps) == 24
        return [tuple(backend.steps[start : start + 8]) for start in (0, 8, 16)]

    found = {key: orders(*key) for key in itertools.product((0, 1), (0, 1))}
    # The first pass takes the groups as they were played.
    assert {one[0] for one in found.values()} == {found[0, 0][0]}
    assert len({order for one in found.values() for order in one}) == 1 + 2 * len(found)
    assert all({frozenset(order) for order in one} == {frozenset(found[0, 0][0])} for one in found.values())
    assert orders(1, 1) == found[1, 1]


@pytest.mark.parametrize("order", ["shuffle", "solve_rate", "prompt_solve_rate"])
def test_prompts_are_of_run_seed_iteration_and_refill(options: TrainOptions, order: str) -> None:
    options = changed(options, "prompts", order=order)
    rows = rows_of(60, range(1, 7))

    def draw(seed: int, iteration: int, attempt: int) -> tuple[int, ...]:
        return tuple(build_sampler(rows, options, seed, None).draw(iteration, 12, attempt))

    found = {key: draw(*key) for key in itertools.product((0, 1), (0, 1), (0, 1))}
    # A shuffled list is gone through: only its order is drawn.
    assert len(set(found.values())) == (2 if order == "shuffle" else 8)
    assert {seed for seed, _, _ in found} == {0, 1} and found[0, 0, 0] != found[1, 0, 0]
    assert draw(1, 1, 1) == found[1, 1, 1]


def test_levels_are_of_the_data_seed(sokoban_rows: Any) -> None:
    first, again, other = (sokoban_rows(12, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert not {row["images"][0] for row in first} & {row["images"][0] for row in other}


def test_problems_are_of_the_data_seed(geometry_rows: Any) -> None:
    first, again, other = ([row["images"] for row in geometry_rows(6, seed=seed)] for seed in (0, 0, 1))
    assert first == again
    assert not {tuple(images) for images in first} & {tuple(images) for images in other}


def test_noisy_players_are_of_run_seed_name_and_prompt(train_options: TrainOptions, sokoban_rows: Any) -> None:
    rows = sokoban_rows(24)

    def play(name: str, seed: int, rows: list[dict[str, Any]]) -> list[Any]:
        return evaluate_baseline(ExpertOptions(name=name), rows, train_options, seed)  # type: ignore[arg-type]

    assert play("random", 0, rows) == play("random", 0, rows)
    assert play("random", 0, rows) != play("random", 1, rows)
    assert play("random", 0, rows)[::-1] == play("random", 0, rows[::-1]), "who else plays does not count"
    renamed = [{**row, "id": f"other{n}"} for n, row in enumerate(rows)]
    numbers = [[record.turns for record in play("random", 0, one)] for one in (rows, renamed)]
    assert numbers[0] != numbers[1]


def test_shuffled_images_are_of_the_run_seed() -> None:
    prompts = [{"id": str(number), "images": [str(number)]} for number in range(12)]

    def shown(seed: int) -> Iterator[str]:
        return (row["images"][0] for row in shuffle_images(prompts, seed))

    assert list(shown(0)) == list(shown(0)) != list(shown(1))
    assert all(image != str(number) for number, image in enumerate(shown(0)))
