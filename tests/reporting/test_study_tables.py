"""Rates, differences and verdicts of a study."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.reporting import study_tables
from geo_sokoban_pipeline.reporting.study_tables import (
    Rate,
    Verdict,
    describe_criterion,
    find_rate,
    judge_criterion,
    judge_growth,
    judge_minutes,
    judge_spent,
    mean_share,
    rates_by,
)
from geo_sokoban_pipeline.tasks import task_or_plain
from study_material import make_results, make_seed, row

ROWS = [row("warm_start", 256), row("final", 400), row("random_legal", 128, "-"), row("final", 300, "greedy")]


@pytest.mark.parametrize(
    ("player", "mode", "solved"),
    [
        ("final", "sampled", 400),
        ("final", "greedy", 300),
        ("random_legal", "greedy", 128),
        ("warm_start", "greedy", None),
    ],
)
def test_find_rate(player, mode, solved):
    found = find_rate(ROWS, player, mode)
    assert (found.solved if found else None) == solved


def test_a_rate_is_written_with_its_interval():
    # Wilson, 59 of 100 at 95 %: 0.4920 to 0.6813 (checked by hand).
    assert Rate(59, 100).write() == "59.0\u202f% [49.2–68.1]"


@pytest.mark.parametrize(
    ("bar", "text", "met"),
    [
        ({"player": "final", "at_least": 62.5}, "62.5", True),
        ({"player": "final", "at_least": 62.6}, "62.5", False),
        ({"player": "final", "over": "warm_start", "at_least": 22.5}, "+22.5", True),
        ({"player": "final", "over": "warm_start", "at_least": 22.6}, "+22.5", False),
        ({"player": "final", "over": "warm_start", "at_least": 20, "apart": True}, "+22.5, apart", True),
        ({"player": "warm_start", "over": "random_legal", "at_most": 5}, "+20.0", False),
        ({"player": "random_legal", "over": "final", "at_most": 5}, "−42.5", True),
        ({"player": "final", "over": "control_teacher", "at_least": 15}, "–", None),
    ],
)
def test_bars(bar, text, met):
    verdict = judge_criterion(bar, ROWS)
    assert (verdict.text, verdict.met) == (text, met)


FEW = [row("warm_start", 8, episodes=20), row("final", 13, episodes=20)]
OVER = {"player": "final", "over": "warm_start", "at_least": 20}
WORSE = {"player": "warm_start", "over": "final", "at_most": 5, "apart": True}


@pytest.mark.parametrize(
    ("judge", "given", "text", "met"),
    [
        (judge_criterion, (OVER, FEW), "+25.0", True),
        (judge_criterion, ({**OVER, "apart": True}, FEW), "+25.0, intervals overlap", False),
        (judge_criterion, (WORSE, FEW), "−25.0, intervals overlap", False),  # the better one may be the other
        (judge_minutes, (8.0, 8), "8.0", True),
        (judge_minutes, (8.01, 8), "8.0", False),
        (judge_minutes, (None, 8), "– (was interrupted)", None),
        (judge_minutes, (7.0, 8, 2), "– (not alone)", None),
        (judge_growth, ([[20, 2.0], [200, 2.1]], 5), "+5.0 % (2.00 to 2.10 GB)", True),
        (judge_growth, ([[20, 2.0], [200, 2.11]], 5), "+5.5 % (2.00 to 2.11 GB)", False),
        (judge_growth, ([], 5), "– (too few iterations)", None),
        (judge_spent, ({"cpu_seconds": {"grpo": 200.0, "control": 194.0}}, "control", 0.97), "0.97", True),
        (judge_spent, ({"cpu_seconds": {"grpo": 200.0, "control": 193.0}}, "control", 0.97), "0.96", False),
        (judge_spent, ({"cpu_seconds": {"grpo": 200.0}}, "control", 0.97), "–", None),
        (judge_spent, ({"cpu_seconds": {"control": 1.0, "grpo": 0.0}}, "control", 0.97), "–", None),
    ],
)
def test_verdicts(judge, given, text, met):
    assert judge(*given) == Verdict(text, met)


def test_bars_in_words():
    bar = {"player": "final", "mode": "greedy", "over": "random_legal", "at_least": 35.0, "apart": True}
    wanted = "after GRPO, greedy: at least 35 points above random legal moves, intervals apart"
    assert describe_criterion(bar, SOKOBAN.report) == wanted
    assert (
        describe_criterion({"player": "warm_start", "at_least": 20}, SOKOBAN.report)
        == "warm start, sampled: at least 20 %"
    )


def test_lengths_stay_apart_by_seed():
    seeds = [make_seed(0, 330), make_seed(1, 350)]
    longer = [Rate(10, 320), Rate(30, 320)]
    assert rates_by(seeds, "final", "sampled", "by_length") == {1: [Rate(320, 320)] * 2, 2: longer}
    assert rates_by(seeds, "control_optimal", "sampled", "by_length") == {}


@pytest.mark.parametrize(("rates", "mean"), [([Rate(1, 4), Rate(3, 4)], 0.5), ([Rate(1, 4), None], None), ([], None)])
def test_a_mean_needs_every_seed(rates, mean):
    assert mean_share(rates) == mean


def test_a_task_without_words_of_its_own_has_the_tables_that_all_have(monkeypatch):
    monkeypatch.setattr(study_tables, "task_of", task_or_plain)
    seed = make_seed(0, 420)
    for found in seed["rows"]:
        del found["by_length"]
    levels = {"count": 640, "validation_count": 160}
    further = {"name": "more", "title": "More", "levels": levels, "seeds": [{"seed": 0, "rows": seed["rows"]}]}
    results = make_results(seed, sets=[further]) | {"task": "dots", "levels": levels}
    text = study_tables.render_summary(results) + study_tables.render_tables(results)
    assert "Evaluated on 640 evaluation prompts; one episode per prompt" in text
    assert "**More.** Evaluated on 640" in text
    assert text.count("| **after GRPO, sampled** | 65.6") == 2 and "**By " not in text
