"""Training options of geometry: its own defaults wherever a section is given in part; Sokoban's are untouched."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from geo_sokoban_pipeline.config.base import ParameterError, validate_parameters
from geo_sokoban_pipeline.tasks import TASKS
from task_options import Geo3kMultiTurnTrainOptions, Geo3kTrainOptions, TrainOptions

CONF = Path(__file__).parents[2] / "conf"


def test_a_section_in_part_keeps_geometrys_own():
    given = {
        "env": {"args": {"grader": "geo3k"}},
        "reward": {"args": {}},
        "warm_start": {"steps": 3, "teacher": {"noise": 0.5}},
        "policy": {"tiny": {"hidden": 32}},
        "grpo": {"groups": 2},
        "rollout": {"sampling": {"temperature": 0.7}},
    }
    single = Geo3kTrainOptions.model_validate(given)
    assert single.env.factory.endswith("geo3k.answer_env.build_env")
    assert single.reward.function.endswith("geo3k.math_reward")
    assert (single.warm_start.teacher.name, single.warm_start.teacher.factory) == (
        "plausible",
        "geo_sokoban_pipeline.envs.geo3k.expert.build_teacher",
    )
    assert (single.policy.tiny.texts, single.grpo.credit, single.rollout.max_turns) == ("geo3k", "episode", 1)
    several = Geo3kMultiTurnTrainOptions.model_validate({"rollout": {"max_tokens_per_turn": 9}})
    assert several.env.factory.endswith("geo3k.env.build_env")
    assert several.env.args["max_turns"] == several.rollout.max_turns == 3


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (Geo3kTrainOptions, {"task": "sokoban"}, "task=\"sokoban\": input should be 'geo3k'"),
        (
            Geo3kTrainOptions,
            {"warm_start": {"teacher": {"name": "direct"}}},
            "warm_start.teacher.name=\"direct\": input should be 'plausible', 'solver' or 'constant'",
        ),
        (
            Geo3kMultiTurnTrainOptions,
            {"rollout": {"max_turns": 5}},
            "env.args.max_turns=3: differs from rollout.max_turns=5",
        ),
    ],
)
def test_what_is_refused(model, given, message):
    with pytest.raises(ParameterError) as error:
        validate_parameters(given, model, prefix="train")
    assert message in str(error.value)


def test_each_task_has_words_of_its_own():
    assert TrainOptions().policy.tiny.texts == "sokoban"
    assert Geo3kTrainOptions().policy.tiny.texts == Geo3kMultiTurnTrainOptions().policy.tiny.texts == "geo3k"


def test_options_with_a_tasks_defaults_are_sent_to_other_processes_as_plain_ones():
    """A process that was started anew has no class of that name."""
    given = Geo3kMultiTurnTrainOptions.model_validate({"warm_start": {"teacher": {"args": {"a": 1}}}})
    sent = pickle.loads(pickle.dumps(given))
    assert type(sent).__module__ == "geo_sokoban_pipeline.config.grpo"
    assert sent.model_dump() == given.model_dump()


@pytest.mark.parametrize("task", ["geo3k", "geo3k_multi_turn"])
@pytest.mark.parametrize("env", ["base", "test"])
def test_conf_is_valid(task, env):
    text = (CONF / env / "parameters" / f"train_{task}.yml").read_text(encoding="utf-8")
    given = yaml.safe_load(text)[f"train_{task}"]
    options = validate_parameters(given, TASKS[task].train_config, prefix=f"train_{task}")
    assert options.task == task


@pytest.mark.parametrize(("changes", "ways"), [({}, 2), ({"blank_images": False}, 1), ({"shuffled_images": False}, 1)])
def test_image_ablations(changes, ways):
    assert Geo3kTrainOptions.model_validate({"evaluation": changes}).evaluation.image_ablations == ways
