"""What the data of every task has in common: how many rows a split takes, how rows are split, what an image may
cost, and which settings make them what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from geo_sokoban_pipeline.config.base import Count, CountOrZero, Share, StrictModel, refuse_first


class SplitCounts(StrictModel):
    """Rows of each split: exactly these many where they are generated, at most these many where they are read."""

    train: CountOrZero | None = Field(None, description="Training rows. None: all there are.")
    validation: CountOrZero | None = Field(None, description="Validation rows. None: all there are.")
    eval: CountOrZero | None = Field(None, description="Evaluation rows. None: all there are.")


class SplitShares(StrictModel):
    """Parts that go to each split; they add up to 1."""

    train: Share = Field(0.8, description="Part for training.")
    validation: Share = Field(0.1, description="Part for validation.")
    eval: Share = Field(0.1, description="Part for evaluation.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = self.train + self.validation + self.eval
        refuse_first((abs(total - 1) > 1e-6, f"shares add up to {total:g}; train + validation + eval must be 1."))
        return self


class ImageLimits(StrictModel):
    """Limits of an image inside a row; larger ones are rejected before they are decoded."""

    max_bytes: Count = Field(8 << 20, description="Bytes of one encoded image.")
    max_pixels: Count = Field(1 << 24, description="Width times height of one image.")


class DataOptions(StrictModel):
    """Options of a task's data: its model inherits from here, and has a `source` and a `seed`.

    Attributes:
        UNUSED: by source, fields that change none of its rows (`section.field` of a nested one). All
            others belong to the identity of the data.
    """

    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    source: str = "generate"

    @property
    def label(self) -> str:
        """Words by which people recognise generated data, such as a size; they begin the name of its folder."""
        return ""

    def steps(self) -> tuple[int, int] | None:
        """Fewest and most actions that generated prompts need; None where the task knows none, or nothing is made."""
        return None
