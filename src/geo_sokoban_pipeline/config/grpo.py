"""Options of GRPO, its optimizer, its loop, and of what the pipelines train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from geo_sokoban_pipeline.config.base import (
    LAST_ITERATION,
    Count,
    CountOrZero,
    Iterations,
    RunId,
    RunName,
    RunNames,
    Seconds,
    Share,
    StrictModel,
    refuse_first,
)
from geo_sokoban_pipeline.config.estimators import Kind, OverlongOptions, complete_arguments, registered
from geo_sokoban_pipeline.config.policy import (
    Betas,
    GradientNorm,
    LearningRate,
    Matrices,
    MicroBatchTokens,
    PolicyOptions,
    WarmStartOptions,
    WeightDecay,
)
from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.config.rollout import (
    EnvOptions,
    RewardOptions,
    RolloutOptions,
    SamplingOptions,
    SamplingOverrides,
)

Arguments = Field(
    default_factory=dict,
    validate_default=True,
    description="Options of the named estimator; they are listed by name below.",
)


class GrpoOptions(StrictModel):
    """Group-relative policy optimisation (arXiv 2402.03300) and its variants."""

    former_names: ClassVar[Mapping[str, str]] = {
        "credit": "advantage (turn_return for turn; for episode dr_grpo, or grpo where normalize was std)",
        "gamma": "advantage_args.gamma",
        "baseline": "advantage_args.baseline (state for board)",
        "clip_low": "loss_args.clip_low",
        "clip_high": "loss_args.clip_high",
        "dual_clip": "loss_args.dual_clip",
        "importance_cap": "importance (truncated) with importance_args.cap",
    }

    groups: Count = Field(32, description="Prompts of an iteration; each is rolled out by one group of episodes.")
    group_size: Count = Field(8, description="Episodes of each prompt.")
    advantage: str = Field(
        "turn_return",
        min_length=1,
        description="How rewards become advantages: a registered name, a dotted path, `file.py` or `file.py:name` "
        "(docs/your_own_estimator.md).",
    )
    advantage_args: dict[str, Any] = Arguments
    normalize: Literal["rms", "none"] = Field(
        "rms", description="Divide all advantages by the root mean square of the trained ones, or not."
    )
    advantage_clip: float | None = Field(4.0, gt=0, le=1e6, description="Largest absolute advantage. None: unlimited.")
    overlong: OverlongOptions | None = Field(
        None, description="Penalty of long episodes, added to the reward before the advantage. None: none."
    )
    filter: Literal["none", "zero_variance", "mixed_success"] = Field(
        "mixed_success",
        description="Which groups are trained: all, those whose advantages vary, those that solve some but not all "
        "(DAPO's dynamic sampling).",
    )
    min_groups: CountOrZero = Field(4, description="With fewer groups left by the filter, all are trained.")
    max_refill: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Groups fetched at most, in multiples of `groups`, to replace those that the filter dropped.",
    )
    groups_per_step: Count | None = Field(
        5, description="Groups of an optimizer step (a minibatch). None: one step an iteration."
    )
    passes: Count = Field(1, description="PPO epochs: times that each trained episode is used in an iteration.")
    loss: str = Field(
        "ppo",
        min_length=1,
        description="Policy loss of a token: a registered name, a dotted path, `file.py` or `file.py:name`.",
    )
    loss_args: dict[str, Any] = Arguments
    kl_kind: Literal["k1", "k2", "k3", "low_var_kl"] = Field("low_var_kl", description="Estimator of the KL term.")
    kl_coefficient: float = Field(
        0.0, ge=0, le=1000, description="Weight of the KL to the warm-start policy; 0: no reference model."
    )
    entropy_coefficient: float = Field(
        0.005, ge=0, le=1000, description="Weight of the entropy bonus (mean entropy of a token, nats); 0: none."
    )
    reduction: Literal["sample_mean", "token_mean", "constant"] = Field(
        "token_mean",
        description="How token losses add up: the mean over tokens of each episode, then over episodes; the mean over "
        "all tokens; or the sum over `constant_denominator`.",
    )
    constant_denominator: float | None = Field(
        None,
        gt=0,
        le=1e12,
        description="Denominator of the reduction `constant`, which needs it. None: for the other reductions.",
    )
    old_log_probs: Literal["rollout", "recompute"] = Field(
        "rollout", description="Whose log-probs the ratio is taken to: the engine's, or a fresh pass of the trainer."
    )
    importance: str = Field(
        "none",
        min_length=1,
        description="Weights that correct the gap between trainer and engine; they need old_log_probs recompute. A "
        "registered name, a dotted path, `file.py` or `file.py:name`.",
    )
    importance_args: dict[str, Any] = Arguments
    mixed_versions: Literal["drop", "mask", "keep"] = Field(
        "drop",
        description="Episodes with tokens of weights older than the newest: not trained, trained without those tokens, "
        "or trained whole, the ratio taken to the log-probs under which each token was sampled.",
    )
    max_log_prob_difference: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="Mean gap of trainer and engine that stops the run; needs recompute. None: only reported.",
    )

    @field_validator("normalize", mode="before")
    @classmethod
    def _refuse_std(cls, value: Any) -> Any:
        if value == "std":
            raise ValueError("the group's standard deviation is part of advantage=grpo, and of advantage_args.scale")
        return value

    @field_validator("advantage", "loss", "importance")
    @classmethod
    def _check_name(cls, value: str, info: ValidationInfo) -> str:
        registered(cast(Kind, info.field_name), value)
        return value

    @field_validator("advantage_args", "loss_args", "importance_args")
    @classmethod
    def _complete(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        kind = cast(Kind, str(info.field_name).removesuffix("_args"))
        # A name that was refused is missing here; its own error says so.
        return complete_arguments(kind, info.data[kind], value) if kind in info.data else value

    @model_validator(mode="after")
    def _check(self) -> GrpoOptions:
        refuse_first(
            (
                self.reduction == "constant" and self.constant_denominator is None,
                "reduction=constant needs constant_denominator.",
            ),
            (
                self.advantage == "vine" and self.overlong is not None,
                "overlong with advantage=vine: measured values are of the reward without the penalty; take another "
                "advantage, or leave overlong out.",
            ),
            (
                self.importance != "none" and self.old_log_probs != "recompute",
                f"importance={self.importance} needs old_log_probs=recompute: without a fresh pass there is no gap to "
                "correct.",
            ),
            (
                self.max_log_prob_difference is not None and self.old_log_probs != "recompute",
                "max_log_prob_difference needs old_log_probs=recompute: without a fresh pass there is no gap.",
            ),
            (
                self.mixed_versions == "keep" and self.old_log_probs != "rollout",
                "mixed_versions=keep needs old_log_probs=rollout: a fresh pass has only the newest weights to compare.",
            ),
            (
                self.teacher is not None and self.mixed_versions == "mask",
                "advantage=distillation with mixed_versions=mask: an episode's advantage is the mean over all its "
                "sampled tokens; take drop or keep.",
            ),
            (
                self.teacher is not None and self.kl_coefficient > 0,
                f"advantage=distillation with kl_coefficient={self.kl_coefficient}: one policy beside the trained one "
                "scores the tokens, the teacher or the reference; take kl_coefficient=0.",
            ),
        )
        return self

    @property
    def teacher(self) -> str | None:
        """Folder or hub id of the policy whose samples are imitated; None without distillation."""
        return self.advantage_args["teacher"] if self.advantage == "distillation" else None

    @property
    def needs_reference(self) -> bool:
        """Whether a second policy scores the sampled tokens: the reference of the KL, or a teacher."""
        return self.kl_coefficient > 0 or self.teacher is not None


class OptimizerOptions(StrictModel):
    """AdamW, or AdamW and Muon, and the schedule."""

    learning_rate: LearningRate = 1e-3
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, ge=1e-16, le=1, description="AdamW epsilon.")
    weight_decay: WeightDecay = 0.0
    matrices: Matrices = "adamw"
    clip: GradientNorm = 0.3
    warmup_iterations: CountOrZero = Field(10, description="Iterations of linear warm-up.")
    schedule_iterations: Count = Field(
        150,
        description="Length of the schedule in iterations; apart from loop.iterations, so that a run can be extended.",
    )
    decay_fraction: Share = Field(0.5, description="Last share of the schedule over which the rate falls.")
    max_tokens: MicroBatchTokens = 8192
    logit_chunk: Count = Field(16_384, description="Positions whose logits are held at once.")
    vision_patches: Count | None = Field(
        None,
        description="Patches that pass the vision tower at once, at least one image. A step with more patches encodes "
        "its images twice: before the micro-batches without a graph, after them with one. None: all at once.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Keep only the inputs of decoder layers and vision blocks, and run each again in the backward "
        "pass: for one more forward pass, Qwen3-VL-2B keeps 8 kB a token and layer in place of 133 kB.",
    )
    offload: bool = Field(
        False,
        description="Keep trained weights, their gradients and moments in the memory of the CPU, where the optimizer "
        "moves them; a layer's weights are on the GPU while it computes. Several processes need sharding=full or "
        "hybrid for it. On the CPU nothing moves.",
    )
    gradient_sync: Literal["step", "micro_batch"] = Field(
        "step",
        description="When processes that share weights (or one that offloads) share out their gradients: once a step, "
        "until which each holds those of whole weights; or after each micro-batch, so that each holds its part alone.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type in which processes that share weights add the gradients of the language model's matrices, "
        "with policy.compute=bfloat16 and backend=fsdp. bfloat16 sends half as much and rounds every sum; it needs "
        "gradient_sync=micro_batch, because whole gradients would be accumulated in it. A warm start adds in float32.",
    )

    @model_validator(mode="after")
    def _check(self) -> OptimizerOptions:
        problem = (
            "reduce_dtype=bfloat16 with gradient_sync=step: whole gradients would be accumulated in bfloat16, where "
            "small ones vanish. Take gradient_sync=micro_batch, or reduce_dtype=float32."
        )
        refuse_first((self.reduce_dtype == "bfloat16" and self.gradient_sync == "step", problem))
        return self


class MegatronOptions(StrictModel):
    """How Megatron-Core divides the processes, with backend=megatron."""

    tensor_parallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="Processes that split each matrix among them; they divide `processes`, the heads, and the "
        "vocabulary. Groups of so many processes share the samples of a step, and weights, gradients and moments.",
    )
    sequence_parallel: bool = Field(
        False,
        description="Split what lies between the matrices by tokens. On GPUs alone, which Megatron-Core asks for its "
        "buffers.",
    )

    @model_validator(mode="after")
    def _check(self) -> MegatronOptions:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel=true with tensor_parallel=1: one process has nothing to split. Raise "
                "tensor_parallel, or set sequence_parallel=false."
            )
        return self


class PromptOptions(StrictModel):
    """Which prompts an iteration draws."""

    order: Literal["shuffle", "solve_rate", "prompt_solve_rate"] = Field(
        "solve_rate",
        description="Epochs of a shuffled list; or weighted by p(1 − p) + floor, p the moving solve rate of the "
        "prompt's difficulty, or of the prompt itself.",
    )
    floor: float = Field(
        0.03, ge=1e-6, le=1, description="Weight that every difficulty (or prompt) keeps, however often it is solved."
    )


class RetentionOptions(StrictModel):
    """The parts that are kept of the training episodes of older iterations; validations and evaluations stay whole."""

    newest: Count = Field(1, description="Newest committed iterations that stay whole.")
    tokens: bool = Field(True, description="Keep tokens, masks and log-probs of older iterations.")
    episodes: Count = Field(1, description="Of older iterations one episode of so many is kept. 1: all.")
    images: Literal["file", "run"] = Field(
        "file",
        description="Images of older iterations: `file`, in each of their files; `run`, once per run, in files named "
        "by their content, which only this package finds.",
    )

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is thinned."""
        return self.tokens and self.episodes == 1 and self.images == "file"


