"""Dataclasses to tables and back: exact, quick, one copy of each image."""

from __future__ import annotations

import time
import timeit

import numpy as np
import pyarrow as pa
import pytest

from builders import CONTEXT, make_png, make_trajectories
from geo_sokoban_pipeline.trajectories.arrow import DERIVED_COLUMNS
from geo_sokoban_pipeline.trajectories.schema import TRAJECTORY_SCHEMA, validate_schema
from geo_sokoban_pipeline.trajectories.types import (
    Trajectory,
    TrajectoryBatch,
    Turn,
    table_to_trajectories,
    trajectories_to_table,
)


def round_trip(trajectory: Trajectory) -> Trajectory:
    return table_to_trajectories(trajectories_to_table([trajectory], CONTEXT))[0]


def test_schema_is_the_pinned_one() -> None:
    table = trajectories_to_table(make_trajectories(3), CONTEXT)
    validate_schema(table.schema)
    assert table.column_names == TRAJECTORY_SCHEMA.names
    assert [name for name in table.column_names if name not in DERIVED_COLUMNS] == list(Trajectory.__dataclass_fields__)
    assert [field.nullable for field in table.schema] == [field.nullable for field in TRAJECTORY_SCHEMA]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_log_probs", np.array([-0.0, 0.0, -1e-45, np.float32(-0.1)], np.float32)),
        ("ref_log_probs", np.array([-3.4e38, -1.1754944e-38], np.float32)),
        ("old_log_probs", None),
        ("token_ids", np.array([0, 2**31 - 1], np.int32)),
        ("loss_mask", np.array([0, 1], np.int8)),
        ("seed", 2**63 - 1),
        ("reward", 0.1 + 0.2),
        ("advantage", -0.0),
        ("advantage", None),
        ("weight_spans", [(3, 0, 4), (4, 4, 9)]),
        ("image_grid_thw", [(1, 2, 3), (4, 5, 6)]),
        ("images", [make_png(32, 1), make_png(32, 2), make_png(32, 1)]),
        ("turns", []),
        ("turns", [Turn(role="user", text="x √ \0 é", token_start=0, token_end=1, image_indices=[2, 0], info={})]),
        (
            "turns",
            [Turn(role="assistant", text="", token_start=0, token_end=0, action="", reward=1e-300, info={"a": [0.1]})],
        ),
        ("metrics", {"a": 1e-323, "b": -0.0}),
        ("timings", {}),
        ("label", ""),
        ("error", None),
    ],
)
def test_values_return_bit_for_bit(name: str, value: object) -> None:
    trajectory = make_trajectories(1)[0]
    setattr(trajectory, name, value)
    found = getattr(round_trip(trajectory), name)
    if isinstance(value, np.ndarray):
        assert (found.dtype, found.tobytes()) == (value.dtype, value.tobytes())
        assert found.flags.writeable
    else:
        assert repr(found) == repr(value)


def test_named_values_are_sorted_and_sampling_is_a_text() -> None:
    trajectory = make_trajectories(1)[0]
    trajectory.metrics = {"success": 1.0, "steps": 4.0}
    trajectory.sampling = {"temperature": 1.0}  # type: ignore[assignment]
    found = round_trip(trajectory)
    assert (list(found.metrics), found.sampling) == (["steps", "success"], '{"temperature":1.0}')


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"distance": np.int64(3), "grid": np.eye(2)}, {"distance": 3, "grid": [[1.0, 0.0], [0.0, 1.0]]}),
        ({"share": np.float32(0.1), "done": np.bool_(True)}, {"share": float(np.float32(0.1)), "done": True}),
        ({"move": "links – ←", "emoji": "🧱", "none": None}, {"move": "links – ←", "emoji": "🧱", "none": None}),
        ({"by": {3: "a", 2: "b"}, "big": 2**80}, {"by": {"2": "b", "3": "a"}, "big": 2**80}),
        ({"small": 1e-300, "zero": -0.0, "near": 0.1 + 0.2}, {"small": 1e-300, "zero": -0.0, "near": 0.1 + 0.2}),
    ],
)
def test_info_comes_back_with_plain_values(info: dict, expected: dict) -> None:
    trajectory = make_trajectories(1)[0]
    trajectory.turns[0].info = info
    found = round_trip(trajectory).turns[0].info
    assert (found, repr(found)) == (expected, repr(dict(sorted(expected.items()))))


@pytest.mark.parametrize(
    ("info", "error"), [({"x": {1, 2}}, TypeError), ({"x": float("nan")}, ValueError), ({"x": [np.inf]}, ValueError)]
)
def test_info_that_is_not_json_is_refused(info: dict, error: type[Exception]) -> None:
    trajectory = make_trajectories(1)[0]
    trajectory.turns[0].info = info
    with pytest.raises(error):
        trajectories_to_table([trajectory], CONTEXT)


def test_equal_images_are_one() -> None:
    trajectories = make_trajectories(16, turns=8, distinct_images=5)
    table = trajectories_to_table(trajectories, CONTEXT)
    assert len(table["images"].chunk(0).flatten().field("bytes").dictionary) == 5
    back = table_to_trajectories(table)
    assert len({id(image) for trajectory in back for image in trajectory.images}) == 5


def test_slices_and_chunks_read_alike() -> None:
    assert table_to_trajectories(TrajectoryBatch([], CONTEXT).to_table()) == []
    trajectories = make_trajectories(6)
    trajectories[4].old_log_probs = None
    table = trajectories_to_table(trajectories, CONTEXT)
    other = trajectories_to_table(make_trajectories(6, seed=1), CONTEXT)  # its dictionary differs
    mixed = table_to_trajectories(pa.concat_tables([table.slice(3, 2), other.slice(1, 1)]))
    assert mixed[0].images == trajectories[3].images
    assert mixed[1].token_ids.tobytes() == trajectories[4].token_ids.tobytes()
    assert mixed[1].old_log_probs is None
    assert mixed[2].images == make_trajectories(6, seed=1)[1].images


def test_an_iteration_is_quick() -> None:
    trajectories = make_trajectories(256, turns=8, image_px=96)
    spent = timeit.repeat(lambda: trajectories_to_table(trajectories, CONTEXT), timer=time.process_time, number=1)
    assert min(spent) < 0.15
