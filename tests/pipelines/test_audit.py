"""audit_*: a stored run keeps its guarantees, and whatever breaks one is found and named."""

from __future__ import annotations

import numpy as np
import pytest
from kedro.io import DatasetError

from geo_sokoban_pipeline.evaluation.audit import AuditError
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories, write_trajectories
from geo_sokoban_pipeline.trajectories.schema import read_context
from geo_sokoban_pipeline.trajectories.types import table_to_trajectories, trajectories_to_table
from runs import read_run

pytestmark = pytest.mark.slow

PART = "iter=00001/part-000"


def audit_of(project):
    return read_json(project.folder("08_reporting", "audit_sokoban") / "audit.json")


def change_episode(path, change):
    """Write a part again with its first episode changed; the contract is not asked."""
    table = read_trajectories(path)
    episodes = table_to_trajectories(table)
    change(episodes[0])
    write_trajectories(path, trajectories_to_table(episodes, read_context(table.schema)))


def test_a_finished_run_has_no_findings(clone):
    before = read_run(clone.root)
    clone.run("audit_sokoban")
    audit = audit_of(clone)
    assert (audit["run"], audit["run_id"], audit["findings"]) == ("train_sokoban", "default", 0)
    checked = {(check["check"], check["subject"]): check["checked"] for check in audit["checks"]}
    for kind in ("contract", "token parity"):
        assert checked[kind, "train_sokoban.trajectories"] == 48
    assert all(count > 0 for count in checked.values())
    assert {name for kind, name in checked if kind == "files"} == {"06_models", "07_model_output", "08_reporting"}
    assert read_run(clone.root) == before


def test_findings_end_the_command_with_exit_code_1(clone):
    (clone.folder("06_models", "train_sokoban") / "extra.pkl").write_bytes(b"x")
    result = clone.command("--pipelines=audit_sokoban")
    assert result.exit_code == 1
    assert "train_sokoban/default: 1 finding(s); first, files of 06_models: extra.pkl: suffix '.pkl'" in result.output
    assert audit_of(clone)["findings"] == 1, "the findings are stored before they are judged"


def change_token(episode):
    turn = next(turn for turn in episode.turns if turn.role == "user")
    episode.token_ids = np.array(episode.token_ids)
    episode.token_ids[turn.token_start] += 1


def change_text(episode):
    turn = next(turn for turn in episode.turns if turn.role == "assistant")
    turn.text += "!"


def change_mask(episode):
    episode.loss_mask = np.array(episode.loss_mask)
    episode.loss_mask[0] = 1


@pytest.mark.parametrize(
    ("change", "check", "found"),
    [
        (change_token, "token parity", "ids: stored"),
        (change_text, "token parity", "response text: stored"),
        (change_mask, "contract", "loss_mask"),
    ],
)
def test_a_changed_episode_is_found(clone, change, check, found):
    folder = clone.folder("07_model_output", "train_sokoban") / "trajectories"
    change_episode(folder / f"{PART}.parquet", change)
    with pytest.raises(AuditError, match=f"{check} of train_sokoban.trajectories: {PART}"):
        clone.run("audit_sokoban")
    (finding,) = (one for row in audit_of(clone)["checks"] for one in row["findings"])
    assert found in finding


def test_a_damaged_checkpoint_is_found(clone):
    path = clone.folder("06_models", "train_sokoban") / "checkpoints" / "iter=00001" / "config.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(AuditError, match="digests of checkpoints: iter=00001"):
        clone.run("audit_sokoban")


def test_a_run_that_has_not_begun_cannot_be_audited(project):
    with pytest.raises(DatasetError, match="policy"):
        project.run("audit_sokoban")
