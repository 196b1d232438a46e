"""The starting policy of a run: built from a seed, read from a folder, or fetched from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.hub import fetch_policy
from geo_sokoban_pipeline.policies.policy import Policy, freeze_parameters, load_policy, save_policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.runs.policy_folder import FolderWriter, find_policy_folder, link_policy
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
        freeze_parameters(policy.model, options.freeze)
        return policy_writer(policy, entries)
    assert options.path is not None  # the options check it
    source = (
        find_policy_folder(options.path) if options.source == "folder" else fetch_policy(options.path, options.revision)
    )
    # Loaded once, so that a broken policy fails now and not after the warm start.
    freeze_parameters(load_policy(source, options.dtype, options.attention).model, options.freeze)
    return link_policy(source, entries)


def policy_writer(policy: Policy, entries: dict[str, Any]) -> FolderWriter:
    """Writer of a policy that is in memory; the manifest records `entries`."""

    def write(folder: Path) -> Filled:
        return Filled(entries, save_policy(policy, folder))

    return write
