"""The model of a run: size, context and chat encoding, from its configuration and the files of its folder.

No weight is loaded: the model is built on torch's `meta` device, which has shapes but no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.envs.inspection import Check
from geo_sokoban_pipeline.hub import fetch_config, find_cached
from geo_sokoban_pipeline.policies.lora import Adapter
from geo_sokoban_pipeline.policies.policy import Policy, attach_adapter, freeze_parameters, load_encoding
from geo_sokoban_pipeline.preflight.checks import find_cases
from geo_sokoban_pipeline.runs.policy_folder import check_model_type, check_policy_files, find_base, find_policy_folder
from geo_sokoban_pipeline.runs.storage import find_json

_GROUP = "model"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PartSize:
    """Number of parameters of a part of a model, tied ones once, and of those that are not frozen."""

    parameters: int
    trained: int

    @classmethod
    def of(cls, parameters: Iterable[Any]) -> PartSize:
        """Of parameters of torch."""
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
        return cls(sum(count for count, _ in counts), sum(count for count, trains in counts if trains))


@dataclass(frozen=True)
class ModelShape:
    """A model without its weights.

    Attributes:
        config: `Qwen3VLConfig`, or that of the mixture of experts.
        layer: the largest decoder layer.
        layers: all of them.
        root: the rest of the language model: embeddings, last norm, output head.
        vision: the vision tower.
        value_bytes: bytes of one parameter in memory.
        weights: shape of each parameter, tied ones once, and whether it is trained.
        encoding: the policy without its model: tokenizer, template, image processor; None: not fetched yet.
        folder: of the weights; None: built from a seed, or not fetched yet.
    """

    config: Any
    layer: PartSize
    layers: PartSize
    root: PartSize
    vision: PartSize
    value_bytes: int
    weights: dict[str, tuple[tuple[int, ...], bool]]
    encoding: Policy | None
    folder: Path | None

    @classmethod
    def of(
        cls, options: PolicyOptions, config: Any, encoding: Policy | None = None, folder: Path | None = None
    ) -> ModelShape:
        """Of a configuration of transformers."""
        import torch
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        freeze_parameters(model, options.freeze)
        if (adapter := Adapter.fresh(options.adapter, Path(), seed=0)) is not None:
            attach_adapter(Policy(model, None, None), adapter)
        layers = [PartSize.of(layer.parameters()) for layer in model.model.language_model.layers]
        named = dict(model.named_parameters())
        inner = (".layers.", "model.visual.")
        return cls(
            config,
            layer=max(layers, key=lambda layer: layer.parameters),
            layers=PartSize(sum(layer.parameters for layer in layers), sum(layer.trained for layer in layers)),
            root=PartSize.of(parameter for name, parameter in named.items() if not any(part in name for part in inner)),
            vision=PartSize.of(model.model.visual.parameters()),
            value_bytes=_BYTES[options.dtype],
            weights={name: (tuple(weight.shape), weight.requires_grad) for name, weight in named.items()},
            encoding=encoding,
            folder=folder,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return self.layers.parameters + self.root.parameters + self.vision.parameters

    @property
    def trained(self) -> int:
        """Number of those that are not frozen."""
        return self.layers.trained + self.root.trained + self.vision.trained

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.parameters * self.value_bytes

    @property
    def context(self) -> int:
        """Tokens of the longest conversation."""
        return int(self.config.text_config.max_position_embeddings)


def inspect_model(options: PolicyOptions, stored: Path | None = None) -> tuple[list[Check], ModelShape | None]:
    """Check the starting policy of a run.

    Args:
        stored: the run's own copy, with which it continues; None: not stored yet.

    Returns:
        Findings, and the shape; None if the files cannot be used.

    Raises:
        FileNotFoundError, ValueError, PolicyUnavailableError: the policy is not available, or not supported.
    """
    if stored is not None:
        return _inspect_folder(options, stored)
    if options.source == "tiny":
        shape = _tiny_shape(options)
        return [_size(shape, "built here")], shape
    assert options.path is not None  # the options check it
    if options.source == "folder":
        return _inspect_folder(options, find_policy_folder(options.path))
    if (cached := find_cached(options.path, options.revision)) is not None and is_complete(cached):
        return _inspect_folder(options, cached)
    return _inspect_config(options, fetch_config(options.path, options.revision))


def _inspect_folder(options: PolicyOptions, folder: Path) -> tuple[list[Check], ModelShape | None]:
    from transformers import AutoConfig

    found = check_folder(folder)
    if any(check.state == "failure" for check in found):
        return found, None
    encoding = load_encoding(folder)
    shape = ModelShape.of(options, AutoConfig.from_pretrained(folder), encoding, folder)
    # Building the codec checks that the tokenizer has its special tokens; the model's image token must be the same.
    pad, expected = encoding.codec.image_pad_id, int(shape.config.image_token_id)
    tokens = find_cases(
        _GROUP,
        (pad == expected, "tokens and template", "ok", f"image mark {pad}, chat template renders", ""),
        (
            pad != expected,
            "tokens and template",
            "failure",
            f"the tokenizer's <|image_pad|> is {pad}, the model expects {expected}",
            "take tokenizer and weights from one source",
        ),
    )
    return [*found, _size(shape, str(folder)), *tokens], shape


def _inspect_config(options: PolicyOptions, config: Path) -> tuple[list[Check], ModelShape]:
    """A policy of the hub that is not complete in the cache: only its configuration is read."""
    from huggingface_hub import constants
    from transformers import AutoConfig

    check_model_type(f"policy.path={options.path}", config)
    revision = f" --revision {options.revision}" if options.revision else ""
    way_out = f"fetch it before: hf download {options.path}{revision}"
    text = f"{options.path}: not complete in the cache; "
    files = find_cases(
        _GROUP,
        (constants.HF_HUB_OFFLINE, "files", "failure", f"{text}HF_HUB_OFFLINE forbids fetching the rest", way_out),
        (not constants.HF_HUB_OFFLINE, "files", "warning", f"{text}the run fetches the rest", way_out),
    )
    shape = ModelShape.of(options, AutoConfig.from_pretrained(config.parent))
    return [*files, _size(shape, str(options.path))], shape


def _size(shape: ModelShape, where: str) -> Check:
    text = f"{where}: {shape.config.model_type}, {shape.parameters:,} weights, context of {shape.context:,} tokens"
    return Check(_GROUP, "size", "ok", text)


def _tiny_shape(options: PolicyOptions) -> ModelShape:
    from geo_sokoban_pipeline.policies.patches import build_image_processor
    from geo_sokoban_pipeline.policies.tiny import build_config, build_tokenizer

    tokenizer = build_tokenizer(options.tiny.vocabulary, options.tiny.texts)
    config = build_config(options.tiny, tokenizer)
    processor = build_image_processor(options.tiny.min_pixels, options.tiny.max_pixels)
    return ModelShape.of(options, config, Policy(None, tokenizer, processor))


# The files of a policy folder: every shard complete; tokenizer, template and processor present.


_INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> list[Check]:
    """Findings about a policy folder's files.

    Raises:
        FileNotFoundError, ValueError: no configuration or weights, or another kind of model.
        CorruptFolderError: a JSON file is torn.
    """
    check_policy_files(folder)
    folder = find_base(folder) or folder
    found = [*_missing_files(folder), *_torn_weights(folder)]
    if found:
        return found
    shards = sorted(folder.glob("model*.safetensors"))
    size = sum(path.stat().st_size for path in shards)
    counted = f"{len(shards)} weight file{'' if len(shards) == 1 else 's'}"
    return [Check(_GROUP, "files", "ok", f"{folder}: {counted} of {size:,} bytes, all whole")]


def is_complete(folder: Path) -> bool:
    """Whether a folder has every file of a policy; their contents are not checked.

    Raises:
        CorruptFolderError: a JSON file is torn.
    """
    there = (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))
    return there and not _missing_files(folder)


def _indexed(folder: Path) -> dict[str, str]:
    """File of each tensor, from the index; empty without an index."""
    return dict((find_json(folder / _INDEX) or {}).get("weight_map", {}))


def _torn_weights(folder: Path) -> list[Check]:
    from safetensors import SafetensorError, safe_open

    named = _indexed(folder)
    files = sorted(set(named.values())) or sorted(path.name for path in folder.glob("model*.safetensors"))
    there = [name for name in files if (folder / name).is_file()]
    found: list[Check] = []
    held: set[str] = set()
    for path in (folder / name for name in there):
        try:
            with safe_open(path, "numpy") as weights:  # the format's header has the size that the file must have
                held |= set(weights.keys())
        except SafetensorError as error:
            text = f"{path} ({path.stat().st_size:,} bytes) is no whole safetensors file: {error}"
            found.append(Check(_GROUP, "weights", "failure", text, "delete the file and fetch it again"))
    if (lost := sorted(set(named) - held)) and not found and there == files:
        text = f"{folder}: {len(lost)} tensors of {_INDEX} are in no file, such as {lost[0]}"
        found.append(Check(_GROUP, "weights", "failure", text, "fetch the folder again"))
    return found


def _missing_files(folder: Path) -> list[Check]:
    def lacks(*names: str) -> bool:
        return not any((folder / name).is_file() for name in names)

    files = sorted(set(_indexed(folder).values()))
    template = (find_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    needed = [
        *((lacks(name), name, f"listed in {_INDEX}") for name in files),
        (not files and any(folder.glob("model-*-of-*.safetensors")), _INDEX, "the index of the weights"),
        (lacks("tokenizer.json", "vocab.json"), "tokenizer.json", "the tokenizer"),
        (
            lacks("preprocessor_config.json", "processor_config.json"),
            "preprocessor_config.json",
            "the image processor",
        ),
        (
            not template and lacks("chat_template.jinja", "chat_template.json"),
            "chat_template.jinja",
            "the chat template",
        ),
    ]
    way_out = "copy or fetch the whole folder"
    return find_cases(
        _GROUP,
        *(
            (lacking, "files", "failure", f"{folder / name} is missing ({what})", way_out)
            for lacking, name, what in needed
        ),
    )
