"""The evaluation summary: policies, blank images and baselines on the same levels under the same limits."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geo_sokoban_pipeline.envs.sokoban.task import BASELINES, SOKOBAN
from geo_sokoban_pipeline.evaluation.summary import evaluate_baseline, evaluate_policies, observes_images
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.policies.preparing import policy_writer
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, identify_policy, link_policy, write_policy
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories
from task_options import ExpertOptions, TrainOptions


@pytest.fixture(scope="module")
def rows(sokoban_rows: Any) -> list[dict[str, Any]]:
    return sokoban_rows(64)


def test_the_same_policy_plays_the_same_episodes(
    tiny_policy: Policy, rows: Any, train_options: TrainOptions, tmp_path: Path
) -> None:
    """With a real engine: the same weights under both names."""
    folder = write_policy(tmp_path / "policy", policy_writer(tiny_policy, {}))
    evaluation = train_options.evaluation.model_copy(update={"samples": 2, "prompts": 6})
    options = train_options.model_copy(update={"evaluation": evaluation})
    summary, parts = evaluate_policies("train_sokoban", 0, {"warm_start": folder, "final": folder}, rows, options)
    found = {(row["policy"], row["mode"]): {**row, "policy": ""} for row in summary["rows"]}
    assert set(found) == {
        *((policy, mode) for policy in ("warm_start", "final", "final_blank") for mode in ("sampled", "greedy")),
        *((policy, "-") for policy in ("random", "random_legal", "solver", "teacher (direct)")),
        ("teacher (direct), never gives up", "-"),
    }
    assert summary["checkpoints"]["final"] == summary["checkpoints"]["warm_start"]
    for row in summary["rows"]:
        assert row["low"] <= row["solve_rate"] <= row["high"]
        assert sum(part["episodes"] for part in row["by_length"]) == row["episodes"]
    for mode in ("sampled", "greedy"):
        assert found["warm_start", mode] == found["final", mode]
    assert sorted(parts) == ["iter=00000/part-000", "iter=00001/part-000"]
    for table in parts.values():
        validate_trajectories(table)
        assert all(episode.advantage is None for episode in table_to_trajectories(table))


@pytest.mark.parametrize(
    ("turns", "observes"),
    [("ua", False), ("Ua", False), ("UaUa", True), ("uaUa", True), ("U", False), ("", False)],
)
def test_images_of_the_prompt_are_no_observation(turns: str, observes: bool) -> None:
    """`U` is a turn of the user with an image, `u` one without, `a` a response."""
    shown = [
        SimpleNamespace(role="assistant" if turn == "a" else "user", image_indices=[0] if turn == "U" else [])
        for turn in turns
    ]
    episode: Any = SimpleNamespace(turns=shown)
    assert observes_images(episode) is observes


def test_solver_is_optimal_and_the_others_are_in_order(rows: Any, train_options: TrainOptions) -> None:
    solved = {
        name: evaluate_baseline(ExpertOptions(name=name), rows, train_options, seed=0)
        for name in ("random", "random_legal", "direct", "solver")
    }
    rates = {name: sum(record.success for record in records) / len(records) for name, records in solved.items()}
    assert rates["solver"] == 1.0
    assert all(record.steps == record.optimal_steps for record in solved["solver"])
    assert rates["random"] < rates["direct"] < rates["solver"]
    assert all(record.turns <= train_options.rollout.max_turns for records in solved.values() for record in records)


@pytest.mark.parametrize("moves", [1, 2, 3])
def test_baselines_make_as_many_moves_a_turn_as_policies_may(
    rows: Any, train_options: TrainOptions, moves: int
) -> None:
    env = train_options.env.model_copy(update={"args": {**train_options.env.args, "max_actions_per_turn": moves}})
    options = train_options.model_copy(update={"env": env})
    records = evaluate_baseline(SOKOBAN.baselines(options, rows)["solver"], rows, options, seed=0)
    assert {record.optimal_steps for record in records} > {3, 4, 5}
    assert all(record.success and record.turns == math.ceil(record.optimal_steps / moves) for record in records)


def test_the_expert_plays_as_it_demonstrates(rows: Any, train_options: TrainOptions, tmp_path: Path) -> None:
    """With its noise, and with the factory that the warm start names."""

    def solved(**expert: Any) -> int:
        records = evaluate_baseline(ExpertOptions.model_validate(expert), rows, train_options, seed=0)
        return sum(record.success for record in records)

    own = tmp_path / "own.py"
    own.write_text(
        "class Left:\n    def respond(self, env, generator):\n        return '<answer>Left</answer>'\n"
        "def build_teacher(name, patience, noise):\n    return Left()\n"
    )
    perfect = solved(name="solver")
    assert solved(name="solver", noise=1.0) < perfect
    assert solved(name="solver", factory=str(own)) < perfect


@pytest.mark.parametrize(
    ("expert", "label", "repeated"),
    [
        ({"name": "direct"}, "teacher (direct)", False),
        ({"name": "solver"}, "teacher (solver)", True),
        ({"name": "random_legal"}, "teacher (random_legal)", True),
        ({"name": "solver", "noise": 0.25}, "teacher (solver, noise 0.25)", False),
        ({"name": "solver", "factory": "own.py"}, "teacher (solver of own.py)", False),
    ],
)
def test_name_of_the_expert(expert: dict[str, Any], label: str, repeated: bool) -> None:
    """An expert that plays exactly as a baseline does gets no row of its own."""
    options = TrainOptions.model_validate({"warm_start": {"teacher": {"patience": None, **expert}}})
    own = [name for name in SOKOBAN.baselines(options, []) if name not in BASELINES]
    assert own == ([] if repeated else [label])


@pytest.mark.parametrize(
    ("expert", "patient"),
    [
        ({"name": "direct", "patience": 1, "noise": 0.1}, {"name": "direct", "patience": None, "noise": 0.1}),
        ({"name": "direct", "patience": None}, None),
        ({"name": "solver"}, None),
        ({"name": "direct", "factory": "own.py"}, None),
    ],
)
def test_who_plays_without_giving_up(
    rows: Any, train_options: TrainOptions, expert: dict[str, Any], patient: dict[str, Any] | None
) -> None:
    """The baseline that plays as the expert does and never gives up."""
    agents = SOKOBAN.baselines(TrainOptions.model_validate({"warm_start": {"teacher": expert}}), [])
    found = next((agent for name, agent in agents.items() if name.endswith(", never gives up")), None)
    assert (found and {name: getattr(found, name) for name in patient or ()}) == patient
    if found is not None:
        players = (ExpertOptions.model_validate(expert), found)
        turns = [sum(r.turns for r in evaluate_baseline(one, rows, train_options, seed=0)) for one in players]
        assert turns[0] < turns[1]


@pytest.mark.parametrize("place", ["step", "reward", "expert", None])
def test_baselines_close_every_environment(
    rows: Any, train_options: TrainOptions, tmp_path: Path, place: str | None
) -> None:
    """Also where the environment, the reward or the expert raises: the episode fails, the others count."""
    own = tmp_path / "own.py"
    own.write_text(
        "from pathlib import Path\n"
        "from coins import CoinEnv\n"
        f"LOG, PLACE = Path({str(tmp_path / 'log')!r}), {place!r}\n"
        "def fail(place):\n"
        "    if place == PLACE:\n"
        "        raise OSError('no connection')\n"
        "class Env(CoinEnv):\n"
        "    def step(self, text):\n"
        "        fail('step')\n"
        "        return super().step(text)\n"
        "    def close(self):\n"
        "        LOG.open('a').write('closed ')\n"
        "class Expert:\n"
        "    def respond(self, env, generator):\n"
        "        fail('expert')\n"
        "        return 'up'\n"
        "def build_env(row, args):\n"
        "    return Env(row)\n"
        "def build_teacher(name, patience, noise):\n"
        "    return Expert()\n"
        "def reward(outcome, args):\n"
        "    fail('reward')\n"
        "    return 1.0\n"
    )
    options = train_options.model_copy(
        update={
            "env": train_options.env.model_copy(update={"factory": str(own), "args": {}}),
            "reward": train_options.reward.model_copy(update={"function": str(own), "args": {}}),
        }
    )
    agent = ExpertOptions.model_validate({"name": "direct", "factory": str(own)})
    assert len(evaluate_baseline(agent, rows[:3], options, seed=0)) == 3
    assert (tmp_path / "log").read_text().split() == ["closed"] * 3


def test_a_final_policy_has_the_identity_of_its_checkpoint(tmp_path: Path) -> None:
    def fill(folder: Path, weights: str = "w", moments: str = "m") -> dict[str, Any]:
        for name, text in (("config.json", "{}"), ("model.safetensors", weights), ("optimizer.safetensors", moments)):
            (folder / name).write_text(text)
        return {"iteration": 3, "policy_version": 4}

    stored = write_policy(tmp_path / "stored", fill)
    final = write_policy(tmp_path / "final", link_policy(stored.path, {"iteration": 3, "policy_version": 4}))
    continued = write_policy(tmp_path / "continued", lambda folder: fill(folder, moments="n"))
    other = write_policy(tmp_path / "other", lambda folder: fill(folder, weights="v"))
    assert identify_policy(stored)["iteration"] == 3 and identify_policy(stored)["policy_version"] == 4
    assert identify_policy(stored) == identify_policy(final) == identify_policy(continued)
    assert identify_policy(other)["hash"] != identify_policy(stored)["hash"]
    foreign = identify_policy(PolicyFolder(stored.path, {"files": stored.manifest["files"]}))
    assert foreign == {"iteration": None, "policy_version": None, "hash": identify_policy(stored)["hash"]}
