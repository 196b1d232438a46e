"""The trajectory contract: valid episodes pass, and every broken rule is caught by column, id and value."""

from __future__ import annotations

import dataclasses
import time
import timeit
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import CONTEXT, PAD, make_trajectories
from geo_sokoban_pipeline.runs.storage import Rewind
from geo_sokoban_pipeline.trajectories.arrow import PART_COLUMNS
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories, write_trajectories
from geo_sokoban_pipeline.trajectories.schema import (
    TRAJECTORY_SCHEMA,
    TrajectoryContract,
    TrajectoryError,
    read_context,
    schema_metadata,
    validate_trajectories,
)
from geo_sokoban_pipeline.trajectories.types import (
    Trajectory,
    TrajectoryBatch,
    table_to_trajectories,
    trajectories_to_table,
)


def generated(trajectory: Trajectory) -> int:
    """Position of the first generated token."""
    return int(np.argmax(trajectory.loss_mask))


def put(name: str, position: str, value: float) -> Callable[[Trajectory], None]:
    """Write one entry of a number column, on a generated token (`on`) or on token 0 (`off`)."""

    def mutate(trajectory: Trajectory) -> None:
        array = getattr(trajectory, name).copy()
        array[generated(trajectory) if position == "on" else 0] = value
        setattr(trajectory, name, array)

    return mutate


def set_to(name: str, value: object) -> Callable[[Trajectory], None]:
    return lambda trajectory: setattr(trajectory, name, value)


def set_turn(index: int, **values: object) -> Callable[[Trajectory], None]:
    def mutate(trajectory: Trajectory) -> None:
        trajectory.turns[index] = dataclasses.replace(trajectory.turns[index], **values)

    return mutate


def fail_with(**values: object) -> Callable[[Trajectory], None]:
    """A failed episode as it should be, but for the given values."""

    def mutate(trajectory: Trajectory) -> None:
        sound = {"status": "failed", "error": "boom", "trained": False, "reward": None, "advantage": None}
        for name, value in {**sound, **values}.items():
            setattr(trajectory, name, value)

    return mutate


def drop_last(name: str) -> Callable[[Trajectory], None]:
    return lambda trajectory: setattr(trajectory, name, getattr(trajectory, name)[:-1])


def join_assistant_turns(trajectory: Trajectory) -> None:
    turn = trajectory.turns[1]
    middle = turn.token_start + 1
    halves = [dataclasses.replace(turn, token_end=middle), dataclasses.replace(turn, token_start=middle)]
    trajectory.turns[1:2] = halves


