"""Policy folders: stock files that load without this project, banned ids, and refusals that say what is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from geo_sokoban_pipeline.policies.policy import load_policy, save_policy
from geo_sokoban_pipeline.policies.tiny import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def folder(tiny_policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    save_policy(tiny_policy, path)
    return path


def test_plain_transformers_loads_it(tiny_policy, folder):
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    stored = dict(model.named_parameters())
    for name, tensor in tiny_policy.model.named_parameters():
        assert torch.equal(tensor, stored[name]), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nUp<|im_end|>"
    assert tokenizer(text)["input_ids"] == tiny_policy.tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("file", "kind", "name"),
    [
        ("preprocessor_config.json", "image_processor_type", "Qwen2VLImageProcessor"),
        ("video_preprocessor_config.json", "video_processor_type", "Qwen3VLVideoProcessor"),
    ],
)
def test_the_stock_processor_finds_its_files(folder, file, kind, name):
    """torchvision is not installed here, so `AutoProcessor` cannot run: its files and class names are checked."""
    import transformers

    values = json.loads((folder / file).read_text())
    assert values[kind] == name
    assert values["processor_class"] == "Qwen3VLProcessor"
    assert {name, values["processor_class"]} <= set(dir(transformers))
    expected = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    expected |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert {key: values[key] for key in expected} == expected
    assert set(values["size"]) == {"shortest_edge", "longest_edge"}


def test_the_folder_holds_plain_formats_alone(folder):
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert {path.suffix for path in folder.iterdir()} == {".json", ".jinja", ".safetensors"}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_vl"


def test_saved_and_loaded_are_the_same_policy(tiny_policy, folder):
    loaded = load_policy(folder)
    assert loaded.table_context == tiny_policy.table_context
    assert loaded.banned_ids.tolist() == tiny_policy.banned_ids.tolist()
    assert not loaded.model.training
    for (name, tensor), other in zip(tiny_policy.model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(tensor, other), name


def test_loading_in_another_type(folder):
    loaded = load_policy(folder, dtype="bfloat16")
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.bfloat16}


def test_banned_ids(tiny_policy):
    tokenizer, banned = tiny_policy.tokenizer, set(tiny_policy.banned_ids.tolist())
    marks = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
    rows = tiny_policy.model.config.text_config.vocab_size
    assert {tokenizer.convert_tokens_to_ids(mark) for mark in marks} <= banned
    assert set(range(len(tokenizer), rows)) <= banned
    assert len(banned) == len(marks) + rows - len(tokenizer)
    assert tiny_policy.codec.end_id not in banned
    assert np.all(np.diff(tiny_policy.banned_ids) > 0)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", r"no \S*\.safetensors"),
        ("preprocessor_config.json", r"preprocessor_config\.json is missing"),
    ],
)
def test_what_is_missing_is_named(folder, tmp_path, missing, message):
    for path in folder.iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(FileNotFoundError, match=message):
        load_policy(tmp_path)


def test_pickled_weights_are_never_read(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(FileNotFoundError, match="pickled weights .* never read"):
        load_policy(tmp_path)


def test_other_kinds_of_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="holds a bert model; only Qwen3-VL"):
        load_policy(tmp_path)
