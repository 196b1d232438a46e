"""The tiny policy's own tokenizer: byte-level BPE with Qwen's pre-tokenizer, special tokens and chat markup.

It is trained on a fixed text, so the vocabulary is the same on every machine, and every action name and answer tag is
one token: `<answer>Up</answer><|im_end|>` costs four.
"""

from __future__ import annotations

from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MARKUP_TOKENS = ("<answer>", "</answer>", "<think>", "</think>", "<tool_call>", "</tool_call>")

_MOVES = ("Up", "Down", "Left", "Right", "up", "down", "left", "right")
_CORPUS = """
Up Down Left Right,Up,Down,Left,Right up down left right
system user assistant You are playing Sokoban. Push the yellow box onto the red target. The board is shown in the image.
You are the green player. Walls are brick. Floor is black. You push boxes, you never pull them. Avoid walls and corners.
Reply with up to three moves, for example: Up, Left. Decide the next action: Current Observation: see the image.
Actions executed: None. Next move? Choose your next moves from Up, Down, Left and Right.
Find the angle, the length x, the area, the perimeter. The answer is boxed. Answer: \\boxed{12} calc_score
\\frac{1}{2} \\sqrt{3} \\pi 0 1 2 3 4 5 6 7 8 9 10 20 30 45 60 90 100 180 360 degrees
triangle circle parallel lines square rectangle find the value
name arguments answer {"name": "calc_score", "arguments": {"answer": "5"}} correct wrong try again last chance
"""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif item.type == 'text' -%}{{- item.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer(vocabulary: int = 384) -> Qwen2Tokenizer:
    """Train the tokenizer.

    Args:
        vocabulary: most BPE entries before special and markup tokens, at least 256 (the bytes).

    Returns:
        A stock `Qwen2Tokenizer` with Qwen's special tokens and the chat template; end token `<|im_end|>`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    trainable = Tokenizer(models.BPE())
    trainable.normalizer = normalizers.NFC()
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainable.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # What stands in every turn comes often enough for each word to become one token.
    frequent = [*_MOVES, "user", "assistant", "system", "Next"] * 40
    trainable.train_from_iterator([*frequent, _CORPUS], trainer)
    return _wrap(trainable)


def _wrap(trained) -> Qwen2Tokenizer:  # type: ignore[no-untyped-def]
    import json

    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    merges = [tuple(pair) for pair in model["merges"]]
    for token in QWEN_SPECIAL_TOKENS:
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in QWEN_SPECIAL_TOKENS if t not in ("<|endoftext|>", "<|im_end|>")],
    )
    tokenizer.add_tokens(list(MARKUP_TOKENS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
