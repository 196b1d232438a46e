"""Engines by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.rollout.engines.base import RolloutEngine
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine

if TYPE_CHECKING:
    from geo_sokoban_pipeline.rollout.engines.sglang.servers import Launcher


def build_engine(policy: Policy, options: RolloutOptions, launcher: Launcher | None = None) -> RolloutEngine:
    """The engine that `rollout.engine` names, over a policy's model.

    Args:
        launcher: of servers. None: they are launched on this machine.
    """
    if options.engine == "sglang":
        from geo_sokoban_pipeline.rollout.engines.sglang.engine import SglangEngine
        from geo_sokoban_pipeline.rollout.engines.sglang.servers import HERE

        return SglangEngine(policy, options.server, launcher or HERE)
    return TransformersEngine(
        policy,
        max_conversations=options.max_conversations,
        prefill_tokens=options.prefill_tokens,
        reuse_cache=options.reuse_cache,
        draft_share=options.draft_share,
    )
