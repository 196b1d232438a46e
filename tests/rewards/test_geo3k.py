"""Rewards of geometry: slime's worked examples, what is graded, and equal rewards whose advantages are exactly 0."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.grpo import group_advantages
from geo_sokoban_pipeline.rewards.geo3k import format_reward, math_reward, tolerance_reward
from geo_sokoban_pipeline.rollout.episode import EpisodeResult
from task_options import RewardOptions

THOUGHT = "<think>sum of angles</think>"


def outcome(*responses: str, truth: str | None = "5", response: str | None = None) -> EpisodeResult:
    whole = "<|im_end|>\n".join(responses) if response is None else response
    return EpisodeResult({"id": "r", "answer": truth}, "completed", list(responses), whole, [])


def boxed(text: str) -> str:
    return f"Answer: \\boxed{{{text}}}"


@pytest.mark.parametrize(
    ("reward", "responses", "truth", "args", "value"),
    [
        (math_reward, [boxed("5")], "5", {}, 1.0),
        (math_reward, [boxed("6")], "5", {}, 0.0),
        (math_reward, ["5"], "5", {}, 0.0),
        (math_reward, [boxed("5")], None, {}, 0.0),
        (math_reward, [boxed("5")], "", {}, 0.0),
        (math_reward, ["\\boxed{1} then \\boxed{2}"], "2", {}, 1.0),
        (math_reward, ["\\boxed{1} then \\boxed{2}"], "1", {}, 0.0),
        (math_reward, [boxed("1"), boxed("5")], "5", {}, 1.0),
        (math_reward, [boxed("0.5333")], "0.53", {}, 0.0),
        # Slime's examples of the tolerance.
        (tolerance_reward, [boxed("\\frac{8}{15}")], "0.53", {}, 1.0),
        (tolerance_reward, [boxed("\\frac{8}{15}")], "0.53", {"tolerance": 0.0}, 0.0),
        (tolerance_reward, [boxed("0.58")], "0.53", {}, 1.0),
        (tolerance_reward, [boxed("0.59")], "0.53", {}, 0.0),
        # Slime's examples of the format mix, f = 0.1.
        (format_reward, [boxed("5")], "5", {}, 0.9),
        (format_reward, [THOUGHT + boxed("5")], "5", {}, 1.0),
        (format_reward, [THOUGHT + boxed("4")], "5", {}, 0.1),
        (format_reward, [boxed("4")], "5", {}, 0.0),
        (format_reward, [boxed("5") + THOUGHT], "5", {}, 0.0),
        (format_reward, [THOUGHT + boxed("4")], "5", {"format_weight": 0.0}, 0.0),
        (format_reward, [THOUGHT + boxed("4")], "5", {"format_weight": 1.0}, 1.0),
        (format_reward, ["sum of angles</think>" + boxed("4")], "5", {"format_weight": 1.0}, 1.0),
    ],
)
def test_worked_examples(reward, responses, truth, args, value):
    one = outcome(*responses, truth=truth)
    assert reward(one, args)["reward"] == pytest.approx(value, abs=1e-12)
    assert reward.begin(one, args)() == reward(one, args)


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{5}<|im_end|>\nwrong form, write \\boxed{}<|im_end|>\nfinal: 5",
        "\\boxed{5} <|im_end|>\n\\boxed{$Answer}",
    ],
)
def test_worked_examples_of_the_grading_scope(response):
    """The original looks for the last box in all text after the prompt, that of the environment included."""
    responses = ["\\boxed{5}", "final: 5"] if "final" in response else ["\\boxed{5}"]
    one = outcome(*responses, response=response)
    assert math_reward(one, {})["reward"] == 1.0
    assert math_reward(one, {"grade_scope": "response"})["reward"] == 0.0
    assert math_reward(one, {"preset": "slime_exact"})["reward"] == 0.0


def test_parts():
    assert format_reward(outcome(boxed("5")), {}) == {"reward": pytest.approx(0.9), "correct": 1.0, "format": 0.0}
    assert math_reward(outcome(THOUGHT + boxed("4")), {}) == {"reward": 0.0, "correct": 0.0, "format": 1.0}


@pytest.mark.parametrize(
    ("reward", "args", "message"),
    [
        (
            math_reward,
            {"tolerence": 0.1},
            "reward.args.tolerence=0.1: unknown name. Did you mean reward.args.tolerance",
        ),
        (math_reward, {"format_weight": 0.1}, "reward.args.format_weight"),
        (format_reward, {"format_weight": 1.5}, "reward.args.format_weight=1.5"),
        (math_reward, {"grade_scope": "all"}, "reward.args.grade_scope"),
    ],
)
def test_arguments_that_cannot_be_used(reward, args, message):
    with pytest.raises(ParameterError, match=message):
        reward(outcome(boxed("5")), args)


@pytest.mark.parametrize("name", ["math_reward", "tolerance_reward", "format_reward"])
def test_parameters_can_name_each_reward(name):
    options = RewardOptions(function=f"geo_sokoban_pipeline.rewards.geo3k.{name}")
    assert load_object(options.function)(outcome(boxed("5")), options.args)["correct"] == 1.0


def test_thoughts_are_graded_by_the_original_only():
    one = outcome("<think>\\boxed{5}</think> I am not sure")
    assert math_reward(one, {})["reward"] == 0.0
    assert math_reward(one, {"preset": "slime_exact"})["reward"] == 1.0
    assert math_reward(one, {"grader": "deepscaler"})["reward"] == 0.0
    assert math_reward(outcome("</think>" + boxed("5")), {"grader": "deepscaler"})["reward"] == 1.0
    assert math_reward(outcome(boxed("5")), {"grader": "deepscaler"})["reward"] == 0.0


def seed_advantages(rewards: list[float]) -> list[float]:
    """The original's arithmetic: a sum in float32, and a deviation that is 0 up to its epsilon."""
    total = np.float32(0)
    for reward in rewards:
        total += np.float32(reward)
    mean = total / np.float32(len(rewards))
    return [float((np.float32(reward) - mean) / np.float32(1e-6)) for reward in rewards]


