"""Folders of models: a policy in Hugging Face layout whose manifest says what is in it and where it came from.

A policy folder exists once its manifest does. Files in it are never edited in place, so a copy may share them by hard
link. Nothing here needs Kedro: training code hands such folders on, the datasets store them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.runs.fingerprint import hash_files
from geo_sokoban_pipeline.runs.storage import MANIFEST, Filled, read_json, read_manifest, verify_files, write_folder

FolderWriter = Callable[[Path], dict[str, Any] | Filled]

# Files of a checkpoint beside the policy; only a trainer that continues from it needs them.
_TRAINER_FILES = ("optimizer*.safetensors*", "trainer_state.json")
_POLICY_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt")
ADAPTER_CONFIG = "adapter_config.json"
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True)
class PolicyFolder:
    """A sealed policy folder.

    Attributes:
        path: the folder; `from_pretrained(path)` loads it.
        manifest: the writer's entries plus `files`, {relative name: {"bytes", "blake2b"}}.
    """

    path: Path
    manifest: dict[str, Any]


def open_policy(path: Path) -> PolicyFolder:
    """The policy at a path, all its files compared with its manifest.

    Raises:
        FileNotFoundError: no sealed folder there.
        CorruptFolderError: a file is missing, truncated or altered; the message names it.
    """
    if (manifest := read_manifest(path)) is None:
        raise FileNotFoundError(f"{path} holds no policy: there is no {MANIFEST}. Run the pipeline that makes it.")
    return PolicyFolder(path, manifest)


def check_policy_files(folder: Path) -> None:
    """See that a folder holds a policy of a kind that is supported, without loading it or importing anything heavy.

    Raises:
        FileNotFoundError: no configuration, or no safetensors weights; those of an adapter are in another folder.
        ValueError: another kind of model.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so it is no policy folder.")
    check_model_type(str(folder), folder / "config.json")
    if not list((find_base(folder) or folder).glob("model*.safetensors")):
        raise FileNotFoundError(
            f"{folder} holds no model*.safetensors weights; pickled weights (*.bin, *.pt) are never read. "
            "Download the safetensors files, or save the model once with save_pretrained."
        )


def find_base(folder: Path) -> Path | None:
    """Folder of the policy that the adapter of a folder belongs to; None: the folder has no adapter.

    Raises:
        FileNotFoundError: it is neither where it was nor, in a run that was moved, beside the checkpoints.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    named = Path(read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"])
    for base in (named, folder.resolve().parents[1] / named.name):
        if (base / "config.json").is_file():
            return base
    raise FileNotFoundError(
        f"{folder} holds an adapter of the policy {named}, which does not exist; bring it back, or take the run's "
        "final policy, which is whole."
    )


def find_policy_folder(path: str, section: str = "policy") -> Path:
    """The local folder that `<section>.path` names.

    Raises:
        FileNotFoundError: there is none; the message has the choices.
    """
    if not (folder := Path(path).expanduser()).is_dir():
        raise FileNotFoundError(
            f"{section}.path={path}: no such folder. Give the folder of a downloaded Qwen3-VL policy, its hub id with "
            f"{section}.source=hub, or {section}.source=tiny for the one built here."
        )
    return folder


def check_model_type(name: str, config: Path) -> None:
    """See that a configuration file is of a Qwen3-VL model.

    Args:
        name: of the policy, for the message.

    Raises:
        ValueError: it is not.
    """
    content = read_json(config)
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind not in MODEL_TYPES:
        raise ValueError(f"{name} holds a {kind} model; only Qwen3-VL models ({', '.join(MODEL_TYPES)}) are supported.")


def write_policy(path: Path, source: PolicyFolder | FolderWriter) -> PolicyFolder:
    """Store a policy at a path, atomically; an older one there is replaced.

    Args:
        source: a sealed folder, linked or copied file by file (nothing happens if it is already at `path`), or a
            function that fills the folder it is given and returns the manifest's own entries.

    Raises:
        CorruptFolderError: the source's files do not match its manifest.
        OSError: no space, read-only folder; the old policy is then still there.
    """
    if not isinstance(source, PolicyFolder):
        return PolicyFolder(path, write_folder(path, source))
    if source.path.resolve() == path.resolve():
        return open_policy(path)
    verify_files(source.path, source.manifest["files"])

    def copy(folder: Path) -> dict[str, Any]:
        for name in source.manifest["files"]:
            link_or_copy(source.path / name, folder / name)
        return {name: value for name, value in source.manifest.items() if name != "files"}

    return PolicyFolder(path, write_folder(path, copy))


def identify_policy(policy: PolicyFolder) -> dict[str, Any]:
    """Which policy a result was made with.

    Returns:
        `iteration` of its checkpoint (−1: the policy that GRPO started from; None: it is no checkpoint),
        `policy_version` (None: not known), and `hash` of the files that it is loaded from: a checkpoint and the final
        policy that was made of it have the same, unless an adapter was merged.
    """
    files = {
        name: entry
        for name, entry in policy.manifest["files"].items()
        if _is_loaded(Path(name)) and Path(name).name != ADAPTER_CONFIG  # which names a place on the disk
    }
    return {
        "iteration": policy.manifest.get("iteration"),
        "policy_version": policy.manifest.get("policy_version"),
        "hash": hash_files(files),
    }


def _is_loaded(path: Path) -> bool:
    """Whether a policy is loaded from a file of its folder; else it is its manifest, or of its trainer."""
    apart = path.name == MANIFEST or any(path.match(pattern) for pattern in _TRAINER_FILES)
    return path.suffix in _POLICY_SUFFIXES and not apart


def link_policy(source: Path, entries: Mapping[str, Any]) -> FolderWriter:
    """Writer of a folder that shares a policy's files, under a manifest of its own.

    Args:
        source: folder of the policy; of what lies there, only what a policy is loaded from is linked, nothing of its
            trainer.
        entries: of the manifest.
    """

    def write(folder: Path) -> dict[str, Any]:
        for path in sorted(source.rglob("*")):
            if _is_loaded(path) and path.is_file():
                link_or_copy(path.resolve(), folder / path.relative_to(source))
        return dict(entries)

    return write


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system or a border between two of them forbids links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
