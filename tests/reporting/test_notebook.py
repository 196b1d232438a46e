"""Displays for notebooks, and the notebooks as they are committed."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from PIL import Image

from builders import PAD, make_png
from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.grpo.scoring import assistant_turns
from geo_sokoban_pipeline.reporting import notebook as show
from reporting.material import make_levels, make_trained, play, token_texts
from reporting.run_numbers import make_metrics, make_summary

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_notebooks_are_committed_without_outputs():
    assert NOTEBOOKS[0].name == "01_explore_trajectories.ipynb"
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code), path.name


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
    summary = {**make_summary(), "checkpoints": {"final": {"iteration": 1, "hash": "a" * 32}}, "policies": ["final"]}
    found = ["evaluation is of" in show.show_evaluation(summary, stored).data for stored in (0, 2, 4)]
    assert found == [False, False, True]
    assert shown[2].data.count("data:image/png") == 6
    assert "data:image/gif" in shown[3].data and "tok made" in shown[4].data


def test_the_rewards_of_the_turns_add_up_to_that_of_the_episode():
    """In an evaluation, too, whose turns have the environment's rewards alone: the solving move is worth its bonus."""

    def shown(episode, *args):
        text = show.show_boards(episode, *args).data.replace("\u2212", "-")
        rewards = [float(value) for value in re.findall(r"reward ([+-]?\d+\.\d+)", text)]
        return rewards, float(re.search(r"Reward ([+-]?\d+\.\d+)", text)[1])

    episode = play(make_levels(48)[4], 1.0, "x/sampled", 0)
    args = {"aggregate": "sum", "distance_weight": 0.1}
    bonus = episode.reward_parts["final_bonus"]
    assert bonus > 0 and all(turn.credit is None for turn in episode.turns)
    cells = [episode.reward_parts["dist0"], *(turn.info["box_target_distance"] for turn in assistant_turns(episode))]
    moves = [turn.reward for turn in assistant_turns(episode)]
    wanted = [move + 0.1 * (before - after) for move, (before, after) in zip(moves, pairwise(cells), strict=True)]
    wanted[-1] += bonus
    episode = replace(episode, reward=sum(wanted))
    rewards, whole = shown(episode, args)
    assert rewards == pytest.approx(wanted, abs=0.006) and whole == pytest.approx(sum(wanted), abs=0.006)
    assert all(turn.credit is None for turn in episode.turns), "the episode itself stays as it is"
    # With other arguments they would not add up, so that only the reward of the episode is shown.
    assert shown(episode, {**args, "distance_weight": 0.7}) == ([], pytest.approx(whole))


def test_images_of_all_kinds_have_their_captions():
    png = make_png(32, 1)
    with Image.open(io.BytesIO(png)) as opened:
        shown = show.show_images([png, png_data_uri(png), opened.copy()], ["one <b>", "two"]).data
    assert shown.count("data:image/png;base64,") == 3
    assert "one &lt;b&gt;" in shown and "two" in shown


def test_tokens_are_shaded_by_their_score():
    tokens = pd.DataFrame({"turn": [1, 1, 3], "token": ["<script>", "Up", "Down"], "image_reliance": [0.0, 2.0, -1.0]})
    shown = show.show_scores(tokens).data
    assert "<script" not in shown and "&lt;script&gt;" in shown
    assert re.findall(r'title="([^"]*)" style="background:rgba\(([\d,]+),([\d.]+)\)', shown) == [
        ("+0.000", "220,38,38", "0.00"),
        ("+2.000", "37,99,235", "0.60"),
        ("-1.000", "220,38,38", "0.30"),
    ]
    assert re.findall(r"turn (\d)", shown) == ["1", "3"]


def test_a_map_lies_on_its_image():
    """Blue where a part is needed, red where it misleads, unchanged where it does nothing."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 20), "white").save(buffer, "PNG")
    parts = pd.DataFrame([(0, 0, 20, 20, 2.0), (20, 0, 10, 20, -2.0), (30, 0, 10, 20, 0.0)])
    parts.columns = ["left", "top", "width", "height", "drop"]
    drawn = show.draw_occlusion(buffer.getvalue(), parts, width=80)
    assert drawn.size == (80, 40)
    blue, red, white = (drawn.getpixel((x, 20)) for x in (20, 50, 70))
    assert blue == (80, 130, 239) and red == (227, 81, 81) and white == (255, 255, 255)


def test_newest_episodes_and_what_was_trained_with():
    parts = make_trained()
    assert {episode.iteration for episode in show.load_newest(parts)} == {199}
    assert show.read_image_pad_id(parts) == PAD
    with pytest.raises(ValueError, match="run the pipeline first"):
        show.load_newest({})
    episode = play(make_levels(48)[4], 1.0, "x/sampled", 0)
    episode.advantage = -3.0
    assert show.largest_advantage(episode) == 3.0
    episode.turns[1].advantage = -0.5
    assert show.largest_advantage(episode) == 0.5


# Run id, entry, what is named, the command that makes it, and other run ids.
NOT_STORED = [
    ("seed2", "train_sokoban.episodes@pandas", " of run id seed2", "train_sokoban", " --params run_id=seed2"),
    ("default", "train_sokoban.eval_summary", " of run id default", "train_sokoban", ""),  # an interrupted run
    ("default", "score_sokoban.token_scores@pandas", " of run id default", "score_sokoban", ""),
    ("seed2", "sokoban.prompts", "", "data_sokoban", ""),
]


def test_what_is_not_stored_is_named_with_its_command(tmp_path, monkeypatch):
    (tmp_path / "07_model_output" / "train_sokoban" / "default").mkdir(parents=True)
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", str(tmp_path))
    catalogs = {
        run_id: show.open_catalog(env="test", run_id=run_id, folder=Path(__file__)) for run_id in ("default", "seed2")
    }
    for run_id, name, whose, pipeline, params in NOT_STORED:
        with pytest.raises(show.NotStoredError) as refused:
            catalogs[run_id].load(name)
        others = " Run ids of train_sokoban that are stored: default." if params else ""
        command = f"GEO_SOKOBAN_DATA_ROOT={tmp_path} kedro run --pipelines={pipeline} --env=test{params}"
        assert str(refused.value) == f"{name}{whose} is not stored in {tmp_path}. {command} makes it.{others}"
    with pytest.raises(ValueError, match="is in no Kedro project"):
        show.open_catalog(folder=tmp_path)


def test_one_run_is_compared_with_its_first_policy():
    columns = ["split", "task_id", "policy_version", "iteration", "success"]
    rows = [("train", "a", 0, 0, True), ("validation", "a", 0, 0, False), ("validation", "a", 2, 2, True)]
    rows += [("evaluation", "b", 0, 0, False), ("evaluation", "b", 3, 1, True)]
    first = show.first_policy(pd.DataFrame(rows, columns=columns))
    assert first.to_numpy().tolist() == [["validation", "a", 2, 0, False], ["evaluation", "b", 0, 1, False]]
