"""`docs/openenv.md` and its example: the server as users start it, a whole run, and a server of the package openenv."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from geo_sokoban_pipeline.envs.adapters.openenv import OpenEnv, OpenEnvError
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.runs.storage import read_json
from openenv_frames import PLACES, PYTHON, RECORDED, plain, running, talk
from runs import ROOT, Command, finish, kedro_command, link_project

EXAMPLE = ROOT / "docs" / "examples" / "openenv"
SERVER = EXAMPLE / "server.py"
PARAMETERS = yaml.safe_load((EXAMPLE / "conf/base/parameters/boat.yml").read_text("utf-8"))
ARGS = PARAMETERS["boat"]["env"]["args"]


def test_the_examples_server_answers_as_recorded() -> None:
    """From a server of the package openenv 0.10."""
    with running(sys.executable, SERVER, str(PLACES)) as url:
        assert plain(asyncio.run(talk(url))) == plain(json.loads(RECORDED.read_text("utf-8")))


@pytest.fixture(scope="module")
def package() -> Iterator[str]:
    """The address of a server of the package openenv."""
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON.relative_to(ROOT)}: run `make openenv-env`")
    with running(PYTHON, ROOT / "tests" / "openenv_package.py") as url:
        yield url


@pytest.mark.slow
def test_a_server_of_the_package_answers_as_recorded(package: str) -> None:
    assert plain(asyncio.run(talk(package))) == plain(json.loads(RECORDED.read_text("utf-8")))


def build(url: str, how: str | None = None, **args: Any) -> OpenEnv:
    """The boat of level 3; with `how`, the second step of the package's server fails."""
    keywords = {**ARGS["reset"], **({} if how is None else {"how": "how"})}
    found: OpenEnv = load_object(f"openenv:{url}")({"seed": 3, "how": how}, {**ARGS, "reset": keywords, **args})
    return found


def sail(url: str) -> list[Any]:
    """All that an episode shows."""
    env = build(url)
    found = [env.format_observation(env.reset(5)[0])["content"]]
    for way in ("north", "up", "west", "east", "east", "north"):
        observation, done, info = env.step(way)
        found += [env.format_observation(observation)["content"], done, info]
    env.close()
    return [*found, env.final_metrics()]


@pytest.mark.slow
def test_episodes_behind_a_server_of_the_package(package: str) -> None:
    """They are those of the example's server, also while the policy thinks longer than the server waits for a pong."""
    with running(sys.executable, SERVER) as url:
        assert sail(package) == sail(url)
    env = build(package)
    env.reset(5)
    time.sleep(1.5)
    env.step("north")
    env.close()


@pytest.mark.slow
def test_faults_behind_a_server_of_the_package(package: str) -> None:
    envs = [build(package) for _ in range(PLACES + 1)]
    for env in envs[:-1]:
        env.reset(5)
    with pytest.raises(OpenEnvError, match="reset: CAPACITY_REACHED: .*3/3.*set rollout.max_environments"):
        envs[-1].reset(5)
    for _ in range(10):  # a place is free as soon as its session is closed
        envs[0].close()
        envs[-1].reset(5)
        envs[0], envs[-1] = envs[-1], envs[0]
    for env in envs:
        env.close()
    env = build(package, actions="text")
    env.reset(5)
    with pytest.raises(OpenEnvError, match="step: VALIDATION_ERROR: .*direction.*env.args.actions fit the server's"):
        env.step("home")
    for how, message in (("raise", "EXECUTION_ERROR: the mast is broken"), ("sleep", "step had no answer within")):
        env = build(package, how, timeout=0.8)
        env.reset(5)
        env.step("north")
        with pytest.raises(OpenEnvError, match=message):
            env.step("north")


@pytest.mark.slow
def test_a_boat_is_trained_and_a_missing_server_is_said_first(tmp_path: Path) -> None:
    """With the example's configuration beside that of the project, but for the port."""
    link_project(tmp_path, conf=False)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    shutil.copytree(EXAMPLE / "conf", tmp_path / "conf", dirs_exist_ok=True)
    conf = tmp_path / "conf" / "base" / "parameters" / "boat.yml"

    def start(pipeline: str, *params: str) -> Command:
        return kedro_command(f"--pipelines={pipeline}", *params, folder=tmp_path, data_root=tmp_path / "data")

    with running(sys.executable, SERVER) as url:
        conf.write_text(conf.read_text("utf-8").replace("ws://127.0.0.1:8000", url), encoding="utf-8")
        finish(start("train_boat"))
    reports = tmp_path / "data" / "08_reporting" / "train_boat" / "default"
    rows = {(row["policy"], row["mode"]): row for row in read_json(reports / "eval_summary.json")["rows"]}
    assert {policy for policy, _ in rows} == {
        "warm_start",
        "final",
        "final_blank",
        "random",
        "teacher (skipper, noise 0.6)",
    }
    assert rows["teacher (skipper, noise 0.6)", "-"]["solve_rate"] > 0
    before = sorted(tmp_path.glob("data/*/train_boat/**/*.*"))
    said = finish(start("train_boat", "--params=fresh=true"), 1)
    assert f"127.0.0.1:{url.rpartition(':')[2]} does not answer" in said
    assert "Start the server, or correct its address in train_boat.env.factory." in said
    assert sorted(tmp_path.glob("data/*/train_boat/**/*.*")) == before
