"""docs/parameters.md: current, complete, and true to the models."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from scripts.parameter_docs.names import ARGUMENTS, OTHER_NAMES, UNITS
from scripts.parameter_docs.page import Leaf, all_sections, unit_of, write_pages

from geo_sokoban_pipeline.config.base import parameter_names
from geo_sokoban_pipeline.config.estimators import ESTIMATORS
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.runs.fingerprint import unflatten
from geo_sokoban_pipeline.tasks import TASKS

ROOT = Path(__file__).parents[1]
NAMES = "scripts/parameter_docs/names.py"
OPTIONS = {
    f"{kind}_args.{option}"
    for kind, known in ESTIMATORS.items()
    for one in known.values()
    for option in one.arguments.model_fields
}


@pytest.fixture(scope="module")
def leaves() -> list[Leaf]:
    places = [place for _, places in all_sections() for place in places]
    return [leaf for place in places for section in place.values() for leaf in section.leaves]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return write_pages()


def test_the_pages_are_current(pages):
    docs = ROOT / "docs"
    found = [docs / "parameters.md", *sorted((docs / "parameters").iterdir())]
    stored = {path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8") for path in found}
    assert stored == pages, "docs/parameters.md is not current; `make docs` writes it"
    done = subprocess.run(["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m scripts.parameter_docs" in done.stdout
    for page in pages.values():
        headings = re.findall(r"^##+ (.*)$", page, flags=re.MULTILINE)
        assert len(headings) == len(set(headings)), "a heading stands twice"


def test_every_parameter_is_on_the_page(leaves):
    """Each name of the models, with the task or study that stands in it as on the page."""
    shown = {leaf.name.replace("[]", "") for leaf in leaves}
    shown |= {name[:at] for name in shown for at, letter in enumerate(name) if letter == "."}
    patterns = (
        (
            r"^(train|rollout|update|evaluate|regrade|export|report|browse|score|fork|credit|control|check|estimate)_(sokoban|geo3k_multi_turn|geo3k)\b",
            r"\1_*",
        ),
        (r"^(geo3k_multi_turn|geo3k)\b", "geo3k*"),
        (r"^study_\w+", "study_*"),
    )
    missing = []
    for name in parameter_names(ProjectParameters):
        known = name
        for pattern, word in patterns:
            known = re.sub(pattern, word, known)
        missing += [] if known in shown or f"{known}.source" in shown or known in {"train_*"} else [name]
    assert missing == []


def test_every_option_of_an_estimator_is_on_the_page(leaves, pages):
    shown = {leaf.name.removeprefix("train_*.grpo.") for leaf in leaves if "_args (" in leaf.name}
    assert {re.sub(r" \(\w+\)", "", name) for name in shown} == OPTIONS
    for kind, known in ESTIMATORS.items():
        for name, one in known.items():
            assert {f"{kind}_args ({name}).{option}" for option in one.arguments.model_fields} <= shown
            assert f"| `grpo.{kind}` | `{name}` | " in pages["parameters/steps_and_ranks.md"]


def test_every_parameter_has_a_meaning_and_every_number_a_unit(leaves):
    assert [leaf.name for leaf in leaves if len(leaf.meaning) < 5] == [], f"describe the field, or add to {NAMES}"
    silent = [leaf.name for leaf in leaves if leaf.nullable and not re.search(r"\b(None|null)\b", leaf.meaning)]
    assert silent == [], "say what None is"
    assert [leaf.name for leaf in leaves if leaf.numeric and not unit_of(leaf.name)] == [], f"add a unit to {NAMES}"


def test_no_table_names_what_does_not_exist(leaves):
    names = {leaf.name for leaf in leaves}
    assert OTHER_NAMES.keys() - names == set()
    assert ARGUMENTS.keys() - names == set()
    assert UNITS.keys() - names - {name.rpartition(".")[2] for name in names} == set()


def test_rows_are_true_to_models_and_configuration(pages):
    whole = "\n".join(pages.values())
    rows = {line.split("|")[1].strip(): line for line in whole.splitlines() if line.startswith("| `")}
    size, temperature = rows["`train_*.grpo.group_size`"], rows["`train_*.rollout.sampling.temperature`"]
    assert "| `8` | episodes | Episodes of each prompt." in size and "`num_generations` | `rollout.n`" in size
    assert "number ≥ 0.01, ≤ 100 | `1.0` | factor |" in temperature
    groups = rows["`train_*.grpo.groups`"]
    assert "sokoban: `32`<br>geo3k: `48`<br>geo3k_multi_turn: `48`" in groups  # conf/base, not the model's 32
    assert "`direct`, `solver`, `random_legal`, `random`" in rows["`train_*.warm_start.teacher.name`"]
    assert "`-0.1` | reward |" in rows["`train_sokoban.env.args.rewards.lost`"]  # conf/base, not the environment's 0
    assert "`&lt;" not in whole and "with &lt;image> once" in rows["`sokoban.instruction`"]


def test_the_words_of_trl_and_verl_lead_to_options_that_exist():
    """The options of each row are valid together, and a bare name is a parameter."""
    rows = (ROOT / "docs" / "from_trl_and_verl.md").read_text(encoding="utf-8").split("\n## ")[1].splitlines()
    known, shown = {*parameter_names(ProjectParameters), *(f"train_sokoban.grpo.{name}" for name in OPTIONS)}, 0
    for row in (row for row in rows if row.startswith("|")):
        train, project = {"threads": 1}, {}  # as conf/base has it
        for name, value in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)(?:=([^`]+))?`", row.split("|")[2]):
            inside = f"train_sokoban.{name}" in known
            assert inside or name in known or not value, name
            shown += inside
            if value:
                (train if inside else project)[name] = yaml.safe_load(value)
        TASKS["sokoban"].train_config.model_validate(unflatten(train))
        ProjectParameters.model_validate(unflatten(project))
    assert shown > 30
