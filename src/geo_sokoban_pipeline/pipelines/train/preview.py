"""A drawing of the loop inside `train_grpo`, which Kedro's graph cannot hold; kedro-viz shows it at the node."""

from __future__ import annotations

from typing import Any

_LOOP = """graph TD
  state[(resume_state)] --> collect[collect: draw prompts, roll out]
  collect --> score[score: advantages, filter]
  score -- too little signal --> collect
  score --> update[update: optimizer steps]
  update --> sync[sync weights]
  sync --> validate[validate, where due]
  validate --> commit[commit: trajectories, metrics, checkpoint]
  commit --> collect
  commit --> done[COMPLETE]
"""


def draw_loop() -> Any:
    """Mermaid preview of one iteration."""
    from kedro.pipeline.preview_contract import MermaidPreview

    return MermaidPreview(content=_LOOP)
