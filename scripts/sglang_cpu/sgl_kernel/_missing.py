"""Stands in the place of a kernel, and raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def missing_kernel(name: str) -> Callable[..., NoReturn]:
    """A function that says which kernel was called and is not there."""

    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is a compiled kernel of sgl_kernel; the stand-in for CPUs has none.")

    kernel.__name__ = name
    return kernel
