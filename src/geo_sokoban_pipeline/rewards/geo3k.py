"""Rewards of geometry: for a correct answer, and optionally for the requested form.

Only the policy's responses are graded, without its thoughts, never an observation. The preset `slime_exact` of the
arguments sets slime's values (docs/deviations.md); an explicit value takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from geo_sokoban_pipeline.config.base import StrictModel, validate_parameters
from geo_sokoban_pipeline.rewards.math_answer import prepare_grade
from geo_sokoban_pipeline.rewards.text import assistant_text, has_format

GraderName = Literal["default", "slime_exact", "deepscaler", "geo3k"]


class GradingOptions(StrictModel):
    """Options of the comparison of an answer with the reference."""

    EXACT: ClassVar[dict[str, Any]] = {"grader": "slime_exact"}

    preset: Literal["default", "slime_exact"] = Field(
        "default", description="`slime_exact`: the original's value of everything that is not given."
    )
    grader: GraderName = Field("default", description="See `rewards.grade_answer`.")
    tolerance: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="Largest difference that the graders `geo3k` and, from decimal labels, `default` accept.",
    )

    @property
    def keeps_thoughts(self) -> bool:
        """Whether thoughts are graded like any other text, as the original's graders do; they look for an end tag
        themselves, if at all.
        """
        return self.grader in ("slime_exact", "deepscaler")

    @model_validator(mode="after")
    def _check_tolerance(self) -> Self:
        if self.tolerance and self.grader not in ("default", "geo3k"):
            raise ValueError(
                f"tolerance={self.tolerance:g} with grader={self.grader}, which has none; take the grader geo3k or 0."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        exact = isinstance(given, Mapping) and given.get("preset") == "slime_exact"
        return {**cls.EXACT, **given} if exact else given


class AnswerRewardOptions(GradingOptions):
    """Arguments of the default reward, 1 for a correct answer and 0 otherwise."""

    EXACT: ClassVar[dict[str, Any]] = {**GradingOptions.EXACT, "grade_scope": "response"}

    grade_scope: Literal["assistant", "response"] = Field(
        "assistant",
        description="Look for the last box in what the policy wrote, or in all text after the prompt, feedback too.",
    )

    @property
    def format_share(self) -> float:
        """Share of the reward for the form."""
        return 0.0


class ToleranceRewardOptions(AnswerRewardOptions):
    """Arguments of the reward with a tolerance."""

    grader: GraderName = Field("geo3k", description="See `rewards.grade_answer`.")
    tolerance: float = Field(0.05, ge=0, le=1e9, description="Largest difference from the reference that is accepted.")

    EXACT: ClassVar[dict[str, Any]] = {"grade_scope": "response"}


class FormatRewardOptions(AnswerRewardOptions):
    """Arguments of the mix of correctness and form."""

    format_weight: float = Field(
        0.1, ge=0, le=1, description="Part of the reward that is for a closed think block with a box behind it."
    )

    @property
    def format_share(self) -> float:
        """See `format_weight`."""
        return self.format_weight


class AnswerReward:
    """Reward function over a finished episode: (1 − share) · correct + share · form.

    Args:
        options: model of its arguments; `format_share` is the share.
    """

    def __init__(self, options: type[AnswerRewardOptions]) -> None:
        self._options = options

    def __call__(self, result: Any, args: Mapping[str, Any]) -> dict[str, float]:
        """Reward and its parts.

        Args:
            result: finished episode; `result.prompt["answer"]` is the reference, without one no answer is correct.
            args: fields of the options.

        Returns:
            reward, correct (0 or 1), format (0 or 1).

        Raises:
            ParameterError: an argument is unknown or not allowed.
        """
        return self.begin(result, args)()

    def begin(self, result: Any, args: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
        """Begin to grade an episode in the background; the returned function waits for the grade."""
        options = validate_parameters(args, self._options, prefix="reward.args")
        truth, grader, tolerance = result.prompt.get("answer"), options.grader, options.tolerance
        written = assistant_text(result.responses, thoughts=options.keeps_thoughts)
        text = str(result.response) if options.grade_scope == "response" else written
        grade = prepare_grade(text, truth, grader=grader, tolerance=tolerance)
        form = float(has_format(assistant_text(result.responses, thoughts=True)))
        return lambda: _parts(float(grade.result().correct), form, options.format_share)


math_reward = AnswerReward(AnswerRewardOptions)
tolerance_reward = AnswerReward(ToleranceRewardOptions)
format_reward = AnswerReward(FormatRewardOptions)


def _parts(correct: float, form: float, share: float) -> dict[str, float]:
    return {"reward": (1 - share) * correct + share * form, "correct": correct, "format": form}
