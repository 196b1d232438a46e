"""Logs of Inspect AI: by the published format, and, where the package is installed, opened by `read_eval_log`."""

from __future__ import annotations

import base64
import json
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.trajectories.inspect_log import write_logs
from geo_sokoban_pipeline.trajectories.parquet import write_trajectories
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from inspect_schema import SCHEMA, make_schema

NAME = "train_sokoban/default"


def stored(folder: Path, episodes: list[Trajectory], iteration: int = 1) -> Path:
    path = folder / "held_out_trajectories" / f"iter={iteration:05d}" / "part-000.parquet"
    write_trajectories(path, trajectories_to_table(episodes, CONTEXT))
    return path


def episodes_of_a_policy() -> list[Trajectory]:
    """Two groups of four, and a greedy one; an episode that failed, and one with a mark that is no image."""
    episodes = make_trajectories(12, iteration=1, evaluation=True)
    for episode in episodes[8:]:
        episode.sampling = json.dumps({**json.loads(episode.sampling), "greedy": True})
    failed = episodes[3]
    failed.status, failed.reward, failed.error, failed.metrics = "failed", None, "no server", {}
    failed.reward_parts, failed.advantage = {}, None
    episodes[0].turns[1].text = "<image> is what I see </script>"
    return episodes


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    written = write_logs([stored(tmp_path, episodes_of_a_policy())], tmp_path / "inspect", NAME, {"run": NAME})
    assert written == {"evaluation-00001.eval": 8, "evaluation-00001-greedy.eval": 4}
    return tmp_path / "inspect"


def read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def test_a_log_holds_what_the_format_names(logs: Path) -> None:
    found, episodes = read(logs / "evaluation-00001.eval"), episodes_of_a_policy()
    samples = {name: value for name, value in found.items() if name.startswith("samples/")}
    assert set(found) - set(samples) == {
        "_journal/start.json", "_journal/summaries/1.json", "summaries.json", "header.json"
    }  # fmt: skip
    header = found["header.json"]
    assert (header["version"], header["status"], header["eval"]["model"]) == (2, "success", f"{NAME}@1")
    assert header["results"]["total_samples"] == 8 and header["results"]["completed_samples"] == 7
    rewards = [episode.reward for episode in episodes[:8] if episode.reward is not None]
    (mean,) = [score["metrics"]["mean"]["value"] for score in header["results"]["scores"] if score["name"] == "reward"]
    assert mean == pytest.approx(sum(rewards) / 7)
    assert len(found["summaries.json"]) == len(samples) == 8
    for (name, sample), episode in zip(samples.items(), episodes, strict=False):
        assert name == f"samples/{sample['id']}_epoch_{episode.sample_index + 1}.json"
        assert sample["metadata"]["trajectory_id"] == episode.trajectory_id
        assert [message["role"] for message in sample["messages"]] == [turn.role for turn in episode.turns]
        images = [
            base64.b64decode(sample["attachments"][part["image"].removeprefix("attachment://")].partition(",")[2])
            for message in sample["messages"]
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image"
        ]
        assert images == [episode.images[k] for turn in episode.turns for k in turn.image_indices]
    assert samples[next(iter(samples))]["messages"][1]["content"] == "<image> is what I see </script>"
    assert "base64" not in json.dumps(found["summaries.json"])


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return found


def check(value: Any, name: str, schema: dict[str, Any]) -> None:
    """Raise where a value is no such part of a log."""
    jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{name}"}).validate(value)


def test_all_parts_keep_the_schema_of_the_format(logs: Path, schema: dict[str, Any]) -> None:
    for path in logs.iterdir():
        found = read(path)
        parts = [("EvalLog", found.pop(name)) for name in ("header.json", "_journal/start.json")]
        for name in ("summaries.json", "_journal/summaries/1.json"):
            parts += [("EvalSampleSummary", summary) for summary in found.pop(name)]
        for name, value in [*parts, *(("EvalSample", sample) for sample in found.values())]:
            check(value, name, schema)
    with pytest.raises(jsonschema.ValidationError):  # a property that the format does not name
        check({**value, "rewards": 1.0}, name, schema)


def test_the_schema_is_that_of_the_package(schema: dict[str, Any]) -> None:
    pytest.importorskip("inspect_ai", reason="the extra `inspect` is not installed")
    assert make_schema() == schema


def test_equal_episodes_give_equal_bytes(logs: Path, tmp_path: Path) -> None:
    write_logs([next(tmp_path.glob("held*/*/*.parquet"))], tmp_path / "again", NAME, {"run": NAME})
    for path in logs.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_inspect_opens_the_logs(logs: Path) -> None:
    log = pytest.importorskip("inspect_ai.log", reason="the extra `inspect` is not installed")
    episodes = episodes_of_a_policy()
    for name, chosen in (("evaluation-00001.eval", episodes[:8]), ("evaluation-00001-greedy.eval", episodes[8:])):
        found = log.read_eval_log(str(logs / name), resolve_attachments=True)
        assert (found.status, found.eval.task, found.eval.dataset.name) == ("success", "sokoban", f"{NAME} evaluation")
        assert found.results.total_samples == len(found.samples) == len(chosen)
        by_id = {sample.metadata["trajectory_id"]: sample for sample in found.samples}
        for episode in chosen:
            sample = by_id[episode.trajectory_id]
            assert [message.role for message in sample.messages] == [turn.role for turn in episode.turns]
            assert sample.messages[0].content[0].image.startswith("data:image/png;base64,")
            assert sample.output.completion == episode.turns[-1].text
            if episode.status == "failed":
                assert sample.error.message == "no server" and "reward" not in sample.scores
            else:
                assert sample.scores["reward"].value == pytest.approx(episode.reward)
        assert log.read_eval_log(str(logs / name), header_only=True).samples is None
        assert len(log.read_eval_log_sample_summaries(str(logs / name))) == len(chosen)
