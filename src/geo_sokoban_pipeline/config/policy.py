"""Options of the policy and of its warm start."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from geo_sokoban_pipeline.config.base import Count, CountOrZero, Share, StrictModel, refuse_first

# Options of the optimizers of both stages; defaults are theirs. A learning rate of 1 moves every weight by 1 a
# step; a decay of 1 at that rate takes weights to 0, more beyond it.
LearningRate = Annotated[float, Field(gt=0, le=1, description="Highest learning rate.")]
_Beta = Annotated[float, Field(ge=0, lt=1)]  # 1 would never forget the first gradient
Betas = Annotated[tuple[_Beta, _Beta], Field(description="AdamW betas.")]
WeightDecay = Annotated[float, Field(ge=0, le=1, description="AdamW weight decay.")]
Matrices = Annotated[Literal["adamw", "muon"], Field(description="Optimizer of the matrices inside the layers.")]
GradientNorm = Annotated[float, Field(gt=0, le=1e6, description="Largest gradient norm.")]
MicroBatchTokens = Annotated[Count, Field(description="Padded tokens of a micro-batch.")]


class TinyPolicyOptions(StrictModel):
    """Sizes of the tiny Qwen3-VL that the project builds itself; the defaults give about 0.45 million weights."""

    vocabulary: int = Field(384, ge=256, le=32_768, description="BPE entries before special tokens; 256 are the bytes.")
    texts: str | None = Field(
        None, description="Task whose words the vocabulary is made for. None: roles and marks of the chat alone."
    )
    hidden: int = Field(64, ge=8, le=8192, description="Width of the language model.")
    layers: int = Field(2, ge=1, le=128, description="Layers of the language model.")
    heads: int = Field(4, ge=1, le=128, description="Query heads of the language model.")
    kv_heads: int = Field(4, ge=1, le=128, description="Key and value heads of the language model.")
    head_dim: int = Field(16, ge=8, le=256, multiple_of=2, description="Width of one head.")
    mlp: int = Field(192, ge=1, le=32_768, description="Inner width of the language model's MLP.")
    vision_hidden: int = Field(64, ge=8, le=8192, description="Width of the vision tower.")
    vision_layers: int = Field(1, ge=1, le=128, description="Layers of the vision tower.")
    vision_heads: int = Field(4, ge=1, le=128, description="Heads of the vision tower.")
    vision_mlp: int = Field(128, ge=1, le=32_768, description="Inner width of the vision tower's MLP.")
    vision_grid: int = Field(
        16, ge=1, le=256, description="Side of the learned grid of position embeddings, in patches."
    )
    deepstack: tuple[CountOrZero, ...] = Field(
        (0,), description="Vision layers whose features also enter the language layers."
    )
    initializer_range: float = Field(
        0.1, ge=1e-6, le=1, description="Standard deviation of initial weights; 0.02 never learns."
    )
    min_pixels: int = Field(32 * 32, ge=1, le=1 << 20, description="Smaller images are enlarged to this many pixels.")
    max_pixels: int = Field(
        1 << 24, ge=32 * 32, le=1 << 26, description="Larger images are reduced to this many pixels."
    )

    @model_validator(mode="after")
    def _check(self) -> TinyPolicyOptions:
        refuse_first(
            (
                self.heads % self.kv_heads,
                f"kv_heads={self.kv_heads} must divide heads={self.heads}: each key and value head serves equally many "
                "query heads.",
            ),
            # The vision tower turns its queries and keys by row and by column, each in pairs of numbers.
            (
                self.vision_hidden % (4 * self.vision_heads),
                f"vision_hidden={self.vision_hidden} must be a multiple of 4 × vision_heads={4 * self.vision_heads}.",
            ),
            (
                self.min_pixels > self.max_pixels,
                f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}; lower it.",
            ),
            (
                len(set(self.deepstack)) < len(self.deepstack),
                f"deepstack={self.deepstack} names a layer twice; name each once.",
            ),
            (
                len(self.deepstack) > self.layers,
                f"deepstack={self.deepstack} names more features than layers={self.layers}.",
            ),
            (
                any(not 0 <= index < self.vision_layers for index in self.deepstack),
                f"deepstack={self.deepstack} must lie in 0…{self.vision_layers - 1} (vision_layers).",
            ),
        )
        return self


class AdapterOptions(StrictModel):
    """A low-rank adapter (LoRA), which is trained in place of the weights. It has no dropout: equal runs stay equal."""

    rank: int = Field(16, ge=1, le=8192, description="Rank of the matrices A and B.")
    alpha: float = Field(32.0, gt=0, le=1e6, description="The product B·A is multiplied by alpha/rank.")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Linear layers of the language model and the vision tower, by regular expressions of their names, "
        "or of the ends of these after a dot: `q_proj`, `visual.*attn.qkv`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_dropout(cls, values: Any) -> Any:
        if isinstance(values, dict) and {"dropout", "lora_dropout"} & set(values):
            raise ValueError(
                "an adapter has no dropout: equal runs would drop other values, and so would the two passes of "
                "gradient checkpointing. Leave it out."
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> AdapterOptions:
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"targets: {pattern} is no regular expression ({error}).") from error
        return self


class PolicyOptions(StrictModel):
    """Where the policy to be trained comes from."""

    source: Literal["tiny", "folder", "hub"] = Field("tiny", description="Built here, a local folder, or a hub id.")
    path: str | None = Field(None, description="Local folder or hub id; None with source tiny.")
    revision: str | None = Field(None, description="Revision on the hub; None: its default branch.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights in memory.")
    compute: Literal["bfloat16"] | None = Field(
        None,
        description="Type of matrix products over weights that stay in `dtype`: a learning rate of 1e-6 moves no "
        "weight that is kept in bfloat16. None: that of the weights.",
    )
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="Where the model lies. auto: a GPU where torch sees one, else the CPU.",
    )
    attention: Literal["sdpa", "eager"] = Field(
        "sdpa",
        description="Attention implementation of transformers. Flash attention takes none of the masks that engine and "
        "trainer need.",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Parts that are not trained, by the beginning of their parameters' names after `model.`: `visual`, "
        "`language_model.embed_tokens`. They have no gradients, no moments and, where nothing before them is trained, "
        "no activations in memory.",
    )
    adapter: AdapterOptions | None = Field(
        None, description="Adapter that is trained in place of the weights. None: the weights are."
    )
    tiny: TinyPolicyOptions = Field(default_factory=TinyPolicyOptions, description="Sizes, with source tiny.")

    @model_validator(mode="after")
    def _check(self) -> PolicyOptions:
        if self.adapter is not None and self.freeze:
            raise ValueError(
                f"freeze={list(self.freeze)} with adapter: an adapter freezes all weights; leave freeze out, and name "
                "what is adapted by adapter.targets."
            )
        if self.source != "tiny" and not self.path:
            raise ValueError(f"path is empty, but source={self.source} needs a folder or a hub id.")
        return self


class ExpertOptions(StrictModel):
    """The expert whose demonstrations the warm start trains on."""

    factory: str = Field(
        description="`build_teacher(name, patience, noise, **args)`: a dotted path, or `file.py` / `file.py:name`.",
    )
    name: str = Field(description="Name of one of the task's experts.")
    patience: CountOrZero | None = Field(None, description="Failures before it gives up. None: it never does.")
    noise: Share = Field(0.0, description="Share of its actions that are chosen at random.")
    max_turns: Count | None = Field(None, description="Turns of a demonstration. None: as in the rollout.")
    args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the factory.")


class WarmStartOptions(StrictModel):
    """Supervised fine-tuning (SFT) on demonstrations before GRPO; `steps: 0` passes the policy through."""

    steps: CountOrZero = Field(900, description="Optimizer steps at most; 0 leaves the policy as it is.")
    episodes_per_step: Count = Field(24, description="Fresh demonstrations per step.")
    learning_rate: LearningRate = 1.5e-3
    betas: Betas = (0.9, 0.98)
    weight_decay: WeightDecay = 0.01
    matrices: Matrices = "muon"
    warmup_steps: CountOrZero = Field(50, description="Steps of linear warm-up.")
    decay_fraction: Share = Field(0.15, description="Last share of the steps over which the rate falls.")
    clip: GradientNorm = 1.0
    max_tokens: MicroBatchTokens = 8192
    teacher: ExpertOptions = Field(description="The expert that makes the demonstrations.")
    validate_every: Count = Field(100, description="Steps between validations on held-out demonstrations.")
    validation_episodes: Count = Field(64, description="Held-out demonstrations of a validation.")
    play_every: CountOrZero = Field(
        250, description="Steps between validations by rollout (loop.eval_prompts prompts), one at the end; 0: none."
    )
    stop_below: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Stop once the validation loss (nats per response token) is at most this. None: all steps.",
    )
