"""Teachers and other players by their options: who writes the replies where no policy does.

A player has `reply(env, generator) -> str | None`, None where it ends the episode. One that must know more than the
environment says has `begin(row)` too, which is called with the prompts row before the first reply.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.options.policy import TeacherOptions


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
