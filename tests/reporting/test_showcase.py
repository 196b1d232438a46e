"""The same problems before and after GRPO, as a drawing that stands alone."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest
from scripts.readme_pictures import draw_responses

from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.reporting.episodes import episode_frames
from geo_sokoban_pipeline.reporting.training_episodes import choose_gallery
from reporting.problem_material import make_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("task", ["geo3k", "geo3k_multi_turn"])
def test_cards(task):
    pairs = choose_gallery(make_run(task).held_out, 2, 5)
    svg = draw_responses(pairs)
    root = ElementTree.fromstring(svg)
    images = [image.get("href") for image in root.iter(f"{SVG}image")]
    assert images == [png_data_uri(episode_frames(pair.after)[0].image) for pair in pairs]
    texts = [(text.get("class"), text.text) for text in root.iter(f"{SVG}text")]
    assert [text for kind, text in texts if kind == "title"] == ["after SFT", "after GRPO"] * len(pairs)
    played = [one for pair in pairs for one in (pair.before, pair.after)]
    marks = [(kind, text) for kind, text in texts if kind in ("right", "wrong")]
    for (kind, text), one in zip(marks, played, strict=True):
        right = one.metrics.get("first_attempt_correct", one.metrics["success"]) == 1
        assert (kind, text) == ("right" if right else "wrong", f"{'✓' if right else '✗'} {answer_of(one)}")
    assert {kind for kind, _ in marks} == {"right", "wrong"}
    assert draw_responses(pairs) == svg


def test_responses_are_escaped_and_stay_on_their_card():
    pair = choose_gallery(make_run("geo3k").held_out, 2, 1)[0]
    for turn in (turn for turn in pair.after.turns if turn.role == "assistant"):
        turn.text = "<b>" + "long & winding " * 20
    root = ElementTree.fromstring(draw_responses([dataclasses.replace(pair, before=None)]))
    lines = list(root.iter(f"{SVG}text"))
    assert [text.text for text in lines][:2] == ["after GRPO", "<b>long & winding"] and len(lines) == 4
    assert all(len(line.text) <= 21 and float(line.get("y")) < float(root.get("height")) for line in lines)
    with pytest.raises(ValueError, match="no prompts to show: give the episodes of an evaluation"):
        draw_responses([])


def answer_of(episode):
    return episode_frames(episode)[0].action or "no answer"
