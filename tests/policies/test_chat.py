"""Chat encoding: prompts are the template's rendering, observations are its differences, images are counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.policies.chat import ChatCodec, join_placeholders, split_placeholders
from geo_sokoban_pipeline.policies.tiny import build_tokenizer

GRID = (1, 6, 4)
PADS = GRID[1] * GRID[2] // 4
TOOLS = [{"type": "function", "function": {"name": "calc_score", "parameters": {"type": "object"}}}]
# A template of a Thinking model in small: it writes a default system prompt and strips earlier thoughts.
REWRITING = """\
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- set text = message.content if message.content is string
else (message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join) -%}
{%- set text = text.split('</think>')[-1] if message.role == 'assistant' else text -%}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def tiny():
    return ChatCodec(build_tokenizer(texts="sokoban"), merge_size=2)


@pytest.fixture(scope="module")
def qwen(shared_data):
    """Qwen3-VL's own tokenizer and template."""
    from transformers import AutoTokenizer

    folder = shared_data / "qwen3_vl_processor"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return ChatCodec(tokenizer, merge_size=2)


@pytest.fixture(params=["tiny", "qwen"])
def codec(request):
    return request.getfixturevalue(request.param)


def user(*items):
    content = [{"type": "image"} if item is None else {"type": "text", "text": item} for item in items]
    return {"role": "user", "content": content}


def test_prompt_is_the_rendering(codec):
    ids = codec.encode_prompt([user("A", None, "B")], [GRID])
    pads = "<|image_pad|>" * PADS
    expected = f"<|im_start|>user\nA<|vision_start|>{pads}<|vision_end|>B<|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode(ids) == expected
    assert (ids == codec.image_pad_id).sum() == PADS and ids.dtype == np.int32
    ids = codec.encode_prompt([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], [])
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode(ids) == expected


def test_observation_is_the_delta_and_without_separator_one_newline_is_missing(codec):
    """Worked example 13.3: ChatML prompt + `A<|im_end|>` + delta."""
    prompt, response = codec.encode_prompt([user("P")], []), codec.encode_text("A<|im_end|>")
    full = codec.render([user("P"), {"role": "assistant", "content": "A"}, user("OBS")])
    for separator, newline, whole in (
        (True, "\n", full),
        (False, "", full.replace("A<|im_end|>\n", "A<|im_end|>")),
    ):
        ids = codec.encode_observation(user("OBS"), [], separator=separator)
        assert codec.decode(ids) == f"{newline}<|im_start|>user\nOBS<|im_end|>\n<|im_start|>assistant\n"
        assert codec.decode(np.concatenate([prompt, response, ids])) == whole


