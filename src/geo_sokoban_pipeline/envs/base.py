"""What a world must offer to be played by the episode loop: reset, step, format_observation, close.

A world is plain Python. It sees and returns text and pictures, never tokens, so the loop alone decides how a
conversation becomes a sequence of ids.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from geo_sokoban_pipeline.config.policy import TeacherOptions
from geo_sokoban_pipeline.envs.plugins import load_object

Observation = Mapping[str, Any]
Info = dict[str, Any]


@runtime_checkable
class InteractionEnv(Protocol):
    """One episode of one task instance.

    Optional beyond these: `final_metrics() -> dict[str, float]` (success, steps, optimal_steps, …), `turn_rewards`
    (one per step), `final_bonus`, and in the info of `step` a `turn_reward`. Also `prepare(text)`: begin, without
    waiting for it, slow work that `step(text)` will need, and return the futures of it, or None; it is called for all
    replies of a batch before the first of them is stepped with. And `conclude(replies, status)`: called once when the
    episode is over, before its numbers are asked for, with all replies, those that it was not stepped with included.
    """

    def reset(self) -> tuple[Observation | None, Info]:
        """Start the episode anew; returns the first observation and info."""

    def step(self, text: str) -> tuple[Observation | None, bool, Info]:
        """Answer a reply of the policy: next observation, whether the episode is over, info."""

    def format_observation(self, observation: Observation | None) -> dict[str, Any]:
        """The observation as a user message: `{"role": "user", "content": [images…, one text]}`."""

    def close(self) -> None:
        """Release what the environment holds; calling it twice is harmless."""


def user_message(observation: Observation | None) -> dict[str, Any]:
    """Chat message of an observation.

    Args:
        observation: `obs_str` is the text, `multi_modal_data` maps names to lists of pictures. None or an empty one
        gives an empty text.
            A role inside the observation is ignored.

    Returns:
        `{"role": "user", "content": [{"type": "image", "image": …}, …, {"type": "text", "text": …}]}`: the pictures
        of every list in order, then exactly one text.
    """
    observation = observation or {}
    content: list[dict[str, Any]] = [
        {"type": "image", "image": picture}
        for pictures in (observation.get("multi_modal_data") or {}).values()
        for picture in pictures
    ]
    content.append({"type": "text", "text": observation.get("obs_str", "")})
    return {"role": "user", "content": content}


# Teachers and other players by their options: who writes the replies where no policy does.


def make_teacher(options: TeacherOptions, row: Mapping[str, Any], **further: Any) -> Any:
    """The player of one episode; players keep state, so every episode gets its own.

    Args:
        options: factory, and what it is called with.
        row: of the prompts.
        further: keyword arguments of the factory beside those of the options.
    """
    build = load_object(options.factory, default_name="build_teacher")
    teacher = build(options.name, options.patience, options.noise, **options.args, **further)
    if hasattr(teacher, "begin"):
        teacher.begin(row)
    return teacher


def describe_expert(options: TeacherOptions, rows: Sequence[Mapping[str, Any]]) -> str:
    """Whom the warm start imitates, in words: what the factory's module says in `describe_expert`, else its name.

    Args:
        options: of the teacher.
        rows: of the prompts.
    """
    build = load_object(options.factory, default_name="build_teacher")
    describe = getattr(sys.modules.get(getattr(build, "__module__", "")), "describe_expert", None)
    if describe is None or describe is describe_expert:
        return f"it imitates the expert {options.name} of {options.factory}"
    return str(describe(options, rows))