class LoopOptions(StrictModel):
    """How long the loop runs, what it keeps, when it evaluates.

    Of these only `max_staleness` changes an iteration's result.
    """

    iterations: Iterations = Field(150, description="Iterations in total; raising it extends a finished run.")
    save_interval: Count = Field(1, description="Iterations between checkpoints; the last one is always saved.")
    eval_interval: CountOrZero = Field(30, description="Iterations between validations; 0: none.")
    eval_prompts: Count | None = Field(160, description="Validation prompts that are rolled out. None: all.")
    keep_last: Count | None = Field(3, description="Newest checkpoints kept. None: all.")
    max_staleness: int = Field(
        0,
        ge=0,
        le=1,
        description="Versions that the weights of a rollout may be behind those that are trained. 1: iteration k + 1 "
        "is rolled out while k is trained, by servers or rollout workers beside the trainer, with the weights that k "
        "began with.",
    )
    keep_best: bool = Field(True, description="Keep the checkpoint with the best sampled solve rate on validation.")
    retention: RetentionOptions = Field(default_factory=RetentionOptions)
    report_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the loop's time that its page may take while it goes on. The first page is written with "
        "the first checkpoint, later ones as this allows. 0: at the end alone.",
    )


class EvaluationOptions(StrictModel):
    """The evaluation at the end of a run, and of the pipelines evaluate_*."""

    prompts: Count | None = Field(None, description="Evaluation prompts that are rolled out. None: all.")
    samples: Count = Field(1, description="Sampled episodes of a prompt; pass@k needs several.")
    sampling: SamplingOverrides = Field(
        default_factory=SamplingOverrides, description="How sampled episodes are sampled where not as in the rollout."
    )
    greedy: bool = Field(True, description="Roll out every prompt greedily as well.")
    blank_images: bool = Field(True, description="Roll out every prompt with blank images as well.")
    shuffled_images: bool = Field(False, description="Roll out every prompt with another prompt's images as well.")
    solver_states: Count = Field(
        200_000, description="States that a baseline with a search may visit per prompt; beyond them it gives up."
    )
    checkpoint: Literal["final", "best"] = Field("final", description="Which checkpoint becomes the final policy.")

    @property
    def image_ablations(self) -> int:
        """Number of image ablations of the final policy."""
        return int(self.blank_images) + int(self.shuffled_images)


