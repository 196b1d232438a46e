"""The browser of episodes: a static site that opens from a file, without a server and without a network.

A page from a file may load scripts but no other data. So data are scripts that hand JSON to the page: the index by
columns, which the list reads as a whole; episodes and images in chunks, read when a page shows them. A text of a policy
is only ever a string in that JSON, and the page shows strings as text.
"""

from __future__ import annotations

import base64
import hashlib
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
import pyarrow as pa
import pyarrow.compute as pc

from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.reporting.episodes import TokenTexts, describe_end
from geo_sokoban_pipeline.reporting.viewer.sources import BrowsedRun, NothingToBrowseError
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.arrow import one_array
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.schema import read_context
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn, table_to_trajectories

ENTRY = "index.html"
LIST_ROWS = 20_000  # rows of the list in one script
EPISODES_BYTES, IMAGES_BYTES = 400_000, 700_000  # about what a script holds, so that one is read in some 10 ms
_SHORTEST_RUN = 3  # equal tokens in a row from which on only their number is stored: image pads
_LEFT_OUT = ("run", "run_id", "partition", "row", "tag_counts")  # of the index; the site has them in other forms


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
    chunk, place, pads = _write_episodes(folder, runs, shown, images)
    images.close()
    columns = list_columns(index)
    columns["run"] = _words(pa.array([run.name for run in runs for _ in range(run.index.num_rows)]))
    columns["chunk"], columns["place"] = chunk, place
    chunks = _write_list(folder, columns, index.num_rows)
    names = index["task"].unique().to_pylist()
    site = {
        "rows": index.num_rows,
        "chunks": chunks,
        "columns": [(name, _kind(column)) for name, column in columns.items()],
        "runs": {run.name: _describe_run(run, pad, folder) for run, pad in zip(runs, pads, strict=True)},
        "tasks": {name: _describe_task(name) for name in names},
    }
    _write_script(folder, "site", site)
    _copy_assets(folder)
    return {"episodes": index.num_rows, "pages": int(shown.sum()), "images": images.count}


def choose_pages(index: pa.Table, pages: int | None) -> np.ndarray:
    """(rows,) bool: which episodes get a page: whole groups, evaluations before training, evenly spread.

    Args:
        pages: episodes at most, but always one group; None: all.
    """
    rows = index.num_rows
    if pages is None or pages >= rows:
        return np.ones(rows, bool)
    train = pc.equal(index["split"], "train").to_numpy(zero_copy_only=False)
    keys = [one_array(index, name).dictionary_encode().indices.to_numpy() for name in ("run", "run_id", "split")]
    keys += [index[name].to_numpy() for name in ("iteration", "group_index")]
    _, first, group, size = np.unique(
        np.stack(keys, 1), axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    group = group.reshape(-1)
    chosen = np.zeros(len(size), bool)
    for kind in (~train, train):
        groups = np.unique(group[kind])
        groups = groups[np.argsort(first[groups])]
        left = pages - int(size[chosen].sum())
        if not len(groups) or left <= 0:
            continue
        count = min(len(groups), max(1, int(left / size[groups].mean())))
        chosen[groups[np.linspace(0, len(groups) - 1, count).round().astype(int)]] = True
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
    return np.round(values, 6)


def _kind(column: Any) -> str:
    return "word" if isinstance(column, _Words) else "number"


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
) -> tuple[np.ndarray, np.ndarray, list[int | None]]:
    """Write the chosen episodes; script and place of each row's, −1 for none, and each run's id of image pads."""
    chunks, places = np.full(len(shown), -1, np.int32), np.full(len(shown), -1, np.int32)
    pads: list[int | None] = []
    number, start = 0, 0
    with track("writing episodes", int(shown.sum()), keep=False) as progress:
        for run in runs:
            pads.append(None)
            chunk = _Chunk(run.token_texts)
            chosen = np.flatnonzero(shown[start : start + run.index.num_rows])
            for partition, rows in _by_partition(run.index, chosen):
                table = read_trajectories(run.folder / f"{partition}.parquet")
                pads[-1] = read_context(table.schema).image_pad_id
                episodes = table_to_trajectories(table.take(run.index["row"].to_numpy()[rows]))
                for row, episode in zip(rows.tolist(), episodes, strict=True):
                    chunks[start + row], places[start + row] = number, len(chunk.episodes)
                    chunk.add(episode, images, run.scored.get(episode.trajectory_id))
                    if chunk.size > EPISODES_BYTES:
                        chunk.write(folder, number)
                        chunk, number = _Chunk(run.token_texts), number + 1
                progress.advance(len(rows))
            if chunk.episodes:
                chunk.write(folder, number)
                number += 1
            start += run.index.num_rows
    return chunks, places, pads


