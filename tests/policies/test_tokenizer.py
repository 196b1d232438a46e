"""The tiny policy's tokenizer: four tokens a move, one vocabulary on every machine."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.policies.tiny import QWEN_SPECIAL_TOKENS, build_tokenizer

TOKENIZER = build_tokenizer(texts="sokoban")
MOVES = ["Up", "Down", "Left", "Right", "up", "down", "left", "right"]


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_moves_and_marks_are_whole_tokens():
    for move in MOVES:
        ids = encode(f"<answer>{move}</answer><|im_end|>")
        assert TOKENIZER.convert_ids_to_tokens(ids) == ["<answer>", move, "</answer>", "<|im_end|>"]
    for token in (*QWEN_SPECIAL_TOKENS, *SOKOBAN.vocabulary.markup):
        assert encode(f"a{token}b")[1:-1] == [TOKENIZER.convert_tokens_to_ids(token)]
    ids = encode("<|im_start|><answer>Up</answer><|vision_start|><|image_pad|><|vision_end|><|im_end|>")
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<answer>Up</answer>", "those of Qwen alone are special"
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_size_and_bytes():
    # 384 BPE entries, 14 special tokens, 6 of markup; all bytes are among them, so no text is unknown.
    assert len(TOKENIZER) == 384 + len(QWEN_SPECIAL_TOKENS) + len(SOKOBAN.vocabulary.markup)
    assert len(build_tokenizer(300, "sokoban")) == 300 + len(QWEN_SPECIAL_TOKENS) + len(SOKOBAN.vocabulary.markup)
    assert TOKENIZER.unk_token_id not in encode("日本 🙂 \x00 ñ")


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_text_survives_the_round_trip(text):
    ids = encode(text)
    # The tokenizer normalises to NFC, as Qwen's does; what it gives back is a fixed point.
    once = TOKENIZER.decode(ids, clean_up_tokenization_spaces=False)
    assert encode(once) == ids
    if text.isascii():
        assert once == text


GEOMETRY = build_tokenizer(texts="geo3k")
CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "61"}}</tool_call> \\boxed{61}'


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("\\boxed{61}<|im_end|>", 5),
        ("\\boxed{30.5}<|im_end|>", 7),
        (f"{CALL}<|im_end|>", 12),
        ("linear pair a=46 180 - a \\boxed{134}", 17),
        ("Find $x$.", 4),
        ("wrong, try again", 4),
        ("wrong, last chance", 4),
        ("correct", 1),
        ("assistant", 1),
    ],
)
def test_geometry_in_few_tokens(text, tokens):
    ids = GEOMETRY(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == tokens
    assert GEOMETRY.decode(ids) == text


def test_each_task_has_a_vocabulary_of_its_own():
    """Sokoban's is the one that stored policies were trained with, whatever the hash seed of the process."""
    words = sorted(TOKENIZER.get_vocab(), key=TOKENIZER.get_vocab().get)
    merges = [" ".join(pair) for pair in json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]["merges"]]
    hashes = [hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] for texts in (words, merges)]
    assert hashes == ["a3fb40d95707e159", "b47445742b51e10d"]
    assert "\\boxed{" in GEOMETRY.get_vocab() and "\\boxed{" not in words
