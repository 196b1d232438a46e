"""Geometry as two tasks: a diagram with a question, answered at once (`geo3k`) or with a scoring tool
(`geo3k_multi_turn`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from geo_sokoban_pipeline.config.base import Setting
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.base import Breakdown, Column, DataStep, Row, Task, Vocabulary, Words, expert_label
from geo_sokoban_pipeline.envs.geo3k import data_steps
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions, Geo3kMultiTurnDataOptions
from geo_sokoban_pipeline.envs.geo3k.evaluation import (
    last_answer,
    record_answer,
    summarise_answers,
    tag_answer,
)
from geo_sokoban_pipeline.envs.geo3k.report import GeometryReport, has_tool
from geo_sokoban_pipeline.envs.inspection import DataSample
from geo_sokoban_pipeline.envs.metrics import Rows
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.rows import HubReader

ANSWER_ENV = "geo_sokoban_pipeline.envs.geo3k.answer_env.build_env"
TOOL_ENV = "geo_sokoban_pipeline.envs.geo3k.env.build_env"
EXPERT = "geo_sokoban_pipeline.envs.geo3k.expert.build_teacher"
REWARDS = "geo_sokoban_pipeline.rewards.geo3k"
MOST_FREQUENT = "most_frequent"
_TURNS = 3  # of episodes with the scoring tool
_ROWS = 8  # drawn or read to find one prompt
_PROBLEM = {"id": "tried", "answer": "1"}
_ANSWERED = SimpleNamespace(prompt=_PROBLEM, responses=["\\boxed{1}"], response="\\boxed{1}")
_TAGS = ("<answer>", "</answer>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_FIGURES = ("vertical angles", "linear pair", "complementary angles", "inscribed angle", "intercepted arc")

_DEFAULTS: Mapping[str, Any] = {
    "policy": {"tiny": {"texts": "geo3k"}},
    "warm_start": {
        "teacher": {
            "factory": EXPERT,
            "name": Setting(
                "plausible",
                "plausible: one of the rules that the figure might call for, at random, so it is right about once in "
                "as many as there are. solver: the label. constant: always `args.answer`.",
                ("plausible", "solver", "constant"),
            ),
            "patience": Setting(
                None, "Wrong answers after which it ends with its next one, without the tool. None: never."
            ),
            "noise": Setting(0.0, "Share of answers that follow a rule at random."),
            "args": Setting(
                {},
                "Further arguments of the factory. Of the own expert: tool_share (of the episodes in which it calls "
                "the tool, 1), working (write figure, numbers and rule before the answer, false), answer (that of "
                "`constant`).",
            ),
        }
    },
    "reward": {
        "function": Setting(
            f"{REWARDS}.math_reward",
            "`reward(result, args) -> dict` with a key `reward`: a dotted path, `file.py` or `file.py:name`. "
            "`tolerance_reward` and `format_reward` lie beside the default.",
        )
    },
    "grpo": {"advantage": "dr_grpo"},
    "evaluation": {"shuffled_images": True},
}


def _part(section: str, name: str) -> Callable[[Row], float | None]:
    return lambda row: (row.get(section) or {}).get(name)


def _by(column: str) -> Callable[[Row], Mapping[Any, Row]]:
    return lambda row: {cell["label"]: cell for cell in (row.get("breakdowns") or {}).get(column) or []}


def _note_invalid(summary: Row) -> str:
    """Note on invalid responses; an environment of one's own says itself which those are."""
    return (
        "share of the responses with neither an answer nor a call that could be scored"
        if any("tools" in row for row in summary.get("rows") or [])
        else "share of the responses that the environment calls invalid"
    )


def _note_first_attempt(summary: Row) -> str:
    """Note on first attempts; an environment of one's own may have turns without a tool."""
    return f"correct {'before any feedback of the scoring tool' if has_tool(summary) else 'with the first response'}"


