"""Base of all options: strict models, bounded numbers, and one readable text with all errors in parameters.

An error line always has the same shape, `full.path=value: what is allowed. Did you mean …?`, and all errors are
reported at once, so that one run shows everything to correct. The texts are ours, because pydantic's name the class of
a model instead of the parameter's path, and no near name.

Every number has a lower and an upper bound, so that no value passes here and fails hours later. The types below are the
bounds that many fields share; a field with reasons of its own states its own.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    create_model,
)

from geo_sokoban_pipeline.masking import mask_addresses

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]

_SHOWN_CHARACTERS = 80
_SECRETS = "environment"  # a section whose values are shown nowhere

MOST = 2**31 - 1  # tables store what is counted as 32-bit numbers
LAST_ITERATION = 99_999  # folders `iter=00012` are sorted as text, by five digits
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Iterations = Annotated[int, Field(ge=1, le=LAST_ITERATION)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]  # what JSON and Arrow can store
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]  # what timers of the system take
Port = Annotated[int, Field(ge=1, le=65_535)]
Reward = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]


class ParameterError(ValueError):
    """Parameters that cannot be used; the text holds one line for each of them."""


def refuse_first(*rules: tuple[Any, str]) -> None:
    """Refuse options by the first rule that is broken.

    Args:
        rules: whether each is broken, and what is wrong then.

    Raises:
        ValueError: one is.
    """
    for is_broken, text in rules:
        if is_broken:
            raise ValueError(text)


class ArgumentsError(ValueError):
    """Options beside the name of an estimator that its model refuses.

    Attributes:
        error: of the model.
        given: the options.
        model: the model.
    """

    def __init__(self, error: ValidationError, given: Mapping[str, Any], model: type[BaseModel]) -> None:
        super().__init__(str(error))
        self.error, self.given, self.model = error, given, model


class StrictModel(BaseModel):
    """Base of all options: unknown names are errors, values are finite, instances never change.

    Attributes:
        former_names: new places of former names, for the message about them.
    """

    former_names: ClassVar[Mapping[str, str]] = {}

    # Schemas are built when they are first needed: every command imports the models of all tasks.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


@dataclass(frozen=True)
class Setting:
    """A default that a task gives to a field, with what else is its own there.

    Attributes:
        value: the default.
        description: meaning of the field in this task. None: as the model says.
        choices: values that are allowed. None: as the model says.
    """

    value: Any
    description: str | None = None
    choices: tuple[Any, ...] | None = None


def with_defaults(model: type[Model], defaults: Mapping[str, Any]) -> type[Model]:
    """The model with other defaults.

    Args:
        defaults: by field: a value or a `Setting`; of a field that is a model itself, a mapping of the same kind.

    Raises:
        ValueError: the model has no field of that name.
    """
    fields: dict[str, Any] = {}
    for name, given in defaults.items():
        if name not in model.model_fields:
            raise ValueError(f"defaults of {model.__name__}: {name} is none of {', '.join(model.model_fields)}")
        info = model.model_fields[name]
        if isinstance(given, Mapping) and isinstance(info.annotation, type):  # a mapping itself is a generic alias
            nested = with_defaults(info.annotation, given)
            fields[name] = (nested, Field(default_factory=nested, description=info.description))
            continue
        setting = given if isinstance(given, Setting) else Setting(given)
        kind: Any = info.annotation if setting.choices is None else Literal[setting.choices]
        for limit in info.metadata:
            kind = Annotated[kind, limit]
        fields[name] = (kind, Field(setting.value, description=setting.description or info.description))
    made: type[Model] = create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)
    root = next(base for base in made.__mro__[1:] if "is_made" not in base.__dict__)
    made.is_made = True  # type: ignore[attr-defined]
    # A process that unpickles it finds no class of that name: only defaults differ, so the model itself will do.
    made.__reduce__ = lambda self: (_restore, (root, self.__getstate__()))  # type: ignore[method-assign]
    return made


def _restore(model: type[Model], state: dict[Any, Any]) -> Model:
    restored = model.__new__(model)
    restored.__setstate__(state)
    return restored


_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _check_run_id(value: str) -> str:
    """See that a run id can be the name of a folder.

    Raises:
        ValueError: it cannot.
    """
    if not _RUN_ID.fullmatch(value):
        raise ValueError(
            "a run id is the name of a folder: up to 100 letters, digits, dots, dashes and underscores, "
            "a letter or digit first"
        )
    return value


RunId = Annotated[str, AfterValidator(_check_run_id)]

_RUN_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")


def _as_run_name(value: Any) -> str:
    if not isinstance(value, str) or not _RUN_NAME.fullmatch(value):
        raise ValueError(
            "it is the name of the pipeline that made the run, train_<task>: lower case letters, digits and "
            "underscores, a letter first. Give its run id in source.run_id, a policy's folder in source.checkpoint"
        )
    return value


RunName = Annotated[str, BeforeValidator(_as_run_name)]


def split_runs(value: Any) -> Any:
    """Names of runs from a list, or from one text with `+` between them, as `default+seed2`."""
    return value.split("+") if isinstance(value, str) else value


# Run ids, or a training pipeline and a run id each.
_RUN_PATH = r"^(train_[a-z0-9_]+/)?[A-Za-z0-9][A-Za-z0-9._-]*$"
RunNames = Annotated[list[Annotated[str, StringConstraints(pattern=_RUN_PATH)]], BeforeValidator(split_runs)]


def validate_parameters(params: Mapping[str, Any], model: type[Model], *, prefix: str = "") -> Model:
    """Build a model from parameters.

    Args:
        params: nested mapping, as the config loader gives it.
        model: what the mapping must be.
        prefix: path of `params` within all parameters, such as `train_sokoban.grpo`; stands before every name.

    Raises:
        ParameterError: something is unknown, missing or not allowed.
    """
    try:
        return model.model_validate(dict(params))
    except ValidationError as error:
        lines = list(_describe_all(error, params, model, prefix))
    if len(lines) > 1:
        lines = [f"{len(lines)} parameters cannot be used:", *(f"  {line}" for line in lines)]
    raise ParameterError("\n".join(lines))


def parameter_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all parameters of a model, those of nested models included."""
    for name, field in model.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        yield path
        for nested in nested_models(field.annotation):
            if nested is not model:
                yield from parameter_names(nested, path)