def test_equal_rewards_that_binary_floats_cannot_hold_give_no_advantage():
    """Eight rewards of 0.9, what Instruct models got for right answers, were a signal in float32."""
    rewards = [format_reward(outcome(boxed("5")), {})["reward"] for _ in range(8)]
    assert seed_advantages(rewards) == pytest.approx([-0.0596] * 8, abs=1e-4)
    assert group_advantages(rewards, [0] * 8).tolist() == [0.0] * 8
    assert group_advantages(rewards, [0] * 8, normalize_std=False).tolist() == [0.0] * 8


@pytest.mark.parametrize("weight", [0.1, 0.3, 1 / 3, 0.7])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
def test_groups_of_one_kind_of_response_give_no_advantage(weight, size):
    kinds = [outcome(boxed("5")), outcome(THOUGHT + boxed("5")), outcome(THOUGHT + boxed("4")), outcome("?")]
    rewards = [format_reward(kind, {"format_weight": weight})["reward"] for kind in kinds for _ in range(size)]
    groups = np.repeat(np.arange(len(kinds)), size)
    assert not group_advantages(rewards, groups).any()
    mixed = group_advantages(rewards, np.zeros(len(rewards), int))
    assert (mixed[size : 2 * size] > 0).all() and (mixed[-size:] < 0).all()


def test_real_labels_in_a_box_earn_the_reward_and_other_labels_do_not(shared_data):
    labels = pq.read_table(shared_data / "geometry3k_small.parquet")["answer"].to_pylist()
    for label in labels:
        assert math_reward(outcome(boxed(label), truth=label), {})["reward"] == 1.0, label
    for label, other in zip(labels, [*labels[1:], labels[0]], strict=True):
        if label != other:
            assert math_reward(outcome(boxed(other), truth=label), {})["reward"] == 0.0, (label, other)


def test_shared_pairs_earn_what_their_grade_says(shared_data):
    """Plain pairs through the reward; hostile ones are the graders' own tests."""
    rows = [json.loads(line) for line in (shared_data / "math_pairs.jsonl").read_text().splitlines()]
    kinds = ("int_exact", "int_wrong", "sqrt", "frac", "pi", "decimal_exact", "no_box", "box_last_wins", "hack_hedge")
    chosen = [row for row in rows if row["kind"] in kinds and not row["ambiguous"]]
    assert len(chosen) > 40
    earned = [math_reward(outcome(row["response"], truth=row["ground_truth"]), {})["reward"] for row in chosen]
    assert np.mean([value == float(row["expected"]) for value, row in zip(earned, chosen, strict=True)]) >= 0.97
