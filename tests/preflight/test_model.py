"""The starting policy before its weights are loaded: whole files are told from torn ones, sizes are known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from geo_sokoban_pipeline.envs.inspection import guard
from geo_sokoban_pipeline.preflight.model import check_folder, inspect_model
from task_options import PolicyOptions


def shard_weights(folder: Path) -> None:
    """Split the weights into two files with an index, as large policies come."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[:10], names[10:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def replace(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)


def lose_shard(folder: Path) -> None:
    shard_weights(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def truncate_shard(folder: Path) -> None:
    shard_weights(folder)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def index_more(folder: Path) -> None:
    shard_weights(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lost.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


def change_kind(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "llama"}))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (without("config.json"), "holds no config.json"),
        (without("model.safetensors"), "no model*.safetensors weights"),
        (without("tokenizer.json"), "tokenizer.json is missing"),
        (without("preprocessor_config.json"), "preprocessor_config.json is missing"),
        (without("chat_template.jinja"), "chat_template.jinja is missing"),
        (truncate, "bytes, "),
        (replace, "is no safetensors file"),
        (lose_shard, "model-00002-of-00002.safetensors is missing"),
        (truncate_shard, "model-00002-of-00002.safetensors has"),
        (index_more, "1 tensors of model.safetensors.index.json are in no file, such as lost.weight"),
        (change_kind, "holds a llama model"),
    ],
)
def test_unusable_folders(policy_folder: Path, spoil: Callable[[Path], None], text: str) -> None:
    spoil(policy_folder)
    found = guard("model", "files", lambda: check_folder(policy_folder))
    assert found[0].state == "failure"
    assert text in found[0].found


@pytest.mark.parametrize("shards", [1, 2])
def test_a_whole_folder(policy_folder: Path, shards: int) -> None:
    if shards == 2:
        shard_weights(policy_folder)
        # Newer versions of the library keep the image processor in this file.
        (policy_folder / "preprocessor_config.json").rename(policy_folder / "processor_config.json")
    (check,) = check_folder(policy_folder)
    assert check.state == "ok"
    assert ("1 weight file of" if shards == 1 else "2 weight files of") in check.found


def test_shapes_of_tiny_and_folder_agree(policy_folder: Path, tiny_weights: int) -> None:
    _, tiny = inspect_model(PolicyOptions())
    found, folder = inspect_model(PolicyOptions(source="folder", path=str(policy_folder)))
    assert {check.state for check in found} == {"ok"}
    assert tiny is not None and folder is not None
    assert (tiny.parameters, tiny.context, tiny.weight_bytes) == (tiny_weights, 32_768, 4 * tiny_weights)
    assert (folder.parameters, folder.context) == (tiny.parameters, tiny.context)
    half = inspect_model(PolicyOptions(source="folder", path=str(policy_folder), dtype="bfloat16"))[1]
    assert half is not None and half.weight_bytes == 2 * tiny_weights


def test_tokens_of_another_model_are_found(policy_folder: Path) -> None:
    path = policy_folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_token_id": 7}))
    found, _ = inspect_model(PolicyOptions(source="folder", path=str(policy_folder)))
    assert found[-1].state == "failure"
    assert "the model expects 7" in found[-1].found


@pytest.fixture
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub, and no network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_hub_policy_is_taken_from_the_cache_or_refused(hub_cache: Path, policy_folder: Path) -> None:
    options = PolicyOptions(source="hub", path="someone/tiny")
    (check,) = guard("model", "policy", lambda: inspect_model(options)[0])
    assert check.state == "failure"
    for words in ("policy.path=someone/tiny", "policy.source=folder", "policy.source=tiny"):
        assert words in check.found
    snapshot = cache(hub_cache, policy_folder)
    found, shape = inspect_model(options)
    assert {check.state for check in found} == {"ok"}
    assert shape is not None and shape.folder == snapshot


def cache(hub_cache: Path, folder: Path, names: tuple[str, ...] | None = None) -> Path:
    """Put files of a folder into the hub's cache as a snapshot of `someone/tiny`; None: all."""
    repository = hub_cache / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if names is None or path.name in names:
            shutil.copyfile(path, snapshot / path.name)
    return snapshot


@pytest.mark.parametrize(
    "names",
    [
        ("config.json",),
        ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer.json"),
        ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json"),
    ],
)
def test_an_incomplete_copy_of_the_hub_is_fetched_by_the_run(
    hub_cache: Path,
    policy_folder: Path,
    tiny_weights: int,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
) -> None:
    import huggingface_hub.constants

    if "model.safetensors" not in names:
        shard_weights(policy_folder)
    cache(hub_cache, policy_folder, names)
    options = PolicyOptions(source="hub", path="someone/tiny")
    (offline, _), _ = inspect_model(options)
    assert (offline.state, "HF_HUB_OFFLINE" in offline.found) == ("failure", True)
    # Nobody answers there, so the configuration comes from the cache.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    (files, size), shape = inspect_model(options)
    assert (files.state, "not complete in the cache" in files.found) == ("warning", True)
    assert files.way_out == "fetch it before: hf download someone/tiny"
    assert f"{tiny_weights:,} weights" in size.found
    assert shape is not None and (shape.folder, shape.encoding) == (None, None)


def test_a_torn_file_of_the_cache_is_a_failure(hub_cache: Path, policy_folder: Path) -> None:
    truncate(cache(hub_cache, policy_folder))
    (check,), shape = inspect_model(PolicyOptions(source="hub", path="someone/tiny"))
    assert (check.name, check.state, shape) == ("weights", "failure", None)


@pytest.mark.parametrize("source", ["folder", "hub"])
def test_a_run_goes_on_with_its_own_copy(hub_cache: Path, policy_folder: Path, source: Any) -> None:
    options = PolicyOptions(source=source, path="someone/gone")
    found, shape = inspect_model(options, policy_folder)
    assert {check.state for check in found} == {"ok"}
    assert shape is not None and shape.folder == policy_folder


def test_a_missing_folder_is_refused() -> None:
    options: Any = PolicyOptions(source="folder", path="/no/such/policy")
    (check,) = guard("model", "policy", lambda: inspect_model(options)[0])
    assert (check.state, "/no/such/policy: no such folder" in check.found) == ("failure", True)