class GeometryTask(Task):
    """Common parts of both tasks; see `Task`."""

    schemas = "geo_sokoban_pipeline.envs.geo3k.data"
    words = Words("problem", "problems", "accuracy", "correct", "not correct")
    vocabulary = Vocabulary(
        frequent=("user", "assistant", "system", "Find", " $", "$.", "boxed", "answer", " answer", "wrong", " wrong")
        + ("correct", " try", " again", " last", " chance", " no", " tool", "name", " name", "calc", "_score")
        + ("arguments", '":', ' "', '",', ' {"'),
        corpus="""
Find $x$. Find $y$. Find x. Find the measure of the angle. Find the length of the side. Find the area of the figure.
Find the perimeter. Find the value of the variable. Round to the nearest tenth if necessary, to the nearest degree.
Think step by step, then write the answer inside \\boxed{}. Answer: \\boxed{$Answer}
<tool_call>{"name": "calc_score", "arguments": {"answer": }}</tool_call> \\boxed{}
wrong, try again wrong, last chance correct no answer, try again no tool, try again no tool_call
\\frac { 1 } { 2 } \\sqrt { 3 } 5 \\sqrt { 2 } 6 \\pi \\angle \\triangle \\overline { A B } A B C D E F G M N P Q R S T
a = 46 180 - a 90 - a a / 2 2 a + b c x = 134 degrees parallel lines triangle circle square rectangle trapezoid
""",
        markup=(*_TAGS, *_FIGURES, "\\boxed{", '{"name": "calc_score", "arguments": {"answer": "', '"}}'),
    )
    difficulty = "family"
    optimal = "solver"  # the label
    plain_response = "\\boxed{60}"
    key = "problem_hash"
    apart = ("problem_hash", "problems")
    columns = (
        Column("first attempt", _part("first_attempt", "solve_rate"), several=True, note=_note_first_attempt),
        Column(
            "plausible",
            lambda row: row.get("plausible_share"),
            note="the answer is one of the problem's candidates, those of rules that fit its figure, so the figure was "
            "read correctly",
        ),
        Column(
            "invalid responses",
            lambda row: row.get("invalid_share"),
            table="responses",
            note=_note_invalid,
        ),
        Column(
            "tool calls", _part("tools", "calls"), "number", table="responses", several=True, note="mean per episode"
        ),
        Column(
            "valid calls",
            _part("tools", "valid_share"),
            table="responses",
            several=True,
            note="share of the calls whose answer was scored",
        ),
        Column("tokens", _part("responses", "tokens_mean"), "number", 1, table="responses", note="mean per episode"),
        Column("truncated", _part("responses", "truncated_share"), table="responses"),
        Column("repetition", _part("responses", "repetition_share"), table="responses"),
    )
    breakdowns = (
        Breakdown("family", _by("family")),
        Breakdown("form of the answer", _by("answer_form")),
        Breakdown("difficulty", _by("difficulty")),
    )
    report = GeometryReport()
    watched: Sequence[tuple[str, str]] = (("has_answer", "answered"), ("grading_timeout", "grading_timeouts"))

    def __init__(self, name: str) -> None:
        self.name = name
        self.data_steps = (
            DataStep(
                "read_problems",
                partial(data_steps.read_problems, section=name),
                (),
                ("raw_problems",),
                asks=("hub",),
            ),
            DataStep(
                "check_problems",
                partial(data_steps.check_problems, section=name),
                ("raw_problems",),
                ("problem_index", "rejected"),
            ),
            DataStep(
                "make_prompts",
                partial(data_steps.make_prompts, section=name),
                ("raw_problems", "problem_index"),
                ("prompts", "validation_prompts", "eval_prompts"),
            ),
            DataStep(
                "report_data",
                partial(data_steps.report_data, section=name),
                ("problem_index", "rejected"),
                ("data_report",),
            ),
        )

    def inspect_data(self, options: Any, rows: int, hub: HubReader | None, stored: Path) -> DataSample:
        """Draw or read the first problems, and compare the stored prompts with the options."""
        from geo_sokoban_pipeline.envs.geo3k.inspection import inspect_problems

        return inspect_problems(options, self.name, rows, hub, stored)

    def sample_prompt(self, options: Any) -> dict[str, Any] | None:
        """The first problem that is drawn, or read from a file."""
        from geo_sokoban_pipeline.envs.geo3k.inspection import sample_problems

        if options.source == "hub":
            return None
        return next(iter(sample_problems(options, self.name, _ROWS, None)[1]), None)

    def trial_environments(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        """Both environments on a problem that is only an answer."""
        return [(load_object(factory), _PROBLEM) for factory in (ANSWER_ENV, TOOL_ENV)]

    def trial_rewards(self) -> Sequence[tuple[Any, Any]]:
        """All rewards of answers on a correct one."""
        names = ("math_reward", "tolerance_reward", "format_reward")
        return [(load_object(f"{REWARDS}.{name}"), _ANSWERED) for name in names]

    def baselines(self, options: TrainOptions, training: Rows) -> Mapping[str, ExpertOptions]:
        """The label, the most frequent label of training, and the expert."""
        expert = options.warm_start.teacher
        label = ExpertOptions(factory=EXPERT, name="solver")
        agents: dict[str, ExpertOptions] = {"label": label}
        if answers := Counter(str(row["answer"]) for row in training):
            # Of equally frequent ones the first in the alphabet: the order of the rows must not decide.
            args = {"answer": min(answers, key=lambda answer: (-answers[answer], answer)), "tool_share": 0.0}
            agents[MOST_FREQUENT] = ExpertOptions(factory=EXPERT, name="constant", args=args)
        if options.warm_start.steps and expert.model_dump() != label.model_dump():
            agents[expert_label(expert, EXPERT)] = expert
        return agents

    answer = staticmethod(last_answer)

    tags = staticmethod(tag_answer)

    def evaluated_in(self, factory: str) -> Task:
        """In an environment of one's own, answers are evaluated without figures, candidates and tool."""
        return self if factory.startswith(f"{__package__}.") else OwnAnswers(self.name)

    def describe_prompts(self, prompts: Rows, options: TrainOptions) -> dict[str, Any]:
        """The evaluation prompts: `families` and distinct `answers` among the problems, and `turn_limit`."""
        return {
            "families": len({row.get("family") for row in prompts} - {None}),
            "answers": len({row.get("answer") for row in prompts}),
            "turn_limit": options.rollout.max_turns,
        }

    record = staticmethod(record_answer)
    summarise = staticmethod(summarise_answers)

    def validation_numbers(self, row: Row) -> dict[str, float | None]:
        """Those of all tasks, first attempts, tool calls and responses."""
        responses = row["responses"] or {}
        return {
            **super().validation_numbers(row),
            "first_attempt_rate": (row["first_attempt"] or {}).get("solve_rate"),
            "answered_share": row.get("answered_share"),
            "plausible_share": row.get("plausible_share"),
            "called_share": (row.get("tools") or {}).get("called_share"),
            "response_tokens": responses.get("tokens_mean"),
            "truncated_share": responses.get("truncated_share"),
        }


class AnswerTask(GeometryTask):
    """One response to a problem."""

    title = "geometry"
    data_config = Geo3kDataOptions
    train_defaults = {
        **_DEFAULTS,
        "env": {"factory": ANSWER_ENV},
        "rollout": {"max_turns": 1, "max_tokens_per_turn": 24},
    }
    studies = {"geo3k": "The recipe of `make run-geo3k`."}
    comparisons = {"losses": "Losses on geometry with one response, at equal cost."}
    further_studies = ("geo3k_multi_turn",)


class OwnAnswers(AnswerTask):
    """Evaluation in an environment of one's own: only that environment knows the meaning of the prompts."""

    def baselines(self, options: TrainOptions, training: Rows) -> Mapping[str, ExpertOptions]:
        """The expert; the one of geometry takes one of a row's candidates, and knows how to write the label."""
        agents = super().baselines(options, training)
        left_out = {MOST_FREQUENT} if options.warm_start.teacher.factory == EXPERT else {MOST_FREQUENT, "label"}
        return {name.replace("plausible", "candidates"): agents[name] for name in agents if name not in left_out}

    def describe_prompts(self, prompts: Rows, options: TrainOptions) -> dict[str, Any]:
        """Distinct `answers`, and `turn_limit`."""
        found = super().describe_prompts(prompts, options)
        return {name: found[name] for name in ("answers", "turn_limit")}

    def summarise(self, records: Sequence[Any]) -> dict[str, Any]:
        """First attempts and responses."""
        found = super().summarise(records)
        return {name: found[name] for name in ("first_attempt", "responses")}


class ToolTask(GeometryTask):
    """Few responses to a problem, with a tool that scores answers."""

    title = "geometry with the scoring tool"
    data_config = Geo3kMultiTurnDataOptions
    train_defaults = {
        **_DEFAULTS,
        "env": {
            "factory": TOOL_ENV,
            "args": Setting(
                {"max_turns": _TURNS},
                "Passed to the factory, which checks them. The own one needs max_turns, as many as the rollout's.",
            ),
        },
        "rollout": {
            "max_turns": Setting(_TURNS, "Responses of an episode at most, as env.args.max_turns."),
            "max_tokens_per_turn": 32,
        },
    }
    studies = {"geo3k_multi_turn": "The recipe of `make run-geo3k-multi-turn`."}
    watched = (
        *GeometryTask.watched,
        ("first_attempt_correct", "first_attempt_rate"),
        ("tool_calls", "tool_calls/mean"),
        ("valid_tool_calls", "valid_tool_calls/mean"),
    )

    def check_options(self, options: TrainOptions) -> None:
        """The environment announces the last turn, so its number of turns must be that of the rollout."""
        turns = options.env.args.get("max_turns", options.rollout.max_turns)
        if turns != options.rollout.max_turns:
            raise ValueError(
                f"env.args.max_turns={turns}: differs from rollout.max_turns={options.rollout.max_turns}, and feedback "
                "would announce the last chance at the wrong turn. Give both the same value."
            )


GEO3K = AnswerTask("geo3k")
GEO3K_MULTI_TURN = ToolTask("geo3k_multi_turn")
