"""What is read from stored runs: rows under common names, curves on the clock of their stage."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_sokoban_pipeline.parameters import section_model
from geo_sokoban_pipeline.runs.storage import read_json, write_json
from geo_sokoban_pipeline.studies.plan import StudyRun, plan_members
from geo_sokoban_pipeline.studies.results import (
    ResultsError,
    check_prompts,
    collect_results,
    describe_machine,
    evaluation_rows,
    join_recipes,
    loop_curve,
)
from geo_sokoban_pipeline.studies.run import StudyFolder

EVALUATED = "long-seed0@/somewhere/final_policy"


@pytest.mark.parametrize(
    ("policies", "rows", "players"),
    [
        (["warm_start", "final"], ["warm_start", "final", "final_blank", "random"],
         ["warm_start", "final", "final_blank", "random"]),
        (["start", "final"], ["start", "final"], ["warm_start", "final"]),
        ([EVALUATED], [EVALUATED, f"{EVALUATED}_blank", "teacher (direct)", "teacher (direct), never gives up"],
         ["final", "final_blank", "teacher", "teacher_patient"]),
        (["control_optimal"], ["control_optimal"], ["control_optimal"]),
    ],
)  # fmt: skip
def test_rows_of_a_run_and_of_an_evaluation_have_the_same_names(policies, rows, players):
    ends = {"low": 0.25, "high": 0.875}
    counts = {"mode": "greedy", "solved": 3, "episodes": 4, "clusters": 2, **ends}
    by_length = [{"length": 1, "solved": 3, "episodes": 4, **ends}]
    summary = {"policies": policies, "rows": [{"policy": name, **counts, "by_length": by_length} for name in rows]}
    wanted = [{"player": name, **counts, "by_length": [[1, 3, 4, 0.25, 0.875]]} for name in players]
    assert evaluation_rows(summary, "sokoban") == wanted


def test_curve_of_the_loop():
    def rates(prefix: str, sampled: float) -> dict[str, float]:
        return {f"{prefix}sampled_solve_rate": sampled, f"{prefix}greedy_solve_rate": 0.5}

    rows = [
        {"perf/cpu_time": 2.0, "perf/save_cpu_time": 0.0} | rates("eval/start/", 0.25),
        {"perf/cpu_time": 2.0, "perf/save_cpu_time": 0.5} | rates("eval/validation/", 0.5),
        {"perf/cpu_time": 1.0, "perf/save_cpu_time": None},
        {"perf/cpu_time": 1.0, "perf/save_cpu_time": 0.5} | rates("eval/validation/", 0.75),
    ]
    rows = [{"iteration": number, **row} for number, row in enumerate(rows)]
    assert loop_curve(rows) == [[0.0, 0.25, 0.5], [4.5, 0.5, 0.5], [7.0, 0.75, 0.5]]


def test_rows_of_one_table_are_of_the_same_prompts(tmp_path):
    members = []
    for name, kind, part, found in (
        ("x", "train", "", "a"),
        ("x-teacher", "control", "teacher", "c"),
        ("x-optimal", "control", "optimal", "a"),
        ("x-wide", "evaluate", "wide", "b"),
    ):
        write_json(tmp_path / f"{name}.json", {"prompts_hash": found})
        members.append(SimpleNamespace(run_id=name, kind=kind, part=part, summary=tmp_path / f"{name}.json"))
    message = "^x, x-optimal and x-teacher were evaluated on different prompts: .* Give fresh=true"
    with pytest.raises(ResultsError, match=message):
        check_prompts(members)
    del members[1]
    check_prompts(members)


def test_everything_that_made_a_study_is_named():
    one = {"workers": 2, "maker": {"cores": 2, "processor": "A", "commit": "a", "torch": "2", "version": "1"}}
    other = {"workers": 1, "maker": {"cores": 2, "processor": None, "commit": "b", "torch": "2", "version": "1"}}
    machine = describe_machine({"x": one, "y": other, "z": {"workers": 1, "maker": {}}}, ["y", "z"])
    assert (machine["workers"], machine["other_workers"], machine["commit"]) == (1, 2, ["a", "b", None])
    assert (machine["processor"], machine["torch"]) == (["A", None], ["2", None])


def evaluated(policies: list[str], solved: dict[tuple[str, str], int], prompts: int, data: str) -> dict[str, Any]:
    """A summary with half of the episodes on levels of one move, which are solved first."""

    def cells(count: int) -> list[dict[str, int]]:
        half = prompts // 2
        ones = [{"length": 1, "solved": min(count, half), "episodes": half}]
        return [*ones, {"length": 3, "solved": max(0, count - half), "episodes": half}]

    rows = [
        {"policy": policy, "mode": mode, "solved": count, "episodes": prompts, "clusters": 5, "by_length": cells(count)}
        for (policy, mode), count in solved.items()
    ]
    about = {"prompts": prompts, "layouts": 5, "move_limit": 10, "data_id": data, "prompts_hash": data}
    return {**about, "policies": policies, "rows": rows}


def write_table(root: Path, data: str, name: str, **columns: list[str]) -> None:
    path = root / "05_model_input" / "sokoban" / data / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def write_member(member: StudyRun, at: int) -> None:
    """What a member of the study leaves, with numbers that no two members share."""
    history = [
        {"step": 5, "cpu_seconds": 1.0 + at, "validation_loss": 2.0},
        {"step": 10, "cpu_seconds": 2.0 + at, "sampled_solve_rate": 0.25, "greedy_solve_rate": 0.5},
    ]
    manifest: dict[str, Any] = {"history": history}
    if member.kind == "train":
        solved = {("warm_start", "sampled"): 1, ("final", "sampled"): 6 + at, ("final", "greedy"): 5}
        summary = evaluated(
            ["warm_start", "final"], solved | {("final_blank", "sampled"): 2, ("random", "-"): 3}, 8, "a"
        )
        metrics = member.folders.outputs / "metrics"
        metrics.mkdir(parents=True)
        for number in range(203):
            row = {"iteration": number, "perf/cpu_time": 1.0, "perf/save_cpu_time": 0.5}
            row["perf/memory_gb"] = (2.0 if number < 100 else 3.0) + at
            if member.part and number > 1:
                row["train/pg_clipfrac"] = 0.25 if number % 3 else 0.5
            # Not `write_json`, which waits for the disk each time.
            (metrics / f"iter={number:05d}.json").write_text(json.dumps(row), encoding="utf-8")
    elif member.kind == "control":
        manifest |= {"cpu_seconds": 300.0 + at, "budget": {"steps": 77 + at}}
        summary = evaluated(["control_teacher"], {("control_teacher", "sampled"): 4}, 8, "a")
    else:
        name = f"{member.after}@/somewhere/final_policy"
        summary = evaluated([name], {(name, "sampled"): 10 + at, ("random", "-"): 7}, 12, "b")
    write_json(member.models / "policy" / "manifest.json", manifest)
    write_json(member.summary, summary)


def test_results_of_a_study_are_those_of_its_members(tmp_path):
    """Each number at its place: by seed and member, of the policy, the clock and the set of levels that are meant."""
    study = section_model("study_default").model_validate(
        {
            "seeds": [4, 7],
            "beside": [0],
            "controls": ["teacher"],
            "evaluations": [{"name": "wide", "title": "Wider levels", "sokoban": {"width": 8}}],
            "bars": [{"player": "final", "at_least": 20.0}],
        }
    )
    members = plan_members("tried", study, {"train_sokoban": {}, "sokoban": {}, "tracking": {}}, tmp_path)
    folder = StudyFolder.of(tmp_path, "tried")
    for member in members:
        write_member(member, at=[4, 7, 0].index(member.seed))
        maker = {"cores": 2, "processor": "A", "commit": "c"}
        folder.write_record(member, 60.0 * member.seed, workers=1 if member.kind == "train" else 2, maker=maker)
    wide = next(member.root for member in members if member.kind == "evaluate")
    write_table(tmp_path, "a", "prompts", layout_hash=["w", "x"], level_hash=["1", "2"])
    write_table(tmp_path, "a", "eval_prompts", layout_hash=["y", "z", "y"], level_hash=["3", "4", "3"])
    write_table(wide, "b", "eval_prompts", layout_hash=["x", "v"], level_hash=["2", "5"])

    results = collect_results("tried", study, members, folder)
    assert (results["study"], results["title"], results["bars"][0]["at_least"]) == ("tried", "tried", 20.0)
    assert (results["machine"]["workers"], results["machine"]["other_workers"]) == (1, 2)
    assert set(results["made_with"]) == {member.run_id for member in members}
    assert results["intervals"] == "clusters"
    (beside,) = results["beside"]
    assert (beside["seed"], beside["run_id"], set(beside["curves"])) == (0, "tried-seed0", {"warm_start", "grpo"})
    levels = results["levels"]
    assert (levels["count"], levels["boxes"], levels["width"], levels["lengths"]) == (8, 1, 6, [1, 3])
    assert (levels["distinct"], levels["shared_layouts"], levels["per_length"]) == (2, 0, [4])
    for at, seed in enumerate(results["seeds"]):
        assert (seed["seed"], seed["run_id"], seed["minutes"]) == ([4, 7][at], f"tried-seed{[4, 7][at]}", [4, 7][at])
        assert seed["cpu_seconds"] == {"warm_start": 2.0 + at, "grpo": 304.5, "control_teacher": 300.0 + at}
        assert seed["steps"] == {"warm_start": 10, "grpo": 203, "control_teacher": 77 + at}
        assert seed["memory_gb"] == [[20, 2.0 + at], [200, 3.0 + at]]
        assert seed["curves"]["warm_start"] == [[2.0 + at, 0.25, 0.5]]
        counts = {(row["player"], row["mode"]): row["solved"] for row in seed["rows"]}
        assert counts == {
            ("warm_start", "sampled"): 1,
            ("final", "sampled"): 6 + at,
            ("final", "greedy"): 5,
            ("final_blank", "sampled"): 2,
            ("random", "-"): 3,
            ("control_teacher", "sampled"): 4,
        }
        final = next(row for row in seed["rows"] if (row["player"], row["mode"]) == ("final", "sampled"))
        assert final["by_length"] == [[1, 4, 4], [3, 2 + at, 4]]
    (further,) = results["sets"]
    assert (further["name"], further["title"]) == ("wide", "Wider levels")
    assert (further["levels"]["count"], further["levels"]["width"], further["levels"]["shared_layouts"]) == (12, 8, 1)
    assert [(one["seed"], one["rows"][0]["player"], one["rows"][0]["solved"]) for one in further["seeds"]] == [
        (4, "final", 10),
        (7, "final", 11),
    ]

    old = read_json(members[0].summary)
    for row in old["rows"]:
        del row["clusters"]
    write_json(members[0].summary, old)
    assert "intervals" not in collect_results("tried", study, members, folder)


def test_a_compared_recipe_is_in_the_table_once_all_its_seeds_are_finished(tmp_path):
    recipes = {name: {"grpo": {"advantage": name}} for name in ("rloo", "dr_grpo")}
    study = section_model("study_default").model_validate({"seeds": [4, 7], "recipes": recipes})
    members = plan_members("tried", study, {"train_sokoban": {}, "sokoban": {}, "tracking": {}}, tmp_path)
    folder = StudyFolder.of(tmp_path, "tried")
    done = [member for member in members if member.run_id != "tried-seed7-dr_grpo"]
    for member in done:
        write_member(member, at=(member.seed == 7) + (member.part == "rloo"))
        folder.write_record(member, 60.0, workers=1, maker={"cores": 2})
    write_table(tmp_path, "a", "prompts", layout_hash=["w"], level_hash=["1"])
    write_table(tmp_path, "a", "eval_prompts", layout_hash=["y"], level_hash=["3"])
    results = collect_results("tried", study, done, folder)
    assert [seed["run_id"] for seed in results["seeds"]] == ["tried-seed4", "tried-seed7"]
    assert results["planned"] == recipes
    own, rloo = results["recipes"]
    same = {"cpu_seconds": 304.5, "spent": 1.0, "iterations": 203, "greedy": [5, 8]}
    assert own == {
        "name": "",
        "changes": {},
        "seeds": [
            {"seed": seed, "sampled": [solved, 8], **same, "clipped": None, "weights_clipped": None}
            for seed, solved in ((4, 6), (7, 7))
        ],
    }
    assert (rloo["name"], rloo["changes"]) == ("rloo", {"grpo": {"advantage": "rloo"}})
    assert [seed["sampled"] for seed in rloo["seeds"]] == [[7, 8], [8, 8]]
    assert rloo["seeds"][0]["clipped"] == pytest.approx((134 * 0.25 + 67 * 0.5) / 201)


CHANGES = {name: {"grpo": {"advantage": name}} for name in ("rloo", "opo", "dr_grpo")}


def compared(*names, cores=2, solved=6, code=None, **changes):
    """Results of one seed whose finished recipes are these."""
    recipes = [{"name": "", "changes": {}, "seeds": [seed(solved)]}]
    recipes += [{"name": name, "changes": CHANGES[name], "seeds": [seed(7)]} for name in names]
    if code:
        recipes[-1]["code"] = code
    maker = {"cores": cores, "commit": f"c{cores}"}
    made_with = {f"tried-seed4{'-' * bool(one['name'])}{one['name']}": maker for one in recipes}
    machine = {"workers": 1, "other_workers": cores, **describe_machine({"x": {"workers": 1, "maker": maker}}, ["x"])}
    return {
        "study": "tried",
        "levels": {"distinct": 8},
        "planned": CHANGES,
        "machine": machine,
        "made_with": made_with,
        "recipes": recipes,
        **changes,
    }


def seed(solved):
    return {"seed": 4, "sampled": [solved, 8], "greedy": [5, 8], "spent": 1.0, "iterations": 9}


def test_a_table_grows_by_the_rows_of_earlier_commands():
    """In the order of the plan, whoever made them; a recipe that was run again replaces its older row."""
    old, new = compared("rloo", "dr_grpo", cores=4), compared("opo", "rloo")
    joined = join_recipes(new, old, {})
    assert [recipe["name"] for recipe in joined["recipes"]] == ["", "rloo", "opo", "dr_grpo"]
    assert joined["made_with"] == {
        "tried-seed4": {"cores": 2, "commit": "c2"},
        "tried-seed4-opo": {"cores": 2, "commit": "c2"},
        "tried-seed4-rloo": {"cores": 2, "commit": "c2"},
        "tried-seed4-dr_grpo": {"cores": 4, "commit": "c4"},
    }
    assert (joined["machine"]["cores"], joined["machine"]["commit"]) == ([2, 4], ["c2", "c4"])
    assert join_recipes(old, old, {}) == old


@pytest.mark.parametrize(
    ("changes", "hashes", "named"),
    [
        ({"planned": {**CHANGES, "dr_grpo": {"grpo": {"advantage": "grpo"}}}}, {"f.py": "1"}, "have changed"),
        ({}, {"f.py": "2"}, "have changed"),
        ({}, {}, "have changed"),
        ({"planned": {"rloo": CHANGES["rloo"]}}, {"f.py": "1"}, "does not plan it"),
        ({"solved": 7}, {"f.py": "1"}, "compared with those of other runs"),
        ({"levels": {"distinct": 9}}, {"f.py": "1"}, "compared with those of other runs"),
        ({}, {"f.py": "1"}, None),
    ],
)
def test_rows_that_cannot_stand_beside_the_new_ones_are_named(changes, hashes, named, caplog):
    new, old = compared("rloo", **changes), compared("dr_grpo", cores=4, code={"f.py": "1"})
    with caplog.at_level("WARNING"):
        joined = join_recipes(new, old, {"dr_grpo": hashes})
    assert [recipe["name"] for recipe in joined["recipes"]] == ["", "rloo", *([] if named else ["dr_grpo"])]
    assert [named in message and "dr_grpo" in message for message in caplog.messages] == [True] * bool(named)
