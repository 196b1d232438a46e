"""Training episodes by iteration: what the curves need beyond the stored metrics, from the columns without tokens.

The numbers are of all played episodes, dropped ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from geo_sokoban_pipeline.contract.columns import Named, one_array

Parts = Mapping[str, Callable[..., pa.Table]]
_COLUMNS = ["iteration", "group_index", "reward", "success", "difficulty", "n_turns", "metrics", "reward_parts"]
_STATES = frozenset({"dist0", "dist1", "total_reward"})  # named beside the parts of a reward, and none of them


@dataclass(frozen=True)
class TrainingEpisodes:
    """What training played.

    Attributes:
        rows: by iteration: `iteration`, `episodes/equal_groups` (share of the groups with equal rewards),
            `episodes/invalid` (share of the responses), `episodes/lost` (share), `part/<name>` (mean part of the
            reward).
        parts: names of the parts.
        kinds: by difficulty, in its order: rows `iteration`, `success`; iterations without such an episode are left
            out.
    """

    rows: list[dict[str, Any]]
    parts: list[str]
    kinds: dict[str, list[dict[str, Any]]]


def summarise_training(trained: Parts) -> TrainingEpisodes:
    """Read all stored training episodes, but no tokens and images.

    Args:
        trained: partitions `iter=<iteration>/…`; each is called with `columns`.
    """
    tables: dict[int, list[pa.Table]] = {}
    for name, read in trained.items():
        number = int(name.split("/")[0].removeprefix("iter="))
        tables.setdefault(number, []).append(read(columns=_COLUMNS))
    rows, parts = [], dict[str, None]()
    kinds: dict[str, list[dict[str, Any]]] = {}
    for number, found in tables.items():
        table = pa.concat_tables(found).unify_dictionaries().combine_chunks()
        if table.num_rows == 0:
            continue
        given = Named(one_array(table, "reward_parts"))
        means = {name: _mean(given.pick(name)) for name in sorted(set(_names(given)) - _STATES)}
        parts |= dict.fromkeys(means)
        rows.append({"iteration": number, **_shares(table), **{f"part/{name}": mean for name, mean in means.items()}})
        for kind, success in _by_difficulty(table).items():
            kinds.setdefault(kind, []).append({"iteration": number, "success": success})
    return TrainingEpisodes(rows, list(parts), {kind: kinds[kind] for kind in sorted(kinds, key=kind_order)})


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
    outcomes: dict[str, list[bool]] = {}
    for kind, success in zip(table["difficulty"].to_pylist(), table["success"].to_pylist(), strict=True):
        if kind is not None and success is not None:
            outcomes.setdefault(kind, []).append(success)
    return {kind: float(np.mean(found)) for kind, found in outcomes.items()}


def _mean(values: np.ndarray | None) -> float | None:
    known = np.empty(0) if values is None else values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
