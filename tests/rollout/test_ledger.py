"""Token ledger: its contract of appending, and lists that always agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_sokoban_pipeline.rollout.episode import TokenLedger

appends = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8)


@pytest.mark.parametrize(
    ("log_probs", "trainable", "message"),
    [
        (None, True, "sampled tokens need log_probs"),
        (np.zeros(2), False, "take no log_probs"),
        (np.zeros(0), False, "take no log_probs"),
        (np.zeros(1), True, "2 token ids came with 1 log_probs"),
        (np.zeros(3), True, "2 token ids came with 3 log_probs"),
    ],
)
def test_violations_change_nothing(log_probs, trainable, message):
    ledger = TokenLedger(np.array([1, 2, 3], np.int32))
    with pytest.raises(ValueError, match=message):
        ledger.append(np.array([4, 5]), log_probs, trainable=trainable)
    assert ledger.length == len(ledger.token_ids) == len(ledger.loss_mask) == len(ledger.log_probs) == 3
    assert ledger.sampled == 0


@given(prompt=st.integers(0, 6), parts=appends)
def test_lists_agree_whatever_is_appended(prompt, parts):
    ledger = TokenLedger(np.arange(prompt, dtype=np.int32))
    mask, values = [0] * prompt, [0.0] * prompt
    for number, (count, trainable) in enumerate(parts):
        log_probs = np.full(count, -0.5 * (number + 1), np.float32)
        ledger.append(np.full(count, number), log_probs if trainable else None, trainable=trainable)
        mask += [int(trainable)] * count
        values += log_probs.tolist() if trainable else [0.0] * count
        assert len(ledger.token_ids) == ledger.length == len(mask)
    assert ledger.loss_mask.tolist() == mask
    assert ledger.log_probs.tolist() == values
    assert ledger.sampled == sum(mask)
    assert (ledger.token_ids.dtype, ledger.loss_mask.dtype, ledger.log_probs.dtype) == (np.int32, np.int8, np.float32)
    assert ledger.prompt_length == prompt
