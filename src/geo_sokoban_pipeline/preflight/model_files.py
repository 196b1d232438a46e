"""The files of a policy folder, without loading a weight: every shard whole, tokenizer, template and processor there.

A safetensors file says in its header how long it must be, so a truncated download is found in milliseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.folders import check_policy_files
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.storage import CorruptFolderError, read_json

_GROUP = "model"
_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # bytes; the format's own limit


def check_folder(folder: Path) -> list[Check]:
    """Findings about a policy folder's files.

    Raises:
        FileNotFoundError, ValueError: no configuration or weights, or another kind of model.
        CorruptFolderError: a JSON file is torn.
    """
    check_policy_files(folder)
    found = [*_missing_files(folder), *_torn_weights(folder)]
    if found:
        return found
    shards = sorted(folder.glob("model*.safetensors"))
    size = sum(path.stat().st_size for path in shards)
    counted = f"{len(shards)} weight file{'' if len(shards) == 1 else 's'}"
    return [Check(_GROUP, "files", "ok", f"{folder}: {counted} of {size:,} bytes, all whole")]


def is_complete(folder: Path) -> bool:
    """Whether a folder has every file of a policy; what they hold is another question.

    Raises:
        CorruptFolderError: a JSON file is torn.
    """
    there = (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))
    return there and not _missing_files(folder)


def read_header(path: Path) -> dict[str, Any]:
    """Names, types and places of a safetensors file's tensors.

    Raises:
        CorruptFolderError: the file is shorter or longer than its header says, or has none.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_HEADER_LIMIT, size):
            raise CorruptFolderError(f"{path} is no safetensors file ({size} bytes); fetch it again.")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise CorruptFolderError(f"{path} has no readable header ({error}); fetch it again.") from error
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != 8 + length + end:
        raise CorruptFolderError(f"{path} has {size:,} bytes, {8 + length + end:,} expected; fetch it again.")
    return header


def _indexed(folder: Path) -> dict[str, str]:
    """File by tensor, where weights lie in several files."""
    index = folder / _INDEX
    named: dict[str, str] = read_json(index).get("weight_map", {}) if index.is_file() else {}
    return named


def _torn_weights(folder: Path) -> list[Check]:
    named = _indexed(folder)
    files = sorted(set(named.values())) or sorted(path.name for path in folder.glob("model*.safetensors"))
    there = [name for name in files if (folder / name).is_file()]
    found: list[Check] = []
    held: set[str] = set()
    for name in there:
        try:
            held |= set(read_header(folder / name))
        except CorruptFolderError as error:
            found.append(Check(_GROUP, "weights", "failure", str(error), "delete the file and fetch it again"))
    lost = sorted(set(named) - held)
    if lost and not found and there == files:
        text = f"{folder}: {len(lost)} tensors of {_INDEX} are in no file, such as {lost[0]}"
        found.append(Check(_GROUP, "weights", "failure", text, "fetch the folder again"))
    return found


def _missing_files(folder: Path) -> list[Check]:
    files = sorted(set(_indexed(folder).values()))
    found = [_missing(folder / name, f"listed in {_INDEX}") for name in files if not (folder / name).is_file()]
    if not files and any(folder.glob("model-*-of-*.safetensors")):
        found.append(_missing(folder / _INDEX, "the index of the weights"))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        found.append(_missing(folder / "tokenizer.json", "the tokenizer"))
    if not (folder / "preprocessor_config.json").is_file():
        found.append(_missing(folder / "preprocessor_config.json", "the image processor"))
    settings = folder / "tokenizer_config.json"
    template = settings.is_file() and read_json(settings).get("chat_template")
    if not template and not any((folder / f"chat_template.{end}").is_file() for end in ("jinja", "json")):
        found.append(_missing(folder / "chat_template.jinja", "the chat template"))
    return found


def _missing(path: Path, what: str) -> Check:
    return Check(_GROUP, "files", "failure", f"{path} is missing ({what})", "copy or fetch the whole folder")
