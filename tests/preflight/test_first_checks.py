"""What is looked at before any work: what passes, what is only logged, and what it costs."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions
from geo_sokoban_pipeline.envs.geo3k.inspection import sample_problems
from geo_sokoban_pipeline.envs.sokoban import Board, solve
from geo_sokoban_pipeline.envs.sokoban.inspection import sample_level
from geo_sokoban_pipeline.hub import PolicyUnavailableError
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.preflight import machine
from geo_sokoban_pipeline.preflight.first_checks import (
    check_data_source,
    check_plugins,
    check_replaced,
    check_source,
    check_starting_policy,
    look_at_prompts,
    look_first,
)
from geo_sokoban_pipeline.preflight.own_code import try_own_code
from geo_sokoban_pipeline.runs.fingerprint import unflatten
from geo_sokoban_pipeline.runs.folders import RunFolders, RunStore, SourceError

RUN = "train_sokoban"
ALONE = {"threads": 1, "grpo": {"advantage": "dr_grpo"}}


def parameters(section, run=RUN, **others):
    return ProjectParameters.model_validate({run: {**ALONE, **section}, **others})


def own(tmp_path, body, name="own.py"):
    file = tmp_path / name
    file.write_text(body if "\n" in body else f"def reward(outcome, args): {body}\n")
    return {"function": str(file)}


def test_the_recipe_says_nothing(tmp_path, caplog):
    for run in ("train_sokoban", "rollout_sokoban", "update_sokoban", "evaluate_sokoban", "control_sokoban"):
        look_first(run, parameters({}), tmp_path)
    for run in ("train_geo3k", "train_geo3k_multi_turn", "evaluate_geo3k"):
        look_first(run, ProjectParameters.model_validate({f"train_{run.partition('_')[2]}": {"threads": 1}}), tmp_path)
    assert caplog.records == []


def test_only_training_has_groups(tmp_path):
    for run in (
        "rollout_sokoban",
        "update_sokoban",
        "evaluate_sokoban",
        "control_sokoban",
        "study_sokoban",
        "train_chess",
    ):
        look_first(run, parameters({"grpo": {"group_size": 1}}), tmp_path)
    with pytest.raises(ParameterError, match="group_size=1"):
        look_first(RUN, parameters({"grpo": {"group_size": 1}}), tmp_path)


def test_warnings_are_logged_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    version = machine.installed_version
    monkeypatch.setattr(machine, "installed_version", lambda name: None if name == "wandb" else version(name))
    changes = {"loop": {"iterations": 400}, "rollout": {"max_turns": 2}, "optimizer": {"schedule_iterations": 150}}
    look_first(RUN, parameters(changes, sokoban={"max_solution": 8}), tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().splitlines() == [
        "train_sokoban: learning rate: train_sokoban.loop.iterations=400: beyond optimizer.schedule_iterations=150 "
        "the learning rate stays at 0.1 of its highest. Make the schedule as long as the run; a stored run "
        "keeps its own, so a new one needs a new run_id.",
        "  moves: train_sokoban.rollout.max_turns=2: 6 moves at most, and levels need up to 8: "
        "some can never be solved. Raise it, or take shorter levels.",
        "  WANDB_API_KEY: set, but the package wandb is not installed: runs are tracked by MLflow alone. "
        "Install it (pip install 'geo-sokoban-pipeline[wandb]'), or set tracking.wandb=false.",
    ]


WRAPPED = """
from geo_sokoban_pipeline.rewards.sokoban import compute_reward

def reward(outcome, args):
    return {**compute_reward(outcome, args), "tries": len(outcome.responses)}
"""


RAISED = """
import functools
from geo_sokoban_pipeline.rewards.sokoban import compute_reward

@functools.wraps(compute_reward)
def reward(outcome, args):
    parts = compute_reward(outcome, args)
    return {**parts, "reward": parts["reward"] + 1.0}
"""


SHARED = """
def reward(outcome, args):
    turns = [1.0 + info["turn_reward"] for info in outcome.infos]
    return {"reward": sum(turns) + args["more"], "turns": turns}
