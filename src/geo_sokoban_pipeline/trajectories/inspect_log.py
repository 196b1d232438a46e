"""Stored episodes as logs of Inspect AI (`.eval`): zip files of JSON that its viewer and `read_eval_log` open.

Written by the published format, version 2, without the package: only opening a log takes the extra `inspect`. A log
holds the episodes of one policy under one way of sampling: a sample is an episode, its epoch the number of the sample
within its group, its scores are success and reward. Images are attachments, once per sample.
"""

from __future__ import annotations

import base64
import json
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from geo_sokoban_pipeline.console import track
from geo_sokoban_pipeline.seeding import content_hash
from geo_sokoban_pipeline.trajectories.exports import message_of
from geo_sokoban_pipeline.trajectories.index import SPLITS
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories

FOLDER = "inspect"  # below an export
VERSION = 2  # of the format
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal episodes give equal bytes
_STOPS = {"length": "max_tokens"}
_COLUMNS = (
    "trajectory_id",
    "task",
    "task_id",
    "iteration",
    "group_index",
    "sample_index",
    "policy_version",
    "sampling",
    "status",
    "finish_reason",
    "error",
    "turns",
    "images",
    "label",
    "reward",
    "advantage",
    "success",
    "difficulty",
    "reward_parts",
    "metrics",
)


def write_logs(files: Sequence[Path], folder: Path, name: str, about: Mapping[str, Any]) -> dict[str, int]:
    """Write the episodes of trajectory files as logs, one for each iteration and way of sampling.

    Args:
        files: by iteration and part.
        folder: made where it is missing.
        name: of the run, such as `train_sokoban/default`.
        about: metadata of every log.

    Returns:
        Number of samples by file name, such as `evaluation-00001-greedy.eval`.
    """
    written: dict[str, int] = {}
    with track("write logs, files", len(files), keep=False) as progress:
        for place, parts in groupby(files, key=lambda path: path.parent):
            paths = list(parts)
            rows = [row for path in paths for row in read_trajectories(path, _COLUMNS).to_pylist()]
            split = SPLITS.get(place.parent.name, place.parent.name)
            created = datetime.fromtimestamp(paths[0].stat().st_mtime, UTC).isoformat(timespec="seconds")
            for greedy in (False, True):
                chosen = [row for row in rows if bool(json.loads(row["sampling"]).get("greedy")) == greedy]
                if chosen:
                    file = folder / f"{split}-{chosen[0]['iteration']:05d}{'-greedy' if greedy else ''}.eval"
                    model = f"{name}@{chosen[0]['policy_version']}"
                    header = _header(
                        chosen, model, f"{name} {split}", created, {**about, "split": split, "greedy": greedy}
                    )
                    _write(file, header, [_sample(row, model) for row in chosen])
                    written[file.name] = len(chosen)
            progress.advance(len(paths))
    return written


