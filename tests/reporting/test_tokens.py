"""Token views: every token once, the trained ones marked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PAD, make_trajectories
from geo_sokoban_pipeline.reporting.episodes import read_token_texts, token_turns
from reporting.material import PADS, make_levels, play, token_texts


@given(turns=st.integers(1, 4), response=st.integers(1, 6), observation=st.integers(0, 5), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_pieces_partition_the_tokens(turns, response, observation, seed):
    episode = make_trajectories(1, turns, response_tokens=response, observation_tokens=observation, seed=seed)[0]
    pieces = [piece for turn in token_turns(episode, PAD) for piece in turn.pieces]
    assert sum(piece.length for piece in pieces) == len(episode.token_ids)
    assert sum(piece.is_trained for piece in pieces) == episode.loss_mask.sum()
    assert sum(piece.length for piece in pieces if piece.is_image) == (episode.token_ids == PAD).sum()
    assert all((piece.probability is None) != piece.is_trained for piece in pieces)
    assert all(0 <= piece.probability <= 1 for piece in pieces if piece.is_trained)


def test_texts_and_line_ends():
    """Without a tokenizer the ids are shown."""
    episode = play(make_levels(48)[1], 1.0, "x/sampled", 0)
    user, assistant = token_turns(episode, PAD, token_texts)[:2]
    assert [piece.text for piece in user.pieces[:4]] == ["<|im_start|>", "user", "↵", "image"]
    assert user.pieces[3].length == PADS
    assert "".join(piece.text for piece in assistant.pieces).startswith("<answer>")
    assert str(PAD) in [piece.text for piece in token_turns(episode)[0].pieces]


def test_advantage_is_the_turns_own_or_the_episodes():
    episode = make_trajectories(2, group_size=2)[0]
    assert {turn.advantage for turn in token_turns(episode) if turn.role == "assistant"} == {episode.advantage}
    episode.turns[1].advantage = 0.25
    assert token_turns(episode)[1].advantage == 0.25
    assert token_turns(episode)[0].advantage is None


def test_texts_of_a_stored_tokenizer(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist; give the folder of a policy"):
        read_token_texts(tmp_path)
    tokenizer = Tokenizer(models.BPE(vocab={"Up": 0, "Ġ": 1, "Ã": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_token_texts(tmp_path)([0, 1, 2]) == ["Up", " ", "\ufffd"]