"""


@pytest.mark.parametrize(
    ("body", "more", "said"),
    [
        (WRAPPED, 0.0, None),
        (RAISED, 0.0, "grpo.advantage=turn_return: a reward of .* with turns that add up to .* made of turn rewards, "),
        (SHARED, 0.0, None),
        (SHARED, 0.5, r"own\.py: turns add up to 3\.02, but the reward is 3\.52"),
    ],
)
def test_an_advantage_of_turns_needs_a_reward_that_is_made_of_them(tmp_path, body, more, said):
    reward = own(tmp_path, body) | ({} if body is WRAPPED or body is RAISED else {"args": {"more": more}})
    with nullcontext() if said is None else pytest.raises(ParameterError, match=said):
        look_first(RUN, parameters({"grpo": {"advantage": "turn_return"}, "reward": reward}), tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        "return outcome.metrics['success']",
        "return {'reward': 1.0}",
        "return len(outcome.infos)",
        "return float(outcome.status == 'truncated' and outcome.infos == [] and len(outcome.responses) == 1)",
    ],
)
@pytest.mark.parametrize("run", ["train_sokoban", "train_geo3k", "train_geo3k_multi_turn"])
def test_own_rewards_pass(tmp_path, run, body):
    look_first(run, parameters({"reward": own(tmp_path, body)}, run), tmp_path)
    if run == RUN and body == "return len(outcome.infos)":  # both episodes are tried
        options = parameters({"reward": own(tmp_path, body)})
        row = sample_level(options.sokoban)
        whole, cut = try_own_code(RUN, row, getattr(options, RUN), 0)
        assert (whole.found, cut.found) == ("reward 2", "reward 0 where the first response is truncated, without infos")
        assert try_own_code(RUN, row, getattr(parameters({}), RUN), 0) == []  # nothing of it is anybody's own


DICE = """
import random
class Dice:
    def reset(self, seed): self.dice = random.Random({}); return None, {{}}
    def step(self, text): return self.dice.random(), False, {{}}
    def format_observation(self, seen): return {{"role": "user", "content": [{{"type": "text", "text": str(seen)}}]}}
    def close(self): pass
