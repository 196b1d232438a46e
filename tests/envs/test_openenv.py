"""Environments behind OpenEnv servers: frames, fields, faults, places of a server, seeds."""

from __future__ import annotations

import base64
import gc
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frame_server import LENGTH, FrameServer, Walk
from geo_sokoban_pipeline.background import shared_loop
from geo_sokoban_pipeline.envs.adapters.base import build_teacher, make_row
from geo_sokoban_pipeline.envs.adapters.openenv import OpenEnv, OpenEnvError
from geo_sokoban_pipeline.envs.images import encode_png, png_data_uri
from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.preflight.own_code import try_own_code
from geo_sokoban_pipeline.rollout.episode import RolloutSettings
from geo_sokoban_pipeline.rollout.functions import STUCK
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import TASKS
from rollout.scripted import EPISODE_RETURN, PROMPT, check_replay, make_settings, play_right, replayer_of

ARGS = {"action": "move", "actions": {"right": 1, "left": -1}, "text": "{place}", "timeout": 5}


@pytest.fixture
def server() -> Iterator[FrameServer]:
    found = FrameServer()
    with found.listen() as found.url:
        yield found


def build(server: Any, row: dict[str, Any] | None = None, **args: Any) -> OpenEnv:
    found: OpenEnv = load_object(f"openenv:{server.url}")(row or {}, {**ARGS, **args})
    return found


def failing(server: FrameServer, how: Any, **args: Any) -> OpenEnv:
    """An environment whose second step fails; the first one is done."""
    env = build(server, {"how": how}, reset={"how": "how"}, **args)
    env.reset(1)
    env.step("right")
    return env


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_an_episode_is_one_session(server: FrameServer) -> None:
    with ExitStack() as stack:
        env = build(server)
        stack.callback(env.close)
        assert server.opened == 0
        observation, _ = env.reset(7)
        assert env.format_observation(observation)["content"] == [{"type": "text", "text": "0"}]
        steps = [env.step(text) for text in ("right", "no way", "<answer>Right</answer>", "right")]
        assert [info["turn_reward"] for *_, info in steps] == [0.0, 0.0, 0.0, 1.0]
        assert [info["parsed_actions"] for *_, info in steps] == [["right"], [], ["right"], ["right"]]
        assert [done for _, done, _ in steps] == [False, False, False, True]
        assert steps[-1][2]["info"] == {"place": LENGTH}  # what else the metadata hold cannot be stored
        assert env.final_metrics() == {
            "success": 1.0, "return": 1.0, "steps": 3.0, "truncated": 0.0, "invalid_turns": 1.0,
        }  # fmt: skip
        with pytest.raises(RuntimeError, match="after the end"):
            env.step("right")
    reset, *moves, close = server.frames
    assert reset == {"type": "reset", "data": {"seed": 7}}
    assert moves == [{"type": "step", "data": {"move": 1}}] * 3 and close == {"type": "close"}
    assert (server.opened, len(server.sessions)) == (1, 0)


@pytest.mark.parametrize(
    ("args", "seed", "data"),
    [
        ({}, 3, {"seed": 3}),
        ({}, None, {}),
        ({"seed": None}, 3, {}),
        ({"seed": "slips"}, 3, {"slips": 3}),
        ({"reset": {"seed": "level"}, "seed": "slips"}, 3, {"seed": 9, "slips": 3}),
        ({"reset": {"seed": "level"}}, 3, {"seed": 9}),  # the row decides all
        ({"reset": {"place": "hidden", "list": "list"}}, 3, {"place": 2, "list": [1, 2], "seed": 3}),
    ],
)
def test_keywords_of_a_reset(server: FrameServer, args: dict[str, Any], seed: int | None, data: dict[str, Any]) -> None:
    """From the columns of a prompts row, also from those that a table of other data had beside its own."""
    row = {"level": 9, "list": np.array([1, 2]), "columns": '{"hidden": 2, "level": 1}'}
    env = build(server, row, **args)
    env.reset(seed)
    env.close()
    assert server.frames[0] == {"type": "reset", "data": data}


