"""The benchmark against TRL: our side really does a step, and unequal work never ends in a ratio."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import numpy as np
import pytest
from benchmarks.peer import __main__ as peer
from benchmarks.peer.checks import UnequalWorkError, check_pair, check_step
from benchmarks.peer.ours import run_ours
from benchmarks.peer.report import Comparison, render_docs, summarize
from benchmarks.peer.setting import Setting, describe_episodes
from benchmarks.setup import make_rows

from runs import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The setting, and the report of one step of ours: two prompts, two episodes each, three turns."""
    folder = tmp_path_factory.mktemp("peer") / "policy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "WARM_START_STEPS", 40)  # enough for responses that are well formed
        peer.prepare_policy(folder, threads=1)
    setting = Setting(folder, turns=3, groups=2, group_size=2, steps=1)
    reports = []
    run_ours(setting, make_rows(2), lambda: True, reports.append)
    (report,) = reports
    return setting, report


def test_our_step_is_the_work_that_the_setting_asks_for(step):
    setting, report = step
    check_step("this project", report, setting)
    check_pair(report, report, "this project")
    assert report.writing > 0 and report.cpu >= report.generation + report.update


def test_every_step_and_the_range_of_the_ratios_are_told(step):
    setting, report = step

    def costs(*pairs, **values):
        return [dataclasses.replace(report, wall=wall, cpu=cpu, **values) for wall, cpu in pairs]

    steps = {
        "ours": costs((1.0, 1.0), (2.0, 2.0), (1.0, 1.0)),
        "cache off": costs((2.0, 2.0), (4.0, 4.0), (2.0, 2.0)),
        "TRL": costs((9.0, 8.0), (9.0, 6.0), (9.0, 5.0), processing=1.0),
    }
    found = summarize([Comparison(setting, steps)], {"bf16": False}, {"trl": "1.16.0", "accelerate": "1.15.0"})
    text = render_docs(json.loads(json.dumps(found)))
    # Medians of the ratios, not ratios of the medians: 8/1, 6/2, 5/1.
    assert (
        "- 3 turns: TRL takes 5.0 (3.0–8.0) times the CPU-seconds of this project (9.0 (4.5–9.0) times its seconds). "
        "It takes 4.0 (2.5–7.0) times without its preparation of images, 2.5 (1.5–4.0) times against this project with "
        "its cache off, and 2.0 (1.2–3.5) times with both changes."
    ) in text
    assert "| 3 | 1 | 1.00 | 1.00 | 2.00 | 2.00 | 9.00 | 8.00 | 8.0 |" in text
    assert "| 3 | 2 | 2.00 | 2.00 | 4.00 | 4.00 | 9.00 | 6.00 | 3.0 |" in text
    assert "| 3 | 3 | 1.00 | 1.00 | 2.00 | 2.00 | 9.00 | 5.00 | 5.0 |" in text
    assert "`bf16=False`" in text and report.running in text


def test_a_token_of_any_episode_counts_unless_it_was_sampled(step):
    _, report = step
    ids = [np.array([7, 8, 20, 21, 9, 22]) + 100 * episode for episode in range(3)]
    masks = [np.array([0, 0, 1, 1, 0, 1])] * 3
    ours = dataclasses.replace(report, **describe_episodes(ids, masks, image_pad_id=8))
    for episode in range(3):
        for place, is_sampled in enumerate(masks[episode]):
            others = [row.copy() for row in ids]
            others[episode][place] += 1
            theirs = dataclasses.replace(report, **describe_episodes(others, masks, image_pad_id=8))
            if is_sampled:
                check_pair(ours, theirs, "TRL")
                continue
            with pytest.raises(UnequalWorkError, match=f"tokens of episode {episode} that were not sampled"):
                check_pair(ours, theirs, "TRL")


def test_unequal_work_raises(step):
    setting, report = step
    for changed in (
        {"turns": [3, 3, 3, 2]},
        {"trained_episodes": 3},
        {"optimizer_steps": 2},
        {"images": 11},
        {"image_tokens": 107},
        {"vision_moved": 0.0},
        {"notes": {"trained_patches": 1}},
        {"notes": {"env_turns": [3, 3, 3, 4]}},
    ):
        with pytest.raises(UnequalWorkError):
            check_step("TRL", dataclasses.replace(report, **changed), setting)
    for changed in (
        {"fixed_ids": report.fixed_ids[:-1]},
        {"levels": [*report.levels[:-1], "another"]},
        {"running": "torch.bfloat16"},
        {"running": report.running.replace(" the heap", " another heap")},
        {"tokens": round(1.02 * report.tokens)},
    ):
        with pytest.raises(UnequalWorkError):
            check_pair(report, dataclasses.replace(report, **changed), "TRL")


@pytest.mark.skipif(not (ROOT / ".venv-trl").exists(), reason="`make bench-peer` has not made .venv-trl")
def test_losses_are_those_of_trl():
    subprocess.run(
        [str(ROOT / ".venv-trl/bin/python"), "-m", "benchmarks.peer.losses"], cwd=ROOT, check=True, timeout=600
    )


@pytest.mark.skipif(not (ROOT / ".venv-trl").exists(), reason="`make bench-peer` has not made .venv-trl")
def test_both_sides_do_a_step(tmp_path):
    # So many episodes that a group has unequal rewards: without one no weight would move.
    words = ("--turns", "3", "--rounds", "1", "--groups", "4", "--group-size", "4", "--out", str(tmp_path / "all.json"))
    command = [str(ROOT / ".venv-trl/bin/python"), "-m", "benchmarks.peer", *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    found = json.loads((tmp_path / "all.json").read_text())
    (compared,) = found["comparisons"]
    assert {system: len(steps) for system, steps in compared["steps"].items()} == {"ours": 1, "cache off": 1, "TRL": 1}
    assert found["made_with"]["torch"] == found["versions"]["torch"]
