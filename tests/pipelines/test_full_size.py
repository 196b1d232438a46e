"""Full size on the CPU: `--env=qwen3vl` on policies with Qwen3-VL's real tokenizer, template, vocabulary and image
processor, on folders laid out as the published data sets, with 384 by 384 boards and real Geometry3K rows.

Only batch, length of responses and number of turns are smaller than in the configuration. A policy of random weights
answers nothing rightly and calls no tool. So in `geo3k` and `geo3k_multi_turn` a reward of the test tells responses
apart, and in the latter a call stands for the first response: an update learns, and what the tool says is read. The
task's own reward grades in `sokoban` and `thinking`, and before each flight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_sokoban_pipeline.evaluation.audit import check_token_parity
from geo_sokoban_pipeline.policies.policy import Policy, load_policy
from geo_sokoban_pipeline.runs.storage import read_json
from pipelines.hub_folders import write_geometry, write_sokoban
from policies.thin import END, VOCABULARY, thinking_template, write_thin_policy
from runs import FullSize, read_episodes

pytestmark = pytest.mark.slow

FEW = {
    "loop.iterations": 2,
    "loop.eval_prompts": 1,
    "evaluation.prompts": 1,
    "threads": 1,
    "grpo.groups": 2,
    "rollout.engine": "transformers",
}
SMALL: dict[str, dict[str, Any]] = {
    "sokoban": {"grpo.group_size": 2, "rollout.max_turns": 3, "rollout.max_tokens_per_turn": 8},
    "geo3k": {"grpo.group_size": 2, "rollout.max_response_tokens": 12},
    "thinking": {"grpo.group_size": 2, "rollout.max_response_tokens": 12},
    "geo3k_multi_turn": {
        "grpo.group_size": 2,
        "rollout.max_tokens_per_turn": 8,
        "rollout.max_response_tokens": 600,
        "rollout.max_turns": 2,
        "env.args.max_turns": 2,
    },
}
# Files of the test that take the place of the task's own code.
OWN: dict[str, dict[str, str]] = {
    "geo3k": {"reward.function": "reward.py"},
    "geo3k_multi_turn": {"reward.function": "reward.py", "env.factory": "env.py"},
}
# Each run with the policy it starts from, and its task; hub: the one that the configuration names, from the cache.
RUNS = {
    "sokoban": ("instruct", "sokoban"),
    "geo3k": ("hub", "geo3k"),
    "geo3k_multi_turn": ("instruct", "geo3k_multi_turn"),
    "thinking": ("thinking", "geo3k"),
}
REWARD = """
import zlib

def reward(outcome, args):
    return {"reward": zlib.crc32(outcome.responses[0].encode()) / 2**32}
"""
ENV = """
from geo_sokoban_pipeline.envs.geo3k.env import Geo3kEnv
from geo_sokoban_pipeline.envs.geo3k.env import build_env as build

CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "1"}}</tool_call> \\\\boxed{1}'


class CallingEnv(Geo3kEnv):
    def step(self, text):
        return super().step(text if self.turn else CALL)


def build_env(sample, args):
    env = build(sample, args)
    env.__class__ = CallingEnv
    return env
