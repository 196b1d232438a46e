"""Policies laid out as Qwen3-VL is published: its real tokenizer, template, processor and vocabulary, thin random
weights of two layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.preflight.published_sizes import published_config

VOCABULARY = 151_936
END = "<|im_end|>"
_HIDDEN = 64
_SHARED = 3.0  # in the first place of every embedding, so that all states point that way


def thin_config() -> Any:
    """`Qwen3VLConfig` with the published ids, positions and patches; everything else is small."""
    config = published_config("2B", layers=2, blocks=2)
    text = {"hidden_size": _HIDDEN, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": _HIDDEN}
    config.text_config.update(text)
    config.vision_config.update(vision)
    return config


def write_thin_policy(
    folder: Path, processor: Path, *, favoured: Sequence[str] = (), share: float = 0.0, template: str | None = None
) -> Path:
    """Write such a policy.

    Args:
        processor: folder with the published files.
        favoured: texts of one token each that are sampled more often than chance has it: a random policy of this
            vocabulary would neither end its responses nor ever say a move.
        share: probability of all of them together, about.
        template: chat template in place of the published one.
    """
    import math

    import torch
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(thin_config())
    for path in processor.iterdir():
        shutil.copyfile(path, folder / path.name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if favoured:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in favoured]
        assert all(len(found) == 1 for found in ids), ids
        rows = model.model.language_model.embed_tokens.weight
        lead = math.log(share / (1 - share) * VOCABULARY / len(ids))
        with torch.no_grad():
            # A normed state is sqrt(width) in the shared place and little elsewhere.
            rows[:, 0] = _SHARED
            rows[[found[0] for found in ids], 0] += lead / math.sqrt(_HIDDEN)
    model.save_pretrained(folder)
    return folder


def thinking_template(published: str) -> str:
    """The published template as Thinking models have it: it opens the thoughts, and leaves out those of responses that
    lie behind.
    """
    before, branch, after = published.partition('{%- elif message.role == "assistant" %}')
    response, following, rest = after.partition('{%- elif message.role == "tool" %}')
    for name in ("message.content", "content_item.text"):
        shown = f"{{{{- {name} }}}}"
        assert shown in response
        response = response.replace(shown, f"{{{{- {name}.split('</think>')[-1].lstrip('\\n') }}}}")
    header = "{{- '<|im_start|>assistant\\n' }}"
    assert rest.count(header) == 1
    return before + branch + response + following + rest.replace(header, "{{- '<|im_start|>assistant\\n<think>\\n' }}")