@pytest.mark.parametrize(
    ("actions", "response", "word", "data"),
    [
        ({"up": {"move": 1, "by": 2}}, "UP!", "up", {"move": 1, "by": 2}),
        ("text", "<think>x</think> <answer> go \n</answer> right", "go", {"move": "go"}),
        ("text", " <think>x</think> ", None, None),
        ("integer", "<answer>to -12 or 3</answer>", "-12", {"move": -12}),
        ("integer", "to the right", None, None),
        ("json", 'I call {"move": 1, "by": [2]} now', '{"move": 1, "by": [2]}', {"move": 1, "by": [2]}),
        ("json", "{move: 1}", None, None),
        ("json", "[1]", None, None),
        ("json", "no object", None, None),
    ],
)  # fmt: skip
def test_responses_become_actions(server: FrameServer, actions: Any, response: str, word: str, data: Any) -> None:
    env = build(server, actions=actions)
    assert env.read(response) == (None if word is None else (word, data))
    assert env.words == (["up"] if isinstance(actions, dict) else [])
    if env.words:
        assert build_teacher("random", None, 0.0).respond(env, python_generator(0)) == "up"


def test_an_object_of_the_policys_own_that_the_schema_refuses_is_no_action(server: FrameServer) -> None:
    env = build(server, actions="json")
    env.reset(1)
    assert env.step('{"mve": 1}')[2]["parsed_actions"] == []
    assert env.step('{"move": 1}')[2]["parsed_actions"] == ['{"move": 1}']
    assert (env.steps, env.invalid_turns) == (1, 1)
    env.close()
    env = build(server, actions="text")  # here the options are wrong
    env.reset(1)
    with pytest.raises(
        OpenEnvError, match=r"VALIDATION_ERROR: .*move.*env.args.action and .* schema, http://127.*/schema"
    ):
        env.step("right")
    wait_for(lambda: not server.sessions)


PIXELS = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
PNG = encode_png(PIXELS)


@pytest.mark.parametrize(
    ("given", "pixels"),
    [
        (png_data_uri(PNG), PIXELS),
        (base64.b64encode(PNG).decode(), PIXELS),
        (PIXELS.tolist(), PIXELS),
        (PIXELS[..., 0].tolist(), np.repeat(PIXELS[..., :1], 3, axis=2)),
    ],
    ids=["data URI", "base64", "colours", "grey"],
)
def test_images_of_an_observation(server: FrameServer, given: Any, pixels: np.ndarray) -> None:
    row = {"screen": {"main": given}}
    env = build(server, row, image="screen.main", reset={"screen": "screen"})
    image, text = env.format_observation(env.reset(1)[0])["content"]
    assert np.array_equal(np.asarray(image["image"]), pixels) and text["text"] == "0"
    made = make_row(env, 5, "Go. ")
    assert (made["prompt"], made["images"], made["seed"]) == ("Go. <image>0", [png_data_uri(PNG)] if pixels is PIXELS
            else [png_data_uri(encode_png(pixels))], 5)  # fmt: skip
    env.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "this is None. The observation has place, note, screen, seed, metadata"),
        ("no image", "env.args.image=screen: image "),
        ([[256]], "lists of integers from 0 to 255, .*this is a list"),
        ([[-1]], "this is a list"),
        ([[0.5]], "this is a list"),
        ([[1], [1, 2]], "this is a list"),
        ([[[1, 2]]], "this is"),
        ([], "this is a list"),
    ],
)
def test_what_is_no_image_is_named(server: FrameServer, given: Any, message: str) -> None:
    env = build(server, {"screen": given}, image="screen", reset={"screen": "screen"})
    with pytest.raises(ValueError, match=message):
        env.reset(1)
    env.close()


@pytest.mark.parametrize(
    ("address", "args", "message"),
    [
        ("127.0.0.1:8000", {}, "names no server; write openenv:ws://host:port"),
        ("ftp://somewhere", {}, "names no server"),
        ("ws://me:secret@somewhere", {}, "'openenv:ws://somewhere' names no server.*without a login"),
        ("ws://a", {"actions": "words"}, "env.args.actions"),
        ("ws://a", {"actions": {}}, "env.args.actions={}: name at least one"),
        ("ws://a", {"picture": "x"}, "env.args.picture=\"x\": unknown name"),
        ("ws://a", {"reset": {"seed": "level"}}, "env.args.reset.seed=level: the prompt has no such column; it has id"),
        ("ws://127.0.0.1:1/", {}, "ws://127.0.0.1:1: cannot connect .*Start the server, or correct the address"),
    ],
)  # fmt: skip
def test_errors_name_field_value_and_way_out(address: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OpenEnvError), match=message) as caught:
        load_object(f"openenv:{address}")({"id": "a"}, {**ARGS, **args}).reset(1)
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, PluginError) == ("names no server" in message)


