"""Episodes as they are shown: boards read back from images, frames and films, tokens, and which ones are chosen."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from builders import PAD, make_png, make_trajectories
from geo_sokoban_pipeline.envs.geo3k.task import GEO3K
from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.drawing import play_moves, read_board, render_png
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.reporting.episodes import (
    describe_end,
    episode_frames,
    episodes_gif,
    is_solved,
    read_token_texts,
    token_turns,
)
from geo_sokoban_pipeline.reporting.training_episodes import choose_extremes, choose_gallery
from reporting.material import PADS, lazily, make_levels, make_played, make_trained, play, token_texts

# Boards, frames, films.


@given(level=st.integers(0, 23), cell_px=st.sampled_from([8, 16, 33]), moves=st.lists(st.sampled_from("udlr")))
@settings(max_examples=40, deadline=None)
def test_image_names_its_board(level, cell_px, moves):
    board = make_levels(48)[level].board
    for move in moves:
        board = board.move({"u": "up", "d": "down", "l": "left", "r": "right"}[move]).board
    assert read_board(render_png(board, cell_px)) == (board, cell_px)


def test_cells_with_what_stands_there():
    """All seven kinds of cells are read; a part of an image names what is in it."""
    for text in ("#######\n#@ $.*#\n#######", "######\n#+ $ #\n######"):
        board = Board.from_text(text)
        assert read_board(render_png(board, 16)) == (board, 16)
    cells = SOKOBAN.image_parts(render_png(Board.from_text("#####\n#@$.#\n#####"), 16))
    assert [cell.content for cell in cells[5:10]] == ["wall", "player", "box", "target", "wall"]
    assert [(cell.left, cell.top, cell.width, cell.height) for cell in cells[5:7]] == [
        (0, 16, 16, 16),
        (16, 16, 16, 16),
    ]
    assert len(cells) == 15


@pytest.mark.parametrize(
    ("size", "columns", "rows"), [((96, 64), 6, 4), ((300, 150), 8, 8), ((20, 10), 1, 1), ((1000, 40), 8, 2)]
)
def test_other_images_have_a_grid(size, columns, rows):
    """Its parts cover every pixel once."""
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    for task in (SOKOBAN, GEO3K):
        parts = task.image_parts(buffer.getvalue())
        assert len(parts) == columns * rows
        covered = np.zeros(size[::-1], int)
        for part in parts:
            covered[part.top : part.top + part.height, part.left : part.left + part.width] += 1
            assert part.content is None
        assert (covered == 1).all()


def test_the_image_after_moves():
    """It ends where the board is solved; there is none of another image or an unknown move."""
    board = Board.from_text("######\n#@$. #\n######")
    shown = render_png(board, 16)
    assert play_moves(shown, ["right", "left", "left"]) == render_png(board.move("right").board, 16)
    assert play_moves(shown, ["fly"]) is None
    for other in (make_png(96, 3), make_png(32, 1)):
        assert read_board(other) is None and play_moves(other, ["up"]) is None


def test_frames_of_an_episode_end_on_the_solved_board_or_its_last_image():
    solved, unsolved = (play(make_levels(48)[level], skill, "x/sampled", 0) for level, skill in ((4, 1.0), (7, 0.0)))
    frames = episode_frames(solved)
    assert [frame.response for frame in frames[:-1]] == [turn.text for turn in solved.turns if turn.role == "assistant"]
    assert [frame.image for frame in frames[:-1]] == solved.images
    assert frames[-1].is_end and read_board(frames[-1].image)[0].is_solved
    assert describe_end(solved) == "Solved in 5 turns."
    frames = episode_frames(unsolved)
    assert frames[-1].image == unsolved.images[-1] and len(frames) == len(unsolved.images)
    assert describe_end(unsolved) == "Not solved after 10 turns."


def test_frames_without_images_or_turns():
    episode = make_trajectories(1)[0]
    for turn in episode.turns:
        turn.image_indices = []
    assert {frame.image for frame in episode_frames(episode)} == {None}
    episode.turns = []
    assert [frame.is_end for frame in episode_frames(episode)] == [True]


def test_films_have_a_frame_per_response_and_the_end():
    """Side by side they are as long as the longest."""
    episodes = [play(make_levels(48)[at], 1.0, "x/sampled", 0) for at in (0, 2, 4)]
    film = episodes_gif(episodes[2:], board_px=96)
    assert episodes_gif(episodes[2:], board_px=96) == film
    with (
        Image.open(io.BytesIO(film)) as one,
        Image.open(io.BytesIO(episodes_gif(episodes, columns=2, board_px=64))) as three,
    ):
        assert one.n_frames == three.n_frames == 6 and one.info["loop"] == 0
        assert three.width < three.height * 1.2
    with pytest.raises(ValueError, match="0 episodes"):
        episodes_gif([])


# Tokens: every token once, the trained ones marked.


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


# Which episodes are shown.


def test_gallery_covers_lengths_and_both_ends():
    pairs = choose_gallery(make_played(), 2)
    kinds = [pair.after.difficulty for pair in pairs]
    assert kinds == sorted(kinds)
    assert set(kinds) == {str(length) for length in range(1, 9)}
    assert {is_solved(pair.after) for pair in pairs} == {True, False}
    assert len(pairs) <= 12
    for pair in pairs:
        assert not json.loads(pair.after.sampling)["greedy"]
        assert pair.after.group_index == pair.before.group_index
        assert "final" in pair.after.trajectory_id and "warm_start" in pair.before.trajectory_id


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_gallery_keeps_its_limit(limit):
    pairs = choose_gallery(make_played(24), 2, limit)
    assert len(pairs) == limit
    assert len({pair.after.difficulty for pair in pairs}) == limit


def test_galleries_of_one_policy_and_of_a_task_without_lengths():
    played = make_played(8)
    pairs = choose_gallery({"iter=00000/part-000": played["iter=00000/part-000"]}, 1)
    assert pairs and all(pair.before is None for pair in pairs)
    episodes = make_trajectories(20, group_size=1, evaluation=True)
    pairs = choose_gallery({"iter=00000/part-000": lazily(episodes)}, 1, 5)
    assert [(pair.after.group_index, pair.after.difficulty) for pair in pairs] == [(at, None) for at in range(5)]


@pytest.mark.parametrize("parts", [{}, {"iter=00001/part-000": lazily([])}])
def test_nothing_stored(parts):
    assert choose_gallery(parts, 2) == [] and choose_extremes(parts) is None


def test_extremes_come_from_the_newest_part_alone():
    extremes = choose_extremes(make_trained())  # the older part refuses to be read
    shown = (*extremes.best, *reversed(extremes.worst))
    above = [episode.reward - extremes.means[episode.trajectory_id] for episode in shown]
    assert above == sorted(above, reverse=True) and above[0] > 0 > above[-1]
    assert (extremes.iteration, extremes.image_pad_id) == (199, PAD)
    for episodes in (extremes.best, extremes.worst):
        assert len({episode.group_index for episode in episodes}) == len(episodes) == 3


def test_graded_and_trained_episodes_are_preferred():
    failed, graded = make_trajectories(2, iteration=1), make_trajectories(8, iteration=0)
    for episode in failed:
        episode.reward = episode.advantage = None
    best = max(graded, key=lambda episode: episode.reward)
    best.trained = False
    extremes = choose_extremes({"iter=00000/part-000": lazily(graded), "iter=00001/part-000": lazily(failed)})
    assert extremes.iteration == 0
    assert best.trajectory_id not in [episode.trajectory_id for episode in extremes.best]
