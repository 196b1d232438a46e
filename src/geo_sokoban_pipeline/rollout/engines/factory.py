"""Engines by name."""

from __future__ import annotations

from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine


def build_engine(policy: Policy, options: RolloutOptions) -> RolloutEngine:
    """The engine that `rollout.engine` names, over a policy's model."""
    if options.engine == "sglang":
        from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine

        return SglangEngine(policy, options.server)
    return TransformersEngine(
        policy,
        max_conversations=options.max_conversations,
        prefill_tokens=options.prefill_tokens,
        reuse_cache=options.reuse_cache,
        draft_share=options.draft_share,
    )
