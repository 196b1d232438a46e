"""The protocols `Task` and `InteractionEnv`: how the rest of the project sees a task and an environment.

A task is one object that holds all differences between tasks: no file outside `envs/<task>/` depends on which task it
is. An environment is plain Python: it takes and returns text and images, never tokens, so the rollout alone decides how
a conversation becomes a sequence of ids.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from geo_sokoban_pipeline.config.base import Setting, with_defaults
from geo_sokoban_pipeline.config.data import DataOptions
from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.envs.inspection import Check, DataSample
from geo_sokoban_pipeline.envs.metrics import EpisodeRecord, FinishedEpisode, Rows, read_record
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.report import TaskReport
from geo_sokoban_pipeline.envs.rows import HubReader
from geo_sokoban_pipeline.seeding import content_hash

if TYPE_CHECKING:
    from geo_sokoban_pipeline.envs.images import ImagePart
    from geo_sokoban_pipeline.trajectories.index import StoredEpisode

Observation = Mapping[str, Any]
Info = dict[str, Any]
Row = Mapping[str, Any]


@runtime_checkable
class InteractionEnv(Protocol):
    """One episode of one task instance.

    Optional beyond these: `final_metrics() -> dict[str, float]` (success, steps, optimal_steps, …), `turn_rewards`
    (one per step), `final_bonus`, and in the info of `step` a `turn_reward`. Also `prepare(text)`: start slow work
    of `step(text)` in the background, and return its futures, or None. The rollout calls it for all responses of a
    batch before the first `step`. And `finalize(responses, status)`: called once when the episode is over, before
    `final_metrics`, with all responses, truncated ones included.

    An environment that draws random numbers takes a seed: `reset(seed=…)` begins all draws of the episode, and
    `reseed(seed)` begins those from the next step on anew. The rollout gives `reset` the seed of the episode, which is
    stored with it, so that a replay draws the same; forks give `reseed` another one. The first observation is in the
    prompt already, so it follows from the row alone.
    """

    def reset(self) -> tuple[Observation | None, Info]:
        """Start the episode; returns the first observation and info."""

    def step(self, text: str) -> tuple[Observation | None, bool, Info]:
        """Carry out a response of the policy: next observation, whether the episode is over, info."""

    def format_observation(self, observation: Observation | None) -> dict[str, Any]:
        """The observation as a user message: `{"role": "user", "content": [images…, one text]}`."""

    def close(self) -> None:
        """Release resources; calling it twice is harmless."""


def takes_seed(env: Any) -> bool:
    """Whether an environment's `reset` has an argument `seed`."""
    return "seed" in inspect.signature(env.reset).parameters


def reset(env: Any, seed: int) -> Any:
    """Start an episode, with its seed where the environment takes one."""
    return env.reset(seed=seed) if takes_seed(env) else env.reset()


def user_message(observation: Observation | None) -> dict[str, Any]:
    """Chat message of an observation.

    Args:
        observation: `obs_str` is the text, `multi_modal_data` maps names to lists of images. None or an empty one
            gives an empty text. A role inside the observation is ignored.

    Returns:
        `{"role": "user", "content": [{"type": "image", "image": …}, …, {"type": "text", "text": …}]}`: the images
        of every list in order, then exactly one text.
    """
    observation = observation or {}
    content: list[dict[str, Any]] = [
        {"type": "image", "image": image}
        for images in (observation.get("multi_modal_data") or {}).values()
        for image in images
    ]
    return {"role": "user", "content": [*content, {"type": "text", "text": observation.get("obs_str", "")}]}


# The task.


@dataclass(frozen=True)
class Words:
    """Words for readers.

    Attributes:
        unit, units: one instance of the task, and several.
        rate: share of them that a policy gets right.
        solved, unsolved: state of an episode.
    """

    unit: str
    units: str
    rate: str
    solved: str
    unsolved: str


