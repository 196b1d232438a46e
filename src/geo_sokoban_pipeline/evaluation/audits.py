"""Audits of stored episodes: what the contract cannot check without a tokenizer.

Token parity: the ids that were not sampled equal, id for id, the chat template's rendering of the same messages with
the sampled spans cut out, and every sampled span decodes to its turn's text. So nothing crept in between the turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geo_sokoban_pipeline.policies.chat import ChatCodec, Message, split_placeholders
from geo_sokoban_pipeline.trajectories import Trajectory, Turn

# Private-use characters: no template, prompt or reply contains them.
_OPEN, _CLOSE = "\ue000", "\ue001"


@dataclass(frozen=True)
class ParityError:
    """One difference between stored tokens and the template.

    Attributes:
        trajectory_id: of the episode.
        turn: number of the turn in `turns`.
        problem: what differs, with both sides.
    """

    trajectory_id: str
    turn: int
    problem: str


def check_token_parity(
    trajectories: Sequence[Trajectory], codec: ChatCodec, *, turn_separator: bool = True
) -> list[ParityError]:
    """Compare episodes with the chat template.

    Args:
        codec: chat encoding of the policy that played them.
        turn_separator: whether the separator behind a reply's end token was written; `slime_exact` leaves it out.

    Returns:
        One entry per turn that differs; empty where all is equal.
    """
    return [error for episode in trajectories for error in _check_episode(episode, codec, turn_separator)]


def rendered_pieces(turns: Sequence[Turn], codec: ChatCodec) -> list[str]:
    """Text of the template around the replies: before the first one, between two, and behind the last one.

    The end token that closes a reply counts as the reply's. Where the template rewrites earlier replies no rendering of
    the whole conversation holds what the policy saw; the pieces are then those of a conversation that grows.
    """
    if codec.rewrites_history:
        later = [_message(turn) for turn in turns if turn.role != "assistant"]
        return [codec.render(later[:1]), *map(codec.render_observation, later[1:])]
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            messages.append({"role": "assistant", "content": f"{_OPEN}{number}{_CLOSE}"})
        else:
            messages.append(_message(turn))
    asks = turns[-1].role != "assistant"
    text = codec.render(messages, generation_prompt=asks)
    end = codec.decode([codec.end_id])
    pieces: list[str] = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            piece, _, text = text.partition(f"{_OPEN}{number}{_CLOSE}")
            pieces.append(piece)
            text = text.removeprefix(end)
    return [*pieces, text]


def _message(turn: Turn) -> Message:
    pictures = [{"type": "image"} for _ in turn.image_indices]
    content = split_placeholders(turn.text, pictures) if pictures else [{"type": "text", "text": turn.text}]
    return {"role": turn.role, "content": content}


def _check_episode(episode: Trajectory, codec: ChatCodec, turn_separator: bool) -> list[ParityError]:
    errors: list[ParityError] = []
    pieces = iter(rendered_pieces(episode.turns, codec))
    first = True
    for number, turn in enumerate(episode.turns):
        stored = episode.token_ids[turn.token_start : turn.token_end]
        if turn.role == "assistant":
            expected_text = codec.decode_reply(stored)
            if expected_text != turn.text:
                errors.append(_difference(episode, number, "reply text", turn.text, expected_text))
            continue
        grids = [episode.image_grid_thw[index] for index in turn.image_indices]
        expected = codec.expand(codec.encode_text(next(pieces)), grids)
        if not first and not turn_separator:
            expected = expected[len(codec.separator_ids) :]
        first = False
        if not np.array_equal(stored, expected):
            errors.append(_difference(episode, number, "ids", stored.tolist(), expected.tolist()))
    return errors


def _difference(episode: Trajectory, turn: int, what: str, stored: object, expected: object) -> ParityError:
    return ParityError(episode.trajectory_id, turn, f"{what}: stored {stored!r}, expected {expected!r}")
