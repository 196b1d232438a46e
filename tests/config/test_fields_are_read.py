"""Every field of every option is read by the code, and not only by what checks, compares or shows options."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import geo_sokoban_pipeline
from config.reads import Reads
from geo_sokoban_pipeline import config
from geo_sokoban_pipeline.config.base import StrictModel

SOURCES = Path(geo_sokoban_pipeline.__file__).parent
# Whoever only looks at options there does nothing with them.
WATCHERS = ("runs/fingerprint.py", "preflight/")
# Fields whose reading has no name in the code: (model, field or * for all) → (file, what stands there).
ELSEWHERE = {
    ("GradingOptions", "preset"): ("rewards/geo3k.py", 'given.get("preset")'),
    ("CriterionOptions", "*"): ("studies/results.py", "criterion.model_dump("),
    ("ExportPipelineOptions", "*"): ("pipelines/stored/nodes.py", "Selection(**options.model_dump("),
    ("SamplingOverrides", "*"): ("config/grpo.py", "self.evaluation.sampling.model_dump("),
    ("CheckPipelineOptions", "imitation_steps"): ("preflight/resources.py", ".imitation_steps"),
    ("CheckPipelineOptions", "rows"): ("preflight/flight.py", "settings.rows"),
    ("CheckPipelineOptions", "network_timeout"): ("preflight/flight.py", "settings.network_timeout"),
    ("CheckPipelineOptions", "memory_share"): ("preflight/flight.py", "settings.memory_share"),
    ("HubOptions", "revision"): ("pipelines/hub_rows.py", "revision=options.revision"),  # a protocol of such options
    ("HubOptions", "split"): ("pipelines/hub_rows.py", "split=options.split"),
    ("GeometryHubOptions", "revision"): ("pipelines/hub_rows.py", "revision=options.revision"),
    ("GeometryHubOptions", "streaming"): ("pipelines/hub_rows.py", 'getattr(hub, "streaming"'),
}


OPTIONS_OF_TASKS = [
    f"geo_sokoban_pipeline.{name}"
    for name in ("envs.sokoban.config", "envs.geo3k.config", "envs.geo3k.env", "envs.geo3k.answer_env", "rewards.geo3k")
]


def subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in model.__subclasses__():
        yield one
        yield from subclasses(one)


def option_models() -> list[type[BaseModel]]:
    names = [f"{config.__name__}.{module.name}" for module in pkgutil.iter_modules(config.__path__)] + OPTIONS_OF_TASKS
    for name in names:
        importlib.import_module(name)
    found = {model for model in subclasses(StrictModel) if model.__module__ in names and "is_made" not in vars(model)}
    return sorted(found, key=lambda model: (model.__name__, model.__module__))


@pytest.fixture(scope="module")
def reads() -> Reads:
    return Reads(SOURCES, option_models())


def is_elsewhere(model: type[BaseModel], field: str) -> bool:
    return any(base.__name__ == name and which in ("*", field) for base in model.__mro__ for name, which in ELSEWHERE)


def readers(reads: Reads, model: type[BaseModel], field: str) -> set[str]:
    """Files that read a field of a model, of one of its kind, or of what it is a kind of."""
    return {
        file
        for (other, name), files in reads.found.items()
        if name == field and (issubclass(model, other) or issubclass(other, model))
        for file in files
    }


def in_force(files: set[str]) -> bool:
    return any(not file.startswith(WATCHERS) for file in files)


def test_every_field_is_read(reads: Reads) -> None:
    unread = [
        f"{model.__name__}.{field}"
        for model in option_models()
        for field in model.model_fields
        if not is_elsewhere(model, field) and not in_force(readers(reads, model, field))
    ]
    assert unread == [], "read by nothing but what checks or shows options"


@pytest.mark.parametrize(("name", "field"), ELSEWHERE)
def test_no_exception_is_left_over(name: str, field: str, reads: Reads) -> None:
    file, text = ELSEWHERE[name, field]
    assert text in (SOURCES / file).read_text("utf-8")
    (model,) = [model for model in option_models() if model.__name__ == name]
    fields = list(model.model_fields) if field == "*" else [field]
    assert any(not in_force(readers(reads, model, one)) for one in fields), "it is found without an exception"


def test_an_equal_name_elsewhere_does_not_count(tmp_path: Path) -> None:
    """The inference itself, on a few lines: what it finds, and what it must not take for a read."""

    class Inner(StrictModel):
        used: int = 1
        unused: int = 1
        checked: int = 1

    class Outer(StrictModel):
        inner: Inner = Inner()
        inners: tuple[Inner, ...] = ()
        twin: int = 1

    (tmp_path / "code.py").write_text(
        "class Holder:\n"
        "    def __init__(self, outer: Outer) -> None:\n"
        "        self.held, self.other = outer.inner, 3\n"
        "    async def use(self, item: Other) -> int:\n"
        "        kept = self.held\n"
        "        return kept.used + item.unused + item.twin\n"
        "    @field_validator('checked')\n"
        "    def check(self, inner: Inner) -> int:\n"
        "        return inner.checked\n"
    )
    found = Reads(tmp_path, [Inner, Outer]).found
    assert found == {(Outer, "inner"): {"code.py"}, (Inner, "used"): {"code.py"}}
    (tmp_path / "more.py").write_text("def use(outer: Outer):\n    return [one.unused for one in outer.inners]\n")
    found = Reads(tmp_path, [Inner, Outer]).found
    assert found[Inner, "unused"] == {"more.py"} and (Outer, "twin") not in found
