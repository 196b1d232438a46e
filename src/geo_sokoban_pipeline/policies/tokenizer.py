"""The tiny policy's own tokenizer: byte-level BPE with Qwen's pre-tokenizer, special tokens and chat markup.

It is trained on a fixed text, so the vocabulary is the same on every machine, and what replies are made of costs few
tokens: `<answer>Up</answer><|im_end|>` four, `\\boxed{61}<|im_end|>` five.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from geo_sokoban_pipeline.policies.tokenizer_texts import TEXTS

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MARKUP_TOKENS = TEXTS["sokoban"].markup

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


def build_tokenizer(vocabulary: int = 384, texts: str = "sokoban") -> Qwen2Tokenizer:
    """Train the tokenizer.

    Args:
        vocabulary: most BPE entries before special and markup tokens, at least 256 (the bytes).
        texts: name in `TEXTS` of what it is made for.

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
    chosen = TEXTS[texts]
    trainable.train_from_iterator([*[*chosen.frequent] * 40, chosen.corpus], trainer)
    return _wrap(trainable, chosen.markup)


def _wrap(trained, markup: Sequence[str]) -> Qwen2Tokenizer:  # type: ignore[no-untyped-def]
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
    tokenizer.add_tokens(list(markup))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
