"""Stand-in for SGLang's compiled kernel package, of which there is no wheel for a CPU: names without computations.

SGLang 0.5.21 imports these names when it starts on a CPU. Plain reading and sampling with the attention `torch_native`
calls none of them, so each raises: a result can never come from here. What is not listed is missing, which makes SGLang
take its own PyTorch code.
"""

from __future__ import annotations

import torch

from sgl_kernel._missing import missing_kernel

_FUNCTIONS = (
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
# Looked up by model files on import. They are declared without an implementation, so torch refuses a call.
_OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)

globals().update({name: missing_kernel(name) for name in _FUNCTIONS})
_library = torch.library.Library("sgl_kernel", "DEF")
for _name in _OPERATORS:
    _library.define(f"{_name}(Tensor x) -> Tensor")