class TrainOptions(StrictModel):
    """Everything that a pipeline train_* takes."""

    task: str = Field(description="Name of the task.")
    policy: PolicyOptions = Field(default_factory=PolicyOptions)
    warm_start: WarmStartOptions
    env: EnvOptions
    reward: RewardOptions
    rollout: RolloutOptions = Field(default_factory=RolloutOptions)
    grpo: GrpoOptions = Field(default_factory=GrpoOptions)
    optimizer: OptimizerOptions = Field(default_factory=OptimizerOptions)
    prompts: PromptOptions = Field(default_factory=PromptOptions)
    loop: LoopOptions = Field(default_factory=LoopOptions)
    evaluation: EvaluationOptions = Field(default_factory=EvaluationOptions)
    backend: Literal["fsdp", "megatron"] = Field(
        "fsdp",
        description="Training backend, under slime's names: PyTorch with FSDP2, or Megatron-Core, which splits "
        "matrices (`megatron`; dense models).",
    )
    megatron: MegatronOptions = Field(default_factory=MegatronOptions, description="Layout with backend=megatron.")
    placement: Literal["inline", "local", "ray"] = Field(
        "local",
        description="Where the ranks run: `inline`, one, in this process; `local`, in processes of this machine, the "
        "first one in this process; `ray`, as actors of a Ray cluster, none in this process.",
    )
    ray: RayOptions = Field(default_factory=RayOptions, description="The cluster, with placement=ray.")
    threads: int | None = Field(None, ge=1, le=1024, description="Threads of torch. None: all cores.")
    processes: int = Field(
        1,
        ge=1,
        le=1024,
        description="Processes (ranks) that roll out and train side by side. Each uses `threads` threads, about 0.6 GB,"
        " and memory for its own weights, gradients and moments.",
    )
    rank_timeout: Seconds | None = Field(
        1800.0,
        description="Seconds in which no rank gets on with its work, such as a micro-batch or a decoded token, before "
        "they count as lost. Waiting for rewards and servers does not count. After 30 s it is said. None: unlimited; "
        "torch's collectives give up after half an hour.",
    )
    sharding: Literal["none", "full", "hybrid"] = Field(
        "none",
        description="What the processes hold while they train: `none`, a copy of weights, gradients and moments each; "
        "`full`, a part of each (FSDP2); `hybrid`, copies whose parts are shared by several processes. An engine "
        "in a process (`rollout.engine: transformers`) keeps whole weights beside them, in the compute type.",
    )
    replicas: int = Field(1, ge=1, le=1024, description="Copies with sharding=hybrid; they divide the processes.")

    @field_validator("backend", mode="before")
    @classmethod
    def _lower_backend(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @property
    def megatron_layout(self) -> MegatronOptions | None:
        """The layout of Megatron's ranks; None with another backend."""
        return self.megatron if self.backend == "megatron" else None

    @property
    def shares_weights(self) -> bool:
        """Whether a process trains a part of the weights alone, so that an engine needs whole ones beside it."""
        return self.backend == "megatron" or (self.sharding != "none" and self.processes > 1)

    @property
    def ranks_roll_out(self) -> bool:
        """Whether the processes that train roll out as well, each with an engine of its own."""
        return self.rollout.engine == "transformers" and self.rollout.workers is None

    @property
    def places_servers(self) -> bool:
        """Whether Ray places the servers that sample."""
        return self.placement == "ray" and self.rollout.engine == "sglang" and self.rollout.server.mode == "launch"

    @property
    def rank_unit(self) -> int:
        """The number of ranks is a multiple of this."""
        server = self.rollout.server
        return math.lcm(
            self.replicas,
            self.megatron.tensor_parallel if self.backend == "megatron" else 1,
            server.tensor_parallel if self.places_servers and server.colocated else 1,
        )

    def with_processes(self, processes: int) -> TrainOptions:
        """The options with fewer ranks, and as many colocated servers as these have GPUs for."""
        if processes == self.processes:
            return self
        server, fewer = self.rollout.server, self.model_copy(update={"processes": processes})
        if self.places_servers and server.colocated:
            return fewer.with_servers(min(server.count, processes // server.tensor_parallel))
        return fewer

    def with_servers(self, count: int) -> TrainOptions:
        """The options with another number of servers."""
        server = self.rollout.server.model_copy(update={"count": count})
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"server": server})})

    @property
    def sent_policy(self) -> PolicyOptions:
        """Options of a policy that the driver only sends.

        Under Ray none of the GPUs is the driver's, and servers that take turns with a trainer fill the driver's own.
        """
        is_on_cpu = self.placement == "ray" or self.rollout.takes_turns
        return self.policy.model_copy(update={"device": "cpu"}) if is_on_cpu else self.policy

    @property
    def busy_processes(self) -> int:
        """Processes that compute at the same time: those that train and rollout workers take turns, or do not."""
        workers = self.rollout.workers or 0
        return self.processes + workers if self.loop.max_staleness else max(self.processes, workers)

    @property
    def evaluation_sampling(self) -> SamplingOptions:
        """How sampled evaluation episodes are sampled: as in the rollout, but for what `evaluation.sampling` gives."""
        return self.rollout.sampling.model_copy(update=self.evaluation.sampling.model_dump(exclude_none=True))

    @staticmethod
    def check_task(options: TrainOptions) -> None:
        """Checks of the task itself; the model of a task has its own."""

    def _check_staleness(self) -> None:
        """Needs of rolling out beside the training."""
        loop, grpo, name = self.loop, self.grpo, f"loop.max_staleness={self.loop.max_staleness}"
        refuse_first(
            (
                self.rollout.engine != "sglang" and self.rollout.workers is None,
                f"{name} with rollout.engine={self.rollout.engine}: the processes that train would roll out as well; "
                "give rollout.workers, take rollout.engine=sglang, or max_staleness=0.",
            ),
            (
                loop.save_interval != 1 or loop.keep_last == 1,
                f"{name} with loop.save_interval={loop.save_interval} and loop.keep_last={loop.keep_last}: rollouts "
                "take their weights from the newest two checkpoints; take save_interval=1, and keep_last=2 or more.",
            ),
            (
                grpo.old_log_probs == "recompute" and grpo.importance == "none",
                f"{name} with grpo.old_log_probs=recompute: nothing would correct that other weights sampled; take "
                "old_log_probs=rollout, or importance=truncated.",
            ),
            (
                self.rollout.takes_turns,
                f"{name} with rollout.server.colocated=true: servers that take turns with the trainer do not sample "
                "while it trains; give them GPUs of their own, or take max_staleness=0.",
            ),
            (
                self.rollout.partial,
                f"{name} with rollout.partial=true: aborted episodes would be continued with weights that are two "
                "versions old; take one of both.",
            ),
        )

    @model_validator(mode="after")
    def _check(self) -> TrainOptions:
        self.check_task(self)
        refuse_first(
            (
                self.rollout.sampling.greedy,
                "rollout.sampling.greedy=true: training needs sampled episodes; greedy is for evaluation.",
            ),
            (
                self.ranks_roll_out and self.rollout.over_sampling > 1 and self.processes > 1,
                f"rollout.over_sampling={self.rollout.over_sampling} with processes={self.processes}: one of several "
                "processes does not know how many groups the others have kept; give rollout.workers, or take "
                "processes=1.",
            ),
            (
                self.rollout.partial and self.grpo.mixed_versions == "drop",
                "rollout.partial=true with grpo.mixed_versions=drop: continued episodes would never be trained; "
                "take mask or keep.",
            ),
        )
        if self.loop.max_staleness:
            self._check_staleness()
        self._check_ranks()
        refuse_first(
            (
                self.loop.retention.episodes > self.grpo.group_size,
                f"loop.retention.episodes={self.loop.retention.episodes} with grpo.group_size={self.grpo.group_size}: "
                "no episode of some groups would be left; take at most the size of a group.",
            ),
            (
                self.evaluation.checkpoint == "best" and not (self.loop.keep_best and self.loop.eval_interval),
                "evaluation.checkpoint=best needs loop.keep_best=true and loop.eval_interval above 0.",
            ),
        )
        return self

    def _check_ranks(self) -> None:
        """Where the processes run, and what each holds."""
        server, workers = self.rollout.server, self.rollout.workers
        refuse_first(
            (
                self.placement == "inline" and self.processes > 1,
                f"placement=inline with processes={self.processes}: one process has one rank; take placement=local.",
            ),
            (
                self.placement == "inline" and workers,
                f"placement=inline with rollout.workers={workers}: rollout workers are further processes; take "
                "placement=local, or leave workers out.",
            ),
            (
                workers and self.threads is None,
                f"rollout.workers={workers} needs threads: each process would take all cores; threads=1 suits them.",
            ),
            (
                workers and self.rollout.engine == "sglang" and server.router != "none",
                f"rollout.workers={workers} with rollout.server.router={server.router}: each worker sends a "
                "conversation to one server by itself; take router=none.",
            ),
        )
        if self.places_servers:
            self._check_placed_servers()
        if self.placement == "ray":
            self._check_fewest()
        refuse_first(
            (
                self.processes > 1 and self.threads is None,
                f"processes={self.processes} needs threads: each process would take all cores; threads=1 suits them.",
            ),
            (
                self.processes % self.replicas,
                f"replicas={self.replicas} with processes={self.processes}: equally many processes must share each "
                "copy, such as processes=4 with replicas=2.",
            ),
            (
                self.sharding != "hybrid" and self.replicas != 1,
                f"replicas={self.replicas} with sharding={self.sharding}: only hybrid takes replicas.",
            ),
        )
        is_reduced = self.backend == "fsdp" and self.shares_weights and self.policy.compute == "bfloat16"
        refuse_first(
            (
                self.optimizer.reduce_dtype == "bfloat16" and not is_reduced,
                f"optimizer.reduce_dtype=bfloat16 with backend={self.backend}, processes={self.processes}, sharding="
                f"{self.sharding} and policy.compute={self.policy.compute}: nothing would be added in it. It is for "
                "fsdp with several processes, sharding=full or hybrid, and policy.compute=bfloat16.",
            )
        )
        if self.backend == "megatron":
            self._check_megatron()
        elif self.optimizer.offload and self.processes > 1 and self.sharding == "none":
            raise ValueError(
                f"optimizer.offload=true with processes={self.processes} and sharding=none: only sharded weights leave "
                "the device; take sharding=full or hybrid."
            )

    def _check_placed_servers(self) -> None:
        """Needs of servers that Ray places: the driver may be on another machine."""
        server, name = self.rollout.server, "placement=ray with rollout.engine=sglang and rollout.server."
        gpus = server.count * server.tensor_parallel
        refuse_first(
            (
                server.router != "none",
                f"{name}router={server.router}: a server that is brought back may be on another node, where the router "
                "would not look for it; take router=none.",
            ),
            (
                server.host != "127.0.0.1",
                f"{name}host={server.host}: a server listens at the address by which Ray knows its node; leave host "
                "out.",
            ),
            (
                server.update == "ipc" and not server.colocated,
                f"{name}update=ipc: servers with GPUs of their own may be on another node than the weights; take "
                "update=group, or colocated=true.",
            ),
            (
                server.update == "disk" and server.update_folder is None,
                f"{name}update=disk: servers on other nodes cannot read a temporary folder of the driver; give an "
                "update_folder that all nodes can read, or take update=tensors.",
            ),
            (
                server.colocated and gpus > self.processes,
                f"{name}colocated=true: {server.count} servers of tensor_parallel={server.tensor_parallel} share the "
                f"GPUs of {gpus} ranks, and there are processes={self.processes}; lower count or tensor_parallel.",
            ),
        )

    def _check_fewest(self) -> None:
        fewest = self.ray.min_processes
        if fewest is None:
            return
        refuse_first(
            (
                fewest > self.processes,
                f"ray.min_processes={fewest} with processes={self.processes}: it can be that at most.",
            ),
            (
                fewest % self.rank_unit,
                f"ray.min_processes={fewest}: ranks come in groups of {self.rank_unit} (replicas with sharding=hybrid, "
                "megatron.tensor_parallel, or rollout.server.tensor_parallel of colocated servers); take a multiple.",
            ),
        )

    def _check_megatron(self) -> None:
        size = self.megatron.tensor_parallel
        refuse_first(
            (
                self.processes % size,
                f"megatron.tensor_parallel={size} with processes={self.processes}: it must divide them; take "
                f"processes={size * max(1, self.processes // size)} or another tensor_parallel.",
            ),
            (
                self.sharding == "hybrid",
                f"sharding=hybrid with backend=megatron: the {self.processes // size} processes with the same part of "
                "each matrix share it out, so there are no copies. Set sharding=full.",
            ),
            (
                self.megatron.sequence_parallel and self.policy.device == "cpu",
                "megatron.sequence_parallel=true with policy.device=cpu: Megatron-Core asks a GPU for its buffers. "
                "Set sequence_parallel=false, or policy.device=cuda.",
            ),
            (
                self.policy.adapter is not None,
                "policy.adapter with backend=megatron: Megatron-Core's layers hold several of the model's matrices as "
                "one, and split them over the ranks, which an adapter would have to follow. Set backend=fsdp.",
            ),
        )


