"""Demonstrations leave nothing open: a user's environment may hold a process or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from coins import rows_of
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.training.demonstrations import Demonstrator
from task_options import TrainOptions

OWN = """
from pathlib import Path

from coins import Caller, CoinEnv

LOG = Path({log!r})


class Env(CoinEnv):
    def __init__(self, row):
        super().__init__(row)
        with LOG.open("a") as file:
            file.write("built\\n")

    def step(self, text):
        if {fails}:
            raise OSError("no connection")
        return super().step(text)

    def close(self):
        with LOG.open("a") as file:
            file.write("closed\\n")


class Silent:
    def respond(self, env, generator):
        raise LookupError("an expert that fails")


def build_env(row, args):
    return Env(row)


def build_teacher(name, patience, noise):
    return Silent() if {silent} else Caller()
"""


def own_code(folder: Path, options: TrainOptions, *, fails: bool = False, silent: bool = False) -> TrainOptions:
    """Options with an environment that logs when it is built and closed, and an expert."""
    own = folder / "own.py"
    own.write_text(OWN.format(log=str(folder / "log"), fails=fails, silent=silent))
    values = options.model_dump()
    values["env"] = {"factory": str(own)}
    values["reward"] = {"function": "coins.solved_reward"}
    values["rollout"] |= {"max_turns": 1}
    values["grpo"] |= {"advantage": "dr_grpo", "advantage_args": {}}
    values["warm_start"]["teacher"] |= {"factory": str(own)}
    return TrainOptions.model_validate(values)


@pytest.mark.parametrize(
    ("fault", "error"), [({}, None), ({"fails": True}, RuntimeError), ({"silent": True}, LookupError)]
)
def test_every_environment_is_closed(
    tmp_path: Path, tiny_policy: Policy, train_options: TrainOptions, fault: dict[str, bool], error: type | None
) -> None:
    """Also where the environment or the expert raises."""
    options = own_code(tmp_path, train_options, **fault)
    demonstrator = Demonstrator(rows_of(4), tiny_policy, options, 0, "training")
    if error is None:
        for number in range(3):
            demonstrator.demonstrate(number)
    else:
        with pytest.raises(error):
            demonstrator.demonstrate(0)
    log = (tmp_path / "log").read_text().split()
    assert log == ["built", "closed"] * (len(log) // 2)
