"""A policy is a model with its tokenizer, chat template and image processor, saved as one folder.

The folder loads with plain `AutoModelForImageTextToText`, and with the stock `AutoProcessor` if torchvision is
installed; this project loads it without torchvision.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.policies.chat import ChatCodec
from geo_sokoban_pipeline.policies.lora import AdaptedLinear, Adapter, find_targets, read_adapter
from geo_sokoban_pipeline.policies.patches import PatchReader, load_image_processor
from geo_sokoban_pipeline.policies.weights import (
    EXPERT_WEIGHTS,
    SHARD_BYTES,
    WeightSource,
    check_orientation,
    is_adapter,
    write_checkpoint,
)
from geo_sokoban_pipeline.runs.policy_folder import check_policy_files, find_base
from geo_sokoban_pipeline.runs.storage import Files
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories.types import TableContext

if TYPE_CHECKING:
    from geo_sokoban_pipeline.policies.qwen3_vl import PolicyNetwork

_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

# transformers records these among a tokenizer's arguments at loading, and would save them.
_NOTED_AT_LOADING = ("is_local", "local_files_only")


@dataclass
class Policy:
    """A vision-language policy in memory.

    Attributes:
        model: a Qwen3-VL model of transformers with language-model head.
        tokenizer: Hugging Face tokenizer with the chat template.
        image_processor: `Qwen2VLImageProcessorPil` with the policy's values.
        folder: source of the policy, whose weights may have changed since; None: built in memory.
        compute: torch dtype of matrix products; None: the dtype of the weights.
        planned_device: type of the device that computes, where the weights are not there yet, or not all the time.
            None: that of the weights.
        adapter: which is trained in place of the weights; None: there is none.
    """

    model: Any
    tokenizer: Any
    image_processor: Any
    folder: Path | None = None
    compute: str | None = None
    planned_device: str | None = None
    adapter: Adapter | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the model has no weights, as in processes that hold a part of them elsewhere; see `load_empty`."""
        return bool(self.model.device.type == "meta")

    @property
    def device(self) -> str:
        """Type of the device on which the policy computes: `cpu` or `cuda`."""
        return self.planned_device or str(self.model.device.type)

    def computing(self, *, caching: bool = True) -> AbstractContextManager[Any]:
        """Context of every forward pass: matrix products use the dtype `compute`; weights and sums keep theirs.

        Args:
            caching: keep the weights in `compute` until the context ends; worth it where it covers several passes.
        """

        if self.compute is None:
            return nullcontext()
        return torch.autocast(self.device, getattr(torch, self.compute), cache_enabled=caching)

    @cached_property
    def network(self) -> PolicyNetwork:
        """The model's forward pass for prefill, decode and training; its weights are those of `model`."""
        from geo_sokoban_pipeline.policies.qwen3_vl import PolicyNetwork

        return PolicyNetwork(self.model, self.image_processor)

    @cached_property
    def codec(self) -> ChatCodec:
        """Chat encoding of this policy."""
        return ChatCodec(self.tokenizer, int(self.image_processor.merge_size))

    @cached_property
    def reader(self) -> PatchReader:
        """Image encoding of this policy, with its cache."""
        return PatchReader(self.image_processor)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the chat's end token first, then the eos tokens of model and tokenizer."""
        found, sources = [self.codec.end_id], [self.tokenizer]
        if self.model is not None:  # the pre-flight loads policies without a model
            config = self.model.config
            sources += [self.model.generation_config, config, config.text_config]
        elif self.folder is not None:
            path = self.folder / "generation_config.json"
            known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            sources.append(SimpleNamespace(eos_token_id=known.get("eos_token_id")))
        for source in sources:
            known = getattr(source, "eos_token_id", None)
            found += [] if known is None else [known] if isinstance(known, int) else list(known)
        return tuple(dict.fromkeys(found))

    @cached_property
    def banned_ids(self) -> np.ndarray:
        """(K,) int64 sorted ids that are never sampled: vision tokens, and rows that pad the vocabulary.

        The trainer removes the same ids from its softmax, so both score the same distribution.
        """
        rows = int(self.model.config.text_config.vocab_size)
        unknown = self.tokenizer.unk_token_id
        marks = {self.tokenizer.convert_tokens_to_ids(token) for token in _VISION_TOKENS}
        marks -= {None, unknown}
        return np.asarray(sorted({*marks, *range(len(self.tokenizer), rows)}), np.int64)

    @cached_property
    def table_context(self) -> TableContext:
        """Metadata of trajectory files about the policy's encoding."""
        hashes = self.codec.hashes()
        return TableContext(
            image_pad_id=self.codec.image_pad_id,
            merge_size=self.codec.merge_size,
            tokenizer_hash=hashes["tokenizer"],
            template_hash=hashes["template"],
            processor_hash=content_hash(json.dumps(processor_values(self.image_processor), sort_keys=True)),
        )


