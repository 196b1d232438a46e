"""The episode loop: failures stay where they happen, and own environments, rewards and rollouts plug in by name."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.hooks.command_line import explain
from geo_sokoban_pipeline.rollout.rollout import (
    LostRequestsError,
    TooManyFailuresError,
    WrongEpisodesError,
    load_rollout_fn,
    rollout,
)
from geo_sokoban_pipeline.training.worker import Worker
from geo_sokoban_pipeline.trajectories.schema import TableContext, validate_trajectories
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table
from rollout.scripted import CharacterPolicy, ScriptedEngine, made, make_settings, play_scripted, requests_of
from task_options import EnvOptions, RewardOptions

STOP = ("abcd", "stop")
CONTEXT = TableContext(image_pad_id=-1, merge_size=2, tokenizer_hash="t", template_hash="c", processor_hash="p")


def check(episodes):
    validate_trajectories(trajectories_to_table(episodes, CONTEXT))


@pytest.mark.parametrize("place", ["build", "reset", "step", "format_observation"])
def test_a_failing_environment_costs_its_own_episode_alone(place):
    rows = [{"env": {"ends_after": 2}}, {"env": {"raises": place}}, {"env": {"ends_after": 2}}]
    episodes, engine = play_scripted({n: [STOP, STOP] for n in range(3)}, make_settings(), rows)
    assert [episode.status for episode in episodes] == ["completed", "failed", "completed"]
    failed = episodes[1]
    assert failed.error.startswith(f"RuntimeError: broken {place}, in tests/rollout/scripted.py, line ")
    assert (failed.reward, failed.drop_reason) == (None, "failed")
    assert [episode.reward for episode in episodes[::2]] == [2.0, 2.0]
    assert not failed.trained
    check(episodes)
    if place in ("step", "format_observation"):
        assert failed.loss_mask.sum() == 4, "what was sampled is kept"
        assert 1 in engine.released


@pytest.mark.parametrize(
    ("task", "wanted"), [("sokoban", ["7", None]), ("geo3k", ["areas", None]), ("own", [None, None])]
)
def test_episodes_know_how_difficult_their_prompt_is(task, wanted):
    rows = [{"env": {"ends_after": 1}, "solution_length": 7, "family": "areas"}, {"env": {"raises": "build"}}]
    episodes, _ = play_scripted({0: [STOP]}, replace(make_settings(), task=task), rows)
    assert [episode.difficulty for episode in episodes] == wanted


def test_every_environment_is_closed_once_and_every_episode_counted():
    """One that fails to close costs nothing."""
    rows = [{"ends_after": 1}, {"raises": "step"}, {"raises": "reset"}, {"ends_after": 1, "raises": "close"}]
    requests, engine, ended = (
        requests_of([{"env": row} for row in rows]),
        ScriptedEngine({n: [STOP] for n in (0, 1, 3)}),
        [],
    )
    made.clear()
    episodes = rollout(engine, CharacterPolicy(), requests, make_settings(), ended.append)
    assert [episode.status for episode in episodes] == ["completed", "failed", "failed", "completed"]
    assert (episodes[3].reward, episodes[3].error) == (1.0, None)
    assert [env.closed for env in made] == [1, 1, 1, 1]
    assert sum(ended) == 4
    assert sorted(engine.released) == [0, 1, 2, 3]


@pytest.mark.parametrize(("allowed", "stops"), [(0.0, True), (0.3, True), (0.34, False), (1.0, False)])
def test_too_many_failures_stop_the_run(allowed, stops):
    rows = [{"env": {"raises": "step"}}, {"env": {"ends_after": 1}}, {"env": {"ends_after": 1}}]
    settings_ = make_settings(max_failed_share=allowed)
    responses = {n: [STOP] for n in range(3)}
    if not stops:
        assert len(play_scripted(responses, settings_, rows)[0]) == 3
        return
    with pytest.raises(TooManyFailuresError, match=r"1 of 3 episodes failed.*max_failed_share.*t0: RuntimeError"):
        play_scripted(responses, settings_, rows)


def test_the_engines_time_is_split_by_tokens():
    """Of a batch each episode has the share of its tokens; together they have the time of the batches."""

    class Batches(ScriptedEngine):
        def poll(self):
            ends = time.perf_counter() + 0.02
            while time.perf_counter() < ends:
                pass
            return [result for results in iter(super().poll, []) for result in results]

    tasks = requests_of([{}] * 3)
    given = {0: [("a" * 30, "stop")] * 2, 1: [("a" * 10, "stop")] * 2, 2: [("", "abort")]}
    began = time.perf_counter()
    episodes = rollout(Batches(given), CharacterPolicy(), tasks, make_settings({"ends_after": 2}))
    times = [episode.timings["engine"] for episode in episodes]
    assert times == pytest.approx([3 * times[1], times[1], 0.0], rel=1e-9)
    assert 0.04 <= sum(times) <= time.perf_counter() - began


def test_aborted_episodes_keep_metrics_without_reward():
    (episode,), _ = play_scripted([STOP, ("", "abort")], make_settings())
    assert (episode.status, episode.reward, episode.drop_reason) == ("aborted", None, "aborted")
    assert episode.metrics["turns"] == 2
    check([episode])


response = st.tuples(
    st.text("ab", min_size=1, max_size=5), st.sampled_from(["stop", "stop", "stop", "length", "abort"])
)
places = st.sampled_from(["", "", "step", "reset", "format_observation"])
setup = st.fixed_dictionaries(
    {"ends_after": st.one_of(st.none(), st.integers(1, 4))},
    optional={"raises": places, "observation": st.text("x", max_size=4)},
)


@given(
    setups=st.lists(st.tuples(setup, st.lists(response, min_size=6, max_size=6)), min_size=1, max_size=4),
    preset=st.sampled_from(["default", "slime_exact"]),
    max_turns=st.integers(1, 4),
    context=st.one_of(st.none(), st.integers(5, 60)),
    per_turn=st.one_of(st.none(), st.integers(5, 8)),
)
@settings(max_examples=80, deadline=None)
def test_every_episode_keeps_the_contract(setups, preset, max_turns, context, per_turn):
    limits = {"max_turns": max_turns, "max_context_tokens": context, "max_tokens_per_turn": per_turn, "preset": preset}
    rows = [{"env": env} for env, _ in setups]
    responses = {number: talk for number, (_, talk) in enumerate(setups)}
    episodes, engine = play_scripted(responses, make_settings(**limits), rows)
    check(episodes)
    for number, episode in enumerate(episodes):
        assert episode.sample_index == number
        asked = [request for request in engine.requests if request.id == number]
        assert len(asked) <= max_turns
        for request in asked:
            assert request.max_new_tokens is None or request.max_new_tokens > 0
            assert request.token_ids.tolist() == episode.token_ids[: len(request.token_ids)].tolist()
            assert request.sampled == int(episode.loss_mask[: len(request.token_ids)].sum())


SOURCE = """
from rollout.scripted import TalkEnv
from geo_sokoban_pipeline.rollout.rollout import rollout as play

