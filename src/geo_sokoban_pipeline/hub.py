"""The hub: policies are fetched once into its own cache, folders are uploaded on request alone.

Where there is no network, no token or no access, the error names the setting and the way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE = 10.0  # seconds for a request that only looks
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

    with suppress(LocalEntryNotFoundError, HFValidationError):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES), local_files_only=True))
    return None


def find_no_dataset(name: str, revision: str | None) -> str | None:
    """Why the hub's data set of this name cannot be had, by one request, or offline by the caches.

    Returns:
        None: it can be had, or this cannot be told now, since the hub does not answer.
    """
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    from datasets import config

    if constants.HF_HUB_OFFLINE:
        owner, slash, plain = name.rpartition("/")
        cached = Path(config.HF_DATASETS_CACHE) / f"{owner}{'___' if slash else ''}{camelcase_to_snakecase(plain)}"
        fetched = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
        return (
            None if fetched.is_dir() or cached.is_dir() else "HF_HUB_OFFLINE forbids the network, and no cache has it"
        )
    failures: tuple[type[Exception], ...] = (HfHubHTTPError, *HfHubHTTPError.__bases__, OSError)
    try:
        HfApi().dataset_info(name, revision=revision, timeout=_PATIENCE)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        return f"the hub has no such data set ({type(error).__name__})"
    except failures:
        return None
    return None


class UploadError(RuntimeError):
    """A folder cannot be uploaded; the message says why, and how to do it later."""


def check_upload(name: str) -> None:
    """See that an upload is possible as far as this machine knows: a valid name, a token, a network that may be used.

    Args:
        name: of a dataset repository, such as `me/episodes`.

    Raises:
        UploadError: it is not.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UploadError(f"push={name}: {error} Give <user or organisation>/<name>.") from error
    if constants.HF_HUB_OFFLINE:
        raise UploadError(f"push={name}: HF_HUB_OFFLINE forbids the network. Unset it, or leave push null.")
    if get_token() is None:
        raise UploadError(
            f"push={name}: there is no token of the hub. Set HF_TOKEN to one that may write, or call `hf auth login`; "
            "push=null uploads nothing."
        )


def upload_folder(folder: Path, name: str, *, private: bool, replaced: Sequence[str]) -> str:
    """Upload a folder as a dataset in one commit; the repository is made where there is none.

    Args:
        name: of the repository.
        private: of a repository that is made; one that exists stays as it is.
        replaced: patterns of files of the repository that are deleted where the folder does not have them.

    Returns:
        Address of the commit.

    Raises:
        UploadError: no network, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    # The error of its HTTP library, whichever that is, and OSError; of the storage's own client the last two.
    failures: tuple[type[Exception], ...] = (HfHubHTTPError, *HfHubHTTPError.__bases__, RuntimeError, ValueError)
    try:
        api.create_repo(name, repo_type="dataset", private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            repo_type="dataset",
            commit_message="Episodes of a policy",
            delete_patterns=list(replaced),
        )
    except failures as error:
        said = " ".join(str(error).split())
        raise UploadError(
            f"push={name}: {folder} was not uploaded to {api.endpoint} ({type(error).__name__}: {said}). "
            f"The folder is complete: `hf upload {name} {folder} --repo-type=dataset` uploads it later."
        ) from error
    return str(commit.commit_url)


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