def _describe_all(error: ValidationError, params: Mapping[str, Any], model: type[Model], prefix: str) -> Iterator[str]:
    for details in error.errors():
        within = details.get("ctx", {}).get("error")
        if isinstance(within, ArgumentsError):
            yield from _describe_all(within.error, within.given, within.model, _dotted(prefix, *details["loc"]))
        else:
            yield _describe(details, params, model, prefix)


def _describe(details: Any, params: Mapping[str, Any], model: type[BaseModel], prefix: str) -> str:
    """One line for one of pydantic's errors."""
    location: Location = details["loc"]
    path = _dotted(prefix, *_real_path(location, params))
    if details["type"] == "missing":
        return f"{path}: this parameter is needed but not given."
    shown = f"{path or 'parameters'}{'=***' if _SECRETS in path.split('.') else _shown(details['input'])}"
    if details["type"] == "extra_forbidden":
        return f"{shown}: unknown name. {_known_names(location, path.rpartition('.')[0], model, prefix)}"
    if details["type"] == "string_type" and isinstance(details["input"], int | float):
        read = "true or false" if isinstance(details["input"], bool) else "a number"
        return f"{shown}: a text is needed, and YAML reads {read}. Quote it as it is meant."
    allowed = re.sub(r"^(Value|Assertion) error, ", "", details["msg"]).rstrip(".")
    if details["type"].startswith(("greater_than", "less_than")):  # pydantic writes out all zeros of 1e-16
        allowed = re.sub(r"0\.0{4,}\d+", lambda bound: f"{float(bound[0]):g}", allowed)
    near = nearest(str(details["input"]), re.findall(r"'([^']*)'", details.get("ctx", {}).get("expected", "")))
    return f"{shown}: {allowed[:1].lower()}{allowed[1:]}.{f' Did you mean {near}?' if near else ''}"