@dataclass(frozen=True)
class Column:
    """A column of this task in the tables of an evaluation.

    Attributes:
        heading: its name.
        value: of a row of the summary; None if the row has none.
        form: format of the value.
        digits: after the point of a number.
        table: `scores`: beside the solve rates; `responses`: a second table, about the responses.
        several: shown only if an episode may have several responses.
        note: explanation of the heading; a function of the summary if it depends on the evaluation.
    """

    heading: str
    value: Callable[[Row], float | None]
    form: Literal["percent", "number"] = "percent"
    digits: int = 2
    table: Literal["scores", "responses"] = "scores"
    several: bool = False
    note: str | Callable[[Row], str] = ""


@dataclass(frozen=True)
class Breakdown:
    """A table of solve rates by the kind of prompt.

    Attributes:
        heading: of its first column.
        cells: of a row of the summary: `episodes`, `solved`, … by label, in the order of the table.
    """

    heading: str
    cells: Callable[[Row], Mapping[Any, Row]]


@dataclass(frozen=True)
class Vocabulary:
    """Words of a tiny policy's tokenizer; they are fixed, so that token ids never change unnoticed.

    Attributes:
        frequent: words of every turn, one token each.
        corpus: further text.
        markup: further tokens, for text that every response repeats.
    """

    frequent: tuple[str, ...] = ()
    corpus: str = ""
    markup: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataStep:
    """A node of the pipeline `data_<task>`.

    Attributes:
        name: of the node.
        function: takes the inputs, then the parameters of the section `<task>`.
        inputs, outputs: names of tables, catalog entries `<task>.<name>`. The steps together make
            `prompts`, `validation_prompts`, `eval_prompts` and `data_report`.
        asks: further keyword arguments from the pipeline: `hub` (a `HubReader`) and `track` (a progress bar,
            see `console.track`).
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    asks: tuple[Literal["hub", "track"], ...] = ()


class Task(Protocol):
    """One task; its data lie under its name, its pipelines and runs under `<kind>_<name>`.

    Subclasses inherit the defaults; every task defines the attributes without a value.

    Attributes:
        name: in namespaces, parameters, and the column `task` of trajectories.
        title: name for readers.
        words: further words for readers.
        data_config: model of the section `<name>` of the parameters.
        data_steps: nodes of the pipeline `data_<name>`, in their order.
        schemas: module of the Arrow schemas of its tables by the names in the catalog, such as `PROMPTS`; empty: their
            columns are not pinned.
        train_defaults: defaults of the section `train_<name>`, nested as `TrainOptions`; they name at least
            `env.factory`, `reward.function`, `warm_start.teacher.factory` and `.name`.
        vocabulary: of a tiny policy's tokenizer.
        difficulty: column of the prompts for sampling them and for breakdowns; null is a difficulty too.
        ordered: whether difficulties are numbers, larger ones being harder; else they are names.
        optimal: name of the task's best expert, which the SFT control `optimal` imitates; None: there is none.
        plain_response: a response for trying an environment without an expert.
        key: column with the content hash of a prompt; equal prompts have equal hashes.
        apart: column whose values no two splits share, and its meaning. Prompts with equal values are no independent
            evidence: every interval and test is over them (`cluster_of`).
        credited: what `turn_values` makes a reward of, in words.
        watched: episode metrics whose mean a rollout reports, as (metric, name).
        columns: further columns of the evaluation's tables.
        breakdowns: tables of the evaluation by the kind of prompt.
        report: words and tables of reports and studies.
        studies: names and descriptions of the studies `study_<study>` of the pipeline `study_<name>`; the first one is
            its default.
        comparisons: further ones, which compare recipes; their page is `docs/estimators.md`.
        further_studies: names of other tasks' studies in the same pipeline.
    """

    name: str
    title: str
    words: Words
    data_config: type[DataOptions]
    data_steps: Sequence[DataStep]
    schemas: str = ""
    train_defaults: Mapping[str, Any]
    vocabulary: Vocabulary
    difficulty: str
    ordered: bool = False
    optimal: str | None = None
    plain_response: str
    key: str = "id"
    apart: tuple[str, str] = ("id", "prompts")
    credited: str = "turn rewards and final bonus"
    watched: Sequence[tuple[str, str]] = ()
    columns: Sequence[Column] = ()
    breakdowns: Sequence[Breakdown] = ()
    report: TaskReport = TaskReport()
    studies: Mapping[str, str] = MappingProxyType({})
    comparisons: Mapping[str, str] = MappingProxyType({})
    further_studies: Sequence[str] = ()

    @property
    def run(self) -> str:
        """Namespace of its training runs."""
        return f"train_{self.name}"

    @cached_property
    def train_config(self) -> type[TrainOptions]:
        """Model of the section `train_<name>`: `TrainOptions` with the task's defaults."""
        model = with_defaults(TrainOptions, {"task": Setting(self.name, choices=(self.name,)), **self.train_defaults})
        model.check_task = staticmethod(self.check_options)  # type: ignore[method-assign]
        return model

    # Before a run.

    def check_options(self, options: TrainOptions) -> None:
        """Check that the options fit each other.

        Raises:
            ValueError: they do not; the message names fields and values.
        """
        return None

    def check_data_fits(self, data: Any, options: TrainOptions) -> None:
        """Check that the options fit those of the data.

        Raises:
            ValueError: they do not; the message names fields and values.
        """
        return None

    def check_limits(self, options: TrainOptions, longest: int, shortest: int = 0) -> list[Check]:
        """Findings about prompts that need more actions than an episode has.

        Args:
            longest, shortest: fewest actions that solve the hardest prompt, and the easiest.
        """
        return []

    def inspect_data(self, options: Any, rows: int, hub: HubReader | None, stored: Path) -> DataSample:
        """Look at the data before a run.

        Args:
            options: of the data.
            rows: largest number of rows to make or read.
            hub: reader of rows of the hub.
            stored: folder of the prompts tables in 05_model_input.
        """
        row = self.sample_prompt(options)
        return DataSample(rows=[] if row is None else [row])

    def sample_prompt(self, options: Any) -> dict[str, Any] | None:
        """A prompt to try code on, made or read quickly and without the hub; None if there is none."""
        return None

    def trial_environments(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        """Factories of the task whose arguments are checked before a run, each with a prompt to try it on."""
        return ()

    def trial_rewards(self) -> Sequence[tuple[Any, Any]]:
        """Rewards of the task, likewise, each with a finished episode."""
        return ()

    # Episodes.

    def key_of(self, row: Row) -> str:
        """Key of a prompt across runs: its content hash, else the id of its row."""
        return str(row.get(self.key) or row["id"])

    def cluster_of(self, row: Row) -> str:
        """Cluster of a prompt, whose prompts are one piece of evidence: the column `apart`, else the content.

        The content is text and images; without images, whose text alone may say little, all columns but the id.
        """
        if self.apart[0] != "id" and row.get(self.apart[0]):
            return str(row[self.apart[0]])
        if (images := row.get("images")) is not None and len(images):
            return content_hash(str(row.get("prompt")), *map(str, images))
        own = {name: value for name, value in row.items() if name != "id"}
        return content_hash(
            json.dumps(own, sort_keys=True, default=lambda value: getattr(value, "tolist", value.__str__)())
        )

    def label_of(self, row: Row) -> str | None:
        """Ground truth of a prompts row, as trajectories keep it; None: there is none."""
        return None if row.get("answer") is None else str(row["answer"])

    def difficulty_of(self, row: Row) -> Any:
        """Difficulty of a prompts row; None if it is not known."""
        return row.get(self.difficulty)

    def baselines(self, options: TrainOptions, training: Rows) -> Mapping[str, ExpertOptions]:
        """Agents without a policy, by the name of their row; the expert of the warm start may be one of them.

        Args:
            training: training prompts, for agents such as the most frequent answer.
        """
        return {}

    def turn_values(
        self, rewards: Sequence[float], infos: Sequence[Info], parts: Mapping[str, float], args: Mapping[str, Any]
    ) -> Sequence[float]:
        """Worth of each turn of an episode, for advantages of turns; together they must be its reward.

        Args:
            rewards: of the turns, from the environment; a response that was cut off has none and no worth.
            infos: of the same turns.
            parts: of the episode's reward.
            args: of the reward.
        """
        if values := list(rewards):
            values[-1] += parts.get("final_bonus", 0.0)
        return values

    def steps_to_goal(self, env: Any) -> int | None:
        """Fewest further actions with which the present state of an environment reaches the goal.

        Returns:
            −1 where none do; None where it is not known.
        """
        return None

    # Index of stored episodes.

    def answer(self, episode: StoredEpisode) -> str | None:
        """The answer of an episode, equal for equal answers; None: there is none."""
        return next((said.action for said in reversed(episode.responses) if said.action), None)

    def tags(self, episode: StoredEpisode) -> dict[str, int]:
        """Faults of an episode, solved or not: how often or how much, 1 or more, by tag.

        The tags of `trajectories.index` come on top. A change of the rules needs a new `INDEX_VERSION`.
        """
        return {}

    def image_parts(self, png: bytes) -> Sequence[ImagePart]:
        """Parts of an episode's image that an occlusion map covers one at a time; together they are the image."""
        from geo_sokoban_pipeline.envs.images import grid_parts  # Pillow, which the registry must not load

        return grid_parts(png)

    # Evaluation.

    def evaluated_in(self, factory: str) -> Task:
        """The task as episodes of an environment are evaluated: one of the user's own knows none of the task's rules.

        Args:
            factory: of the environment.
        """
        return self

    def describe_prompts(self, prompts: Rows, options: TrainOptions) -> dict[str, Any]:
        """Entries of the summary about the evaluation prompts."""
        return {}

    def record(self, episode: FinishedEpisode) -> EpisodeRecord:
        """Record of an episode for the summary."""
        return EpisodeRecord(**read_record(episode))

    def summarise(self, records: Sequence[Any]) -> dict[str, Any]:
        """Further entries of the summary's row about some records, beside `summarise_records`."""
        return {}

    def validation_numbers(self, row: Row) -> dict[str, float | None]:
        """Numbers of a row that a validation reports; None for unmeasured ones."""
        return {name: row[name] for name in ("solve_rate", "low", "high", "mean_return", "invalid_share")}


# Experts and baselines by their options: agents without a policy.


def make_expert(options: ExpertOptions, row: Mapping[str, Any]) -> Any:
    """The agent of one episode; agents keep state, so every episode gets its own."""
    build = load_object(options.factory, default_name="build_teacher")
    expert = build(options.name, options.patience, options.noise, **options.args)
    if hasattr(expert, "begin"):
        expert.begin(row)
    return expert


PATIENT = ", never gives up"  # suffix of the name of an expert without `patience`


def expert_label(expert: ExpertOptions, own: str) -> str:
    """Name of the expert's row in the summary, with its noise.

    Args:
        own: factory of the task's own experts.
    """
    name = expert.name if expert.factory == own else _own_expert(expert)
    return f"teacher ({name}, noise {expert.noise:g})" if expert.noise else f"teacher ({name})"


def _own_expert(expert: ExpertOptions) -> str:
    """Name of an expert of another factory than the task's, whose default name says nothing about it."""
    is_default = expert.name == type(expert).model_fields["name"].get_default()
    return expert.factory if is_default else f"{expert.name} of {expert.factory}"


def describe_expert(options: ExpertOptions, rows: Sequence[Mapping[str, Any]]) -> str:
    """The expert of the warm start in words: by `describe_expert` of the factory's module, else by its name."""
    build = load_object(options.factory, default_name="build_teacher")
    describe = getattr(sys.modules.get(getattr(build, "__module__", "")), "describe_expert", None)
    if describe is None or describe is describe_expert:
        return f"SFT on the expert {_own_expert(options)}"
    return str(describe(options, rows))
