"""study_sokoban and control_sokoban with `--env=test`, as commands: whole, interrupted, typed again."""

from __future__ import annotations

import json
import shutil

import pytest

from geo_sokoban_pipeline.evaluation.audit import audit_files
from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.runs.fingerprint import FingerprintError
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training.sft import ControlError
from kill_hook import kill_at
from runs import ROOT, finish, kedro_command, read_run

pytestmark = pytest.mark.slow

SOURCE = {"run": "train_sokoban", "run_id": "default"}
CONTINUE = "geo_sokoban_pipeline.training.sft.continue_warm_start"
TIME = "geo_sokoban_pipeline.training.sft.time_steps"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study whose run is killed at first and which is then started again: (data root, docs, outputs)."""
    root, place = tmp_path_factory.mktemp("study"), tmp_path_factory.mktemp("project")
    docs = place / "docs"
    docs.mkdir()
    shutil.copyfile(ROOT / "docs" / "learning.md", docs / "learning.md")
    shutil.copyfile(ROOT / "README.md", place / "README.md")
    words = ("--pipelines=study_sokoban", f"--params=study.name=long,study.docs={docs}")
    killed = finish(kedro_command(*words, data_root=root, **kill_at(f"{Event.UPDATE}:*")), expected=1)
    continued = finish(kedro_command(*words, data_root=root))
    return root, docs, killed, continued


def test_a_killed_study_goes_on_and_stores_its_results(study):
    root, _, killed, continued = study
    log = root / "08_reporting/studies/long/logs/long-seed0.log"
    assert f"long-seed0 was ended by signal 9; its log is {log}. The last lines:" in killed
    assert "Running node: train_grpo" in log.read_text()
    assert killed.count("Error: long-seed0 was ended") == 1
    assert "long-seed0: goes on" in continued and "long-seed0-longer: started" in continued
    results = read_json(root / "08_reporting/studies/long/results.json")
    (seed,) = results["seeds"]
    assert results["chosen_on"] == [0, 1, 2]
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


def section(page: str, name: str) -> str:
    """What stands between the markers of one study."""
    _, begin, rest = page.partition(f"<!-- study:{name}:begin -->")
    text, end, _ = rest.partition(f"<!-- study:{name}:end -->")
    assert begin and end, name
    return text


def test_docs_are_written_between_their_markers(study):
    _, docs, _, _ = study
    page = (docs / "learning.md").read_text()
    assert "| **after GRPO, sampled** |" in section(page, "long")
    assert section(page, "default") == section((ROOT / "docs" / "learning.md").read_text(), "default")
    line = (docs.parent / "README.md").read_text().partition("<!-- readme:long:begin -->")[2]
    assert "** (95 % interval over clusters) after GRPO, seed 0, with which the recipe was also chosen." in line
    assert (docs / "results" / "long.json").is_file() and (docs / "img" / "learning_long.svg").is_file()


def test_a_finished_study_starts_nothing(study):
    root, docs, _, _ = study
    before = {path: path.stat().st_mtime_ns for path in root.glob("0[67]_*/**/*") if path.is_file()}
    output = finish(kedro_command("--pipelines=study_sokoban", "--params=study.name=long", data_root=root))
    assert "long-seed0" not in output
    # The lock of the study itself is taken again.
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert all("study_sokoban" in path.parts for path in changed)


def test_a_data_root_that_ignores_the_variable_is_refused(project, tmp_path):
    """Members with levels of their own would write them over the shared ones."""
    conf = tmp_path / "conf"
    shutil.copytree(ROOT / "conf", conf)
    (conf / "test" / "globals.yml").write_text(f"data_root: {tmp_path / 'fixed'}\n")
    words = ("--pipelines=study_sokoban", f"--conf-source={conf}")
    result = project.command(*words, "--params=study.name=long")
    assert result.exit_code == 1
    place = tmp_path / "fixed" / "studies" / "long" / "longer"
    assert (
        f"does not follow GEO_SOKOBAN_DATA_ROOT. A run of this study belongs into {place}, but would" in result.output
    )
    assert f"write into {tmp_path / 'fixed'}. Write `data_root: ${{oc.env:GEO_SOKOBAN_DATA_ROOT, " in result.output
    assert not (tmp_path / "fixed" / "06_models" / "train_sokoban").exists()


def control(imitate, **options):
    return {"control_sokoban": {"source": SOURCE, "imitate": imitate, **options}, "run_id": f"default-{imitate}"}


@pytest.mark.parametrize(("imitate", "teacher"), [("teacher", "direct"), ("optimal", "solver")])
def test_control_of_a_finished_run(clone, count_calls, imitate, teacher):
    continued = count_calls(CONTINUE)
    source = read_run(clone.root)
    # The teacher's control has the compute of GRPO, as a study asks for it.
    share = {} if imitate == "teacher" else {"share": 0.2}
    clone.run("control_sokoban", params=control(imitate, **share))
    folder = clone.folder("06_models", "control_sokoban", f"default-{imitate}") / "policy"
    manifest = read_json(folder / "manifest.json")
    budget = manifest["budget"]
    assert manifest["history"][-1]["step"] == budget["steps"] > 0
    assert budget["steps"] >= budget["grpo_cpu_seconds"] * share.get("share", 1.0) / budget["cpu_seconds_per_step"]
    assert read_json(folder.parent / "budget.json")["budget"] == budget
    ((_, start, rows, _, options, _, planned, _),) = continued
    assert planned.first == 24 * 8  # after the last demonstration of the warm start
    assert start.name == "policy" and (start / "optimizer.safetensors").is_file()
    assert options.warm_start.teacher.name == teacher
    if imitate == "optimal":
        drawn = {row["task_id"] for part in source["episodes"].values() for row in part if row["iteration"] < 3}
        assert {row["level_hash"] for row in rows} <= drawn
        assert len(rows) == 3 * 4  # groups of all iterations, with multiplicity
    summary = clone.load("control_sokoban.eval_summary", params=control(imitate))
    assert [(row["policy"], row["mode"]) for row in summary["rows"]] == [
        (f"control_{imitate}", "sampled"),
        (f"control_{imitate}", "greedy"),
    ]
    assert (summary["prompts"], summary["layouts"]) == (source["summary"]["prompts"], source["summary"]["layouts"])
    assert audit_files(folder.parent) == []


def test_a_control_is_made_once_and_again_where_it_is_lost(clone, count_calls):
    continued, timed = count_calls(CONTINUE), count_calls(TIME)
    folder = clone.folder("06_models", "control_sokoban", "default-teacher") / "policy"
    small, made = control("teacher", share=0.2), {"to_nodes": ["control_sokoban.continue_sft"]}
    for calls in (1, 1):  # again: the stored policy is taken
        clone.run("control_sokoban", small, **made)
        assert len(continued) == len(timed) == calls
    # Lost, it is made again with the stored number of steps, whatever a step costs now: the same policy, bit for bit.
    weights = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder)
    clone.run("control_sokoban", small, **made)
    assert (len(continued), len(timed)) == (2, 1)
    assert (folder / "model.safetensors").read_bytes() == weights
    # GRPO of the run has taken longer since, or was run again: another control. So is one with another share.
    row = clone.folder("07_model_output") / "metrics" / "iter=00001.json"
    stored = row.read_text()
    row.write_text(json.dumps({**json.loads(stored), "perf/cpu_time": 100.0}))
    with pytest.raises(FingerprintError, match=r"input\.grpo_cpu_seconds: stored"):
        clone.run("control_sokoban", small)
    row.write_text(stored)
    with pytest.raises(FingerprintError, match=r"control\.share: stored 0\.2, now 3\.0"):
        clone.run("control_sokoban", control("teacher", share=3.0))


def test_a_run_that_is_not_finished_or_not_measured_has_no_control(clone):
    rows = list((clone.folder("07_model_output") / "metrics").glob("*.json"))
    whole = {path: path.read_text() for path in rows}
    for path in rows:
        path.write_text('{"iteration": 0}')
    with pytest.raises(ControlError, match=r"no iterations with perf/cpu_time"):
        clone.run("control_sokoban", params={"control_sokoban": {"source": SOURCE}})
    for path, text in whole.items():
        path.write_text(text)
    (clone.folder("06_models") / "checkpoints" / "COMPLETE.json").unlink()
    with pytest.raises(ControlError, match="is not finished"):
        clone.run("control_sokoban", params={"control_sokoban": {"source": SOURCE}})
