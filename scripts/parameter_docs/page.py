"""The texts of `docs/parameters.md` and of a page a section below it, from the option models and `conf/base`.

Types, limits and meanings are those of the models in `geo_sokoban_pipeline.config`; defaults are what a run without
any argument uses. Units, names in other libraries, and arguments that no model holds are tables in `names.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from scripts.parameter_docs.names import ARGUMENTS, OTHER_NAMES, UNITS

from geo_sokoban_pipeline.config.base import MOST, nested_models
from geo_sokoban_pipeline.config.estimators import ESTIMATORS
from geo_sokoban_pipeline.envs.adapters.gymnasium import GymnasiumOptions
from geo_sokoban_pipeline.envs.adapters.openenv import OpenEnvOptions
from geo_sokoban_pipeline.envs.geo3k.answer_env import AnswerEnvOptions
from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnvOptions
from geo_sokoban_pipeline.envs.geo3k.expert import GeometryExpert
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.envs.sokoban import expert as sokoban_expert
from geo_sokoban_pipeline.envs.sokoban.env import SokobanEnvOptions
from geo_sokoban_pipeline.parameters import ON_RUNS, ProjectParameters, section_model
from geo_sokoban_pipeline.rewards.geo3k import AnswerRewardOptions, FormatRewardOptions, ToleranceRewardOptions
from geo_sokoban_pipeline.rewards.sokoban import SokobanRewardOptions

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("sokoban", "geo3k", "geo3k_multi_turn")
MISSING = object()
# Bounds of every count and every seed, said once above the tables.
_GENERAL = (MOST, 2**63 - 1, -(2**63))

# Pages of the training options, by the first part of their names after the task's.
_OF_TRAINING = {
    "Training": ("", "prompts", "loop", "evaluation"),
    "Policy and warm start": ("policy", "warm_start"),
    "Environment and reward": ("env", "reward"),
    "Rollouts": ("rollout",),
    "Steps and ranks": ("grpo", "optimizer", "megatron", "ray"),
}

HEAD = """\
# Parameters

Written by `make docs` from the option models and `conf/base`; do not edit it by hand.

- A parameter is given on the command line, `--params train_sokoban.grpo.group_size=16,sokoban.inner_walls=[0,2]`, in a
  file with `--config=<file>.yml`, or in `conf/local/parameters.yml`. `--params` replaces the `params` of that file.
- `train_*` stands for `train_sokoban`, `train_geo3k` and `train_geo3k_multi_turn`, `geo3k*` for `geo3k` and
  `geo3k_multi_turn`. A default that differs between tasks is given for each.
- Defaults are those without `--env`: of the models, or of `conf/base` where it has the name. `null` is YAML's None.
- Every number is bounded: where no upper bound stands here, a count ends at 2,147,483,647 and a seed lies in 64 bits.
- The original systems are those of [deviations](deviations.md).
- The last two columns name what TRL 1.16.0 (`GRPOConfig`, or an argument of `GRPOTrainer`) and verl 0.9.1 (its
  `ppo_trainer`) call the same thing. An empty cell: they have no such setting, or one that means something else.
