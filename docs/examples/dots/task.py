"""Counting dots: a whole task in one file. An image shows a few dots, and the answer is how many there are."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from geo_sokoban_pipeline.config.base import Setting
from geo_sokoban_pipeline.config.data import DataOptions, SplitCounts
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.base import Breakdown, Column, DataStep, Task, Vocabulary, Words
from geo_sokoban_pipeline.envs.metrics import (
    EpisodeRecord,
    FinishedEpisode,
    clusters_of,
    count_solved,
    mean_of,
    read_record,
)
from geo_sokoban_pipeline.envs.report import TaskReport

SPLITS = ("train", "validation", "eval")
_SIDE, _CELL = 3, 32  # of the grid, in cells; of a cell, in pixels


# Data: the options, the rows, and the nodes that make them.


class DotsDataOptions(DataOptions):
    """The section `dots` of the parameters."""

    seed: int = Field(0, description="Seed of the images; independent of the run's seed.")
    most: int = Field(4, ge=1, le=_SIDE**2, description="Most dots of an image.")
    counts: SplitCounts = Field(SplitCounts(train=512, validation=64, eval=64), description="Images of each split.")

    @property
    def label(self) -> str:
        return f"{self.most}dots"


def make_row(split: str, number: int, options: DotsDataOptions) -> dict[str, Any]:
    """A prompts row. Every task's rows have `id`, `prompt` and `images`; further columns are its own."""
    generator = random.Random(f"{options.seed}/{split}/{number}")
    cells = generator.sample(range(_SIDE**2), generator.randint(1, options.most))
    return {
        "id": f"{split}-{number}",
        "prompt": "<image>How many?",
        "images": [draw(cells)],
        "answer": str(len(cells)),
        "dots": len(cells),
    }


def draw(cells: Sequence[int]) -> str:
    """A white image with a black disc in each of the cells, as a data URI."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_SIDE * _CELL, _SIDE * _CELL), "white")
    for cell in cells:
        left, top = cell % _SIDE * _CELL, cell // _SIDE * _CELL
        ImageDraw.Draw(image).ellipse((left + 4, top + 4, left + _CELL - 5, top + _CELL - 5), fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def make_prompts(parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Node: the prompts of each split."""
    import pandas as pd  # every command imports this file, and few need it

    options = DotsDataOptions.model_validate(parameters)
    sizes = options.counts.model_dump()
    return tuple(pd.DataFrame([make_row(split, n, options) for n in range(sizes[split])]) for split in SPLITS)


def report_data(*tables: Any) -> dict[str, Any]:
    """Node: what the report says of the data."""
    *frames, _ = tables
    return {"source": "generate", "splits": {s: {"rows": len(f)} for s, f in zip(SPLITS, frames, strict=True)}}


# Environment, reward, expert: named by `train_defaults` below.


class DotsEnv:
    """One response: the number of dots in an answer block."""

    def __init__(self, answer: str) -> None:
        self.answer, self.guess = answer, ""

    def reset(self) -> tuple[None, dict[str, Any]]:
        return None, {}

    def step(self, text: str) -> tuple[None, bool, dict[str, Any]]:
        self.guess = text.partition("<answer>")[2].partition("</answer>")[0]
        return None, True, {"guess": self.guess}

    def format_observation(self, observation: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": ""}]}

    def final_metrics(self) -> dict[str, float]:
        off = abs(int(self.guess) - int(self.answer)) if self.guess.isdigit() else 9
        return {"success": float(self.guess == self.answer), "off": float(off)}

    def close(self) -> None: ...


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any]) -> DotsEnv:
    return DotsEnv(sample["answer"])


def reward(result: Any, args: Mapping[str, Any]) -> dict[str, float]:
    return {"reward": result.metrics["success"]}


class Counter:
    """The expert `counts` knows the answer, `guesses` does not, and `ones` always says 1."""

    def __init__(self, name: str, noise: float, most: int = 4) -> None:
        self.name, self.noise, self.most = name, noise, most

    def respond(self, env: DotsEnv, generator: random.Random) -> str:
        guesses = self.name == "guesses" or generator.random() < self.noise
        answer = str(generator.randint(1, self.most)) if guesses else env.answer
        return f"<answer>{'1' if self.name == 'ones' else answer}</answer>"


def build_teacher(name: str, patience: int | None, noise: float, **args: Any) -> Counter:
    return Counter(name, noise, **args)


# Evaluation: what is kept of an episode beyond success and reward.


@dataclass(frozen=True)
class DotsRecord(EpisodeRecord):
    """Beside success and reward: how far the answer is off, and the number of dots."""

    off: float | None
    dots: int


class DotsReport(TaskReport):
    difficulty = "dots"
    rivals = ("random number",)


class DotsTask(Task):
    name = "dots"
    title = "counting dots"
    words = Words("image", "images", "accuracy", "correct", "not correct")
    data_config = DotsDataOptions
    data_steps = (
        DataStep("make_prompts", make_prompts, (), ("prompts", "validation_prompts", "eval_prompts")),
        DataStep("report_data", report_data, ("prompts", "validation_prompts", "eval_prompts"), ("data_report",)),
    )
    train_defaults = {
        "policy": {"tiny": {"texts": "dots"}},
        "env": {"factory": f"{__file__}:build_env"},
        "reward": {"function": f"{__file__}:reward"},
        "warm_start": {
            "teacher": {
                "factory": f"{__file__}:build_teacher",
                "name": Setting("counts", "Who answers.", ("counts", "guesses", "ones")),
                "noise": 0.5,
            }
        },
        "grpo": {"advantage": "dr_grpo"},
        "rollout": {"max_turns": 1, "max_tokens_per_turn": 4},
    }
    vocabulary = Vocabulary(
        ("user", "assistant", "How", " many", "?"), "0 1 2 3 4 5 6 7 8 9", ("<answer>", "</answer>")
    )
    difficulty = "dots"
    ordered = True
    optimal = "counts"
    plain_response = "<answer>1</answer>"
    columns = (Column("off by", lambda row: row.get("off"), "number", note="mean distance from the right number"),)
    report = DotsReport()
    breakdowns = (Breakdown("dots", lambda row: {cell["dots"]: cell for cell in row.get("by_dots") or []}),)

    def baselines(self, options: TrainOptions, training: Any) -> Mapping[str, ExpertOptions]:
        names = {"random number": "guesses", "always one": "ones"}
        expert = options.warm_start.teacher
        return {row: expert.model_copy(update={"name": name, "noise": 0.0}) for row, name in names.items()}

    def record(self, episode: FinishedEpisode) -> DotsRecord:
        return DotsRecord(**read_record(episode), off=episode.metrics.get("off"), dots=int(episode.row["dots"]))

    def summarise(self, records: Sequence[DotsRecord]) -> dict[str, Any]:
        """Entries of a row of the summary, which the columns and breakdowns above read."""
        groups = {dots: [one for one in records if one.dots == dots] for dots in {one.dots for one in records}}
        return {
            "off": mean_of([record.off for record in records if record.off is not None]),
            "by_dots": [
                {"dots": dots, **count_solved([one.success for one in group], clusters_of(group))}
                for dots, group in sorted(groups.items())
            ],
        }


TASK = DotsTask()
