"""Lets the published torchvision, which is linked against CUDA, be imported beside a torch for CPUs.

Its compiled part cannot be loaded there, and the rest stops at operators that only that part declares. Here they are
declared, without an implementation, before torchvision is imported; torch refuses a call. A `.pth` file of the
environment imports this module at every start, so torch itself is imported only when torchvision is wanted.
"""

from __future__ import annotations

import sys
from typing import Any

_OPERATORS = ("nms", "qnms")


class _Declarer:
    """A finder that finds nothing: it sees that torchvision is about to be imported."""

    def __init__(self) -> None:
        self.library: Any = None  # torch forgets the declarations of a library that is garbage

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:  # the protocol of finders
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in _OPERATORS:
                if not hasattr(torch.ops.torchvision, operator):
                    self.library.define(f"{operator}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declarer())
