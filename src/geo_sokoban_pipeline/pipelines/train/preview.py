"""A drawing of the loop inside `train_grpo`, which Kedro's graph cannot hold; kedro-viz shows it at the node."""

from __future__ import annotations

from typing import Any

_LOOP = """graph TD
  state[(resume_state)] --> draw[draw prompts]
  draw --> play[play episodes]
  play --> score[score: rewards, advantages, filter]
  score --> update[update: optimizer steps]
  update --> evaluate{validation due?}
  evaluate --> save[save trajectories, metrics, checkpoint]
  save --> draw
  save --> done[COMPLETE]
"""


def draw_loop() -> Any:
    """Mermaid preview of one iteration."""
    from kedro.pipeline.preview_contract import MermaidPreview

    return MermaidPreview(content=_LOOP)