@given(
    texts=st.lists(st.text("ab \n.Next?", max_size=8), min_size=1, max_size=4),
    images=st.lists(st.booleans(), min_size=4, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_deltas_add_up_to_the_full_rendering(tiny, texts, images):
    """Whatever was said, prompt + responses + deltas are the ids of the whole conversation rendered at once."""
    asked = [user(None, text) if image else user(text) for text, image in zip(texts, images, strict=False)]
    grids = [[GRID] if item["content"][0]["type"] == "image" else [] for item in asked]
    ids = [tiny.encode_prompt(asked[:1], grids[0])]
    messages = [asked[0]]
    for message, grid in zip(asked[1:], grids[1:], strict=True):
        messages += [{"role": "assistant", "content": "<answer>Up</answer>"}, message]
        response = tiny.encode_text("<answer>Up</answer><|im_end|>")
        ids += [response, tiny.encode_observation(message, grid, separator=True)]
    whole = tiny.expand(tiny.encode_text(tiny.render(messages)), [g for grid in grids for g in grid])
    assert np.concatenate(ids).tolist() == whole.tolist()


def test_a_template_that_rewrites_history_shifts_nothing(tiny):
    tokenizer = build_tokenizer(texts="sokoban")
    tokenizer.chat_template = REWRITING
    codec = ChatCodec(tokenizer, merge_size=2)
    prompt = codec.encode_prompt([user("P")], [])
    assert codec.decode(prompt).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nP")
    delta = codec.decode(codec.encode_observation(user("OBS"), [], separator=True))
    # No default system prompt creeps into the delta: the dummies have their own.
    assert delta == "\n<|im_start|>user\nOBS<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_tools_are_in_the_prompt_and_trimmed_from_the_delta(qwen):
    prompt = qwen.decode(qwen.encode_prompt([user("P")], [], tools=TOOLS))
    assert prompt.startswith("<|im_start|>system\n# Tools")
    assert '"name": "calc_score"' in prompt
    delta = qwen.encode_observation(user("OBS"), [], separator=True, tools=TOOLS)
    assert delta.tolist() == qwen.encode_observation(user("OBS"), [], separator=True).tolist()


def test_tool_calls_of_a_message_are_not_lost_to_the_cache(qwen):
    call = {"function": {"name": "calc_score", "arguments": {"answer": "5"}}}
    plain, calling = {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "A", "tool_calls": [call]}
    texts = [qwen.decode(qwen.encode_prompt([user("P"), message, user("Q")], [])) for message in (plain, calling)]
    assert "<tool_call>" not in texts[0]
    assert '<tool_call>\n{"name": "calc_score"' in texts[1]


def test_grids_must_match_the_images(codec):
    """A text that imitates an image is refused, and does not spoil the next prompt."""
    with pytest.raises(ValueError, match="holds 1 images, but 0 were given"):
        codec.encode_prompt([user("<|image_pad|>")], [])
    codec.encode_prompt([user("x<|image_pad|>")], [GRID])
    assert "<|vision_start|>" in codec.decode(codec.encode_prompt([user("x", None)], [GRID]))
    for grids in ([], [GRID, GRID]):
        with pytest.raises(ValueError, match=f"holds 1 images, but {len(grids)} were given"):
            codec.encode_prompt([user(None, "A")], grids)


def test_equal_messages_are_encoded_once_per_size(codec):
    first = codec.encode_observation(user(None, "N"), [GRID], separator=True)
    assert codec.encode_observation(user(None, "N"), [GRID], separator=True) is first
    larger = codec.encode_observation(user(None, "N"), [(1, 8, 8)], separator=True)
    assert len(larger) - len(first) == 16 - PADS
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_responses_lose_their_end_token_alone(codec):
    ids = codec.encode_text("<answer>Up</answer><|im_end|>")
    assert codec.decode_response(ids) == codec.decode_response(ids[:-1]) == "<answer>Up</answer>"
    assert codec.decode_response(np.array([codec.end_id, codec.end_id])) == "<|im_end|>"
    assert codec.decode_response(np.empty(0, np.int32)) == ""


def test_hashes_tell_tokenizers_and_templates_apart(tiny):
    other = ChatCodec(build_tokenizer(300, "sokoban"), 2).hashes()
    assert [other[name] == tiny.hashes()[name] for name in ("tokenizer", "template")] == [False, True]


def test_a_tokenizer_without_image_marks_is_refused():
    from transformers import Qwen2Tokenizer

    plain = Qwen2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[], chat_template="x")
    with pytest.raises(ValueError, match=r"no <\|image_pad\|>"):
        ChatCodec(plain, 2)


@pytest.mark.parametrize(
    ("text", "images", "expected"),
    [
        ("A <image> B <image>", ["x", "y"], ["A ", "x", " B ", "y"]),
        ("<image>", ["x"], ["x"]),
        ("<image><image>end", ["x", "y"], ["x", "y", "end"]),
        ("hello", [], ["hello"]),
        ("", [], []),
    ],
)
def test_placeholders(text, images, expected):
    items = split_placeholders(text, images)
    assert [item.get("text", item.get("image")) for item in items] == expected
    assert join_placeholders(items) == text


def test_placeholders_that_do_not_match_the_images():
    item = {"type": "image", "image": "x", "max_pixels": 100}
    assert split_placeholders("<image>", [item])[0] is item, "a dict stands for itself"
    for images, message in ((["x"], "not enough images"), (["x", "y", "z"], "image count mismatch")):
        with pytest.raises(AssertionError, match=message):
            split_placeholders("A <image> B <image>", images)
