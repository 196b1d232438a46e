"""Options of the Sokoban data: where levels come from, how they are split, and what a prompt looks like.

They belong to the data source, not to a run: the data has a seed of its own, so runs with different seeds share levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from geo_sokoban_pipeline.config import data
from geo_sokoban_pipeline.config.base import Count, CountOrZero, Seed, Share, StrictModel, refuse_first
from geo_sokoban_pipeline.config.data import ImageLimits
from geo_sokoban_pipeline.envs.sokoban.levels import check_room

INSTRUCTIONS = ("brief", "full")
_GENERATED = ("height", "width", "boxes", "inner_walls", "min_solution", "max_solution", "equal_lengths")


class SplitCounts(data.SplitCounts):
    """Levels of each split: exactly these many for generated levels, at most these many for levels that are read."""

    train: CountOrZero | None = Field(6144, description="Training levels. None: all there are.")
    validation: CountOrZero | None = Field(256, description="Validation levels. None: all there are.")
    eval: CountOrZero | None = Field(640, description="Evaluation levels. None: all there are.")


class SplitShares(data.SplitShares):
    """Parts of the wall layouts (of the levels, where there are fewer layouts than splits) that go to each split."""

    train: Share = Field(0.67, description="Part for training.")
    validation: Share = Field(0.11, description="Part for validation.")
    eval: Share = Field(0.22, description="Part for evaluation.")


class HubOptions(StrictModel):
    """A dataset of the Hugging Face hub, or a local folder of parquet files with the same layout."""

    dataset: str = Field(
        "Xiaofeng77/sokoban",
        min_length=1,
        description="Hub id or local folder; the ready set is VeraIsHere/sokoban_processed.",
    )
    revision: str | None = Field(None, description="Commit, branch or tag of the hub. None: its main branch.")
    split: str = Field(
        "train", description="Split to read, such as train or train+test; our own splits are made from it."
    )
    processed: bool = Field(False, description="Whether rows are in the processed schema (images and env_config).")


class FileOptions(StrictModel):
    """A local file of levels, or a folder of level collections."""

    path: str | None = Field(
        None,
        description="File, or folder of level collections, with an optional slice such as levels.parquet@[0:100]. "
        "None: not set.",
    )
    format: Literal["auto", "raw_parquet", "processed_parquet", "xsb", "boxoban"] = Field(
        "auto",
        description="auto: by suffix and columns. xsb, boxoban: level collections as they are published (.txt, .xsb, "
        ".sok), or .jsonl with a field xsb. The parquet schemas may be .jsonl too.",
    )


class SokobanDataOptions(data.DataOptions):
    """Everything that the pipeline data_sokoban takes; the defaults are the setting of the tiny policy."""

    UNUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "generate": (
            *("solver_states", "collapse", "pictures", "strip_chat_markup", "consistent_legend"),
            *("hub", "file", "limits"),
        ),
        "hub": (*_GENERATED, "file"),
        "file": (*_GENERATED, "hub"),
    }

    source: Literal["generate", "hub", "file"] = Field("generate", description="Where levels come from.")
    seed: Seed = Field(0, description="Seed of generated levels and of the splits; independent of the run's seed.")
    height: int = Field(6, ge=3, le=64, description="Rows with border, for generated levels.")
    width: int = Field(6, ge=3, le=64, description="Columns with border, for generated levels.")
    boxes: Count = Field(1, description="Boxes of generated levels.")
    inner_walls: tuple[CountOrZero, CountOrZero] = Field(
        (1, 4), description="Fewest and most walls inside the border of generated levels."
    )
    min_solution: int = Field(1, ge=1, le=1000, description="Fewest moves that solve a generated level.")
    max_solution: int = Field(
        8, ge=1, le=1000, description="Most moves that the shortest solution of a generated level takes."
    )
    equal_lengths: bool = Field(
        True,
        description="Generate equally many levels of each solution length. Off: lengths as they are drawn, several "
        "times faster for large boards with many boxes.",
    )
    counts: SplitCounts = Field(default_factory=SplitCounts)
    shares: SplitShares = Field(default_factory=SplitShares)
    solver_states: CountOrZero = Field(
        5_000, description="States searched for the shortest solution of a level that is read. 0: lengths stay unknown."
    )
    collapse: Literal["levels", "states", "rows"] = Field(
        "levels",
        description="What rows (state, next action) become. levels: the first state of each path, each once; "
        "states: every distinct state; rows: every row, as the original does.",
    )
    cell_px: int = Field(16, ge=8, le=512, description="Pixels of a cell's side in images.")
    max_steps: Count = Field(100, description="Moves after which an episode ends, kept in env_config.")
    observation: Literal["image", "text"] = Field(
        "image",
        description="How a policy sees the board, in the prompt and after each of its turns. image: drawn. text: "
        "written in the dataset's symbols, without any image, to ask whether a task needs its images.",
    )
    instruction: str = Field(
        "brief",
        description="brief: as few tokens as possible. full: the original's text with a legend of the image (rows "
        "that bring a text keep theirs). Anything else is the text itself, with <image> once.",
    )
    pictures: Literal["render", "keep"] = Field(
        "render",
        description="Image of processed rows: drawn anew at cell_px as the environment does, or the row's own.",
    )
    strip_chat_markup: bool = Field(True, description="Remove chat marks and the open think tag inside raw prompts.")
    consistent_legend: bool = Field(True, description="Remove symbols of the text grid from texts that show an image.")
    hub: HubOptions = Field(default_factory=HubOptions)
    file: FileOptions = Field(default_factory=FileOptions)
    limits: ImageLimits = Field(default_factory=ImageLimits)

    @field_validator("instruction")
    @classmethod
    def _check_instruction(cls, value: str) -> str:
        refuse_first(
            (
                value not in INSTRUCTIONS and value.count("<image>") != 1,
                f"{value!r} is neither brief nor full, and a text of your own must hold <image> once.",
            )
        )
        return value

    @model_validator(mode="after")
    def _check(self) -> SokobanDataOptions:
        (fewest, most), shortest, longest = self.inner_walls, self.min_solution, self.max_solution
        refuse_first(
            (fewest > most, f"inner_walls: the lower bound {fewest} is above the upper bound {most}."),
            (shortest > longest, f"solution: the lower bound {shortest} is above the upper bound {longest}."),
            (
                self.source == "file" and not self.file.path,
                "source=file needs file.path; set sokoban.file.path to a parquet, jsonl or text file.",
            ),
        )
        if self.source == "generate":
            check_room(self.height, self.width, self.boxes, self.inner_walls)
            pixels = self.height * self.width * self.cell_px**2
            refuse_first(
                (
                    self.observation == "image" and pixels > self.limits.max_pixels,
                    f"cell_px={self.cell_px}: images of {self.height}×{self.width} cells have {pixels} pixels, above "
                    f"limits.max_pixels={self.limits.max_pixels}; lower cell_px, height or width.",
                )
            )
        return self

    @property
    def label(self) -> str:
        """Size and boxes of generated levels."""
        return f"{self.height}x{self.width}-{self.boxes}box"

    def steps(self) -> tuple[int, int] | None:
        """Bounds of the shortest solutions."""
        return (self.min_solution, self.max_solution) if self.source == "generate" else None

    @classmethod
    def slime_exact(cls, **changes: object) -> SokobanDataOptions:
        """The original converter's rules: every row, its own text with the chat markup and the symbols in the rules."""
        exact = {
            "collapse": "rows",
            "instruction": "full",
            "strip_chat_markup": False,
            "consistent_legend": False,
            "cell_px": 64,
        }
        return cls.model_validate({**exact, **changes})
