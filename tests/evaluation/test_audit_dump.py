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

from geo_sokoban_pipeline.__main__ import main
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


def write(path: Path, rows: Rows) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def by_name(checks: list[AuditCheck]) -> dict[str, AuditCheck]:
    return {check.check: check for check in checks}


def group(text: str, rewards: list[float | None], step: int = 1, **columns: Any) -> Rows:
    """Rows of one group of another trainer, all of whose prompts are `Find x.`"""
    known = [0.0 if reward is None else reward for reward in rewards]
    advantages = (np.array(known) - np.mean(known)) / (np.std(known, ddof=1) + 1e-4 if len(set(known)) > 1 else 1)
    return [
        {"step": step, "prompt": "Find x.", "completion": f"{text} {number}", "reward": reward}
        | {"advantage": float(advantage), **columns}
        for number, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True))
    ]


def trl_rows() -> Rows:
    """Two groups of four, as TRL logs completions: rewards under the name of their function, advantages beside them."""
    return [
        {
            "step": 1,
            "prompt": [{"role": "user", "content": f"Find x of problem {number}."}],
            "completion": row["completion"],
            "accuracy_reward": row["reward"],
            "advantage": float(np.float32(row["advantage"])),
        }
        for number, rewards in enumerate(([1.0, 0.0, 0.0, 1.0], [0.0] * 4))
        for row in group("So it is", list(rewards))
    ]