def _write(path: Path, header: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    summaries = [_summary(sample) for sample in samples]
    files = {
        "_journal/start.json": {name: header[name] for name in ("version", "eval", "plan")},
        **{f"samples/{sample['id']}_epoch_{sample['epoch']}.json": sample for sample in samples},
        "_journal/summaries/1.json": summaries,
        "summaries.json": summaries,
        "header.json": header,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _header(
    rows: Sequence[Mapping[str, Any]], model: str, dataset: str, created: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    sampling = json.loads(rows[0]["sampling"])
    scores = []
    for name in ("success", "reward"):
        values = [float(row[name]) for row in rows if row[name] is not None]
        mean = {"name": "mean", "value": fmean(values) if values else 0.0, "params": {}}
        scores.append(
            {
                "name": name,
                "scorer": name,
                "scored_samples": len(values),
                "unscored_samples": len(rows) - len(values),
                "params": {},
                "metrics": {"mean": mean},
            }
        )
    ids = list(dict.fromkeys(map(_id, rows)))
    epochs = 1 + max(row["sample_index"] for row in rows)
    identity = content_hash(model, dataset, *(row["trajectory_id"] for row in rows))
    spec = {
        "eval_id": identity,
        "run_id": identity,
        "created": created,
        "task": rows[0]["task"],
        "task_id": rows[0]["task"],
        "dataset": {"name": dataset, "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": model,
        "model_generate_config": {
            key: sampling[own]
            for key, own in (("temperature", "temperature"), ("top_p", "top_p"), ("top_k", "top_k"))
            if isinstance(sampling.get(own), int | float) and sampling[own] >= 0
        },
        "config": {"epochs": epochs},
        "packages": {},
        "metadata": {**about, "sampling": sampling},
    }
    completed = sum(row["status"] in ("completed", "truncated") for row in rows)
    return {
        "version": VERSION,
        "status": "success",
        "eval": spec,
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {"total_samples": len(rows), "completed_samples": completed, "scores": scores},
        "stats": {"started_at": created, "completed_at": created, "model_usage": {}},
    }


def _sample(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    names = [content_hash(image["bytes"]) for image in row["images"]]
    encoded = (base64.b64encode(image["bytes"]).decode() for image in row["images"])
    attachments = {name: f"data:image/png;base64,{text}" for name, text in zip(names, encoded, strict=True)}
    messages = [_message(turn, names, model, f"{row['trajectory_id']}/{at}") for at, turn in enumerate(row["turns"])]
    first = next((at for at, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    responses = [one for one in messages if one["role"] == "assistant"]
    stop = _STOPS.get(row["finish_reason"] or "", "stop")
    choices = [{"message": responses[-1], "stop_reason": stop}] if responses else []
    scores = {
        name: {"value": float(row[name]), "answer": str(row["turns"][-1]["action"] or "") if responses else ""}
        for name in ("success", "reward")
        if row[name] is not None
    }
    error = row["error"]
    copied = ("trajectory_id", "task_id", "iteration", "group_index", "policy_version", "status", "difficulty")
    return {
        "id": _id(row),
        "epoch": row["sample_index"] + 1,
        "input": messages[:first],
        "target": row["label"] or "",
        "messages": messages,
        "output": {"model": model, "choices": choices, "completion": responses[-1]["content"] if responses else ""},
        "scores": scores,
        "metadata": {
            **{name: row[name] for name in copied},
            "advantage": row["advantage"],
            "reward_parts": {one["name"]: one["value"] for one in row["reward_parts"]},
            "metrics": {one["name"]: one["value"] for one in row["metrics"]},
        },
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": attachments,
        **({"error": {"message": error, "traceback": error, "traceback_ansi": error}} if error else {}),
    }


def _message(turn: Mapping[str, Any], images: Sequence[str], model: str, name: str) -> dict[str, Any]:
    shown = iter(turn["image_indices"])
    parts = [
        {"type": "image", "image": f"attachment://{images[next(shown)]}"} if part["type"] == "image" else part
        for part in message_of(turn)["content"]
    ]
    told = {name: turn[name] for name in ("action", "reward", "credit", "advantage") if turn[name] is not None}
    message = {"id": content_hash(name), "role": turn["role"], "metadata": {**told, "info": json.loads(turn["info"])}}
    if turn["role"] == "assistant":
        return {**message, "content": turn["text"], "source": "generate", "model": model}
    return {**message, "content": parts}


def _summary(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as lists show it: without images, with the words of its input."""
    words = [
        {
            **message,
            "content": [part if part["type"] == "text" else {"type": "text", "text": "(Image)"} for part in content]
            if isinstance(content := message["content"], list)
            else content,
        }
        for message in sample["input"]
    ]
    copied = ("id", "epoch", "target", "scores", "metadata", "model_usage")
    return {
        **{name: sample[name] for name in copied},
        "input": words,
        "completed": True,
        "message_count": len(sample["messages"]),
        **({"error": sample["error"]["message"]} if "error" in sample else {}),
    }


def _id(row: Mapping[str, Any]) -> str:
    """Of a prompt in a log; a prompt that an iteration draws twice is two."""
    return f"{row['group_index']:05d}-{content_hash(row['task_id'])[:12]}"