"""


@dataclass(frozen=True)
class Leaf:
    """One parameter of one task, or of all."""

    name: str
    kind: str
    default: Any
    meaning: str
    numeric: bool
    nullable: bool


@dataclass(frozen=True)
class Section:
    """Parameters of one model at one place."""

    name: str
    meaning: str
    leaves: tuple[Leaf, ...]


def base_parameters() -> dict[str, Any]:
    """Parameters of a run without any argument, as nested plain values."""
    from geo_sokoban_pipeline.hooks.config_loader import ProjectConfigLoader
    from geo_sokoban_pipeline.settings import CONFIG_LOADER_ARGS

    loader = ProjectConfigLoader(str(ROOT / "conf"), env="base", **CONFIG_LOADER_ARGS)
    return ProjectParameters.model_validate(loader["parameters"]).model_dump(mode="json", warnings=False)


def sections_of(model: type[BaseModel], name: str, values: Any = MISSING) -> Iterator[Section]:
    """A model's own parameters, then those of the models in it.

    Args:
        name: dotted path of the model.
        values: defaults, as nested plain values; missing: those of the model.
    """
    schema = model.model_json_schema()
    leaves, nested = [], []
    for field, info in model.model_fields.items():
        path = f"{name}.{field}" if name else field
        inner = nested_models(info.annotation)
        if inner and not _holds_many(info):
            nested += list(sections_of(inner[0], path, _pick(values, field)))
            continue
        leaves.append(_leaf(path, field, info, schema, values))
        one_or_none = types.NoneType in typing.get_args(info.annotation)
        for one in inner:
            nested += list(sections_of(one, path if one_or_none else f"{path}[]"))
    yield Section(name, _sentence(model.__doc__ or ""), tuple(leaves))
    yield from nested


def argument_sections(values: Mapping[str, Any]) -> list[Section]:
    """What environments, rewards and experts take as `args`; defaults as in the given parameters, else their own."""
    sokoban, problems = values["train_sokoban"], values["train_geo3k"]
    tools = values["train_geo3k_multi_turn"]
    return [
        *sections_of(SokobanEnvOptions, "train_sokoban.env.args", sokoban["env"]["args"]),
        *sections_of(AnswerEnvOptions, "train_geo3k.env.args", problems["env"]["args"]),
        *sections_of(Geo3kEnvOptions, "train_geo3k_multi_turn.env.args", tools["env"]["args"]),
        *sections_of(GymnasiumOptions, "train_*.env.args (gymnasium)"),
        *sections_of(OpenEnvOptions, "train_*.env.args (openenv)"),
        *sections_of(SokobanRewardOptions, "train_sokoban.reward.args", sokoban["reward"]["args"]),
        *sections_of(AnswerRewardOptions, "train_geo3k*.reward.args"),
        *sections_of(ToleranceRewardOptions, "train_geo3k*.reward.args (tolerance_reward)"),
        *sections_of(FormatRewardOptions, "train_geo3k*.reward.args (format_reward)"),
        _call_section(
            "train_sokoban.warm_start.teacher.args",
            "Of Sokoban's expert.",
            sokoban_expert.build_teacher,
            {"name", "patience", "noise"},
            sokoban["warm_start"]["teacher"].get("args", {}),
        ),
        _call_section(
            "train_geo3k*.warm_start.teacher.args",
            "Of geometry's expert.",
            GeometryExpert,
            {"name", "patience", "noise"},
            {},
        ),
        *(
            section
            for kind, known in ESTIMATORS.items()
            for name, one in known.items()
            for section in sections_of(one.arguments, f"train_*.grpo.{kind}_args ({name})")
        ),
    ]


def all_sections() -> list[tuple[str, list[dict[str, Section]]]]:
    """The page: headings, and below each its sections, each one by the task it is of (one key for all)."""
    values = base_parameters()
    fields = ProjectParameters.model_fields
    single = {
        name: list(sections_of(_model(name), name, values[name]))
        for name in fields
        if nested_models(fields[name].annotation)
    }
    root = Section(
        "",
        "Whole runs.",
        tuple(
            _leaf(n, n, f, ProjectParameters.model_json_schema(), values) for n, f in fields.items() if n not in single
        ),
    )
    groups = [("Runs", [{"": root}, *({"": one} for one in single["tracking"])])]
    groups.append(("Data of Sokoban", [{"": one} for one in single["sokoban"]]))
    groups.append(("Data of geometry", _merged(single, "", TASKS[1:], "geo3k*")))
    arguments = {section.name: section for section in argument_sections(values)}
    training = []
    for place in _merged(single, "train_", TASKS, "train_*"):
        training.append(place)
        end = next(iter(place.values())).name.partition(".")[2]
        training += [{"": section} for name, section in arguments.items() if end and _belongs(name, end)]
    for title, parts in _OF_TRAINING.items():
        groups.append((title, [place for place in training if _part_of(place) in parts]))
    stored = [
        place for kind in (*ON_RUNS, "check", "estimate") for place in _merged(single, f"{kind}_", TASKS, f"{kind}_*")
    ] + [{"": one} for one in single["audit"]]
    groups.append(("Other commands", stored))
    studies = [{"": one} for one in (*single["study"], *sections_of(section_model("study_default"), "study_*"))]
    groups.append(("Studies", studies))
    return groups


def _part_of(place: Mapping[str, Section]) -> str:
    """`rollout` of a section `train_*.rollout.server`."""
    return next(iter(place.values())).name.split(" ")[0].partition(".")[2].partition(".")[0]


def write_pages() -> dict[str, str]:
    """Texts by the files' names in `docs`: the first one leads to every section of the others."""
    index, pages = [HEAD], dict[str, str]()
    for title, places in all_sections():
        page = f"parameters/{title.lower().replace(' ', '_')}.md"
        names = [next(iter(place.values())).name for place in places if any(one.leaves for one in place.values())]
        links = ", ".join(f"[`{_shown_name(name)}`]({page}#{_anchor(name)})" for name in names if name)
        index.append(f"- [{title}]({page}){': ' + links if links else ''}")
        tables = [line for place in places for line in [*_table(place), *_estimators(next(iter(place.values())))]]
        pages[page] = (
            "\n".join([f"# {title}", "", "Read [how they are given](../parameters.md) first.", *tables]) + "\n"
        )
    return {"parameters.md": "\n".join(index) + "\n", **pages}


