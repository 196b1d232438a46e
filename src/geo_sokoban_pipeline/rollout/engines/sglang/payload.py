"""Tensors as the bytes that SGLang's `update_weights_from_tensor` takes, which its format makes a pickle.

Nothing here reads one. Tensors are in it by value, so the server may be anybody's child and on another machine.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence

from torch import Tensor


def pack_tensors(named: Sequence[tuple[str, Tensor]]) -> str:
    """Base64 text of a pickled list of (name, CPU tensor).

    Args:
        named: tensors on any device; each is copied, so that no view drags its whole storage along.
    """
    held = [(name, tensor.detach().cpu().clone()) for name, tensor in named]
    return base64.b64encode(pickle.dumps(held, protocol=pickle.HIGHEST_PROTOCOL)).decode("ascii")
