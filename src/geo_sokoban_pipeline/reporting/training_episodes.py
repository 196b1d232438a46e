"""Choice of the stored episodes that a report shows, and numbers over all training episodes.

Choices read a few columns of all episodes, and then load the chosen ones. The numbers count all training episodes,
dropped ones included, from the columns without tokens. The page states the rule of the choice: the same files always
give the same episodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.evaluation.metrics import group_successes
from geo_sokoban_pipeline.formats import is_number
from geo_sokoban_pipeline.reporting.episodes import describe_end, is_solved
from geo_sokoban_pipeline.runs.storage import iteration_of
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.arrow import Named, one_array
from geo_sokoban_pipeline.trajectories.index import spread
from geo_sokoban_pipeline.trajectories.schema import read_context
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories

Parts = Mapping[str, Callable[..., pa.Table]]
Rows = list[dict[str, Any]]
_COLUMNS = ["iteration", "group_index", "reward", "success", "difficulty", "n_turns", "metrics", "reward_parts"]
_PLAYED = ("task_id", "group_index", "sample_index", "sampling", "difficulty", "success")
PROMPTS, VALIDATIONS = 6, 6
_LETTERS = 40  # of an answer in the table
GALLERY = 12
EXTREMES = 3


def thin(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many items: the first, the last, and some between."""
    return [items[at] for at in spread(len(items), most)]


def read_rows(parts: Parts, number: int, columns: Sequence[str] = _PLAYED) -> Rows:
    """Some columns of the stored episodes of one iteration or policy, in order, before any of them is loaded.

    Returns:
        Rows with the columns, with `number`, with `part` and `at` for `load_rows`, and with `greedy`.
    """
    return [
        {
            **row,
            "number": number,
            "part": name,
            "at": at,
            "greedy": bool(json.loads(row.get("sampling") or "{}").get("greedy")),
        }
        for name, read in parts.items()
        if iteration_of(name) == number
        for at, row in enumerate(read(columns=list(columns)).to_pylist())
    ]


def load_rows(parts: Parts, rows: Rows) -> list[Trajectory]:
    """The episodes of some rows; each of their parts is read once."""
    tables = {name: parts[name]() for name in dict.fromkeys(row["part"] for row in rows)}
    return [table_to_trajectories(tables[row["part"]].slice(row["at"], 1))[0] for row in rows]


