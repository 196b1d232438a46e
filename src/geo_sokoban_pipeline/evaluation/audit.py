"""Audit of a stored run: the trajectory contract, token parity and the formats of its files.

Token parity needs a tokenizer, so the contract cannot check it: all ids that were not sampled equal the chat template's
rendering of the same messages, id for id, and every sampled span decodes to its turn's text.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geo_sokoban_pipeline.policies.chat import ChatCodec, Message, split_placeholders
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, read_manifest
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, Turn, table_to_trajectories

if TYPE_CHECKING:
    import pyarrow as pa

# Private-use characters: no template, prompt or response contains them.
_OPEN, _CLOSE = "\ue000", "\ue001"


class AuditError(RuntimeError):
    """An audit has findings; the text names the number and the first one."""


@dataclass(frozen=True)
class AuditCheck:
    """One check of one thing.

    Attributes:
        check: `contract`, `token parity`, `digests` or `files`.
        subject: the catalog entry, or the folder.
        checked: how many episodes, checkpoints or files.
        findings: one line each; empty without findings.
    """

    check: str
    subject: str
    checked: int
    findings: tuple[str, ...] = ()


def audit_run(
    trajectories: Mapping[str, Mapping[str, Callable[[], pa.Table]]],
    codec: ChatCodec,
    checkpoints: Mapping[str, Path],
    folders: Mapping[str, Path],
    *,
    turn_separator: bool,
) -> dict[str, Any]:
    """Audit the stored files of a run; changes nothing.

    Args:
        trajectories: by the name of their catalog entry: {partition: callable that reads it}.
        codec: chat encoding of the run's policy.
        checkpoints: their folders; every file is compared with the digest in its manifest.
        folders: of the run, by name; every file below them is opened by its format's reader.
        turn_separator: as in `check_token_parity`.

    Returns:
        JSON values: `checks`, the fields of `AuditCheck`, and `findings`, their number.
    """
    checks: list[AuditCheck] = []
    for entry, parts in trajectories.items():
        checks += _audit_trajectories(entry, parts, codec, turn_separator)
    damaged = [f"{name}: {reason}" for name, folder in checkpoints.items() if (reason := _damage(folder)) is not None]
    checks.append(AuditCheck("digests", "checkpoints", len(checkpoints), tuple(damaged)))
    for name, folder in folders.items():
        checks.append(AuditCheck("files", name, sum(1 for _ in _files(folder)), tuple(audit_files(folder))))
    return {"checks": [asdict(check) for check in checks], "findings": sum(len(check.findings) for check in checks)}


def _audit_trajectories(
    entry: str, parts: Mapping[str, Callable[[], pa.Table]], codec: ChatCodec, turn_separator: bool
) -> list[AuditCheck]:
    broken: list[str] = []
    unequal: list[str] = []
    episodes = compared = 0
    for name, read in parts.items():  # one table at a time: a run may not fit in memory
        try:
            table = read()
            episodes += table.num_rows
            validate_trajectories(table)
        except Exception as error:  # noqa: BLE001 - every error of reading is a finding
            broken.append(f"{name}: {error}")
            continue
        stored = table_to_trajectories(table)
        compared += len(stored)
        errors = check_token_parity(stored, codec, turn_separator=turn_separator)
        unequal += [f"{name}: {error.trajectory_id}, turn {error.turn}: {error.problem}" for error in errors]
    return [
        AuditCheck("contract", entry, episodes, tuple(broken)),
        AuditCheck("token parity", entry, compared, tuple(unequal)),
    ]


def _damage(folder: Path) -> str | None:
    try:
        manifest = read_manifest(folder)
    except CorruptFolderError as error:
        return str(error)
    return "it has no manifest" if manifest is None else None


def judge_audit(audit: Mapping[str, Any]) -> None:
    """Raise where an audit has findings.

    Raises:
        AuditError: names the run, the number of findings and the first one.
    """
    if audit["findings"]:
        check = next(check for check in audit["checks"] if check["findings"])
        raise AuditError(
            f"{audit['run']}/{audit['run_id']}: {audit['findings']} finding(s); first, {check['check']} of "
            f"{check['subject']}: {check['findings'][0]}"
        )


@dataclass(frozen=True)
class ParityError:
    """One difference between stored tokens and the template.

    Attributes:
        trajectory_id: of the episode.
        turn: number of the turn in `turns`.
        problem: what differs, with both sides.
    """

    trajectory_id: str
    turn: int
    problem: str


def check_token_parity(
    trajectories: Sequence[Trajectory], codec: ChatCodec, *, turn_separator: bool = True
) -> list[ParityError]:
    """Compare episodes with the chat template.

    Args:
        codec: chat encoding of the policy that sampled them.
        turn_separator: whether the separator after a response's end token was written; `slime_exact` leaves it out.

    Returns:
        One entry per turn that differs; empty where all is equal.
    """
    return [error for episode in trajectories for error in _check_episode(episode, codec, turn_separator)]


def rendered_pieces(turns: Sequence[Turn], codec: ChatCodec) -> list[str]:
    """Text of the template around the responses: before the first one, between two, and after the last one.

    The end token of a response belongs to the response. A template that rewrites earlier responses renders the whole
    conversation differently from what the policy saw; then each piece is rendered as it was appended.
    """
    if codec.rewrites_history:
        later = [_message(turn) for turn in turns if turn.role != "assistant"]
        return [codec.render(later[:1]), *map(codec.render_observation, later[1:])]
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            messages.append({"role": "assistant", "content": f"{_OPEN}{number}{_CLOSE}"})
        else:
            messages.append(_message(turn))
    asks = turns[-1].role != "assistant"
    text = codec.render(messages, generation_prompt=asks)
    end = codec.decode([codec.end_id])
    pieces: list[str] = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            piece, _, text = text.partition(f"{_OPEN}{number}{_CLOSE}")
            pieces.append(piece)
            text = text.removeprefix(end)
    return [*pieces, text]


def _message(turn: Turn) -> Message:
    images = [{"type": "image"} for _ in turn.image_indices]
    content = split_placeholders(turn.text, images) if images else [{"type": "text", "text": turn.text}]
    return {"role": turn.role, "content": content}


def _check_episode(episode: Trajectory, codec: ChatCodec, turn_separator: bool) -> list[ParityError]:
    errors: list[ParityError] = []
    if not episode.turns:  # it failed before its prompt was encoded
        return errors
    pieces = iter(rendered_pieces(episode.turns, codec))
    first = True
    for number, turn in enumerate(episode.turns):
        stored = episode.token_ids[turn.token_start : turn.token_end]
        if turn.role == "assistant":
            expected_text = codec.decode_response(stored)
            if expected_text != turn.text:
                errors.append(_difference(episode, number, "response text", turn.text, expected_text))
            continue
        grids = [episode.image_grid_thw[index] for index in turn.image_indices]
        expected = codec.expand(codec.encode_text(next(pieces)), grids)
        if not first and not turn_separator:
            expected = expected[len(codec.separator_ids) :]
        first = False
        if not np.array_equal(stored, expected):
            errors.append(_difference(episode, number, "ids", stored.tolist(), expected.tolist()))
    return errors


def _difference(episode: Trajectory, turn: int, what: str, stored: object, expected: object) -> ParityError:
    return ParityError(episode.trajectory_id, turn, f"{what}: stored {stored!r}, expected {expected!r}")


# Audit of a run's files: only formats from an allow-list, each one opened by its reader.


def _read_parquet(path: Path) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for _ in file.iter_batches(batch_size=256):
            pass


def _read_safetensors(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        file.keys()


def _read_image(path: Path) -> None:
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as image:
        image.load()


def _read_text(path: Path) -> None:
    path.read_text(encoding="utf-8")


def _read_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _read_json_lines(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            json.loads(line)


def _read_database(path: Path) -> None:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        connection.close()


def _read_yaml(path: Path) -> None:
    import yaml

    yaml.safe_load(path.read_text(encoding="utf-8"))


READERS: dict[str, Callable[[Path], None]] = {
    ".parquet": _read_parquet,
    ".safetensors": _read_safetensors,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".png": _read_image,
    ".db": _read_database,
    ".yml": _read_yaml,
    ".yaml": _read_yaml,
    **dict.fromkeys((".html", ".txt", ".jinja", ".md", ".csv", ".svg", ".xsb", ".log", ".lock"), _read_text),
}
UNSUFFIXED = frozenset({".gitkeep"})


def audit_files(folder: Path) -> list[str]:
    """Findings on the files below a folder, sorted by path; an empty list is a clean folder.

    Args:
        folder: of a run, or of all data; includes hidden and temporary files.

    Returns:
        One line with the reason per file whose suffix is not in the allow-list, or that its reader refuses.
    """
    findings = []
    for path in sorted(_files(folder)):
        reason = _refusal(path)
        if reason is not None:
            findings.append(f"{path.relative_to(folder).as_posix()}: {reason}")
    return findings


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name not in UNSUFFIXED)


def _refusal(path: Path) -> str | None:
    reader = READERS.get(path.suffix)
    if reader is None:
        return f"suffix {path.suffix!r} is not in the allow-list"
    try:
        reader(path)
    except Exception as error:  # noqa: BLE001 - each reader has its own error types; every one is a finding
        return f"its format's reader refuses it ({type(error).__name__}: {error})"
    return None
