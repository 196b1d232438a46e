"""Options of training on geometry: those of all tasks, with the defaults and the further fields of these two.

A section that names only what it changes gets geometry's environment, reward and teacher, never another task's.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from geo_sokoban_pipeline.options.base import Count, CountOrZero, Share
from geo_sokoban_pipeline.options.policy import PolicyOptions, TeacherOptions, TinyPolicyOptions, WarmStartOptions
from geo_sokoban_pipeline.options.rollout import EnvOptions, RewardOptions, RolloutOptions
from geo_sokoban_pipeline.options.training import EvaluationOptions, GrpoOptions, TrainOptions

_TURNS = 3  # of episodes with the scoring tool
TEACHER = "geo_sokoban_pipeline.envs.geo3k.teacher.build_teacher"


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
