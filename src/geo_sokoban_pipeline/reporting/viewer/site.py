"""The browser of episodes: a static site that opens from a file, without a server and without a network.

A page from a file may load scripts but no other data. So data are scripts that hand JSON to the page: the index by
columns, which the list reads as a whole; episodes and images in chunks, read when a page shows them. A text of a policy
is only ever a string in that JSON, and the page shows strings as text.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.envs.report import TaskReport
from geo_sokoban_pipeline.formats import describe_policy
from geo_sokoban_pipeline.reporting.episodes import TokenTexts, describe_end
from geo_sokoban_pipeline.reporting.viewer.sources import BrowsedRun, NothingToBrowseError
from geo_sokoban_pipeline.runs.provenance import read_commands, suggest_command
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.tasks import TASKS, task_or_plain
from geo_sokoban_pipeline.trajectories.arrow import Ragged, one_array
from geo_sokoban_pipeline.trajectories.index import find_gaps
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import read_context
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn, table_to_trajectories

ENTRY = "index.html"
LIST_ROWS = 20_000  # rows of the list in one script
EPISODES_BYTES, IMAGES_BYTES = 400_000, 700_000  # about what a script holds, so that one is read in some 10 ms
_SMALL = 1e-3  # numbers below it keep more digits
_SHORTEST_RUN = 3  # equal tokens in a row from which on only their number is stored: image pads
_LEFT_OUT = ("run", "run_id", "partition", "row", "tag_counts")  # of the index; the site has them in other forms
_MEANS = ("image_reliance", "entropy", "ratio")  # of the scores of an episode's tokens: columns of the list
# Columns of `turn_values` that the page of an episode shows.
_WORTH = (
    "value",
    "value_after",
    "advantage",
    "success",
    "success_after",
    "steps_left",
    "is_solvable",
    "is_solvable_after",
)
_MEASURES = ("log_prob", "gap", "entropy", "image_reliance")  # of a token; the last two from scores
_COUNTED = ("trajectory_id", "token_ids", "loss_mask", "rollout_log_probs", "old_log_probs", "weight_spans")
_ABLATIONS = ("blank", "shuffled", "shuffled_first")  # suffixes of a policy's name in an evaluation


def write_site(folder: Path, runs: Sequence[BrowsedRun], *, pages: int | None = None) -> dict[str, Any]:
    """Write the site of some runs into an empty folder; `index.html` opens it.

    Args:
        runs: with different names.
        pages: episodes that get a page of their own, in whole groups; all others are in the list only. None: all.

    Returns:
        `episodes`, `pages` and `images`, their numbers.

    Raises:
        NothingToBrowseError: the runs have no episodes.
    """
    index = pa.concat_tables([run.index for run in runs]).combine_chunks() if runs else None
    if index is None or not index.num_rows:
        raise NothingToBrowseError(f"{', '.join(run.name for run in runs) or 'no run'}: no episodes are stored.")
    shown = choose_pages(index, pages)
    images = _Images(folder)
    chunk, place, pads, tokens = _write_episodes(folder, runs, shown, images)
    images.close()
    clusters = {name: cluster for run in runs for name, cluster in run.clusters.items()}
    columns = list_columns(index) | score_columns(runs)
    columns |= {
        "widest_gap_token": _words(pa.array([text for run in runs for text in _widest_tokens(run)], pa.string())),
        "page": _words(pa.array(shown)),
        "run": _words(pa.array([run.name for run in runs for _ in range(run.index.num_rows)])),
        "cluster": _words(pa.array([clusters.get(name) for name in index["task_id"].to_pylist()], pa.string())),
        "chunk": chunk,
        "place": place,
    }
    chunks = _write_list(folder, columns, index.num_rows)
    site = {
        "rows": index.num_rows,
        "chunks": chunks,
        "columns": [(name, "word" if isinstance(one, _Words) else "number") for name, one in columns.items()],
        "runs": {run.name: _describe_run(run, pad, folder) for run, pad in zip(runs, pads, strict=True)},
        "tasks": {name: _describe_task(name, index) for name in index["task"].unique().to_pylist()},
    }
    _write_script(folder, "site", site)
    _write_script(folder, "tokens", tokens)
    (folder / "assets").mkdir()
    for asset in resources.files(__package__).joinpath("assets").iterdir():
        with resources.as_file(asset) as path:
            shutil.copyfile(path, folder / ENTRY if asset.name == ENTRY else folder / "assets" / asset.name)
    return {"episodes": index.num_rows, "pages": int(shown.sum()), "images": len(images.places)}


def choose_pages(index: pa.Table, pages: int | None) -> np.ndarray:
    """(rows,) bool: which episodes get a page: whole groups, evaluations before training, evenly spread.

    The group with each run's widest gap between trainer and engine is among them.

    Args:
        pages: episodes at most, but always one group, and those groups; None: all.
    """
    rows = index.num_rows
    if pages is None or pages >= rows:
        return np.ones(rows, bool)
    keys = ["run", "run_id", "split", "iteration", "group_index"]
    frame = index.select([*keys, "max_log_prob_gap"]).to_pandas()
    groups = frame.groupby(keys, sort=False)  # numbered in the order of the index
    group, size = groups.ngroup().to_numpy(), groups.size().to_numpy()
    chosen = np.zeros(len(size), bool)
    gaps = frame[frame["max_log_prob_gap"] > 0].groupby(["run", "run_id"])["max_log_prob_gap"]
    chosen[group[gaps.idxmax()]] = True
    train = groups["split"].first() == "train"
    for kind in (~train, train):
        own, left = np.flatnonzero(kind), pages - int(size[chosen].sum())
        if len(own) and left > 0:
            count = min(len(own), max(1, int(left / size[own].mean())))
            chosen[own[np.linspace(0, len(own) - 1, count).round().astype(int)]] = True
    return np.asarray(chosen[group])


# The list: the index by columns.


def list_columns(index: pa.Table) -> dict[str, Any]:
    """Columns of the index as the list reads them: see `_words` and `_numbers`."""
    columns: dict[str, Any] = {}
    for name in index.column_names:
        array = one_array(index, name)
        if name == "tags":
            columns[name] = _tags(array, one_array(index, "tag_counts"))
        elif name not in _LEFT_OUT:
            numeric = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
            columns[name] = _numbers(array) if numeric else _words(array)
    return columns


@dataclass(frozen=True)
class _Words:
    """A column of few different values: the values, and the place of each row's among them, −1 for none."""

    words: list[Any]
    at: np.ndarray


