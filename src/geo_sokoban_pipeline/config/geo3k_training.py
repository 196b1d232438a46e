"""Arguments of the geometry environments (`env.args`) and rewards (`reward.args`).

The preset `slime_exact` sets what the original did; a value that is given beside it wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from geo_sokoban_pipeline.config.base import Count, CountOrZero, Share, StrictModel, validate_parameters
from geo_sokoban_pipeline.config.grpo import EvaluationOptions, GrpoOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions, TeacherOptions, TinyPolicyOptions, WarmStartOptions
from geo_sokoban_pipeline.config.rollout import EnvOptions, RewardOptions, RolloutOptions

Options = TypeVar("Options", bound="GradingOptions")
GraderName = Literal["default", "slime_exact", "deepscaler", "geo3k"]


class GradingOptions(StrictModel):
    """How an answer is compared with the reference."""

    EXACT: ClassVar[dict[str, Any]] = {"grader": "slime_exact"}

    preset: Literal["default", "slime_exact"] = Field(
        "default", description="`slime_exact`: the original's value of everything that is not given."
    )
    grader: GraderName = Field("default", description="See `rewards.grade_answer`.")
    tolerance: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="Largest difference that the graders `geo3k` and, from decimal labels, `default` accept.",
    )

    @property
    def keeps_thoughts(self) -> bool:
        """Whether thoughts are graded like any other text, as the original's graders do; they look for an end tag
        themselves, if at all.
        """
        return self.grader in ("slime_exact", "deepscaler")

    @model_validator(mode="after")
    def _check_tolerance(self) -> Self:
        if self.tolerance and self.grader not in ("default", "geo3k"):
            raise ValueError(
                f"tolerance={self.tolerance:g} with grader={self.grader}, which has none; take the grader geo3k or 0."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        exact = isinstance(given, Mapping) and given.get("preset") == "slime_exact"
        return {**cls.EXACT, **given} if exact else given


class AnswerEnvOptions(GradingOptions):
    """Arguments of the environment with one response."""


class Geo3kEnvOptions(GradingOptions):
    """Arguments of the environment with the scoring tool."""

    EXACT: ClassVar[dict[str, Any]] = {
        **GradingOptions.EXACT,
        "end_on_correct": False,
        "after_think": False,
        "tolerate_list_arguments": False,
        "quote": "raw",
    }

    max_turns: Count = Field(description="Responses of an episode; as many as rollout.max_turns.")
    end_on_correct: bool = Field(
        True, description="End the episode once the tool says that the answer is correct; off: play on."
    )
    after_think: bool = Field(True, description="Read calls only after the last `</think>` where there is one.")
    tolerate_list_arguments: bool = Field(
        True,
        description="Take arguments that are no JSON object for a missing answer; off: such a call fails the episode.",
    )
    earlier_call_counts: bool = Field(
        False,
        description="Where the last call of a response cannot be read, take the one before it; off: there is none.",
    )
    feedback: Literal["full", "brief"] = Field("full", description="Explain, or use as few tokens as possible.")
    quote: Literal["short", "raw"] = Field(
        "short", description="Feedback repeats an answer cut to 100 characters and without marks, or as it is."
    )


class AnswerRewardOptions(GradingOptions):
    """Arguments of the default reward, 1 for a correct answer and 0 otherwise."""

    EXACT: ClassVar[dict[str, Any]] = {**GradingOptions.EXACT, "grade_scope": "response"}

    grade_scope: Literal["assistant", "response"] = Field(
        "assistant",
        description="Look for the last box in what the policy wrote, or in all text after the prompt, feedback too.",
    )

    @property
    def format_share(self) -> float:
        """Part of the reward that is for the form."""
        return 0.0


class ToleranceRewardOptions(AnswerRewardOptions):
    """Arguments of the reward with a tolerance."""

    grader: GraderName = Field("geo3k", description="See `rewards.grade_answer`.")
    tolerance: float = Field(0.05, ge=0, le=1e9, description="Largest difference from the reference that is accepted.")

    EXACT: ClassVar[dict[str, Any]] = {"grade_scope": "response"}


class FormatRewardOptions(AnswerRewardOptions):
    """Arguments of the mix of correctness and form."""

    format_weight: float = Field(
        0.1, ge=0, le=1, description="Part of the reward that is for a closed think block with a box behind it."
    )

    @property
    def format_share(self) -> float:
        """See `format_weight`."""
        return self.format_weight


def read_options(path: str, given: Mapping[str, Any] | None, model: type[Options]) -> Options:
    """Arguments as options.

    Args:
        path: where they stand in the parameters, such as `env.args`.

    Raises:
        ParameterError: one is unknown, missing or not allowed; the message has its full path.
    """
    return validate_parameters(given or {}, model, prefix=path)


# Options of training on geometry: those of all tasks, with the defaults and the further fields of these two.


_TURNS = 3  # of episodes with the scoring tool
TEACHER = "geo_sokoban_pipeline.envs.geo3k.expert.build_teacher"


class GeometryTinyOptions(TinyPolicyOptions):
    """Sizes of the tiny policy for geometry."""

    texts: Literal["sokoban", "geo3k"] = Field("geo3k", description="Texts that the vocabulary is made for.")


class GeometryPolicyOptions(PolicyOptions):
    """Where the policy comes from."""

    tiny: GeometryTinyOptions = Field(default_factory=GeometryTinyOptions, description="Sizes, with source tiny.")


class GeometryTeacherOptions(TeacherOptions):
    """Who is imitated in the warm start; all of them read the image rightly."""

    factory: str = Field(
        TEACHER,
        description="`build_teacher(name, patience, noise, **args)`: a dotted path, or `file.py` / `file.py:name`.",
    )
    name: Literal["plausible", "solver", "constant"] = Field(  # type: ignore[assignment]  # players of another world
        "plausible",
        description="plausible: one of the rules that the figure might call for, at random, so it is right about once "
        "in as many as there are. solver: the label. constant: always `args.answer`.",
    )
    patience: CountOrZero | None = Field(
        None, description="Wrong answers after which it ends with its next one, without the tool. None: never."
    )
    noise: Share = Field(0.0, description="Share of answers that follow a rule at random.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of the factory. Of the own teacher: tool_share (of the episodes in which it "
        "calls the tool, 1), working (write figure, numbers and rule before the answer, false), answer (that of "
        "`constant`).",
    )


class GeometryWarmStartOptions(WarmStartOptions):
    """Supervised imitation before GRPO."""

    teacher: GeometryTeacherOptions = Field(default_factory=GeometryTeacherOptions, description="Who is imitated.")


class AnswerEnvironmentOptions(EnvOptions):
    """The environment with one response."""

    factory: str = Field(
        "geo_sokoban_pipeline.envs.geo3k.answer_env.build_env",
        description="`build_env(sample, args)`: a dotted path, or `file.py` / `file.py:name`.",
    )


class ToolEnvironmentOptions(EnvOptions):
    """The environment with the scoring tool."""

    factory: str = Field(
        "geo_sokoban_pipeline.envs.geo3k.env.build_env",
        description="`build_env(sample, args)`: a dotted path, or `file.py` / `file.py:name`.",
    )
    args: dict[str, Any] = Field(
        default_factory=lambda: {"max_turns": _TURNS},
        description="Passed to the factory, which checks them. The own one needs max_turns, as many as the rollout's.",
    )


class GeometryRewardOptions(RewardOptions):
    """The reward of a finished episode."""

    function: str = Field(
        "geo_sokoban_pipeline.rewards.geo3k.math_reward",
        description="`reward(outcome, args) -> dict` with a key `reward`: a dotted path, `file.py` or `file.py:name`. "
        "`tolerance_reward` and `format_reward` lie beside the default.",
    )


class AnswerRolloutOptions(RolloutOptions):
    """How episodes with one response are played."""

    max_turns: Count = Field(1, description="Responses of an episode at most.")
    max_tokens_per_turn: Count | None = Field(24, description="Tokens of a response. None: only the budgets below.")


class ToolRolloutOptions(RolloutOptions):
    """How episodes with the scoring tool are played."""

    max_turns: Count = Field(_TURNS, description="Responses of an episode at most, as env.args.max_turns.")
    max_tokens_per_turn: Count | None = Field(32, description="Tokens of a response. None: only the budgets below.")


class GeometryGrpoOptions(GrpoOptions):
    """GRPO on answers, which earn one reward an episode."""

    credit: Literal["episode", "turn"] = Field("episode", description="One advantage per episode, or one per turn.")


class GeometryEvaluationOptions(EvaluationOptions):
    """The evaluation at the end of a run, and of the pipelines evaluate_*."""

    shuffled_images: bool = Field(True, description="Play every prompt with another problem's images as well.")

    @property
    def disguises(self) -> int:
        """See `EvaluationOptions`."""
        return int(self.blank_images) + int(self.shuffled_images)


class GeometryTrainOptions(TrainOptions):
    """What both geometry tasks take."""

    policy: GeometryPolicyOptions = Field(default_factory=GeometryPolicyOptions)
    warm_start: GeometryWarmStartOptions = Field(default_factory=GeometryWarmStartOptions)
    reward: GeometryRewardOptions = Field(default_factory=GeometryRewardOptions)
    grpo: GeometryGrpoOptions = Field(default_factory=GeometryGrpoOptions)
    evaluation: GeometryEvaluationOptions = Field(default_factory=GeometryEvaluationOptions)


class Geo3kTrainOptions(GeometryTrainOptions):
    """Everything that the pipeline train_geo3k takes."""

    task: Literal["geo3k"] = Field("geo3k", description="Name of the task.")
    env: AnswerEnvironmentOptions = Field(default_factory=AnswerEnvironmentOptions)
    rollout: AnswerRolloutOptions = Field(default_factory=AnswerRolloutOptions)


class Geo3kMultiTurnTrainOptions(GeometryTrainOptions):
    """Everything that the pipeline train_geo3k_multi_turn takes."""

    task: Literal["geo3k_multi_turn"] = Field("geo3k_multi_turn", description="Name of the task.")
    env: ToolEnvironmentOptions = Field(default_factory=ToolEnvironmentOptions)
    rollout: ToolRolloutOptions = Field(default_factory=ToolRolloutOptions)

    @model_validator(mode="after")
    def _check_turns(self) -> Geo3kMultiTurnTrainOptions:
        turns = self.env.args.get("max_turns", self.rollout.max_turns)
        if turns != self.rollout.max_turns:
            raise ValueError(
                f"env.args.max_turns={turns}: differs from rollout.max_turns={self.rollout.max_turns}, and feedback "
                "would announce the last chance at the wrong turn. Give both the same value."
            )
        return self
