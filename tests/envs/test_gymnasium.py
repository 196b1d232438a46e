"""Environments of gymnasium: what a response may do there, what the policy sees, seeds, and faults."""

from __future__ import annotations

import copy
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from geo_sokoban_pipeline.config.rollout import EnvOptions
from geo_sokoban_pipeline.envs.adapters.base import build_teacher, make_row
from geo_sokoban_pipeline.envs.adapters.gymnasium import GymnasiumEnv
from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.rollout.episode import RolloutSettings
from geo_sokoban_pipeline.rollout.functions import STUCK
from geo_sokoban_pipeline.runs.fingerprint import loop_parameters
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.tasks import TASKS
from geo_sokoban_pipeline.trajectories.arrow import to_json
from rollout.scripted import EPISODE_RETURN, check_replay, make_settings, play_right
from runs import ROOT

pytest.importorskip("gymnasium", reason="the extra gym is not installed")
import gym_rooms  # noqa: E402 - it imports gymnasium

FACTORY = "gymnasium:Tests/Walk-v0"
ROOMS = "gym_rooms"
WORDS = {"left": 1, "right": 2}
LEVELS = range(8)  # seeds, of which some begin at place 0 and some at place 1


def build(level: int = 0, factory: str = FACTORY, **args: Any) -> GymnasiumEnv:
    found: GymnasiumEnv = load_object(factory)({"seed": level}, {"imports": [ROOMS], "actions": WORDS, **args})
    return found


def walk(env: GymnasiumEnv, seed: int | None, count: int = 6) -> list[int]:
    """Places of an episode that goes right as often as it may."""
    env.reset(seed)
    places = []
    for _ in range(count):
        _, done, info = env.step("right")
        places.append(info["info"]["place"])
        if done:
            break
    return places


@pytest.mark.parametrize(
    ("response", "actions"),
    [
        ("right", ["right"]),
        ("I go RIGHT.", ["right"]),
        ("<answer>Left</answer>", ["left"]),
        ("right? <answer> left, right </answer>", ["left"]),  # the first word of the block
        ("<think>left</think> right", ["right"]),
        ("<answer>fly</answer> right", []),  # a block without a word is no action
        ("upright leftmost right_", []),  # whole words
        ("2", []),  # an action itself is no word
        ("", []),
    ],
)
def test_words_choose_actions(response: str, actions: list[str]) -> None:
    env = build()
    env.reset(1)
    _, done, info = env.step(response)
    assert (info["parsed_actions"], done) == (actions, False)
    assert (env.steps, env.invalid_turns) == ((1, 0) if actions else (0, 1))


def test_of_two_words_the_longer_one_counts() -> None:
    env = build(actions={"go": 1, "go on": 2})
    env.reset(1)
    assert env.step("go on")[2]["parsed_actions"] == ["go on"]
    assert env.words == ["go", "go on"]


def test_an_episode_ends_at_its_goal_and_takes_no_further_step() -> None:
    env = build()
    env.reset(0)
    steps = [env.step("right") for _ in range(4 - env.env.unwrapped.place)]
    assert [done for _, done, _ in steps] == [False] * (len(steps) - 1) + [True]
    assert [info["turn_reward"] for *_, info in steps] == [0.0] * (len(steps) - 1) + [1.0]
    numbers = {"success": 1.0, "return": 1.0, "steps": len(steps), "truncated": 0.0, "invalid_turns": 0.0}
    assert env.final_metrics() == numbers
    for *_, info in steps:  # as it is stored; objects of the environment's info are left out
        assert json.loads(to_json(info))["info"] == {"place": info["info"]["place"]}
    with pytest.raises(RuntimeError, match="after the end"):
        env.step("right")
    env.reset(0)
    assert (env.done, env.steps) == (False, 0)
    env.close()
    env.close()


def test_an_episode_that_takes_too_long_is_truncated() -> None:
    env = build()
    env.reset(0)
    *_, (observation, done, info) = [env.step("left") for _ in range(6)]
    assert (observation, done, info["truncated"]) == (None, True, True)
    assert (env.final_metrics()["success"], env.final_metrics()["truncated"]) == (0.0, 1.0)


def test_rewards_are_finite() -> None:
    env = build(kwargs={"prize": float("nan")})
    with pytest.raises(ValueError, match="its reward for right is nan"):
        walk(env, 0)


@pytest.mark.parametrize(("says", "success"), [(None, 1.0), (False, 0.0), (True, 1.0)])
def test_the_environment_may_define_success(says: bool | None, success: float) -> None:
    env = build(kwargs={"says": says})
    walk(env, 0)
    assert (env.final_metrics()["return"], env.final_metrics()["success"]) == (1.0, success)


