"""audit_*: a stored run keeps its guarantees, and whatever breaks one is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kedro.io import DatasetError

from geo_sokoban_pipeline.config.study import AuditOptions
from geo_sokoban_pipeline.datasets.tables import FrameDataset
from geo_sokoban_pipeline.envs.inspection import TABLES
from geo_sokoban_pipeline.evaluation.audit import (
    AuditCheck,
    AuditedEntry,
    RunRules,
    audit_entries,
    audit_splits,
    entries_of_run,
)
from geo_sokoban_pipeline.policies.policy import Policy, load_encoding, load_policy, save_policy
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training.audit_scores import audit_scores
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories, write_trajectories
from geo_sokoban_pipeline.trajectories.schema import read_context
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories, trajectories_to_table
from runs import TRAJECTORY_KINDS, read_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]

PART = "iter=00001/part-000"
Change = Callable[[list[Trajectory]], None]


@dataclass(frozen=True)
class StoredRun:
    """A run of train_sokoban as the audit sees it."""

    models: Path
    outputs: Path
    data: Path

    @cached_property
    def policy(self) -> Policy:
        return load_encoding(self.models / "policy")

    @cached_property
    def rules(self) -> RunRules:
        return RunRules.of(read_json(self.models / "checkpoints" / "iter=00001" / "manifest.json"))

    @cached_property
    def splits(self) -> dict[str, Any]:
        frames = {name: FrameDataset(path=str(self.data / f"{name}.parquet")) for name in TABLES.values()}
        return {name: frame.load().to_dict("records") for name, frame in frames.items()}

    @cached_property
    def entries(self) -> dict[str, AuditedEntry]:
        parts = []
        for kind in TRAJECTORY_KINDS:
            files = sorted((self.outputs / kind).glob("iter=*/part-*.parquet"))
            parts.append({f"{file.parent.name}/{file.stem}": reader(file) for file in files})
        entries = entries_of_run("train_sokoban", parts, self.splits, iterations=3)
        return dict(zip(TRAJECTORY_KINDS, entries, strict=True))

    @property
    def policies(self) -> dict[int, Path]:
        checkpoints = {number + 1: self.models / "checkpoints" / f"iter={number:05d}" for number in range(3)}
        return {0: self.models / "policy", **checkpoints}

    def changed(self, change: Change, kind: str = "trajectories", part: str = PART) -> AuditedEntry:
        """An entry with one part, of which the episodes are changed; the contract is not asked."""
        table = self.entries[kind].parts[part]()
        episodes = table_to_trajectories(table)
        change(episodes)
        made = trajectories_to_table(episodes, read_context(table.schema))
        select = lambda columns=None: made if columns is None else made.select(columns)  # noqa: E731
        return replace(self.entries[kind], parts={part: select}, iterations=None)

    def audit(self, entry: AuditedEntry) -> dict[str, AuditCheck]:
        """The checks with findings."""
        return with_findings(audit_entries([entry], self.policy, self.rules))


def reader(file: Path) -> Callable[..., Any]:
    return lambda columns=None: read_trajectories(file, columns)


def with_findings(checks: list[AuditCheck]) -> dict[str, AuditCheck]:
    return {check.check: check for check in checks if check.findings}


@pytest.fixture(scope="module")
def stored(finished_run) -> StoredRun:
    models, outputs = (finished_run.folder(layer) for layer in ("06_models", "07_model_output"))
    (data,) = finished_run.root.glob("05_model_input/sokoban/*/")
    return StoredRun(models, outputs, data)


def audit_of(project, task="sokoban"):
    return read_json(project.folder("08_reporting", f"audit_{task}") / "audit.json")


# The whole pipeline.


@pytest.mark.parametrize("task", ["sokoban", "geo3k_multi_turn"])
def test_a_finished_run_has_no_findings(stored_run, task):
    project = stored_run(task)
    before = read_run(project.root, f"train_{task}")
    project.run(f"audit_{task}", {"audit": {"scored_share": 0.2}})
    audit = audit_of(project, task)
    assert (audit["run"], audit["run_id"], audit["findings"]) == (f"train_{task}", "default", 0)
    checked = {(check["check"], check["subject"]): check["checked"] for check in audit["checks"]}
    for kind in ("contract", "token parity", "response ends", "image grids", "advantages", "replay"):
        assert checked[kind, f"train_{task}.trajectories"] == 48
    assert all(count > 0 for count in checked.values())
    assert {name for kind, name in checked if kind == "files"} == {"06_models", "07_model_output", "08_reporting"}
    assert read_run(project.root, f"train_{task}") == before


def test_findings_end_the_command_with_exit_code_1(clone):
    (clone.folder("06_models", "train_sokoban") / "extra.pkl").write_bytes(b"x")
    torn = clone.folder("07_model_output", "train_sokoban") / "trajectories" / f"{PART}.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    damaged = clone.folder("06_models", "train_sokoban") / "checkpoints" / "iter=00001" / "config.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"1", b"2", 1))
    line = clone.refused("--pipelines=audit_sokoban", "--params=audit.versions=0")
    assert "train_sokoban/default: 4 finding(s); first, contract of train_sokoban.trajectories" in line
    audit = audit_of(clone)
    found = [(check["check"], finding) for check in audit["checks"] for finding in check["findings"]]
    for check, text in (
        ("contract", f"{PART}: "),
        ("digests", "iter=00001: "),
        ("files", "extra.pkl: suffix '.pkl'"),
        ("files", f"trajectories/{PART}.parquet: its format's reader refuses it"),
    ):
        assert any(kind == check and text in finding for kind, finding in found), (check, found)


def test_findings_are_in_the_report_of_the_run(clone):
    """With the ids of the episodes, and links where the run has a site."""
    path = clone.folder("07_model_output", "train_sokoban") / "trajectories" / f"{PART}.parquet"
    table = read_trajectories(path)
    name = table["trajectory_id"][3].as_py()
    place = table.schema.get_field_index("reward")
    rewards = table["reward"].to_pylist()
    rewards[3] += 1.0
    table = table.set_column(place, table.schema.field(place), pa.array(rewards))
    write_trajectories(path, table)
    clone.run("browse_sokoban")
    assert clone.command("--pipelines=audit_sokoban", "--params=audit.versions=0").exit_code == 1
    clone.run(from_nodes=["train_sokoban.write_report"])
    page = (clone.folder("08_reporting") / "report.html").read_text(encoding="utf-8")
    section = page.split('<section id="audit">')[1].split("</section>")[0]
    assert "Looked at all episodes" in section and "after 3 iterations" in section
    address = f"../../browse_sokoban/default/site/index.html#/episode?run=train_sokoban/default&amp;id={name}"
    assert f'<a href="{address}">{name}</a>' in section


def test_a_run_that_has_not_begun_cannot_be_audited(project):
    with pytest.raises(DatasetError, match="policy"):
        project.run("audit_sokoban")


# Planted defects, one each, in episodes that otherwise keep the contract where that is possible.


def response_of(episode: Trajectory, number: int = 0) -> Any:
    return [turn for turn in episode.turns if turn.role == "assistant"][number]


def pick(episodes: list[Trajectory], turns: int = 2) -> Trajectory:
    """The first episode with so many responses."""
    return next(one for one in episodes if one.reward is not None and one.metrics["turns"] >= turns)


def splice(episode: Trajectory, place: int, removed: int, added: list[int], mask: int) -> None:
    """Replace tokens in front of a turn, and move everything behind them."""
    shift = len(added) - removed
    episode.token_ids = np.concatenate(
        [episode.token_ids[:place], np.array(added, np.int32), episode.token_ids[place + removed :]]
    )
    filling = np.full(len(added), mask)
    for name, values in (("loss_mask", filling), ("rollout_log_probs", -0.1 * filling)):
        old = getattr(episode, name)
        setattr(episode, name, np.concatenate([old[:place], values, old[place + removed :]]).astype(old.dtype))
    episode.old_log_probs = None
    for turn in episode.turns:
        turn.token_start += shift if turn.token_start >= place + removed else 0
        turn.token_end += shift if turn.token_end >= place + removed else 0
    episode.weight_spans = [
        (version, start, end + shift if end >= place + removed else end) for version, start, end in episode.weight_spans
    ]


def edit(find: Callable[[list[Trajectory]], Any], name: str, new: Callable[[Any], Any]) -> Change:
    """Another value of an attribute of what is found among the episodes."""

    def change(episodes):
        setattr(find(episodes), name, new(getattr(find(episodes), name)))

    return change


def first(episodes):
    return episodes[0]


def first_response(episodes):
    return response_of(episodes[0])


def picked_response(episodes):
    return response_of(pick(episodes))


def with_several_images(episodes):
    return next(one for one in episodes if len(set(one.images)) > 1)


def other_order(images):
    return images[::-1] if images != images[::-1] else sorted(images)


def changed_token(episodes):
    episodes[0].token_ids[episodes[0].turns[0].token_start] += 1


def dropped_newline(episodes):
    episode = pick(episodes)
    splice(episode, episode.turns[2].token_start, 1, [], 0)


def doubled_end(episodes):
    episode = pick(episodes)
    end = response_of(episode).token_end
    splice(episode, end - 1, 1, [int(episode.token_ids[end - 1])] * 2, 1)


def missing_end(episodes):
    episode = pick(episodes)
    splice(episode, response_of(episode).token_end - 1, 1, [], 1)


def wrong_grid(episodes):
    time, height, width = episodes[0].image_grid_thw[0]
    episodes[0].image_grid_thw[0] = (time, height * 2, width // 2)  # as many patches


def changed_reward(episodes):
    episode = pick(episodes)
    episode.reward += 1.0
    response_of(episode).credit += 1.0


def changed_part(episodes):
    episodes[0].reward_parts["final_bonus"] += 1.0


def lost_episode(episodes):
    del episodes[5]


def lost_turn(episodes):
    episode = pick(episodes)
    episode.turns = [*episode.turns[:1], *episode.turns[3:]] if len(episode.turns) > 3 else episode.turns[:1]


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (edit(pick, "loss_mask", lambda mask: np.roll(mask, 1)), "contract", "loss_mask"),
        (changed_token, "token parity", "turn 0: ids: stored"),
        (dropped_newline, "token parity", "turn 2: ids: stored"),
        (doubled_end, "response ends", "response 0: an end token at"),
        (missing_end, "response ends", "response 0: no end token"),
        (edit(first_response, "text", lambda text: f"{text}!"), "token parity", "turn 1: response text: stored"),
        (edit(with_several_images, "images", other_order), "replay", "shows something else"),
        (wrong_grid, "image grids", "image 0: image_grid_thw is"),
        (changed_reward, "replay", "reward: stored"),
        (changed_reward, "advantages", "with turns that add up to"),
        (changed_part, "replay", "reward_parts, final_bonus: stored"),
        (edit(first_response, "reward", lambda reward: reward + 0.5), "replay", "turn 1, reward: stored"),
        (edit(picked_response, "action", lambda _: "up,up"), "replay", "turn 1, action: stored 'up,up'"),
        (
            edit(picked_response, "advantage", lambda advantage: advantage + 0.25),
            "advantages",
            "advantage of response 0: stored",
        ),
        (edit(first, "trained", lambda trained: not trained), "advantages", "trained: stored"),
        (lost_episode, "groups", "group 1 has the samples"),
        (edit(first, "task_id", lambda _: "0" * 32), "replay", "is no prompt of this split"),
        (lost_turn, "contract", "turns"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_planted_defect_is_found(stored, change, check, text):
    found = stored.audit(stored.changed(change))
    assert check in found, found
    assert text in found[check].findings[0]
    if found[check].episodes:
        assert f": {found[check].episodes[0]}: " in f": {found[check].findings[0]}"
    assert all(PART in one or found[check].episodes for one in found[check].findings)


def test_an_unchanged_part_has_no_findings(stored):
    assert stored.audit(stored.changed(lambda _: None)) == {}
    for kind in TRAJECTORY_KINDS:
        assert stored.audit(stored.entries[kind]) == {}


def test_an_advantage_in_an_evaluation_is_found(stored):
    entry = stored.changed(edit(first, "advantage", lambda _: 1.0), "eval_trajectories")
    assert set(stored.audit(entry)) == {"advantages"}


def test_a_lost_iteration_is_found(stored):
    entry = stored.entries["trajectories"]
    parts = {name: read for name, read in entry.parts.items() if name != PART}
    (finding,) = stored.audit(replace(entry, parts=parts))["parts"].findings
    assert finding == "iter=00001 is missing"


def test_an_episode_that_is_stored_twice_is_found(stored):
    entry = stored.entries["trajectories"]
    parts = {PART: entry.parts[PART], "iter=00001/part-001": entry.parts[PART]}
    found = stored.audit(replace(entry, parts=parts, iterations=None))
    assert len(found["contract"].episodes) == 16
    assert "occurs in another part too" in found["contract"].findings[0]


def test_code_that_has_changed_since_is_not_replayed(stored):
    rules = replace(stored.rules, fingerprint={**stored.rules.fingerprint, "reward.function:reward.py": "0"})
    checks = audit_entries([stored.changed(changed_reward)], stored.policy, rules)
    (replay,) = (check for check in checks if check.check == "replay")
    assert (replay.checked, replay.findings) == (0, ())
    assert replay.notes == ("not replayed: reward.function, code in reward.py has changed since",)


def test_a_limit_takes_episodes_of_all_of_training(stored):
    entry = stored.entries["trajectories"]
    checks = {check.check: check for check in audit_entries([entry], stored.policy, stored.rules, limit=32)}
    assert (checks["contract"].checked, checks["replay"].checked) == (32, 32)


# Splits.


def leak(splits, table, column):
    """The splits with a value of the fourth training prompt in the first row of a table."""
    row, *others = splits[table]
    return {**splits, table: [{**row, column: splits["prompts"][3][column]}, *others]}


@pytest.mark.parametrize(
    ("table", "column", "text"),
    [
        ("eval_prompts", "level_hash", "prompts and eval_prompts share 1 rows with the same level_hash"),
        ("eval_prompts", "layout_hash", "prompts and eval_prompts share 1 layouts"),
        ("eval_prompts", "images", "prompts and eval_prompts share 1 rows with the same text and images"),
        ("prompts", "level_hash", "prompts: other rows than the run was trained on"),
    ],
)
def test_a_leak_is_found(stored, table, column, text):
    (check,) = audit_splits(leak(stored.splits, table, column), stored.rules, shared=False)
    assert any(text in finding for finding in check.findings)


def test_layouts_that_the_data_report_names_are_a_note(stored):
    (check,) = audit_splits(leak(stored.splits, "eval_prompts", "layout_hash"), stored.rules, shared=True)
    assert check.findings == ()
    assert "share 1 layouts" in check.notes[0]


# Under the weights.


def score(stored, entry, policies=None, **options):
    options = AuditOptions.model_validate({"scored_share": 0.5, "versions": 4, **options})
    return with_findings(audit_scores([entry], policies or stored.policies, stored.rules, options))


def test_stale_weights_are_found_and_named(stored):
    """Episodes that say version 1 and were sampled by version 0, as after a lost update of the engine's weights."""

    def relabel(episodes):
        for episode in episodes:
            episode.policy_version = 1
            episode.weight_spans = [(1, start, end) for _, start, end in episode.weight_spans]

    found = score(stored, stored.changed(relabel, part="iter=00000/part-000"))
    (finding,) = found["log-probs"].findings
    assert "version 1: mean |stored − recomputed|" in finding
    assert "they are those of version 0" in finding


