"""Tokens of an episode, turn by turn: which were trained, how likely the policy thought them, what they were worth.

Every token of the episode is in exactly one piece, in order; a run of image pads is one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from geo_sokoban_pipeline.reporting.episodes import turn_reward
from geo_sokoban_pipeline.trajectories import Trajectory, Turn

TokenTexts = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class TokenPiece:
    """One token, or a run of image pads.

    Attributes:
        text: as the tokenizer writes it, line ends as ↵; the id where there is no tokenizer.
        token_id: of the token.
        length: tokens of the piece, above 1 only for image pads.
        is_image: whether it stands for a picture.
        is_trained: loss mask 1, which is: the policy wrote it.
        log_prob: under the sampling policy, nats; None where the mask is 0.
    """

    text: str
    token_id: int
    length: int
    is_image: bool
    is_trained: bool
    log_prob: float | None

    @property
    def probability(self) -> float | None:
        """Of the token, in [0, 1]; None where it was not sampled."""
        return None if self.log_prob is None else min(1.0, math.exp(self.log_prob))


@dataclass(frozen=True)
class TokenTurn:
    """Tokens of one turn; the advantage is the turn's own, or the episode's where credit is per episode."""

    role: str
    pieces: tuple[TokenPiece, ...]
    reward: float | None
    advantage: float | None


def token_turns(
    trajectory: Trajectory, image_pad_id: int | None = None, texts: TokenTexts | None = None
) -> list[TokenTurn]:
    """Tokens of all turns.

    Args:
        image_pad_id: from the table's `TableContext`; None shows pads like other tokens.
        texts: text of each id, see `read_token_texts`; None shows ids.
    """
    return [_turn(trajectory, turn, image_pad_id, texts) for turn in trajectory.turns]


def _turn(trajectory: Trajectory, turn: Turn, pad: int | None, texts: TokenTexts | None) -> TokenTurn:
    span = slice(turn.token_start, turn.token_end)
    ids = trajectory.token_ids[span].tolist()
    words = texts(ids) if texts else [str(token) for token in ids]
    rows = zip(
        ids, words, trajectory.loss_mask[span].tolist(), trajectory.rollout_log_probs[span].tolist(), strict=True
    )
    pieces: list[TokenPiece] = []
    for is_image, group in groupby(rows, key=lambda row: row[0] == pad):
        members = list(group)
        if is_image:
            pieces.append(TokenPiece("picture", members[0][0], len(members), True, False, None))
        else:
            pieces += [
                TokenPiece(text.replace("\n", "↵"), token, 1, False, mask == 1, log_prob if mask == 1 else None)
                for token, text, mask, log_prob in members
            ]
    own = turn.role == "assistant"
    advantage = trajectory.advantage if own and turn.advantage is None else turn.advantage
    return TokenTurn(turn.role, tuple(pieces), turn_reward(turn) if own else None, advantage)


def read_token_texts(folder: Path) -> TokenTexts:
    """Texts of token ids by the tokenizer of a policy folder; bytes that are no character alone are shown as �.

    Raises:
        FileNotFoundError: there is no `tokenizer.json` in the folder.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a policy, such as final_policy.")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
