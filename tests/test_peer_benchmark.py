"""The benchmark against TRL: our side really does a step, and unequal work never ends in a ratio."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from runs import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def peer():
    """The benchmarks can be imported; TRL is not needed for our side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def step(peer, tmp_path_factory):
    """The setting, and the report of one step of ours: two prompts, two episodes each, three turns."""
    from benchmarks.peer.__main__ import prepare_policy
    from benchmarks.peer.ours import run_ours
    from benchmarks.peer.setting import Setting
    from benchmarks.peer.world import make_rows

    folder = tmp_path_factory.mktemp("peer") / "policy"
    prepare_policy(folder, threads=1)
    setting = Setting(folder, turns=3, groups=2, group_size=2, steps=1)
    reports = []
    run_ours(setting, make_rows(2), lambda: True, reports.append)
    (report,) = reports
    return setting, report


def test_our_step_is_the_work_that_the_setting_asks_for(step):
    from benchmarks.peer.checks import check_pair, check_step
    from benchmarks.peer.report import Comparison, format_table

    setting, report = step
    check_step("this project", report, setting)
    check_pair(report, report)
    assert report.writing > 0 and report.wall >= report.generation + report.update
    table = format_table([Comparison(setting, [report], [dataclasses.replace(report, processing=0.01)])])
    assert "| 3 | this project |" in table and "1.0 times faster" in table


def test_unequal_work_raises(step):
    from benchmarks.peer.checks import UnequalWorkError, check_pair, check_step

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
