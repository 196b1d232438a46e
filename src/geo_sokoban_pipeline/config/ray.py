"""Options of Ray: which cluster, what a rank takes of it, how often a lost group is built anew, and on how little."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from geo_sokoban_pipeline.config.base import Count, CountOrZero, StrictModel

_Amount = Annotated[float, Field(gt=0, le=1_000_000)]


class RayOptions(StrictModel):
    """Where Ray places ranks, rollout workers and servers, with placement=ray."""

    address: str | None = Field(
        None,
        description="Cluster to join: host:port, or `auto` for one that runs on this machine. None: that of the "
        "environment variable RAY_ADDRESS, else a cluster of this machine alone, which the command starts and ends.",
    )
    cpus: float = Field(
        1.0, ge=0, le=1024, description="CPUs that Ray sets aside for a rank, a rollout worker or a server."
    )
    gpus: int | None = Field(
        None, ge=0, le=1, description="GPUs of a rank. None: one where the cluster has any, unless policy.device=cpu."
    )
    resources: dict[str, _Amount] = Field(
        default_factory=dict,
        description="Further resources of a rank, a rollout worker or a server, by the names that the nodes were "
        "started with.",
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK",
        description="On which nodes the ranks lie: on few, on many; `STRICT_PACK`, on one; `STRICT_SPREAD`, on one "
        "each.",
    )
    patience: float = Field(
        600.0, ge=1, le=1_000_000, description="Seconds that the ranks may wait for their resources."
    )
    min_processes: Count | None = Field(
        None,
        description="Ranks with which a run begins, or goes on after a lost node, where the cluster has no place for "
        "all `processes` within `patience` seconds: as many as there is place for, but so many at least. Steps are "
        "those of all ranks but for the rounding of sums. An evaluation then takes as many servers as there is place "
        "for, one at least. None: as many as `processes`, and all servers.",
    )
    max_restarts: CountOrZero = Field(
        3,
        description="How often a command builds its ranks anew after one has died, and goes on from the newest "
        "checkpoint. A saved iteration sets the count back to 0.",
    )