Comparison = Literal["==", "!=", ">", ">=", "<", "<=", "in", "not in"]


def check_range(options: Any) -> Any:
    """See that iterations are left between `first_iteration` and `last_iteration`.

    Raises:
        ValueError: the last one is before the first one.
    """
    first, last = options.first_iteration, options.last_iteration
    if None not in (first, last) and last < first:
        raise ValueError(f"last_iteration={last} is before first_iteration={first}: no iteration is left.")
    return options


class SourceOptions(StrictModel):
    """Whose stored data a pipeline works on."""

    run: RunName = Field(description="Namespace of the run.")
    run_id: RunId = Field("default", description="Run id of the run; `${run_id}` in a file is that of the command.")
    checkpoint: str | int = Field(
        "latest",
        description="`latest`, `best`, `final`, `start` (the warm-start policy), an iteration, a folder, or a hub id; "
        "for rollout_* also `tiny`, the policy of policy.tiny without any training. "
        "update_* always starts from the checkpoint before the iteration it trains on.",
    )
    iteration: int | None = Field(
        None, ge=0, le=LAST_ITERATION, description="Iteration whose trajectories are used. None: the newest."
    )


class RolloutPipelineOptions(StrictModel):
    """Options of a pipeline rollout_* beside those of train_*."""

    source: SourceOptions = Field(description="Whose policy is rolled out.")
    iterations: Iterations = Field(1, description="Iterations that are rolled out with the same weights.")
    prompts: Count | None = Field(
        None,
        description="Training prompts that each iteration rolls out, always the same ones, evenly spread, with "
        "neither refill nor over-sampling. None: grpo.groups of them, others in each iteration, as in the loop.",
    )


