"""Geometry with one response: the response holds the answer in a box, and ends the episode."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from geo_sokoban_pipeline.config.base import validate_parameters
from geo_sokoban_pipeline.envs.base import Info, Observation
from geo_sokoban_pipeline.envs.geo3k.data import read_ground_truth, text_or_none
from geo_sokoban_pipeline.envs.geo3k.env import GradedEnv
from geo_sokoban_pipeline.rewards.geo3k import GradingOptions
from geo_sokoban_pipeline.rewards.math_answer import Grade
from geo_sokoban_pipeline.rewards.text import has_box


class AnswerEnvOptions(GradingOptions):
    """Arguments of the environment with one response."""


class AnswerEnv(GradedEnv):
    """One question, one response; see `InteractionEnv`.

    Args:
        ground_truth: the reference, a text or a number; None: there is none, and no answer is correct.
        family: of the problem, for the metrics; None: it is not known.
        arguments: fields of `AnswerEnvOptions`.

    Raises:
        ParameterError: an argument is unknown or out of range.
    """

    def __init__(self, ground_truth: object, *, family: str | None = None, **arguments: Any) -> None:
        options = validate_parameters(arguments, AnswerEnvOptions, prefix="env.args")
        super().__init__(ground_truth, options, family)

    def prepare(self, text: str) -> list[Future[Grade]]:
        """Begin to grade a response in the background."""
        return [self._begin_grade(self._graded_text([text]))]

    def step(self, text: str) -> tuple[Observation, bool, Info]:
        """Grade the response; the episode is over.

        Returns:
            An empty observation, True, and the info: answer (text in the box, None without one), score (1.0 or 0.0),
            rule (which rule of the grader decided), parsed_actions (the answer, if there is one).
        """
        self.responses.append(text)
        verdict = self._grade(self._graded_text([text]))
        answer = verdict.extracted
        info: Info = {
            "answer": answer,
            "score": float(verdict.correct),
            "rule": verdict.rule,
            "parsed_actions": [] if answer is None else [answer],
        }
        return {}, True, info

    def final_metrics(self) -> dict[str, float]:
        """Numbers of `GradedEnv`, first_attempt_correct (the same as success), invalid_turns (without a
        box).
        """
        numbers = super().final_metrics()
        invalid = sum(not has_box(self._graded_text([response])) for response in self.responses)
        return {**numbers, "first_attempt_correct": numbers["success"], "invalid_turns": float(invalid)}


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any] | None = None) -> AnswerEnv:
    """The environment of one prompts row.

    Args:
        sample: `answer` is the reference; `family` may name the problem's.
        args: keyword arguments of `AnswerEnv`.

    Raises:
        ParameterError: an argument is unknown or out of range.
    """
    options = validate_parameters(args or {}, AnswerEnvOptions, prefix="env.args")
    return AnswerEnv(read_ground_truth(sample), family=text_or_none(sample.get("family")), **options.model_dump())
