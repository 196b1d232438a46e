"""Data settings have an id: what one command makes never reaches a run that it was not made for.

The cases are commands as somebody types them, on one finished run, after other commands have made other data.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pandas as pd
import pytest

from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.runs.fingerprint import hash_rows
from geo_sokoban_pipeline.runs.storage import read_json
from runs import ROOT, finish, kedro_command

pytestmark = pytest.mark.slow

FEW = {"train": 16, "validation": 4, "eval": 8}
OTHER = "sokoban.boxes=2,sokoban.height=8,sokoban.width=8,sokoban.instruction=full"


def data_folder(project):
    return project.root / "05_model_input" / "sokoban"


def data_id(project, run="train_sokoban", run_id="default"):
    return read_json(project.folder("06_models", run, run_id) / "data.json")["id"]


def counts(project, run, run_id="default"):
    """Mode, solved and played levels of the last policy with true images."""
    summary = read_json(project.folder("08_reporting", run, run_id) / "eval_summary.json")
    last = summary["policies"][-1]
    return [(row["mode"], row["solved"], row["episodes"]) for row in summary["rows"] if row["policy"] == last]


@pytest.fixture(scope="module")
def other_data(finished_run, tmp_path_factory):
    """The finished run, after somebody has made data with other settings."""
    project = finished_run.clone(tmp_path_factory.mktemp("other") / "data")
    project.succeed("--pipelines=data_sokoban", f"--params={OTHER}")
    return project


# The data of the run


def test_evaluation_after_other_data_were_made_gives_the_numbers_of_the_report(other_data, caplog):
    newest = read_json(data_folder(other_data) / "newest.json")["id"]
    assert newest.startswith("8x8-2box-generate-") and newest != data_id(other_data)
    with caplog.at_level("INFO"):
        other_data.succeed("--pipelines=evaluate_sokoban")
    assert counts(other_data, "evaluate_sokoban") == counts(other_data, "train_sokoban")
    one, other = (
        read_json(other_data.folder("08_reporting", run) / "eval_summary.json")
        for run in ("evaluate_sokoban", "train_sokoban")
    )
    assert (one["data_id"], one["prompts_hash"]) == (other["data_id"], other["prompts_hash"])
    assert one["data_id"] == data_id(other_data) == data_id(other_data, "evaluate_sokoban")
    line = f"evaluate_sokoban works on train_sokoban/default, checkpoint 2 (latest), data {one['data_id']}"
    assert line in caplog.text
    assert "other settings" not in caplog.text


def test_settings_that_changed_in_a_file_do_not_reach_a_stored_run(other_data, tmp_path, caplog):
    """The refusal has the parameters of the run; with them a rollout makes the data of its run again and plays them."""
    conf = tmp_path / "conf"
    subprocess.run(["cp", "-r", str(ROOT / "conf"), str(conf)], check=True)
    (conf / "test" / "parameters" / "sokoban.yml").write_text(
        "sokoban: {boxes: 2, max_solution: 4, counts: {train: 64, validation: 16, eval: 32}}"
    )
    words = ("--pipelines=rollout_sokoban", f"--conf-source={conf}")
    line = other_data.refused(*words)
    assert f"was made with the data {data_id(other_data)}, but the parameters describe 6x6-2box-generate-" in line
    (given,) = re.findall("give --params (.*?)[.] To try", line)
    assert given == "sokoban.boxes=1"
    with caplog.at_level("INFO"):
        other_data.succeed(*words, f"--params={given},train_sokoban.grpo.groups=2")
    assert f"data {data_id(other_data)}" in caplog.text
    assert data_id(other_data, "rollout_sokoban") == data_id(other_data)
    assert not list(data_folder(other_data).glob("6x6-2box-*"))


@pytest.mark.parametrize("pipeline", ["evaluate", "rollout", "update", "control"])
def test_parameters_that_describe_other_data_than_the_run_has_are_refused(other_data, pipeline):
    line = other_data.refused(f"--pipelines={pipeline}_sokoban", "--params=sokoban.boxes=2")
    assert f"{pipeline}_sokoban: train_sokoban/default was made with the data {data_id(other_data)}, but" in line
    wanted = r"the parameters describe 6x6-2box-generate-\w{8}\. To work on .* give --params sokoban\.boxes=1\. To try"
    assert re.search(wanted, line)


def test_the_same_parameters_again_are_no_others(other_data):
    """What a study gives its members: the whole section, equal to that of the run."""
    words = ("--pipelines=update_sokoban", "--params=sokoban.max_solution=4,sokoban.cell_px=16")
    other_data.succeed(*words)


def test_a_policy_from_elsewhere_plays_the_data_of_the_settings(other_data, caplog):
    folder = other_data.folder("06_models") / "final_policy"
    given = f"run_id=two,evaluate_sokoban.source.checkpoint={folder},{OTHER},train_sokoban.evaluation.prompts=2"
    with caplog.at_level("INFO"):
        other_data.succeed("--pipelines=evaluate_sokoban", f"--params={given}")
    summary = read_json(other_data.folder("08_reporting", "evaluate_sokoban", "two") / "eval_summary.json")
    (made,) = data_folder(other_data).glob("8x8-2box-*")
    assert summary["data_id"] == made.name
    assert (
        f"works on the policy {folder}, which has no data of its own; data of the settings: {made.name}" in caplog.text
    )


LEVELS = ["#####\n#@$.#\n#####", "######\n#@ $.#\n######", "#######\n#@  $.#\n#     #\n#######"]
ONE_BATCH = ",".join(f"train_sokoban.evaluation.{name}=false" for name in ("greedy", "blank_images"))


@pytest.fixture
def own_levels(tmp_path):
    """Parameters of a command that names a file of levels."""
    path = tmp_path / "my levels.txt"
    path.write_text("\n-----\n".join(LEVELS))
    return f"sokoban.source=file,sokoban.file.path={path},{ONE_BATCH}"


def test_a_stored_policy_plays_all_levels_of_a_file_in_one_command(clone, own_levels):
    words = ("--pipelines=data_sokoban,evaluate_sokoban", f"--params={own_levels}")
    clone.succeed(*words)
    summary = read_json(clone.folder("08_reporting", "evaluate_sokoban") / "eval_summary.json")
    assert (summary["prompts"], summary["data_id"]) == (3, data_id(clone, "evaluate_sokoban"))
    assert summary["data_id"] != data_id(clone)


def test_the_hint_for_missing_tables_of_a_file_makes_them(clone, own_levels):
    """From another environment, too: the hint has the parameters of the command."""
    line = clone.refused("--pipelines=evaluate_sokoban", f"--params={own_levels}")
    (hint,) = re.findall(" kedro run (.*)`", line)
    clone.succeed(*shlex.split(hint))
    (made,) = data_folder(clone).glob("my-levels-file-*")
    assert f"data {made.name}" in line
    rows = pd.read_parquet(made / "eval_prompts.parquet")
    assert [Board.from_text(text) for text in rows["level_xsb"]] == [Board.from_text(text) for text in LEVELS]


def test_rows_that_the_run_was_trained_on_are_not_all_played(clone, own_levels):
    """The command names the file of the run's own data: its training rows would be played. Shares of a command stay."""
    clone.succeed("--pipelines=data_sokoban", f"--params={own_levels}")
    (made,) = data_folder(clone).glob("my-levels-file-*")
    shutil.copy(made / "data.json", clone.folder("06_models"))
    line = clone.refused("--pipelines=evaluate_sokoban", f"--params={own_levels}")
    (given,) = re.findall("give --params (.*?)[.] To try", line)
    assert f"made with the data {made.name}, but" in line and "sokoban.shares.eval=0.22" in given
    words = f"--params={shlex.split(given)[0]},{own_levels}"
    clone.succeed("--pipelines=evaluate_sokoban", words)
    summary = read_json(clone.folder("08_reporting", "evaluate_sokoban") / "eval_summary.json")
    assert (summary["prompts"], summary["data_id"]) == (1, made.name)