class UpdatePipelineOptions(StrictModel):
    """Options of a pipeline update_* beside those of train_*."""

    source: SourceOptions = Field(description="Whose trajectories are trained on.")


class RegradePipelineOptions(StrictModel):
    """Options of a pipeline regrade_* beside those of train_*."""

    source: SourceOptions = Field(description="Whose episodes are graded again; all its iterations.")


class ExportPipelineOptions(StrictModel):
    """Which stored episodes become training data for other trainers, and as what."""

    source: SourceOptions = Field(description="Whose episodes are exported; all its iterations, unless limited below.")
    tables: tuple[Literal["tokens", "chat", "pairs"], ...] = Field(
        ("tokens", "chat", "pairs"),
        min_length=1,
        description="`tokens`: ids and labels; `chat`: messages and images; `pairs`: chosen and rejected sample of a "
        "group.",
    )
    first_iteration: int = Field(0, ge=0, le=LAST_ITERATION, description="First iteration that is read.")
    last_iteration: int | None = Field(
        None, ge=0, le=LAST_ITERATION, description="Last iteration that is read. None: the newest."
    )
    solved: bool = Field(True, description="`tokens`, `chat`: only episodes that reached their goal.")
    min_reward: float | None = Field(
        None, ge=-1_000_000, le=1_000_000, description="`tokens`, `chat`: least reward of an episode. None: any."
    )
    best_of_group: bool = Field(False, description="`tokens`, `chat`: only the best episode of each group.")
    inspect: tuple[Literal["train", "validation", "evaluation"], ...] = Field(
        (),
        description="Splits whose episodes are written as logs of Inspect AI (`.eval`) too: all of them, of training "
        "those of the iterations above.",
    )
    push: str | None = Field(
        None,
        min_length=1,
        max_length=96,
        description="Dataset repository of the hub that the folder is uploaded to, such as `me/episodes`; made "
        "where there is none. It takes a token that may write. None: nothing is uploaded.",
    )
    push_private: bool = Field(True, description="A repository that `push` makes is private.")

    _check = model_validator(mode="after")(check_range)