def _dotted(*parts: int | str) -> str:
    return ".".join(str(part) for part in parts if part != "")


def _shown(value: Any) -> str:
    """`=value`, shortened; nothing for a whole section, which the path names already."""
    if isinstance(value, Mapping | BaseModel):
        return ""
    text = mask_addresses(json.dumps(value, ensure_ascii=False, default=repr))
    return f"={text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '…'}"


def _real_path(location: Location, params: Any) -> list[int | str]:
    """The parts of an error's location that are keys of the parameters: pydantic also puts the tags of unions there."""
    path: list[int | str] = []
    here = params
    for position, part in enumerate(location):
        is_key = isinstance(here, Mapping) and part in here
        is_index = isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)
        if is_key or is_index:
            here = here[part]
        elif not (isinstance(here, Mapping) and position == len(location) - 1):
            continue
        path.append(part)
    return path


def nested_models(annotation: Any) -> list[type[BaseModel]]:
    """All models that a field's annotation mentions, through unions, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in nested_models(argument)]


def allowed_types(model: type[BaseModel], name: str) -> set[Any]:
    """Types of what may stand at a dotted name: `str`, `int`, `NoneType`, `Any`, …; empty for an unknown name.

    For a list they are `list` and the types of its elements; the name of an element is its index.
    """
    annotations: list[Any] = [model]
    for part in name.split("."):
        annotations = [found for annotation in annotations for found in _inside(annotation, part)]
    return {kind for annotation in annotations for kind in _types(annotation)}


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union; of a `Literal` those of its values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _members(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _members(argument)
    elif origin is Literal:
        yield from map(type, arguments)
    else:
        yield annotation


def _inside(annotation: Any, part: str) -> Iterator[Any]:
    for member in _members(annotation):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if member is Any:
            yield Any
        elif isinstance(member, type) and issubclass(member, BaseModel) and part in member.model_fields:
            yield member.model_fields[part].annotation
        elif origin is dict:
            yield arguments[1]
        elif origin in (list, tuple) and part.isdecimal():
            kinds = [kind for kind in arguments if kind is not ...]
            yield kinds[min(int(part), len(kinds) - 1)]


def _types(annotation: Any) -> Iterator[Any]:
    for member in _members(annotation):
        if typing.get_origin(member) in (list, tuple):
            yield list
            for kind in typing.get_args(member):
                yield from _types(kind)
        else:
            yield str if member is SecretStr else typing.get_origin(member) or member


def _known_names(location: Location, section: str, model: type[BaseModel], prefix: str) -> str:
    """The hint beside an unknown name: the nearest known one, else all of them, else the same name elsewhere."""
    *parents, unknown = (str(part) for part in location)
    models = [model]
    for part in parents:
        fields = [candidate.model_fields[part] for candidate in models if part in candidate.model_fields]
        # A part that is no field is the tag of a union, an index or a free key: the models stay the same.
        models = [nested for field in fields for nested in nested_models(field.annotation)] or models
    moved = {name: place for candidate in models for name, place in getattr(candidate, "former_names", {}).items()}
    if unknown in moved:
        return f"It is {_dotted(section, moved[unknown])} now."
    siblings = sorted({name for candidate in models for name in candidate.model_fields} - {unknown})
    if near := nearest(unknown, siblings):
        return f"Did you mean {_dotted(section, near)}?"
    paths = [path for path in parameter_names(model, prefix) if path.endswith(f".{unknown}")]
    further = f"It is known as {', '.join(paths[:3])}." if paths else "What each means: docs/parameters.md."
    return f"Known here: {', '.join(siblings) or 'none'}. {further}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar known word, if one is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)
