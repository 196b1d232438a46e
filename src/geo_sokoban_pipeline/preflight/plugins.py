"""Environments, rewards and rollouts before any work: what the parameters name must exist and take its arguments.

The project's own environments and rewards are tried on a small level or problem. Code of a user's is only looked up:
what it does with its arguments is its own affair. The rollout function is not imported, because it may bring torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from geo_sokoban_pipeline.envs.plugins import PluginError, load_object
from geo_sokoban_pipeline.options.base import ParameterError
from geo_sokoban_pipeline.options.project import ProjectParameters
from geo_sokoban_pipeline.options.training import TrainOptions
from geo_sokoban_pipeline.own_code import explain
from geo_sokoban_pipeline.preflight.fingerprints import TRAINING
from geo_sokoban_pipeline.tasks import TASKS

_KINDS = ("train", "rollout", "update", "evaluate", "control")
_LEVEL = "#####\n#@$.#\n#####"
_PROBLEM = {"id": "tried", "answer": "1"}
_PLAYED = SimpleNamespace(env={"turn_rewards": [0.0], "final_bonus": 0.0, "dist0": 1, "dist1": 1})
_ANSWERED = SimpleNamespace(prompt=_PROBLEM, replies=["\\boxed{1}"], response="\\boxed{1}")


def check_plugins(run: str, parameters: ProjectParameters) -> None:
    """See that what a run names can be found and accepts its arguments.

    Raises:
        ParameterError: names the full parameter path, the value, and the nearest known name.
    """
    kind, _, task = run.partition("_")
    if kind not in _KINDS or task not in TASKS:
        return
    run = f"{TRAINING}{task}"  # the other kinds play with the options of this one
    options: TrainOptions = getattr(parameters, run)
    if kind == "update":
        # It plays nothing, but credit per turn takes the arguments of the project's own reward.
        if options.reward.function.startswith("geo_sokoban_pipeline."):
            _try_reward(run, options)
        return
    environments = _own_environments()
    factory = _find(f"{run}.env.factory", options.env.factory, "build_env")
    _try_reward(run, options)
    if options.warm_start.steps:  # without one, nobody is imitated
        _find(f"{run}.warm_start.teacher.factory", options.warm_start.teacher.factory, "build_teacher")
    _find_module(f"{run}.rollout.function", options.rollout.function)
    for own_factory, sample in environments:
        if factory is own_factory:
            _try(run, "env.args", partial(own_factory, sample, options.env.args))
    if factory is environments[0][0]:
        drawn, played = parameters.sokoban.cell_px, options.env.args.get("cell_px")
        if played is not None and drawn != played:
            raise ParameterError(
                f"{run}.env.args.cell_px={played}: differs from sokoban.cell_px={drawn}, the size of an episode's "
                "first picture. Give both the same value."
            )


def _try_reward(run: str, options: TrainOptions) -> None:
    reward = _find(f"{run}.reward.function", options.reward.function, "reward")
    for own_reward, outcome in _own_rewards():
        if reward is own_reward:
            _try(run, "reward.args", partial(own_reward, outcome, options.reward.args))


def _own_environments() -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """The project's own factories, Sokoban's first, and what each is tried on; not imported with every command."""
    from geo_sokoban_pipeline.envs.geo3k import answer_env
    from geo_sokoban_pipeline.envs.geo3k import env as tool_env
    from geo_sokoban_pipeline.envs.sokoban import Board
    from geo_sokoban_pipeline.envs.sokoban.env import build_env

    level = {"extra_info": {"env_config": Board.from_text(_LEVEL).to_env_config()}}
    return [(build_env, level), (answer_env.build_env, _PROBLEM), (tool_env.build_env, _PROBLEM)]


def _own_rewards() -> list[tuple[Any, SimpleNamespace]]:
    """The project's own rewards, and what each is tried on."""
    from geo_sokoban_pipeline.rewards.geo3k import format_reward, math_reward, tolerance_reward
    from geo_sokoban_pipeline.rewards.sokoban import compute_reward

    of_answers = (math_reward, tolerance_reward, format_reward)
    return [(compute_reward, _PLAYED), *((reward, _ANSWERED) for reward in of_answers)]


def _find(path: str, spec: str, default_name: str) -> Any:
    try:
        return load_object(spec, default_name=default_name)
    except PluginError as error:
        raise ParameterError(f"{path}={spec}: {error}") from error
    except Exception as error:  # own code may raise anything when it is loaded
        raise ParameterError(f"{path}={spec}: it cannot be loaded. {explain(error)}") from error


def _find_module(path: str, spec: str) -> None:
    file = spec.partition(":")[0]
    if file.endswith(".py"):
        if not Path(file).expanduser().is_file():
            raise ParameterError(f"{path}={spec}: there is no file {file}; relative paths start at {Path.cwd()}.")
        return
    module = spec.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(module) if module else None
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ParameterError(f"{path}={spec}: there is no module {module or spec!r}; check the spelling.")


def _try(run: str, section: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except (ValueError, TypeError) as error:
        text = str(error)
        raise ParameterError(f"{run}.{text if text.startswith(section) else f'{section}.{text}'}") from error
