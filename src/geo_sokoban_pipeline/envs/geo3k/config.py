"""Options of the geometry data: generated problems (families, difficulty, images), sources, splits, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from geo_sokoban_pipeline.config import data
from geo_sokoban_pipeline.config.base import Count, CountOrZero, Seed, StrictModel, refuse_first

Difficulty = Literal["tiny", "easy", "medium", "hard"]
_Length = Annotated[int, Field(ge=1, le=99)]  # tiny images hold two digits
TINY_SIZE = (128, 96)  # pixels of a tiny image at scale 1: four by three tokens of the policy


class ProblemOptions(StrictModel):
    """Generated problems; the defaults suit the tiny policy."""

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
        description="Share of a tiny family's angles that belong to one split alone, at least one angle. The data's "
        "seed chooses them, so that other families, if there are any, keep the angle in training. The other splits "
        "share the rest. Empty: all splits share all angles, with different lengths.",
    )
    lengths: tuple[_Length, _Length] = Field(
        (10, 99),
        description="Least and greatest length label of tiny images. No rule uses it; it makes images plentiful.",
    )

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, value: tuple[int, int]) -> tuple[int, int]:
        refuse_first(
            (value[0] > value[1], f"{list(value)}: the least length is above the greatest; give them in rising order.")
        )
        return value

    @field_validator("held_out_angles")
    @classmethod
    def _check_shares(cls, value: dict[str, float]) -> dict[str, float]:
        refuse_first(
            (
                sum(value.values()) >= 1,
                f"{value}: the shares leave none for training; their sum must stay below 1.",
            )
        )
        return value

    @model_validator(mode="after")
    def _check(self) -> ProblemOptions:
        refuse_first(
            (self.families == {}, "families is empty; name at least one or leave it null for all of the difficulty.")
        )
        return self


# Options of the geometry data: where problems come from, how they are split, and what a prompt looks like.


INSTRUCTIONS = ("question", "boxed", "tool_brief", "tool")
QUESTION_MARK = "{question}"


class ProblemCounts(data.SplitCounts):
    """Problems of each split: exactly these many where they are generated, at most these many where they are read."""

    train: CountOrZero | None = Field(4096, description="Training problems. None: all there are.")
    validation: CountOrZero | None = Field(256, description="Validation problems. None: all there are.")
    eval: CountOrZero | None = Field(640, description="Evaluation problems. None: all there are.")


class GeometryHubOptions(StrictModel):
    """A dataset of the Hugging Face hub, or a local folder of parquet files with the same layout."""

    dataset: str = Field(
        "hiyouga/geometry3k",
        min_length=1,
        description="Hub id or local folder. The processed sets are chenhegu/geo3k_imgurl and "
        "VeraIsHere/geo3k_imgurl_processed.",
    )
    revision: str | None = Field(None, description="Commit, branch or tag of the hub. None: its main branch.")
    train: str = Field("train", description="Published split of the training rows.")
    validation: str | None = Field(
        "auto",
        description="Published split of the validation rows. auto: `validation` where the set has one, as `null` where "
        "not. None: taken from the training rows by image.",
    )
    eval: str | None = Field(
        "test", description="Published split of the evaluation rows. None: taken from the training rows by image."
    )
    streaming: bool = Field(
        False, description="Read rows over the network as they are needed. Off: the set is kept in the hub's cache."
    )


class GeometryFileOptions(StrictModel):
    """Local files of rows, .parquet or .jsonl."""

    path: str | None = Field(
        None, description="Training rows, with an optional slice such as train.parquet@[0:100]. None: not set."
    )
    validation_path: str | None = Field(
        None, description="Validation rows. None: taken from the training rows by image."
    )
    eval_path: str | None = Field(None, description="Evaluation rows. None: taken from the training rows by image.")


class ProblemImageLimits(data.ImageLimits):
    """Limits of a row's images; a row beyond them is rejected before anything is decoded."""

    max_aspect: float = Field(
        200, gt=1, le=200, description="Longer side of an image over its shorter one; Qwen's processor takes no more."
    )
    max_images: Count = Field(16, description="Images of one row.")


