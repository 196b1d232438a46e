"""Qwen3-VL's language model as Megatron-Core's `GPTModel`, behind the interface of `policies.qwen3_vl.LanguageModel`.

Matrices are Megatron's column-parallel and row-parallel ones, embedding and head are split by the vocabulary. What
differs from Megatron's own multimodal models is here: interleaved M-RoPE, features of images in place of embeddings and
behind early layers (deepstack), attention by the policy's implementation, and norms that run without Transformer
Engine. States are (tokens, batch, hidden), under sequence parallelism this rank's range of tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm, Qwen3VLTextRotaryEmbedding

from geo_sokoban_pipeline.policies.qwen3_vl import PolicyNetwork, VisionTower, attend, attention_bias
from geo_sokoban_pipeline.training.backends.megatron.pieces import MegatronLayout


class ParallelModel(nn.Module):
    """The part of a policy's model that a rank of a tensor-parallel group holds.

    Attributes:
        config: Hugging Face's, of the whole model.
        language: split over the group.
        visual: the library's vision tower, equal on all ranks of the group.
        device: that computes; offloaded weights lie elsewhere between passes.
    """

    def __init__(self, config: Any, language: MegatronLanguage, visual: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.config, self.device = config, device
        self.language = language
        self.visual = visual


class ParallelNetwork(PolicyNetwork):
    """The forward pass of a policy for training; its language model has no cache, so nothing is sampled with it."""

    def __init__(self, model: ParallelModel, image_processor: Any) -> None:
        nn.Module.__init__(self)
        self.vision = VisionTower(model.visual, image_processor)
        self.language = model.language


@dataclass(frozen=True)
class VocabularyHead:
    """The output head, split by the vocabulary.

    Attributes:
        gpt: whose head it is.
        group: that splits it.
    """

    gpt: GPTModel
    group: Any

    @property
    def weight(self) -> Tensor:
        """(V / tensor, hidden) of this rank."""
        own: Tensor | None = self.gpt.output_layer.weight
        return self.gpt.shared_embedding_or_output_weight() if own is None else own

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """(..., V) logits of (..., hidden) states, whole on every rank of the group, without gradient."""
        own: Tensor = self.gpt.output_layer(states, weight=self.weight)[0]
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, -1)


class MegatronLanguage(nn.Module):
    """The language model with its head: tokens and image features to states, states to logits.

    Args:
        config: Hugging Face's, of the whole model.
        dtype: of the weights, which lie on the meta device.
    """

    def __init__(self, config: Any, layout: MegatronLayout, dtype: torch.dtype) -> None:
        super().__init__()
        text = config.text_config
        self.gpt = _build_gpt(config, layout, dtype)
        self.rotary = Qwen3VLTextRotaryEmbedding(text)
        self._text = text
        self._image_pad_id = config.image_token_id
        self._group = layout.tensor_group
        self._sequence_parallel = layout.sequence_parallel

    @property
    def layers(self) -> nn.ModuleList:
        """Megatron's layers."""
        return self.gpt.decoder.layers

    @property
    def head(self) -> VocabularyHead:
        """The output head."""
        return VocabularyHead(self.gpt, self._group)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        features: Sequence[Tensor] = (),
        rows: Tensor | None = None,
        wanted: Tensor | None = None,
        head: Callable[[Tensor, Any], Any] | None = None,
        checkpointing: bool = False,
    ) -> Any:
        """Run the language model; arguments and result are those of `policies.qwen3_vl.LanguageModel.forward`."""
        batch, length = token_ids.shape
        places = range(length)
        if self._sequence_parallel:  # Megatron's ranges are of equal length; nothing attends to tokens behind the last
            size = self._group.size()
            missing = -length % size
            token_ids, positions = F.pad(token_ids, (0, missing)), F.pad(positions, (0, missing))
            share = (length + missing) // size
            places = range(self._group.rank() * share, (self._group.rank() + 1) * share)
        hidden = self.gpt.embedding.word_embeddings(token_ids)
        if not self._sequence_parallel:
            hidden = hidden.transpose(0, 1).contiguous()
        where: Tensor | None = None
        deepstack: list[Tensor] = []
        if rows is not None:
            where, own = self._find_images(token_ids, rows, places)
            placed, *deepstack = [self._pick_features(table, own, hidden.dtype) for table in features]
            hidden = hidden.flatten(0, 1).index_copy(0, where, placed).view_as(hidden)
        options = {
            "attention_mask": attention_bias(self._text, None, token_ids.shape[1], hidden),
            "rotary_pos_emb": self._angles(positions),
        }
        for index, layer in enumerate(self.layers):
            if checkpointing:
                hidden, _ = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, **options)
            else:
                hidden, _ = layer(hidden, **options)
            if where is not None and index < len(deepstack):
                hidden = hidden.flatten(0, 1).index_add(0, where, deepstack[index]).view_as(hidden)
        states = self.gpt.decoder.final_layernorm(hidden)
        if self._sequence_parallel:
            # Readers of the states add their gradients over the group, so each rank takes its range of them.
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False, group=self._group)
        flat = states.flatten(0, 1)
        if wanted is None:
            wanted = torch.arange(length, device=flat.device).expand(batch, -1)
        columns = torch.arange(batch, device=flat.device)[:, None]
        states = flat.index_select(0, (wanted * batch + columns).reshape(-1)).view(*wanted.shape, -1)
        return states if head is None else head(states, self.head)

    def _find_images(self, token_ids: Tensor, rows: Tensor, places: range) -> tuple[Tensor, Tensor]:
        """Where image pads are among this rank's (tokens, batch), and which row of the features belongs there."""
        pads = token_ids == self._image_pad_id
        numbers = (pads.reshape(-1).cumsum(0) - 1).view_as(pads)[:, places.start : places.stop].T.reshape(-1)
        where = pads[:, places.start : places.stop].T.reshape(-1).nonzero().squeeze(1)
        return where, rows.index_select(0, numbers.index_select(0, where))

    def _pick_features(self, table: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if self._sequence_parallel:
            # The gradient of a rank is that of its own tokens.
            table = copy_to_tensor_model_parallel_region(table, group=self._group)
        return table.index_select(0, rows).to(dtype)

    @torch.no_grad()
    def _angles(self, positions: Tensor) -> Tensor:
        """(L, B, 1, head dimension) float32 angles of the rotary embedding at (3, B, L) positions.

        Megatron's own M-RoPE lays the three axes out in blocks, not interleaved.
        """
        angles = positions[..., None].float() * self.rotary.inv_freq.to(positions.device, torch.float32)
        return self.rotary.recomposition_frequencies(angles).transpose(0, 1).unsqueeze(2)


def _build_gpt(config: Any, layout: MegatronLayout, dtype: torch.dtype) -> GPTModel:
    """Megatron's model without weights."""
    text = config.text_config
    if layout.sequence_parallel and parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()  # that of `initialize_model_parallel`, whose groups are not needed
    settings = _Settings(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        ffn_hidden_size=text.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=dtype,
        text=text,
        attention_backend=None,  # a choice of Transformer Engine's kernels, which would be noted in the environment
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = MatrixNorm
    parts.self_attn_bda = parts.mlp_bda = _add_residual
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    attention.q_layernorm = attention.k_layernorm = Norm
    groups = ProcessGroupCollection()
    groups.tp = layout.tensor_group
    groups.cp = layout.mesh.get_group("alone")  # of context parallelism
    groups.pp = groups.embd = None
    with torch.device("meta"):
        gpt = GPTModel(
            config=settings,
            transformer_layer_spec=TransformerBlockSubmodules([spec] * text.num_hidden_layers, Norm),
            vocab_size=text.vocab_size,
            max_sequence_length=text.max_position_embeddings,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            position_embedding_type="none",
            pg_collection=groups,
        )
        gpt.to(dtype)
    # It gets the states of chosen tokens, which are the same on all ranks.
    gpt.output_layer.sequence_parallel = False
    gpt.output_layer.allreduce_dgrad = layout.tensor > 1
    return gpt


@dataclass
class _Settings(TransformerConfig):
    """Megatron's settings, and the library's configuration of the language model."""

    text: Any = None


class Norm(Qwen3VLTextRMSNorm):
    """The library's norm, built as Megatron builds one."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps)


class MatrixNorm(Norm):
    """A norm whose result goes to a matrix: in the type of its product, in which ranks then exchange it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) of (..., hidden)."""
        normed: Tensor = super().forward(hidden_states)
        kind = normed.device.type
        return normed.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed


class CoreAttention(nn.Module):
    """Attention of this rank's heads, by transformers' implementation of the policy's choice."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.config = config.text  # it names the implementation
        self.is_causal = True
        self.attention_dropout = 0.0
        self.scaling = config.kv_channels**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_query_groups

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """(L, B, heads · dim) of (L, B, heads, dim) each."""
        queries, keys, values = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        return attend(self, queries, keys, values, attention_mask).transpose(0, 1).contiguous()


def _add_residual(training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
    """Megatron's sum rounds the residual to the type of products; as in the `fsdp` backend it keeps its own here."""
    return lambda output, residual, _: residual + output[0]
