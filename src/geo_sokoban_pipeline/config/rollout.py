"""Options of environments, rewards and rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from geo_sokoban_pipeline.config.base import Count, CountOrZero, Seconds, Share, StrictModel, refuse_first
from geo_sokoban_pipeline.config.server import ServerOptions

# Below it, logits divided by the temperature leave what float32 tells apart.
Temperature = Annotated[float, Field(ge=0.01, le=100)]


class EnvOptions(StrictModel):
    """The environment, named by dotted path or `.py` file."""

    factory: str = Field(
        description="`build_env(sample, args)`: a dotted path, or `file.py` / `file.py:name`. Or `gymnasium:<id>`, "
        "or `openenv:<address>`.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Passed to the factory, which checks them.")

    @property
    def named_code(self) -> dict[str, str]:
        """Names of objects that may be the user's own code, by option: of `gymnasium:<id>` its arguments name some."""
        found = {"env.factory": self.factory}
        for argument in ("imports", "wrappers", "actions") if self.factory.startswith("gymnasium:") else ():
            given = self.args.get(argument)
            names = given if isinstance(given, list) else [given]
            found |= {f"env.args.{argument}.{place}": name for place, name in enumerate(names) if isinstance(name, str)}
        return found

    def renamed(self, names: Mapping[str, str]) -> Self:
        """With other names for some of these objects."""

        def rename(given: Any) -> Any:
            if isinstance(given, list):
                return [rename(one) for one in given]
            return names.get(given, given) if isinstance(given, str) else given

        args = {name: rename(given) for name, given in self.args.items()}
        return self.model_copy(update={"factory": rename(self.factory), "args": args})


class RewardOptions(StrictModel):
    """The reward of a finished episode, named by dotted path or `.py` file."""

    function: str = Field(
        description="`reward(result, args) -> dict` with a key `reward`: a dotted path, `file.py` or `file.py:name`.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Passed to the function, which checks them.")


class SamplingOptions(StrictModel):
    """How the next token is chosen."""

    temperature: Temperature = Field(1.0, description="Divides the logits; stored log-probs are after it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Smallest set of tokens with this probability is sampled from.")
    top_k: CountOrZero = Field(0, description="Number of likeliest tokens sampled from; 0: all.")
    greedy: bool = Field(False, description="Take the likeliest token; stored log-probs are then untempered.")


class SamplingOverrides(StrictModel):
    """Fields of `SamplingOptions` that differ from the rollout's; None: as in the rollout."""

    temperature: Temperature | None = Field(None, description="Divides the logits. None: as in the rollout.")
    top_p: float | None = Field(
        None, gt=0, le=1, description="Smallest set of tokens with this probability. None: as in the rollout."
    )
    top_k: CountOrZero | None = Field(
        None, description="Number of likeliest tokens sampled from; 0: all. None: as in the rollout."
    )


class RolloutRules(StrictModel):
    """Rules of an episode that the original system had differently; the preset `slime_exact` sets the original ones."""

    turn_separator: bool = Field(
        True, description="Write the template's newline between a response's end and the next turn."
    )
    budget_counts_prompt: bool = Field(
        False, description="Without a context limit, subtract the prompt from max_response_tokens too."
    )
    budget_counts: Literal["response", "sampled"] = Field(
        "response", description="What max_response_tokens counts: all tokens after the prompt, or sampled ones."
    )
    step_before_finish_check: bool = Field(False, description="Let the environment act on truncated responses as well.")
    truncate_at_max_turns: bool = Field(
        False, description="An episode that reaches max_turns is truncated, not completed."
    )
    drop_overflowing_observation: bool = Field(
        False, description="Leave out an observation that would pass the token budget, instead of keeping it."
    )

    @classmethod
    def slime_exact(cls) -> RolloutRules:
        """Rules of the original Sokoban example."""
        return cls(
            turn_separator=False,
            budget_counts_prompt=True,
            budget_counts="sampled",
            step_before_finish_check=True,
            truncate_at_max_turns=True,
            drop_overflowing_observation=True,
        )


