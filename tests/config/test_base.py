"""Parameter errors: one line each, with the full path, the value and the way out."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from geo_sokoban_pipeline.config.base import ParameterError, StrictModel, parameter_names, validate_parameters


class Cat(StrictModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=1)


class Dog(StrictModel):
    kind: Literal["dog"] = "dog"
    tricks: tuple[str, ...] = ()


class Range(StrictModel):
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _check(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Loop(StrictModel):
    iterations: int = Field(3, ge=1)
    save_interval: int = 1
    rate: float = 0.1


class Train(StrictModel):
    loop: Loop = Loop()
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    span: Range = Range()
    mode: Literal["fast", "exact"] = "fast"
    several: list[Loop] = []
    optional: Loop | None = None


class Root(StrictModel):
    train: Train = Train()
    name: str


TRAIN = [
    ({"loop": {"iteration": 5}}, "loop.iteration=5: unknown name. Did you mean loop.iterations?"),
    ({"loop": {"iterations": 0}}, "loop.iterations=0: input should be greater than or equal to 1."),
    ({"loop": {"iterations": "many"}}, 'loop.iterations="many": input should be a valid integer'),
    ({"loop": {"rate": float("nan")}}, "loop.rate=NaN: input should be a finite number."),
    ({"mode": "exakt"}, "mode=\"exakt\": input should be 'fast' or 'exact'. Did you mean exact?"),
    ({"mode": "x" * 500}, f'mode="{"x" * 79}…: input should be'),
    ({"span": {"low": 3}}, "span: low 3 is above high 1."),
    # the tag of a union is not part of the path that people type
    ({"pet": {"kind": "cat", "live": 3}}, "pet.live=3: unknown name. Did you mean pet.lives?"),
    ({"pet": {"kind": "cat", "lives": 0}}, "pet.lives=0: input should be"),
    ({"several": [{}, {"rat": 1}]}, "several.1.rat=1: unknown name. Did you mean several.1.rate?"),
    (
        {"optional": {"z": 1}},
        "optional.z=1: unknown name. Known here: iterations, rate, save_interval. What each means: docs/parameters.md.",
    ),
]
OTHERS = [
    # A name that is known elsewhere.
    ({"name": "a", "loop": {"iterations": 4}}, "loop: unknown name. … It is known as train.loop.", Root, ""),
    ({}, "name: this parameter is needed but not given.", Root, ""),
    ({"rat": 1}, "train.loop.rat=1: unknown name. Did you mean train.loop.rate?", Loop, "train.loop"),
]


@pytest.mark.parametrize(("params", "line", "model", "prefix"), [*((*row, Train, "") for row in TRAIN), *OTHERS])
def test_error_lines(params, line, model, prefix):
    with pytest.raises(ParameterError) as caught:
        validate_parameters(params, model, prefix=prefix)
    first, *more = line.split(" … ")
    assert str(caught.value).startswith(first) and str(caught.value).endswith("".join(more))
    assert "\n" not in str(caught.value)


def test_all_errors_are_reported_at_once():
    params = {"train": {"loop": {"iterations": 0, "rates": 1}}}
    with pytest.raises(ParameterError) as caught:
        validate_parameters(params, Root)
    first, *rest = str(caught.value).splitlines()
    assert first == "3 parameters cannot be used:"
    assert [line.split("=")[0].split(":")[0].strip() for line in rest] == [
        "train.loop.iterations",
        "train.loop.rates",
        "name",
    ]


def test_models_are_frozen_and_know_their_names():
    root = validate_parameters({"name": "a"}, Root)
    with pytest.raises(ValueError, match="frozen"):
        root.name = "b"
    assert {"train.loop.iterations", "train.pet.lives", "train.pet.tricks", "name"} <= set(parameter_names(Root))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_whatever_is_given_there_is_a_model_or_a_readable_error(value):
    try:
        root = validate_parameters({"name": "a", "train": value}, Root)
    except ParameterError as error:
        assert "train" in str(error)
    else:
        assert isinstance(root, Root)
