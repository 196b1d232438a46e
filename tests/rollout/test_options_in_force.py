"""Every field of the rollout options has the effect that its description promises.

Each effect is a function under the names of its fields, or a test elsewhere; a new field without one fails the first
test. Sizes of the engine are counted by the passes through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import RolloutOptions, RolloutRules, SamplingOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from option_fields import leaves
from task_options import TinyPolicyOptions

# Sections with tables of their own, by the file that holds it.
OTHERS = {"sampling.": "training/test_options_in_force.py", "server.": "engines/sglang/test_options_in_force.py"}
# Effects that other tests show: by their file, below tests/.
ELSEWHERE = {
    "training/test_rollout_workers.py": {
        "env_timeout": "test_an_environment_that_hangs_costs_its_episodes_alone",
        "workers": "test_numbers_of_two_are_those_of_none",
        "worker_timeout": "test_a_worker_that_ends_or_hangs_in_an_episode_is_replaced",
        "worker_restarts": "test_one_gives_the_bits_of_none_and_more_losses_than_allowed_end_the_run",
    },
    "rollout/test_conversation.py": {
        "max_turns": "test_max_turns_keeps_the_last_observation_and_turns_partition_the_tokens",
        **dict.fromkeys(("max_tokens_per_turn", "max_response_tokens", "max_context_tokens"), "test_budgets"),
        "preset": "test_slime_exact",
        **{f"rules.{name}": "test_slime_exact" for name in RolloutRules.model_fields},
        "rules.turn_separator": "test_the_separator_belongs_to_the_observation",
    },
    "rollout/test_episode.py": {
        "max_failed_share": "test_too_many_failures_stop_the_run",
        "function": "test_an_own_rollout_function_returns_the_episodes_asked_for",
    },
    "training/test_collecting.py": {
        "over_sampling": "test_refilled_groups_are_enough_once_the_missing_ones_are_there",
        "partial": "test_aborted_groups_come_first_and_new_prompts_fill_up",
    },
}
Effect = Callable[[Policy], None]
EFFECTS: dict[str, Effect] = {}


@pytest.fixture(scope="module")
def policy() -> Policy:
    tiny = TinyPolicyOptions(hidden=16, heads=2, kv_heads=2, head_dim=8, mlp=16, layers=1)
    return build_tiny_policy(tiny, seed=0)


def effect_of(*fields: str) -> Callable[[Effect], Effect]:
    def register(check: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(fields, check))
        return check

    return register


def test_every_field_is_shown_to_have_an_effect() -> None:
    wanted = {name for name in leaves(RolloutOptions) if not name.startswith(tuple(OTHERS))}
    assert {*EFFECTS, *(name for tests in ELSEWHERE.values() for name in tests)} == wanted
    for file, tests in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        assert all(f"def {test}(" in text for test in tests.values()), file


@effect_of("engine")
def _engine(policy: Policy) -> None:
    assert isinstance(build_engine(policy, RolloutOptions()), TransformersEngine)
    nowhere = RolloutOptions.model_validate({"engine": "sglang", "server": {"python": "/no/such/python"}})
    with pytest.raises(Exception, match=r"rollout\.server\.python=/no/such/python"):
        build_engine(policy, nowhere)


@contextmanager
def passes(policy: Policy) -> Iterator[list[tuple[int, int]]]:
    """(conversations, tokens of each) of every pass through the language model."""
    seen: list[tuple[int, int]] = []
    layer = policy.network.language.layers[0]

    handle = layer.register_forward_pre_hook(lambda _, given: seen.append((given[0].shape[0], given[0].shape[1])))
    try:
        yield seen
    finally:
        handle.remove()


def count_passes(policy: Policy, prompts: int = 4, turns: int = 1, same: bool = False, **changes: Any) -> list[Any]:
    """Passes of greedy conversations of six tokens a turn, each with a prompt of its own unless they are the same."""
    engine = build_engine(policy, RolloutOptions(**changes))
    codec, greedy = policy.codec, SamplingOptions(greedy=True)
    texts = ["Left or right? " * (1 if same else number + 1) for number in range(prompts)]
    ids = [codec.encode_prompt([{"role": "user", "content": [{"type": "text", "text": text}]}], []) for text in texts]
    with passes(policy) as seen:
        for _ in range(turns):
            engine.submit([Request(number, ids[number], [], greedy, 6, number) for number in range(prompts)])
            while results := engine.poll():
                for result in results:
                    ids[result.id] = np.concatenate([ids[result.id], result.token_ids, codec.encode_text("and now?")])
                if turns == 1:
                    engine.release([result.id for result in results])
    assert all(len(one) > 20 for one in ids)
    return seen


@effect_of("max_conversations")
def _conversations(policy: Policy) -> None:
    assert max(rows for rows, _ in count_passes(policy)) == 4
    assert max(rows for rows, _ in count_passes(policy, max_conversations=2)) == 2


@effect_of("prefill_tokens")
def _prefill(policy: Policy) -> None:
    assert max(rows for rows, _ in count_passes(policy, prefill_tokens=1)) == 1
    for most in (60, 120):
        found = count_passes(policy, prefill_tokens=most)
        assert all(rows == 1 or rows * tokens <= most for rows, tokens in found)


@effect_of("reuse_cache")
def _cache(policy: Policy) -> None:
    """Without it, every turn reads the conversation from its beginning."""
    kept, again = (count_passes(policy, 1, 2, reuse_cache=keeps, draft_share=None) for keeps in (True, False))
    assert len(kept) == len(again) == 12
    prompt = kept[0][1]
    assert kept[6][1] < prompt < again[6][1] == prompt + 6 + kept[6][1] - 1


@effect_of("draft_share")
def _drafts(policy: Policy) -> None:
    """Once enough responses agree, later conversations read several tokens in a pass."""
    alone, ahead = (
        count_passes(policy, 12, same=True, max_conversations=1, draft_share=share) for share in (None, 0.9)
    )
    assert len(alone) == 12 * 6 > len(ahead)
    assert alone[-1] == (1, 1) and ahead[-1][1] > 1


@pytest.mark.parametrize("check", dict.fromkeys(EFFECTS.values()), ids=lambda check: check.__name__.strip("_"))
def test_effects(check: Effect, policy: Policy) -> None:
    check(policy)