def save_policy(policy: Policy, folder: Path, largest: int = SHARD_BYTES) -> Files:
    """Write model (safetensors), tokenizer, template and processor files into a folder.

    Args:
        largest: bytes of a file of weights.

    Returns:
        Sizes and digests of the files of weights.
    """
    save_encoding(policy, folder)
    source = WeightSource.of_model(policy.model)
    return write_checkpoint(folder, source.specs, source.read_one, largest)


def save_encoding(policy: Policy, folder: Path) -> None:
    """Write everything of a policy but its weights: configuration, tokenizer, template and processor files."""
    _quieten_library()
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(policy.model.config)
    config.architectures, config.dtype = [type(policy.model).__name__], str(policy.model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    _generation_config(policy).save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    values, last = processor_values(policy.image_processor), {"processor_class": "Qwen3VLProcessor"}
    _write(folder / "preprocessor_config.json", values | {"image_processor_type": "Qwen2VLImageProcessor"} | last)
    _write(folder / "video_preprocessor_config.json", values | {"video_processor_type": "Qwen3VLVideoProcessor"} | last)


def _generation_config(policy: Policy) -> Any:
    """Generation config with which plain `generate` samples as this project does: end, pad and banned ids.

    Values that the model already has stay.
    """
    config = copy.deepcopy(policy.model.generation_config)
    config._from_model_config = False  # else transformers derives it again from the model's config
    pad_id, banned = policy.tokenizer.pad_token_id, policy.banned_ids.tolist()
    own = {"eos_token_id": list(policy.end_ids), "pad_token_id": pad_id, "suppress_tokens": banned}
    for name, value in own.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    return config


def load_policy(folder: Path, dtype: str = "float32", attention: str = "sdpa") -> Policy:
    """Load a policy folder, without its adapter where it has one.

    Args:
        dtype: torch dtype of the weights in memory.
        attention: attention implementation of transformers.

    Raises:
        FileNotFoundError: configuration, weights, tokenizer or image processor is missing; the message names it.
        ValueError: not a Qwen3-VL model, or a mixture of experts with an ambiguous layout.
    """

    _quieten_library()
    check_policy_files(folder)
    folder = find_base(folder) or folder
    check_orientation(transformers.AutoConfig.from_pretrained(folder))
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention, use_safetensors=True
    )
    encoding = load_encoding(folder)
    return Policy(model.eval(), encoding.tokenizer, encoding.image_processor, folder)


def load_encoding(folder: Path) -> Policy:
    """A policy folder without its model: tokenizer, chat template and image processor."""

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name in _NOTED_AT_LOADING:
        tokenizer.init_kwargs.pop(name, None)
    template = folder / "chat_template.jinja"
    if template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return Policy(None, tokenizer, load_image_processor(folder), folder)


def load_as(options: PolicyOptions, folder: Path, adapter: Adapter | None = None) -> Policy:
    """Load a policy folder with the dtype, attention and device of the options.

    Args:
        adapter: to be trained, of a folder without one. None: that of the folder, or none.

    Raises:
        FileNotFoundError, ValueError: as `load_policy`.
        ValueError: see `freeze_parameters`.
        RuntimeError: the device does not exist.
    """
    policy = load_policy(folder, options.dtype, options.attention)
    policy.compute = options.compute
    freeze_parameters(policy.model, options.freeze)
    stored = Adapter.stored(folder) if adapter is None else None
    if (found := adapter or stored) is not None:
        attach_adapter(policy, found)
    if stored is not None:
        parameters = dict(policy.model.named_parameters())
        for name, matrix in read_adapter(folder, parameters).items():
            parameters[name].data.copy_(matrix)
    policy.model.to(device_of(options))
    return policy


def load_empty(options: PolicyOptions, folder: Path, adapter: Adapter | None = None) -> Policy:
    """Load a policy folder without its weights, for processes of which each reads a part of them.

    Args:
        adapter: to be trained; None: there is none.

    Raises:
        FileNotFoundError, ValueError: as `load_as`.
        ValueError: the folder has an adapter.
    """

    _quieten_library()
    check_policy_files(folder)
    if find_base(folder) is not None:
        raise ValueError(
            f"{folder} holds an adapter, but processes that share weights read whole policies alone; take the run's "
            "final policy, in which it is merged."
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    check_orientation(config)
    path = folder / "generation_config.json"
    generation = transformers.GenerationConfig.from_pretrained(folder) if path.is_file() else None
    model = empty_model(config, options.attention, getattr(torch, options.dtype), generation)
    freeze_parameters(model, options.freeze)
    encoding = load_encoding(folder)
    policy = Policy(model, encoding.tokenizer, encoding.image_processor, folder, options.compute, device_of(options))
    if adapter is not None:
        attach_adapter(policy, adapter)
    return policy


def empty_model(config: Any, attention: str, dtype: Any, generation_config: Any = None) -> Any:
    """A model without weights: its parameters lie on the meta device and have shapes and types alone.

    Buffers, which follow from the configuration, have their values.

    Args:
        attention: attention implementation of transformers.
        dtype: torch dtype of the parameters.
        generation_config: None: that of the model's configuration.
    """

    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attention, dtype=dtype)
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if buffers:
            model._init_weights(module)  # computes them again
    if generation_config is not None:
        model.generation_config = generation_config
    return model.eval()


