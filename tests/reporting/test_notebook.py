"""Displays for notebooks, and the notebooks as they are committed."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from builders import PAD
from geo_sokoban_pipeline.reporting import notebook as show
from reporting.material import make_levels, make_trained, play, token_texts
from reporting.run_numbers import make_metrics, make_summary

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


def test_there_is_a_first_notebook():
    assert [path.name for path in NOTEBOOKS][:1] == ["01_explore_trajectories.ipynb"]


def test_displays_need_no_script():
    episode = play(make_levels(48)[4], 1.0, "x/sampled", 0)
    episode.turns[1].text = "<script>alert(1)</script>"
    shown = [
        show.show_curves(make_metrics(60)),
        show.show_evaluation(make_summary()),
        show.show_boards(episode),
        show.show_film(episode, board_px=64),
        show.show_tokens(episode, PAD, token_texts),
    ]
    for piece in shown:
        assert "<script" not in piece.data
    assert "<svg" in shown[0].data and "after GRPO, sampled" in shown[1].data
    assert shown[2].data.count("data:image/png") == 6
    assert "data:image/gif" in shown[3].data and "tok made" in shown[4].data


def test_newest_episodes():
    parts = make_trained()
    assert {episode.iteration for episode in show.load_newest(parts)} == {199}
    assert show.read_image_pad_id(parts) == PAD
    with pytest.raises(ValueError, match="run the pipeline first"):
        show.load_newest({})


def test_what_counts_of_an_episode_is_what_was_trained_with():
    episode = play(make_levels(48)[4], 1.0, "x/sampled", 0)
    episode.advantage = -3.0
    assert show.largest_advantage(episode) == 3.0
    episode.turns[1].advantage = -0.5
    assert show.largest_advantage(episode) == 0.5


def test_catalog_outside_a_project(tmp_path):
    with pytest.raises(ValueError, match="is in no Kedro project"):
        show.open_catalog(folder=tmp_path)