def build_env(sample, args):
    return TalkEnv(ends_after=args["turns"])

def reward(outcome, args):
    return {"reward": args["worth"] * len(outcome.responses), "status_known": float(outcome.status == "completed")}

def rollout(engine, policy, tasks, settings, progress=None):
    return play(engine, policy, tasks[:1], settings, progress)
"""


@pytest.mark.parametrize("place", ["{folder}/my_task.py:{name}", "{folder}/my_task.py", "my_task.{name}"])
def test_own_code_from_a_file_or_a_module(tmp_path, monkeypatch, place):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_task.py").write_text(SOURCE)
    factory, reward, function = (place.format(folder=tmp_path, name=n) for n in ("build_env", "reward", "rollout"))
    env, worth = EnvOptions(factory=factory, args={"turns": 2}), RewardOptions(function=reward, args={"worth": 3})
    own = replace(make_settings(), env=env, reward=worth, task="own")
    play = load_object(function, default_name="rollout")
    episodes = play(ScriptedEngine([STOP, STOP]), CharacterPolicy(), requests_of([{}] * 3), own)
    assert [(e.reward, e.reward_parts, e.task) for e in episodes] == [(6.0, {"status_known": 1.0}, "own")]


def test_a_wrong_name_stops_before_any_episode():
    own = replace(make_settings(), env=EnvOptions(factory="rollout.scripted.build_envs"))
    with pytest.raises(PluginError, match="build_envs"):
        rollout(ScriptedEngine([]), CharacterPolicy(), [], own)


def test_null_images_leave_a_placeholder_as_text():
    """Worked example 13.5: the original split the text into one item per character."""
    row = {"prompt": "an <image>", "images": None, "env": {"ends_after": 1}}
    (episode,), _ = play_scripted([STOP], make_settings(), [row])
    assert episode.turns[0].text == "an <image>"
    assert np.array_equal(episode.token_ids[:10], [ord(c) for c in "an <image>"])
    assert episode.images == []


def test_episodes_are_given_up_once_enough_groups_are_over():
    """Three groups of two; the last in are answered first, so group 2 is over first."""
    seen = []

    def enough(over):
        seen.append([episode.trajectory_id for episode in over])
        return len({episode.group_index for episode in over}) == 2

    tasks = requests_of([{}] * 6, size=2)
    engine = ScriptedEngine({n: [STOP] for n in range(6)})
    made.clear()
    episodes = rollout(engine, CharacterPolicy(), tasks, make_settings({"ends_after": 1}), enough=enough)
    assert [episode.status for episode in episodes] == ["aborted", "aborted", *["completed"] * 4]
    assert seen == [["t4", "t5"], ["t2", "t3", "t4", "t5"]]
    for episode in episodes[:2]:
        assert (episode.reward, episode.drop_reason, episode.finish_reason) == (None, "aborted", "abort")
        assert episode.loss_mask.sum() == 2, "what was sampled is kept"
    assert [env.closed for env in made] == [1] * 6
    check(episodes)


def altered_rollout(engine, policy, requests, settings, *watching):
    """Returns what `how` makes of the episodes."""
    episodes = rollout(engine, policy, requests, settings, *watching)
    return how(episodes)


how = list


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda given: given, None),
        (lambda given: given[:-1], "missing: t2."),
        (lambda given: [], "missing: t0, t1, t2."),
        (lambda given: [*given, given[1]], "returned more than once: t1."),
        (lambda given: [given[0], given[0], given[2]], "missing: t1; returned more than once: t0."),
        (lambda given: [*given[:2], replace(given[2], trajectory_id="x")], "missing: t2; not asked for: x."),
        (lambda given: given[::-1], "in another order: from t2 on."),
        (lambda given: [given[0], given[2], given[1]], "in another order: from t2 on."),
        (lambda given: [*given[:2], replace(given[2], group_index=1)], "in another group_index: t2."),
        (tuple, "must return a list of Trajectory, one per request; it returned a tuple"),
        (lambda given: given[0], "must return a list of Trajectory, one per request; it returned a Trajectory"),
    ],
)
def test_an_own_rollout_function_returns_the_episodes_asked_for(monkeypatch, alter, said):
    monkeypatch.setitem(globals(), "how", alter)
    assert load_rollout_fn(make_settings().rollout) is rollout
    name = f"{__name__}.altered_rollout"
    own = load_rollout_fn(make_settings(function=name).rollout)
    requests = requests_of([{}] * 3)
    arguments = ScriptedEngine({n: [STOP] for n in range(3)}), CharacterPolicy(), requests, make_settings(max_turns=1)
    if said is None:
        assert [episode.trajectory_id for episode in own(*arguments)] == ["t0", "t1", "t2"]
        return
    with pytest.raises(WrongEpisodesError) as caught:
        own(*arguments)
    assert str(caught.value).startswith(f"rollout.function={name}: must return ")
    assert explain(caught.value) == str(caught.value)  # no traceback
    assert str(caught.value).endswith(said)


def hasty_rollout(engine, policy, requests, settings, enough):
    """Calls the first group complete that has half of its episodes."""
    found = rollout(engine, policy, requests, settings)
    enough(found[:1])
    return found


def worker_of(count):
    """A rollout worker with an engine for so many episodes of one response."""
    worker = Worker(CharacterPolicy(), None)
    worker.engine = ScriptedEngine({n: [STOP] for n in range(count)})
    return worker


def test_a_worker_sends_whole_groups_alone():
    settings = make_settings(function=f"{__name__}.hasty_rollout", max_turns=1)
    requests, sent = requests_of([{}] * 4, size=2), []
    with pytest.raises(WrongEpisodesError, match=r"hasty_rollout: must return .* missing: t1\.$"):
        worker_of(4).rollout_groups(sent.append, 1, requests, settings, is_all=True, is_streamed=True)
    assert sent == []


def test_groups_for_an_earlier_rollout_are_ignored():
    requests, worker, sent = requests_of([{}] * 2, size=1), worker_of(2), []
    worker.add_groups(5, requests[1:], is_all=True, is_stopped=False)  # it may come before the rollout begins
    worker.add_groups(4, (), is_all=True, is_stopped=True)
    worker.rollout_groups(sent.append, 5, requests[:1], make_settings(max_turns=1), is_all=False, is_streamed=True)
    groups = [[(one.trajectory_id, one.status) for one in group] for group in sent]
    assert sorted(groups) == [[("t0", "completed")], [("t1", "completed")]]


class ForgetfulEngine(ScriptedEngine):
    """Answers the first request only."""

    def poll(self):
        return super().poll() if len(self.requests) > len(self.released) == 0 else []


def test_an_engine_that_loses_requests_ends_the_rollout():
    requests = requests_of([{}] * 3)
    engine = ForgetfulEngine({n: [STOP] for n in range(3)})
    with pytest.raises(
        LostRequestsError, match=r"^rollout.engine=scripted: it returned nothing while t0, t1 wait for a resp"
    ):
        rollout(engine, CharacterPolicy(), requests, make_settings(max_turns=1))