def _table(place: Mapping[str, Section]) -> list[str]:
    first = next(iter(place.values()))
    names = list(dict.fromkeys(leaf.name for section in place.values() for leaf in section.leaves))
    if not names:
        return []
    head = ["", f"## {_shown_name(first.name)}", "", _shown(first.meaning)] if first.name else []
    rows = ["", "| parameter | type | default | unit | meaning | TRL | verl |", "|---|---|---|---|---|---|---|"]
    for name in names:
        found = {task: leaf for task, section in place.items() for leaf in section.leaves if leaf.name == name}
        trl, verl = OTHER_NAMES.get(name, ("", ""))
        cells = [
            f"`{name}`",
            _by_task({task: leaf.kind for task, leaf in found.items()}, place),
            _by_task({task: _default(leaf) for task, leaf in found.items()}, place),
            unit_of(name),
            _by_task({task: _shown(leaf.meaning) for task, leaf in found.items()}, place),
            _code(trl),
            _code(verl),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*head, *rows]


def _estimators(section: Section) -> list[str]:
    """Below the section of GRPO: what each registered estimator computes."""
    if section.name != "train_*.grpo":
        return []
    rows = ["", "## Registered estimators", "", "| option | name | meaning |", "|---|---|---|"]
    for kind, known in ESTIMATORS.items():
        for name, one in known.items():
            function = load_object(f"geo_sokoban_pipeline.grpo.{one.function}")
            source = _sentence(inspect.getmodule(function).__doc__ or "")
            words = f"{source} {_sentence(function.__doc__)}" if "arXiv" in source else _sentence(function.__doc__)
            cells = [f"`grpo.{kind}`", f"`{name}`", words]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _by_task(values: Mapping[str, str], place: Mapping[str, Section]) -> str:
    """One value where all tasks agree; else one for each, with the task's name where not every task has one."""
    if len(set(values.values())) == 1 and len(values) == len(place):
        return next(iter(values.values()))
    return "<br>".join(f"{task}: {value}" for task, value in values.items())


def _merged(
    single: Mapping[str, list[Section]], prefix: str, tasks: Sequence[str], shown: str
) -> list[dict[str, Section]]:
    """Sections of several tasks side by side, with one name for all, in the order of the first that has them."""
    places: dict[str, dict[str, Section]] = {}
    for task in tasks:
        for section in single[prefix + task]:
            name = shown + section.name.removeprefix(prefix + task)
            leaves = tuple(
                dataclasses.replace(leaf, name=shown + leaf.name.removeprefix(prefix + task)) for leaf in section.leaves
            )
            places.setdefault(name, {})[task] = Section(name, section.meaning, leaves)
    return list(places.values())


