"""Geometry with a scoring tool: the policy proposes an answer in a tool call, and the feedback scores it.

All verdicts of an episode come from one place, so that its turns and its end never disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal

from pydantic import Field

from geo_sokoban_pipeline.config.base import Count, validate_parameters
from geo_sokoban_pipeline.envs.base import Info, Observation, user_message
from geo_sokoban_pipeline.envs.geo3k.data import read_ground_truth, text_or_none
from geo_sokoban_pipeline.envs.geo3k.figures.exact import answer_form
from geo_sokoban_pipeline.envs.geo3k.tool_call import CALL_MARK, ToolCall, parse_tool_call
from geo_sokoban_pipeline.rewards.geo3k import GradingOptions
from geo_sokoban_pipeline.rewards.math_answer import Grade, label_text, prepare_grade
from geo_sokoban_pipeline.rewards.text import assistant_text, has_box, repetition


class Geo3kEnvOptions(GradingOptions):
    """Arguments of the environment with the scoring tool."""

    EXACT: ClassVar[dict[str, Any]] = {
        **GradingOptions.EXACT,
        "end_on_correct": False,
        "after_think": False,
        "tolerate_list_arguments": False,
        "tolerate_latex": False,
        "quote": "raw",
    }

    max_turns: Count = Field(description="Responses of an episode; as many as rollout.max_turns.")
    end_on_correct: bool = Field(
        True, description="End the episode once the tool says that the answer is correct; off: it continues."
    )
    after_think: bool = Field(True, description="Read calls only after the last `</think>` where there is one.")
    tolerate_list_arguments: bool = Field(
        True,
        description="Take arguments that are no JSON object for a missing answer; off: such a call fails the episode.",
    )
    tolerate_latex: bool = Field(
        True,
        description="Read LaTeX in calls with single backslashes too, and numbers by their digits; off: as plain JSON.",
    )
    earlier_call_counts: bool = Field(
        False,
        description="Where the last call of a response cannot be read, take the one before it; off: there is none.",
    )
    feedback: Literal["full", "brief"] = Field("full", description="Explain, or use as few tokens as possible.")
    quote: Literal["short", "raw"] = Field(
        "short", description="Feedback repeats an answer cut to 100 characters and without marks, or as it is."
    )


_CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "<digits>"}}</tool_call>'
_WRONG = (
    "calc_score result: 0.0. The answer '{quoted}' is wrong. Look for another way to solve the problem, and do not "
    "repeat this answer."
)
_QUOTED_CHARACTERS = 100

NO_CALL = "no call"
OTHER_NAME = "other name"
NO_ANSWER = "no answer"
CORRECT = "correct"
WRONG = "wrong"
WRONG_LAST = "wrong, last chance"

_TEXTS = {
    "full": {
        NO_CALL: f"No tool call was found, so the conversation ends. A call looks like this: {_CALL}",
        OTHER_NAME: f'There is no tool "{{quoted}}". Call the scoring tool like this: {_CALL}',
        NO_ANSWER: f'The call holds no "answer". Put your numeric answer into its arguments: {_CALL}',
        CORRECT: "calc_score result: 1.0. The answer '{quoted}' matches the reference. You may stop reasoning now and "
        "give the final solution in \\boxed{}.",
        WRONG: _WRONG,
        WRONG_LAST: f"{_WRONG} One chance is left: do not call the tool again, end with Answer: \\boxed{{$Answer}}",
    },
    "brief": {
        NO_CALL: "no tool_call",
        OTHER_NAME: "no tool, try again",
        NO_ANSWER: "no answer, try again",
        CORRECT: "correct",
        WRONG: "wrong, try again",
        WRONG_LAST: "wrong, last chance",
    },
}


def _quote(text: str) -> str:
    shown = text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"
    # Removing characters may create a mark, so marks are searched afterwards.
    return "".join(character for character in shown if character.isprintable()).replace("<|", "< |")


# The responses of an episode, the reference, and the grader: all verdicts and numbers come from here.


class GradedEnv:
    """Common parts of both environments; see `InteractionEnv`.

    Args:
        ground_truth: the reference, a text or a number; None: there is none, and no answer is correct.
        options: grader and tolerance.
        family: of the problem, for the metrics; None: it is not known.

    Attributes:
        ground_truth: the reference as text.
        responses: of the policy, in order.
        truncated: whether the episode was cut off.
    """

    def __init__(self, ground_truth: object, options: GradingOptions, family: str | None) -> None:
        self.ground_truth = label_text(ground_truth) or None
        self._family = family
        self.options = options
        self._restart()

    def _restart(self) -> None:
        self._grades: dict[str, Future[Grade]] = {}
        self.responses: list[str] = []
        self.truncated = False

    def reset(self) -> tuple[Observation, Info]:
        """Back to the start; the prompt is the first observation."""
        self._restart()
        return {}, {"ground_truth_available": self.ground_truth is not None}

    def format_observation(self, observation: Observation | None) -> dict[str, Any]:
        """See `base.user_message`."""
        return user_message(observation)

    def finalize(self, responses: Sequence[str], status: str) -> None:
        """Take all responses of the finished episode, also one that was truncated before the loop stepped with it."""
        self.responses = list(responses)
        self.truncated = status == "truncated"

    def close(self) -> None:
        """Part of the protocol; there is nothing to release."""

    def _begin_grade(self, text: str) -> Future[Grade]:
        """Begin to grade the last box of a text in the background; each text is submitted once."""
        if text not in self._grades:
            self._grades[text] = prepare_grade(
                text, self.ground_truth, grader=self.options.grader, tolerance=self.options.tolerance
            )
        return self._grades[text]

    def _grade(self, text: str) -> Grade:
        """Verdict on the last box of a text; waits for it."""
        return self._begin_grade(text).result()

    def _graded_text(self, responses: Sequence[str]) -> str:
        return assistant_text(responses, thoughts=self.options.keeps_thoughts)

    def final_metrics(self) -> dict[str, float]:
        """Numbers of both tasks.

        Keys: success (0 or 1, the last box of all responses), has_answer (whether there is a box), grading_timeout
        (whether the verdict is that of the time limit), truncated, repetition, `form_<class>` = 1 for the class of the
        reference (integer, decimal, surd, fraction, pi or other), and `family_<name>` = 1.
        """
        text = self._graded_text(self.responses)
        verdict = self._grade(text)
        numbers = {
            "success": float(verdict.correct),
            "has_answer": float(has_box(text)),
            "grading_timeout": float(verdict.rule == "timeout"),
            "truncated": float(self.truncated),
            "repetition": float(repetition("\n".join(self.responses))),
        }
        if self.ground_truth is not None:
            numbers[f"form_{answer_form(self.ground_truth)}"] = 1.0
        if self._family is not None:
            numbers[f"family_{self._family}"] = 1.0
        return numbers


# Geometry as a conversation with a scoring tool: the policy proposes an answer, and is told whether it is right.


class Geo3kEnv(GradedEnv):
    """One question with a scoring tool; see `InteractionEnv`.

    Args:
        ground_truth: the reference, a text or a number; None: there is none, and every score is 0.
        max_turns: responses of the episode, needed; feedback before the last one announces it.
        family: of the problem, for the metrics; None: it is not known.
        arguments: further fields of `Geo3kEnvOptions`; `preset="slime_exact"` sets the original's rules.

    Attributes:
        turn: responses so far.
        tool_calls: answers that were scored.
        last_tool_score: 1.0 or 0.0 of the last one; None before it.

    Raises:
        ParameterError: an argument is unknown, missing or out of range.
    """

    options: Geo3kEnvOptions

    def __init__(self, ground_truth: object, max_turns: int, *, family: str | None = None, **arguments: Any) -> None:
        options = validate_parameters({**arguments, "max_turns": max_turns}, Geo3kEnvOptions, prefix="env.args")
        super().__init__(ground_truth, options, family)

    def _restart(self) -> None:
        super()._restart()
        self.turn = 0
        self.tool_calls = 0
        self.last_tool_score: float | None = None
        # Score of each response's call; None if nothing was scored.
        self._scores: list[float | None] = []

    def prepare(self, text: str) -> list[Future[Grade]]:
        """Begin the gradings of the step with this response, and of the end of the episode, in the background.

        Returns:
            The grade of the call's answer, for which the step waits, if there is one.
        """
        self._begin_grade(self._graded_text([*self.responses, text]))
        if (call := self._read(text)) is None or not call.is_known or call.answer is None:
            return []
        return [self._begin_grade(_boxed(call.answer))]

    def step(self, text: str) -> tuple[Observation, bool, Info]:
        """Carry out the call of a response.

        Returns:
            Observation: `obs_str`, after a scored answer `tool_score` too. Done: after a response without a call that
            can be read, after max_turns responses, and, by default, after a correct answer. Info: tool_executed; after
            a scored answer name, answer, score, rule and parsed_actions; answer_missing where the call has none.

        Raises:
            TypeError: the arguments of the call are no JSON object, and `tolerate_list_arguments` is off.
        """
        call = self._read(text)
        self.turn += 1
        self.responses.append(text)
        self._scores.append(None)
        final = self.turn >= self.options.max_turns
        if call is None:
            return self._say(NO_CALL), True, {"tool_executed": False}
        if not call.is_known:
            return self._say(OTHER_NAME, call.name), final, {"tool_executed": False}
        if call.malformed_arguments and not self.options.tolerate_list_arguments:
            raise TypeError(
                "the arguments of the tool call are not a JSON object; tolerate_list_arguments=true allows it"
            )
        if call.answer is None:
            return self._say(NO_ANSWER), final, {"tool_executed": False, "answer_missing": True}
        return self._score(call.name, call.answer, final)

    def _score(self, name: str, answer: str, final: bool) -> tuple[Observation, bool, Info]:
        verdict = self._grade(_boxed(answer))
        score = float(verdict.correct)
        self.tool_calls += 1
        self.last_tool_score = self._scores[-1] = score
        # One turn before the last one, so that a response can follow it.
        case = WRONG_LAST if self.turn >= self.options.max_turns - 1 else WRONG
        observation = self._say(CORRECT if verdict.correct else case, answer)
        info: Info = {
            "name": name,
            "answer": answer,
            "score": score,
            "rule": verdict.rule,
            "tool_executed": True,
            "parsed_actions": [answer],
        }
        return {**observation, "tool_score": score}, final or (verdict.correct and self.options.end_on_correct), info

    def _read(self, text: str) -> ToolCall | None:
        return parse_tool_call(
            text,
            after_think=self.options.after_think,
            earlier_call_counts=self.options.earlier_call_counts,
            tolerate_latex=self.options.tolerate_latex,
        )

    def _say(self, case: str, quoted: str = "") -> dict[str, Any]:
        """Text of an observation, with the answer or name that it repeats."""
        # `raw` is the original's rule: an answer of any length then fills the context, and one that spells a mark of
        # the chat, such as `<|image_pad|>`, breaks the episode.
        shown = quoted if self.options.quote == "raw" else _quote(quoted)
        return {"obs_str": _TEXTS[self.options.feedback][case].replace("{quoted}", shown)}

    def final_metrics(self) -> dict[str, float]:
        """The episode in numbers.

        Keys beside those of `GradedEnv`: first_attempt_correct (the first response's scored answer, else its
        box), tool_calls (responses that try a call), valid_tool_calls (scored ones), tool_correct (whether one was
        correct), invalid_turns (responses with neither a scored answer nor a box).
        """
        responses = self.responses
        scores = [*self._scores, *[None] * (len(responses) - len(self._scores))]
        silent = [
            score is None and not has_box(self._graded_text([r])) for r, score in zip(responses, scores, strict=True)
        ]
        return {
            **super().final_metrics(),
            "first_attempt_correct": self._first_attempt(scores),
            "tool_calls": float(sum(CALL_MARK in response for response in responses)),
            "valid_tool_calls": float(self.tool_calls),
            "tool_correct": float(1.0 in scores),
            "invalid_turns": float(sum(silent)),
        }

    def _first_attempt(self, scores: Sequence[float | None]) -> float:
        if not scores:
            return 0.0
        score = scores[0]
        return float(self._grade(self._graded_text(self.responses[:1])).correct) if score is None else score

    def metadata(self) -> dict[str, Any]:
        """The original's state of the environment."""
        return {"turn": self.turn, "tool_calls": self.tool_calls, "last_tool_score": self.last_tool_score}


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any] | None = None) -> Geo3kEnv:
    """The environment of one prompts row.

    Args:
        sample: `answer` is the reference; `family` may name the problem's.
        args: keyword arguments of `Geo3kEnv`; `max_turns` is needed.

    Raises:
        ParameterError: an argument is unknown, missing or out of range.
    """
    options = validate_parameters(args or {}, Geo3kEnvOptions, prefix="env.args")
    return Geo3kEnv(read_ground_truth(sample), family=text_or_none(sample.get("family")), **options.model_dump())


def _boxed(answer: str) -> str:
    """An answer in the form that graders read."""
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
