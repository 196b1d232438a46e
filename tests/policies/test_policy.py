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


def test_saved_and_loaded_are_the_same_policy(tiny_policy, folder):
    """With plain transformers, too; the folder holds plain formats alone."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    plain, loaded = AutoModelForImageTextToText.from_pretrained(folder), load_policy(folder)
    assert type(plain).__name__ == "Qwen3VLForConditionalGeneration"
    own, theirs, ours = (dict(one.named_parameters()) for one in (tiny_policy.model, plain, loaded.model))
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name]) and torch.equal(tensor, ours[name]), name
    assert loaded.table_context == tiny_policy.table_context
    assert loaded.banned_ids.tolist() == tiny_policy.banned_ids.tolist() and not loaded.model.training
    tokenizer, text = AutoTokenizer.from_pretrained(folder), "<|im_start|>user\nUp<|im_end|>"
    assert tokenizer(text)["input_ids"] == tiny_policy.tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert {path.suffix for path in folder.iterdir()} == {".json", ".jinja", ".safetensors"}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_vl"


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
    expected = {kind: name, "processor_class": "Qwen3VLProcessor", "patch_size": 16, "merge_size": 2}
    expected |= {"temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert {key: values[key] for key in expected} == expected
    assert {name, values["processor_class"]} <= set(dir(transformers))
    assert set(values["size"]) == {"shortest_edge", "longest_edge"}


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
    ("kept", "added", "message"),
    [
        ("model.safetensors", {}, "no config.json"),
        ("config.json", {}, r"no \S*\.safetensors"),
        ("*.safetensors config.json token* chat*", {}, r"preprocessor_config\.json is missing"),
        ("config.json", {"pytorch_model.bin": "x"}, "pickled weights .* never read"),
        ("", {"config.json": '{"model_type": "bert"}'}, "holds a bert model; only Qwen3-VL"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, tmp_path, kept, added, message):
    for path in (path for pattern in kept.split() for path in folder.glob(pattern)):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, text in added.items():
        (tmp_path / name).write_text(text)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load_policy(tmp_path)