"""
# A random policy of this vocabulary would say neither a move nor that it is done.
SAID = {
    "instruct": (END, "Up", " Up", " Down", " Left", " Right"),
    "thinking": (END, "</think>", "\\", "boxed", "{", "}"),
}


@pytest.fixture(scope="module")
def place(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Policies and data sets as they lie after a download."""
    root, processor = tmp_path_factory.mktemp("full_size"), shared_data / "qwen3_vl_processor"
    template = thinking_template((processor / "chat_template.jinja").read_text(encoding="utf-8"))
    for name, said in SAID.items():
        own = template if name == "thinking" else None
        write_thin_policy(root / name, processor, favoured=said, share=0.9, template=own)
    repository = root / "hub" / "models--Qwen--Qwen3-VL-8B-Instruct"
    for folder in ("refs", "snapshots"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc", encoding="utf-8")
    (repository / "snapshots" / "abc").symlink_to(root / "instruct")
    rows = shared_data / "geometry3k_small.parquet"
    write_geometry(root / "geo3k_imgurl", rows)
    write_geometry(root / "geo3k_imgurl_processed", rows, tool=True)
    write_sokoban(root / "sokoban_processed", shared_data / "sokoban_raw_sample.parquet")
    (root / "reward.py").write_text(REWARD, encoding="utf-8")
    (root / "env.py").write_text(ENV, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def variables(place: Path) -> Any:
    """Environment of a launch: the launchers' variables, caches of its own, no network."""
    import huggingface_hub.constants

    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIME_SCRIPT_DATASET_NAME", str(place / "geo3k_imgurl"))
        patch.setenv("SLIME_SCRIPT_SOKOBAN_DATASET_ID", str(place / "sokoban_processed"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place / "hub"))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


def parameters(place: Path, name: str, **changes: Any) -> dict[str, Any]:
    """What `--params` gives, nested."""
    policy, task = RUNS[name]
    source = {} if policy == "hub" else {"policy.source": "folder", "policy.path": str(place / policy)}
    given = {**source, **FEW, **SMALL[name], **changes}
    merged: dict[str, Any] = {"run_id": name, "tracking": {"enabled": False}}
    merged["geo3k_multi_turn"] = {"hub": {"dataset": str(place / "geo3k_imgurl_processed")}}
    for path, value in given.items():
        section = merged.setdefault(f"train_{task}", {})
        *parents, last = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return merged


@pytest.fixture(scope="module", params=RUNS)
def trained(request: pytest.FixtureRequest, place: Path, variables: None) -> tuple[FullSize, str, Policy]:
    """A run of two iterations, its name and its final policy."""
    name = request.param
    project, task = FullSize(place / "data"), RUNS[name][1]
    own = {option: str(place / file) for option, file in OWN.get(name, {}).items()}
    project.run(f"train_{task}", parameters(place, name, **own))
    return project, name, load_policy(project.folder("06_models", f"train_{task}", name) / "final_policy")


def test_two_iterations(trained, place):
    project, name, policy = trained
    task = RUNS[name][1]
    folder = project.folder("07_model_output", f"train_{task}", name) / "metrics"
    rows = [read_json(path) for path in sorted(folder.glob("*.json"))]
    assert len(rows) == 2
    assert all((row["train/steps"], row["train/skipped"]) == (1, 0) for row in rows)
    # Matrix products are in bfloat16, in the engine and in the trainer.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.1 for row in rows)
    if name != "thinking":  # rewards differ, so there is something to learn
        assert max(row["train/grad_norm"] for row in rows) > 0
    assert policy.model.config.text_config.vocab_size == VOCABULARY
    weights = dict(policy.model.named_parameters())
    assert all(str(weight.dtype) == "torch.float32" and weight.isfinite().all() for weight in weights.values())
    start = load_policy(place / ("thinking" if name == "thinking" else "instruct")).model
    assert any(not weight.equal(start.get_parameter(n)) for n, weight in weights.items())
    report = project.folder("08_reporting", f"train_{task}", name) / "report.html"
    assert report.stat().st_size > 10_000


def test_who_wants_to_prepare_only_does_not_train(place, variables, monkeypatch):
    monkeypatch.setenv("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "0")
    project = FullSize(place / "prepared")
    assert "asks to prepare only" in project.refused("--pipelines=train_sokoban")
    assert not (project.root / "07_model_output").exists()


def test_episodes_keep_the_contract(trained):
    project, name, policy = trained
    episodes = read_episodes(project.folder("07_model_output", f"train_{RUNS[name][1]}", name))
    assert check_token_parity(episodes, policy.codec) == []
    assert policy.codec.rewrites_history == (name == "thinking")
    for episode in episodes:
        sampled = episode.token_ids[episode.loss_mask == 1]
        assert len(sampled) and not np.isin(sampled, policy.banned_ids).any()
        assert episode.status in ("completed", "truncated")
    grids = {tuple(grid) for episode in episodes for grid in episode.image_grid_thw}
    responses = [turn.text for episode in episodes for turn in episode.turns if turn.role == "assistant"]
    if name == "sokoban":
        assert grids == {(1, 24, 24)}  # 384 pixels in patches of 16
        assert max(episode.metrics["turns"] for episode in episodes) > 1
        return
    assert len(grids) > 1  # diagrams of many sizes
    assert all(episode.label for episode in episodes)
    assert ("calc_score" in episodes[0].turns[0].text) == (name == "geo3k_multi_turn")
    if name == "geo3k_multi_turn":  # what the tool says is part of the second turn's prompt
        told = [episode.turns[2].text for episode in episodes if len(episode.turns) > 2]
        assert told and all("score" in text for text in told)
    assert not any("\b" in turn.text for episode in episodes for turn in episode.turns)
    if name == "thinking":
        assert any("</think>" in response for response in responses)
        opened = policy.codec.encode_text("<|im_start|>assistant\n<think>\n")
        for episode in episodes:
            assert episode.token_ids[: episode.prompt_length][-len(opened) :].tolist() == opened.tolist()


def test_pre_flight(trained, place):
    project, name, _ = trained
    task = RUNS[name][1]
    # One timed iteration is enough: it is the same code for all tasks.
    check = {f"check_{task}": {"timed": name == "sokoban", "imitation_steps": 0}}
    # The stored run where it has the task's own code, else a run that is to begin.
    run_id = f"{name}_plain" if name in OWN else name
    project.run(f"check_{task}", {**parameters(place, name, **{"loop.iterations": 3}), **check, "run_id": run_id})
    table = read_json(project.folder("08_reporting", f"check_{task}", run_id) / "table.json")
    checks = {(found["group"], found["name"]): found for found in table["checks"]}
    assert table["states"]["failure"] == 0
    assert "151655" in checks["model", "tokens and template"]["found"].replace(",", "")
    wanted = "SLIME_SCRIPT_SOKOBAN_DATASET_ID" if task == "sokoban" else "SLIME_SCRIPT_DATASET_NAME"
    assert checks["launch variables", wanted]["state"] == "ok"
    if name == "sokoban":
        assert checks["timed", "rollout"]["state"] == "ok"