class EpisodeChoice(StrictModel):
    """Some stored episodes of a run.

    Attributes:
        source: the run.
    """

    source: SourceOptions
    split: Literal["train", "validation", "evaluation"] = Field(
        "train", description="Episodes of training, of the validations, or of the evaluation; with `ids` of all three."
    )
    ids: tuple[str, ...] = Field((), description="Trajectory ids. Empty: all that fulfil the other conditions.")
    first_iteration: int | None = Field(
        0, ge=0, le=LAST_ITERATION, description="First iteration. None: the last one alone."
    )
    last_iteration: int | None = Field(None, ge=0, le=LAST_ITERATION, description="Last iteration. None: the newest.")
    filter: tuple[tuple[str, Comparison, Any], ...] = Field(
        (),
        description="Conditions on columns of the index of episodes, all of which must hold, such as "
        "`[[success, ==, false], [n_turns, >, 3]]`.",
    )
    tags: tuple[str, ...] = Field((), description="Only episodes with one of these tags. Empty: with or without.")
    limit: Count | None = Field(
        256, description="Episodes at most, evenly spread over those that fulfil the conditions. None: all of them."
    )

    _check_range = model_validator(mode="after")(check_range)


class ScorePipelineOptions(EpisodeChoice):
    """Which stored episodes a pipeline score_* scores, and what it computes of each sampled token."""

    source: SourceOptions = Field(description="Whose episodes are scored, and under which policy.")
    top_k: int = Field(5, ge=0, le=1000, description="Likeliest tokens that are stored at each position.")
    image_reliance: bool = Field(True, description="Score every episode once more with blank images.")
    occlusion: CountOrZero = Field(
        0,
        description="Episodes, evenly spread over the scored ones, of which each part of each image is covered by "
        "itself. Each part takes a pass of its own.",
    )


