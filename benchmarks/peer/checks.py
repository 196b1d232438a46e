"""Checks that the two systems did the same work, from their reports. A benchmark of unequal work must not give a ratio,
so every difference raises."""

from __future__ import annotations

from benchmarks.peer.setting import Setting, StepReport

PATCHES_PER_IMAGE = 36  # 96×96 pixels, patches of 16
TOKENS_PER_IMAGE = 9  # 2×2 patches each
ALLOWED_TOKEN_DIFFERENCE = 0.01  # sampled responses may differ in length


class UnequalWorkError(AssertionError):
    """The two systems did not do the same work."""


def check_step(name: str, report: StepReport, setting: Setting) -> None:
    """Check one step of one system against the setting.

    Raises:
        UnequalWorkError: episodes, turns, optimizer steps or images are not what the setting asks for.
    """
    images = setting.episodes * setting.turns
    _equal(name, "turns of each episode", report.turns, [setting.turns] * setting.episodes)
    _equal(name, "trained episodes", report.trained_episodes, setting.episodes)
    _equal(name, "optimizer steps", report.optimizer_steps, 1)
    _equal(name, "images", report.images, images)
    _equal(name, "image tokens", report.image_tokens, images * TOKENS_PER_IMAGE)
    if not report.vision_moved > 0:
        raise UnequalWorkError(f"{name}: no weight of the vision tower moved, so no image had a part in the loss.")
    for note in ("pixel_rows", "trained_patches"):
        if note in report.notes:
            _equal(name, note, report.notes[note], images * PATCHES_PER_IMAGE)
    if "env_turns" in report.notes:
        _equal(name, "turns that the environments saw", report.notes["env_turns"], report.turns)


def check_pair(ours: StepReport, theirs: StepReport, name: str) -> None:
    """Check a step of this project against the same step of another system.

    Args:
        name: of the other system.

    Raises:
        UnequalWorkError: an episode has another level, or other tokens where none was sampled; the conversations
            differ in length by more than 1 %; weights, attention, threads, optimizer or heap differ.
    """
    _equal(name, "what it runs with", theirs.running, ours.running)
    _equal(name, "levels of the episodes", theirs.levels, ours.levels)
    _equal(name, "number of conversations", len(theirs.fixed_ids), len(ours.fixed_ids))
    for number, (found, wanted) in enumerate(zip(theirs.fixed_ids, ours.fixed_ids, strict=True)):
        _equal(name, f"tokens of episode {number} that were not sampled", found, wanted)
    gap = abs(ours.tokens - theirs.tokens)
    if gap > ALLOWED_TOKEN_DIFFERENCE * min(ours.tokens, theirs.tokens):
        raise UnequalWorkError(f"conversations differ in length: ours {ours.tokens} tokens, {name} {theirs.tokens}.")


def _equal(name: str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise UnequalWorkError(f"{name}: {what} is {found}, not {wanted}; the two systems did not do the same work.")