class Geo3kDataOptions(data.DataOptions):
    """Everything that the pipeline data_geo3k takes; the defaults are the setting of the tiny policy."""

    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "generate": ("shares", "image_folder", "rows_without_image", "hub", "file"),
        "hub": ("problems", "file", "hub.streaming"),
        "file": ("problems", "hub"),
    }

    source: Literal["generate", "hub", "file"] = Field("generate", description="Where problems come from.")
    seed: Seed = Field(0, description="Seed of generated problems and of the splits; independent of the run's seed.")
    problems: ProblemOptions = Field(default_factory=ProblemOptions, description="Of `source=generate`.")
    counts: ProblemCounts = Field(default_factory=ProblemCounts)
    shares: data.SplitShares = Field(
        default_factory=data.SplitShares,
        description="Parts of the images of the training rows that go to splits which are not published.",
    )
    instruction: str = Field(
        "question",
        description="question: the problem's text and nothing else, as in geo3k_imgurl. boxed: asks for reasoning and "
        "a boxed answer. tool: the whole protocol of the scoring tool (rows that bring such a text keep theirs). "
        "tool_brief: the same in as few tokens as possible. Anything else is the text itself, with {question} once.",
    )
    exclude_overlaps: Literal["none", "pairs", "images"] = Field(
        "pairs",
        description="What published splits may share. none: anything. pairs: images, but no (image, question) "
        "pair. images: nothing. Training rows are left out before validation rows, evaluation rows never.",
    )
    repair_control_characters: bool = Field(
        True,
        description="Write `\\b` where a text holds the control character U+0008 (as in \\boxed of published rows), "
        "the same for \\a, \\v and \\f, and reject other control characters. Off: texts stay as they are.",
    )
    transparency: Literal["white", "drop"] = Field(
        "white",
        description="white: transparent parts of an image become white. drop: they get the colours below them.",
    )
    image_folder: str | None = Field(
        None, description="Folder below which images given as paths are read. None: only bytes and data: URIs are."
    )
    rows_without_image: Literal["reject", "keep"] = Field(
        "reject",
        description="reject: a row that is read without an image is left out, with the reason. keep: it becomes a "
        "problem of text alone.",
    )
    hub: GeometryHubOptions = Field(default_factory=GeometryHubOptions)
    file: GeometryFileOptions = Field(default_factory=GeometryFileOptions)
    limits: ProblemImageLimits = Field(default_factory=ProblemImageLimits)

    @field_validator("instruction")
    @classmethod
    def _check_instruction(cls, value: str) -> str:
        refuse_first(
            (
                value not in INSTRUCTIONS and value.count(QUESTION_MARK) != 1,
                f"{value!r} is none of {', '.join(INSTRUCTIONS)}, and a text of your own must hold {QUESTION_MARK} "
                "once.",
            )
        )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        open_counts = [split for split, count in self.counts.model_dump().items() if count is None]
        refuse_first(
            (
                self.source == "file" and not self.file.path,
                "source=file needs file.path; set it to a .parquet or .jsonl file.",
            ),
            (
                self.source == "generate" and bool(open_counts),
                f"counts.{' and counts.'.join(open_counts)}=null: how many problems to generate must be said; null is "
                "for problems that are read.",
            ),
        )
        return self

    @property
    def label(self) -> str:
        """Difficulty of generated problems."""
        return self.problems.difficulty

    @classmethod
    def slime_exact(cls, **changes: Any) -> Self:
        """The original's rules: texts as they are, nothing excluded, transparency dropped."""
        exact = {"exclude_overlaps": "none", "repair_control_characters": False, "transparency": "drop"}
        return cls.model_validate({**exact, **changes})


class Geo3kMultiTurnDataOptions(Geo3kDataOptions):
    """The same for geometry with the scoring tool."""

    instruction: str = Field("tool_brief", description="As for geo3k; here the default names the scoring tool.")


DATA_OPTIONS: dict[str, type[Geo3kDataOptions]] = {
    "geo3k": Geo3kDataOptions,
    "geo3k_multi_turn": Geo3kMultiTurnDataOptions,
}
