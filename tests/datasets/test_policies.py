"""Policies: stored whole, opened only if every file is as written, queried without an error where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kedro.io import DatasetError

from geo_sokoban_pipeline.datasets import PolicyDataset, ResumableDataset
from geo_sokoban_pipeline.runs.policy_folder import write_policy
from geo_sokoban_pipeline.runs.storage import CorruptFolderError


def write(folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text("{}")
    (folder / "processor").mkdir()
    (folder / "processor" / "tokenizer.json").write_text('{"a": 1}')
    return {"source": "tiny", "seed": 3}


def write_list(folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text("[]")
    return {}


def state_of(path: Path) -> ResumableDataset:
    return ResumableDataset({"type": "geo_sokoban_pipeline.datasets.PolicyDataset", "path": str(path)})


@pytest.fixture
def policy(tmp_path: Path) -> PolicyDataset:
    dataset = PolicyDataset(str(tmp_path / "policy"))
    dataset.save(write)
    return dataset


def test_a_policy_is_stored_once_and_loaded(policy: PolicyDataset, tmp_path: Path) -> None:
    loaded = policy.load()
    assert policy.exists()
    assert (loaded.path, loaded.manifest["source"]) == (tmp_path / "policy", "tiny")
    assert (loaded.path / "processor" / "tokenizer.json").read_text() == '{"a": 1}'
    state = state_of(tmp_path / "policy")
    assert state.exists() and state.load().manifest == loaded.manifest
    for dataset, value, message in ((state, {}, "only reads"), (policy, "folder", "PolicyFolder or a writer")):
        with pytest.raises(DatasetError, match=message):
            dataset.save(value)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "policy").rglob("*")}
    policy.save(loaded)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "policy").rglob("*")} == before


@pytest.mark.parametrize("links", [True, False])
def test_other_folder_is_taken_over(
    links: bool, policy: PolicyDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    final = PolicyDataset(str(tmp_path / "final"))
    final.save(policy.load())
    assert final.load().manifest == policy.load().manifest
    assert (tmp_path / "final" / "config.json").samefile(tmp_path / "policy" / "config.json") is links
    final.save(write_list)
    assert (policy.load().path / "config.json").read_text() == "{}"
    assert (final.load().path / "config.json").read_text() == "[]"


def test_absent_policy(tmp_path: Path) -> None:
    policy = PolicyDataset(str(tmp_path / "none"))
    assert not policy.exists()
    with pytest.raises(DatasetError, match="holds no policy"):
        policy.load()
    assert state_of(tmp_path / "none").load() is None


def test_damage_is_named_and_not_taken_over(policy: PolicyDataset, tmp_path: Path) -> None:
    source = policy.load()
    (tmp_path / "policy" / "config.json").write_text("{ }")
    for dataset in (policy, state_of(tmp_path / "policy")):
        with pytest.raises(DatasetError, match=r"config\.json differs") as caught:
            dataset.load()
        assert isinstance(caught.value.__cause__, CorruptFolderError)
    with pytest.raises(CorruptFolderError):
        write_policy(tmp_path / "final", source)
    assert not (tmp_path / "final").exists()


def test_full_disk_keeps_the_old_policy(policy: PolicyDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_policy(tmp_path / "other", write_list)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("geo_sokoban_pipeline.runs.policy_folder.link_or_copy", full)
        with pytest.raises(DatasetError, match="policy: disk full, about 2 bytes needed"):
            policy.save(other)
    assert policy.load().manifest["source"] == "tiny"


def test_a_failed_replacement_keeps_the_old_policy(
    policy: PolicyDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rename = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target == tmp_path / "policy" and not path.name.endswith(".old.tmp"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        # Not every file system exchanges two folders in one step.
        patch.setattr("geo_sokoban_pipeline.runs.storage.exchange_folders", lambda first, second: False)
        with pytest.raises(OSError, match="Input/output error"):
            write_policy(tmp_path / "policy", write_list)
    assert policy.load().manifest["source"] == "tiny"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    write_policy(tmp_path / "policy", write_list)
    assert (policy.load().path / "config.json").read_text() == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("name", ["model-00002.safetensors", "processor/chat.json"])
def test_foreign_files_that_could_be_loaded_are_named(policy: PolicyDataset, name: str, tmp_path: Path) -> None:
    (tmp_path / "policy" / "notes.txt").write_text("{}")
    policy.load()
    (tmp_path / "policy" / name).write_text("{}")
    with pytest.raises(DatasetError, match=rf"{name} is not listed in .*manifest\.json. Take it away"):
        policy.load()
