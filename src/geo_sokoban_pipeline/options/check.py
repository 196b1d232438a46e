"""Options of the pre-flight."""

from __future__ import annotations

from pydantic import Field

from geo_sokoban_pipeline.options.base import Count, CountOrZero, Seconds, StrictModel


class CheckPipelineOptions(StrictModel):
    """What a pipeline check_* takes beside the options of train_*."""

    timed: bool = Field(True, description="Also load the policy and time one rollout and one update at the real sizes.")
    imitation_steps: CountOrZero = Field(
        80,
        description="Steps of the warm start before the timed rollout, where the run has no policy of its own yet: "
        "one that has learnt nothing ends its episodes at once. 0: none.",
    )
    rows: Count = Field(100, description="Levels that are generated, or rows that are read, to look at the data.")
    network_timeout: Seconds = Field(5.0, description="Seconds that a server has to answer.")
    memory_share: float = Field(0.9, gt=0, le=1, description="Share of the free memory that the plan may take.")