OUTCOMES = [[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
PROBLEMS = [
    row
    for number, rewards in enumerate(OUTCOMES)
    for row in group("A", list(rewards), images=[{"bytes": bytes([number]), "path": f"{number}.png"}], solution="5")
]
PROBLEMS[1]["images"] = [{"bytes": bytes([0]), "path": None}]  # another file name makes no other image
BLIND = [*group("A", [1.0, 1.0, 0.0]), *group("B", [0.0, 0.0, 0.0]), *group("C", [0.0, 1.0, 1.0])]
BLIND += [{**row, "prompt": "Find y."} for row in group("D", [1.0, 0.0, 0.0])]
EQUAL = "without a signal: all rewards are equal"


@pytest.mark.parametrize(
    ("name", "rows", "checked", "notes"),
    [
        ("trl.parquet", trl_rows(), 2, [f"1 of 2 groups {EQUAL}"]),
        # Images tell problems of one text apart.
        ("images.parquet", PROBLEMS, 5, [f"2 of 5 groups {EQUAL}"]),
        # TRL stores the texts of images' problems without the images: groups of the smallest size, in their order.
        ("blind.parquet", BLIND, 4, [f"1 of 4 groups {EQUAL}"]),
        # An answer beside the label is that of the response.
        *(
            (f"{name}.jsonl", [{**row, "answer": row["completion"]} for row in group("A", [1.0, 0.0], **{name: "5"})],
             1, [f"0 of 1 group {EQUAL}"])
            for name in ("gts", "label", "ground_truth")
        ),
        (
            "unscored.jsonl",
            [row for number, scores in enumerate(([1.0, None], [0.0, 0.0], [None, None]))
             for row in group("A", scores, label=number)],
            3,
            [f"1 of 1 group {EQUAL}", "2 of 3 groups not looked at: a reward is missing"],
        ),
    ],
)  # fmt: skip
def test_groups_of_clean_dumps(tmp_path: Path, name: str, rows: Rows, checked: int, notes: list[str]) -> None:
    found = by_name(audit_dumps({"train": write(tmp_path / name, rows)}))
    assert not any(check.findings for check in found.values())
    assert found["groups"].checked == checked
    assert all(note.startswith(words) for note, words in zip(found["groups"].notes, notes, strict=True))
    assert name != "unscored.jsonl" or found["rows"].notes[1:] == ("3 of 6 rows without a reward",)


@pytest.mark.parametrize("sign", [None, float("nan")])
def test_a_function_that_is_not_for_a_row_gives_no_reward(tmp_path: Path, sign: float | None) -> None:
    """TRL stores a missing reward of one of several functions as NaN."""
    rows = [{**row, "geometry": row["reward"], "algebra": sign} for row in group("A", [1.0, 0.0])]
    rows += [{**row, "geometry": sign, "algebra": row["reward"], "prompt": "Solve."} for row in group("B", [1.0, 1.0])]
    for row in rows:
        del row["reward"]
    found = by_name(audit_dumps({"train": write(tmp_path / "1.parquet", rows)}))
    assert found["groups"].notes == ("1 of 2 groups without a signal: all rewards are equal",)
    assert found["rows"].findings == () and len(found["rows"].notes) == 1


@pytest.mark.parametrize("name", ["gts", "label", "solution", "answer", "ground_truth"])
@pytest.mark.parametrize(
    "empty",
    [
        {},
        {"images": [None]},
        {"images": [{"bytes": None, "path": None}]},
        {"multi_modal_data": {"image": []}},
        {"image": ""},
        {"image": float("nan")},
    ],
    ids=str,
)
def test_labels_tell_problems_apart_where_there_are_no_images(tmp_path: Path, name: str, empty: dict[str, Any]) -> None:
    """One problem all right, one all wrong, one mixed, in any order."""
    rows = [*group("A", [1.0, 1.0], **{name: 3}, **empty), *group("B", [0.0, 0.0], **{name: 4}, **empty)]
    rows += group("C", [1.0, 0.0], **{name: 5}, **empty)
    found = by_name(audit_dumps({"train": write(tmp_path / "1.jsonl", rows[::2] + rows[1::2])}))
    assert found["groups"].notes == ("2 of 3 groups without a signal: all rewards are equal",)


@pytest.mark.parametrize("name", ["images", "image", "multi_modal_data", "multimodal_inputs", "figure"])
def test_splits_with_equal_texts_and_other_images_share_no_prompt(tmp_path: Path, name: str) -> None:
    dumps = {
        split: write(tmp_path / f"{split}.jsonl", group("A", [1.0, 0.0], **{name: {"image": [f"{number}.png"]}}))
        for number, split in enumerate(("train", "validation", "again"))
    }
    (tmp_path / "again.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    found = by_name(audit_dumps(dumps, names={"images": "figure"} if name == "figure" else None))
    assert found["splits"].findings == ("train and again share 1 prompt",)


@pytest.mark.parametrize(
    ("labels", "findings"), [(("4", "5"), ()), (("4", "4"), ("train and validation share 1 prompt",))]
)
def test_splits_with_equal_texts_and_other_labels_share_no_prompt(
    tmp_path: Path, labels: tuple[str, str], findings: tuple[str, ...]
) -> None:
    """verl's dumps have no images: the label tells problems of one text apart."""
    dumps = {
        split: write(tmp_path / f"{split}.jsonl", group("A", [1.0, 0.0], gts=label))
        for split, label in zip(("train", "validation"), labels, strict=True)
    }
    assert by_name(audit_dumps(dumps))["splits"].findings == findings


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


# The command.


def audit(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
    """Exit code of `geo-sokoban-pipeline audit words`, and what it says."""
    with pytest.raises(SystemExit) as ended:
        main(["audit", *map(str, words)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), " ".join((said.out + said.err).split())


def test_the_command_checks_a_clean_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, rollouts = tmp_path / "audit.json", tmp_path / "rollouts"
    rollouts.mkdir()
    for name in ("1.jsonl", "2.parquet", "10.jsonl"):
        write(rollouts / name, verl_rows(int(name.partition(".")[0])))
    code, said = audit(capsys, rollouts, "--task", "geo3k", "--output", output)
    assert code == 0 and "rewards" in said and "0 of 24 rewards differ" in said
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert stored["findings"] == 0 and stored["dumps"] == {"train": str(rollouts)}
    found = {check["check"]: (check["checked"], check["notes"][-1:]) for check in stored["checks"]}
    assert list(found) == ["rows", "groups", "texts", "rewards", "splits"]
    assert found["rows"][0] == 24 and found["groups"] == (6, [f"3 of 6 groups {EQUAL}"])
    reward = "geo_sokoban_pipeline.rewards.geo3k.math_reward"
    assert found["rewards"] == (24, [f"0 of 24 rewards differ from {reward}"])


def test_findings_end_the_command_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "1.jsonl", verl_rows()), write(tmp_path / "2.parquet", verl_rows()[4:])
    code, said = audit(capsys, f"train={one}", f"validation={other}")
    assert code == 1 and "1 finding(s)" in said and "share 1 prompt" in said


def test_fields_of_other_names_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"input": "question", "output": "text", "score": "points"}
    rows = [{names.get(name, name): value for name, value in row.items()} for row in verl_rows()]
    rows[2]["points"] = float("inf")
    path = write(tmp_path / "rows.jsonl", rows)
    code, said = audit(capsys, path)
    assert (
        code == 1
        and "rows.jsonl:1: it has none of the fields input, prompt, output, completion, response, but question" in said
    )
    fields = [word for name in ("prompt=question", "response=text", "reward=points") for word in ("--field", name)]
    code, said = audit(capsys, path, *fields)
    assert code == 1 and "rows.jsonl:3: the reward is inf" in said


MISTAKES: list[tuple[list[str], str]] = [
    (["nothing.jsonl"], "nothing.jsonl does not exist"),
    (["train=nothing.jsonl"], "nothing.jsonl: neither a .jsonl nor a .parquet file, and no folder of them"),
    (["{rows}", "{rows}"], "train is given twice"),
    (["{rows}", "--field", "text=x"], "--field text: must be one of step, prompt, response"),
    (["{rows}", "--task", "chess"], "--task chess: must be one of"),
    (["{torn}"], "torn.jsonl, line 2: no JSON"),
    (["{rows}", "--field", "reward=gts"], "rows.jsonl:1: the reward is 'sixty', not a number"),
    (["{rows}", "--field", "step=gts"], "rows.jsonl:1: the step is 'sixty', not a number"),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    rows = write(tmp_path / "rows.jsonl", [{**row, "gts": "sixty"} for row in verl_rows()])
    torn = tmp_path / "torn.jsonl"
    torn.write_text(f"{json.dumps(verl_rows()[0])}\n{{\n", encoding="utf-8")
    code, said = audit(capsys, *(word.format(rows=rows, torn=torn) for word in words))
    assert code == 1 and text in said
