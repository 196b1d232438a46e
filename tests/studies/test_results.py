"""What is read from stored runs: rows under common names, curves on the clock of their stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from geo_sokoban_pipeline.storage import write_json
from geo_sokoban_pipeline.studies.results import (
    ResultsError,
    _check_prompts,
    _describe_machine,
    _imitation_curve,
    _loop_curve,
    _rows,
)


def summary(policies: list[str], *rows: tuple[str, str]) -> dict[str, Any]:
    lengths = [{"length": 1, "solved": 3, "episodes": 4}]
    counts = {"solved": 3, "episodes": 4, "by_length": lengths}
    return {"policies": policies, "rows": [{"policy": policy, "mode": mode, **counts} for policy, mode in rows]}


def test_rows_of_a_run_and_of_an_evaluation_have_the_same_names():
    run = summary(
        ["warm_start", "final"],
        ("warm_start", "sampled"),
        ("final", "greedy"),
        ("final_blank", "sampled"),
        ("random", "-"),
    )
    assert [row["player"] for row in _rows(run)] == ["warm_start", "final", "final_blank", "random"]
    name = "long-seed0@/somewhere/final_policy"
    patient = ("teacher (direct), never gives up", "-")
    other = summary([name], (name, "sampled"), (f"{name}_blank", "sampled"), ("teacher (direct)", "-"), patient)
    assert [row["player"] for row in _rows(other)] == ["final", "final_blank", "teacher", "teacher_patient"]
    control = summary(["control_optimal"], ("control_optimal", "sampled"))
    assert _rows(control) == [
        {"player": "control_optimal", "mode": "sampled", "solved": 3, "episodes": 4, "by_length": [[1, 3, 4]]}
    ]


def test_curve_of_the_loop():
    def rates(prefix: str, sampled: float) -> dict[str, float]:
        return {f"{prefix}sampled_solve_rate": sampled, f"{prefix}greedy_solve_rate": 0.5}

    rows = [
        {"perf/cpu_time": 2.0, "perf/save_cpu_time": 0.0} | rates("eval/start/", 0.25),
        {"perf/cpu_time": 2.0, "perf/save_cpu_time": 0.5} | rates("eval/validation/", 0.5),
        {"perf/cpu_time": 1.0, "perf/save_cpu_time": None},
        {"perf/cpu_time": 1.0, "perf/save_cpu_time": 0.5} | rates("eval/validation/", 0.75),
    ]
    assert _loop_curve(rows) == [[0.0, 0.25, 0.5], [4.5, 0.5, 0.5], [7.0, 0.75, 0.5]]


def test_curve_of_imitation_has_only_played_rows():
    history = [
        {"step": 1, "cpu_seconds": 1.0, "validation_loss": 2.0},
        {"step": 2, "cpu_seconds": 2.04, "sampled_solve_rate": 0.125, "greedy_solve_rate": 0.25},
    ]
    assert _imitation_curve(history) == [[2.0, 0.125, 0.25]]


@pytest.mark.parametrize(
    ("hashes", "good"),
    [(["a", "a", "a", "b", "b"], True), (["a", None, "a", "b", None], True), (["a", "c", "a", "b", "b"], False)],
)
def test_rows_of_one_table_are_of_the_same_prompts(tmp_path, hashes, good):
    names = ["x", "x-teacher", "x-optimal", "x-wide", "y-wide"]
    kinds = ["train", "control", "control", "evaluate", "evaluate"]
    members = [
        SimpleNamespace(run_id=name, kind=kind, part=part, summary=tmp_path / f"{name}.json")
        for name, kind, part in zip(names, kinds, ["", "teacher", "optimal", "wide", "wide"], strict=True)
    ]
    for member, found in zip(members, hashes, strict=True):
        write_json(member.summary, {} if found is None else {"prompts_hash": found})
    if good:
        _check_prompts(members)
    else:
        message = "x, x-optimal and x-teacher have played different evaluation prompts: .* Give fresh=true"
        with pytest.raises(ResultsError, match=message):
            _check_prompts(members)


def test_everything_that_made_a_study_is_named():
    one = {"workers": 2, "maker": {"cores": 2, "processor": "A", "commit": "a", "torch": "2", "version": "1"}}
    other = {"workers": 1, "maker": {"cores": 2, "processor": None, "commit": "b", "torch": "2", "version": "1"}}
    machine = _describe_machine({"x": one, "y": other, "z": {"workers": None}}, ["y", "z"])
    assert (machine["workers"], machine["other_workers"], machine["commit"]) == (1, 2, ["a", "b", None])
    assert (machine["processor"], machine["torch"]) == (["A", None], ["2", None])
