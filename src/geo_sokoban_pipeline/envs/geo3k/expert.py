"""Experts of geometry: they know the numbers of the figure and choose one of the rules that fit it.

The expert `plausible` reads and calculates rightly and takes a rule at random. So SFT on it teaches to read and to
calculate, and is right about once in as many rules as there are; which rule fits which figure is left to be found. With
its working it first says what it sees, which is always right: only the rule and what follows from it are uncertain.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geo_sokoban_pipeline.config.base import refuse_first
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.geo3k.tool_call import TOOL_NAMES

NAMES = ("plausible", "solver", "constant")


@dataclass(frozen=True)
class _Option:
    """An answer and its working, which is empty if it is unknown."""

    label: str
    working: str = ""


class GeometryExpert:
    """Responses of one demonstration.

    Args:
        name: `plausible`, `solver` (the label) or `constant`.
        patience: wrong answers after which it ends with its next one, without the tool. None: it tries until the last
            turn, which it always ends so.
        noise: share of the answers of `solver` and `constant` that follow a rule at random instead, in [0, 1].
        tool_share: share of the episodes in which it calls the tool, where there is one; in the others it answers at
            once.
        working: write the kind of figure, the numbers and the rule before the answer.
        answer: of `constant`.

    Raises:
        ValueError: an unknown name, a share out of range, or no answer for `constant`.
    """

    def __init__(
        self,
        name: str,
        patience: int | None = None,
        noise: float = 0.0,
        *,
        tool_share: float = 1.0,
        working: bool = False,
        answer: str | None = None,
    ) -> None:
        refuse_first(
            (name not in NAMES, f"warm_start.teacher.name={name!r}: must be one of {', '.join(NAMES)}"),
            (
                not 0.0 <= tool_share <= 1.0,
                f"warm_start.teacher.args.tool_share={tool_share}: must be in [0, 1]",
            ),
            (
                name == "constant" and answer is None,
                "warm_start.teacher.args.answer is needed by the expert `constant`",
            ),
        )
        self._name, self._patience, self._noise = name, patience, noise
        self._tool_share, self._working, self._answer = tool_share, working, answer
        self._options: list[_Option] = []
        self._label: _Option | None = None
        self._tried: set[str] = set()
        self._calls: bool | None = None

    def begin(self, row: Mapping[str, Any]) -> None:
        """Start on a prompts row: its `answer`, `candidates` and, for the working, its `family` and `columns`."""
        figure, numbers = str(row.get("family") or "").replace("_", " "), _read_numbers(row)
        self._options = [
            _Option(one["label"], _write_working(figure, one["rule"], numbers)) for one in _candidates(row)
        ]
        answer = row.get("answer")
        known = [option for option in self._options if option.label == answer]
        self._label = None if answer is None else (known or [_Option(str(answer))])[0]

    def respond(self, env: Any, generator: random.Random) -> str | None:
        """The next response; None if there is no answer."""
        if (option := self._choose(generator)) is None:
            return None
        self._tried.add(option.label)
        lead = f"{option.working} " if self._working and option.working else ""
        return f"{lead}{_write_call(option.label) if self._wants_tool(env, generator) else ''}\\boxed{{{option.label}}}"

    def _choose(self, generator: random.Random) -> _Option | None:
        """An answer that was not tried before, if there is one."""
        fresh = [option for option in self._options if option.label not in self._tried] or self._options
        own = _Option(self._answer) if self._answer is not None else self._label
        follows_rule = self._name == "plausible" or (self._noise > 0 and generator.random() < self._noise)
        return generator.choice(fresh) if follows_rule and fresh else own

    def _wants_tool(self, env: Any, generator: random.Random) -> bool:
        """Whether this response calls the tool: never in the last turn, because no response could use the feedback."""
        if not hasattr(env, "tool_calls"):
            return False
        if self._calls is None:
            self._calls = generator.random() < self._tool_share
        patient = self._patience is None or env.tool_calls < self._patience
        return self._calls and patient and env.turn + 1 < env.options.max_turns


# Experts remember their tried answers, so every demonstration gets one of its own.
build_teacher = GeometryExpert


def describe_expert(options: ExpertOptions, rows: Sequence[Mapping[str, Any]]) -> str:
    """The expert of the warm start in words; for rows without candidates it gives their answers."""
    name: str = options.name
    if name == "constant":
        return f"SFT on an expert that always answers {options.args.get('answer')}"
    unsure = sum(1 for row in rows if len(_candidates(row)) > 1)
    if name == "solver" and not options.noise:
        return f"SFT on the answers of all {len(rows)} rows (expert `solver`)"
    share = "" if name == "plausible" else f" in {options.noise:.0%} of its answers"
    if unsure == len(rows):
        return f"SFT on an expert that takes one of each row's candidates at random{share}"
    return (
        f"SFT on the answers of {len(rows) - unsure} of {len(rows)} rows, because these have no candidates; with "
        "enough steps that alone solves them and leaves GRPO nothing to learn. Give rows a column `candidates`, or "
        "lower warm_start.steps"
    )


def _candidates(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    candidates = row.get("candidates")
    return [] if candidates is None else list(candidates)


def _write_call(answer: str) -> str:
    return f"<tool_call>{json.dumps({'name': TOOL_NAMES[0], 'arguments': {'answer': answer}})}</tool_call> "


def _read_numbers(row: Mapping[str, Any]) -> dict[str, int]:
    found = json.loads(row.get("columns") or "{}").get("numbers")
    return found if isinstance(found, dict) else {}


def _write_working(figure: str, rule: str, numbers: Mapping[str, Any]) -> str:
    """`linear pair a=46 180 - a`: the kind of figure, the numbers of the rule, the rule."""
    named = [f"{name}={numbers[name]}" for name in re.findall(r"[A-Za-z_]+", rule) if name in numbers]
    return " ".join([*([figure] if figure else []), *named, rule])
