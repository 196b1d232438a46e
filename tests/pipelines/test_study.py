"""study_sokoban and control_sokoban with `--env=test`, as commands: whole, interrupted, typed again."""

from __future__ import annotations

import shutil

import pytest

from geo_sokoban_pipeline.audit_files import audit_files
from geo_sokoban_pipeline.fingerprint import FingerprintError
from geo_sokoban_pipeline.storage import read_json
from geo_sokoban_pipeline.training.control import ControlError
from runs import ROOT, finish, kedro_command, read_run

pytestmark = pytest.mark.slow

SOURCE = {"run": "train_sokoban", "run_id": "default"}
CONTINUE = "geo_sokoban_pipeline.training.control.continue_warm_start"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study whose run is killed at first and which is then started again: (data root, docs, outputs)."""
    root, place = tmp_path_factory.mktemp("study"), tmp_path_factory.mktemp("project")
    docs = place / "docs"
    docs.mkdir()
    shutil.copyfile(ROOT / "docs" / "learning.md", docs / "learning.md")
    words = ("--pipelines=study_sokoban", f"--params=study.name=long,study.docs={docs}")
    kill = {"GEO_SOKOBAN_EXTRA_HOOKS": "kill_hook:KillHook", "GEO_SOKOBAN_KILL_AT": "update"}
    killed = finish(kedro_command(*words, data_root=root, **kill), expected=1)
    continued = finish(kedro_command(*words, data_root=root))
    return root, docs, killed, continued


def test_a_killed_member_is_named_with_its_log(study):
    root, _, killed, _ = study
    log = root / "08_reporting/studies/long/logs/long-seed0.log"
    assert f"long-seed0 was ended by signal 9; its log is {log}. The last lines:" in killed
    assert "Running node: train_grpo" in log.read_text()
    assert killed.count("Error: long-seed0 was ended") == 1


def test_the_study_goes_on_and_stores_its_results(study):
    root, _, _, continued = study
    assert "long-seed0: goes on" in continued and "long-seed0-longer: started" in continued
    results = read_json(root / "08_reporting/studies/long/results.json")
    (seed,) = results["seeds"]
    assert (seed["minutes"], seed["steps"]) == (None, {"warm_start": 24, "grpo": 2})
    players = {(row["player"], row["mode"]) for row in seed["rows"]}
    assert {("final", "greedy"), ("final_blank", "sampled"), ("teacher", "-"), ("solver", "-")} <= players
    assert [len(seed["curves"][stage]) for stage in ("warm_start", "grpo")] == [2, 3]
    (further,) = results["sets"]
    assert further["levels"]["lengths"] == [1, 5]
    assert (further["levels"]["count"], further["levels"]["shared_layouts"]) == (10, 0)
    assert {row["player"] for row in further["seeds"][0]["rows"]} >= {"final", "final_blank", "random_legal"}
    configs = root / "08_reporting/studies/long/configs"
    assert read_json(configs / "long-seed0.json")["run"]["params"]["train_sokoban"]["threads"] == 1


def test_docs_are_written_between_their_markers(study):
    _, docs, _, _ = study
    page = (docs / "learning.md").read_text()
    assert "| **after GRPO, sampled** |" in page.partition("<!-- study:long:begin -->")[2]
    assert "<!-- study:default:begin -->\n\n<!-- study:default:end -->" in page
    assert (docs / "results" / "long.json").is_file() and (docs / "img" / "learning_long.svg").is_file()


def test_a_finished_study_starts_nothing(study):
    root, docs, _, _ = study
    before = {path: path.stat().st_mtime_ns for path in root.glob("0[67]_*/**/*") if path.is_file()}
    output = finish(kedro_command("--pipelines=study_sokoban", "--params=study.name=long", data_root=root))
    assert "long-seed0" not in output
    # The lock of the study itself is taken again.
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert all("study_sokoban" in path.parts for path in changed)


def test_missing_docs_stop_before_any_run(project, tmp_path):
    result = project.command("--pipelines=study_sokoban", f"--params=study.docs={tmp_path / 'none'}")
    assert result.exit_code == 1
    assert f"there is no {tmp_path / 'none' / 'learning.md'}. Give the folder of the docs, or null." in result.output
    assert not (project.root / "06_models" / "train_sokoban").exists()


@pytest.mark.parametrize("imitate", ["teacher", "optimal"])
def test_control_of_a_finished_run(clone, count_calls, imitate):
    continued = count_calls(CONTINUE)
    source = read_run(clone.root)
    parameters = {"control_sokoban": {"source": SOURCE, "imitate": imitate}, "run_id": f"default-{imitate}"}
    clone.run("control_sokoban", params=parameters)
    folder = clone.folder("06_models", "control_sokoban", f"default-{imitate}") / "policy"
    manifest = read_json(folder / "manifest.json")
    budget = manifest["budget"]
    assert manifest["history"][-1]["step"] == budget["steps"] > 0
    assert budget["steps"] >= budget["grpo_cpu_seconds"] / budget["cpu_seconds_per_step"]
    ((_, start, rows, _, options, _, planned),) = continued
    assert planned.first == 24 * 8  # after the last demonstration of the warm start
    assert start.name == "policy" and (start / "optimizer.safetensors").is_file()
    assert options.warm_start.teacher.name == ("solver" if imitate == "optimal" else "direct")
    if imitate == "optimal":
        drawn = {row["task_id"] for part in source["episodes"].values() for row in part if row["iteration"] < 3}
        assert {row["level_hash"] for row in rows} <= drawn
        assert len(rows) == 3 * 4  # groups of all iterations, with multiplicity
    summary = clone.load("control_sokoban.eval_summary", params=parameters)
    assert [(row["policy"], row["mode"]) for row in summary["rows"]] == [
        (f"control_{imitate}", "sampled"),
        (f"control_{imitate}", "greedy"),
    ]
    assert (summary["prompts"], summary["layouts"]) == (source["summary"]["prompts"], source["summary"]["layouts"])
    assert audit_files(folder.parent) == []

    # Again: the stored policy is taken; with another share it is another control.
    clone.run("control_sokoban", params=parameters)
    assert len(continued) == 1
    parameters["control_sokoban"]["share"] = 3.0
    with pytest.raises(FingerprintError, match=r"control\.steps: stored"):
        clone.run("control_sokoban", params=parameters)


def test_a_run_without_measured_seconds_has_no_control(clone):
    for path in (clone.folder("07_model_output") / "metrics").glob("*.json"):
        path.write_text('{"iteration": 0}')
    with pytest.raises(ControlError, match=r"no iterations with perf/cpu_time"):
        clone.run("control_sokoban", params={"control_sokoban": {"source": SOURCE}})
