"""The model of a run, known by its configuration: how large it is, how long its context, how it writes a conversation.

No weight is loaded: the model is built on torch's `meta` device, which has shapes and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.folders import check_model_type
from geo_sokoban_pipeline.hub import fetch_config, find_cached
from geo_sokoban_pipeline.options.policy import PolicyOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.preflight.checks import Check
from geo_sokoban_pipeline.preflight.model_files import check_folder

_GROUP = "model"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model without its weights.

    Attributes:
        config: `Qwen3VLConfig`, or that of the mixture of experts.
        parameters: number of weights, tied ones once.
        value_bytes: bytes of one weight in memory.
        encoding: the policy without its model: tokenizer, template, image processor.
        folder: where the weights lie; None where they are made, or still have to be fetched.
    """

    config: Any
    parameters: int
    value_bytes: int
    encoding: Policy
    folder: Path | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.parameters * self.value_bytes

    @property
    def context(self) -> int:
        """Tokens that a conversation may have."""
        return int(self.config.text_config.max_position_embeddings)


def inspect_model(options: PolicyOptions) -> tuple[list[Check], ModelShape | None]:
    """Look at the policy that a run starts from.

    Returns:
        Findings, and the shape; None where the hub has the model but its files are not here yet.

    Raises:
        FileNotFoundError, ValueError, PolicyUnavailableError: the policy cannot be had, or is of another kind.
    """
    if options.source == "tiny":
        shape = _tiny_shape(options)
        return [_size(shape, "built here")], shape
    assert options.path is not None  # the options check it
    if options.source == "folder":
        folder: Path | None = Path(options.path).expanduser()
        if not Path(options.path).expanduser().is_dir():
            raise FileNotFoundError(
                f"policy.path={options.path}: no such folder. Give the folder of a downloaded Qwen3-VL policy, its hub "
                "id with policy.source=hub, or policy.source=tiny for the one built here."
            )
    else:
        folder = find_cached(options.path, options.revision)
    if folder is None:
        check_model_type(f"policy.path={options.path}", fetch_config(options.path, options.revision))
        text = f"{options.path}: on the hub, not in the cache; the run fetches it"
        return [Check(_GROUP, "files", "warning", text, "fetch it before: hf download <name>")], None
    found = check_folder(folder)
    if any(check.state == "failure" for check in found):
        return found, None
    shape = _folder_shape(options, folder)
    return [*found, _size(shape, str(options.path)), *_special_tokens(shape)], shape


def _size(shape: ModelShape, where: str) -> Check:
    text = f"{where}: {shape.config.model_type}, {shape.parameters:,} weights, context of {shape.context:,} tokens"
    return Check(_GROUP, "size", "ok", text)


def _special_tokens(shape: ModelShape) -> list[Check]:
    """The codec refuses a tokenizer without picture or end marks; the model must mean the same picture mark."""
    pad, expected = shape.encoding.codec.image_pad_id, int(shape.config.image_token_id)
    if pad == expected:
        return [Check(_GROUP, "tokens and template", "ok", f"picture mark {pad}, chat template renders")]
    text = f"the tokenizer's <|image_pad|> is {pad}, the model expects {expected}"
    return [Check(_GROUP, "tokens and template", "failure", text, "take tokenizer and weights from one source")]


def _tiny_shape(options: PolicyOptions) -> ModelShape:
    from geo_sokoban_pipeline.policies.images import build_image_processor
    from geo_sokoban_pipeline.policies.tiny import build_config
    from geo_sokoban_pipeline.policies.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(options.tiny.vocabulary)
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


def _shape(options: PolicyOptions, config: Any, encoding: Policy, folder: Path | None) -> ModelShape:
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(config, count, _BYTES[options.dtype], encoding, folder)
