"""Every field of the rollout options has the effect that its description promises.

Each effect is a function under the names of its fields; a new field without one fails the first test. Budgets and rules
are counted in characters with scripted responses, sizes of the engine by the passes through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coins import rows_of
from geo_sokoban_pipeline.config.rollout import RolloutOptions, RolloutRules, SamplingOptions
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.tiny import build_tiny_policy
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.factory import build_engine
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import TooManyFailuresError, load_rollout_fn, rollout
from geo_sokoban_pipeline.training.collecting import Collector, build_sampler
from geo_sokoban_pipeline.trajectories.types import Trajectory
from option_fields import leaves
from rollout.scripted import PROMPT, ScriptedEngine, made, make_settings, play_scripted
from task_options import TinyPolicyOptions, TrainOptions

# Sections with tables of their own, by the file that holds it.
OTHERS = {"sampling.": "training/test_options_in_force.py", "server.": "engines/sglang/test_options_in_force.py"}
# Effects that need other processes, by the test that shows them.
WORKERS = Path(__file__).parents[1] / "training" / "test_rollout_workers.py"
ELSEWHERE = {
    "env_timeout": "test_an_environment_that_hangs_costs_its_episodes_alone",
    "workers": "test_numbers_of_two_are_those_of_none",
    "worker_timeout": "test_a_worker_that_ends_or_hangs_in_an_episode_is_replaced",
    "worker_restarts": "test_one_gives_the_bits_of_none_and_more_losses_than_allowed_end_the_run",
}
Effect = Callable[["Bench"], None]
EFFECTS: dict[str, Effect] = {}


class Bench:
    """What effects are shown on."""

    def __init__(self, policy: Policy, options: TrainOptions) -> None:
        self.policy, self.options = policy, options


@pytest.fixture(scope="module")
def bench(train_options: TrainOptions) -> Bench:
    tiny = TinyPolicyOptions(hidden=16, heads=2, kv_heads=2, head_dim=8, mlp=16, layers=1)
    return Bench(build_tiny_policy(tiny, seed=0), train_options)


def effect_of(*fields: str) -> Callable[[Effect], Effect]:
    def register(check: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(fields, check))
        return check

    return register


def test_every_field_is_shown_to_have_an_effect() -> None:
    wanted = {name for name in leaves(RolloutOptions) if not name.startswith(tuple(OTHERS))}
    assert {*EFFECTS, *ELSEWHERE} == wanted
    tests = WORKERS.read_text(encoding="utf-8")
    assert all(f"def {test}(" in tests for test in ELSEWHERE.values())


def talk(*responses: tuple[str, str], **options: Any) -> tuple[Trajectory, ScriptedEngine]:
    """An episode with these responses; the environment never ends it and answers `ok`, ten tokens in all."""
    episodes, engine = play_scripted(list(responses), make_settings(**options))
    return episodes[0], engine


FIVE = ("abcde", "stop")
assert len(PROMPT) == 9


@effect_of("max_turns")
def _turns(bench: Bench) -> None:
    for turns in (1, 3):
        episode, engine = talk(*[FIVE] * 4, max_turns=turns)
        assert (len(engine.requests), episode.status) == (turns, "completed")


@effect_of("max_tokens_per_turn")
def _tokens_per_turn(bench: Bench) -> None:
    for limit in (4, 7, None):
        _, engine = talk(FIVE, FIVE, max_turns=2, max_tokens_per_turn=limit)
        assert [most for _, most in engine.asked] == [limit, limit]


@effect_of("max_response_tokens")
def _response_tokens(bench: Bench) -> None:
    """Responses and observations count, the prompt does not."""
    episode, engine = talk(FIVE, FIVE, FIVE, max_turns=3, max_response_tokens=22)
    assert [most for _, most in engine.asked] == [22, 22 - 15]
    assert episode.status == "truncated"


@effect_of("max_context_tokens")
def _context_tokens(bench: Bench) -> None:
    """The prompt counts too."""
    episode, engine = talk(FIVE, FIVE, FIVE, max_turns=3, max_context_tokens=31)
    assert [most for _, most in engine.asked] == [31 - 9, 31 - 24]
    assert episode.status == "truncated"


@effect_of("preset")
def _preset(bench: Bench) -> None:
    """It overrides all rules."""
    exact = RolloutOptions(preset="slime_exact", rules=RolloutRules(budget_counts_prompt=False))
    default = RolloutOptions(rules=RolloutRules(budget_counts_prompt=True))
    assert exact.effective_rules == RolloutRules.slime_exact() != default.effective_rules == default.rules
    assert all(getattr(exact.effective_rules, name) != getattr(RolloutRules(), name) for name in leaves(RolloutRules))
    episode, engine = talk(("abc", "length"), max_response_tokens=12, preset="slime_exact")
    assert engine.asked == [(9, 3)] and made[0].heard == ["abc"]


@effect_of("rules.turn_separator")
def _separator(bench: Bench) -> None:
    lengths = []
    for on in (False, True):
        settings = make_settings(max_turns=2)
        rules = settings.rollout.rules.model_copy(update={"turn_separator": on})
        rollout = settings.rollout.model_copy(update={"rules": rules})
        (episode,), _ = play_scripted([FIVE, FIVE], RolloutSettings(**{**vars(settings), "rollout": rollout}))
        # One more for each of two observations.
        lengths.append(len(episode.token_ids))
    assert lengths[1] - lengths[0] == 2


@effect_of("rules.budget_counts_prompt")
def _budget_counts_prompt(bench: Bench) -> None:
    for counts, most in ((False, 12), (True, 3)):
        _, engine = talk(("abc", "length"), max_response_tokens=12, rules={"budget_counts_prompt": counts})
        assert engine.asked == [(9, most)]


@effect_of("rules.budget_counts")
def _budget_counts(bench: Bench) -> None:
    for counts, asked in (("response", [12]), ("sampled", [12, 7, 2])):
        rules = {"budget_counts": counts}
        _, engine = talk(FIVE, FIVE, ("ab", "length"), max_turns=9, max_response_tokens=12, rules=rules)
        assert [most for _, most in engine.asked] == asked


@effect_of("rules.step_before_finish_check")
def _step_first(bench: Bench) -> None:
    for first, heard in ((False, []), (True, ["abc"])):
        episode, _ = talk(("abc", "length"), rules={"step_before_finish_check": first})
        assert (made[0].heard, episode.status) == (heard, "truncated")


@effect_of("rules.truncate_at_max_turns")
def _last_turn(bench: Bench) -> None:
    for truncates, status in ((False, "completed"), (True, "truncated")):
        assert talk(FIVE, max_turns=1, rules={"truncate_at_max_turns": truncates})[0].status == status


@effect_of("rules.drop_overflowing_observation")
def _overflow(bench: Bench) -> None:
    for drops, length in ((False, 9 + 5 + 10), (True, 9 + 5)):
        rules = {"drop_overflowing_observation": drops}
        episode, _ = talk(FIVE, FIVE, max_turns=2, max_response_tokens=12, rules=rules)
        assert (len(episode.token_ids), episode.status) == (length, "truncated")


@effect_of("max_failed_share")
def _failures(bench: Bench) -> None:
    rows: list[dict[str, Any]] = [{}, {"env": {"raises": "step"}}]
    for allowed in (0.5, 0.49):
        settings = make_settings({"ends_after": 1}, max_failed_share=allowed)
        if allowed == 0.5:
            played, _ = play_scripted({0: [FIVE], 1: [FIVE]}, settings, rows)
            assert [episode.status for episode in played] == ["completed", "failed"]
        else:
            with pytest.raises(TooManyFailuresError, match=r"1 of 2 .*max_failed_share=0\.49"):
                play_scripted({0: [FIVE], 1: [FIVE]}, settings, rows)


asked: list[RolloutSettings] = []


def own_rollout(engine: Any, policy: Any, tasks: Any, settings: RolloutSettings) -> list[Trajectory]:
    asked.append(settings)
    return []


@effect_of("function")
def _function(bench: Bench) -> None:
    assert load_rollout_fn(RolloutOptions()) is rollout
    settings = make_settings()
    asked.clear()
    assert load_rollout_fn(RolloutOptions(function=f"{__name__}.own_rollout"))(None, None, [], settings) == []
    assert asked == [settings]
    # Its result is checked, and the error names it.
    wrong = f"{__name__}.wrong_rollout"
    with pytest.raises(
        TypeError, match=rf"rollout\.function={wrong}: must return a list of Trajectory.* returned a dict"
    ):
        load_rollout_fn(RolloutOptions(function=wrong))(None, None, [], settings)


def wrong_rollout(engine: Any, policy: Any, tasks: Any, settings: RolloutSettings) -> Any:
    return {}


@effect_of("engine")
def _engine(bench: Bench) -> None:
    assert isinstance(build_engine(bench.policy, RolloutOptions()), TransformersEngine)
    nowhere = RolloutOptions.model_validate({"engine": "sglang", "server": {"python": "/no/such/python"}})
    with pytest.raises(Exception, match=r"rollout\.server\.python=/no/such/python"):
        build_engine(bench.policy, nowhere)


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


def count_passes(bench: Bench, prompts: int = 4, turns: int = 1, same: bool = False, **changes: Any) -> list[Any]:
    """Passes of greedy conversations of six tokens a turn, each with a prompt of its own unless they are the same."""
    engine = build_engine(bench.policy, RolloutOptions(**changes))
    codec, greedy = bench.policy.codec, SamplingOptions(greedy=True)
    texts = ["Left or right? " * (1 if same else number + 1) for number in range(prompts)]
    ids = [codec.encode_prompt([{"role": "user", "content": [{"type": "text", "text": text}]}], []) for text in texts]
    with passes(bench.policy) as seen:
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
def _conversations(bench: Bench) -> None:
    assert max(rows for rows, _ in count_passes(bench)) == 4
    assert max(rows for rows, _ in count_passes(bench, max_conversations=2)) == 2


@effect_of("prefill_tokens")
def _prefill(bench: Bench) -> None:
    assert max(rows for rows, _ in count_passes(bench, prefill_tokens=1)) == 1
    for most in (60, 120):
        found = count_passes(bench, prefill_tokens=most)
        assert all(rows == 1 or rows * tokens <= most for rows, tokens in found)


@effect_of("reuse_cache")
def _cache(bench: Bench) -> None:
    """Without it, every turn reads the conversation from its beginning."""
    kept, again = (count_passes(bench, 1, 2, reuse_cache=keeps, draft_share=None) for keeps in (True, False))
    assert len(kept) == len(again) == 12
    prompt = kept[0][1]
    assert kept[6][1] < prompt < again[6][1] == prompt + 6 + kept[6][1] - 1


@effect_of("draft_share")
def _drafts(bench: Bench) -> None:
    """Once enough responses agree, later conversations read several tokens in a pass."""
    alone, ahead = (count_passes(bench, 12, same=True, max_conversations=1, draft_share=share) for share in (None, 0.9))
    assert len(alone) == 12 * 6 > len(ahead)
    assert alone[-1] == (1, 1) and ahead[-1][1] > 1


def collector(bench: Bench, tasks: list[list[EpisodeRequest]], **changes: Any) -> Collector:
    values = bench.options.model_dump()
    values["env"], values["reward"] = {"factory": "coins.build_env"}, {"function": "coins.solved_reward"}
    values["rollout"] |= {"max_turns": 1, "max_tokens_per_turn": 6, "max_conversations": 2} | changes
    values["grpo"] |= {"groups": 3, "group_size": 2, "filter": "none", "credit": "episode", "max_refill": 1.0}
    values["grpo"]["mixed_versions"] = "mask"
    options = TrainOptions.model_validate(values)

    def play(engine: Any, policy: Any, given: list[EpisodeRequest], settings: Any, **kw: Any) -> list[Trajectory]:
        tasks.append(given)
        return rollout(engine, policy, given, settings, **kw)

    return Collector("run", 0, options, rows_of(8), bench.policy, build_engine(bench.policy, options.rollout), play)


@effect_of("over_sampling")
def _over_sampling(bench: Bench) -> None:
    """Two groups more are started; once three are over the others are aborted, and three are trained."""
    for share, started in ((1.0, 3), (1.5, 5)):
        tasks: list[list[EpisodeRequest]] = []
        made = collector(bench, tasks, over_sampling=share)
        episodes, _ = made.collect(0, build_sampler(made.prompts, made.options, 0, None))
        assert [len(given) for given in tasks] == [started * 2]
        assert len({episode.group_index for episode in episodes if episode.trained}) == 3
        aborted = {episode.group_index for episode in episodes if episode.status == "aborted"}
        assert len(aborted) == started - 3


@effect_of("partial")
def _partial(bench: Bench) -> None:
    """Groups that were aborted are the first ones of the next iteration, with their prompts and seeds."""
    for keeps in (False, True):
        tasks: list[list[EpisodeRequest]] = []
        made = collector(bench, tasks, over_sampling=1.5, partial=keeps)
        sampler = build_sampler(made.prompts, made.options, 0, None)
        first, _ = made.collect(0, sampler)
        second, _ = made.collect(1, sampler)
        given_up = {episode.seed for episode in first if episode.status == "aborted"}
        assert len(given_up) == 4 and len(tasks[1]) == 10
        again = [task.seed for task in tasks[1] if task.seed in given_up]
        assert again == ([task.seed for task in tasks[1][:4]] if keeps else [])


@pytest.mark.parametrize("check", dict.fromkeys(EFFECTS.values()), ids=lambda check: check.__name__.strip("_"))
def test_effects(check: Effect, bench: Bench) -> None:
    check(bench)