def test_the_row_decides_the_beginning_and_the_episode_the_rest() -> None:
    slips = {"kwargs": {"slips": 0.5}}
    begins = {level: make_row(build(level, **slips), level)["images"][0] for level in LEVELS}
    assert len(set(begins.values())) == 2
    for level in LEVELS:
        env = build(level, **slips)
        assert make_row(env, level)["images"][0] == begins[level]
        first = walk(env, 3)
        assert walk(env, 3) == first == walk(build(level, **slips), 3)
    paths = [walk(build(0, **slips), seed) for seed in range(8)]
    assert len(set(map(tuple, paths))) > 4  # other seeds, other slips
    assert walk(build(0, **slips), None) == walk(build(0, **slips), None)

    env = build(0, **slips)
    ends = []
    for seed in range(8):
        env.reset(1)
        env.step("right")
        env.reseed(seed)
        ends.append(tuple(env.step("left")[2]["info"]["place"] for _ in range(2)))
    assert len(set(ends)) > 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, ""),
        ({"image": "observation.image", "text": "To {goal}."}, "To the end."),
        ({"kwargs": {"shown": "grey"}}, ""),
    ],
)
def test_images_and_texts_of_an_observation(args: dict[str, Any], text: str) -> None:
    env = build(**args)
    observation, _ = env.reset(0)
    image, said = env.format_observation(observation)["content"]
    assert said == {"type": "text", "text": text}
    pixels = np.asarray(image["image"])
    assert pixels.shape == (32, 128, 3)
    assert (pixels[..., 1] == 255).mean() == 1 - env.env.unwrapped.place / 4
    row = make_row(env, 0, "Walk. ")
    assert (row["id"], row["seed"], row["prompt"]) == ("0", 0, f"Walk. <image>{text}")
    assert row["images"][0].startswith("data:image/png;base64,")


def test_without_images_an_observation_is_text() -> None:
    env = build(image=None, text="{place} of {goal}")
    (said,) = env.format_observation(env.reset(0)[0])["content"]
    assert said["text"] in ("0 of the end", "1 of the end")
    assert make_row(env, 0) == {"id": "0", "prompt": said["text"], "images": [], "seed": 0}


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("gymnasium:Tests/Walk-v1", {}, r"env.factory=gymnasium:Tests/Walk-v1: .*v0.*env.args.imports=\['gym_rooms'\]"),
        ("gymnasium:FrozenLak-v1", {}, "Did you mean: `FrozenLake`"),
        ("gymnasium:FrozenLake-v1", {"imports": [], "actions": {"left": 4}}, "actions.left=4: .* Discrete"),
        (FACTORY, {"imports": ["nowhere"]}, "env.args.imports: 'nowhere': there is no module"),
        (FACTORY, {"kwargs": {"sips": 1}}, "env.args.kwargs=.*unexpected keyword argument 'sips'"),
        (FACTORY, {"wrappers": ["gymnasium.wrappers.Nothing"]}, "env.args.wrappers: .*has no 'Nothing'"),
        (FACTORY, {"actions": {"jump": 3}}, r"env.args.actions.jump=3: .* Discrete\(2, start=1\)"),
        (FACTORY, {"actions": {}}, "env.args.actions={}: name at least one"),
        (FACTORY, {"actions": {"Left": 1, "left": 2}}, "none twice"),
        (FACTORY, {"picture": "render"}, "env.args.picture=\"render\": unknown name"),
        (FACTORY, {"image": "screen"}, "env.args.image=\"screen\""),
        (FACTORY, {"kwargs": {"shown": "nothing"}}, "image=render: .*this is None; its render mode"),
        (FACTORY, {"kwargs": {"shown": "floats"}}, r"of float64 \(32, 128\)"),
        (FACTORY, {"image": "observation"}, "env.args.image=observation: .*dict"),
        (FACTORY, {"image": "observation.goal"}, "name another part of it"),
        (FACTORY, {"text": "{gaol}"}, r"env.args.text='{gaol}': KeyError\('gaol'\); it may hold .*{goal}"),
    ],
)  # fmt: skip
def test_errors_name_field_value_and_way_out(factory: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(0, factory, **args).reset(0)


def test_a_prompt_without_a_seed_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the prompt has no column `seed`"):
        load_object(FACTORY)({"id": "a"}, {"actions": WORDS})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"needs gymnasium: pip install 'geo-sokoban-pipeline\[gym\]'"):
        load_object(FACTORY)


def test_random_play_takes_every_word() -> None:
    env, generator = build(), python_generator(0, "play")
    teacher = build_teacher("random", None, 0.0)
    assert {teacher.respond(env, generator) for _ in range(20)} == {"left", "right"}


OWN = """
import gymnasium
class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward): return 2 * reward
def parse_action(text, env): return {"r": 2, "l": 1, "x": 7}.get(text[:1])
"""


def test_wrappers_and_a_parser_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    args = {"imports": [ROOMS], "wrappers": [f"{tmp_path}/own.py:Doubled"], "actions": f"{tmp_path}/own.py"}
    env = build(**args)
    env.reset(0)
    assert env.step("?")[2]["parsed_actions"] == []
    with pytest.raises(ValueError, match=r"own.py: gave 7, which is no action of Discrete\(2, start=1\)"):
        env.step("x")
    while not env.step("r")[1]:
        pass
    assert env.final_metrics()["return"] == 2.0
    with pytest.raises(ValueError, match="name an expert of your own"):
        build_teacher("random", None, 0.0).respond(env, python_generator(0))

    # It belongs to the run as other own code does.
    options = TASKS["sokoban"].train_config.model_validate({"env": {"factory": FACTORY, "args": args}})
    named = [name.partition(", code in ")[0] for name in loop_parameters(options, 0, {}) if "own.py" in name]
    assert len(named) == 2
    moved = options.env.renamed({f"{tmp_path}/own.py": "own_code/0/own.py"})
    assert (moved.args["actions"], moved.args["wrappers"]) == ("own_code/0/own.py", args["wrappers"])