class ForkPipelineOptions(EpisodeChoice):
    """Turns of stored episodes whose worth a pipeline fork_* measures, by continuing from the states around them."""

    source: SourceOptions = Field(description="Whose episodes are forked.")
    first_iteration: int | None = Field(
        None, ge=0, le=LAST_ITERATION, description="First iteration. None: the last one alone."
    )
    turns: Count | None = Field(None, description="Turns of each episode at most, evenly spread. None: all of them.")
    player: str = Field(
        "sampler",
        description="Who continues: `sampler`, the stored policy that sampled the turn; `checkpoint`, that of "
        "source.checkpoint; or a baseline of the evaluation by its name.",
    )
    continuations: Count = Field(64, description="Continuations of a state in all, where its first ones differ.")
    first_continuations: Count = Field(8, description="Continuations of every state.")

    @model_validator(mode="after")
    def _check(self) -> ForkPipelineOptions:
        if self.first_continuations > self.continuations:
            raise ValueError(
                f"first_continuations={self.first_continuations} with continuations={self.continuations}: the first "
                "ones are a part of them."
            )
        return self


class ReportPipelineOptions(StrictModel):
    """Whose page a pipeline report_* writes, from what is committed."""

    source: SourceOptions = Field(description="Whose report is written; the run may go on meanwhile.")


class BrowsePipelineOptions(StrictModel):
    """Which stored episodes the site of a pipeline browse_* shows."""

    source: SourceOptions = Field(description="Whose episodes are shown: training, validations and evaluation.")
    runs: RunNames = Field(
        default_factory=list,
        description="Further runs to compare with: run ids of the same pipeline, or `train_<task>/<run id>`.",
    )
    first_iteration: int = Field(0, ge=0, le=LAST_ITERATION, description="First iteration of training episodes.")
    last_iteration: int | None = Field(
        None, ge=0, le=LAST_ITERATION, description="Last iteration of training episodes. None: the newest."
    )
    pages: Count | None = Field(
        20_000,
        description="Episodes at most that get a page of their own, with tokens and images; whole groups, evaluations "
        "before training, evenly spread. The other pages count all episodes. None: all of them.",
    )

    _check = model_validator(mode="after")(check_range)


class EvaluatePipelineOptions(StrictModel):
    """Options of a pipeline evaluate_* beside those of train_*."""

    source: SourceOptions = Field(description="Whose policy is evaluated.")