def _call_section(name: str, meaning: str, call: Any, without: set[str], given: Mapping[str, Any]) -> Section:
    """Section of a function's keyword arguments; `given` wins over their defaults."""
    leaves = []
    for one in inspect.signature(call).parameters.values():
        if one.name in without:
            continue
        path, default = f"{name}.{one.name}", one.default
        numeric = isinstance(default, int | float) and not isinstance(default, bool)
        shown, kind = given.get(one.name, default), _plain_kind(str(one.annotation))
        leaves.append(Leaf(path, kind, shown, ARGUMENTS.get(path, ""), numeric, default is None))
    return Section(name, meaning, tuple(leaves))


def _leaf(path: str, field: str, info: FieldInfo, schema: Mapping[str, Any], values: Any) -> Leaf:
    shape = schema["properties"][field]
    choices = shape.get("anyOf", [shape])
    plain = [choice for choice in choices if choice.get("type") != "null"]
    default = _pick(values, field)
    if default is MISSING and not info.is_required():
        default = info.get_default(call_default_factory=True)
    numeric = any(choice.get("type") in ("integer", "number") for choice in plain)
    kind = " or ".join(dict.fromkeys(_kind(choice, schema) for choice in plain)) + (
        " or null" if len(plain) < len(choices) else ""
    )
    return Leaf(path, kind, default, info.description or "", numeric, len(plain) < len(choices))


def _kind(shape: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in shape:
        return "section, see below"
    if "enum" in shape or "const" in shape:
        return ", ".join(f"`{_json(value)}`".replace('"', "") for value in shape.get("enum", [shape.get("const")]))
    kind = shape.get("type")
    if kind == "array":
        parts = shape.get("prefixItems") or [shape.get("items") or {}]
        inner = " and ".join(dict.fromkeys(_kind(part, schema) for part in parts))
        size = f" of {len(parts)} ×" if shape.get("prefixItems") else " of"
        return f"list{size} {inner}"
    if kind == "object":
        values = shape.get("additionalProperties")
        return f"mapping of {_kind(values, schema)}" if isinstance(values, Mapping) and values else "mapping"
    word = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}.get(
        str(kind), "any value"
    )
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "multipleOf": "multiple of",
    }
    limits = [f"{sign} {_json(shape[key])}" for key, sign in signs.items() if shape.get(key) not in (None, *_GENERAL)]
    return f"{word} {', '.join(limits)}" if limits else word


def _plain_kind(annotation: str) -> str:
    words = {"int": "integer", "float": "number", "str": "text", "bool": "true or false"}
    if annotation.startswith("Literal["):
        return ", ".join(f"`{word.strip(' ')[1:-1]}`" for word in annotation[8:-1].split(","))
    return " or ".join(words.get(part.strip(), part.strip()) for part in annotation.replace("None", "null").split("|"))


def _holds_many(info: FieldInfo) -> bool:
    return not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel))


def _belongs(name: str, end: str) -> bool:
    """Whether arguments stand below a section: `train_sokoban.env.args.rewards` below `env`."""
    return re.split(r"\.\w*args", name.partition(".")[2])[0] == end


def _model(name: str) -> type[BaseModel]:
    return nested_models(ProjectParameters.model_fields[name].annotation)[0]


def _pick(values: Any, field: str) -> Any:
    # A value that the model leaves out because it is the default is not in its dump either.
    return values.get(field, MISSING) if isinstance(values, Mapping) else MISSING


def unit_of(name: str) -> str:
    """Unit of a parameter, empty where none is known: that of the whole name, else that of its last part."""
    return UNITS.get(name, UNITS.get(name.rpartition(".")[2], ""))


def _sentence(text: str) -> str:
    return " ".join(text.split("\n\n", maxsplit=1)[0].split())


def _shown(text: str) -> str:
    """A description in Markdown: None as in YAML, and no `<word>` that a browser would take for a tag."""
    plain = re.sub(r"\bNone\b(?=[:; ])", "`null`", text.replace("\n", " "))
    return "`".join(part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(plain.split("`")))


def _shown_name(name: str) -> str:
    return name or "Top level"


def _code(name: str) -> str:
    return ", ".join(f"`{part}`" for part in name.split(", ")) if name else ""


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _default(leaf: Leaf) -> str:
    if leaf.default is MISSING:
        return "needed"
    given = leaf.default and leaf.name.endswith("args")
    return "see below" if given else f"`{_json(leaf.default)}`"


def _json(value: Any) -> str:
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False, default=str)
