"""Rewards of geometry: whether the answer is correct, and perhaps whether it has the form that was asked for.

Graded is what the policy wrote, without its thoughts, never what the environment said.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from geo_sokoban_pipeline.config.geo3k_training import (
    AnswerRewardOptions,
    FormatRewardOptions,
    ToleranceRewardOptions,
    read_options,
)
from geo_sokoban_pipeline.rewards.math_answer import prepare_grade

# slime's rule: a text is repetitive if its last 10,000 characters compress more than tenfold.
REPETITION_CHARACTERS = 10_000
REPETITION_RATIO = 10.0

_THINK_END = "</think>"
_BOX = "\\boxed{"


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


def visible_text(reply: str) -> str:
    """A reply from behind its last `</think>` on; all of it where there is none."""
    return reply.rpartition(_THINK_END)[2]


def assistant_text(replies: Iterable[str], *, thoughts: bool = False) -> str:
    """Replies of an episode as one text, in order.

    Args:
        thoughts: keep them. They are taken out of each reply, so that an answer of an earlier reply stays when a later
            one thinks.
    """
    return "\n".join(reply if thoughts else visible_text(reply) for reply in replies)


def has_box(text: str) -> bool:
    """Whether a text opens a box."""
    return _BOX in text


def has_format(text: str) -> bool:
    """Whether a think block is followed by a box, the form that the mix of correctness and form pays for.

    The block must be closed; it may be opened in the prompt, as templates of Thinking models do.
    """
    _, closed, rest = text.partition(_THINK_END)
    return bool(closed) and "}" in rest.partition(_BOX)[2]


def repetition(text: str) -> bool:
    """Whether a text of more than 10,000 characters ends in repetition: its last 10,000 compress more than tenfold."""
    if len(text) <= REPETITION_CHARACTERS:
        return False
    raw = text[-REPETITION_CHARACTERS:].encode("utf-8", errors="replace")
    return len(raw) / len(zlib.compress(raw, level=9)) > REPETITION_RATIO