MUTATIONS: dict[str, tuple[str, Callable[[Trajectory], None]]] = {
    "mask is short": ("loss_mask", drop_last("loss_mask")),
    "log-probs are short": ("rollout_log_probs", drop_last("rollout_log_probs")),
    "old log-probs are short": ("old_log_probs", set_to("old_log_probs", np.zeros(1, np.float32))),
    "ref log-probs are short": ("ref_log_probs", set_to("ref_log_probs", np.zeros(1, np.float32))),
    "prompt is longer than all": ("prompt_length", set_to("prompt_length", 10**6)),
    "prompt is negative": ("prompt_length", set_to("prompt_length", -1)),
    "mask is 2": ("loss_mask", put("loss_mask", "on", 2)),
    "mask is negative": ("loss_mask", put("loss_mask", "on", -1)),
    "mask is 1 in the prompt": ("loss_mask", put("loss_mask", "off", 1)),
    "log-prob off the mask": ("rollout_log_probs", put("rollout_log_probs", "off", -1e-30)),
    "log-prob is positive": ("rollout_log_probs", put("rollout_log_probs", "on", 1e-5)),
    "log-prob is NaN": ("rollout_log_probs", put("rollout_log_probs", "on", np.nan)),
    "log-prob is NaN off the mask": ("rollout_log_probs", put("rollout_log_probs", "off", np.nan)),
    "log-prob is -inf": ("rollout_log_probs", put("rollout_log_probs", "on", -np.inf)),
    "old log-prob is NaN": ("old_log_probs", put("old_log_probs", "on", np.nan)),
    "one pad too many": ("token_ids", put("token_ids", "on", PAD)),
    "grid is larger": ("token_ids", lambda t: t.image_grid_thw.__setitem__(0, (2, 6, 6))),
    "grid is zero": ("image_grid_thw", lambda t: t.image_grid_thw.__setitem__(0, (0, 6, 6))),
    "grid is missing": ("image_grid_thw", drop_last("image_grid_thw")),
    "image is no PNG": ("images", lambda t: t.images.__setitem__(0, b"GIF89a")),
    "turns overlap": ("turns", set_turn(1, token_start=0)),
    "turn runs backwards": ("turns", set_turn(0, token_start=2, token_end=1)),
    "turn starts below 0": ("turns", set_turn(0, token_start=-1)),
    "turn ends beyond the tokens": ("turns", set_turn(-1, token_end=10**6)),
    "turns out of order": ("turns", lambda t: t.turns.reverse()),
    "generated run outside its turn": ("loss_mask", set_turn(1, role="user")),
    "generated run in two turns": ("turns", join_assistant_turns),
    "unknown role": ("turns", set_turn(0, role="robot")),
    "image index too large": ("turns", set_turn(0, image_indices=[99])),
    "image index negative": ("turns", set_turn(0, image_indices=[-1])),
    "turn reward is infinite": ("turns", set_turn(1, reward=np.inf)),
    "turn advantage is NaN": ("turns", set_turn(1, advantage=np.nan)),
    "turn credit is NaN": ("turns", set_turn(1, credit=np.nan)),
    "credit does not add up": ("turns", set_turn(1, credit=1e3)),
    "credit of a prompt": ("turns", set_turn(0, credit=0.0)),
    "weights are unknown": ("weight_spans", set_to("weight_spans", [])),
    "weight spans overlap": ("weight_spans", set_to("weight_spans", [(0, 0, 20), (1, 10, 30)])),
    "weight span beyond the tokens": ("weight_spans", set_to("weight_spans", [(0, 0, 10**6)])),
    "unknown status": ("status", set_to("status", "pending")),
    "id is empty": ("trajectory_id", set_to("trajectory_id", "")),
    "task is empty": ("task", set_to("task", "")),
    "sampling is no object": ("sampling", set_to("sampling", "[1]")),
    "reward is NaN": ("reward", set_to("reward", np.nan)),
    "reward is missing": ("reward", set_to("reward", None)),
    "advantage is infinite": ("advantage", set_to("advantage", np.inf)),
    "advantage of a trained one is missing": ("advantage", set_to("advantage", None)),
    "error on a completed one": ("error", set_to("error", "boom")),
    "no error on a failed one": ("error", fail_with(error=None)),
    "reward on a failed one": ("reward", fail_with(reward=0.0)),
    "advantage on a failed one": ("advantage", fail_with(advantage=0.0)),
    "failed and trained": ("trained", fail_with(trained=True)),
    "dropped and trained": ("drop_reason", set_to("drop_reason", "stale")),
    "metric is NaN": ("metrics", set_to("metrics", {"steps": np.nan})),
    "null in a column": ("response", set_to("response", None)),
    "null in a turn": ("turns", set_turn(1, text=None)),
    "null among images": ("images", lambda t: t.images.__setitem__(0, None)),
}


def check(trajectories: list[Trajectory]) -> None:
    validate_trajectories(trajectories_to_table(trajectories, CONTEXT))


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("row", [0, 5])
def test_broken_rule_is_caught(name: str, row: int) -> None:
    trajectories = make_trajectories(8, turns=2)
    column, mutate = MUTATIONS[name]
    mutate(trajectories[row])
    with pytest.raises(TrajectoryError) as caught:
        check(trajectories)
    assert caught.value.column == column
    if name != "id is empty":
        assert caught.value.trajectory_id == trajectories[row].trajectory_id
        assert repr(trajectories[row].trajectory_id) in str(caught.value)
    assert str(caught.value).startswith(column)


@pytest.mark.parametrize(
    ("mutate", "text"),
    [
        (set_to("status", "pending"), "'pending'"),
        (set_to("prompt_length", 4000), "4000"),
        (set_to("loss_mask", np.zeros(3, np.int8)), "3 entries for 50 token_ids"),
        (set_to("reward", float("inf")), "inf"),
        (put("rollout_log_probs", "on", 0.5), "0.5 at token 17"),
    ],
)
def test_message_shows_the_value_and_the_token(mutate: Callable[[Trajectory], None], text: str) -> None:
    trajectories = make_trajectories(2, turns=2)
    mutate(trajectories[1])
    with pytest.raises(TrajectoryError, match=text):
        check(trajectories)


def test_equal_rewards_of_a_group_demand_zero_advantages() -> None:
    both = make_trajectories(1, group_size=1, iteration=0) + make_trajectories(1, group_size=1, iteration=1)
    for trajectory in both:  # of two groups, each of its iteration
        trajectory.reward = 1.0
    check(both)
    trajectories = make_trajectories(8, group_size=4)
    for trajectory in trajectories[4:]:
        trajectory.reward, trajectory.advantage = 0.9, 0.0
    check(trajectories)
    trajectories[6].advantage = 1e-17
    with pytest.raises(TrajectoryError, match="equal") as caught:
        check(trajectories)
    assert caught.value.trajectory_id == trajectories[6].trajectory_id
    trajectories[6].turns[1].advantage = 1e-17  # turn credit has a rule of its own
    check(trajectories)


