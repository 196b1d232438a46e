"""Rewards of geometry: slime's worked examples, what is graded, and the texts of responses."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.rewards.geo3k import format_reward, math_reward, tolerance_reward
from geo_sokoban_pipeline.rewards.text import assistant_text, has_box, has_format, repetition, visible_text
from geo_sokoban_pipeline.rollout.episode import EpisodeResult

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
        # Thoughts are graded by the original only.
        (math_reward, ["<think>\\boxed{5}</think> I am not sure"], "5", {}, 0.0),
        (math_reward, ["<think>\\boxed{5}</think> I am not sure"], "5", {"preset": "slime_exact"}, 1.0),
        (math_reward, ["<think>\\boxed{5}</think> I am not sure"], "5", {"grader": "deepscaler"}, 0.0),
        (math_reward, ["</think>" + boxed("5")], "5", {"grader": "deepscaler"}, 1.0),
        (math_reward, [boxed("5")], "5", {"grader": "deepscaler"}, 0.0),
    ],
)
def test_worked_examples(reward, responses, truth, args, value):
    one = outcome(*responses, truth=truth)
    assert reward(one, args)["reward"] == pytest.approx(value, abs=1e-12)
    assert reward.begin(one, args)() == reward(one, args)


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


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (visible_text, "a", "a"),
        (visible_text, "a</think>b", "b"),
        (visible_text, "<think>a</think>b</think>c", "c"),
        (visible_text, "a</think>", ""),
        (visible_text, "<think>a", "<think>a"),
        (assistant_text, ["x</think>\\boxed{5}", "y</think>done"], "\\boxed{5}\ndone"),
        (assistant_text, [], ""),
        (has_box, "\\boxed{", True),
        (has_box, "\\boxed", False),
        (has_box, "\\fbox{5}", False),
        (has_format, "<think>a</think> \\boxed{5}", True),
        (has_format, "a</think> \\boxed{5}", True),
        (has_format, "<think>a</think> b </think> \\boxed{\\frac{1}{2}}", True),
        (has_format, "<think>a \\boxed{5} </think>", False),
        (has_format, "<think>a \\boxed{5}", False),
        (has_format, "\\boxed{5} <think>a</think>", False),
        (has_format, "<think>a</think> \\boxed{5", False),
        (has_format, "\\boxed{5}", False),
        pytest.param(repetition, "a" * 10_001, True, id="long"),
        pytest.param(repetition, "a" * 10_000, False, id="short"),
        pytest.param(repetition, "x" * 10 + "up, left; " * 2000, True, id="phrase"),
        # Only the end counts.
        pytest.param(repetition, "a" * 20_000 + " ".join(str(n * 7919 % 10_007) for n in range(3000)), False, id="end"),
        (repetition, "", False),
        # A lone surrogate must not stop the metrics.
        pytest.param(repetition, "é\ud800" * 6000, True, id="surrogate"),
    ],
)
def test_texts_of_responses(function, given, expected):
    assert function(given) == expected
