"""Payload of SGLang's `update_weights_from_tensor`, whose format is a pickle; it is written and never read.

It contains the tensors by value, not as handles of shared memory, so a server may run on another machine.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence

from torch import Tensor


def pack_tensors(named: Sequence[tuple[str, Tensor]]) -> str:
    """Base64 text of a pickled list of (name, CPU tensor).

    Args:
        named: tensors on any device; each is copied, because a pickled view would contain its whole storage.
    """
    held = [(name, tensor.detach().cpu().clone()) for name, tensor in named]
    return base64.b64encode(pickle.dumps(held, protocol=pickle.HIGHEST_PROTOCOL)).decode("ascii")
