"""Audit of the dumps of other trainers: clean ones have no findings, and planted defects are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.evaluation.audit import AuditCheck
from geo_sokoban_pipeline.evaluation.audit_dump import audit_dumps
from geo_sokoban_pipeline.tasks import task_of

Rows = list[dict[str, Any]]


def verl_rows(step: int = 1) -> Rows:
    """Two groups of four, as verl's `_dump_generations` writes them."""
    answers = [("60", (1, 0, 0, 1)), ("45", (0, 0, 0, 0))]
    return [
        {
            "input": f"user\nFind x of problem {group}.\nassistant\n",
            "output": f"Because of {sample}: \\boxed{{{label if right else '7'}}}",
            "gts": label,
            "score": float(right),
            "step": step,
        }
        for group, (label, outcomes) in enumerate(answers)
        for sample, right in enumerate(outcomes)
    ]


def trl_rows() -> Rows:
    """The same as TRL logs completions: rewards under the name of their function, advantages beside them."""
    rows = verl_rows()
    for start in (0, 4):
        rewards = np.array([row["score"] for row in rows[start : start + 4]])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for row, advantage in zip(rows[start : start + 4], advantages, strict=True):
            row["advantage"] = float(np.float32(advantage))
    return [
        {
            "step": row["step"],
            "prompt": [{"role": "user", "content": row["input"]}],
            "completion": row["output"],
            "accuracy_reward": row["score"],
            "advantage": row["advantage"],
        }
        for row in rows
    ]


def write(path: Path, rows: Rows) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def by_name(checks: list[AuditCheck]) -> dict[str, AuditCheck]:
    return {check.check: check for check in checks}


def test_a_clean_dump_of_verl_has_no_findings(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path / f"{step}.jsonl", verl_rows(step))
    found = by_name(audit_dumps({"train": tmp_path}, task_of("geo3k")))
    assert all(not check.findings for check in found.values())
    assert (found["rows"].checked, found["groups"].checked) == (24, 6)
    assert found["groups"].notes == ("3 of 6 groups without a signal: all rewards are equal",)
    assert found["rewards"].notes == ("0 of 24 rewards differ from geo_sokoban_pipeline.rewards.geo3k.math_reward",)


def test_a_clean_dump_of_trl_has_no_findings(tmp_path: Path) -> None:
    found = by_name(audit_dumps({"train": write(tmp_path / "completions_00001.parquet", trl_rows())}))
    assert all(not check.findings for check in found.values())
    assert found["groups"].notes == ("1 of 2 groups without a signal: all rewards are equal",)


def change(name: str, value: Any) -> Callable[[Rows], None]:
    def apply(rows: Rows) -> None:
        rows[1][name] = value

    return apply


def swap_advantages(rows: Rows) -> None:
    rows[0]["advantage"], rows[1]["advantage"] = rows[1]["advantage"], rows[0]["advantage"]


@pytest.mark.parametrize(
    ("defect", "check", "text"),
    [
        (change("completion", None), "rows", "completions.jsonl:2: no prompt or no response"),
        (change("accuracy_reward", float("nan")), "rows", "completions.jsonl:2: the reward is nan"),
        (change("completion", "A<|im_end|><|im_end|>"), "rows", "<|im_end|> within the response"),
        (lambda rows: rows.pop(), "groups", "step 1: groups of 3 responses, and of 4"),
        (swap_advantages, "groups", "step 1, from completions.jsonl:1: advantages do not follow"),
        (change("accuracy_reward", 0.5), "groups", "advantages do not follow"),
    ],
)
def test_a_planted_defect_is_found(tmp_path: Path, defect: Callable[[Rows], Any], check: str, text: str) -> None:
    rows = trl_rows()
    defect(rows)
    found = by_name(audit_dumps({"train": write(tmp_path / "completions.jsonl", rows)}))
    assert text in found[check].findings[0]


def test_a_leak_and_a_changed_reward_are_seen(tmp_path: Path) -> None:
    rows = verl_rows()
    rows[2]["score"] = 1.0
    dumps = {"train": write(tmp_path / "1.jsonl", rows), "validation": write(tmp_path / "2.jsonl", verl_rows()[4:5])}
    found = [check for check in audit_dumps(dumps, task_of("geo3k")) if check.subject != "validation"]
    assert by_name(found)["splits"].findings == ("train and validation share 1 prompt",)
    assert by_name(found)["rewards"].notes[1] == "1.jsonl:3: 1, graded again 0"


def test_a_reward_that_needs_an_environment_is_not_recomputed(tmp_path: Path) -> None:
    found = by_name(audit_dumps({"train": write(tmp_path / "1.jsonl", verl_rows())}, task_of("sokoban")))
    assert (found["rewards"].checked, found["rewards"].findings) == (0, ())
    assert "not graded again" in found["rewards"].notes[0]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder of them"):
        audit_dumps({"train": tmp_path})