def test_ids_are_unique() -> None:
    trajectories = make_trajectories(2)
    trajectories[1].trajectory_id = trajectories[0].trajectory_id
    with pytest.raises(TrajectoryError, match="unique"):
        check(trajectories)


def test_named_values_are_sorted() -> None:
    table = trajectories_to_table(make_trajectories(2), CONTEXT)
    kind = TRAJECTORY_SCHEMA.field("metrics").type
    unsorted = [{"name": name, "value": 1.0} for name in ("success", "steps")]
    broken = table.set_column(
        table.column_names.index("metrics"), "metrics", pa.array([unsorted[::-1], unsorted], kind)
    )
    with pytest.raises(TrajectoryError, match="sorted") as caught:
        validate_trajectories(broken)
    assert caught.value.trajectory_id == table["trajectory_id"][1].as_py()


REPEATED = ["success", "n_turns", "optimal_steps", *PART_COLUMNS]


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("value", [0, None])
def test_columns_repeat_the_lists(name: str, value: int | None) -> None:
    trajectories = make_trajectories(3)
    for trajectory in trajectories:
        trajectory.metrics = {"optimal_steps": 4.0, "success": 1.0}
        trajectory.reward_parts = dict.fromkeys(PART_COLUMNS, 0.5)
    trajectories[0].metrics, trajectories[0].reward_parts = {}, {}
    table = trajectories_to_table(trajectories, CONTEXT)
    validate_trajectories(table)
    first, second, _ = table[name].to_pylist()
    assert first == (3 if name == "n_turns" else None)
    assert second == {"success": True, "n_turns": 3, "optimal_steps": 4}.get(name, 0.5)
    if value is None and name == "n_turns":
        return
    place, kind = table.column_names.index(name), table.schema.field(name)
    other = bool(value) if name == "success" and value is not None else value
    changed = table.set_column(place, kind, pa.array([first, other, second], kind.type))
    with pytest.raises(TrajectoryError) as caught:
        validate_trajectories(changed)
    assert (caught.value.column, caught.value.trajectory_id) == (name, trajectories[1].trajectory_id)


def test_credit_adds_up_to_the_reward() -> None:
    trajectories = make_trajectories(2, turns=2)
    responses = [turn for turn in trajectories[1].turns if turn.role == "assistant"]
    for turn in responses:
        turn.credit = trajectories[1].reward / 2
    check(trajectories)
    responses[0].credit += 1e-3
    with pytest.raises(TrajectoryError, match="adds up") as caught:
        check(trajectories)
    assert caught.value.trajectory_id == trajectories[1].trajectory_id


def empty_episode(trajectory: Trajectory) -> None:
    """An episode that failed before its first token."""
    fail_with()(trajectory)
    for name in ("token_ids", "loss_mask", "rollout_log_probs"):
        setattr(trajectory, name, getattr(trajectory, name)[:0])
    trajectory.old_log_probs, trajectory.prompt_length, trajectory.response = None, 0, ""
    trajectory.turns, trajectory.images, trajectory.image_grid_thw, trajectory.weight_spans = [], [], [], []


def abort(trajectory: Trajectory) -> None:
    trajectory.status, trajectory.trained, trajectory.drop_reason = "aborted", False, "aborted"
    trajectory.reward = trajectory.advantage = None


def saturate(trajectory: Trajectory) -> None:
    put("rollout_log_probs", "on", 0.0)(trajectory)


def switch_weights(trajectory: Trajectory) -> None:
    trajectory.weight_spans = [(0, 0, 30), (1, 30, len(trajectory.token_ids))]


@pytest.mark.parametrize("change", [empty_episode, fail_with(), abort, saturate, switch_weights])
def test_unusual_episodes_are_valid(change: Callable[[Trajectory], None]) -> None:
    trajectories = make_trajectories(4)
    change(trajectories[2])
    check(trajectories)


@pytest.mark.parametrize(
    "view",
    [
        lambda table: table,
        lambda table: table.slice(0, 0),
        lambda table: table.slice(3, 4),
        lambda table: pa.concat_tables([table.slice(4), table.slice(0, 4)]),
        lambda table: table.cast(TRAJECTORY_SCHEMA.with_metadata(table.schema.metadata)),
        lambda table: pa.Table.from_pylist(
            table.to_pylist(), TRAJECTORY_SCHEMA.with_metadata(schema_metadata(CONTEXT))
        ),
    ],
    ids=["whole", "empty", "sliced", "chunked", "plain bytes", "from rows"],
)
def test_memory_layout_does_not_matter(view: Callable[[pa.Table], pa.Table]) -> None:
    validate_trajectories(view(trajectories_to_table(make_trajectories(8, group_size=4), CONTEXT)))


