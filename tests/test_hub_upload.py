"""Uploads to the hub: the whole folder in one commit; what forbids one is named with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_sokoban_pipeline.hub import UploadError, check_upload, upload_folder
from local_hub import LocalHub, run_hub

NAME = "me/episodes"
FILES = {"README.md": b"---\nconfigs: []\n---\n", "tokens/train.parquet": b"PAR1" * 9000, "chat/train.parquet": b"PAR1"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with run_hub(tmp_path / "hub", monkeypatch) as found:
        yield found


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("private", "visibility"), [(True, "private"), (False, "public")])
def test_a_folder_is_one_commit_of_a_new_repository(
    hub: LocalHub, tmp_path: Path, private: bool, visibility: str
) -> None:
    address = upload_folder(fill(tmp_path / "export", FILES), NAME, private=private, replaced=[])
    assert address.startswith(f"{hub.address}/datasets/{NAME}/commit/") and hub.commits == {NAME: 1}
    assert hub.files(NAME) == FILES
    asked = hub.made[NAME]
    assert (asked["type"], asked["visibility"]) == ("dataset", visibility)


def test_files_of_an_earlier_upload_are_replaced_and_others_stay(hub: LocalHub, tmp_path: Path) -> None:
    upload_folder(fill(tmp_path / "first", {**FILES, "notes.md": b"by hand"}), NAME, private=True, replaced=[])
    changed = {"README.md": b"---\nconfigs: [1]\n---\n", "tokens/train.parquet": b"PAR1" * 8000}
    upload_folder(fill(tmp_path / "second", changed), NAME, private=True, replaced=["tokens/*", "chat/*"])
    assert hub.files(NAME) == {**changed, "notes.md": b"by hand"}


CASES = [
    ("no token", "me/episodes", r"push=me/episodes: there is no token of the hub\. Set HF_TOKEN .*hf auth login"),
    ("offline", "me/episodes", r"push=me/episodes: HF_HUB_OFFLINE forbids the network"),
    ("name", "me/a/b", r"push=me/a/b: .*<user or organisation>/<name>"),
]


@pytest.mark.parametrize(("case", "name", "message"), CASES, ids=[case for case, _, _ in CASES])
def test_what_forbids_an_upload_is_named(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, name: str, message: str
) -> None:
    import huggingface_hub.constants

    check_upload(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", case == "offline")
    if case == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UploadError, match=message):
        check_upload(name)
    assert not hub.made


@pytest.mark.parametrize("case", ["no network", "refused"])
def test_a_failed_upload_names_the_folder_and_the_command(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    import huggingface_hub.constants

    if case == "refused":
        monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    else:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UploadError, match=r"push=me/episodes: .*export was not uploaded.*`hf upload me/episodes .*export"
    ):
        upload_folder(fill(tmp_path / "export", FILES), NAME, private=True, replaced=[])
    assert hub.commits == {}
