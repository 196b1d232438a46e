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
from preflight.conftest import says
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


WEIGHTS, INDEX, SECOND = "model.safetensors", "model.safetensors.index.json", "model-00002-of-00002.safetensors"
LOST = b'"weight_map": {"lost.weight": "model-00001-of-00002.safetensors", '


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        # None takes the file away.
        ("config.json", None, "holds no config.json"),
        (WEIGHTS, None, "no model*.safetensors weights"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("preprocessor_config.json", None, "preprocessor_config.json is missing"),
        ("chat_template.jinja", None, "chat_template.jinja is missing"),
        (WEIGHTS, lambda content: content[:-100], "is no whole safetensors file"),
        (WEIGHTS, lambda content: b"<html>not found</html>" * 100, "is no whole safetensors file"),
        (SECOND, None, f"{SECOND} is missing"),
        (SECOND, lambda content: content[:-1], f"{SECOND} ("),
        (
            INDEX,
            lambda content: content.replace(b'"weight_map": {', LOST),
            f"1 tensors of {INDEX} are in no file, such as lost.weight",
        ),
        ("config.json", lambda content: content.replace(b'"qwen3_vl"', b'"llama"'), "holds a llama model"),
    ],
)
def test_unusable_folders(policy_folder: Path, name: str, change: Callable[[bytes], bytes] | None, text: str) -> None:
    if name in (INDEX, SECOND):
        shard_weights(policy_folder)
    path = policy_folder / name
    content = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(content))
    says(guard("model", "files", lambda: check_folder(policy_folder))[:1], "failure", text)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_whole_folder(policy_folder: Path, shards: int) -> None:
    if shards == 2:
        shard_weights(policy_folder)
        # Newer versions of the library keep the image processor in this file.
        (policy_folder / "preprocessor_config.json").rename(policy_folder / "processor_config.json")
    says(check_folder(policy_folder), "ok", f"{shards} weight file")


def test_shapes_of_tiny_and_folder_agree(policy_folder: Path, tiny_weights: int) -> None:
    given = {"source": "folder", "path": str(policy_folder)}
    _, tiny = inspect_model(PolicyOptions())
    found, folder = inspect_model(PolicyOptions.model_validate(given))
    assert {check.state for check in found} == {"ok"}
    assert tiny is not None and folder is not None
    assert (tiny.parameters, tiny.context, tiny.weight_bytes) == (tiny_weights, 32_768, 4 * tiny_weights)
    assert (folder.parameters, folder.context) == (tiny.parameters, tiny.context)
    half = inspect_model(PolicyOptions.model_validate({**given, "dtype": "bfloat16"}))[1]
    assert half is not None and half.weight_bytes == 2 * tiny_weights
    path = policy_folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_token_id": 7}))
    says(inspect_model(PolicyOptions.model_validate(given))[0][-1:], "failure", "the model expects 7")


HUB = PolicyOptions(source="hub", path="someone/tiny")


@pytest.fixture
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_hub_policy_is_taken_from_the_cache_or_refused(hub_cache: Path, policy_folder: Path) -> None:
    words = ("policy.path=someone/tiny", "policy.source=folder", "policy.source=tiny")
    says(guard("model", "policy", lambda: inspect_model(HUB)[0]), "failure", *words)
    snapshot = cache(hub_cache, policy_folder)
    found, shape = inspect_model(HUB)
    assert {check.state for check in found} == {"ok"}
    assert shape is not None and shape.folder == snapshot
    torn = snapshot / WEIGHTS
    torn.write_bytes(torn.read_bytes()[:-100])
    found, shape = inspect_model(HUB)
    assert (says(found, "failure").name, shape) == ("weights", None)


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
        ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        ("config.json", INDEX, "model-00001-of-00002.safetensors", "tokenizer.json"),
        ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json"),
    ],
)
def test_an_incomplete_copy_of_the_hub_is_fetched_by_the_run(
    hub_cache: Path, policy_folder: Path, tiny_weights: int, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    if WEIGHTS not in names:
        shard_weights(policy_folder)
    cache(hub_cache, policy_folder, names)
    says(inspect_model(HUB)[0][:1], "failure", "HF_HUB_OFFLINE")
    # Nobody answers there, so the configuration comes from the cache.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (files, size), shape = inspect_model(HUB)
    says([files], "warning", "not complete in the cache")
    assert files.way_out == "fetch it before: hf download someone/tiny"
    assert f"{tiny_weights:,} weights" in size.found
    assert shape is not None and (shape.folder, shape.encoding) == (None, None)


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("source", ["folder", "hub"])
def test_a_run_goes_on_with_its_own_copy(policy_folder: Path, source: Any) -> None:
    options = PolicyOptions(source=source, path="someone/gone")
    says(guard("model", "policy", lambda: inspect_model(options)[0]), "failure", "someone/gone")
    found, shape = inspect_model(options, policy_folder)
    assert {check.state for check in found} == {"ok"}
    assert shape is not None and shape.folder == policy_folder