@pytest.mark.parametrize("row", [0, 2, 5])
def test_row_is_named_in_slices_and_chunks(row: int) -> None:
    trajectories = make_trajectories(8)
    put("rollout_log_probs", "on", 1.0)(trajectories[row])
    table = trajectories_to_table(trajectories, CONTEXT)
    for view in (table.slice(row), pa.concat_tables([table.slice(row, 1), table.slice(0, row)])):
        with pytest.raises(TrajectoryError) as caught:
            validate_trajectories(view)
        assert caught.value.trajectory_id == trajectories[row].trajectory_id


def test_foreign_tables_are_named() -> None:
    table = trajectories_to_table(make_trajectories(2), CONTEXT)
    with pytest.raises(TrajectoryError, match=r"missing \['seed'\]"):
        validate_trajectories(table.drop_columns("seed"))
    with pytest.raises(TrajectoryError, match=r"unknown \['extra'\]"):
        validate_trajectories(table.append_column("extra", pa.array([1, 2])))
    wide = table.set_column(table.column_names.index("seed"), "seed", pa.array([1, 2], pa.int32()))
    with pytest.raises(TrajectoryError, match=r"seed is 'type int32'.*int64"):
        validate_trajectories(wide)
    with pytest.raises(TrajectoryError, match="trajectories_to_table"):
        validate_trajectories(table.replace_schema_metadata(None))
    metadata = {**table.schema.metadata, b"schema_version": b"0"}
    with pytest.raises(TrajectoryError, match="reads 2"):
        validate_trajectories(table.replace_schema_metadata(metadata))


def test_features_block_is_the_one_of_datasets() -> None:
    from datasets import Features, Image, List

    assert read_context(trajectories_to_table([], CONTEXT).schema) == CONTEXT
    expected = Features.from_arrow_schema(TRAJECTORY_SCHEMA)
    expected["images"] = List(Image())
    found = Features.from_arrow_schema(TRAJECTORY_SCHEMA.with_metadata(schema_metadata(CONTEXT)))
    assert found == expected


def test_a_thousand_episodes_are_quick() -> None:
    table = trajectories_to_table(make_trajectories(1000, turns=8), CONTEXT)
    assert min(timeit.repeat(lambda: validate_trajectories(table), timer=time.process_time, number=1)) < 0.1


def test_contract_returns_tables_and_names_the_partition() -> None:
    batch = TrajectoryBatch(make_trajectories(4), CONTEXT)
    result = TrajectoryContract().validate({"iter=00004/part-000": batch})
    assert result["iter=00004/part-000"].equals(batch.to_table())
    assert TrajectoryContract().validate({}) == {}
    assert TrajectoryContract().validate(Rewind(3)) == Rewind(3)
    batch.trajectories[0].status = "pending"
    with pytest.raises(TrajectoryError, match=r"^iter=00004/part-000: status of trajectory"):
        TrajectoryContract().validate({"iter=00004/part-000": batch})
    with pytest.raises(TrajectoryError, match="TrajectoryBatch"):
        TrajectoryContract().validate({"iter=00004/part-000": batch.trajectories})


episodes = st.builds(
    make_trajectories,
    episodes=st.integers(1, 6),
    turns=st.integers(2, 4),  # two at least: some mutations need a second observation
    image_px=st.sampled_from([32, 96]),
    iteration=st.integers(0, 99999),
    group_size=st.integers(1, 4),
    response_tokens=st.integers(2, 12),
    distinct_images=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def as_values(trajectory: Trajectory) -> dict[str, object]:
    """Fields of an episode, arrays as their type and bytes, so that equality is bit for bit."""
    values = {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}
    return {name: (v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for name, v in values.items()}


@quick
@given(trajectories=episodes)
def test_valid_episodes_round_trip_through_parquet(trajectories: list[Trajectory], tmp_path_factory) -> None:
    table = trajectories_to_table(trajectories, CONTEXT)
    validate_trajectories(table)
    path = tmp_path_factory.mktemp("part") / "part-000.parquet"
    write_trajectories(path, table)
    stored = read_trajectories(path)
    validate_trajectories(stored)
    assert list(map(as_values, table_to_trajectories(stored))) == list(map(as_values, trajectories))


@quick
@given(trajectories=episodes, name=st.sampled_from(sorted(MUTATIONS)), data=st.data())
def test_any_mutation_of_any_episode_is_caught(trajectories: list[Trajectory], name: str, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(trajectories) - 1))
    MUTATIONS[name][1](trajectories[row])
    with pytest.raises(TrajectoryError) as caught:
        check(trajectories)
    assert caught.value.column == MUTATIONS[name][0]
