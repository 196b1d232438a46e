"""Numbers of an evaluation: intervals over clusters, pass@k, rows of the summary, paired tests."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from geo_sokoban_pipeline.envs.metrics import (
    cluster_interval,
    count_solved,
    mean_pass_at_k,
    pass_at_k,
    wilson_interval,
)
from geo_sokoban_pipeline.envs.sokoban.evaluation import LevelRecord
from geo_sokoban_pipeline.envs.sokoban.task import SOKOBAN
from geo_sokoban_pipeline.evaluation.metrics import mcnemar, paired_test
from geo_sokoban_pipeline.evaluation.rollouts import response_metrics, summary_row
from geo_sokoban_pipeline.reporting.comparison import ComparedRun
from geo_sokoban_pipeline.reporting.facts import compare_policies


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (81, 263, 0.255266, 0.366191),  # Newcombe 1998, table I: 0.2553 to 0.3662
        (15, 148, 0.062386, 0.160526),  # 0.0624 to 0.1605
        (1, 29, 0.006113, 0.171755),  # 0.0061 to 0.1718
        (0, 0, 0.0, 1.0),
    ],
)
def test_published_values(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


COUNTS = st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(COUNTS, st.floats(0.1, 5))
def test_interval_holds_the_share_and_lies_in_range(counts, z):
    successes, n = counts
    low, high = wilson_interval(successes, n, z)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    assert high > low


@given(COUNTS)
def test_failures_mirror_successes_and_more_trials_narrow(counts):
    successes, n = counts
    low, high = wilson_interval(successes, n)
    mirrored = wilson_interval(n - successes, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)
    wide = wilson_interval(4 * successes, 4 * n)
    assert wide[1] - wide[0] < high - low


# Clusters.


CLUSTERS = st.lists(
    st.integers(1, 12).flatmap(lambda size: st.tuples(st.integers(0, size), st.just(size))), min_size=1, max_size=70
)


@given(CLUSTERS)
def test_an_interval_over_clusters_holds_the_share_and_has_a_width(clusters):
    successes, sizes = map(list, zip(*clusters, strict=True))
    low, high = cluster_interval(successes, sizes)
    share = sum(successes) / sum(sizes)
    assert 0.0 <= low <= share <= high <= 1.0 and high - low > 1e-4
    failed = [size - won for won, size in clusters]
    assert cluster_interval(failed, sizes) == pytest.approx((1 - high, 1 - low), abs=1e-9)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.integers(1, 9))
def test_copies_add_no_evidence(counts, copies):
    """Distinct prompts have the Wilson interval; copies that end alike leave it as it is."""
    solved, n = counts
    successes = [at < solved for at in range(n)] * copies
    row = count_solved(successes, [str(at) for at in range(n)] * copies)
    assert (row["episodes"], row["clusters"], row["solved"]) == (n * copies, n, solved * copies)
    assert (row["low"], row["high"]) == pytest.approx(wilson_interval(solved, n))


def test_unequal_copies_and_none():
    # 283 rows of 24 problems, 104 of them solved: the interval is about that of 24 trials, not of 283.
    clusters = [str(at % 24) for at in range(276)] + ["0"] * 7
    solved = [at in ("0", "2", "4", "5", "7", "12", "15", "20", "22") for at in clusters]
    row = count_solved(solved, clusters)
    low, high = wilson_interval(row["solve_rate"] * 24, 24)
    assert (row["low"], row["high"]) == pytest.approx((low, high), abs=0.06)
    assert count_solved([], [])["clusters"] == 0 and cluster_interval([], []) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "sizes"), [([1, 2], [2, 4]), ([1120, 1995], [1600, 2850])])
def test_clusters_with_equal_shares_are_single_trials(successes, sizes):
    """Also where the shares are equal up to rounding alone: 0.7 of 4,450 is no whole number of a binary float."""
    share = successes[0] / sizes[0]
    assert cluster_interval(successes, sizes) == pytest.approx(wilson_interval(2 * share, 2))


@pytest.mark.parametrize("clusters", [*range(2, 11), 12, 19])
def test_few_clusters_have_the_interval_of_student(clusters):
    """Of the log-odds of the share, whose error is that of the jackknife over clusters."""
    won, size = np.array([1, 2, 3] * 7)[:clusters], np.full(clusters, 4)
    share, without = won.sum() / size.sum(), (won.sum() - won) / (size.sum() - size)
    error = math.sqrt((clusters - 1) / clusters * ((without - share) ** 2).sum()) / (share * (1 - share))
    odds, reach = math.log(share / (1 - share)), stats.t.ppf(0.975, clusters - 1) * error
    expected = [1 / (1 + math.exp(-bound)) for bound in (odds - reach, odds + reach)]
    assert cluster_interval(won, size) == pytest.approx(expected, abs=3e-4)  # the quantile is a series


def test_resamples_without_spread_are_in_the_middle():
    """One in eight resamples holds halves alone: its share is the true one, and its error none."""
    low, high = cluster_interval([*[2] * 22, 0, 4], [4] * 24)
    assert low + high == pytest.approx(1.0, abs=1e-3) and 0.4 < low < 0.5


@pytest.mark.parametrize(
    ("successes", "sizes"), [([199, 0], [200, 1]), ([1, 0], [1, 200]), ([0, 1], [400, 1]), ([639, 0, 0], [640, 1, 1])]
)
def test_two_clusters_of_very_unequal_size_say_next_to_nothing(successes, sizes):
    low, high = cluster_interval(successes, sizes)
    assert low <= sum(successes) / sum(sizes) <= high and high - low > 0.9


# Clusters, about how many episodes each, correlation within them, share; 95 % are wanted.
SIMULATED = {
    "ten": (10, 11, 0.3, 0.5),
    "ten, independent": (10, 11, 0.0, 0.9),
    "24": (24, 11, 0.3, 0.3),
    "24, much alike": (24, 11, 0.6, 0.5),
    "24, one each": (24, 1, 0.0, 0.7),
    "57": (57, 11, 0.1, 0.7),
    "57, hardly any": (57, 11, 0.6, 0.1),
    "200": (200, 11, 0.3, 0.9),
    "20, hardly any": (20, 11, 0.3, 0.1),
    "24, much alike, hardly any": (24, 11, 0.6, 0.1),
    "57, much alike, hardly any": (57, 11, 0.6, 0.05),
}


@pytest.mark.parametrize(("clusters", "size", "alike", "share"), SIMULATED.values(), ids=SIMULATED)
def test_coverage(clusters, size, alike, share):
    """Beta-binomial clusters of unequal sizes: the interval holds the true share in 92 to 97 % of the samples.

    The interval is the bootstrap-t of Davison and Hinkley (1997, section 5.2), below 20 clusters Student's t with the
    jackknife over clusters (CV3 of MacKinnon, Nielsen and Webb, 2023).
    """
    generator, times = np.random.default_rng(4), min(1000, 30_000 // clusters)
    sizes = generator.integers(1, 2 * size, (times, clusters)) if size > 1 else np.ones((times, clusters), int)
    spread = 1 / alike - 1 if alike else None
    rates = generator.beta(share * spread, (1 - share) * spread, sizes.shape) if spread else share
    successes = generator.binomial(sizes, rates)
    intervals = [cluster_interval(*sample) for sample in zip(successes.tolist(), sizes.tolist(), strict=True)]
    assert 0.92 <= np.mean([low <= share <= high for low, high in intervals]) <= 0.97


# pass@k: the estimator equals the mean over all subsets of k responses.


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_it_is_the_mean_over_all_subsets(responses, data):
    k = data.draw(st.integers(1, len(responses)))
    subsets = list(combinations(responses, k))
    exact = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(responses), sum(responses), k) == pytest.approx(exact)


def test_mean_over_prompts():
    assert mean_pass_at_k([(4, 1), (4, 4), (5, 0)]) == pytest.approx({"1": 1.25 / 3, "2": 1.5 / 3, "4": 2 / 3})
    assert mean_pass_at_k([]) == {}
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)  # large counts do not overflow
    assert list(mean_pass_at_k([(8, 1)])) == ["1", "2", "4", "8"] and list(mean_pass_at_k([(1, 1)])) == ["1"]


@pytest.mark.parametrize(
    ("function", "counts", "message"),
    [
        *((wilson_interval, counts, "=") for counts in ((3, 2, 1.96), (-1, 2, 1.96), (0, -1, 1.96), (1, 2, 0.0))),
        *((pass_at_k, (n, c, k), f"n={n}, c={c}, k={k}") for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5))),
    ],
)
def test_bad_counts_are_refused(function, counts, message):
    with pytest.raises(ValueError, match=message):
        function(*counts)


# Rows: counts, and what stays None.


def summarise_episodes(records, policy="final", mode="sampled"):
    return summary_row(SOKOBAN, records, policy=policy, mode=mode)


RECORDS = [
    # prompt, solved, return, turns, invalid turns, steps, optimal steps
    LevelRecord("a", True, 7.0, 3, 0, 3, 3),
    LevelRecord("a", False, -0.5, 10, 4, 10, 3),
    LevelRecord("b", True, 6.0, 6, 0, 6, 4),
    LevelRecord("b", True, None, 1, 0, 4, 4),
    LevelRecord("c", True, 5.5, 9, 1, 9, None),  # the solver hit its limit
    LevelRecord("c", False, None, 0, 0, None, None),  # failed before its first turn
]


def test_row():
    row = summarise_episodes(RECORDS, policy="final", mode="sampled")
    low, high = cluster_interval([1, 2, 1], [2, 2, 2])  # by prompt: two samples of one are no two pieces of evidence
    half, both = cluster_interval([1], [2]), cluster_interval([2], [2])
    cell = {"episodes": 2, "clusters": 1}
    assert row == {
        "policy": "final",
        "mode": "sampled",
        "episodes": 6,
        "clusters": 3,
        "solved": 4,
        "solve_rate": pytest.approx(4 / 6),
        "low": low,
        "high": high,
        "mean_return": pytest.approx((7.0 - 0.5 + 6.0 + 5.5) / 4),
        "steps_over_optimal": pytest.approx((1 + 1.5 + 1) / 3),
        "invalid_share": pytest.approx(5 / 29),
        "by_length": [
            cell | {"length": 3, "solved": 1, "solve_rate": 0.5, "low": half[0], "high": half[1]},
            cell | {"length": 4, "solved": 2, "solve_rate": 1.0, "low": both[0], "high": both[1]},
        ],
        "pass_at_k": pytest.approx({"1": 4 / 6, "2": 1.0}),
    }
    json.dumps(row, allow_nan=False)
    assert summarise_episodes(RECORDS[1:3])["pass_at_k"] is None
    # Numbers of nothing that was played are None, not 0.
    row = summarise_episodes([], policy="random", mode="-")
    assert (row["episodes"], row["solved"], row["low"], row["high"], row["by_length"]) == (0, 0, 0.0, 1.0, [])
    names = ("solve_rate", "mean_return", "steps_over_optimal", "invalid_share", "pass_at_k")
    assert [row[name] for name in names] == [None] * 5


EPISODES = st.builds(
    LevelRecord,
    prompt_id=st.sampled_from("abcd"),
    success=st.booleans(),
    ret=st.none() | st.floats(-5, 10),
    steps=st.none() | st.integers(1, 30),
    optimal_steps=st.none() | st.integers(0, 8),
    turns=st.integers(1, 10),
    invalid_turns=st.integers(0, 1),
)


@given(st.lists(EPISODES, max_size=20))
def test_lengths_add_up_and_every_number_is_json(records):
    row = summarise_episodes(records)
    known = [record for record in records if record.optimal_steps is not None]
    assert sum(part["episodes"] for part in row["by_length"]) == len(known)
    assert sum(part["solved"] for part in row["by_length"]) == sum(record.success for record in known)
    assert [part["length"] for part in row["by_length"]] == sorted({record.optimal_steps for record in known})
    assert row["invalid_share"] is None or 0.0 <= row["invalid_share"] <= 1.0
    json.dumps(row, allow_nan=False)


def test_response_metrics():
    metrics = response_metrics([4, 8, 6, 2], [True, False, False, False], ["a" * 10_001, "b", "c", "d"])
    assert metrics == {
        "response_len/mean": 5.0,
        "response_len/median": 5.0,
        "response_len/max": 8.0,
        "response_len/min": 2.0,
        "truncated_ratio": 0.25,
        "repetition_frac": 0.25,
    }
    assert set(response_metrics([], [], []).values()) == {None}


# Paired tests: policies on the same prompts.


def outcomes(*values: str) -> dict[str, list[list[bool]]]:
    """One prompt for each text, with one row for each word of it and an episode for each letter."""
    return {f"p{at}": [[letter == "1" for letter in row] for row in value.split()] for at, value in enumerate(values)}


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (1, 0, 0.5),  # 2 * (1/2) - 1/2
        (5, 0, 2 / 32 - 1 / 32),
        (17, 7, 0.043),
    ],
)
def test_mcnemar_of_single_pairs(gained, lost, p):
    assert mcnemar([1] * gained + [-1] * lost + [0, 0]) == pytest.approx(p, abs=5e-4)
    assert mcnemar([-1] * gained + [1] * lost) == mcnemar([1] * gained + [-1] * lost)


@pytest.mark.parametrize("gains", [[3, -1, 2, 0, 5], [1, 1, 1, 1, -4], [7], [2, 2, -2], [6, -5, 4, 3, -2, 1, 1]])
def test_clustered_mcnemar_is_exact_over_all_signs(gains):
    sums = [abs(sum(chosen)) for chosen in itertools.product(*[(gain, -gain) for gain in gains])]
    total = abs(sum(gains))
    beyond, equal = (sum(size > total for size in sums), sum(size == total for size in sums))
    assert mcnemar(gains) == pytest.approx((beyond + equal / 2) / len(sums) if total else 1.0)


def test_of_many_clusters_it_is_the_test_of_yang_sun_and_hardin():
    gains = [(7 * at) % 11 - 4 for at in range(60)]
    statistic = sum(gains) ** 2 / sum(gain * gain for gain in gains)
    assert mcnemar(gains) == pytest.approx(math.erfc(math.sqrt(statistic / 2)), abs=0.003)


def test_the_same_prompts_decide_what_two_intervals_leave_open():
    # 60 of 100 against 70 of 100: the intervals overlap, but ten prompts were gained and none lost.
    first = outcomes(*["1"] * 60, *["0"] * 40)
    second = outcomes(*["1"] * 70, *["0"] * 30)
    found = paired_test(first, second)
    assert (found.prompts, found.clusters, found.gained, found.lost) == (100, 100, 10, 0)
    assert found.difference == pytest.approx(0.1)
    assert found.is_change and found.p_value < 0.01
    # About 1.96 standard errors of a share of 0.1 in 100 prompts.
    assert found.low == pytest.approx(0.1 - 1.96 * math.sqrt(0.09 / 100), abs=0.02)
    assert found.high == pytest.approx(0.1 + 1.96 * math.sqrt(0.09 / 100), abs=0.02)
    back = paired_test(second, first)
    assert (back.gained, back.lost, back.difference) == (0, 10, -found.difference)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))
    assert paired_test(first, second) == found  # no chance in it


@pytest.mark.parametrize(
    ("prompts", "gained", "lost"), [(100, 0, 0), (64, 4, 0), (263, 2, 0), (640, 4, 0), (300, 1, 0)]
)
def test_what_so_few_changes_cannot_show_is_left_open(prompts, gained, lost):
    found = paired_test(outcomes(*"0" * prompts), outcomes(*"1" * gained, *"0" * (prompts - gained)))
    assert not found.is_change and found.low < 0 <= found.difference < found.high
    none = paired_test(outcomes(*"0" * prompts), outcomes(*"0" * prompts))
    assert none.high - none.low <= found.high - found.low


# Prompts, share gained, share lost.
@pytest.mark.parametrize(
    ("prompts", "up", "down"), [(64, 0.02, 0.02), (300, 0.01, 0.01), (300, 0.02, 0.005), (64, 0.3, 0.05)]
)
def test_coverage_of_a_difference(prompts, up, down):
    """The interval holds the true difference in at least 92 % of the samples, and hardly ever contradicts the test."""
    held = agreed = 0
    drawn = np.random.default_rng(1).multinomial(prompts, [up, down, 1 - up - down], size=300)
    for (gained, lost, _), times in Counter(map(tuple, drawn.tolist())).items():
        found = paired_test(
            outcomes(*"0" * gained, *"1" * lost, *"0" * (prompts - gained - lost)),
            outcomes(*"1" * gained, *"0" * (prompts - gained)),
        )
        held += times * (found.low <= up - down <= found.high)
        agreed += times * (found.is_change == (found.low > 0 or found.high < 0))
    assert held >= 0.92 * 300 and agreed >= 0.97 * 300


@pytest.mark.parametrize("copies", ["1 " * 8, "1" * 8], ids=["rows", "samples"])
def test_copies_and_samples_of_a_prompt_count_once(copies):
    single = paired_test(outcomes(*"000001"), outcomes(*"111110"))
    found = paired_test(
        outcomes(*[copies.replace("1", "0")] * 5, copies), outcomes(*[copies] * 5, copies.replace("1", "0"))
    )
    assert (found.prompts, found.clusters) == (6 * len(copies.split()), 6)
    assert (found.gained, found.lost, found.difference) == (40, 8, single.difference)
    assert (found.p_value, found.low, found.high) == (single.p_value, single.low, single.high)


def test_prompts_of_one_cluster_count_once():
    first, second = outcomes(*"0" * 12), outcomes(*"1" * 12)
    layouts = {f"p{at}": f"walls {at % 3}" for at in range(12)}
    apart, together = paired_test(first, second), paired_test(first, second, layouts)
    assert (together.prompts, together.clusters, together.p_value) == (12, 3, 2 * 0.5**3 - 0.5**3)
    assert apart.is_change and not together.is_change and together.low < apart.low


def test_prompts_that_only_one_has_played_are_left_out():
    first, second = {"a": [[True]], "b": [[False]], "e": []}, {"b": [[True]], "c": [[True]], "e": [[True]]}
    assert paired_test(first, second).prompts == 1
    assert paired_test({"a": [[True]]}, {"b": [[True]]}) is None
    found = paired_test(outcomes(*"1100"), outcomes(*"0110"))  # as many gained as lost
    assert (found.difference, found.p_value, found.is_change) == (0.0, 1.0, False)


def final_run(*successes: str) -> ComparedRun:
    """A run whose policies end the prompts `t0`, `t1`, … as the letters say."""
    names = ("task_id", "group_index", "sampling", "success")
    tables = {
        f"iter={number:05d}/part-000": pa.Table.from_pylist(
            [
                dict(zip(names, (f"t{at}", at, '{"greedy": false}', letter == "1"), strict=True))
                for at, letter in enumerate(one)
            ]
        )
        for number, one in enumerate(successes)
    }
    parts = {name: lambda columns, table=table: table for name, table in tables.items()}
    summary = {"policies": [f"policy {at}" for at in range(len(successes))], "cluster_of": {"t0": "a", "t1": "a"}}
    return ComparedRun(run="train_sokoban", run_id="r", metrics=[], summary=summary, held_out=parts, settings={})


def test_final_policies_are_compared_whatever_their_number() -> None:
    """A run without a warm start has one policy, another has three; the last of each is its final one."""
    one, three = final_run("0011"), final_run("0000", "1111", "0111")
    found, back = compare_policies(one, three), compare_policies(three, one)
    assert (found.gained, found.lost, found.clusters) == (1, 0, 3)
    assert (back.gained, back.lost, back.clusters) == (0, 1, 3)