def build_env(sample, args): return Dice()
"""


@pytest.mark.parametrize(("draws_by", "said"), [("seed", []), ("None", ["warning"])])
def test_an_environment_that_ignores_its_seed_is_found(tmp_path, draws_by, said):
    (tmp_path / "dice.py").write_text(DICE.format(draws_by), encoding="utf-8")
    section = {"env": {"factory": f"{tmp_path}/dice.py"}, "warm_start": {"steps": 0}, "grpo": {"advantage": "dr_grpo"}}
    options = parameters({**section, "reward": own(tmp_path, "return 1.0")})
    found = try_own_code(RUN, sample_level(options.sokoban), getattr(options, RUN), 0)
    assert [check.state for check in found if check.name == "seed"] == said


def test_who_lets_every_episode_fail_is_only_warned(tmp_path, caplog):
    section = {"reward": own(tmp_path, "return 1 / 0"), "rollout": {"max_failed_share": 1.0}}
    look_first(RUN, parameters(section), tmp_path)
    assert "ZeroDivisionError" in caplog.text


def test_prompts_of_the_hub_are_tried_once_they_are_there(tmp_path):
    """Nothing is known of them before; afterwards the reward that needs another column is refused."""
    given = parameters(
        {"reward": own(tmp_path, "return float(outcome.prompt['hint'])")},
        "train_geo3k",
        geo3k={"source": "hub", "hub": {"dataset": "nobody/nothing"}},
    )
    look_first("train_geo3k", given, tmp_path)
    _, (row, *_), _ = sample_problems(Geo3kDataOptions(), "geo3k", 1, None)
    look_at_prompts([{**row, "hint": 1}], given.train_geo3k, 0)
    with pytest.raises(ParameterError, match=r"KeyError: 'hint', in .*own\.py, line 1"):
        look_at_prompts([row], given.train_geo3k, 0)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [([4, 9], "and levels need up to 9"), ([7, 9], "every training level needs 7 or more"), ([4, None], "")],
)
def test_levels_that_were_read_are_measured(lengths, said, caplog):
    options = getattr(parameters({"rollout": {"max_turns": 2}}), RUN)
    rows = [{"id": str(number), "solution_length": length} for number, length in enumerate(lengths)]
    if "every" in said:
        with pytest.raises(ParameterError, match=said):
            look_at_prompts(rows, options, 0)
    else:
        look_at_prompts(rows, options, 0)
        assert said in caplog.text and bool(said) == bool(caplog.records)


@pytest.mark.parametrize("size", [(6, 6, 1), (5, 5, 1), (8, 8, 3), (4, 9, 2), (9, 4, 2), (3, 6, 1), (10, 12, 4)])
def test_the_sample_is_as_large_as_what_is_generated_and_solved_in_two_moves_at_most(size):
    height, width, boxes = size
    options = ProjectParameters().sokoban.model_copy(update={"height": height, "width": width, "boxes": boxes})
    text = sample_level(options)["level_xsb"]
    assert (len(text.splitlines()), {len(row) for row in text.splitlines()}) == (height, {width})
    assert text.count("$") + text.count("*") == boxes
    solution = solve(Board.from_text(text))
    assert solution is not None and 1 <= len(solution) <= 2


def test_what_it_looks_at_imports_nothing_heavy(tmp_path):
    """The checks come before every command: they may load no library that takes seconds."""
    script = (
        "import sys\nfrom pathlib import Path\nimport geo_sokoban_pipeline.settings\n"
        "from geo_sokoban_pipeline.parameters import ProjectParameters\n"
        "parameters = ProjectParameters()\n"
        "from geo_sokoban_pipeline.preflight.first_checks import look_first\n"
        "for kind in ('train', 'rollout', 'update', 'evaluate', 'control'):\n"
        "    for task in ('sokoban', 'geo3k', 'geo3k_multi_turn'): look_first(f'{kind}_{task}', parameters, Path())\n"
        "heavy = {'torch', 'transformers', 'datasets', 'mlflow', 'plotly', 'ray', 'sglang', 'sympy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


# Inputs of a command from elsewhere


@pytest.mark.parametrize(
    ("task", "data", "named"),
    [
        ("sokoban", {"source": "file", "file": {"path": "nothere.xsb"}}, "sokoban.file.path=nothere.xsb: no file at"),
        ("sokoban", {"source": "file", "file": {"path": "{there}@[0:9]"}}, None),
        ("sokoban", {"source": "file", "file": {"path": "{folder}"}}, None),
        ("sokoban", {"source": "generate", "file": {"path": "nothere.xsb"}}, None),
        ("geo3k", {"source": "file", "file": {"path": "{there}", "eval_path": "no.jsonl"}}, "geo3k.file.eval_path=no"),
        (
            "geo3k",
            {"source": "file", "file": {"path": "{there}"}, "image_folder": "{folder}/no"},
            "geo3k.image_folder=",
        ),
        ("geo3k", {"source": "file", "file": {"path": "{there}"}, "image_folder": "{folder}"}, None),
        ("geo3k", {"source": "hub", "hub": {"dataset": "nobody/nothere"}}, "geo3k.hub.dataset=nobody/nothere: "),
        ("geo3k", {"source": "hub", "hub": {"dataset": "somebody/cached"}}, None),
        ("geo3k", {"source": "hub", "hub": {"dataset": "{folder}"}}, None),
        *(
            ("geo3k", {"source": "hub", "hub": {"dataset": name}}, None)
            for name in ("MathLLMs/MathVision", "lmms-lab/GeoQA", "plainName", "me/lower_case")
        ),
        ("geo3k", {"source": "hub", "hub": {"dataset": "mathllms/MathVision"}}, "geo3k.hub.dataset=mathllms/MathV"),
    ],
)
def test_sources_of_data_that_are_not_there_are_named(tmp_path, monkeypatch, task, data, named):
    there = tmp_path / "there.jsonl"
    there.touch()
    cache = tmp_path / "cache"
    (cache / "datasets--somebody--cached").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    for name in ("MathLLMs___math_vision", "lmms-lab___geo_qa", "plain_name", "me___lower_case"):
        (cache / name).mkdir()
    placed = json.loads(json.dumps(data).replace("{there}", str(there)).replace("{folder}", str(tmp_path)))
    options = getattr(ProjectParameters.model_validate({task: placed}), task)
    if named is None:
        check_data_source(task, options)
    else:
        with pytest.raises(ParameterError) as error:
            check_data_source(task, options)
        assert str(error.value).startswith(named)


def test_a_policy_of_the_hub_is_looked_for_by_one_request_for_its_configuration(tmp_path, monkeypatch):
    asked = []

    def answer(name, file, **_):
        asked.append((name, file))
        raise OSError("404")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", answer)
    given = parameters({"policy": {"source": "hub", "path": "nobody/nothere"}})
    with pytest.raises(PolicyUnavailableError, match="nobody/nothere"):
        check_starting_policy(RUN, tmp_path, given)
    assert asked == [("nobody/nothere", "config.json")]


@pytest.mark.parametrize(
    ("run", "read", "source", "error"),
    [
        ("evaluate_sokoban", "source_policy", {"checkpoint": "nothere"}, SourceError),
        ("evaluate_sokoban", "source_policy", {"checkpoint": "nobody/nothere"}, SourceError),
        ("rollout_sokoban", "source_policy", {"checkpoint": "{folder}"}, FileNotFoundError),  # it holds no policy
        ("rollout_sokoban", "source_policy", {"checkpoint": "tiny"}, None),
        ("evaluate_sokoban", "source_policy", {"checkpoint": "latest"}, None),  # `plan_data` looks for it
        ("score_sokoban", "source_outputs", {"run_id": "empty"}, SourceError),
        ("score_sokoban", "source_outputs", {"run_id": "stored"}, None),
        ("control_sokoban", "source_episodes", {"run_id": "empty"}, SourceError),
        ("browse_sokoban", "source_root", {"run_id": "stored"}, None),
        ("export_sokoban", "source_episodes", {"run_id": "empty"}, SourceError),
        ("browse_sokoban", "source_root", {"run_id": "stored", "runs": ["missing"]}, SourceError),
        ("train_sokoban", "prompts", None, None),
    ],
)
def test_sources_that_are_not_there_are_named(tmp_path, monkeypatch, run, read, source, error):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "07_model_output" / "train_sokoban" / "stored" / "trajectories" / "iter=00000").mkdir(parents=True)
    section = json.loads(json.dumps(source or {}).replace("{folder}", str(tmp_path)))
    beside = {"runs": section.pop("runs")} if "runs" in section else {}
    given = ProjectParameters.model_validate(
        {run: {"source": {"run": "train_sokoban", **section}, **beside}} if source else {}
    )
    with nullcontext() if error is None else pytest.raises(error, match="missing" if beside else None):
        check_source(run, {f"{run}.{read}"}, given, RunStore(tmp_path))


@pytest.mark.parametrize("run", ["update_sokoban", "rollout_sokoban", "evaluate_geo3k"])
@pytest.mark.parametrize(
    ("checkpoint", "refused"),
    [
        ("{own}/checkpoints/iter=00000", True),
        ("{own}", True),
        ("{own}2/policy", False),
        ("me/policy", False),
        ("latest", False),
        (0, False),
    ],
)
def test_fresh_replaces_no_run_that_the_command_starts_from(tmp_path, run, checkpoint, refused):
    folders = RunFolders.of(tmp_path, run, "default")
    given = checkpoint if isinstance(checkpoint, int) else checkpoint.format(own=folders.models)
    source = {"run": f"train_{run.partition('_')[2]}", "checkpoint": given}
    options = ProjectParameters.model_validate({run: {"source": source}, "fresh": True})
    expected = f"{run}.source.checkpoint=.*{folders.name}"
    other = RunFolders.of(tmp_path, "control_sokoban", "default")
    for own, others in ((folders, ()), (other, (other, folders))):  # the same command may replace both
        with pytest.raises(ParameterError, match=expected) if refused else nullcontext():
            check_replaced(run, own, options, others)


@pytest.mark.parametrize(("run_id", "refused"), [("default", True), ("other", False)])
def test_fresh_replaces_no_run_that_is_its_own_source(tmp_path, run_id, refused):
    source = {"run": "regrade_sokoban", "run_id": run_id}
    options = ProjectParameters.model_validate({"regrade_sokoban": {"source": source}, "fresh": True})
    with pytest.raises(ParameterError, match="regrade_sokoban/default") if refused else nullcontext():
        check_replaced("regrade_sokoban", RunFolders.of(tmp_path, "regrade_sokoban", "default"), options)


# Code that the parameters name is looked up, and its arguments are tried.


@pytest.mark.parametrize(
    ("run", "section", "message"),
    [
        (RUN, {"env": {"args": {"cell_pxx": 3}}}, r"env\.args\.cell_pxx=3: unknown .* Did you mean env\.args\.cell_px"),
        (RUN, {"env": {"args": {"cell_px": 3}}}, r"env\.args\.cell_px=3: input should be greater than or equal to 8"),
        # Images of the data have another size.
        (RUN, {"env": {"args": {"cell_px": 16}}}, r"env\.args\.cell_px=16: differs from sokoban\.cell_px=32"),
        (
            RUN,
            {"env": {"args": {"rewards": {"mved": 1}}}},
            r"env\.args\.rewards\.mved=1: .* mean env\.args\.rewards\.moved",
        ),
        (RUN, {"reward": {"args": {"agregate": "sum"}}}, r"reward\.args\.agregate.* mean reward\.args\.aggregate"),
        (RUN, {"reward": {"args": {"aggregate": "max"}}}, r'reward\.args\.aggregate="max"'),
        (RUN, {"env": {"factory": "no_such.build"}}, r"env\.factory=no_such\.build: .*no module"),
        (RUN, {"reward": {"function": "missing.py"}}, r"reward\.function=missing\.py: .*no file"),
        (RUN, {"grpo": {"advantage": "missing.py"}}, r"grpo\.advantage=missing\.py: 'missing\.py': there is no file"),
        (RUN, {"grpo": {"loss": "no_such.loss"}}, r"grpo\.loss=no_such\.loss: .*no module"),
        (
            RUN,
            {"grpo": {"importance": "tests/coins.py:weigh", "old_log_probs": "recompute"}},
            r"grpo\.importance=tests/coins\.py:weigh: .* has no 'weigh'",
        ),
        (RUN, {"rollout": {"function": "no_such.play"}}, r"rollout\.function=no_such\.play: .*no module"),
        ("train_geo3k", {"env": {"args": {"grade": "x"}}}, r'env\.args\.grade="x": unknown name'),
        ("train_geo3k", {"reward": {"args": {"grader": "exact"}}}, r'reward\.args\.grader="exact": input should be'),
        ("train_geo3k", {"env": {"factory": "nowhere.build_env"}}, r"env\.factory=nowhere\.build_env"),
        (
            "train_geo3k_multi_turn",
            {"env": {"args": {"max_turns": 3, "feedback": "long"}}},
            r'env\.args\.feedback="long"',
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, run: str, section: dict[str, Any], message: str) -> None:
    check_plugins(run, ProjectParameters())
    given = ProjectParameters.model_validate({run: section, "sokoban": {"cell_px": 32}})
    with pytest.raises(ParameterError, match=rf"{run}\.{message}"):
        check_plugins(run, given)
    # Own code is only looked up.
    (tmp_path / "world.py").write_text("def build_env(sample, args): raise RuntimeError\n")
    own = {"env": {"factory": str(tmp_path / "world.py"), "args": {"anything": 1}}}
    check_plugins(run, ProjectParameters.model_validate({run: own}))


@pytest.mark.parametrize(("option", "way_out"), [("reward.function", ""), ("grpo.loss", "See docs/")])
def test_own_code_that_cannot_be_loaded_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, way_out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import json\n1 / 0\n")
    with pytest.raises(ParameterError) as error:
        check_plugins(RUN, ProjectParameters.model_validate(unflatten({f"{RUN}.{option}": "own.py"})))
    said = "it cannot be loaded. ZeroDivisionError: division by zero, in own.py, line 2: 1 / 0"
    assert str(error.value).startswith(f"train_sokoban.{option}=own.py: {said}") and way_out in str(error.value)
