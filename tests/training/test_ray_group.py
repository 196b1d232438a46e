"""How many ranks a Ray cluster may give a run."""

from __future__ import annotations

from typing import Any

import pytest

from geo_sokoban_pipeline.training.ray_group import sizes
from task_options import TrainOptions

COLOCATED = {"engine": "sglang", "server": {"count": 2, "tensor_parallel": 2, "colocated": True}}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"processes": 3}, [(3, 1)]),
        ({"processes": 3, "ray": {"min_processes": 1}}, [(3, 1), (2, 1), (1, 1)]),
        ({"processes": 8, "ray": {"min_processes": 4}, "sharding": "hybrid", "replicas": 2}, [(8, 1), (6, 1), (4, 1)]),
        ({"processes": 5, "ray": {"min_processes": 2}, "rollout": COLOCATED}, [(5, 2), (4, 2), (2, 1)]),
    ],
)
def test_fewer_ranks_come_in_whole_units_with_servers_for_their_gpus(
    train_options: TrainOptions, options: dict[str, Any], found: list[tuple[int, int]]
) -> None:
    values = train_options.model_dump()
    options = {**options, "rollout": values["rollout"] | options.get("rollout", {})}
    made = TrainOptions.model_validate(values | {"placement": "ray", "threads": 1} | options)
    assert [(one.processes, one.rollout.server.count) for one in sizes(made)] == found
