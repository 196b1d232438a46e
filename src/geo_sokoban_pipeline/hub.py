"""Policies from the hub: fetched once into the hub's own cache, and a clear word where there is no network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


class PolicyUnavailableError(RuntimeError):
    """A policy can neither be fetched nor found in the cache."""


def fetch_config(name: str, revision: str | None) -> Path:
    """Local path of a hub policy's `config.json`: enough to tell whether there is such a policy, and of which kind.

    Raises:
        PolicyUnavailableError: as in `fetch_policy`.
    """
    from huggingface_hub import hf_hub_download

    with _explain(name):
        return Path(hf_hub_download(name, "config.json", revision=revision))


def fetch_policy(name: str, revision: str | None) -> Path:
    """Local folder of a hub policy; pickled weights are never fetched.

    Raises:
        PolicyUnavailableError: unknown name, no access, or no network and nothing cached; says what to set.
    """
    from huggingface_hub import snapshot_download

    with _explain(name):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))


def find_cached(name: str, revision: str | None) -> Path | None:
    """Folder of a hub policy whose files are in the cache; None where they are not. No network is used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


@contextmanager
def _explain(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise PolicyUnavailableError(
            f"policy.path={name}: not a local folder, and not to be had from the hub ({type(error).__name__}). "
            "Check the name, set HF_TOKEN for a gated model, or work offline: give a downloaded folder "
            "(policy.source=folder, policy.path=<folder>) or the policy built here (policy.source=tiny)."
        ) from error