# Episodes: faults, and what a replay makes of chance.


ALIKE = {"imports": [ROOMS], "actions": WORDS, "image": None, "text": "{place}"}


def settings_for(limit: float | None = None, **kwargs: Any) -> RolloutSettings:
    args = {**copy.deepcopy(ALIKE), "kwargs": kwargs}
    return make_settings(args, EPISODE_RETURN, FACTORY, max_turns=8, env_timeout=limit)


FAULTS = [("raise", "RuntimeError: the floor is open"), ("hang", "EnvTimeoutError: step of the environment")]


@pytest.mark.parametrize(("how", "error"), FAULTS)
def test_a_hanging_and_a_crashing_environment_cost_their_episodes_alone(how: str, error: str) -> None:
    begins = [build(level).env.reset(seed=level)[0]["place"] for level in LEVELS]
    gym_rooms.waiting.clear()
    episodes = play_right([{"seed": level} for level in LEVELS], settings_for(0.3, stops_at=0, how=how))
    is_stuck = any(thread.name == STUCK for thread in threading.enumerate())
    gym_rooms.waiting.set()
    assert is_stuck == (how == "hang")
    assert [episode.status for episode in episodes] == [["failed", "completed"][place] for place in begins]
    for episode in episodes:
        assert (episode.error or "").startswith(error if episode.status == "failed" else "")
        assert episode.reward == (None if episode.status == "failed" else 1.0)


def test_a_replay_draws_as_the_episode_did() -> None:
    check_replay({"seed": 0}, settings_for(slips=0.5))


# A task: its levels, and that they are those of the environment.


MINIGRID = str(ROOT / "docs" / "examples" / "minigrid")


def test_levels_that_look_alike_belong_to_one_split() -> None:
    task = load_object(f"{MINIGRID}/task.py:TASK")
    parameters = yaml.safe_load(Path(MINIGRID, "conf/base/parameters/minigrid.yml").read_text("utf-8"))["minigrid"]
    parameters["counts"] = {"train": 60, "validation": 20, "eval": 40}
    tables = task.make_prompts(parameters)
    images = [{row[0] for row in table["images"]} for table in tables]
    assert sum(map(len, images)) == len(set().union(*images)) > 40
    assert sum(map(len, tables)) == 120 and all(len(table) >= 10 for table in tables)
    again = task.make_prompts(parameters)
    assert all(table.equals(other) for table, other in zip(tables, again, strict=True))
    others = task.make_prompts({**parameters, "seed": 1})
    assert not set(others[0]["seed"]) & set(tables[0]["seed"])
    assert [one["prompts"] for one in task.report_data(*tables, None)["splits"].values()] == list(map(len, tables))
    with pytest.raises(ValueError, match="minigrid.counts are all 0"):
        task.make_prompts({**parameters, "counts": {}})

    for row in tables[2].head(8).to_dict("records"):
        env = load_object(parameters["env"]["factory"])(row, parameters["env"]["args"])
        assert make_row(env, row["seed"])["images"] == list(row["images"])
        env.reset(0)
        build = load_object(f"{MINIGRID}/task.py:build_teacher")
        expert, done = build("shortest", None, 0.0), False
        while not done:
            _, done, _ = env.step(expert.respond(env, python_generator(0)))
        assert (env.steps, env.final_metrics()["success"]) == (row["fewest"], 1.0)
        assert task.steps_to_goal(env) == 0

        env.reset(0)
        wanderer, generator, done = build("wanderer", None, 0.0), python_generator(row["seed"]), False
        while not done:  # each of its actions changes something
            room = env.env.unwrapped
            before = (*room.agent_pos, room.agent_dir)
            _, done, _ = env.step(wanderer.respond(env, generator))
            assert (*room.agent_pos, room.agent_dir) != before


def test_data_and_training_have_one_environment() -> None:
    task = load_object(f"{MINIGRID}/task.py:TASK")
    options, data = task.train_config(), task.data_config()
    task.check_data_fits(data, options)
    other = options.model_copy(update={"env": EnvOptions(factory=options.env.factory, args={"text": "Next?"})})
    with pytest.raises(ValueError, match=r"env: differs from minigrid.env"):
        task.check_data_fits(data, other)
    assert set(task.baselines(options, ())) == {"random", "shortest", "teacher (wanderer)"}


def test_nothing_else_imports_gymnasium() -> None:
    package = ROOT / "src" / "geo_sokoban_pipeline"
    importing = re.compile(r"^\s*(import|from) (gymnasium|minigrid)\b", re.MULTILINE)
    found = [path for path in package.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))]
    assert found == [package / "envs" / "adapters" / "gymnasium.py"]
