"""Token ledger: the one place where an episode's tokens, masks and log-probs grow.

Masks and log-probs are derived from where sampled tokens were appended, so `len(token_ids) == len(loss_mask) ==
len(log_probs)` holds by construction, and nothing is ever re-tokenised: what the policy saw is what the trainer sees.
"""

from __future__ import annotations

import numpy as np


class TokenLedger:
    """Tokens of one episode, from the prompt on."""

    def __init__(self, prompt_ids: np.ndarray) -> None:
        self.prompt_length = len(prompt_ids)
        self.length = 0
        self.sampled = 0
        self._ids: list[np.ndarray] = []
        self._sampled: list[tuple[int, np.ndarray]] = []
        self.append(prompt_ids, trainable=False)

    def append(self, token_ids: np.ndarray, log_probs: np.ndarray | None = None, *, trainable: bool) -> None:
        """Add tokens.

        Args:
            token_ids: (T,) ids.
            log_probs: (T,) of sampled tokens; sampled tokens must have them, other tokens must not.
            trainable: whether the policy sampled them (mask 1).

        Raises:
            ValueError: log-probs are missing, unwanted, or of another length.
        """
        if trainable and log_probs is None:
            raise ValueError("sampled tokens need log_probs, one per token.")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that were not sampled take no log_probs; they count as 0.0.")
        if log_probs is not None and len(log_probs) != len(token_ids):
            raise ValueError(f"{len(token_ids)} token ids came with {len(log_probs)} log_probs.")
        count = len(token_ids)
        self._ids.append(np.asarray(token_ids, np.int32))
        if log_probs is not None:
            self._sampled.append((self.length, np.asarray(log_probs, np.float32)))
            self.sampled += count
        self.length += count

    @property
    def token_ids(self) -> np.ndarray:
        """(L,) int32 ids so far."""
        if len(self._ids) > 1:
            self._ids = [np.concatenate(self._ids)]
        return self._ids[0]

    @property
    def loss_mask(self) -> np.ndarray:
        """(L,) int8, 1 exactly on sampled tokens."""
        mask = np.zeros(self.length, np.int8)
        for start, log_probs in self._sampled:
            mask[start : start + len(log_probs)] = 1
        return mask

    @property
    def log_probs(self) -> np.ndarray:
        """(L,) float32, 0.0 where the mask is 0."""
        values = np.zeros(self.length, np.float32)
        for start, log_probs in self._sampled:
            values[start : start + len(log_probs)] = log_probs
        return values
