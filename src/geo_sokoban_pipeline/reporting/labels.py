"""Names and colours of policies and players, the same on every chart and in every table."""

from __future__ import annotations

from geo_sokoban_pipeline.tasks import World

START = "start"  # the first policy of a run without a warm start
_LABELS = {
    START: "before GRPO",
    "warm_start": "warm start",
    "final": "after GRPO",
    "control_teacher": "control: more of the warm start",
    "control_optimal": "control: imitation of optimal play",
    "teacher": "teacher",
    "teacher_patient": "teacher, never gives up",
    "random": "random moves",
    "random_legal": "random legal moves",
    "solver": "solver (optimal)",
    "most_frequent": "most frequent answer",
    "label": "the label itself",
}
# What is called otherwise where answers are given instead of moves.
_ANSWERS = {"control_optimal": "control: imitation of the labels"}
_COLOURS = {
    START: "warm",
    "warm_start": "warm",
    "final": "final",
    "random": "random",
    "random_legal": "legal",
    "solver": "solver",
    "most_frequent": "random",
    "label": "solver",
}
_DISGUISES = {"_blank": "blank pictures", "_shuffled": "shuffled pictures"}


def policy_label(name: str, world: World = "sokoban") -> str:
    """Name of a policy or player for readers; unknown ones keep theirs."""
    for suffix, words in _DISGUISES.items():
        if name.endswith(suffix):
            return f"{policy_label(name.removesuffix(suffix), world)}, {words}"
    own = _ANSWERS if world == "geometry" else {}
    return own.get(name) or _LABELS.get(name, name)


def row_label(policy: str, mode: str, world: World = "sokoban") -> str:
    """Name of a row of the evaluation: the policy, and how it chose its replies where there is a choice."""
    label = policy_label(policy, world)
    return label if mode == "-" else f"{label}, {mode}"


def policy_colour(name: str) -> str:
    """CSS class of a policy's colour; policies without one of their own share the main colour."""
    if name.endswith(tuple(_DISGUISES)):
        return "random"
    return _COLOURS.get(name, "legal" if name.startswith("teacher") else "final")
