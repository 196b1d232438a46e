"""A user's function of one episode: equal to the built-in loop, safe beside others, replayed; environments in turn."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent import futures
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.config.rollout import RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.envs.base import user_message
from geo_sokoban_pipeline.evaluation.replay import Replayer, prompts_by_key
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings, play, responses_of
from geo_sokoban_pipeline.rollout.rollout import rollout
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.trajectories.schema import TableContext, validate_trajectories
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table
from rollout.scripted import (
    OWN_LOOP,
    PROMPT,
    BatchEngine,
    CharacterPolicy,
    ScriptedEngine,
    TalkEnv,
    made,
    make_settings,
    play_scripted,
    requests_of,
)
from task_options import EnvOptions, RewardOptions

CONTEXT = TableContext(image_pad_id=-1, merge_size=2, tokenizer_hash="t", template_hash="c", processor_hash="p")
STOP = ("abcd", "stop")


async def without_environment(session, request):
    """Answers by itself: three turns at most, over after an `x`."""
    session.prompt(request.prompt)
    for number in range(3):
        text = await session.respond()
        if text is None:
            return
        session.end_turn({"turn_reward": float(len(text)), "number": number})
        if "x" in text:
            return
        session.observe(user_message({"obs_str": f"again {number}"}))


async def shuffled(session, request):
    """Comes to each response at a time of its own."""
    session.prompt(request.prompt)
    for _ in range(3):
        await asyncio.sleep(0.001 * (7 * request.sample_index % 5))
        if await session.respond() is None:
            return
        session.end_turn({})
        session.observe(user_message({"obs_str": "on"}))


async def hanging(session, request):
    if request.prompt["does"] == "hangs":
        await asyncio.sleep(60)
    session.prompt(request.prompt)
    if request.prompt["does"] == "hangs later":
        await session.respond()
        await asyncio.sleep(60)
    await session.respond()
    if request.prompt["does"] == "raises":
        raise KeyError("lost")


async def misusing(session, request):
    kind = request.prompt["does"]
    if kind == "no prompt":
        await session.respond()
    if kind == "observes first":
        session.observe(user_message({"obs_str": "on"}))
    if kind != "nothing":
        session.prompt(request.prompt)
    if kind == "end early":
        session.end_turn({})
    if kind == "end twice":
        await session.respond()
        session.end_turn({})
        session.end_turn({})
    if kind == "two prompts":
        session.prompt(request.prompt)
    if kind == "two responses":
        await session.respond()
        session.end_turn({})
        await session.respond()
    if kind == "two at once":
        await asyncio.gather(session.respond(), session.respond())
    if kind == "two environments":
        await session.open()
        await session.open()
    if kind == "end after the end":
        await session.respond()
        session.end_turn({})
        session.observe(user_message({"obs_str": "on"}))
        assert await session.respond() is None
        session.end_turn({}, done=True)
    if kind == "goes on":
        await session.respond()
        session.observe(user_message({"obs_str": "on"}))
        assert await session.respond() is None
        await session.respond()


def settings_of(function: str, **given: Any) -> RolloutSettings:
    return make_settings(function=f"{__name__}.{function}", **given)


def equal(one, other):
    """Equal but for the times."""
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_equal({**asdict(ours), "timings": {}}, {**asdict(theirs), "timings": {}})


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ([{"ends_after": 2}, {"ends_after": 1}, {}], {"max_turns": 3}),
        ([{"ends_after": 2}, {}], {"max_turns": 2, "rules": {"truncate_at_max_turns": True}}),
        ([{}, {"observation": "a long observation"}], {"max_response_tokens": 20}),
        ([{}, {}], {"max_response_tokens": 20, "rules": {"drop_overflowing_observation": True}}),
        ([{}], {"max_context_tokens": 9}),  # the prompt alone fills it
        ([{"ends_after": 2}, {}], {"preset": "slime_exact", "max_turns": 3, "max_response_tokens": 30}),
        ([{"ends_after": 2}, {}], {"max_turns": 3, "rules": {"step_before_finish_check": True}}),
        ([{"raises": "build"}, {"raises": "reset"}, {"raises": "step"}, {"raises": "format_observation"}, {}], {}),
    ],
)
@pytest.mark.parametrize("last", ["stop", "length", "abort"])
def test_the_loop_written_by_a_user_gives_the_same_episodes(rows, given, last):
    responses = {n: [STOP, (f"response {n}", last), *[STOP] * 20] for n in range(len(rows))}
    found = [
        play_scripted(responses, settings, [{"env": row} for row in rows])[0]
        for settings in (make_settings(**given), make_settings(function=OWN_LOOP, **given))
    ]
    for episodes in found:
        for episode in episodes:
            episode.error = episode.error and episode.error.partition(", in ")[0]
    equal(*found)


def sokoban_settings(function=None):
    args = {"max_actions_per_turn": 1, "cell_px": 16, "observation_style": "brief"}
    own = {} if function is None else {"function": function}
    limits = RolloutOptions(max_turns=4, max_tokens_per_turn=9, **own)
    return RolloutSettings(EnvOptions(args=args), RewardOptions(), limits, SamplingOptions(), 0, "sokoban")


def test_with_a_model_and_images_tokens_are_equal_and_the_episodes_replay(tiny_policy, sokoban_rows):
    rows = [row for row in sokoban_rows(8) if row["split"] == "train"]
    tasks = [EpisodeRequest(f"g{g}/s{s}", rows[g], g, s, 100 * g + s) for g in range(3) for s in range(2)]
    found = {
        name: rollout(TransformersEngine(tiny_policy), tiny_policy, tasks, sokoban_settings(name))
        for name in (None, OWN_LOOP)
    }
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.images == theirs.images
        np.testing.assert_allclose(ours.rollout_log_probs, theirs.rollout_log_probs, atol=1e-5)
        assert (ours.reward, ours.reward_parts, ours.metrics) == (theirs.reward, theirs.reward_parts, theirs.metrics)
    validate_trajectories(trajectories_to_table(found[OWN_LOOP], tiny_policy.table_context))
    task, settings = task_or_plain("sokoban"), sokoban_settings(OWN_LOOP)
    replayer = Replayer(tiny_policy, settings.env, settings.reward, settings.rollout, task)
    assert replayer.differences(found[OWN_LOOP], prompts_by_key(rows, task)) == []
    changed = replace(found[OWN_LOOP][0], reward=0.123)
    assert [name for name, _ in replayer.differences([changed], prompts_by_key(rows, task))] == ["g0/s0"]


def test_an_episode_without_an_environment():
    responses = {0: [("one", "stop"), ("twox", "stop")], 1: [("a", "stop")] * 3, 2: [("b", "length")]}
    settings = settings_of("without_environment")
    episodes, _ = play_scripted(responses, settings, [{}] * 3)
    assert [episode.status for episode in episodes] == ["completed", "completed", "truncated"]
    assert [episode.reward for episode in episodes] == [2.0, 3.0, 1.0]
    turns = [(turn.role, turn.text, turn.reward) for turn in episodes[0].turns]
    assert turns == [
        ("user", PROMPT, None),
        ("assistant", "one", 3.0),
        ("user", "again 0", None),
        ("assistant", "twox", 4.0),
    ]
    assert "".join(map(chr, episodes[0].token_ids)) == f"{PROMPT}one<user>again 0<>twox"
    sampled = "".join(chr(token) for token in episodes[0].token_ids[episodes[0].loss_mask == 1])
    assert sampled == "onetwox"
    assert (episodes[0].rollout_log_probs[episodes[0].loss_mask == 0] == 0).all()
    validate_trajectories(trajectories_to_table(episodes, CONTEXT))
    replayer = Replayer(CharacterPolicy(), settings.env, settings.reward, settings.rollout, task_or_plain("talk"))  # type: ignore[arg-type]
    rows = {episode.task_id: [{"id": f"r{n}", "prompt": PROMPT}] for n, episode in enumerate(episodes)}
    assert replayer.differences(episodes, rows) == []


def test_batches_of_a_seeded_engine_do_not_depend_on_the_clock():
    """All functions come to their responses before the engine is asked, in the order of the episodes."""

    class Batches(BatchEngine):
        def submit(self, requests):
            batches.append([request.id for request in requests])
            super().submit(requests)

    batches: list[list[int]] = []
    engine = Batches({n: [STOP] * 3 for n in range(6)})
    rollout(engine, CharacterPolicy(), requests_of([{}] * 6), settings_of("shuffled"))
    assert batches == [[*range(6)]] * 3 + [[]] * batches.count([])


async def gated(session, request):
    """Episode 0 goes on after its first response only once episode 1 is over."""
    session.prompt(request.prompt)
    while await session.respond() is not None:
        session.end_turn({})
        session.observe(user_message({"obs_str": "on"}))
        if request.sample_index == 0:
            await asyncio.to_thread(over.wait, 30)
        elif request.sample_index == 1 and len(session.ledger.token_ids) > 20:
            over.set()
            return


over = threading.Event()


def test_with_servers_an_episode_does_not_wait_for_the_function_of_another():
    class Server(ScriptedEngine):
        seeded = False

    over.clear()
    responses = {0: [STOP, ("", "abort")], 1: [STOP] * 3}
    episodes = rollout(Server(responses), CharacterPolicy(), requests_of([{}] * 2), settings_of("gated"))
    assert [episode.status for episode in episodes] == ["aborted", "completed"]


def test_a_hanging_and_a_raising_function_cost_their_episodes_alone():
    rows = [{"does": does} for does in ("", "hangs", "raises", "hangs later", "")]
    episodes, engine = play_scripted({n: [STOP] for n in range(5)}, settings_of("hanging", env_timeout=0.3), rows)
    assert [episode.status for episode in episodes] == ["completed", "failed", "failed", "failed", "completed"]
    late = "EnvTimeoutError: the rollout function took longer than rollout.env_timeout=0.3 s"
    assert (episodes[1].error, episodes[3].error) == (late, late)
    assert episodes[2].error.startswith("KeyError: 'lost', in tests/rollout/test_own_functions.py, line ")
    assert [len(episode.turns) for episode in episodes] == [2, 0, 2, 2, 2]
    assert {0, 2, 3, 4} <= set(engine.released)


async def escaping(session, request):
    """Two turns, with what may go wrong in an event loop in between."""
    does = request.prompt["does"]
    await session.open()
    session.prompt(request.prompt)
    if does == "impatient":
        text = await asyncio.wait_for(session.respond(), 0.001)
    elif does == "cancels":
        work = asyncio.ensure_future(session.respond())
        await asyncio.sleep(0)
        work.cancel()
        text = await work
    else:
        text = await session.respond()
    if does == "exits":
        sys.exit(3)
    if does == "cancels itself":
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
    if does in ("stops", "gives up", "sleeps"):
        with suppress(Exception):
            await session.call(mischief[does])
    if does == "sleeps":
        await asyncio.sleep(60)
    session.end_turn({"heard": text}, done=True)


def stop_iterating():
    raise StopIteration


def give_up():
    raise futures.CancelledError


mischief = {"stops": stop_iterating, "gives up": give_up, "sleeps": give_up}


class SlowEngine(BatchEngine):
    def poll(self):
        time.sleep(0.02)
        return super().poll()


def test_whatever_happens_in_a_function_stays_in_its_episode():
    rows = [
        {"does": does, "env": {}} for does in ("", "impatient", "cancels", "exits", "cancels itself", *mischief, "")
    ]
    made.clear()
    engine, settings = SlowEngine({n: [STOP] for n in range(len(rows))}), settings_of("escaping", env_timeout=0.5)
    episodes = rollout(engine, CharacterPolicy(), requests_of(rows), settings)
    errors = {row["does"]: (episode.error or "").partition(":")[0] for row, episode in zip(rows, episodes, strict=True)}
    assert errors == {
        "": "",
        "impatient": "",  # a response that was asked for comes
        "cancels": "",
        "exits": "SystemExit",
        "cancels itself": "CancelledError",
        "stops": "",  # the function has gone on
        "gives up": "CancelledError",  # as event loops have it
        "sleeps": "CancelledError",
    }
    assert all(env.closed == 1 for env in made)
    assert play_scripted([STOP], settings_of("without_environment", max_turns=1))[0][0].status == "completed"


def test_an_environment_may_be_slow_within_its_own_limit():
    """Calls have the limit each; a function of many calls has no limit on their sum."""
    rows = [{"env": {"ends_after": 3}}]
    episodes, _ = play_scripted({0: [STOP] * 3}, settings_of("slow_calls", env_timeout=0.4), rows)
    assert (episodes[0].status, episodes[0].error) == ("completed", None)


async def slow_calls(session, request):
    await session.open()
    session.prompt(request.prompt)
    await session.respond()
    for _ in range(3):
        await session.call(time.sleep, 0.25)


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("nothing", "RuntimeError: the rollout function ended without a prompt"),
        ("no prompt", "RuntimeError: respond is called before prompt"),
        ("end early", "RuntimeError: end_turn must be called once after each response"),
        ("end twice", "RuntimeError: end_turn must be called once after each response"),
        (
            "end after the end",
            "RuntimeError: end_turn must be called once after each response that respond has returned",
        ),
        ("observes first", "RuntimeError: observe is called before prompt"),
        ("two prompts", "RuntimeError: prompt is called a second time"),
        ("two responses", "RuntimeError: respond is called twice without observe between"),
        ("two at once", "RuntimeError: respond is called while another call waits"),
        ("two environments", "RuntimeError: open is called a second time"),
        ("goes on", "RuntimeError: respond is called after None"),
    ],
)
def test_a_misused_session_fails_its_episode(does, error):
    made.clear()
    responses = {0: [STOP, ("a", "length")], 1: [STOP] * 2}
    episodes, _ = play_scripted(responses, settings_of("misusing"), [{"does": does}, {"does": ""}])
    assert [episode.status for episode in episodes] == ["failed", "completed"]
    assert episodes[0].error.startswith(error)
    assert all(env.closed == 1 for env in made)


def test_a_fork_begins_with_the_given_responses():
    whole, _ = play_scripted({0: [("one", "stop"), ("two", "stop"), ("x", "stop")]}, settings_of("without_environment"))
    engine = ScriptedEngine({0: [("x", "stop")]})
    past = responses_of(whole[0])[:2]
    (request,) = requests_of([{}])
    again = rollout(engine, CharacterPolicy(), [replace(request, past=past)], settings_of("without_environment"))
    assert len(engine.requests) == 1
    equal(whole, again)


def test_a_rollout_that_ends_early_leaves_no_function_behind():
    class Lost(ScriptedEngine):
        def poll(self):
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        rollout(Lost({}), CharacterPolicy(), requests_of([{}]), settings_of("noted"))
    deadline = time.monotonic() + 10
    while "left" not in notes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert notes == ["left"]


notes: list[str] = []


async def noted(session, request):
    session.prompt(request.prompt)
    try:
        await session.respond()
    finally:
        notes.append("left")


# Environments in turn.


class CountedEnv(TalkEnv):
    """Counts those that are open, and the most that ever were."""

    now = most = 0

    def __init__(self, **given):
        super().__init__(**given)
        CountedEnv.now += 1
        CountedEnv.most = max(CountedEnv.most, CountedEnv.now)

    def final_metrics(self):
        assert not self.closed
        return {"success": 1.0}

    def close(self):
        super().close()
        CountedEnv.now -= 1


def build_counted(sample, args):
    made.append(CountedEnv(**sample["env"]))
    return made[-1]


@pytest.fixture
def _none_is_open():
    """Count from now on."""
    CountedEnv.now = CountedEnv.most = 0
    made.clear()


@pytest.mark.usefixtures("_none_is_open")
@pytest.mark.parametrize("function", ["geo_sokoban_pipeline.rollout.rollout.rollout", OWN_LOOP])
@pytest.mark.parametrize("capacity", [1, 3, None])
def test_so_many_environments_are_open_at_once(capacity, function):
    settings = make_settings(
        factory=f"{__name__}.build_counted", function=function, max_turns=5, max_environments=capacity
    )
    rows = [{"env": {"ends_after": 1 + n % 3, "raises": "step" if n == 4 else ""}} for n in range(8)]
    tasks = requests_of(rows, size=2)
    groups: list[list[str]] = []

    def enough(complete):
        groups.append([episode.trajectory_id for episode in complete])
        return False

    engine = BatchEngine({n: [STOP] * 3 for n in range(8)})
    episodes = rollout(engine, CharacterPolicy(), tasks, settings, enough=enough)
    assert (CountedEnv.now, CountedEnv.most) == (0, capacity or 8)
    assert [env.closed for env in made] == [1] * 8
    assert [episode.trajectory_id for episode in episodes] == [f"t{n}" for n in range(8)]
    assert [episode.status for episode in episodes] == ["failed" if n == 4 else "completed" for n in range(8)]
    assert [len(episode.turns) // 2 for episode in episodes] == [1 if n == 4 else 1 + n % 3 for n in range(8)]
    assert all(len(complete) % 2 == 0 for complete in groups)
    assert sorted(groups[-1]) == [f"t{n}" for n in range(8)]


@pytest.mark.usefixtures("_none_is_open")
def test_what_has_not_begun_ends_as_aborted_once_there_is_enough():
    settings = make_settings(factory=f"{__name__}.build_counted", max_turns=5, max_environments=2)
    tasks = requests_of([{"env": {"ends_after": 1}}] * 6, size=2)
    engine = BatchEngine({n: [STOP] * 3 for n in range(6)})
    episodes = rollout(engine, CharacterPolicy(), tasks, settings, enough=lambda complete: True)
    assert [episode.status for episode in episodes] == ["completed"] * 2 + ["aborted"] * 4
    assert (CountedEnv.now, CountedEnv.most) == (0, 2)
    assert len(engine.requests) == 2


def test_the_built_in_loop_is_a_function_that_others_may_call():
    responses, rows = {0: [STOP] * 2}, [{"env": {"ends_after": 2}}]
    found = [play_scripted(responses, settings, rows)[0] for settings in (make_settings(), settings_of("wrapping"))]
    equal(*found)


async def wrapping(session, request):
    await play(session, request)
