"""Names and colours of policies and players, the same on every chart and in every table."""

from __future__ import annotations

_LABELS = {
    "warm_start": "warm start",
    "final": "after GRPO",
    "control_teacher": "control: more of the warm start",
    "control_optimal": "control: imitation of optimal play",
    "teacher": "teacher",
    "teacher_patient": "teacher, never gives up",
    "random": "random moves",
    "random_legal": "random legal moves",
    "solver": "solver (optimal)",
}
_COLOURS = {"warm_start": "warm", "final": "final", "random": "random", "random_legal": "legal", "solver": "solver"}
_BLANK = "_blank"


def policy_label(name: str) -> str:
    """Name of a policy or player for readers; unknown ones keep theirs."""
    if name.endswith(_BLANK):
        return f"{policy_label(name.removesuffix(_BLANK))}, blank pictures"
    return _LABELS.get(name, name)


def row_label(policy: str, mode: str) -> str:
    """Name of a row of the evaluation: the policy, and how it chose its moves where there is a choice."""
    return policy_label(policy) if mode == "-" else f"{policy_label(policy)}, {mode}"


def policy_colour(name: str) -> str:
    """CSS class of a policy's colour; policies without one of their own share the main colour."""
    if name.endswith(_BLANK):
        return "random"
    return _COLOURS.get(name, "legal" if name.startswith("teacher") else "final")
