"""The policies that a run begins with: its start, built, read or fetched from the hub, and a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.hub import fetch_policy
from geo_sokoban_pipeline.policies.lora import find_targets, share_policy
from geo_sokoban_pipeline.policies.policy import Policy, freeze_parameters, load_encoding, load_policy, save_policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.runs.policy_folder import (
    FolderWriter,
    PolicyFolder,
    check_policy_files,
    find_policy_folder,
)
from geo_sokoban_pipeline.runs.storage import Filled


def write_starting_policy(options: PolicyOptions, seed: int, entries: dict[str, Any]) -> FolderWriter:
    """Writer of the starting policy's folder.

    Args:
        seed: of the weights of a tiny policy.
        entries: of the manifest, beside the files.

    Raises:
        FileNotFoundError, ValueError: the folder holds no supported policy.
        PolicyUnavailableError: the hub cannot be reached.
    """
    if options.source == "tiny":
        policy = build_tiny_policy(options.tiny, seed)
        _check_trained(policy, options)
        return policy_writer(policy, entries)
    assert options.path is not None  # the options check it
    source = (
        find_policy_folder(options.path) if options.source == "folder" else fetch_policy(options.path, options.revision)
    )
    # Loaded once, so that a broken policy fails now and not after the warm start.
    _check_trained(load_policy(source, options.dtype, options.attention), options)
    return share_policy(source, entries)


def _check_trained(policy: Policy, options: PolicyOptions) -> None:
    """See that the parts that are frozen or adapted are there."""
    freeze_parameters(policy.model, options.freeze)
    if options.adapter is not None:
        find_targets(policy.model, options.adapter.targets)


def open_teacher(name: str, policy: Policy) -> PolicyFolder:
    """The policy that is imitated on one's own samples.

    Args:
        name: `grpo.advantage_args.teacher`: a folder, else a hub id.
        policy: whose samples the teacher scores.

    Raises:
        FileNotFoundError, ValueError: the folder holds no supported policy, or one with other tokens.
        PolicyUnavailableError: the hub cannot be reached.
    """
    folder = find_teacher(name)
    check_policy_files(folder)
    if load_encoding(folder).table_context.tokenizer_hash != policy.table_context.tokenizer_hash:
        raise ValueError(
            f"grpo.advantage_args.teacher={name}: its tokenizer is another one than the policy's, so its log-probs are "
            "of other tokens. Take a teacher with the same tokenizer."
        )
    return PolicyFolder(folder, {"files": {}})


def find_teacher(name: str) -> Path:
    """Folder of the teacher; one of the hub is fetched.

    Raises:
        PolicyUnavailableError: the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else fetch_policy(name, None)


def policy_writer(policy: Policy, entries: dict[str, Any]) -> FolderWriter:
    """Writer of a policy that is in memory; the manifest records `entries`."""

    def write(folder: Path) -> Filled:
        return Filled(entries, save_policy(policy, folder))

    return write
