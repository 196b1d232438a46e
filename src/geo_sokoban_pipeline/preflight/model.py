"""The model of a run, known by its configuration: how large it is, how long its context, how it writes a conversation.

No weight is loaded: the model is built on torch's `meta` device, which has shapes and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.folders import check_model_type, find_policy_folder
from geo_sokoban_pipeline.hub import fetch_config, find_cached
from geo_sokoban_pipeline.options.policy import PolicyOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.model_files import check_folder, is_complete

_GROUP = "model"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model without its weights.

    Attributes:
        config: `Qwen3VLConfig`, or that of the mixture of experts.
        parameters: number of weights, tied ones once.
        value_bytes: bytes of one weight in memory.
        encoding: the policy without its model: tokenizer, template, image processor; None where they still have to be
            fetched.
        folder: where the weights lie; None where they are made, or still have to be fetched.
    """

    config: Any
    parameters: int
    value_bytes: int
    encoding: Policy | None
    folder: Path | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.parameters * self.value_bytes

    @property
    def context(self) -> int:
        """Tokens that a conversation may have."""
        return int(self.config.text_config.max_position_embeddings)


def inspect_model(options: PolicyOptions, stored: Path | None = None) -> tuple[list[Check], ModelShape | None]:
    """Look at the policy that a run starts from.

    Args:
        stored: the run's own copy of it, which the run goes on with; None: there is none yet.

    Returns:
        Findings, and the shape; None where the files cannot be used.

    Raises:
        FileNotFoundError, ValueError, PolicyUnavailableError: the policy cannot be had, or is of another kind.
    """
    if stored is not None:
        return _inspect_folder(options, stored)
    if options.source == "tiny":
        shape = _tiny_shape(options)
        return [_size(shape, "built here")], shape
    assert options.path is not None  # the options check it
    if options.source == "folder":
        return _inspect_folder(options, find_policy_folder(options.path))
    cached = find_cached(options.path, options.revision)
    if cached is not None and is_complete(cached):
        return _inspect_folder(options, cached)
    return _inspect_config(options, fetch_config(options.path, options.revision))


def _inspect_folder(options: PolicyOptions, folder: Path) -> tuple[list[Check], ModelShape | None]:
    found = check_folder(folder)
    if any(check.state == "failure" for check in found):
        return found, None
    shape = _folder_shape(options, folder)
    return [*found, _size(shape, str(folder)), *_special_tokens(shape)], shape


def _inspect_config(options: PolicyOptions, config: Path) -> tuple[list[Check], ModelShape]:
    """A policy of the hub of which the configuration alone is sure to be here."""
    from huggingface_hub import constants
    from transformers import AutoConfig

    check_model_type(f"policy.path={options.path}", config)
    revision = f" --revision {options.revision}" if options.revision else ""
    way_out = f"fetch it before: hf download {options.path}{revision}"
    text = f"{options.path}: not complete in the cache; "
    if constants.HF_HUB_OFFLINE:
        check = Check(_GROUP, "files", "failure", f"{text}HF_HUB_OFFLINE forbids to fetch the rest", way_out)
    else:
        check = Check(_GROUP, "files", "warning", f"{text}the run fetches the rest", way_out)
    shape = _shape(options, AutoConfig.from_pretrained(config.parent), None, None)
    return [check, _size(shape, str(options.path))], shape


def _size(shape: ModelShape, where: str) -> Check:
    text = f"{where}: {shape.config.model_type}, {shape.parameters:,} weights, context of {shape.context:,} tokens"
    return Check(_GROUP, "size", "ok", text)


def _special_tokens(shape: ModelShape) -> list[Check]:
    """The codec refuses a tokenizer without picture or end marks; the model must mean the same picture mark."""
    assert shape.encoding is not None  # read from a folder
    pad, expected = shape.encoding.codec.image_pad_id, int(shape.config.image_token_id)
    if pad == expected:
        return [Check(_GROUP, "tokens and template", "ok", f"picture mark {pad}, chat template renders")]
    text = f"the tokenizer's <|image_pad|> is {pad}, the model expects {expected}"
    return [Check(_GROUP, "tokens and template", "failure", text, "take tokenizer and weights from one source")]


def _tiny_shape(options: PolicyOptions) -> ModelShape:
    from geo_sokoban_pipeline.policies.images import build_image_processor
    from geo_sokoban_pipeline.policies.tiny import build_config
    from geo_sokoban_pipeline.policies.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(options.tiny.vocabulary, options.tiny.texts)
    config = build_config(options.tiny, tokenizer)
    processor = build_image_processor(options.tiny.min_pixels, options.tiny.max_pixels)
    return _shape(options, config, Policy(None, tokenizer, processor), None)


def _folder_shape(options: PolicyOptions, folder: Path) -> ModelShape:
    from transformers import AutoConfig, AutoTokenizer

    from geo_sokoban_pipeline.policies.images import load_image_processor

    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = folder / "chat_template.jinja"
    if template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    encoding = Policy(None, tokenizer, load_image_processor(folder))
    return _shape(options, AutoConfig.from_pretrained(folder), encoding, folder)


def _shape(options: PolicyOptions, config: Any, encoding: Policy | None, folder: Path | None) -> ModelShape:
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(config, count, _BYTES[options.dtype], encoding, folder)