def _words(array: pa.Array) -> _Words:
    encoded = array.dictionary_encode()
    return _Words(encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy())


def _tags(tags: pa.Array, counts: pa.Array) -> _Words:
    """Each row's tags with their counts, as one value."""
    places: dict[tuple[Any, ...], int] = {}
    pairs = zip(tags.to_pylist(), counts.to_pylist(), strict=True)
    at = [places.setdefault((*names, *numbers), len(places)) for names, numbers in pairs]
    halves = [(key[: len(key) // 2], key[len(key) // 2 :]) for key in places]
    return _Words([dict(zip(*half, strict=True)) for half in halves], np.array(at, np.int32))


def _numbers(array: pa.Array) -> np.ndarray:
    if pa.types.is_integer(array.type) and not array.null_count:
        return np.asarray(array.to_numpy())
    values = np.asarray(array.cast(pa.float64()).to_numpy(zero_copy_only=False))
    # Differences of log-probs in float32 are that small, and the list is sorted by them.
    return np.where(np.abs(values) < _SMALL, np.round(values, 9), np.round(values, 6))


def _widest_tokens(run: BrowsedRun) -> list[str | None]:
    """Text of the token with the widest gap of each episode, its id without a tokenizer."""
    ids = run.index["widest_gap_token"].to_pylist()
    different = sorted(set(ids) - {None})
    texts = run.token_texts(different) if run.token_texts else map(str, different)
    named = dict(zip(different, texts, strict=True))
    return [named.get(one) for one in ids]


def score_columns(runs: Sequence[BrowsedRun]) -> dict[str, np.ndarray]:
    """Mean scores of each episode's tokens as columns of the list, NaN without scores; {}: no run has scores."""
    if not any(run.scored for run in runs):
        return {}
    scores = [run.scored.get(name, []) for run in runs for name in run.index["trajectory_id"].to_pylist()]
    return {name: np.array([_mean_score(rows, name) for rows in scores]) for name in _MEANS}


def _mean_score(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    known = [row[name] for row in rows if row[name] is not None]
    return round(float(np.mean(known, dtype=np.float64)), 6) if known else np.nan


def _write_list(folder: Path, columns: Mapping[str, Any], rows: int) -> int:
    starts = range(0, rows, LIST_ROWS)
    for number, start in enumerate(starts):
        end = min(start + LIST_ROWS, rows)
        part = {name: _slice(column, start, end) for name, column in columns.items()}
        _write_script(folder, f"list/{number}", {"rows": end - start, "columns": part})
    return len(starts)


def _slice(column: Any, start: int, end: int) -> dict[str, Any]:
    """Rows of a column: `same`, one value for all; else `words` and `at`; else `values`."""
    if not isinstance(column, _Words):
        values = column[start:end]
        alike = values[0] == values[-1] and (values == values[0]).all() or np.isnan(values).all()
        return {"same": values[0]} if alike else {"values": np.ascontiguousarray(values)}
    used, at = np.unique(column.at[start:end], return_inverse=True)
    words = [None if place < 0 else column.words[place] for place in used.tolist()]
    if len(words) == 1:
        return {"same": words[0]}
    if len(words) > (end - start) / 2:
        return {"values": [words[place] for place in at.tolist()]}
    return {"words": words, "at": at}


# Episodes: what their pages show beyond the list.


def _write_episodes(
    folder: Path, runs: Sequence[BrowsedRun], shown: np.ndarray, images: _Images
) -> tuple[np.ndarray, np.ndarray, list[int | None], dict[str, Any]]:
    """Write the chosen episodes, and count the tokens of all.

    Returns:
        Script and place of each row's page, −1 for none; each run's id of image pads; the tables of tokens by run.
    """
    chunks, places = np.full(len(shown), -1, np.int32), np.full(len(shown), -1, np.int32)
    pads: list[int | None] = []
    tables: dict[str, Any] = {}
    number, start = 0, 0
    with track("writing episodes", len(shown), keep=False) as progress:
        for run in runs:
            pads.append(None)
            chunk, counts = _Chunk(run.token_texts), _TokenTable()
            for partition, rows in _by_partition(run.index):
                chosen = np.flatnonzero(shown[start + rows])
                path = run.folder / f"{partition}.parquet"
                stored = read_trajectories(path, None if len(chosen) else _COUNTED)
                table = stored.take(run.index["row"].to_numpy()[rows])
                tokens = measure_tokens(table, run.scored)
                gaps = np.split(tokens["gap"].to_numpy(), np.searchsorted(tokens["episode"], range(1, len(rows))))
                counts.add(tokens.assign(row=start + rows[tokens["episode"]]))
                episodes: list[Trajectory] = []
                if len(chosen):
                    pads[-1] = read_context(table.schema).image_pad_id
                    episodes = table_to_trajectories(table.take(chosen))
                for place, episode in zip(chosen, episodes, strict=True):
                    row, name = start + rows[place], episode.trajectory_id
                    chunks[row], places[row] = number, len(chunk.episodes)
                    scores, maps, values = run.scored.get(name), run.mapped.get(name, ()), run.valued.get(name, ())
                    chunk.add(episode, images, gaps[place], scores, maps, values)
                    if chunk.size > EPISODES_BYTES:
                        chunk.write(folder, number)
                        chunk, number = _Chunk(run.token_texts), number + 1
                progress.advance(len(rows))
            if chunk.episodes:
                chunk.write(folder, number)
                number += 1
            sampled = int((run.index["response_tokens"].to_numpy() > 0).sum())
            tables[run.name] = counts.describe(run.token_texts) | {"thinned": sampled - counts.episodes}
            start += run.index.num_rows
    return chunks, places, pads, tables


def _by_partition(index: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    """Partitions of the index, in its order, with their rows."""
    encoded = one_array(index, "partition").dictionary_encode()
    of_row = encoded.indices.to_numpy()
    for place, name in enumerate(encoded.dictionary.to_pylist()):
        yield name, np.flatnonzero(of_row == place)


@dataclass
class _Chunk:
    """Episodes of one script. Texts and spans of tokens that several of them have, such as prompts, are stored once.

    Attributes:
        size: about its bytes.
    """

    token_texts: TokenTexts | None
    size: int = 0
    texts: dict[str, int] = field(default_factory=dict)
    spans: dict[bytes, int] = field(default_factory=dict)
    episodes: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        episode: Trajectory,
        images: _Images,
        gaps: np.ndarray,
        scores: Sequence[Mapping[str, Any]] | None,
        maps: Sequence[Mapping[str, Any]],
        values: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add an episode.

        Args:
            gaps: of its sampled tokens, NaN where they are not known.
            scores: rows of `token_scores` of it; None: it was not scored.
            maps: rows of `occlusion` of it.
            values: rows of `turn_values` of it.
        """
        worth = {row["turn"]: {name: row[name] for name in _WORTH} for row in values}
        report = task_or_plain(episode.task).report
        acted = episode.images and episode.turns and episode.turns[-1].role == "assistant"
        end = report.last_image(episode.images[-1], episode.turns[-1]) if acted else None
        cuts = [0, *(turn.token_start for turn in episode.turns[1:]), len(episode.token_ids)]
        sampled = np.flatnonzero(episode.loss_mask)
        self.episodes.append(
            {
                "end": describe_end(episode),
                "images": [images.add(png) for png in episode.images],
                "last_image": None if end is None else images.add(end),
                "turns": [
                    self._describe_turn(
                        turn, episode.token_ids[start:stop], report.read_action(turn), worth.get(number)
                    )
                    for number, (turn, (start, stop)) in enumerate(zip(episode.turns, pairwise(cuts), strict=True))
                ],
                "mask": _runs(sampled),
                **_channels(episode, sampled, gaps),
                "scores": scores and _describe_scores(scores, sampled),
                "maps": _describe_maps(maps, episode.images),
                "valued_by": values[0]["forked_by"] if values else None,
                "label": episode.label,
                "error": episode.error,
                "seed": episode.seed,
                "weights": episode.weight_spans,
                "sampling": self._place(episode.sampling),
                "reward_parts": episode.reward_parts,
                "metrics": episode.metrics,
                "timings": {name: round(value, 4) for name, value in episode.timings.items()},
            }
        )
        self.size += 1000 + 14 * len(sampled) + (60 * len(scores) if scores else 0)
        self.size += sum(40 + 8 * len(part["drops"]) for part in maps) + 200 * len(values)

    def write(self, folder: Path, number: int) -> None:
        """Write the script."""
        known = sorted({int(token) for span in self.spans for token in np.unique(np.frombuffer(span, np.int32))})
        texts = dict(zip(map(str, known), self.token_texts(known), strict=True)) if self.token_texts else {}
        spans = [_shorten(np.frombuffer(span, np.int32)) for span in self.spans]
        chunk = {"texts": list(self.texts), "tokens": texts, "spans": spans, "episodes": self.episodes}
        _write_script(folder, f"episodes/{number}", chunk)

    def _describe_turn(
        self, turn: Turn, ids: np.ndarray, action: str | None, worth: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if (key := ids.astype(np.int32, copy=False).tobytes()) not in self.spans:
            self.spans[key] = len(self.spans)
            self.size += 2 * len(key)
        return {
            "role": turn.role,
            "text": self._place(turn.text),
            "span": self.spans[key],
            "images": turn.image_indices,
            "action": action,
            "reward": turn.reward,
            "credit": turn.credit,
            "advantage": turn.advantage,
            "worth": worth,
            "info": self._place(orjson.dumps(turn.info).decode()) if turn.info else None,
        }

    def _place(self, text: str) -> int:
        if text not in self.texts:
            self.texts[text] = len(self.texts)
            self.size += len(text)
        return self.texts[text]


def _runs(positions: np.ndarray) -> list[list[int]]:
    """Half-open spans of neighbouring positions."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [[int(part[0]), int(part[-1]) + 1] for part in parts if len(part)]


def _shorten(ids: np.ndarray) -> list[int]:
    """Token ids; a negative number says how often the one before it comes once more."""
    found: list[int] = []
    ends = [*(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)] if len(ids) else []
    for start, end in pairwise([0, *ends]):
        token, count = int(ids[start]), end - start
        found += [token, 1 - count] if count >= _SHORTEST_RUN else [token] * count
    return found


def _channels(episode: Trajectory, sampled: np.ndarray, gaps: np.ndarray) -> dict[str, Any]:
    """Log-probs of the sampled tokens, and how much those of trainer and reference policy differ from the engine's."""
    own, ref = episode.rollout_log_probs[sampled].astype(np.float64), episode.ref_log_probs
    known = len(gaps) > 0 and not np.isnan(gaps).any()
    return {
        "log_probs": np.round(own, 4),
        "gaps": np.round(gaps, 9) if known else None,
        "widest": int(sampled[np.argmax(np.abs(gaps))]) if known else None,
        "ref_gaps": None if ref is None else np.round(ref[sampled] - own, 4),
    }


def _describe_scores(scores: Sequence[Mapping[str, Any]], sampled: np.ndarray) -> dict[str, Any] | None:
    """Scores of an episode by channel, one value per sampled token; None: they are those of other tokens."""
    if not _are_of(scores, sampled):
        return None
    columns = {
        name: [None if row[name] is None else round(row[name], 4) for row in scores]
        for name in ("log_prob", "entropy", "ratio", "image_reliance")
    }
    top = [
        [[text, round(value, 3)] for text, value in zip(row["top_tokens"], row["top_log_probs"], strict=True)]
        for row in scores
    ]
    return {"by": scores[0]["scored_by"], "version": scores[0]["scored_version"], **columns, "top": top}


def _are_of(scores: Sequence[Mapping[str, Any]], sampled: np.ndarray) -> bool:
    """Whether scores are of these positions; those of an episode that was rolled out again may be of others."""
    return [row["position"] for row in scores] == sampled.tolist()


def _describe_maps(maps: Sequence[Mapping[str, Any]], images: Sequence[bytes]) -> dict[str, Any] | None:
    """Occlusion maps of an episode by the place of the image: its size, the tokens whose log-probs were compared, and
    of each part its rectangle, what it shows, and by how much it makes each of these tokens likelier; None: no map.
    """
    found: dict[str, Any] = {}
    for row in maps:
        png, name = images[row["image"]], str(row["image"])
        size = [int.from_bytes(png[at : at + 4], "big") for at in (16, 20)]  # of the PNG's header
        parts = found.setdefault(name, {"size": size, "positions": row["positions"], "parts": []})["parts"]
        place = [row[side] for side in ("left", "top", "width", "height")]
        parts.append([*place, row["content"], [round(drop, 4) for drop in row["drops"]]])
    return found or None


# The page of tokens: each token's numbers over all of its places, and where its widest gap is.


def measure_tokens(table: pa.Table, scored: Mapping[str, Sequence[Mapping[str, Any]]]) -> pd.DataFrame:
    """The sampled tokens of episodes, in their order.

    Gaps are those of the stored `old_log_probs`, or of scores under the very weights that sampled the episode.

    Args:
        table: at least the columns `_COUNTED` of the episodes.
        scored: rows of scores by trajectory id.

    Returns:
        `episode` (its place in the table), `id`, `position`, and each measure, NaN where it is not known.
    """
    mask, engine = Ragged.of(one_array(table, "loss_mask")), Ragged.of(one_array(table, "rollout_log_probs"))
    places = np.flatnonzero(mask.values)
    episode = np.searchsorted(mask.offsets, places, side="right") - 1
    positions = places - mask.offsets[episode]
    values = np.full((len(_MEASURES), len(places)), np.nan)
    values[0] = engine.values[places]
    values[1] = find_gaps(one_array(table, "old_log_probs"), engine, places, episode)
    for number, name in enumerate(table["trajectory_id"].to_pylist() if scored else ()):
        own = slice(*np.searchsorted(episode, [number, number + 1]))
        if (scores := scored.get(name)) and _are_of(scores, positions[own]):
            values[2:, own] = [[score[measure] for score in scores] for measure in _MEASURES[2:]]
            versions = {span["version"] for span in table["weight_spans"][number].as_py()}
            if versions == {scores[0]["scored_version"]} and np.isnan(values[1, own]).all():
                values[1, own] = [score["log_prob"] for score in scores] - values[0, own]
    ids = Ragged.of(one_array(table, "token_ids")).values[places]
    return pd.DataFrame(values.T, columns=_MEASURES).assign(episode=episode, id=ids, position=positions)


@dataclass
class _TokenTable:
    """Numbers of each sampled token over all episodes of a run, with or without a page.

    Attributes:
        sums: by token id, of each measure where it is known; of gaps, of their sizes.
        counts: by token id, how often each measure is known; log-probs always are.
        widest: of each token id the token with the widest gap; of equal gaps the first one.
        episodes: those with a sampled token.
    """

    sums: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_MEASURES, dtype=float))
    counts: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_MEASURES, dtype=float))
    widest: pd.DataFrame = field(default_factory=pd.DataFrame)
    episodes: int = 0

    def add(self, tokens: pd.DataFrame) -> None:
        """Count the sampled tokens of episodes, with their rows of the list."""
        measured = tokens.assign(gap=tokens["gap"].abs()).groupby("id")[[*_MEASURES]]
        self.sums = self.sums.add(measured.sum(), fill_value=0.0)
        self.counts = self.counts.add(measured.count(), fill_value=0.0)
        known = pd.concat([self.widest, tokens.dropna(subset="gap")])
        self.widest = known.iloc[np.argsort(-known["gap"].abs(), kind="stable")].drop_duplicates("id")
        self.episodes += tokens["row"].nunique()

    def describe(self, texts: TokenTexts | None) -> dict[str, Any]:
        """Columns with a value per token, those with most places first; without texts the page shows ids.

        Returns:
            `id`, `text`, `count`, `scored`, the mean of each measure, `widest` gap and its place `at`, (row of the
            list, position). `episodes`: how many have sampled tokens.
        """
        counts = self.counts.sort_index().sort_values("log_prob", ascending=False, kind="stable")
        means, ids = self.sums.loc[counts.index] / counts, counts.index.astype(int).tolist()
        # A run without episodes has no columns yet.
        widest = self.widest.reindex(columns=["id", "gap", "row", "position"]).set_index("id").reindex(ids)
        places = zip(widest["row"].tolist(), widest["position"].tolist(), strict=True)
        return {
            "id": ids,
            "text": texts(ids) if texts else [str(token) for token in ids],
            "count": counts["log_prob"].astype(int).tolist(),
            "scored": counts["entropy"].astype(int).tolist(),
            **{name: [_round(mean) for mean in means[name].tolist()] for name in _MEASURES},
            "widest": [_round(gap) for gap in widest["gap"].tolist()],
            "at": [None if np.isnan(row) else (int(row), int(position)) for row, position in places],
            "episodes": self.episodes,
        }


def _round(value: float) -> float | None:
    """Six digits; None for NaN."""
    return None if np.isnan(value) else float(f"{value:.6g}")


@dataclass
class _Images:
    """Images of a site, each stored once, in scripts that hold several."""

    folder: Path
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    size: int = 0
    scripts: int = 0

    def add(self, image: bytes) -> tuple[int, int]:
        """Script and place of an image."""
        if (key := content_hash(image)) not in self.places:
            if self.size > IMAGES_BYTES:
                self.close()
            self.places[key] = (self.scripts, len(self.open))
            self.open.append(base64.b64encode(image).decode())
            self.size += len(self.open[-1])
        return self.places[key]

    def close(self) -> None:
        """Write the script that is open."""
        if self.open:
            _write_script(self.folder, f"images/{self.scripts}", self.open)
            self.open, self.size, self.scripts = [], 0, self.scripts + 1


# The files.


def _describe_run(run: BrowsedRun, pad: int | None, folder: Path) -> dict[str, Any]:
    """The facts of a run that the pages need; its report by an address relative to the site."""
    report = run.report and quote(Path(os.path.relpath(run.report, folder.absolute())).as_posix())
    pipeline, _, run_id = run.name.partition("/")
    kind, _, task = pipeline.partition("_")
    made_in = {entry.get("env") for entry in read_commands(run.folder)[-1:]} - {"local"}
    env = next(iter(made_in), None)
    commands = {name: suggest_command(f"{name}_{task}", run_id, env=env) for name in ("score", "fork")}
    return {
        "settings": run.settings,
        "pad": pad,
        "report": report,
        "ablations": describe_ablations(run.evaluation),
        **(commands if kind == "train" and task in TASKS else dict.fromkeys(commands)),
    }


def describe_ablations(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Losses of a policy's evaluation by kind of prompt when the images lose their content.

    Returns:
        One entry per policy, mode and breakdown: `policy`, `evaluated` (its checkpoint), `mode`, `by`, `names` of what
        was compared, the images as they are first, and `lines` with a kind and (solved, episodes) per name; [] without
        such an evaluation.
    """
    summary = evaluation or {}
    found = []
    rows = {(row["policy"], row["mode"]): row for row in summary.get("rows") or [] if row.get("episodes")}
    for (policy, mode), row in rows.items():
        ablated = {name: rows[f"{policy}_{name}", mode] for name in _ABLATIONS if (f"{policy}_{name}", mode) in rows}
        for breakdown in task_or_plain(summary.get("task")).breakdowns if ablated else ():
            cells = [breakdown.cells(one) for one in (row, *ablated.values())]
            kinds = [kind for kind in cells[0] if all(kind in one for one in cells)]
            lines = [(str(kind), [(one[kind]["solved"], one[kind]["episodes"]) for one in cells]) for kind in kinds]
            entry = {
                "policy": policy,
                "evaluated": describe_policy(summary, policy),
                "mode": mode,
                "by": breakdown.heading,
                "names": ["images", *ablated],
                "lines": lines,
            }
            found += [entry] if lines else []
    return found


def _describe_task(name: str, index: pa.Table) -> dict[str, Any]:
    """Words of a task for its pages; where no prompt has a difficulty, the task's own word for it says nothing."""
    task = task_or_plain(name)
    words, report = task.words, task.report
    known = index.filter(pc.equal(index["task"], name))["difficulty"]
    return {
        "title": task.title,
        "unit": words.unit,
        "units": words.units,
        "solved": words.solved,
        "cluster": report.cluster,
        "unsolved": words.unsolved,
        "difficulty": report.difficulty if known.null_count < len(known) else TaskReport.difficulty,
        "no_action": report.no_action,
    }


def _write_script(folder: Path, name: str, value: Any) -> None:
    path = folder / "data" / f"{name}.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"put('%s','%s');\n" % (name.encode(), as_script_text(value)))


def as_script_text(value: Any) -> bytes:
    """JSON as the inside of a JavaScript string in single quotes, which no character of it can end; UTF-8.

    Parsing a string as JSON takes a browser a third of the time of parsing the same as a program.
    """
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).replace(b"\\", b"\\\\").replace(b"'", b"\\'")
    # Line ends to old readers of scripts, and what could end or open an element if a script were put into a page.
    for sign, escaped in (("<", b"\\u003c"), ("\u2028", b"\\u2028"), ("\u2029", b"\\u2029")):
        text = text.replace(sign.encode(), escaped)
    return text
