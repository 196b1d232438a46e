"""Options of generated geometry problems: which families, how hard, and how large the pictures are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from geo_sokoban_pipeline.options.base import StrictModel

Difficulty = Literal["tiny", "easy", "medium", "hard"]
_Length = Annotated[int, Field(ge=1, le=99)]  # tiny pictures hold two digits
TINY_SIZE = (128, 96)  # pixels of a tiny picture at scale 1: four by three tokens of the policy


class ProblemOptions(StrictModel):
    """What the generator draws; the defaults are what the tiny policy learns to read."""

    difficulty: Literal["tiny", "easy", "medium", "hard", "mixed"] = Field(
        "tiny",
        description="tiny: small images with big digits in fixed places, all of the question is in the image. "
        "easy, medium, hard: textbook figures with one step, an equation or a second rule. mixed: these three in turn.",
    )
    families: dict[str, Annotated[float, Field(ge=1e-6, le=1e6)]] | None = Field(
        None,
        description="Families and their relative shares. None: every family of the difficulty in equal shares (tiny: "
        "the five with one rule each).",
    )
    picture_scale: float = Field(
        1.0,
        ge=0.25,
        le=8,
        description="Size of images. 1: 128×96 px for tiny, about 380×270 px for the others. Tiny images stay "
        "aligned with tokens of 32 px where it is a whole number.",
    )
    angle_step: int = Field(1, ge=1, le=20, description="Angles given in tiny images are multiples of this, degrees.")
    held_out_angles: dict[Literal["eval", "validation"], Annotated[float, Field(gt=0, lt=1)]] = Field(
        {"eval": 0.25, "validation": 0.15},
        description="Share of a tiny family's angles that belong to one split alone, at least one angle; dealt by the "
        "data's seed, so that other families, if there are any, keep the angle in training. Splits that are not named "
        "share the rest. "
        "Empty: all splits share all angles, beside different lengths.",
    )
    lengths: tuple[_Length, _Length] = Field(
        (10, 99),
        description="Least and greatest length label of tiny images. No rule uses it; it makes images plentiful.",
    )

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError(f"{list(value)}: the least length is above the greatest; give them in rising order.")
        return value

    @field_validator("held_out_angles")
    @classmethod
    def _check_shares(cls, value: dict[str, float]) -> dict[str, float]:
        if sum(value.values()) >= 1:
            raise ValueError(f"{value}: the shares leave none for training; their sum must stay below 1.")
        return value

    @model_validator(mode="after")
    def _check(self) -> ProblemOptions:
        if self.families is not None and not self.families:
            raise ValueError("families is empty; name at least one or leave it null for all of the difficulty.")
        return self
