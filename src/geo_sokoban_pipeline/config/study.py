"""Options of studies: seeds of one recipe with their controls, further evaluation sets, and the criteria to meet; and
those of pre-flight, estimate and audit.

A study changes the base parameters by nested overrides only, so that its recipe is always `train_<task>` plus what its
own file says.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from geo_sokoban_pipeline.config.base import Count, CountOrZero, Share, StrictModel, refuse_first
from geo_sokoban_pipeline.config.grpo import SourceOptions

Imitated = Literal["teacher", "optimal"]
SetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]{0,39}$")]


class ControlOptions(StrictModel):
    """Options of a pipeline control_*: the warm start of a finished run continues for as long as its GRPO took."""

    source: SourceOptions = Field(description="Run whose warm start is continued.")
    imitate: Imitated = Field(
        "teacher",
        description="`teacher`: the warm start's own expert and prompts. `optimal`: the task's best expert, "
        "on the prompts that the source run's GRPO drew, each as often as it was drawn.",
    )
    share: float = Field(
        1.1,
        gt=0,
        le=100,
        description="CPU-seconds of SFT, in multiples of those that GRPO took. The cost of a step is timed "
        "beforehand, and it costs less once all caches are full: with 1 a control would get a few percent too little.",
    )


class CriterionOptions(StrictModel):
    """A criterion that every seed of a study has to meet; rates and differences are in points of solve rate."""

    player: str = Field(
        description="Row of the evaluation that is judged, such as final, warm_start, final_blank, control_teacher."
    )
    mode: Literal["sampled", "greedy"] = Field("sampled", description="How policies decode.")
    over: str | None = Field(None, description="Row that is subtracted. None: the rate itself is judged.")
    at_least: float | None = Field(None, ge=-100, le=100, description="Least points. None: no lower limit.")
    at_most: float | None = Field(None, ge=-100, le=100, description="Most points. None: no upper limit.")
    apart: bool = Field(False, description="Whether the 95 % intervals of `player` and `over` must not overlap.")
    measure: Literal["solved", "first_attempt"] = Field(
        "solved",
        description="Rate of solved episodes, or of those whose first attempt is correct.",
    )

    @model_validator(mode="after")
    def _check(self) -> CriterionOptions:
        refuse_first(
            (
                (self.at_least is None) == (self.at_most is None),
                "a criterion needs exactly one of at_least and at_most.",
            ),
            (self.apart and self.over is None, "apart=true needs `over`, the row whose interval must lie apart."),
        )
        return self


class DataOverrides(StrictModel):
    """Overrides of the data, under the name of the task they belong to; `parameters` adds a field for each task."""

    TASKS: ClassVar[tuple[str, ...]] = ()

    def data(self, task: str) -> dict[str, Any]:
        """Overrides of a task's data.

        Raises:
            ValueError: there are some of another task's.
        """
        for name in self.TASKS:
            if name != task and getattr(self, name):
                raise ValueError(f"{name}: this study is of the task {task}, whose data it does not change.")
        return dict(getattr(self, task, {}))


class EvaluationSetOptions(DataOverrides):
    """A further set of prompts on which the final policies of a study are evaluated."""

    name: SetName = Field(description="Folder of the set and end of its run ids; lower case, digits, underscores.")
    title: str = Field(min_length=1, description="Name in the tables, such as `8×8, two boxes`.")
    train: dict[str, Any] = Field(default_factory=dict, description="Further overrides of train_<task>.")


class StudyDefinition(DataOverrides):
    """One study, a section `study_<name>`. With overrides of the data it has a data root of its own."""

    title: str = Field("", description="Heading in the docs.")
    task: str = Field(description="What is studied.")
    seeds: tuple[CountOrZero, ...] = Field((0, 1, 2), min_length=1, description="Seeds of the runs.")
    beside: tuple[CountOrZero, ...] = Field(
        (),
        description="Seeds that run too, without controls, and stand beside the others in no mean; 0 is that of "
        "`make run`.",
    )
    chosen_on: tuple[CountOrZero, ...] = Field(
        (),
        description="Seeds with which the recipe was chosen, on validation prompts. The docs say whether `seeds` are "
        "among them. Empty: not known, and the docs do not mention it.",
    )
    train: dict[str, Any] = Field(default_factory=dict, description="Overrides of train_<task>.")
    controls: tuple[Imitated, ...] = Field((), description="Controls of every seed.")
    recipes: dict[SetName, dict[str, Any]] = Field(
        default_factory=dict,
        description="Recipes that are compared with the study's own, by name: overrides of `train`. Each begins with "
        "the warm start of the study's own run of its seed. A recipe whose iteration costs more needs fewer of them "
        "(`loop.iterations`): the table says what each has spent.",
    )
    max_minutes: float | None = Field(
        None, gt=0, le=43_200, description="Budget of a whole run in minutes. None: none."
    )
    least_spent: float | None = Field(
        0.97,
        gt=0,
        le=100,
        description="CPU-seconds that a control must have spent at least, in multiples of GRPO's. None: not judged.",
    )
    max_growth: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="Percent by which memory after 200 iterations may exceed that after 20. None: not judged.",
    )
    evaluations: tuple[EvaluationSetOptions, ...] = Field((), description="Further sets of evaluation prompts.")
    bars: tuple[CriterionOptions, ...] = Field((), description="Criteria that every seed has to meet.")

    @model_validator(mode="after")
    def _check(self) -> StudyDefinition:
        for name, values in (
            ("seeds and beside", [*self.seeds, *self.beside]),
            ("chosen_on", list(self.chosen_on)),
            ("controls", list(self.controls)),
            ("evaluations", [further.name for further in self.evaluations]),
            (
                "recipes, controls and evaluations",
                [*self.recipes, *self.controls, *(one.name for one in self.evaluations)],
            ),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names something twice: {', '.join(map(str, values))}.")
        if self.recipes and len(self.seeds) < 2:
            raise ValueError(
                f"recipes with the one seed {self.seeds[0]}: differences are compared over seeds; give more."
            )
        for one in (self, *self.evaluations):
            one.data(self.task)
        return self


class StudyOptions(StrictModel):
    """Which study a pipeline study_* runs, and how."""

    name: str = Field(
        "default", description="The study: `study_<name>`; `default` is the first one of each pipeline study_<task>."
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Runs side by side. The cores are divided among them, and a run has as many processes of one "
        "thread as it has cores, up to train_<task>.processes. None: one run per core. 1: one after another, in the "
        "minutes of a run that is alone on the machine.",
    )
    recipes: tuple[str, ...] | None = Field(
        None,
        description="Compared recipes that run now. None: all. The table has all that are finished for every seed.",
    )
    docs: str | None = Field(
        "docs",
        description="Folder whose learning.md, estimators.md, studies, results and img are written, and the README.md "
        "beside it; relative to the project. None: nothing outside the data root is written.",
    )


# Options of the pre-flight and of audits.


class CheckPipelineOptions(StrictModel):
    """Options of a pipeline check_* beside those of train_*."""

    timed: bool = Field(True, description="Also load the policy and time one rollout and one update at the real sizes.")
    imitation_steps: CountOrZero = Field(
        80,
        description="Steps of the warm start before the timed rollout, where the run has no policy of its own yet: "
        "one that has learnt nothing ends its episodes at once. 0: none.",
    )
    rows: Count = Field(100, description="Rows that are made or read to look at the data.")


class EstimatePipelineOptions(StrictModel):
    """Assumptions of a pipeline estimate_* beside the options of train_*."""

    model: Literal["2B", "4B", "8B", "32B", "30B-A3B", "235B-A22B"] | None = Field(
        None, description="Published Qwen3-VL that is counted. None: the policy of the run."
    )
    gpu: Literal["A100", "H100", "H200", "RTX 4090", "L40S"] = Field(
        "H100", description="Kind of all GPUs, of 80, 80, 141, 24 and 48 GB."
    )
    prompt: Count = Field(600, description="Tokens of a prompt, those of its image counted.")
    observation: CountOrZero = Field(
        200, description="Tokens of an observation between two responses, those of its image counted."
    )
    response: Count | None = Field(
        None, description="Sampled tokens of a response, at most what the run allows. None: as many as it allows."
    )
    turns: Count | None = Field(
        None, description="Responses of an episode, at most what the run allows. None: as many as it allows."
    )
    patches: CountOrZero = Field(576, description="Patches of an image. 0: no images.")
    images: CountOrZero | None = Field(
        None, description="Images of an episode. None: one of the prompt and one of each observation."
    )
    gpu_hour_price: float | None = Field(
        None, gt=0, le=1e6, description="Price of one GPU for an hour, in any currency. None: no price is shown."
    )


class AuditOptions(StrictModel):
    """Options of the pipelines audit_*; every file and every episode is checked without a model anyway."""

    versions: CountOrZero = Field(
        3,
        description="Policy versions whose log-probs are recomputed under their stored checkpoints, evenly spread; "
        "each one is loaded once. 0: none, and no model is loaded.",
    )
    scored_share: Share = Field(
        0.1, description="Share of the episodes of these versions that are scored, evenly spread; at least one each."
    )
    log_prob_tolerance: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Largest mean |stored − recomputed| of a version's tokens in nats; an episode may have ten times "
        "as much. None: 0.0001 where this process sampled in float32, else 0.1.",
    )
    image_effect: float = Field(
        0.0001,
        ge=0,
        le=100,
        description="Least mean change of a response token's log-prob in nats when all images are blank; a policy "
        "below it is blind.",
    )
