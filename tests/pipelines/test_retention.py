"""A run that keeps less: the same result as a whole one, the same files after kills; what works on them."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from geo_sokoban_pipeline.trajectories.thinning import read_thinning
from kill_hook import kill_at
from runs import Project, assert_same_run, finish, kedro_command, read_run

pytestmark = pytest.mark.slow
WORDS = ",".join(
    f"train_sokoban.loop.retention.{name}={value}"
    for name, value in {"newest": 1, "tokens": "false", "episodes": 2, "images": "run"}.items()
)


@pytest.fixture(scope="module")
def thinned(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("thinned"))
    project.succeed("--pipelines=train_sokoban", f"--params={WORDS}")
    return project


def outputs_of(root):
    return root / "07_model_output/train_sokoban/default"


def parts(root):
    return sorted(outputs_of(root).glob("trajectories/iter=*/part-*.parquet"))


def test_training_is_the_same_and_the_newest_iteration_is_whole(thinned, finished_run):
    whole, less = read_run(finished_run.root), read_run(thinned.root)
    assert (whole["metrics"], whole["weights"], whole["summary"]) == (less["metrics"], less["weights"], less["summary"])
    newest = "trajectories/iter=00002/part-000.parquet"
    assert whole["episodes"][newest] == less["episodes"][newest]
    for kind in ("eval_trajectories", "held_out_trajectories"):
        names = [name for name in whole["episodes"] if name.startswith(kind)]
        assert names and all(whole["episodes"][name] == less["episodes"][name] for name in names)
    for number in (0, 1):
        name = f"trajectories/iter={number:05d}/part-000.parquet"
        ids = [row["trajectory_id"] for row in less["episodes"][name]]
        assert ids == [row["trajectory_id"] for row in whole["episodes"][name]][::2]
        assert all(row["token_ids"] == [] and row["images"] for row in less["episodes"][name])


def test_killed_while_it_thins_it_ends_with_the_same_files(thinned, tmp_path):
    """Killed before and after orders; each command repeats what may be missing."""
    # Saves of an iteration: its episodes, its metrics and checkpoint, then the order to thin.
    for point, arrival in (
        ("after_save:train_sokoban.checkpoints", 5),
        ("before_save:train_sokoban.trajectories", 4),
        ("before_node:*.evaluate_policies", 1),
    ):
        words = ("--pipelines=train_sokoban", f"--params={WORDS}")
        finish(kedro_command(*words, data_root=tmp_path, **kill_at(point, arrival)), expected=-9)
    Project(tmp_path).succeed("--pipelines=train_sokoban", f"--params={WORDS}")
    assert_same_run(read_run(thinned.root), read_run(tmp_path))
    assert [read_thinning(read_trajectories(path).schema) for path in parts(thinned.root)] == [
        read_thinning(read_trajectories(path).schema) for path in parts(tmp_path)
    ]
    images = [
        {path.relative_to(root).as_posix(): path.read_bytes() for path in (outputs_of(root) / "images").rglob("*.png")}
        for root in (thinned.root, tmp_path)
    ]
    assert images[0] == images[1] and images[0]


def test_the_audit_takes_nothing_for_torn(thinned):
    at_the_end = read_json(thinned.folder("08_reporting") / "audit.json")
    assert not [check for check in at_the_end["checks"] if check["findings"]]
    thinned.succeed("--pipelines=audit_sokoban")
    checks = read_json(thinned.folder("08_reporting", "audit_sokoban") / "audit.json")["checks"]
    notes = [note for check in checks if check["check"] == "contract" for note in check["notes"]]
    assert any("episodes are thinned by loop.retention" in note for note in notes)


def test_what_works_on_thinned_episodes(thinned):
    thinned.run("browse_sokoban")
    thinned.run("report_sokoban")
    thinned.run("update_sokoban")  # the newest iteration is whole
    thinned.run("export_sokoban", params={"export_sokoban": {"solved": False, "tables": ["chat"]}})
    chat = thinned.load("export_sokoban.export")["chat"]().to_pylist()
    assert len(chat) == sum(read_trajectories(path, ["reward"]).num_rows for path in parts(thinned.root))
    assert all(image["bytes"].startswith(b"\x89PNG") for row in chat for image in row["images"])
    assert len(thinned.load("train_sokoban.trajectories@pandas")) == len(chat)
    chosen = {"solved": False, "tables": ["tokens", "pairs"], "first_iteration": 2}
    thinned.run("export_sokoban", params={"export_sokoban": chosen})
    assert all(len(row["input_ids"]) for row in thinned.load("export_sokoban.export")["tokens"]().to_pylist())


@pytest.mark.parametrize(
    ("command", "params", "sentence"),
    [
        ("update_sokoban", "update_sokoban.source.iteration=0", "update_sokoban needs tokens"),
        ("regrade_sokoban", "regrade_sokoban.source.run_id=default", "regrade_sokoban needs tokens"),
        ("score_sokoban", "score_sokoban.last_iteration=0", "score_sokoban needs tokens"),
        (
            "export_sokoban",
            "export_sokoban.solved=false,export_sokoban.tables=[tokens]",
            "the table tokens needs tokens",
        ),
        ("export_sokoban", "export_sokoban.tables=[pairs]", "the table pairs needs whole groups"),
    ],
)
def test_what_needs_more_ends_with_a_sentence(thinned, command, params, sentence):
    result = thinned.command(f"--pipelines={command}", f"--params={params}")
    assert result.exit_code == 1
    assert sentence in result.output + str(result.exception)