def _first(rows: Iterable[dict[str, Any]], *columns: str) -> dict[Any, dict[str, Any]]:
    """The first row of each value of a column, or of each tuple of values."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in columns) if columns[1:] else row[columns[0]], row)
    return found


@dataclass(frozen=True)
class TrainingEpisodes:
    """Numbers of the training episodes.

    Attributes:
        rows: by iteration: `iteration`, `episodes/equal_groups` (share of the groups with equal rewards),
            `episodes/invalid` (share of the responses), `episodes/lost` (share), `part/<name>` (mean part of the
            reward).
        parts: names of the parts, and of what else is stored with a reward.
        kinds: by difficulty, in its order: rows `iteration`, `success`; iterations without such an episode are left
            out.
    """

    rows: list[dict[str, Any]]
    parts: list[str]
    kinds: dict[str, list[dict[str, Any]]]


def summarise_training(trained: Parts) -> TrainingEpisodes:
    """Read all stored training episodes without tokens and images.

    Args:
        trained: partitions `iter=<iteration>/…`; each is called with `columns`.
    """
    tables: dict[int, list[pa.Table]] = {}
    for name, read in trained.items():
        tables.setdefault(_iteration(name), []).append(read(columns=_COLUMNS))
    rows, parts = [], dict[str, None]()
    kinds: dict[str, Rows] = {}
    for number, found in tables.items():
        table = pa.concat_tables(found).unify_dictionaries().combine_chunks()
        if table.num_rows == 0:
            continue
        given = Named(one_array(table, "reward_parts"))
        names = sorted(given.items.values.field("name").unique().to_pylist())
        parts |= dict.fromkeys(names)
        rows.append(
            {"iteration": number, **_shares(table), **{f"part/{name}": _mean(given.pick(name)) for name in names}}
        )
        successes = table.group_by("difficulty").aggregate([("success", "mean")]).to_pylist()
        for kind, success in ((row["difficulty"], row["success_mean"]) for row in successes):
            if kind is not None and success is not None:
                kinds.setdefault(kind, []).append({"iteration": number, "success": success})
    return TrainingEpisodes(rows, list(parts), {kind: kinds[kind] for kind in sorted(kinds, key=kind_order)})


def tag_shares(index: pa.Table) -> list[dict[str, Any]]:
    """Share of the training episodes with each tag, by iteration.

    Args:
        index: of a run's episodes, see `trajectories/index.py`.

    Returns:
        Rows `iteration`, `tag/<name>` for every tag that any of the episodes has.
    """
    trained = index.filter(pc.equal(index["split"], "train"))
    tags = one_array(trained, "tags")
    given = pa.table(
        {"iteration": trained["iteration"].take(pc.list_parent_indices(tags)), "tag": pc.list_flatten(tags)}
    )
    found = given.group_by(["iteration", "tag"]).aggregate([([], "count_all")]).to_pylist()
    counts = {(row["iteration"], row["tag"]): row["count_all"] for row in found}
    names = sorted({tag for _, tag in counts})
    episodes = trained.group_by("iteration").aggregate([([], "count_all")]).sort_by("iteration").to_pylist()
    return [
        {
            "iteration": row["iteration"],
            **{f"tag/{name}": counts.get((row["iteration"], name), 0) / row["count_all"] for name in names},
        }
        for row in episodes
    ]


def kind_order(kind: str | None) -> tuple[bool, bool, int, str]:
    """Sort key of difficulties: numbers by their size, then names, then unknown ones."""
    known = kind or ""
    return kind is None, not known.isdigit(), int(known) if known.isdigit() else 0, known


def _shares(table: pa.Table) -> dict[str, float | None]:
    metrics, turns = Named(one_array(table, "metrics")), float(np.sum(table["n_turns"].to_numpy()))
    invalid = metrics.pick("invalid_turns")
    groups = table.filter(table["reward"].is_valid()).group_by("group_index")
    ends = groups.aggregate([("reward", "min"), ("reward", "max")])
    return {
        "episodes/equal_groups": pc.mean(pc.equal(ends["reward_min"], ends["reward_max"])).as_py(),
        "episodes/invalid": float(np.nansum(invalid)) / turns if invalid is not None and turns else None,
        "episodes/lost": _mean(metrics.pick("lost")),
    }


def _iteration(partition: str) -> int:
    iteration = iteration_of(partition)
    assert iteration is not None, f"{partition} is no partition of an iteration"
    return iteration


def _mean(values: np.ndarray | None) -> float | None:
    known = np.empty(0) if values is None else values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


# The same validation prompts over the course of training: the responses at every validation.


@dataclass(frozen=True)
class Answer:
    """Response of one policy version to a prompt: shortened, whether it succeeded, and in full for the tooltip."""

    text: str
    solved: bool
    full: str


@dataclass(frozen=True)
class Validations:
    """Validation prompts over the training.

    Attributes:
        versions: of the policy.
        mode: how they decoded.
        prompts: image as a data URI (None where there is none), name, and an answer per version.
    """

    versions: list[int]
    mode: str
    prompts: list[tuple[str | None, str, list[Answer | None]]]


def follow_prompts(validations: Parts, prompts: int = PROMPTS, versions: int = VALIDATIONS) -> Validations | None:
    """The first validation prompt of each difficulty, from easy to hard, at every validation; None if none is stored.

    Greedy episodes are preferred, because they differ by the policy alone. Of many validations the first, the last and
    some between are shown, and likewise of many difficulties.
    """
    chosen = thin(sorted({_iteration(name) for name in validations}), versions)
    rows = {version: found for version in chosen if (found := read_rows(validations, version))}
    greedy = all(any(row["greedy"] for row in found) for found in rows.values())
    played = {
        version: _first((row for row in found if row["greedy"] == greedy), "task_id") for version, found in rows.items()
    }
    oldest = played[chosen[0]].values() if chosen and chosen[0] in played else ()
    first = _first(oldest, "difficulty")
    # A task without difficulties shows its first prompts.
    kinds = thin(sorted(first, key=kind_order), prompts)
    shown = [first[kind] for kind in kinds] if len(first) > 1 else list(oldest)[:prompts]
    prompts_shown = [row["task_id"] for row in shown]
    wanted = [found[prompt] for found in played.values() for prompt in prompts_shown if prompt in found]
    loaded = {
        (row["number"], one.task_id): one for row, one in zip(wanted, load_rows(validations, wanted), strict=True)
    }
    histories = [_follow([loaded.get((version, prompt)) for version in played]) for prompt in prompts_shown]
    return Validations(list(played), "greedy" if greedy else "sampled", histories) if histories else None


def _follow(episodes: Sequence[Trajectory | None]) -> tuple[str | None, str, list[Answer | None]]:
    prompt = next(filter(None, episodes))
    image = png_data_uri(prompt.images[0]) if prompt.images else None
    name = "" if prompt.difficulty is None else task_or_plain(prompt.task).report.name_kind(prompt.difficulty)
    return image, name, [None if episode is None else _answer(episode) for episode in episodes]


def _answer(episode: Trajectory) -> Answer:
    turns = [turn for turn in episode.turns if turn.role == "assistant"]
    text = task_or_plain(episode.task).report.shorten_actions(turns)
    short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
    full = " ".join([describe_end(episode), *(turn.text for turn in turns)])
    return Answer(short or "–", is_solved(episode), full[:600])


# Choice of the episodes that a report shows.


@dataclass(frozen=True)
class PromptPair:
    """One held-out prompt: an episode of the last policy, and one of the first one; None: there is none."""

    after: Trajectory
    before: Trajectory | None


@dataclass(frozen=True)
class Extremes:
    """Training episodes of one iteration with the best and worst rewards within their groups.

    Attributes:
        means: mean reward of the group of each, by trajectory id.
    """

    iteration: int
    best: list[Trajectory]
    worst: list[Trajectory]
    image_pad_id: int
    means: dict[str, float]


def choose_gallery(held_out: Parts, policies: int, limit: int = GALLERY) -> list[PromptPair]:
    """Held-out prompts to show, by difficulty.

    For every kind the first solved episode, then, from the last kind to the first, the first unsolved one, up to
    `limit` episodes. If there are more kinds than that, they are thinned out evenly.

    Args:
        held_out: parts `iter=<number of the policy>/…`.
        policies: number of evaluated policies; the last one is shown, the first one beside it.
    """
    chosen = _spread(_first_samples(held_out, policies - 1), limit)
    others = _first(_first_samples(held_out, 0), "group_index") if policies > 1 else {}
    beside = load_rows(held_out, [others[row["group_index"]] for row in chosen if row["group_index"] in others])
    before = {one.group_index: one for one in beside}
    return [PromptPair(one, before.get(one.group_index)) for one in load_rows(held_out, chosen)]


def choose_extremes(trained: Parts, amount: int = EXTREMES) -> Extremes | None:
    """Best and worst episodes of the newest iteration with graded episodes; trained ones if there are any.

    Episodes are ranked by reward minus mean reward of the group, as in GRPO: by the reward alone, episodes of easy
    prompts would come first. At most two parts are read. Each group appears once, so that the examples differ.
    """
    for name in list(trained)[-1:-3:-1]:
        part = {name: trained[name]}
        rows = read_rows(part, _iteration(name), ("iteration", "group_index", "reward", "trained"))
        graded = [row for row in rows if is_number(row["reward"])]
        graded = [row for row in graded if row["trained"]] or graded
        if graded:
            rewards: dict[int, list[float]] = {}
            for row in graded:
                rewards.setdefault(row["group_index"], []).append(row["reward"])
            means = {group: fmean(values) for group, values in rewards.items()}
            ranked = sorted(graded, key=lambda row: (means[row["group_index"]] - row["reward"], row["at"]))
            best = list(_first(ranked, "group_index").values())[:amount]
            worst = [row for row in list(_first(reversed(ranked), "group_index").values())[:amount] if row not in best]
            loaded = load_rows(part, best + worst)
            pad = read_context(trained[name](columns=["reward"]).schema).image_pad_id
            shown = {one.trajectory_id: means[one.group_index] for one in loaded}
            return Extremes(rows[0]["iteration"], loaded[: len(best)], loaded[len(best) :], pad, shown)
    return None


def _first_samples(held_out: Parts, policy: int) -> Rows:
    """First sampled episode of each prompt of a policy; greedy ones if none was sampled."""
    rows = [{**row, "success": bool(row["success"])} for row in read_rows(held_out, policy)]
    greedy_only = all(row["greedy"] for row in rows)
    return [row for row in rows if row["greedy"] == greedy_only and row["sample_index"] == 0]


def _spread(rows: Rows, limit: int) -> Rows:
    kinds = sorted({row["difficulty"] for row in rows}, key=kind_order)
    if len(kinds) > limit:
        kinds = [kinds[at * len(kinds) // limit] for at in range(limit)]
    first = _first(rows, "difficulty", "success")
    wanted = [(kind, True) for kind in kinds] + [(kind, False) for kind in reversed(kinds)]
    chosen = [first[key] for key in wanted if key in first][:limit]
    # For tasks without difficulties this rule gives two rows; the next ones in order follow.
    if len(kinds) == 1:
        chosen += [row for row in rows if row not in chosen][: limit - len(chosen)]
    return sorted(chosen, key=lambda row: (kind_order(row["difficulty"]), not row["success"], row["group_index"]))


def read_successes(held_out: Parts, policy: int) -> dict[str, list[list[bool]]]:
    """Success of each sampled episode of a policy: by the content hash of its prompt, for each of its rows.

    Args:
        held_out: parts `iter=<number of the policy>/…`; each is called with `columns`.
    """
    rows = read_rows(held_out, policy, ("task_id", "group_index", "sampling", "success"))
    # As in the summary, a failed episode counts as not solved.
    return group_successes(
        (row["task_id"], row["group_index"], bool(row["success"])) for row in rows if not row["greedy"]
    )
