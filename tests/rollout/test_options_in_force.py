"""Every field of the rollout options has the effect that its description promises.

A new field without a test of its effect fails the first test here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.rollout import RolloutOptions, RolloutRules
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines import factory
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from option_fields import leaves
from task_options import TinyPolicyOptions

# Sections with tables of their own, by the file that holds it.
OTHERS = {"sampling.": "training/test_options_in_force.py", "server.": "engines/sglang/test_options_in_force.py"}
# The tests that show the effects, by their file below tests/.
SHOWN = {
    "rollout/test_options_in_force.py": {"engine": "test_the_engine_is_built_with_its_options"},
    "rollout/engines/test_transformers_requests.py": {
        "max_conversations": "test_rows_are_free_again_after_release",
        "prefill_tokens": "test_no_pass_exceeds_its_tokens",
        "reuse_cache": "test_only_new_tokens_are_prefilled",
    },
    "rollout/engines/test_speculated_responses.py": {
        "draft_share": "test_right_proposals_save_passes_and_logits_are_computed_for_open_responses_alone"
    },
    "training/test_rollout_workers.py": {
        "env_timeout": "test_an_environment_that_hangs_costs_its_episodes_alone",
        "workers": "test_numbers_of_two_are_those_of_none",
        "worker_timeout": "test_a_worker_that_ends_or_hangs_in_an_episode_is_replaced",
        "worker_restarts": "test_a_run_that_loses_more_workers_than_allowed_names_its_newest_checkpoint",
    },
    "rollout/test_conversation.py": {
        "max_turns": "test_max_turns_keeps_the_last_observation_and_turns_partition_the_tokens",
        **dict.fromkeys(("max_tokens_per_turn", "max_response_tokens", "max_context_tokens"), "test_budgets"),
        "preset": "test_slime_exact",
        **{f"rules.{name}": "test_slime_exact" for name in RolloutRules.model_fields},
        "rules.turn_separator": "test_the_separator_belongs_to_the_observation",
    },
    "rollout/test_own_functions.py": {"max_environments": "test_so_many_environments_are_open_at_once"},
    "rollout/test_episode.py": {
        "max_failed_share": "test_too_many_failures_stop_the_run",
        "function": "test_an_own_rollout_function_returns_the_episodes_asked_for",
    },
    "training/test_collecting.py": {
        "over_sampling": "test_refilled_groups_are_enough_once_the_missing_ones_are_there",
        "partial": "test_aborted_groups_come_first_and_new_prompts_fill_up",
    },
}


def test_every_field_is_shown_to_have_an_effect() -> None:
    wanted = {name for name in leaves(RolloutOptions) if not name.startswith(tuple(OTHERS))}
    assert {name for tests in SHOWN.values() for name in tests} == wanted
    for file, tests in SHOWN.items():
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        assert all(f"def {test}(" in text for test in tests.values()), file


def test_the_engine_is_built_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of them does is shown with the engine itself."""
    policy: Any = object()
    sizes = {"max_conversations": 3, "prefill_tokens": 7, "reuse_cache": False, "draft_share": 0.75}
    monkeypatch.setattr(factory, "TransformersEngine", lambda given, **options: (given, options))
    assert build_engine(policy, RolloutOptions.model_validate(sizes)) == (policy, sizes)
    nowhere = RolloutOptions.model_validate({"engine": "sglang", "server": {"python": "/no/such/python"}})
    tiny = TinyPolicyOptions(hidden=16, heads=2, kv_heads=2, head_dim=8, mlp=16, layers=1)
    with pytest.raises(Exception, match=r"rollout\.server\.python=/no/such/python"):
        build_engine(build_tiny_policy(tiny, seed=0), nowhere)
