"""Damaged files, losses and episodes: named, never half-loaded, and what was committed before continues."""

from __future__ import annotations

import itertools
import shutil

import pandas as pd
import pytest
import torch
from kedro.io import DatasetError

from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.rollout.rollout import TooManyFailuresError
from geo_sokoban_pipeline.runs.storage import CorruptFolderError
from geo_sokoban_pipeline.training import grpo_loop
from geo_sokoban_pipeline.training.backends.base import DivergedError
from runs import assert_same_run, read_run

pytestmark = pytest.mark.slow

MODELS = "06_models/train_sokoban/default"


# Damaged files


def test_damaged_checkpoint_is_named_and_the_way_out_works(finished_run, clone):
    newest = clone.root / MODELS / "checkpoints" / "iter=00002"
    weights, optimizer, manifest = (next(newest.glob(f"{name}.*")) for name in ("model", "optimizer", "manifest"))
    whole = {file: file.read_bytes() for file in (weights, optimizer)}
    for file, content, said in (
        (weights, whole[weights][:-100], f"elete {newest}"),
        (optimizer, None, f"elete {newest}"),
        (manifest, manifest.read_bytes()[:-100], "delete it"),
    ):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises((DatasetError, CorruptFolderError)) as error:
            clone.run()
        assert str(file) in str(error.value) and said in str(error.value)
        if file in whole:
            file.write_bytes(whole[file])
    manifest.unlink()
    clone.run()
    assert_same_run(read_run(finished_run.root), read_run(clone.root))


def test_damaged_policies_are_named_and_the_way_out_works(finished_run, clone):
    for stage in ("base_policy", "policy"):
        folder = clone.root / MODELS / stage
        # A new file: the bytes of the old one may be shared with the finished run.
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(b"torn")
        with pytest.raises(DatasetError) as error:
            clone.run()
        assert str(folder / "model.safetensors") in str(error.value)
        assert f"delete {folder}" in str(error.value)
        shutil.rmtree(folder)
    clone.run(to_nodes=["train_sokoban.train_grpo"])
    names = [f"{name}/model.safetensors" for name in ("base_policy", "policy")]
    one, other = (read_run(run.root)["weights"] for run in (finished_run, clone))
    assert [one[name] for name in names] == [other[name] for name in names]


@pytest.mark.parametrize("what", ["torn", "foreign", "text"])
def test_damaged_trajectories_are_named(clone, what):
    (path,) = (clone.folder("07_model_output") / "trajectories" / "iter=00001").glob("*.parquet")
    if what == "foreign":
        pd.DataFrame({"reward": [1.0], "token_ids": [[1, 2]]}).to_parquet(path)
    else:
        path.write_bytes(path.read_bytes()[:-200] if what == "torn" else b"no parquet")
    parameters = {"update_sokoban": {"source": {"iteration": 1}}}
    with pytest.raises(Exception, match=str(path)):
        clone.run("update_sokoban", params=parameters)
    assert not (clone.folder("06_models", "update_sokoban") / "checkpoints").exists()


# Losses that are no numbers