def replace_weights(model: Any, make: Callable[[str, Any], Any]) -> None:
    """Give a model other parameters; tied ones stay tied, frozen ones frozen.

    Args:
        make: tensor in place of a parameter, by its first name.
    """

    made: dict[Any, Any] = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        if old not in made:
            made[old] = torch.nn.Parameter(make(name, old), requires_grad=old.requires_grad)
        place, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(place), attribute, made[old])


def freeze_parameters(model: Any, prefixes: Sequence[str]) -> None:
    """Exclude parts of a model from training.

    Args:
        prefixes: beginnings of parameter names after `model.`, in whole components.

    Raises:
        ValueError: a prefix is that of no parameter, or nothing is left to train.
    """
    names = {name.removeprefix("model."): parameter for name, parameter in model.named_parameters()}
    for prefix in prefixes:
        found = [parameter for name, parameter in names.items() if f"{name}.".startswith(f"{prefix}.")]
        if not found:
            known = dict.fromkeys(".".join(name.split(".")[:2]).removesuffix(".weight") for name in names)
            raise ValueError(f"policy.freeze={prefix}: no parameter's name begins so. There are {', '.join(known)}.")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ValueError(f"policy.freeze={list(prefixes)}: no parameter is left to train; freeze less.")


def attach_adapter(policy: Policy, adapter: Adapter) -> None:
    """Give a policy a fresh adapter, which alone is trained; frozen weights are held in the types of `use_types`.

    Raises:
        ValueError: see `find_targets`.
    """
    policy.adapter, model = adapter, policy.model
    for name in find_targets(model, adapter.targets):
        place, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(place), attribute, AdaptedLinear(model.get_submodule(name), adapter))
    types = use_types(policy)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if not is_adapter(name):
            parameter.data = parameter.data.to(types[name])
        elif not parameter.is_meta:
            parameter.data.copy_(adapter.first_value(name, parameter))


def store_in_compute_type(policy: Policy) -> None:
    """Round the weights of matrix products to the compute type once, for a policy that is not trained: `use_types`."""
    types = use_types(policy)
    for name, parameter in policy.model.named_parameters():
        parameter.data = parameter.data.to(types[name])


def use_types(policy: Policy) -> dict[str, Any]:
    """Torch dtypes, by parameter name, in which a policy that is not trained can be stored.

    Those of matrix products are in the compute type. Every pass would round them so: log-probs stay the same bit for
    bit. Norms, embeddings and routers, which no pass rounds, stay as they are.
    """

    types = {name: parameter.dtype for name, parameter in policy.model.named_parameters()}
    if policy.compute is None:
        return types
    kind, embedding = getattr(torch, policy.compute), policy.model.get_input_embeddings().weight
    for place, module in policy.model.named_modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding:
            types |= {f"{place}.{name}": kind for name, _ in module.named_parameters(recurse=False)}
    return {name: kind if name.endswith(EXPERT_WEIGHTS) else own for name, own in types.items()}


def allocate_weights(policy: Policy, device: Any) -> None:
    """Give an empty policy memory for weights that it does not train, in the types of `use_types`."""

    types = use_types(policy)
    replace_weights(policy.model, lambda name, weight: torch.empty(weight.shape, dtype=types[name], device=device))
    policy.model.to(device)  # its buffers


def device_of(options: PolicyOptions) -> str:
    """Device of a policy with these options: `cpu` or `cuda`."""

    if options.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return options.device


def _quieten_library() -> None:
    """Switch off the progress bars of transformers, which would fill the log with a checkpoint per iteration."""
    transformers.utils.logging.disable_progress_bar()


def processor_values(processor: Any) -> dict[str, Any]:
    """The entries about the image processor in a saved policy's `preprocessor_config.json`."""
    size = processor.size
    values = {
        "size": {"shortest_edge": int(size["shortest_edge"]), "longest_edge": int(size["longest_edge"])},
        "patch_size": int(processor.patch_size),
        "temporal_patch_size": int(processor.temporal_patch_size),
        "merge_size": int(processor.merge_size),
        "image_mean": [float(value) for value in processor.image_mean],
        "image_std": [float(value) for value in processor.image_std],
    }
    # Keys that Qwen3-VL leaves out are written, and hashed, only with another value.
    further = {name: getattr(processor, name) for name in ("resample", "rescale_factor")}
    return values | {name: own for name, own in further.items() if own != getattr(type(processor), name)}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
