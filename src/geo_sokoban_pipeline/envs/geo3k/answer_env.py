"""Geometry with one response: the response holds the answer in a box, and ends the episode."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from geo_sokoban_pipeline.envs.base import Info, Observation
from geo_sokoban_pipeline.envs.geo3k.data import read_family, read_ground_truth
from geo_sokoban_pipeline.envs.geo3k.env import AnswerSheet, SheetEnv
from geo_sokoban_pipeline.rewards.geo3k import GradingOptions, read_options
from geo_sokoban_pipeline.rewards.math_answer import Grade
from geo_sokoban_pipeline.rewards.text import has_box


class AnswerEnvOptions(GradingOptions):
    """Arguments of the environment with one response."""


class AnswerEnv(SheetEnv):
    """One question, one response; see `InteractionEnv`.

    Args:
        ground_truth: the reference, a text or a number; None: there is none, and no answer is correct.
        family: of the problem, for the metrics; None: it is not known.
        arguments: fields of `AnswerEnvOptions`.

    Raises:
        ParameterError: an argument is unknown or out of range.
    """

    def __init__(self, ground_truth: object, *, family: str | None = None, **arguments: Any) -> None:
        self._sheet = AnswerSheet(ground_truth, read_options("env.args", arguments, AnswerEnvOptions), family)

    def reset(self) -> tuple[Observation, Info]:
        """Back to the start; the prompt is the only observation."""
        self._sheet.clear()
        return {}, {"ground_truth_available": self.ground_truth is not None}

    def prepare(self, text: str) -> list[Future[Grade]]:
        """Begin to grade a response in the background."""
        return [self._sheet.prepare(self._sheet.text([text]))]

    def step(self, text: str) -> tuple[Observation, bool, Info]:
        """Grade the response; the episode is over.

        Returns:
            An empty observation, True, and the info: answer (text in the box, None without one), score (1.0 or 0.0),
            rule (which rule of the grader decided), parsed_actions (the answer, if there is one).
        """
        self._sheet.responses.append(text)
        verdict = self._sheet.grade(self._sheet.text([text]))
        answer = verdict.extracted
        info: Info = {
            "answer": answer,
            "score": float(verdict.correct),
            "rule": verdict.rule,
            "parsed_actions": [] if answer is None else [answer],
        }
        return {}, True, info

    def final_metrics(self) -> dict[str, float]:
        """Numbers of `AnswerSheet.metrics`, first_attempt_correct (the same as success), invalid_turns (without a
        box).
        """
        numbers = self._sheet.metrics()
        invalid = sum(not has_box(self._sheet.text([response])) for response in self._sheet.responses)
        return {**numbers, "first_attempt_correct": numbers["success"], "invalid_turns": float(invalid)}


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any] | None = None) -> AnswerEnv:
    """The environment of one prompts row.

    Args:
        sample: `answer` is the reference; `family` may name the problem's.
        args: keyword arguments of `AnswerEnv`.

    Raises:
        ParameterError: an argument is unknown or out of range.
    """
    options = read_options("env.args", args, AnswerEnvOptions)
    return AnswerEnv(read_ground_truth(sample), family=read_family(sample), **options.model_dump())
