"""Previews for kedro-viz: what they show, and that no text of a policy or of data becomes markup there."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from builders import CONTEXT, make_png
from geo_sokoban_pipeline.datasets import PromptsDataset, ReportDataset
from geo_sokoban_pipeline.envs.images import encode_png, png_data_uri
from geo_sokoban_pipeline.reporting.previews import preview_episodes, preview_prompts, preview_result
from geo_sokoban_pipeline.runs.storage import write_json
from geo_sokoban_pipeline.trajectories.types import Trajectory, trajectories_to_table
from reporting.material import make_levels, play
from reporting.run_numbers import make_summary

HOSTILE = "<script>alert(1)</script> </div> [x](javascript:alert(1)) *a* _b_ __c__ `d`\n\n# e\n| f |\n|---|"
FOLDER = "geo_sokoban_pipeline.reporting.previews"


def texts_of(html: str) -> str:
    """A preview without the data of its images."""
    return re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]*", "", html)


def assert_is_plain(html: str) -> None:
    """HTML that kedro-viz shows as it is: no script, and nothing that its Markdown changes."""
    text = texts_of(html)
    assert "<script" not in text and "&lt;script&gt;" in text and "&lt;/div&gt;" in text
    assert not set("*_`\n") & set(text) and "](" not in text
    assert "[x]\u200b(javascript:alert(1)) ∗a∗ ˍbˍ" in text


@pytest.fixture
def episode() -> Trajectory:
    return play(make_levels(48)[4], 1.0, "x/sampled", 0)


def show(*episodes: Trajectory) -> str:
    return preview_episodes(trajectories_to_table(list(episodes), CONTEXT))


def test_an_episode_is_a_strip_of_its_images(episode: Trajectory) -> None:
    html = show(episode, play(make_levels(48)[4], 1.0, "x/sampled", 1))
    frames = 2 * (len(episode.images) + 1)  # the end has an image, too
    assert (html.count("<b>"), html.count("data:image/png;base64,")) == (2, frames)
    assert "Solved in" in html and "reward +" in html
    assert show() == "no episodes"
    episode.images = [encode_png(np.zeros((300, 900, 3), np.uint8))] * len(episode.images)
    (uri, *_) = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]*)", show(episode))
    assert Image.open(io.BytesIO(base64.b64decode(uri))).size == (240, 80)


def test_text_of_a_policy_stays_text(episode: Trajectory) -> None:
    """Also without images, when the response is shown."""
    for turn in episode.turns:
        turn.text, turn.action = HOSTILE, None
    assert_is_plain(show(episode))
    episode.images, episode.image_grid_thw, episode.response = [], [], HOSTILE
    for turn in episode.turns:
        turn.image_indices = []
    html = show(episode)
    assert "<img" not in html
    assert_is_plain(html)


def test_prompts_show_image_text_and_answer() -> None:
    uri = png_data_uri(make_png(96, 1))
    rows = [
        {"id": "a", "prompt": "<image>Find x.", "answer": "36", "images": np.array([uri], object)},
        {"id": "b", "prompt": HOSTILE, "images": ["javascript:alert(2)"]},
        {"id": "c", "prompt": "words alone", "images": None},
    ]
    html = preview_prompts(rows)
    assert html.count(uri) == 1 and "a Find x. → 36" in html and "alert(2)" not in html and "c words alone" in html
    assert_is_plain(html)
    assert preview_prompts([]) == "no prompts"


def test_a_result_has_the_headline_and_the_policies() -> None:
    summary = make_summary()
    html = preview_result(summary)
    assert "GRPO raised the solve rate" in html and "after GRPO, sampled" in html and "\n" not in html
    assert html.count("<tr>") == len(summary["rows"]) + 1
    assert preview_result({}).startswith("<div><b>No evaluation is stored for this run.")


def test_the_entries_call_them(tmp_path) -> None:
    import pandas as pd

    prompts = PromptsDataset(path=str(tmp_path / "p.parquet"), previewer=f"{FOLDER}.preview_prompts")
    prompts.save(pd.DataFrame({"id": ["a", "b", "c"], "prompt": ["one", "two", "three"], "images": [[], [], []]}))
    assert "b two" in prompts.preview(2) and "three" not in prompts.preview(2)
    report = ReportDataset(
        str(tmp_path / "report.html"), str(tmp_path / "eval_summary.json"), f"{FOLDER}.preview_result"
    )
    assert (report.exists(), report.preview()) == (False, "")
    report.save("<p>√</p>")
    assert (report.load(), report.preview()) == ("<p>√</p>", "")
    write_json(tmp_path / "eval_summary.json", make_summary())
    assert "GRPO raised" in report.preview()


def test_a_report_that_cannot_be_stored_leaves_the_one_before(tmp_path, monkeypatch) -> None:
    from kedro.io import DatasetError

    report = ReportDataset(
        str(tmp_path / "report.html"), str(tmp_path / "eval_summary.json"), f"{FOLDER}.preview_result"
    )
    report.save("first")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", fail)
        with pytest.raises(DatasetError, match=r"report.html: disk full, about 6 bytes needed"):
            report.save("second")
    assert report.load() == "first" and [path.name for path in tmp_path.iterdir()] == ["report.html"]
