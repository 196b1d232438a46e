"""Choice of the stored episodes that a report shows, and numbers over all training episodes.

The numbers count all training episodes, dropped ones included, from the columns without tokens. The page states the
rule of the choice: the same files always give the same episodes.
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
from geo_sokoban_pipeline.formats import is_number
from geo_sokoban_pipeline.reporting.episodes import describe_end, is_solved
from geo_sokoban_pipeline.runs.folders import iteration_of
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.arrow import Named, Ragged, one_array
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories

Parts = Mapping[str, Callable[..., pa.Table]]
_COLUMNS = ["iteration", "group_index", "reward", "success", "difficulty", "n_turns", "metrics", "reward_parts"]
PROMPTS, VALIDATIONS = 6, 6
_LETTERS = 40  # of an answer in the table
GALLERY = 12
EXTREMES = 3


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
    kinds: dict[str, list[dict[str, Any]]] = {}
    for number, found in tables.items():
        table = pa.concat_tables(found).unify_dictionaries().combine_chunks()
        if table.num_rows == 0:
            continue
        given = Named(one_array(table, "reward_parts"))
        means = {name: _mean(given.pick(name)) for name in sorted(_names(given))}
        parts |= dict.fromkeys(means)
        rows.append({"iteration": number, **_shares(table), **{f"part/{name}": mean for name, mean in means.items()}})
        for kind, success in _by_difficulty(table).items():
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
    tags = Ragged.of(one_array(trained, "tags"))
    of_row = trained["iteration"].to_numpy()
    iterations, place, episodes = np.unique(of_row, return_inverse=True, return_counts=True)
    found = np.array(tags.values.to_pylist(), dtype=str)
    rows: list[dict[str, Any]] = [{"iteration": int(number)} for number in iterations]
    for name in np.unique(found).tolist():
        counts = np.bincount(place[tags.rows[found == name]], minlength=len(iterations))
        for row, share in zip(rows, (counts / episodes).tolist(), strict=True):
            row[f"tag/{name}"] = share
    return rows


def kind_order(kind: str) -> tuple[bool, int, str]:
    """Sort key of difficulties: numbers by their size, then names."""
    return (not kind.isdigit(), int(kind) if kind.isdigit() else 0, kind)


def _names(values: Named) -> Iterable[str]:
    names: list[str] = values.items.values.field("name").unique().to_pylist()
    return names


def _shares(table: pa.Table) -> dict[str, float | None]:
    metrics = Named(one_array(table, "metrics"))
    turns = float(np.sum(table["n_turns"].to_numpy()))
    invalid, lost = metrics.pick("invalid_turns"), metrics.pick("lost")
    return {
        "episodes/equal_groups": _equal_groups(table),
        "episodes/invalid": float(np.nansum(invalid)) / turns if invalid is not None and turns else None,
        "episodes/lost": _mean(lost),
    }


def _equal_groups(table: pa.Table) -> float | None:
    rewards = table["reward"].to_numpy()
    graded = ~np.isnan(rewards)
    _, group = np.unique(table["group_index"].to_numpy()[graded], return_inverse=True)
    if not len(group):
        return None
    lowest, highest = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(lowest, group, rewards[graded])
    np.maximum.at(highest, group, rewards[graded])
    return float((lowest == highest).mean())


def _by_difficulty(table: pa.Table) -> dict[str, float]:
    successes: dict[str, list[bool]] = {}
    for kind, success in zip(table["difficulty"].to_pylist(), table["success"].to_pylist(), strict=True):
        if kind is not None and success is not None:
            successes.setdefault(kind, []).append(success)
    return {kind: float(np.mean(found)) for kind, found in successes.items()}


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
class PromptHistory:
    """One validation prompt: its image as a data URI (None where it has none), a name, an answer per version."""

    image: str | None
    name: str
    answers: list[Answer | None]


@dataclass(frozen=True)
class Validations:
    """Policy versions, how they decoded, and the prompts."""

    versions: list[int]
    mode: str
    prompts: list[PromptHistory]


def follow_prompts(validations: Parts, prompts: int = PROMPTS, versions: int = VALIDATIONS) -> Validations | None:
    """The first validation prompt of each difficulty, from easy to hard, at every validation; None if none is stored.

    Greedy episodes are preferred, because they differ by the policy alone. Of many validations the first, the last and
    some between are shown, and likewise of many difficulties.
    """
    names: dict[int, list[str]] = {}
    for name in validations:
        names.setdefault(_iteration(name), []).append(name)
    chosen = _thin(sorted(names), versions)
    found = {version: _read(validations, names[version]) for version in chosen}
    found = {version: episodes for version, episodes in found.items() if episodes}
    if not found:
        return None
    greedy = all(any(is_greedy for is_greedy, _ in episodes) for episodes in found.values())
    by_version: dict[int, dict[str, Trajectory]] = {version: {} for version in found}
    for version, episodes in found.items():
        for is_greedy, episode in episodes:
            if is_greedy == greedy:
                by_version[version].setdefault(episode.task_id, episode)
    oldest = list(by_version[chosen[0]].values()) if chosen[0] in by_version else []
    first: dict[str | None, Trajectory] = {}
    for episode in oldest:
        first.setdefault(episode.difficulty, episode)
    kinds = sorted(first, key=lambda kind: (kind is None, kind_order(kind or "")))
    # A task without difficulties shows its first prompts.
    shown = [first[kind] for kind in _thin(kinds, prompts)] if len(kinds) > 1 else oldest[:prompts]
    histories = [_follow(one, [by_version[version].get(one.task_id) for version in found]) for one in shown]
    return Validations(list(found), "greedy" if greedy else "sampled", histories) if histories else None


def _read(validations: Parts, names: Sequence[str]) -> list[tuple[bool, Trajectory]]:
    episodes = [episode for name in names for episode in table_to_trajectories(validations[name]())]
    return [(_is_greedy(episode.sampling or "{}"), episode) for episode in episodes]


def _thin(items: Sequence[Any], most: int) -> list[Any]:
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _follow(prompt: Trajectory, episodes: Sequence[Trajectory | None]) -> PromptHistory:
    image = png_data_uri(prompt.images[0]) if prompt.images else None
    name = "" if prompt.difficulty is None else task_or_plain(prompt.task).report.name_kind(prompt.difficulty)
    return PromptHistory(image, name, [None if episode is None else _answer(episode) for episode in episodes])


def _answer(episode: Trajectory) -> Answer:
    turns = [turn for turn in episode.turns if turn.role == "assistant"]
    text = task_or_plain(episode.task).report.shorten_actions(turns)
    short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"
    full = " ".join([describe_end(episode), *(turn.text for turn in turns)])
    return Answer(short or "–", is_solved(episode), full[:600])


# Choice of the episodes that a report shows.


@dataclass(frozen=True)
class PromptPair:
    """One held-out prompt: its difficulty, and an episode of the last policy and of the first one.

    Attributes:
        kind: difficulty as stored; None: unknown.
    """

    kind: str | None
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
    image_pad_id: int | None
    means: dict[str, float]


def choose_gallery(held_out: Parts, policies: int, limit: int = GALLERY) -> list[PromptPair]:
    """Held-out prompts to show, by difficulty.

    For every kind the first solved episode, then, from the last kind to the first, the first unsolved one, up to
    `limit` episodes. If there are more kinds than that, they are thinned out evenly.

    Args:
        held_out: parts `iter=<number of the policy>/…`.
        policies: number of evaluated policies; the last one is shown, the first one beside it.
    """
    after = _sampled_rows(held_out, policies - 1)
    before = {row.place: row for row in reversed(_sampled_rows(held_out, 0))} if policies > 1 else {}
    pairs = [(row, before.get(row.place)) for row in _spread(after, limit)]
    return [PromptPair(row.kind, row.load(), other.load() if other else None) for row, other in pairs]


def choose_extremes(trained: Parts, amount: int = EXTREMES) -> Extremes | None:
    """Best and worst episodes of the newest iteration with graded episodes; trained ones if there are any.

    Episodes are ranked by reward minus mean reward of the group, as in GRPO: by the reward alone, episodes of easy
    prompts would come first. At most two parts are read. Each group appears once, so that the examples differ.
    """
    for name in list(trained)[-1:-3:-1]:
        table = trained[name]()
        rows = table.select(["iteration", "group_index", "reward", "trained"]).to_pylist()
        graded = [(at, row) for at, row in enumerate(rows) if is_number(row["reward"])]
        graded = [item for item in graded if item[1]["trained"]] or graded
        if graded:
            means = _group_means([row for _, row in graded])
            ranked = sorted(graded, key=lambda item: (means[item[1]["group_index"]] - item[1]["reward"], item[0]))
            best = _one_per_group(ranked, amount)
            worst = [at for at in _one_per_group(list(reversed(ranked)), amount) if at not in best]
            pad = (table.schema.metadata or {}).get(b"image_pad_id")
            chosen = _load(table, best), _load(table, worst)
            shown = {one.trajectory_id: means[one.group_index] for one in (*chosen[0], *chosen[1])}
            return Extremes(int(rows[0]["iteration"]), *chosen, int(pad) if pad else None, shown)
    return None


@dataclass(frozen=True)
class _Row:
    """A stored episode before it is loaded."""

    table: pa.Table
    at: int
    place: tuple[int, int]
    kind: str | None
    solved: bool

    @property
    def order(self) -> tuple[bool, tuple[bool, int, str]]:
        """Sort key of the difficulty; unknown ones come last."""
        return self.kind is None, kind_order(self.kind or "")

    def load(self) -> Trajectory:
        return _load(self.table, [self.at])[0]


def _sampled_rows(held_out: Parts, policy: int) -> list[_Row]:
    """First sampled episode of each prompt of a policy; greedy ones if none was sampled."""
    rows: list[tuple[bool, _Row]] = []
    for name, read in held_out.items():
        if iteration_of(name) != policy:
            continue
        table = read()
        columns = table.select(["group_index", "sample_index", "sampling", "difficulty", "success"]).to_pylist()
        for at, column in enumerate(columns):
            place = (column["group_index"], column["sample_index"])
            row = _Row(table, at, place, column["difficulty"], bool(column["success"]))
            rows.append((_is_greedy(column["sampling"]), row))
    greedy_only = all(greedy for greedy, _ in rows)
    return [row for greedy, row in rows if (greedy_only or not greedy) and row.place[1] == 0]


def _is_greedy(sampling: str) -> bool:
    values: dict[str, Any] = json.loads(sampling or "{}")
    return bool(values.get("greedy"))


def _spread(rows: Sequence[_Row], limit: int) -> list[_Row]:
    kinds = [row.kind for row in sorted({row.kind: row for row in rows}.values(), key=lambda row: row.order)]
    if len(kinds) > limit:
        kinds = [kinds[at * len(kinds) // limit] for at in range(limit)]
    first: dict[tuple[str | None, bool], _Row] = {}
    for row in rows:
        first.setdefault((row.kind, row.solved), row)
    wanted = [(kind, True) for kind in kinds] + [(kind, False) for kind in reversed(kinds)]
    chosen = [first[key] for key in wanted if key in first][:limit]
    # For tasks without difficulties this rule gives two rows; the next ones in order follow.
    if len(kinds) == 1:
        chosen += [row for row in rows if row not in chosen][: limit - len(chosen)]
    return sorted(chosen, key=lambda row: (row.order, not row.solved, row.place))


def _group_means(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    rewards: dict[int, list[float]] = {}
    for row in rows:
        rewards.setdefault(row["group_index"], []).append(row["reward"])
    return {group: fmean(values) for group, values in rewards.items()}


def _one_per_group(ranked: Sequence[tuple[int, Mapping[str, Any]]], amount: int) -> list[int]:
    chosen: dict[int, int] = {}
    for at, row in ranked:
        chosen.setdefault(row["group_index"], at)
    return list(chosen.values())[:amount]


def _load(table: pa.Table, places: Sequence[int]) -> list[Trajectory]:
    return [table_to_trajectories(table.slice(at, 1))[0] for at in places]


def read_successes(held_out: Parts, policy: int) -> dict[str, list[list[bool]]]:
    """Success of each sampled episode of a policy: by the content hash of its prompt, for each of its rows.

    Args:
        held_out: parts `iter=<number of the policy>/…`; each is called with `columns`.
    """
    successes: dict[str, dict[int, list[bool]]] = {}
    for name, read in held_out.items():
        if iteration_of(name) == policy:
            for row in read(columns=["task_id", "group_index", "sampling", "success"]).to_pylist():
                if not _is_greedy(row["sampling"]):
                    # As in the summary, a failed episode counts as not solved.
                    rows = successes.setdefault(row["task_id"], {})
                    rows.setdefault(row["group_index"], []).append(bool(row["success"]))
    return {name: list(rows.values()) for name, rows in successes.items()}
