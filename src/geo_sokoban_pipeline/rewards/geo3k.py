"""Rewards of geometry: whether the answer is correct, and perhaps whether it has the form that was asked for.

Each is a reward function that the parameters can name. Values are float64; groups of equal rewards get advantages of
exactly 0 whatever they are (`grpo.group_advantages`), so rewards need not be 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from geo_sokoban_pipeline.options.geo3k_play import (
    AnswerRewardOptions,
    FormatRewardOptions,
    ToleranceRewardOptions,
    read_options,
)
from geo_sokoban_pipeline.rewards.answer_text import assistant_text, has_format
from geo_sokoban_pipeline.rewards.math_answer import prepare_grade


class AnswerReward:
    """Reward function over a finished episode: (1 − share) · correct + share · form.

    Args:
        options: model of its arguments; `format_share` is the share.
    """

    def __init__(self, options: type[AnswerRewardOptions]) -> None:
        self._options = options

    def __call__(self, outcome: Any, args: Mapping[str, Any]) -> dict[str, float]:
        """Reward and its parts.

        Args:
            outcome: finished episode; `outcome.prompt["answer"]` is the reference, without one no answer is correct.
            args: fields of the options.

        Returns:
            reward, correct (0 or 1), format (0 or 1).

        Raises:
            ParameterError: an argument is unknown or not allowed.
        """
        return self.begin(outcome, args)()

    def begin(self, outcome: Any, args: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
        """Begin to grade an episode in the background; what is returned waits for the grade and gives the parts."""
        options = read_options("reward.args", args, self._options)
        truth, grader, tolerance = outcome.prompt.get("answer"), options.grader, options.tolerance
        grade = prepare_grade(_graded_text(outcome, options), truth, grader=grader, tolerance=tolerance)
        form = float(has_format(assistant_text(outcome.replies, thoughts=True)))
        return lambda: _parts(float(grade.result().correct), form, options.format_share)


math_reward = AnswerReward(AnswerRewardOptions)
tolerance_reward = AnswerReward(ToleranceRewardOptions)
format_reward = AnswerReward(FormatRewardOptions)


def _graded_text(outcome: Any, options: AnswerRewardOptions) -> str:
    if options.grade_scope == "response":
        return str(outcome.response)
    return assistant_text(outcome.replies, thoughts=options.keeps_thoughts)


def _parts(correct: float, form: float, share: float) -> dict[str, float]:
    return {"reward": (1 - share) * correct + share * form, "correct": correct, "format": form}