def test_data_that_were_deleted_are_made_again_by_the_command_of_the_message(clone):
    gone = data_folder(clone) / data_id(clone)
    before = (gone / "eval_prompts.parquet").read_bytes()
    for path in gone.iterdir():
        path.unlink()
    line = clone.refused("--pipelines=evaluate_sokoban")
    assert f"there are no such tables of the data {gone.name}" in line
    assert f"`GEO_SOKOBAN_DATA_ROOT={clone.root} kedro run --pipelines=data_sokoban --env=test`" in line
    # With other settings in force, the run's are given by the command, and the message names a file that has them.
    words, source = ("--env=slime_exact", "--pipelines=evaluate_sokoban"), "evaluate_sokoban.source.run_id=default"
    (given,) = re.findall("give --params (.*?)[.] To try", clone.refused(*words, f"--params={source}"))
    line = clone.refused(*words, f"--params={source},run_id=again,{shlex.split(given)[0]}")
    (config,) = re.findall(r" kedro run (--config=\S+) --env=slime_exact`", line)
    clone.succeed(config)
    assert (gone / "eval_prompts.parquet").read_bytes() == before


def test_rows_that_came_out_otherwise_are_not_played(clone):
    folder = data_folder(clone) / data_id(clone)
    (folder / "prompts.parquet").write_bytes((folder / "validation_prompts.parquet").read_bytes())
    assert "made again with other rows than it was trained on" in clone.refused("--pipelines=evaluate_sokoban")


