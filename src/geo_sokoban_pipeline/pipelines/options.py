"""Options of nodes: Kedro makes pydantic models of the parameters for which a node's function names a model.

The template of a pipeline serves several tasks, whose sections have models of their own, so a pipeline names the models
where it is made. Kedro builds a section once for all nodes; a node that takes only a part of it (`params:….policy`)
names no model, and gets that part of the section's model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

from pydantic import BaseModel


def typed(
    function: Callable[..., Any], fixed: Mapping[str, Any] | None = None, /, **models: type[BaseModel] | None
) -> Callable[..., Any]:
    """A node's function with these models as its type hints, by argument; none for a function without typed options.

    Args:
        function: of the node.
        fixed: keyword arguments that no input of the node gives.
        models: by argument.

    A function may take sections as `**sections`: the arguments are then its own ones without a default, followed by
    the other models in their order, because Kedro pairs a node's inputs with arguments by position. None: a section
    without a model, which the function gets as plain values.

    Its own hints are left out: Kedro resolves all hints of a function or none, with a warning, and those of frames and
    tables would import pandas and pyarrow with the registry. A generator stays one.
    """
    wrapped = update_wrapper(partial(function, **(fixed or {})), function)
    wrapped.__annotations__ = {name: model for name, model in models.items() if model is not None}
    own = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in own):
        names = dict.fromkeys([one.name for one in own if one.kind is one.POSITIONAL_OR_KEYWORD] + list(models))
        arguments = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        wrapped.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    return wrapped
