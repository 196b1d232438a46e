"""Questions of Reasoning Gym: text alone, one response, scored by the data set that asked."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import Field

from geo_sokoban_pipeline.config.data import DataOptions, SplitCounts
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.base import Breakdown, DataStep, Task, Vocabulary, Words
from geo_sokoban_pipeline.envs.metrics import (
    EpisodeRecord,
    FinishedEpisode,
    clusters_of,
    count_solved,
    read_record,
)
from geo_sokoban_pipeline.envs.report import TaskReport

SPLITS = ("train", "validation", "eval")


class ReasoningDataOptions(DataOptions):
    """The section `reasoning` of the parameters."""

    seed: int = Field(0, description="Seed of the questions; independent of the run's seed.")
    datasets: dict[str, dict[str, Any]] = Field(
        {"count_bits": {}}, min_length=1, description="Data sets of Reasoning Gym by name, each with its options."
    )
    counts: SplitCounts = Field(
        SplitCounts(train=300, validation=36, eval=60), description="Different questions of each split, over all sets."
    )


# Data.


def make_prompts(parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Node: the prompts of each split; a question occurs once, in one split."""
    import pandas as pd  # every command imports this file, and few need it

    options = ReasoningDataOptions.model_validate(parameters)
    sizes = {split: getattr(options.counts, split) // len(options.datasets) for split in SPLITS}
    if sum(sizes.values()) * len(options.datasets) != sum(getattr(options.counts, split) for split in SPLITS):
        raise ValueError(f"reasoning.counts: {len(options.datasets)} data sets must divide each number.")
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for name, given in options.datasets.items():
        asked = iter(ask(name, given, options.seed, sum(sizes.values())))
        for split in SPLITS:
            rows[split] += [next(asked) for _ in range(sizes[split])]
    return tuple(pd.DataFrame(rows[split]) for split in SPLITS)


def ask(name: str, given: Mapping[str, Any], seed: int, count: int) -> list[dict[str, Any]]:
    """Rows of so many different questions of a data set, the first ones that it gives."""
    import reasoning_gym

    found: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(name, size=100 * count, seed=seed, **given):
        if entry["question"] not in found:
            found[entry["question"]] = entry
        if len(found) == count:
            choices = sorted({str(entry["answer"]) for entry in found.values()})
            return [make_row(name, number, entry, choices, given) for number, entry in enumerate(found.values())]
    raise ValueError(
        f"reasoning.datasets.{name}: it gives {len(found)} different questions, not {count}; ask for fewer."
    )


def make_row(
    name: str, number: int, entry: Mapping[str, Any], choices: Sequence[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """A prompts row; `images` is empty, and the scorer needs the whole entry.

    Args:
        choices: answers that occur in the data set.
        given: options of the data set, which some scorers read.
    """
    return {
        "id": f"{name}-{number}",
        "prompt": entry["question"],
        "images": [],
        "answer": str(entry["answer"]),
        "dataset": name,
        "entry": json.dumps(entry, sort_keys=True, default=str),
        "choices": list(choices),
        "options": json.dumps(given, sort_keys=True),
    }


def report_data(*tables: Any) -> dict[str, Any]:
    """Node: what the report says of the data."""
    *frames, _ = tables
    splits = zip(SPLITS, frames, strict=True)
    return {"source": "generate", "splits": {split: {"questions": len(frame)} for split, frame in splits}}


# Environment, reward, expert.


@cache
def scorer(name: str, options: str) -> Any:
    """A data set, for its scorer alone."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))


class QuestionEnv:
    """One response, which is the answer."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row, self.score = row, 0.0

    def reset(self) -> tuple[None, dict[str, Any]]:
        return None, {}

    def step(self, text: str) -> tuple[None, bool, dict[str, Any]]:
        asked = scorer(self.row["dataset"], self.row["options"])
        self.score = float(asked.score_answer(text.strip(), json.loads(self.row["entry"])))
        return None, True, {"score": self.score}

    def format_observation(self, observation: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": ""}]}

    def final_metrics(self) -> dict[str, float]:
        return {"success": float(self.score == 1.0), "score": self.score}

    def close(self) -> None: ...


def build_env(sample: Mapping[str, Any], args: Mapping[str, Any]) -> QuestionEnv:
    return QuestionEnv(sample)


def reward(result: Any, args: Mapping[str, Any]) -> float:
    return result.metrics["score"]


class Answerer:
    """`knows` gives the right answer, or with the probability `noise` any that occurs in the data set."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def respond(self, env: QuestionEnv, generator: random.Random) -> str:
        guesses = generator.random() < self.noise
        return generator.choice(list(env.row["choices"])) if guesses else env.row["answer"]


def build_teacher(name: str, patience: int | None, noise: float) -> Answerer:
    return Answerer(noise)


@dataclass(frozen=True)
class QuestionRecord(EpisodeRecord):
    """Beside success and reward: the data set."""

    dataset: str


class ReasoningReport(TaskReport):
    difficulty = "data set"
    rivals = ("guess",)


class ReasoningTask(Task):
    name = "reasoning"
    title = "Reasoning Gym"
    words = Words("question", "questions", "accuracy", "correct", "not correct")
    data_config = ReasoningDataOptions
    data_steps = (
        DataStep("make_prompts", make_prompts, (), ("prompts", "validation_prompts", "eval_prompts")),
        DataStep("report_data", report_data, ("prompts", "validation_prompts", "eval_prompts"), ("data_report",)),
    )
    train_defaults = {
        "policy": {"tiny": {"texts": "reasoning"}},
        "env": {"factory": f"{__file__}:build_env"},
        "reward": {"function": f"{__file__}:reward"},
        "warm_start": {"teacher": {"factory": f"{__file__}:build_teacher", "name": "knows", "noise": 0.7}},
        "grpo": {"advantage": "dr_grpo"},
        "rollout": {"max_turns": 1, "max_tokens_per_turn": 4},
        "evaluation": {"blank_images": False},
    }
    vocabulary = Vocabulary(
        ("user", "assistant"),
        "Calculate . Find the Greatest Common Divisor ( GCD ) of these numbers : , Give only as your final answer "
        "How many 1 bits are there in binary representation number ? 0 1 2 3 4 5 6 7 8 9 + - = 10 12 15 16",
    )
    difficulty = "dataset"
    optimal = "knows"
    plain_response = "1"
    report = ReasoningReport()
    breakdowns = (Breakdown("data set", lambda row: {cell["dataset"]: cell for cell in row.get("by_dataset") or []}),)

    def sample_prompt(self, options: Any) -> dict[str, Any]:
        name, given = next(iter(options.datasets.items()))
        return ask(name, given, options.seed, 1)[0]

    def baselines(self, options: TrainOptions, training: Any) -> Mapping[str, ExpertOptions]:
        return {"guess": options.warm_start.teacher.model_copy(update={"noise": 1.0})}

    def record(self, episode: FinishedEpisode) -> QuestionRecord:
        return QuestionRecord(**read_record(episode), dataset=episode.row["dataset"])

    def summarise(self, records: Sequence[QuestionRecord]) -> dict[str, Any]:
        groups = {name: [one for one in records if one.dataset == name] for name in {one.dataset for one in records}}
        return {
            "by_dataset": [
                {"dataset": name, **count_solved([one.success for one in group], clusters_of(group))}
                for name, group in sorted(groups.items())
            ]
        }


TASK = ReasoningTask()
