"""Names of the state-space kernels, see the package."""

from __future__ import annotations

from sgl_kernel._missing import missing_kernel

causal_conv1d_fn_cpu = missing_kernel("causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = missing_kernel("causal_conv1d_update_cpu")