class RolloutOptions(StrictModel):
    """How episodes are rolled out."""

    engine: Literal["transformers", "sglang"] = Field(
        "transformers", description="What samples the responses: this process, or SGLang servers."
    )
    server: ServerOptions = Field(default_factory=ServerOptions, description="SGLang servers, with engine sglang.")
    function: str = Field(
        "geo_sokoban_pipeline.rollout.rollout.rollout",
        description="`async def generate(session, request)`, the loop of one episode; or `rollout(engine, policy, "
        "requests, settings, …) -> list[Trajectory]`, one per request, in order: dotted path or `.py` file.",
    )
    sampling: SamplingOptions = Field(default_factory=SamplingOptions, description="How responses are sampled.")
    max_turns: Count = Field(10, description="Responses of an episode at most.")
    max_tokens_per_turn: Count | None = Field(8, description="Tokens of a response. None: only the budgets below.")
    max_response_tokens: Count | None = Field(None, description="Tokens after the prompt. None: no limit.")
    max_context_tokens: Count | None = Field(None, description="Tokens of the whole episode. None: no limit.")
    preset: Literal["default", "slime_exact"] = Field("default", description="`slime_exact` overrides `rules`.")
    rules: RolloutRules = Field(default_factory=RolloutRules, description="Rules that differ from the original.")
    max_conversations: Count = Field(512, description="Episodes that the engine holds at the same time.")
    max_environments: Count | None = Field(
        None,
        description="Environments that a process keeps open at the same time, such as a server's share of places; "
        "other episodes wait. None: those of all episodes.",
    )
    prefill_tokens: Count = Field(16_384, description="Padded tokens of one pass of the engine at most.")
    reuse_cache: bool = Field(True, description="Keep the KV cache between turns; off only to measure its worth.")
    draft_share: float | None = Field(
        0.9,
        gt=0.5,
        le=1,
        description="Speculative decoding by n-grams: share of earlier responses that must agree on a token for it to "
        "be drafted. None: one token a pass.",
    )
    over_sampling: float = Field(
        1.0,
        ge=1,
        le=100,
        description="Groups started together, in multiples of grpo.groups; once enough are kept by the filter, the "
        "others are aborted. Above 1 short episodes are preferred.",
    )
    partial: bool = Field(
        False,
        description="Resume aborted responses in the next iteration (partial rollouts); for tasks of one turn.",
    )
    max_failed_share: Share = Field(0.1, description="More failed episodes than this share stop the run.")
    env_timeout: Seconds | None = Field(
        None,
        description="Seconds that one call of an environment may take; the episode of a longer one fails, and the "
        "others go on. None: unlimited.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Processes that do nothing but roll out, with an engine of their own or connections to the "
        "servers; each uses `threads` threads. None: the processes that train roll out, or with servers this one.",
    )
    worker_timeout: Seconds | None = Field(
        600.0,
        description="Seconds in which a rollout worker neither decodes a token nor ends a step of an environment, or "
        "is silent, before it is replaced. Waiting for rewards and servers does not count: they need limits of their "
        "own. None: unlimited.",
    )
    worker_restarts: CountOrZero = Field(
        3, description="Rollout workers that are replaced in one rollout at most; one more stops the run."
    )

    @model_validator(mode="after")
    def _check(self) -> RolloutOptions:
        refuse_first(
            (
                self.partial and self.max_turns > 1,
                f"partial=true with max_turns={self.max_turns}: an interaction cannot be continued, because its "
                "environment is not kept; partial rollouts are for tasks of one turn (max_turns=1).",
            ),
            (
                self.partial and self.over_sampling == 1,
                "partial=true with over_sampling=1: nothing is ever aborted; raise over_sampling.",
            ),
        )
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether the servers that sample and the trainer have the same GPUs, one after the other."""
        return self.engine == "sglang" and self.server.colocated

    @property
    def effective_rules(self) -> RolloutRules:
        """The rules in force: those of the preset, or the given ones."""
        return RolloutRules.slime_exact() if self.preset == "slime_exact" else self.rules
