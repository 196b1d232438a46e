"""Policies of a finished run in plain transformers: docs/saved_policies.md, and what it promises."""

from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image

from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.sokoban import Board, render
from geo_sokoban_pipeline.envs.sokoban.data import BRIEF
from geo_sokoban_pipeline.policies.policy import Policy, load_policy, save_policy
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from runs import ROOT
from servers import PYTHON, need_environment

LEVELS = [
    Board.from_text("######\n#@   #\n# $  #\n#  . #\n#    #\n######"),
    Board.from_text("######\n#.   #\n#$ @ #\n#    #\n######"),
    Board.from_text("########\n#  @$ .#\n#      #\n########"),
]
QUESTION = BRIEF.replace("<image>", "")
PAGE = (ROOT / "docs" / "saved_policies.md").read_text(encoding="utf-8")
SHOW, DRAW, PROCESSOR = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def folder(finished_run):
    return finished_run.folder("06_models") / "final_policy"


@pytest.fixture(scope="module")
def place(finished_run, tmp_path_factory):
    """A project folder after a run, as the page takes it."""
    path = tmp_path_factory.mktemp("place")
    (path / "data").symlink_to(finished_run.root)
    return path


def messages(text=QUESTION):
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def engine_response(policy: Policy, level: Board, text: str = QUESTION, tokens: int = 16) -> list[int]:
    """Greedy response of this project's engine."""
    image = policy.reader.read(render(level, cell_px=16))
    ids = policy.codec.encode_prompt(messages(text), [image.grid])
    engine = TransformersEngine(policy)
    engine.submit([Request(0, ids, (image,), SamplingOptions(greedy=True), tokens, 0)])
    (result,) = engine.poll()
    engine.close()
    return result.token_ids.tolist()


def library_responses(folder, levels, text=QUESTION, tokens=16) -> list[list[int]]:
    """Greedy responses of `generate` to a batch, padded on the left; padding behind a response is cut off."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer, images = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    pixels = images([render(level, cell_px=16).convert("RGB") for level in levels], return_tensors="pt")
    rendered = tokenizer.apply_chat_template(messages(text), tokenize=False, add_generation_prompt=True)
    counts = [int(grid.prod()) // images.merge_size**2 for grid in pixels["image_grid_thw"]]
    texts = [rendered.replace(PAD, PAD * count) for count in counts]
    inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    kinds = (inputs["input_ids"] == tokenizer.convert_tokens_to_ids(PAD)).int()
    out = model.generate(**inputs, **pixels, mm_token_type_ids=kinds, max_new_tokens=tokens)
    width, end = inputs["input_ids"].shape[1], tokenizer.convert_tokens_to_ids("<|im_end|>")
    responses = []
    for row in out[:, width:].tolist():
        length = row.index(end) + 1 if end in row else len(row)
        assert set(row[length:]) <= {tokenizer.pad_token_id}  # nothing but padding behind the end of the turn
        responses.append(row[:length])
    return responses


def test_the_page_runs_as_it_stands(folder, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    exec(DRAW, {})
    assert Image.open("level.png").size == (96, 96)
    exec(SHOW, {})
    policy = load_policy(folder)
    response = policy.codec.decode(engine_response(policy, LEVELS[0]))
    assert capsys.readouterr().out.splitlines()[-1] == response
    assert re.fullmatch(r"<answer>(Up|Down|Left|Right)</answer><\|im_end\|>", response)


def test_greedy_generate_is_the_engine_alone_and_in_a_batch(folder):
    """Prompts of three lengths: the images take 9, 6 and 4 tokens."""
    policy = load_policy(folder)
    own = [engine_response(policy, level) for level in LEVELS]
    assert library_responses(folder, LEVELS) == own
    assert [library_responses(folder, [level])[0] for level in LEVELS] == own
    assert all(response[-1] == policy.codec.end_id for response in own)


def test_ids_that_the_project_bans_are_never_generated(tiny_policy, tmp_path):
    """A policy whose likeliest ids are vision marks and rows that pad the vocabulary."""
    from copy import deepcopy

    policy = Policy(deepcopy(tiny_policy.model), tiny_policy.tokenizer, tiny_policy.image_processor)
    with torch.no_grad():
        policy.model.lm_head.weight[policy.banned_ids] *= 50.0
    save_policy(policy, tmp_path)
    own = engine_response(policy, LEVELS[0], tokens=6)
    assert library_responses(tmp_path, LEVELS[:1], tokens=6) == [own]
    plain = json.loads((tmp_path / "generation_config.json").read_text()) | {"suppress_tokens": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(plain))
    assert set(library_responses(tmp_path, LEVELS[:1], tokens=6)[0]) & set(policy.banned_ids.tolist())


def test_the_saved_template_renders_a_conversation_as_the_project_does(folder):
    from transformers import AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(folder), load_policy(folder)
    image = policy.reader.read(render(LEVELS[0], cell_px=16))
    answer = {"role": "assistant", "content": "<answer>Down</answer>"}
    talk = [*messages(), answer, *messages("Next?")]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    count = image.token_count(policy.codec.merge_size)
    theirs = tokenizer(text.replace(PAD, PAD * count))["input_ids"]
    ours = [
        policy.codec.encode_prompt(messages(), [image.grid]),
        policy.codec.encode_text("<answer>Down</answer><|im_end|>"),
        policy.codec.encode_observation(messages("Next?")[0], [image.grid], separator=True),
    ]
    assert theirs == np.concatenate(ours).tolist()


@pytest.mark.parametrize("name", ["base_policy", "policy", "final_policy", "checkpoint"])
def test_every_policy_ends_pads_and_saves_again_to_the_same_bytes(finished_run, tmp_path, name):
    models = finished_run.folder("06_models")
    stored = sorted((models / "checkpoints").glob("iter=*"))[-1] if name == "checkpoint" else models / name
    policy = load_policy(stored)
    generation = json.loads((stored / "generation_config.json").read_text())
    assert generation["eos_token_id"] == policy.codec.end_id == policy.tokenizer.eos_token_id
    assert generation["pad_token_id"] == policy.tokenizer.pad_token_id
    assert json.loads((stored / "config.json").read_text())["text_config"]["eos_token_id"] == policy.codec.end_id
    save_policy(policy, tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (stored / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_the_stock_processor_in_an_environment_with_torchvision(folder, place, monkeypatch):
    """The page's last block in the servers' environment, which has torchvision."""
    need_environment()
    monkeypatch.chdir(place)
    exec(DRAW, {})
    head = "from transformers import AutoProcessor\n" + SHOW.partition("response = ")[0]
    script = f"{head}{PROCESSOR}print(response[0, inputs['input_ids'].shape[1] :].tolist())\n"
    done = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout.splitlines()[-1]) == engine_response(load_policy(folder), LEVELS[0])