@pytest.fixture
def poison(monkeypatch):
    """`poison.update({k})` gives optimizer step k of the loop a gradient that is no number."""
    steps, seen = set(), itertools.count()
    clip, update = torch.nn.utils.clip_grad_norm_, grpo_loop.update_policy

    def poisoned(parameters, *arguments):
        if next(seen) in steps:
            next(p for p in parameters if p.grad is not None).grad.fill_(float("nan"))
        return clip(parameters, *arguments)

    def poison_and_update(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
            return update(*arguments)

    monkeypatch.setattr(grpo_loop, "update_policy", poison_and_update)
    return steps


def short(**optimizer):
    """Four optimizer steps in each of two iterations."""
    grpo = {"groups_per_step": 1, "filter": "none", "groups": 4, "group_size": 2}
    loop = {"iterations": 2, "eval_interval": 0}
    return {
        "warm_start": {"steps": 1, "validation_episodes": 2},
        "grpo": grpo,
        "loop": loop,
        "optimizer": optimizer,
        "evaluation": {"prompts": 2, "blank_images": False},
    }


def test_a_step_without_a_finite_gradient_is_skipped_and_counted(project, poison):
    poison.update({1, 4, 5})
    project.run(params={"train_sokoban": short()})
    rows = project.load("train_sokoban.metrics")
    assert [(row["train/steps"], row["train/skipped"]) for row in rows] == [(4, 1), (4, 2)]
    from safetensors.torch import load_file

    weights = load_file(project.root / MODELS / "final_policy" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_several_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(project, poison):
    poison.update({0, 1, 2, *range(8, 99)})
    with pytest.raises(DivergedError, match=r"iteration 0: 3 optimizer steps .* No checkpoint is stored yet"):
        project.run(params={"train_sokoban": short()})
    assert project.load("train_sokoban.checkpoints") == {}
    with pytest.raises(DivergedError) as error:
        project.run(params={"train_sokoban": short()})
    for part in (
        "iteration 1: 3 optimizer steps in a row had no finite gradient",
        "last good checkpoint is iter=00000 of train_sokoban.checkpoints",
        "train_sokoban.policy.source=folder",
    ):
        assert part in str(error.value)
    assert list(project.load("train_sokoban.checkpoints")) == ["iter=00000"]
    # The way out that the message names.
    poison.clear()
    folder = project.root / MODELS / "checkpoints" / "iter=00000"
    options = {
        **short(learning_rate=1e-4),
        "policy": {"source": "folder", "path": str(folder)},
        "warm_start": {"steps": 0},
    }
    project.run(params={"run_id": "calm", "train_sokoban": options})
    models = project.folder("06_models", run_id="calm")
    assert (models / "policy/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not (models / "base_policy" / "optimizer.safetensors").exists()
    assert (models / "final_policy" / "manifest.json").is_file()


# Episodes that raise


FRAGILE = '''
from geo_sokoban_pipeline.envs.sokoban.env import build_env as build


def build_env(sample, args):
    """Every so many levels, an environment that raises as soon as it is to move, or to move without an answer block."""
    env = build(sample, {k: v for k, v in args.items() if k not in ("every", "answers")})
    move = env.step

    def step(text):
        if args["answers"] and "<answer>" in text:
            return move(text)
        raise ZeroDivisionError("the crate is stuck")

    if int(sample["level_hash"], 16) % args["every"] == 0:
        env.step = step
    return env
'''


def fragile(tmp_path, every, allowed, answers=False):
    file = tmp_path / "fragile.py"
    file.write_text(FRAGILE)
    parameters = short()
    parameters["env"] = {"factory": str(file), "args": {"every": every, "answers": answers}}
    # A policy that has learnt nothing writes until it is cut off: here the environment sees such responses too.
    parameters["rollout"] = {"max_failed_share": allowed, "rules": {"step_before_finish_check": True}}
    parameters["grpo"]["groups"] = 8
    return {"train_sokoban": parameters}


def test_an_episode_that_raises_is_kept_as_failed_and_the_rest_goes_on(project, tmp_path):
    project.run(params=fragile(tmp_path, every=2, allowed=1.0))
    frame = project.load("train_sokoban.trajectories@pandas")
    failed = frame[frame["status"] == "failed"]
    assert 0 < len(failed) < len(frame)
    assert failed["error"].str.contains("ZeroDivisionError: the crate is stuck").all()
    assert failed["reward"].isna().all() and not failed["trained"].any()
    assert frame[frame["status"] != "failed"]["reward"].notna().all()
    rows = project.load("train_sokoban.metrics")
    assert sum(row["rollout/failed_ratio"] for row in rows) / 2 == pytest.approx(len(failed) / len(frame))


def test_too_many_failures_stop_the_run(project, tmp_path):
    parameters = fragile(tmp_path, every=1, allowed=0.1)
    with pytest.raises(
        ParameterError, match=r"ZeroDivisionError: the crate is stuck, in .*fragile\.py, line \d+: raise"
    ):
        project.run(params=parameters)
    assert not project.folder("06_models").exists()
    # What only responses of the policy bring to light ends the run once it plays.
    parameters = fragile(tmp_path, every=1, allowed=0.1, answers=True)
    parameters["train_sokoban"]["warm_start"] = {"steps": 0}
    with pytest.raises(TooManyFailuresError) as error:
        project.run(params={**parameters, "run_id": "cold"})
    for part in ("of 16 episodes failed", "rollout.max_failed_share=0.1", "ZeroDivisionError: the crate is stuck"):
        assert part in str(error.value)
