"""Audit of rollouts that other trainers have written: the checks that need neither tokens nor a mask.

verl's `trainer.rollout_data_dir` holds one JSON-lines file per step, TRL's `log_completions` one parquet file per step.
Both become rows of prompt, response and reward. A note names the checks for which a dump holds no data.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.evaluation.audit import AuditCheck
from geo_sokoban_pipeline.evaluation.audit_checks import TextCount, describe_silent, has_no_signal
from geo_sokoban_pipeline.formats import plural, type_name
from geo_sokoban_pipeline.rollout.episode import EpisodeResult, begin_reward, check_reward
from geo_sokoban_pipeline.seeding import content_hash

# Field of a row: its names in verl, TRL, OpenRLHF and slime.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "step": ("step",),
    "prompt": ("input", "prompt"),
    "response": ("output", "completion", "response"),
    "reward": ("score", "reward"),
    "advantage": ("advantage",),
    "label": ("gts", "label", "ground_truth", "solution", "answer"),  # an answer may be that of the response
    "images": ("images", "image", "multi_modal_data", "multimodal_inputs"),
}
_NO_REWARD = frozenset({"mode"})
_END = "<|im_end|>"
_SLACK = 1e-3  # of the largest advantage of a group: TRL adds 1e-4 to the standard deviation, and stores float32


@dataclass(frozen=True)
class DumpedRow:
    """One response of a dump; None where the dump does not say.

    Attributes:
        key: of its problem: hash of the prompt with its images, or with its label where the dump holds no images.
    """

    place: str
    key: str
    step: int
    prompt: str | None
    response: str | None
    reward: float | None
    advantage: float | None
    label: str | None


def audit_dumps(
    dumps: Mapping[str, Path], task: Task | None = None, names: Mapping[str, str] | None = None
) -> list[AuditCheck]:
    """Check the dumps of one run of TRL or verl.

    Args:
        dumps: by split, such as `train` and `validation`: a `.jsonl` or `.parquet` file, or a folder of them.
        task: whose default reward grades the responses again, where the dump holds labels and the reward needs only
            text; None: rewards are not recomputed.
        names: of fields of `FIELDS` that have other names in the dumps.

    Raises:
        FileNotFoundError: a path holds no such file.
        DumpError: a line cannot be read, or has none of the fields.
    """
    checks: list[AuditCheck] = []
    prompts: dict[str, set[str]] = {}
    for split, path in dumps.items():
        rows = list(read_dump(path, names))
        prompts[split] = {row.key for row in rows if row.prompt}
        checks += [_check_rows(split, rows), _check_groups(split, rows), _count_texts(split, rows)]
        if task is not None:
            checks.append(_grade_again(split, rows, task))
    shared = [
        f"{one} and {other} share {plural(len(prompts[one] & prompts[other]), 'prompt')}"
        for one, other in combinations(prompts, 2)
        if prompts[one] & prompts[other]
    ]
    return [*checks, AuditCheck("splits", ", ".join(dumps), sum(map(len, prompts.values())), tuple(shared))]


class DumpError(ValueError):
    """A dump is none; the message names the line, and the fields that are looked for."""


def read_dump(path: Path, names: Mapping[str, str] | None = None) -> Iterator[DumpedRow]:
    """Rows of a file, or of all files of a folder in the order of their steps.

    Args:
        names: of fields of `FIELDS` that have other names here.

    Raises:
        FileNotFoundError: there is no such file.
        DumpError: a line cannot be read, or has neither a prompt nor a response.
    """
    fields = {**FIELDS, **{field: (own,) for field, own in (names or {}).items()}}
    files = [path] if path.is_file() else [*path.rglob("*.jsonl"), *path.rglob("*.parquet")]
    if not files:
        raise FileNotFoundError(f"{path}: neither a .jsonl nor a .parquet file, and no folder of them")
    for file in sorted(files, key=lambda one: (len(one.name), one.name)):
        for number, values in enumerate(_read_rows(file)):
            yield _as_row(f"{file.name}:{number + 1}", values, fields)


def _read_rows(file: Path) -> Iterable[Mapping[str, Any]]:
    if file.suffix == ".parquet":
        return pq.ParquetFile(file).read().to_pylist()
    read: list[Mapping[str, Any]] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    read.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise DumpError(f"{file}, line {number}: no JSON ({error}).") from error
    return read


def _as_row(place: str, values: Any, fields: Mapping[str, tuple[str, ...]]) -> DumpedRow:
    wanted = (*fields["prompt"], *fields["response"])
    if not isinstance(values, Mapping) or not any(own in values for own in wanted):
        held = ", ".join(map(str, values)) if isinstance(values, Mapping) else type_name(values)
        raise DumpError(
            f"{place}: it has none of the fields {', '.join(wanted)}, but {held}. Name them, such as "
            "--field prompt=question --field response=text."
        )
    found = {
        name: next((values[own] for own in names if values.get(own) is not None), None)
        for name, names in fields.items()
    }
    if found["reward"] is None and "completion" in values:
        # TRL: one column for each reward function, under its own name; of several the weights are not stored.
        known = {own for names in fields.values() for own in names} | _NO_REWARD
        own = [value for name, value in values.items() if name not in known and isinstance(value, float | int)]
        own = [value for value in own if not math.isnan(value)] or own[:1]  # NaN: the function is not for this row
        found["reward"] = own[0] if len(own) == 1 else None
    prompt, label = _as_text(found["prompt"]), None if found["label"] is None else str(found["label"])
    images = _as_text(next(filter(None, (_contents(values.get(own)) for own in fields["images"])), None))
    return DumpedRow(
        place,
        content_hash(prompt or "", "images" if images else "label", images or label or ""),
        int(_as_number(place, "step", found["step"]) or 0),
        prompt,
        _as_text(found["response"]),
        _as_number(place, "reward", found["reward"]),
        _as_number(place, "advantage", found["advantage"]),
        label,
    )


def _as_text(value: Any) -> str | None:
    """A text, or messages as one text."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _as_number(place: str, field: str, value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise DumpError(
            f"{place}: the {field} is {value!r}, not a number. Name another one with --field {field}=…."
        ) from None