def _by_partition(index: pa.Table, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Partition and rows of the index, in its order."""
    encoded = one_array(index, "partition").dictionary_encode()
    names, of_row = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()[rows]
    for place, name in enumerate(names):
        if len(found := rows[of_row == place]):
            yield name, found


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

    def add(self, episode: Trajectory, images: _Images, scores: Sequence[Mapping[str, Any]] | None) -> None:
        """Add an episode.

        Args:
            scores: rows of `token_scores` of it; None: it was not scored.
        """
        report = task_or_plain(episode.task).report
        last = episode.turns[-1] if episode.turns else None
        end = (
            report.last_image(episode.images[-1], last)
            if episode.images and last and last.role == "assistant"
            else None
        )
        cuts = [0, *(turn.token_start for turn in episode.turns[1:]), len(episode.token_ids)]
        sampled = np.flatnonzero(episode.loss_mask)
        self.episodes.append(
            {
                "end": describe_end(episode),
                "images": [images.add(png) for png in episode.images],
                "last_image": None if end is None else images.add(end),
                "turns": [
                    self._describe_turn(turn, episode.token_ids[start:stop], report.read_action(turn))
                    for turn, (start, stop) in zip(episode.turns, pairwise(cuts), strict=True)
                ],
                "mask": _runs(sampled),
                **_channels(episode, sampled),
                "scores": scores and _describe_scores(scores, sampled),
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

    def write(self, folder: Path, number: int) -> None:
        """Write the script."""
        known = sorted({int(token) for span in self.spans for token in np.unique(np.frombuffer(span, np.int32))})
        texts = dict(zip(map(str, known), self.token_texts(known), strict=True)) if self.token_texts else {}
        spans = [_shorten(np.frombuffer(span, np.int32)) for span in self.spans]
        chunk = {"texts": list(self.texts), "tokens": texts, "spans": spans, "episodes": self.episodes}
        _write_script(folder, f"episodes/{number}", chunk)

    def _describe_turn(self, turn: Turn, ids: np.ndarray, action: str | None) -> dict[str, Any]:
        key = ids.astype(np.int32, copy=False).tobytes()
        if key not in self.spans:
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


def _channels(episode: Trajectory, sampled: np.ndarray) -> dict[str, Any]:
    """Log-probs of the sampled tokens, and how much those of trainer and reference policy differ from the engine's."""
    own = episode.rollout_log_probs[sampled].astype(np.float64)
    old, ref = episode.old_log_probs, episode.ref_log_probs
    gaps = None if old is None else old[sampled] - own
    return {
        "log_probs": np.round(own, 4),
        "gaps": None if gaps is None else np.round(gaps, 6),
        "widest": None if gaps is None or not len(gaps) else int(sampled[np.argmax(np.abs(gaps))]),
        "ref_gaps": None if ref is None else np.round(ref[sampled] - own, 4),
    }


def _describe_scores(scores: Sequence[Mapping[str, Any]], sampled: np.ndarray) -> dict[str, Any] | None:
    """Scores of an episode by channel, one value per sampled token; None: they are those of other tokens."""
    if [row["position"] for row in scores] != sampled.tolist():
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


@dataclass
class _Images:
    """Images of a site, each stored once, in scripts that hold several."""

    folder: Path
    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    size: int = 0
    scripts: int = 0

    @property
    def count(self) -> int:
        """How many different ones there are."""
        return len(self.places)

    def add(self, image: bytes) -> tuple[int, int]:
        """Script and place of an image."""
        key = hashlib.blake2b(image, digest_size=16).digest()
        if key not in self.places:
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
    """What the pages need of a run; its report by an address relative to the site."""
    report = run.report and quote(Path(os.path.relpath(run.report, folder.absolute())).as_posix())
    return {"settings": run.settings, "pad": pad, "report": report}


def _describe_task(name: str) -> dict[str, Any]:
    """Words of a task for its pages."""
    task = task_or_plain(name)
    words, report = task.words, task.report
    return {
        "title": task.title,
        "unit": words.unit,
        "units": words.units,
        "solved": words.solved,
        "unsolved": words.unsolved,
        "difficulty": report.difficulty,
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


def _copy_assets(folder: Path) -> None:
    (folder / "assets").mkdir()
    for asset in resources.files(__package__).joinpath("assets").iterdir():
        place = folder / ENTRY if asset.name == ENTRY else folder / "assets" / asset.name
        with resources.as_file(asset) as path:
            shutil.copyfile(path, place)
