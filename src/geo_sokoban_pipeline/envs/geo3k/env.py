"""Geometry as a conversation with a scoring tool: the policy proposes an answer, and is told whether it is right.

The tool call decides what happens next, the box in the policy's text what the episode is worth. The course of an
episode is a function of the reference and the replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from geo_sokoban_pipeline.envs.base import Info, Observation, user_message
from geo_sokoban_pipeline.envs.geo3k import feedback
from geo_sokoban_pipeline.envs.geo3k.answer_sheet import AnswerSheet
from geo_sokoban_pipeline.envs.geo3k.rows import read_family, read_ground_truth
from geo_sokoban_pipeline.envs.geo3k.tool_call import CALL_MARK, ToolCall, parse_tool_call
from geo_sokoban_pipeline.options.geo3k_play import Geo3kEnvOptions, read_options
from geo_sokoban_pipeline.rewards.answer_text import has_box
from geo_sokoban_pipeline.rewards.math_answer import Grade


class Geo3kEnv:
    """One question with a scoring tool; see `InteractionEnv`.

    Args:
        ground_truth: the reference, a text or a number; None: there is none, and every score is 0.
        max_turns: replies of the episode, needed; feedback before the last one announces it.
        family: of the problem, for the metrics; None: it is not known.
        arguments: further fields of `Geo3kEnvOptions`; `preset="slime_exact"` sets the original's rules.

    Attributes:
        turn: replies so far.
        tool_calls: answers that were scored.
        last_tool_score: 1.0 or 0.0 of the last one; None before it.

    Raises:
        ParameterError: an argument is unknown, missing or out of range.
    """

    def __init__(self, ground_truth: object, max_turns: int, *, family: str | None = None, **arguments: Any) -> None:
        self.options = read_options("env.args", {**arguments, "max_turns": max_turns}, Geo3kEnvOptions)
        self._sheet = AnswerSheet(ground_truth, self.options, family)
        self._warning_turn = feedback.warning_turn(self.options.max_turns)
        self._restart()

    def _restart(self) -> None:
        self._sheet.clear()
        self.turn = 0
        self.tool_calls = 0
        self.last_tool_score: float | None = None
        # Score of each reply's call; None where nothing was scored.
        self._scores: list[float | None] = []

    @property
    def ground_truth(self) -> str | None:
        """The reference as text."""
        return self._sheet.ground_truth

    def reset(self) -> tuple[Observation, Info]:
        """Back to the start; the prompt is the first observation."""
        self._restart()
        return {}, {"ground_truth_available": self.ground_truth is not None}

    def prepare(self, text: str) -> list[Future[Grade]]:
        """Begin to grade in the background what the step with this reply, and the end of the episode, will ask for.

        Returns:
            What the step waits for: the grade of the call's answer, if there is one.
        """
        self._sheet.prepare(self._sheet.text([*self._sheet.replies, text]))
        call = self._read(text)
        if call is None or not call.is_known or call.answer is None:
            return []
        return [self._sheet.prepare(_boxed(call.answer))]

    def step(self, text: str) -> tuple[Observation, bool, Info]:
        """Carry out the call of a reply.

        Returns:
            Observation: `obs_str`, after a scored answer `tool_score` too. Done: after a reply without a call that can
            be read, after max_turns replies, and, by default, after a correct answer. Info: tool_executed; after a
            scored answer name, answer, score, rule and parsed_actions; answer_missing where the call has none.

        Raises:
            TypeError: the arguments of the call are no JSON object, and `tolerate_list_arguments` is off.
        """
        call = self._read(text)
        self.turn += 1
        self._sheet.replies.append(text)
        self._scores.append(None)
        final = self.turn >= self.options.max_turns
        if call is None:
            return self._say(feedback.NO_CALL), True, {"tool_executed": False}
        if not call.is_known:
            return self._say(feedback.OTHER_NAME, call.name), final, {"tool_executed": False}
        if call.malformed_arguments and not self.options.tolerate_list_arguments:
            raise TypeError("the arguments of the tool call are no JSON object; tolerate_list_arguments=true allows it")
        if call.answer is None:
            return self._say(feedback.NO_ANSWER), final, {"tool_executed": False, "answer_missing": True}
        return self._score(call.name, call.answer, final)

    def _score(self, name: str, answer: str, final: bool) -> tuple[Observation, bool, Info]:
        verdict = self._sheet.grade(_boxed(answer))
        score = float(verdict.correct)
        self.tool_calls += 1
        self.last_tool_score = self._scores[-1] = score
        case = feedback.WRONG_LAST if self.turn - 1 >= self._warning_turn else feedback.WRONG
        observation = self._say(feedback.CORRECT if verdict.correct else case, answer)
        info: Info = {
            "name": name,
            "answer": answer,
            "score": score,
            "rule": verdict.rule,
            "tool_executed": True,
            "parsed_actions": [answer],
        }
        done = final or (verdict.correct and self.options.end_on_correct)
        return {**observation, "tool_score": score}, done, info

    def _read(self, text: str) -> ToolCall | None:
        options = self.options
        return parse_tool_call(text, after_think=options.after_think, earlier_call_counts=options.earlier_call_counts)

    def _say(self, case: str, quoted: str = "") -> dict[str, Any]:
        options = self.options
        return {"obs_str": feedback.feedback_text(case, options.feedback, quoted, raw=options.quote == "raw")}

    def format_observation(self, observation: Observation | None) -> dict[str, Any]:
        """See `base.user_message`."""
        return user_message(observation)

    def conclude(self, replies: Sequence[str], status: str) -> None:
        """Take all replies of the finished episode, those included that the loop did not step with."""
        self._sheet.conclude(replies, status)

    def final_metrics(self) -> dict[str, float]:
        """The episode in numbers.

        Keys beside those of `AnswerSheet.metrics`: first_attempt_correct (the first reply's scored answer, else its
        box), tool_calls (replies that try a call), valid_tool_calls (scored ones), tool_correct (whether one was
        correct), invalid_turns (replies with neither a scored answer nor a box).
        """
        replies = self._sheet.replies
        scores = [*self._scores, *[None] * (len(replies) - len(self._scores))]
        silent = [
            score is None and not has_box(self._sheet.text([r])) for r, score in zip(replies, scores, strict=True)
        ]
        return {
            **self._sheet.metrics(),
            "first_attempt_correct": self._first_attempt(scores),
            "tool_calls": float(sum(CALL_MARK in reply for reply in replies)),
            "valid_tool_calls": float(self.tool_calls),
            "tool_correct": float(1.0 in scores),
            "invalid_turns": float(sum(silent)),
        }

    def _first_attempt(self, scores: Sequence[float | None]) -> float:
        if not scores:
            return 0.0
        score = scores[0]
        return float(self._sheet.grade(self._sheet.text(self._sheet.replies[:1])).correct) if score is None else score

    def metadata(self) -> dict[str, Any]:
        """The original's state of the environment."""
        return {"turn": self.turn, "tool_calls": self.tool_calls, "last_tool_score": self.last_tool_score}

    def close(self) -> None:
        """Nothing is held; here for the protocol."""


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any] | None = None) -> Geo3kEnv:
    """The environment of one prompts row.

    Args:
        sample: `answer` is the reference; `family` may name the problem's.
        args: keyword arguments of `Geo3kEnv`; `max_turns` is needed.

    Raises:
        ParameterError: an argument is unknown, missing or out of range.
    """
    options = read_options("env.args", args, Geo3kEnvOptions)
    return Geo3kEnv(read_ground_truth(sample), family=read_family(sample), **options.model_dump())


def _boxed(answer: str) -> str:
    """An answer in the form that graders read."""
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