FAULTS = {
    "drop": "the connection was lost during step .code 1006.",
    "leave": "the connection was lost during step .code 1011.",
    "bytes": "the connection was lost during step",
    "nonsense": "step was answered by '<html>', which is no observation",
    "state": "which is no observation",
    "hang": "step had no answer within env.args.timeout=0.3 s",
    "much": "its reward for right is 'much'",
    "EXECUTION_ERROR": "EXECUTION_ERROR: said EXECUTION_ERROR. Way out: the environment raised",
    "FACTORY_ERROR": "FACTORY_ERROR: .*could not make an environment",
    "CAPACITY_REACHED": "CAPACITY_REACHED: .*set rollout.max_environments",
    "SESSION_ERROR": "SESSION_ERROR: .*does not speak the protocol",
    "INVALID_JSON": "INVALID_JSON: .*does not speak the protocol",
    "UNKNOWN_TYPE": "UNKNOWN_TYPE: .*does not speak the protocol",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_ends_the_session_and_is_explained(server: FrameServer, how: str) -> None:
    """A second session is never opened: it would be another environment."""
    env = failing(server, how, timeout=0.3)
    with pytest.raises(OpenEnvError, match=f"^{server.url}: .*{FAULTS[how]}"):
        env.step("right")
    if how != "much":
        with pytest.raises(OpenEnvError, match="without a connection"):
            env.step("right")
    env.close()
    if how != "hang":  # its server looks after the step
        wait_for(lambda: not server.sessions)
    assert server.opened == 1


@pytest.mark.parametrize(("how", "truncated"), [("truncated", True), ("terminated", False)])
def test_both_ways_to_end_are_read(server: FrameServer, how: str, truncated: bool) -> None:
    env = failing(server, how)
    _, done, info = env.step("right")
    assert (done, info["truncated"]) == (True, truncated)
    wait_for(lambda: not server.sessions)  # its place is free before the rollout ends


def test_large_frames_are_read(server: FrameServer) -> None:
    env = failing(server, "large")
    env.step("right")
    assert len(env.observation["note"]) == 5 * 2**20
    env.close()


def test_a_late_answer_closes_the_socket() -> None:
    server = FrameServer(heartbeat=0.2)
    with server.listen() as server.url:
        env = failing(server, "hang", timeout=0.3)
        (session,) = server.sessions
        with pytest.raises(OpenEnvError, match="no answer"):
            env.step("right")
        wait_for(lambda: session.closed)


def test_a_server_that_leaves_is_not_looked_for_again() -> None:
    server = FrameServer()
    with server.listen() as server.url:
        env = failing(server, None)
    with pytest.raises(OpenEnvError, match="was lost during step"):
        env.step("right")
    env.close()


def test_a_connection_that_nobody_accepts_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = SimpleNamespace(url=f"ws://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(OpenEnvError, match="cannot connect .no answer within env.args.timeout=0.3 s"):
            build(server, timeout=0.3).reset(1)


def test_an_action_that_was_sent_is_the_one_that_is_stepped(server: FrameServer) -> None:
    env = build(server)
    env.reset(1)
    env.prepare("left")
    with pytest.raises(OpenEnvError, match="'move': 1.* after .*'move': -1.* was sent already"):
        env.step("right")
    env.reset(1)  # what was prepared belongs to the episode before
    assert env.step("right")[2]["info"]["place"] == 1
    env.close()


def test_threads_that_begin_at_the_same_time_share_a_loop() -> None:
    name, barrier, found = f"loop {time.monotonic_ns()}", threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(shared_loop(name))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    found[0].close()


def test_an_answer_after_the_rollouts_limit_leaves_no_connection(server: FrameServer) -> None:
    """Its episode has failed, and its environment is never called again."""
    settings = settings_for(server, 0.2, seed=None, timeout=5)
    (episode,) = play_right([{"how": "late", "place": 0}], settings)
    assert episode.status == "failed"
    wait_for(lambda: gc.collect() is not None and not server.sessions)


def test_pings_are_answered_while_the_policy_thinks() -> None:
    server = FrameServer(heartbeat=0.2)
    with server.listen() as server.url:
        env = failing(server, None)
        time.sleep(0.8)
        assert not env.step("right")[1]
        env.close()


def test_places_of_a_server() -> None:
    """A third session is refused by name; a closed one leaves its place at once."""
    server = FrameServer(capacity=2)
    with server.listen() as server.url:
        first, second, third = (build(server) for _ in range(3))
        first.reset(1)
        second.reset(1)
        with pytest.raises(OpenEnvError, match="reset: CAPACITY_REACHED: .*set rollout.max_environments so that"):
            third.reset(1)
        for _ in range(20):
            first.close()
            first.reset(1)
        while not first.step("right")[1]:
            pass
        third.reset(1)  # the place of an episode that is over
        for env in (first, second, third):
            env.close()


def test_environments_of_a_batch_step_at_the_same_time(server: FrameServer) -> None:
    """The second steps of two sessions are answered once both are there."""
    envs = [failing(server, "together") for _ in range(2)]
    begun = [env.prepare("right") for env in envs]
    assert [len(futures or ()) for futures in begun] == [1, 1]
    assert [env.step("right")[2]["info"]["place"] for env in envs] == [2, 2]
    assert all(future.done() for futures in begun for future in futures or ())
    assert envs[0].prepare("no way") is None and envs[0].step("no way")[2]["parsed_actions"] == []
    for env in envs:
        env.close()


# Episodes: faults in a batch, replays, and servers without seeds.


def settings_for(server: FrameServer, limit: float | None = None, **args: Any) -> RolloutSettings:
    given = {**ARGS, "reset": {"how": "how", "place": "place"}, "seed": "slips", **args}
    return make_settings(given, EPISODE_RETURN, f"openenv:{server.url}", max_turns=8, env_timeout=limit)


def test_more_episodes_than_a_server_has_places(server: FrameServer) -> None:
    """In a rollout and in its replay."""
    server.capacity = 2
    settings = settings_for(server)
    rows: list[dict[str, Any]] = [{"how": None, "place": number % 3} for number in range(6)]
    assert [episode.status for episode in play_right(rows, settings)].count("failed") == 4
    settings = replace(settings, rollout=settings.rollout.model_copy(update={"max_environments": 2}))
    episodes = play_right(rows, settings)
    assert [episode.status for episode in episodes] == ["completed"] * 6
    known = {f"r{n}": [{"id": f"r{n}", "prompt": PROMPT, **row}] for n, row in enumerate(rows)}
    assert replayer_of(settings).differences(episodes, known) == []


@pytest.mark.parametrize(("limit", "error"), [(None, "OpenEnvError: ws://"), (0.3, "EnvTimeoutError: step of the")])
def test_hanging_and_crashing_environments_cost_their_episodes_alone(
    server: FrameServer, limit: float | None, error: str
) -> None:
    """Whether the adapter's own limit ends the step or that of the rollout; its socket is closed in the end."""
    hows = [None, "hang", "drop", None, "EXECUTION_ERROR", None]
    settings = settings_for(server, limit, seed=None, timeout=0.5)
    episodes = play_right([{"how": how, "place": 0} for how in hows], settings)
    assert [episode.status for episode in episodes] == [
        "completed" if how is None else "failed" for how in hows
    ]  # fmt: skip
    assert [episode.reward for episode in episodes] == [None if how else 1.0 for how in hows]
    messages = [episode.error or "" for episode in episodes]
    assert messages[1].startswith(error)
    assert "was lost during step" in messages[2] and "EXECUTION_ERROR" in messages[4]
    assert server.opened == len(hows)
    wait_for(lambda: not any(thread.name == STUCK for thread in threading.enumerate()))


def test_a_replay_draws_as_the_episode_did(server: FrameServer) -> None:
    check_replay({"how": None, "place": 0}, settings_for(server))


@pytest.mark.parametrize("ignores", ["nothing", "the chance", "the beginning"])
def test_a_server_that_ignores_the_seed_is_found(
    server: FrameServer, monkeypatch: pytest.MonkeyPatch, ignores: str
) -> None:
    """By two sessions with one seed; its first observation is compared as well."""
    plain, chance = Walk.reset, random.Random(1)

    def reset(self: Walk, **keywords: Any) -> dict[str, Any]:
        if ignores == "the chance":
            keywords["slips"] = chance.random()
        answer = plain(self, **keywords)
        if ignores == "the beginning":
            answer["data"]["observation"]["note"] = chance.random()
        return answer

    monkeypatch.setattr(Walk, "reset", reset)
    teacher = {"factory": "geo_sokoban_pipeline.envs.adapters.base.build_teacher", "noise": 0.0}
    options = TASKS["sokoban"].train_config.model_validate(
        {
            "env": {"factory": f"openenv:{server.url}", "args": {**ARGS, "seed": "slips", "text": "{place}, {note}"}},
            "reward": {"function": "geo_sokoban_pipeline.rewards.returns.episode_return", "args": {}},
            "rollout": {"max_turns": 8},
            "warm_start": {"teacher": teacher},
            "grpo": {"advantage": "grpo", "advantage_args": {}},
        }
    )
    found = try_own_code("train_sokoban", {"id": "a", "prompt": "Go.", "images": []}, options, 0)
    states = {check.name: check.state for check in found}
    assert states == {"whole episode": "ok", "truncated episode": "ok"} | (
        {} if ignores == "nothing" else {"seed": "warning"}
    )
