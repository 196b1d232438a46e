"""Walking over option models, so that tables of tests can be held to have an entry for every field there is."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Fields by their dotted names, those of nested models included, the nested models themselves not."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            found |= leaves(nested, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def value_at(options: BaseModel, path: str) -> Any:
    """A field, or an entry of one that is a mapping."""
    value: Any = options
    for name in path.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def with_value(options: Model, changes: Mapping[str, Any]) -> Model:
    """The same options but for some values, by their dotted names; validated anew."""
    return type(options).model_validate(set_values(options.model_dump(), changes))


def set_values(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set nested values by their dotted names."""
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
        if f"{name}_args" in place:  # those of another estimator
            place[f"{name}_args"] = {}
    return values


def with_another_value(options: Model, path: str, beside: Mapping[str, Any] | None = None) -> Model:
    """The options with any other value of one field that is allowed; `beside` is changed with it."""
    field = leaves(type(options))[path]
    before = value_at(options, path)
    for candidate in _candidates(field.annotation, before):
        try:
            changed = with_value(options, {path: candidate, **(beside or {})})
        except ValidationError:
            continue
        if value_at(changed, path) != before:
            return changed
    raise AssertionError(f"{path}={before!r}: no other value of {field.annotation} is allowed")


def _candidates(annotation: Any, before: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        yield from typing.get_args(annotation)
    elif origin in (typing.Union, types.UnionType):
        for one in typing.get_args(annotation):
            yield from _candidates(one, before)
    elif origin is typing.Annotated:
        yield from _candidates(typing.get_args(annotation)[0], before)
    elif origin is tuple:
        yield ()
        yield tuple(value * 0.9 for value in before or ())
        yield (1, 2)
        yield ("word",)
    elif origin is dict:
        yield {**(before or {}), "another": "1"}
        yield {"eval": 0.5}
        yield {"arc": 1.0}
    elif annotation is bool:
        yield not before
    elif annotation is int:
        yield from ((before or 0) + 1, (before or 0) * 2, (before or 0) - 1, (before or 0) // 2)
    elif annotation is float:
        yield from ((before or 1.0) * 0.9, (before or 1.0) * 1.5, 0.5, 1.0)
    elif annotation is str:
        yield f"{before or ''}x"
