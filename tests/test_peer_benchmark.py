"""The benchmark against TRL: our side really does a step, and unequal work never ends in a ratio."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest
from benchmarks.peer.__main__ import prepare_policy
from benchmarks.peer.checks import UnequalWorkError, check_pair, check_step
from benchmarks.peer.ours import run_ours
from benchmarks.peer.report import Comparison, render_docs, summarize
from benchmarks.peer.setting import Setting
from benchmarks.peer.world import make_rows

from runs import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The setting, and the report of one step of ours: two prompts, two episodes each, three turns."""
    folder = tmp_path_factory.mktemp("peer") / "policy"
    prepare_policy(folder, threads=1)
    setting = Setting(folder, turns=3, groups=2, group_size=2, steps=1)
    reports = []
    run_ours(setting, make_rows(2), lambda: True, reports.append)
    (report,) = reports
    return setting, report


def test_our_step_is_the_work_that_the_setting_asks_for(step):
    setting, report = step
    check_step("this project", report, setting)
    check_pair(report, report)
    assert report.writing > 0 and report.wall >= report.generation + report.update
    twice = dataclasses.replace(report, wall=2 * report.wall, cpu=3 * report.cpu, processing=report.wall)
    found = summarize([Comparison(setting, [report], [twice])], {"bf16": False}, {"torch": "2.13.0"})
    text = render_docs(json.loads(json.dumps(found)))
    assert "| 3 | this project |" in text
    assert "- 3 turns: 2.0 times faster (3.0 in CPU-seconds; 1.0 if preparing pictures cost TRL nothing)." in text
    assert "`bf16=False`" in text


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
        {"fixed_ids": [*report.fixed_ids, 1]},
        {"running": "torch.bfloat16"},
        {"tokens": round(1.02 * report.tokens)},
    ):
        with pytest.raises(UnequalWorkError):
            check_pair(report, dataclasses.replace(report, **changed))


@pytest.mark.skipif(not (ROOT / ".venv-trl").exists(), reason="`make bench-peer` has not made .venv-trl")
def test_both_sides_do_a_step(tmp_path):
    # So many episodes that a group has unequal rewards: without one no weight would move.
    words = ("--turns", "3", "--rounds", "1", "--groups", "4", "--group-size", "4", "--out", str(tmp_path / "all.json"))
    command = [str(ROOT / ".venv-trl/bin/python"), "-m", "benchmarks.peer", *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    (compared,) = json.loads((tmp_path / "all.json").read_text())["comparisons"]
    assert [len(compared[name]) for name in ("ours", "trl")] == [1, 1]
