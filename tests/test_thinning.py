"""Thinned episodes: what is left, what readers get, what is refused; orders leave the same files whenever they come."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.config.grpo import GrpoOptions, RetentionOptions
from geo_sokoban_pipeline.config.rollout import RolloutOptions
from geo_sokoban_pipeline.datasets.iterations import TrajectoriesDataset
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.evaluation.audit import (
    AuditCheck,
    AuditedEntry,
    RunRules,
    audit_edits,
    audit_entries,
)
from geo_sokoban_pipeline.grpo.scoring import apply_scores, score_groups
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.runs.storage import CorruptFolderError, Rewind, Thin
from geo_sokoban_pipeline.tasks import task_or_plain
from geo_sokoban_pipeline.training.grpo_loop import thin
from geo_sokoban_pipeline.trajectories.index import index_folder, measure_tokens, read_index
from geo_sokoban_pipeline.trajectories.parquet import name_parts, read_trajectories
from geo_sokoban_pipeline.trajectories.schema import validate_trajectories
from geo_sokoban_pipeline.trajectories.thinning import ThinnedError, read_thinning, refuse_thinned, thin_table
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories, trajectories_to_table
from task_options import EnvOptions, RewardOptions

NAME = "trajectories/iter={:05d}/part-000.parquet"
TOKENS = ("token_ids", "loss_mask", "rollout_log_probs", "weight_spans")


def store(outputs: Path, iterations: int = 3) -> TrajectoriesDataset:
    """Twelve episodes each, groups of four with one, two and three turns; the images of the iterations are the same."""
    dataset = TrajectoriesDataset(str(outputs / "trajectories"), tasks="geo_sokoban_pipeline.tasks.task_or_plain")
    for number in range(iterations):
        made = []
        for group in range(3):
            for episode in make_trajectories(4, turns=1 + group, iteration=number, seed=group):
                name = episode.trajectory_id.replace("/0000/", f"/{group:04d}/")
                made.append(replace(episode, trajectory_id=name, group_index=group, task_id=f"{group:032x}"))
        dataset.save(name_parts(number, made, CONTEXT))
    return dataset


def rows(path: Path) -> list[dict[str, Any]]:
    return read_trajectories(path).to_pylist()


def files(outputs: Path) -> dict[str, bytes]:
    return {path.relative_to(outputs).as_posix(): path.read_bytes() for path in outputs.rglob("*") if path.is_file()}


def order(last: int, first: int = 0, **kept: Any) -> Thin:
    return Thin(first, last, **{"tokens": True, "episodes": 1, "images": "file", **kept})


def index_of(outputs: Path) -> list[dict[str, Any]]:
    """Rows of the index as it is, and as it is made again, which are the same."""
    found = read_index(outputs, task_or_plain).to_pylist()
    shutil.rmtree(index_folder(outputs / "trajectories"))
    assert read_index(outputs, task_or_plain).to_pylist() == found
    return found


def test_tokens_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    dataset = store(tmp_path)
    before, index = rows(tmp_path / NAME.format(0)), index_of(tmp_path)
    dataset.save(order(1, tokens=False))
    table = read_trajectories(tmp_path / NAME.format(0))
    validate_trajectories(table)
    left = {name: [] for name in TOKENS} | {"old_log_probs": None, "ref_log_probs": None, "prompt_length": 0}
    for one, other in zip(before, table.to_pylist(), strict=True):
        turns = [{**turn, "token_start": 0, "token_end": 0} for turn in one["turns"]]
        assert other == {**one, **left, "turns": turns}
    assert read_thinning(table.schema) is not None
    assert read_thinning(pq.read_schema(tmp_path / NAME.format(2))) is None  # the newest stays whole
    assert index_of(tmp_path) == index
    assert (tmp_path / NAME.format(0)).stat().st_size < (tmp_path / NAME.format(2)).stat().st_size


def test_one_episode_of_several_is_kept_with_its_index(tmp_path: Path) -> None:
    dataset = store(tmp_path)
    before, whole = rows(tmp_path / NAME.format(0)), index_of(tmp_path)
    dataset.save(order(1, episodes=4, tokens=False))
    table = read_trajectories(tmp_path / NAME.format(0))
    validate_trajectories(table)
    assert table["trajectory_id"].to_pylist() == [before[k]["trajectory_id"] for k in (0, 4, 8)]
    # Each has the numbers that it had, also those that follow from tokens.
    of_first = [row for row in index_of(tmp_path) if row["iteration"] == 0]
    assert of_first == [{**whole[k], "row": number} for number, k in enumerate((0, 4, 8))]
    assert len({row["tokens"] for row in whole}) == 3


def unanswered(episode: Trajectory) -> Trajectory:
    """An episode with its first prompt alone."""
    names = ("token_ids", "loss_mask", "rollout_log_probs", "old_log_probs")
    cut: dict[str, Any] = {name: getattr(episode, name)[: episode.prompt_length] for name in names}
    return replace(episode, **cut, turns=episode.turns[:1], weight_spans=[], response="")


def audited(entry: AuditedEntry, policy: Policy, grpo: GrpoOptions, limit: int | None = None) -> dict[str, AuditCheck]:
    rules = RunRules(SOKOBAN, EnvOptions(), RewardOptions(), RolloutOptions(function="own.rollout"), grpo, {}, {})
    return {check.check: check for check in audit_entries([entry], policy, rules, limit=limit)}


@pytest.mark.parametrize(
    ("rule", "changes", "reads_tokens"),
    [
        ("drop", {"advantage": "dr_grpo"}, False),
        ("mask", {"advantage": "dr_grpo"}, False),
        ("drop", {"advantage": "dr_grpo", "overlong": {"length": 9, "buffer": 9}}, True),
        ("drop", {"advantage": "reinforce_pp", "normalize": "none"}, True),
    ],
)
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("episodes", [1, 2])
def test_the_audit_checks_the_scores_of_whole_groups_alone(
    tmp_path: Path, tiny_policy: Policy, episodes: int, tokens: bool, rule: Any, changes: Any, reads_tokens: bool
) -> None:
    """Scores need all episodes of a group; of the tokens they need no more than retention keeps, or the check is left
    out with a note.
    """
    grpo = GrpoOptions(**changes, filter="none", group_size=4, mixed_versions=rule)

    def audit(is_wrong: bool) -> dict[str, AuditCheck]:
        made = make_trajectories(8, turns=1, iteration=3)
        made[1].weight_spans = [(2, 0, len(made[1].token_ids))]
        made[2] = unanswered(made[2])
        apply_scores(made, score_groups(made, grpo, SOKOBAN, {}))
        assert [episode.trained for episode in made[:4]] == [True, False, False, True]
        if is_wrong:
            made[3].advantage, made[5].group_index = 7.0, 0
        whole = trajectories_to_table(made, CONTEXT)
        table = thin_table(whole, order(3, episodes=episodes, tokens=tokens), tmp_path, measure_tokens(whole))
        entry = AuditedEntry("trajectories", {"iter=00003/part-000": lambda: table}, None, trained=True)
        return audited(entry, tiny_policy, grpo)

    sound, wrong = audit(False), audit(True)
    assert (sound["parts"].checked, sound["contract"].checked) == (1, 8 // episodes)
    for name in ("token parity", "response ends", "image grids"):
        assert sound[name].checked == (8 // episodes if tokens else 0), name
    checked = 8 if episodes == 1 else 0
    scored = 0 if reads_tokens and not tokens else checked
    assert (sound["advantages"].checked, sound["groups"].checked) == (scored, checked // 4)
    for name, count in (("advantages", scored), ("groups", checked)):
        assert sound[name].findings == () and bool(wrong[name].findings) == bool(count)
    assert bool(sound["advantages"].notes) == (scored < checked)
    thinned = 0 if tokens and episodes == 1 else 8 // episodes
    noted = sound["contract"].notes
    assert [note.partition(" thinned")[0] for note in noted] == [f"{thinned} episodes are"] * bool(thinned)


def test_the_audit_finds_an_episode_in_two_parts_and_an_open_response(tmp_path: Path, tiny_policy: Policy) -> None:
    table = trajectories_to_table(make_trajectories(4, turns=1, iteration=3), CONTEXT)
    parts = {f"iter=00003/part-00{number}": lambda: table for number in range(2)}
    checks = audited(AuditedEntry("x", parts, None, trained=False), tiny_policy, GrpoOptions())
    assert (len(checks["contract"].findings), len(checks["response ends"].findings)) == (4, 8)


@pytest.mark.parametrize(
    ("iterations", "goes_on", "findings"),
    [
        (None, False, ()),
        (2, False, ()),
        (1, True, ()),
        (1, False, ("iter=00001 lies beyond the newest checkpoint",)),
        (3, False, ("iter=00002 is missing",)),
    ],
)
def test_the_audit_finds_missing_and_further_iterations_of_a_clean_evaluation(
    tiny_policy: Policy, iterations: int | None, goes_on: bool, findings: tuple[str, ...]
) -> None:
    parts = {
        f"iter={number:05d}/part-000": partial(
            trajectories_to_table, make_trajectories(4, turns=1, iteration=number, evaluation=True), CONTEXT
        )
        for number in range(2)
    }
    checks = audited(AuditedEntry("x", parts, None, iterations, goes_on), tiny_policy, GrpoOptions())
    assert checks["parts"].findings == findings
    assert (checks["advantages"].checked, checks["advantages"].findings) == (8, ())


@pytest.mark.parametrize(("iterations", "limit", "compared"), [(1, 3, 3), (2, 6, 4), (2, 8, 8), (3, 8, 8)])
def test_a_limit_of_an_audit_is_spread_over_iterations(
    tiny_policy: Policy, iterations: int, limit: int, compared: int
) -> None:
    table = trajectories_to_table(make_trajectories(4, turns=1, evaluation=True), CONTEXT)
    parts = {f"iter={number:05d}/part-000": lambda: table for number in range(iterations)}
    checks = audited(AuditedEntry("x", parts, None), tiny_policy, GrpoOptions(), limit)
    assert checks["image grids"].checked == compared


def test_edits_are_found_and_each_file_that_breaks_the_contract(tmp_path: Path) -> None:
    outputs = tmp_path / "run" / "default"
    store(outputs)
    edited, torn = outputs / NAME.format(1), outputs / NAME.format(2)
    table = read_trajectories(edited)
    place = table.schema.get_field_index("reward")
    nothing = pa.nulls(len(table), table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), nothing), edited)
    torn.write_bytes(torn.read_bytes()[:-9])
    checks = {check.check: check for check in audit_edits(outputs, contract=True) if check.checked}
    assert {name: check.checked for name, check in checks.items()} == {"edits": 3, "contract": 3}
    assert "reward is None" in checks["edits"].findings[0]
    assert [text.partition(":")[0] for text in checks["contract"].findings] == [
        "iter=00001/part-000",
        "iter=00002/part-000",
    ]


@pytest.mark.parametrize(
    ("newest", "first", "committed", "thinned"),
    [(2, 0, 1, None), (2, 0, 2, (0, 0)), (2, 1, 2, None), (2, 1, 3, (1, 1)), (1, -3, 4, (0, 3)), (1, 5, 9, (5, 8))],
)
def test_iterations_that_a_commit_thins(
    newest: int, first: int, committed: int, thinned: tuple[int, int] | None
) -> None:
    kept = RetentionOptions(newest=newest, tokens=False, episodes=2, images="run")
    wanted = [] if thinned is None else [(Thin(*thinned, False, 2, "run"), {}, {}, {})]
    assert list(thin(kept, first, committed)) == wanted
    assert list(thin(RetentionOptions(newest=newest), first, committed)) == []


def test_images_are_kept_once_per_run_and_read_as_before(tmp_path: Path) -> None:
    dataset = store(tmp_path)
    before = [rows(tmp_path / NAME.format(number)) for number in range(3)]
    dataset.save(order(1, images="run"))
    assert [rows(tmp_path / NAME.format(number)) for number in range(3)] == before
    table = read_trajectories(tmp_path / NAME.format(0))
    validate_trajectories(table)
    whole = read_trajectories(tmp_path / NAME.format(2))
    assert table.schema.types == whole.schema.types
    assert table_to_trajectories(table)[0].images == [image["bytes"] for image in before[0][0]["images"]]
    distinct = {image["bytes"] for found in before[:2] for row in found for image in row["images"]}
    stored = list((tmp_path / "images").glob("*/*.png"))
    assert {path.read_bytes() for path in stored} == distinct and len(stored) == len(distinct)
    # Other tools see paths below the run's outputs.
    raw = pq.ParquetFile(tmp_path / NAME.format(0)).read(columns=["images"]).to_pylist()
    assert all(
        image["bytes"] is None and (tmp_path / image["path"]).is_file() for row in raw for image in row["images"]
    )


def test_a_missing_or_changed_image_is_named(tmp_path: Path) -> None:
    store(tmp_path).save(order(0, images="run"))
    place = sorted((tmp_path / "images").glob("*/*.png"))[0]
    image = place.read_bytes()
    place.write_bytes(image[:-1])
    with pytest.raises(CorruptFolderError, match=f"{place.name} is another image"):
        read_trajectories(tmp_path / NAME.format(0))
    place.unlink()
    with pytest.raises(CorruptFolderError, match=r"is missing, an image of .*part-000.parquet.*copies the folder"):
        read_trajectories(tmp_path / NAME.format(0))
    assert read_trajectories(tmp_path / NAME.format(0), ["reward"]).num_rows == 12  # needs no image


RULES = [
    {"tokens": False},
    {"episodes": 4},
    {"images": "run"},
    {"tokens": False, "episodes": 4, "images": "run"},
]


@pytest.mark.parametrize("kept", RULES)
def test_orders_again_and_in_pieces_leave_the_same_files(tmp_path: Path, kept: dict[str, Any]) -> None:
    """A killed run repeats orders, and one that was stopped between two has them in other pieces."""
    store(tmp_path / "once").save(order(1, **kept))
    pieces = store(tmp_path / "pieces")
    pieces.save(order(0, **kept))
    pieces.save(Rewind(2))
    pieces.save(order(1, 0, **kept))
    pieces.save(order(1, 0, **kept))
    once, again = files(tmp_path / "once"), files(tmp_path / "pieces")
    assert sorted(once) == sorted(again)
    for name, data in once.items():
        both = [data, again[name]]
        if name.startswith("episodes/"):
            both = [pq.read_table(pa.BufferReader(one)).drop_columns(["run", "run_id"]) for one in both]
        assert both[0] == both[1], name


def test_an_index_of_merged_blocks_follows(tmp_path: Path) -> None:
    dataset = store(tmp_path, 66)  # the first 64 iterations lie in one file
    assert (index_folder(tmp_path / "trajectories") / "block-00000.parquet").is_file()
    dataset.save(order(10, episodes=4))
    index = read_index(tmp_path, task_or_plain)
    counts = index["iteration"].value_counts().to_pylist()
    assert {entry["values"]: entry["counts"] for entry in counts} == {k: 3 if k <= 10 else 12 for k in range(66)}


def test_what_needs_more_is_refused_with_the_way_out(tmp_path: Path) -> None:
    dataset = store(tmp_path)
    dataset.save(order(0, tokens=False))
    dataset.save(order(1, 1, episodes=4))
    places = [tmp_path / NAME.format(number) for number in range(3)]
    with pytest.raises(ThinnedError, match=r"update_x needs tokens.*iter=00000/part-000.parquet has none.*tokens=true"):
        refuse_thinned(places, "update_x", tokens=True)
    with pytest.raises(ThinnedError, match=r"needs whole groups.*one episode of 4 of iter=00001.*episodes=1"):
        refuse_thinned(places, "regrade_x", groups=True)
    refuse_thinned(places[2:], "update_x", tokens=True, groups=True)
    refuse_thinned(places, "browse_x")