def test_a_run_that_notes_no_data_is_refused(clone):
    (clone.folder("06_models") / "data.json").unlink()
    line = clone.refused("--pipelines=evaluate_sokoban")
    assert "the run train_sokoban/default has no data.json" in line
    assert "evaluate_sokoban.source.checkpoint" in line


# The run of the command


def test_a_run_id_names_the_run_that_is_worked_on(clone, caplog):
    for layer in ("06_models", "07_model_output"):
        clone.folder(layer).rename(clone.folder(layer, run_id="seed2"))
    few = "train_sokoban.evaluation.prompts=2"
    with caplog.at_level("INFO"):
        shorter = f"run_id=seed2,{few},train_sokoban.rollout.max_turns=3"
        clone.succeed("--pipelines=evaluate_sokoban", f"--params={shorter}")
        faster = "run_id=seed2,train_sokoban.optimizer.learning_rate=0.002"
        clone.succeed("--pipelines=update_sokoban", f"--params={faster}")
        given = "run_id=copy,update_sokoban.source.run_id=seed2"
        clone.succeed("--pipelines=update_sokoban", f"--params={given}")
    assert "evaluate_sokoban works on train_sokoban/seed2, checkpoint 2 (latest)" in caplog.text
    assert "update_sokoban works on train_sokoban/seed2, trajectories of iteration 2 (the newest)" in caplog.text
    for run, name in (
        ("evaluate", "rollout.max_turns: stored 4, now 3"),
        ("update", "optimizer.learning_rate: stored"),
    ):
        found = [text for text in caplog.messages if f"{run}_sokoban has other settings than train_sokoban/" in text]
        assert len(found) == 1 and name in found[0] and found[0].count("stored") == 1
    summary = read_json(clone.folder("08_reporting", "evaluate_sokoban", "seed2") / "eval_summary.json")
    assert (summary["source"]["run_id"], summary["policies"]) == ("seed2", ["seed2@latest"])
    assert {path.name for path in (clone.root / "06_models" / "update_sokoban").iterdir()} == {"seed2", "copy"}


# Side by side


def test_two_settings_side_by_side_end_with_two_correct_reports(project):
    """Each trains and plays what its own settings give, on the same data root at the same moment."""
    short = (
        "tracking.enabled=false,train_sokoban.warm_start.steps=0,train_sokoban.loop.iterations=1,"
        "train_sokoban.loop.eval_interval=0,train_sokoban.rollout.max_turns=2,train_sokoban.evaluation.greedy=false,"
        "train_sokoban.evaluation.blank_images=false,train_sokoban.evaluation.prompts=4"
    )
    sweep = {
        "seed": {"seed": 7},
        "text": {"seed": 7, "instruction": "<image>Play"},
    }
    few = ",".join(f"sokoban.counts.{split}={count}" for split, count in FEW.items())
    started = []
    for name, given in sweep.items():
        words = ",".join(f"sokoban.{path}={value}" for path, value in given.items())
        params = f"--params=run_id={name},{words},{few},{short}"
        started.append(kedro_command("--pipelines=train_sokoban", params, data_root=project.root))
    for process in started:
        finish(process, timeout=500)
    assert len({data_id(project, run_id=name) for name in sweep}) == 2
    for name, given in sweep.items():
        stored = project.load("sokoban.eval_prompts", params={"sokoban": {"counts": FEW, **given}}).to_dict("records")
        summary = read_json(project.folder("08_reporting", run_id=name) / "eval_summary.json")
        assert summary["data_id"] == data_id(project, run_id=name)
        assert summary["prompts_hash"] == hash_rows(stored[:4])
        played = project.load("train_sokoban.held_out_trajectories@pandas", params={"run_id": name})
        assert set(played["task_id"]) == {row["level_hash"] for row in stored[:4]}
        assert (project.folder("08_reporting", run_id=name) / "report.html").is_file()