def test_changed_log_probs_of_an_episode_are_found(stored):
    def change(episodes):
        sampled = episodes[0].loss_mask == 1
        episodes[0].rollout_log_probs = np.where(sampled, episodes[0].rollout_log_probs - 1, 0).astype(np.float32)

    entry = stored.changed(change)
    assert score(stored, entry, scored_share=1.0, log_prob_tolerance=0.2) == {}, "within the tolerance"
    found = score(stored, entry, scored_share=1.0, log_prob_tolerance=0.08)
    (finding,) = found["log-probs"].findings
    assert found["log-probs"].episodes == ("train_sokoban/i00001/g000/s00",)
    assert "worst, -1 at token" in finding
    assert "»" in finding


def test_a_blind_policy_is_found(stored, tmp_path):
    """The last layer of the image features is 0, so every image looks the same to the policy."""
    blind = load_policy(stored.policies[1])
    state = blind.model.state_dict()
    for name, weight in state.items():
        if "visual" in name and "linear_fc2" in name and "merger" in name:
            weight.zero_()
    save_policy(blind, tmp_path / "blind")
    entry = stored.changed(lambda _: None)
    assert score(stored, entry) == {}
    found = score(stored, entry, {1: tmp_path / "blind"})
    (finding,) = found["image effect"].findings
    assert "the policy does not see its images" in finding