def _contents(images: Any) -> Any:
    """Images without empty places, and without the names of files whose bytes are there: these may differ."""
    if isinstance(images, Mapping):
        held = {name: own for name, one in images.items() if (own := _contents(one))}
        return held.get("bytes") or held
    if isinstance(images, list):
        return [own for one in images if (own := _contents(one))]
    return None if isinstance(images, float) else images  # NaN: pandas has no other sign for none


def _check_rows(split: str, rows: Sequence[DumpedRow]) -> AuditCheck:
    findings: list[str] = []
    for row in rows:
        if row.prompt is None or row.response is None:
            findings.append(f"{row.place}: no prompt or no response")
        elif row.reward is not None and not math.isfinite(row.reward):
            findings.append(f"{row.place}: the reward is {row.reward}")
        elif _END in row.response.rstrip().removesuffix(_END) and "<|im_start|>" not in row.response:
            findings.append(f"{row.place}: {_END} within the response")
    repeated = len(rows) - len({(row.step, row.key, row.response) for row in rows})
    notes = [f"{repeated} of {plural(len(rows), 'row')} repeat another one of their step"]
    if missing := sum(row.reward is None for row in rows):
        notes.append(f"{missing} of {plural(len(rows), 'row')} without a reward")
    return AuditCheck("rows", split, len(rows), tuple(findings), tuple(notes))


def _check_groups(split: str, rows: Sequence[DumpedRow]) -> AuditCheck:
    """Groups of a step are of one size, and their advantages follow the rewards up to one scale."""
    drawn: dict[int, dict[str, list[DumpedRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        drawn[row.step][row.key].append(row)
    findings: list[str] = []
    groups: list[list[DumpedRow]] = []
    for step, problems in drawn.items():
        sizes = {len(members) for members in problems.values()}
        usual = min(sizes)
        if odd := sorted(size for size in sizes if size % usual):
            findings.append(f"step {step}: groups of {usual} responses, and of {', '.join(map(str, odd))}")
        for members in problems.values():
            # A problem that was drawn twice makes two groups, one behind the other.
            size = len(members) if usual == 1 or len(members) % usual else usual
            groups += [members[start : start + size] for start in range(0, len(members), size)]
    scored = silent = 0
    for members in groups:
        rewards = [row.reward for row in members if row.reward is not None and math.isfinite(row.reward)]
        if len(rewards) < len(members):
            continue
        scored += 1
        silent += has_no_signal(rewards)
        advantages = [row.advantage for row in members if row.advantage is not None]
        if len(advantages) == len(members) and not _follow(np.array(rewards), np.array(advantages)):
            findings.append(
                f"step {members[0].step}, from {members[0].place}: advantages do not follow from the rewards"
            )
    notes = [describe_silent(silent, scored)]
    if scored < len(groups):
        notes.append(f"{len(groups) - scored} of {plural(len(groups), 'group')} not looked at: a reward is missing")
    return AuditCheck("groups", split, len(groups), tuple(findings), tuple(notes))


def _follow(rewards: np.ndarray, advantages: np.ndarray) -> bool:
    """Whether advantages are the centred rewards times one factor that is not negative."""
    centred = rewards - rewards.mean()
    slack = _SLACK * max(1.0, float(np.abs(advantages).max()))
    if has_no_signal(rewards.tolist()):
        return bool(np.abs(advantages).max() <= slack)
    factor = float(centred @ advantages / (centred @ centred))
    return factor >= 0 and bool(np.abs(advantages - factor * centred).max() <= slack)


def _count_texts(split: str, rows: Sequence[DumpedRow]) -> AuditCheck:
    counts = TextCount()
    counts.add(row.response for row in rows if row.response is not None)
    return AuditCheck("texts", split, counts.responses, notes=tuple(counts.notes()))


def _grade_again(split: str, rows: Sequence[DumpedRow], task: Task) -> AuditCheck:
    """How often the task's default reward gives another reward: a note, because the trainer's may be another one."""
    options = task.train_config.model_validate({}).reward
    reward = load_object(options.function)
    graded = [row for row in rows if row.label is not None and row.response is not None and row.reward is not None]
    differing: list[str] = []
    for row in graded:
        text = str(row.response).removesuffix(_END)
        result = EpisodeResult({"id": row.place, "answer": row.label}, "completed", [text], text, [])
        try:
            value = check_reward(begin_reward(reward, result, options.args)(), options.function)["reward"]
        except KeyError as error:  # of an episode's environment, which a dump does not hold
            note = f"not graded again: {options.function} needs {error} of an environment"
            return AuditCheck("rewards", split, 0, notes=(note,))
        if value != row.reward:
            differing.append(f"{row.place}: {row.reward:g}, graded again {value:g}")
    notes = [f"{len(differing)} of {plural(len(graded), 'reward')} differ from {options.function}", *differing[:3]]
    return AuditCheck("rewards", split, len(graded), notes=tuple(notes))
