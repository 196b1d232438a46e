"""The Megatron backend: tensor and sequence parallelism by Megatron-Core, data parallelism by FSDP2 on top of it.

Nothing here is imported unless a run asks for it, because Megatron-Core is an extra and takes seconds to import.
"""

import warnings

# Its fallbacks to torch are what is used here, and no graphs of CUDA; docs/backends.md names the variable.
for _text in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "When using (async grad allreduce|sequence parallelism) it is recommended",
):
    warnings.filterwarnings("ignore", _text, UserWarning)
# Names of torch.distributed that Megatron-Core uses.
warnings.filterwarnings("ignore", ".*(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning)
