"""Documents of a study: markers, tables, figure; and that the committed ones are what their results give."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from geo_sokoban_pipeline.reporting.study_docs import (
    README_MARKERS,
    MarkerError,
    check_docs,
    draw_study,
    mean_curve,
    read_section,
    render_docs,
    render_readme,
    render_readme_line,
    render_sections,
    replace_section,
    stage_curve,
    study_marker,
)
from geo_sokoban_pipeline.reporting.study_tables import MODES, judge_criterion, render_summary, render_tables
from geo_sokoban_pipeline.tasks import TASKS
from study_material import make_answer_results, make_results, make_seed, row

ROOT = Path(__file__).parents[2]
DOCUMENT = "# Title\n\nprose\n\n<!-- a:begin -->\nold\n<!-- a:end -->\n\nmore\n"
STUDIES = [name for task in TASKS.values() for name in task.studies]


def table_rows(text, first):
    return [line for line in text.splitlines() if line.startswith(f"| {first}")]


def render_study(results):
    """Everything about a study: its section, then its page."""
    return f"{render_summary(results)}\n\n{render_tables(results)}"


def test_only_the_section_changes():
    text = replace_section(DOCUMENT, "a", "new\n", Path("x.md"))
    assert text == DOCUMENT.replace("\nold\n", "\n\nnew\n\n")
    assert replace_section(text, "a", "new", Path("x.md")) == text
    assert read_section(text, "a", Path("x.md")) == "new"


@pytest.mark.parametrize(
    "document",
    [
        "no markers",
        "<!-- a:begin --> only",
        "only <!-- a:end -->",
        "<!-- a:end --> <!-- a:begin -->",
        DOCUMENT + DOCUMENT,
    ],
)
def test_a_missing_marker_is_named(document):
    with pytest.raises(MarkerError, match=r"x\.md: there must be one line `<!-- a:begin -->` and, below it, one line"):
        replace_section(document, "a", "new", Path("x.md"))


def test_tables_of_a_study():
    sets = [{"name": "x", "title": "8×8", "levels": make_results()["levels"] | {"shared_layouts": 3}}]
    sets[0]["seeds"] = [{"seed": 0, "rows": [row("final", 100), row("solver", 640, "-")]}]
    results = make_results(make_seed(0, 420), make_seed(1, 380, minutes=None), sets=sets)
    shared = render_study(results)
    for words in (
        "Brackets are 95 % Wilson intervals over rows",
        "| whole run: at most 8 minutes | – (not alone) | – (not alone) |",
        "**Criteria** met by every seed: 4 of 8, missed: 2, not measured: 2.",
        "Measured on 2 cores (A 7, x86_64), 2 runs side by side, one thread each; this package 0.1.0 (commit abc and",
        "commit abc and unknown), Python 3.11.7, torch 2.13.0, transformers 5.23.0.",
    ):
        assert words in shared, words
    assert "memory" not in shared and "make run" not in shared
    # Alone on the machine, with a criterion of growth, and with another seed beside.
    results["machine"]["workers"], results["max_growth"] = 1, 5
    results["seeds"][0]["memory_gb"] = [[20, 2.0], [200, 2.15]]
    text = render_study(results | {"beside": [make_seed(0, 448)]})
    length = "| after GRPO, sampled | 100 (100–100) | 25 (19–31) |"
    spent = "SFT control: more of the warm start: spent at least 0.97 of GRPO's CPU-seconds"
    gain = "after GRPO, sampled: at least 20 points above warm start, intervals apart"
    for words in (
        "| **after GRPO, sampled** | 65.6\u202f% [61.9–69.2] | 59.4\u202f% [55.5–63.1] | 62.5\u202f% |",
        f"| {gain} | +25.6, apart: met | +19.4, apart: **not met** |",
        "| whole run: at most 8 minutes | 7.5: met | – (was interrupted) |",
        f"| {spent} | 1.01: met | 0.96: **not met** |",
        "at most 5 % above that after 20 | +7.5 % (2.00 to 2.15 GB): **not met** | – (too few iterations) |",
        "| 202 (2\u202f000 steps, 1.01 of GRPO) | 7.5 | +7.5 % (2.00 to 2.15 GB) |",
        # Of nine criteria four are met by both seeds, three are missed by one, two have no value.
        "**Criteria** met by every seed: 4 of 9, missed: 3, not measured: 2.",
        "`make run` is seed 0, which is in no mean here: 70.0\u202f% [66.3–73.4] sampled and 62.5\u202f% [",
        "x86_64), one training run at a time on all of them, 2 others side by side; this",
        "none of which occurs in training",
        "3 of which occur in training too",
        length,  # mean and extremes of seeds that play the same levels; an interval only within a seed
        "| after GRPO, sampled | 100 [99–100] | 31 [26–37] |",
    ):
        assert words in text, words
    whole = text.partition("**By optimal length**")[2].partition("<details>")[0]
    assert "[" not in whole
    for agent in ("random moves", "expert", "expert, never gives up", "solver (optimal)", "after GRPO, blank images"):
        assert table_rows(whole, agent), agent
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        lines = block.strip().splitlines()
        assert len({line.count("|") for line in lines}) == 1 and len(lines) > 2, block


@pytest.mark.parametrize(
    ("seeds", "chosen_on", "clause", "sentence"),
    [
        ((3, 4, 5), [0, 1, 2], "mean of seeds 3 to 5, none of which took part in choosing the recipe:",
         "Seeds 3 to 5, none of which took part in choosing the recipe. It was chosen with seeds 0 to 2, on"),
        ((0, 1), [0, 1, 2], "mean of seeds 0 and 1, with which the recipe was also chosen:",
         "Seeds 0 and 1, with which the recipe was also chosen, on validation levels."),
        ((2, 5, 9), [0, 2], "mean of seeds 2, 5 and 9, of which seed 2 took part in choosing the recipe:",
         "Seeds 2, 5 and 9, of which seed 2 took part in choosing the recipe. It was chosen with seeds 0 and 2, on"),
        ((4,), [10], "seed 4, which took no part in choosing the recipe:",
         "Seed 4, which took no part in choosing the recipe. It was chosen with seed 10, on validation levels."),
        ((0, 1, 2), [], "mean of seeds 0 to 2:", None),
    ],
)  # fmt: skip
def test_docs_say_whether_the_seeds_chose_the_recipe(seeds, chosen_on, clause, sentence):
    results = make_results(*(make_seed(seed, 400) for seed in seeds))
    results["chosen_on"] = chosen_on
    line, page, table = render_readme_line(results), render_study(results), render_readme(results)
    # The README says above its lines that seeds took no part, so a line names only those that did.
    named = clause.rstrip(":") if set(seeds) & set(chosen_on) else clause.rstrip(":").partition(", ")[0]
    assert line.endswith(f"after GRPO, {named}.")
    assert clause.rstrip(":") in table
    played = page.partition("\n")[0]
    assert played.endswith("evidence of its own.") if sentence is None else sentence in played
    assert ("recipe" in page + line + table) == (sentence is not None)


def test_docs_say_that_intervals_are_over_clusters():
    results = make_results(make_seed(3, 420)) | {"intervals": "clusters"}
    final = next(row for row in results["seeds"][0]["rows"] if row["player"] == "final" and row["mode"] == "sampled")
    final |= {"clusters": 57, "low": 0.5, "high": 0.8, "by_length": [[1, 300, 320, 0.9, 0.96], [2, 120, 320, 0.2, 0.5]]}
    text = render_study(results)
    assert "Wilson" not in text and "all episodes of a wall layout are one piece of evidence." in text
    assert "65.6\u202f% [50.0–80.0]" in text and "| after GRPO, sampled | 94 [90–96] | 38 [20–50] |" in text
    problems = render_study(make_answer_results() | {"intervals": "clusters"})
    assert "all episodes of a distinct problem are one piece of evidence." in problems


def test_tables_of_a_geometry_study():
    results = make_answer_results()
    results["seeds"][0]["rows"][1] |= {"plausible_share": 0.625, "called_share": 0.75}
    text = render_study(results)
    gain = "after GRPO, sampled, first attempt: at least 50 points above warm start"
    for words in (
        "Evaluated on 640 evaluation problems, none of which occurs in training (generated, difficulty tiny,",
        "tiny, 5 families, 93 distinct answers)",
        "3 responses at most",
        "![Accuracy on validation problems",
        f"{gain} | +45.6: **not met** |",
        "| policy or baseline | arc | linear pair |",
        "**By form of the answer**",
    ):
        assert words in text, words
    last, first, answers, calls = re.split(r"\*\*(?:First attempt|Plausible answers|Calls)\*\*", text)
    for part, share in ((last, "87.5"), (first, "65.6")):
        assert table_rows(part, "**after GRPO, sampled**")[0].startswith(f"| **after GRPO, sampled** | {share}")
    for part, share in ((answers, "62.5"), (calls, "75.0")):
        assert table_rows(part, "after GRPO, sampled")[0] == f"| after GRPO, sampled | {share}\u202f% |"
    assert table_rows(last, "most frequent answer") and table_rows(last, "after GRPO, shuffled images, sampled")
    assert not re.findall(r"\b(?:level|wall layout|moves|solve)s?\b", text)
    for found in results["seeds"][0]["rows"]:
        found["called_share"] = 0.0  # a task without a tool
    assert "**Calls**" not in render_study(results)
    assert "First attempt" not in render_study(make_answer_results(turns=1))


def test_a_study_in_the_readme():
    results = make_results(make_seed(0, 420), make_seed(1, 380)) | {"study": "long", "title": "A long run"}
    assert render_readme_line(results) == (
        "- [A long run](docs/learning.md#a-long-run): solve rate **62.5\u202f% (59.4–65.6)** after GRPO, "
        "mean of seeds 0 and 1."
    )
    single, rate = make_answer_results(), ": accuracy **87.5\u202f% [84.7–89.8]** (95 % interval over"
    assert f"{rate} rows) after GRPO, seed 0." in render_readme_line(single)
    assert f"{rate} clusters) after GRPO, seed 0." in render_readme_line({**single, "intervals": "clusters"})
    # Each policy in a row; how long a run takes that is alone.
    alone = {**results, "machine": {**results["machine"], "workers": 1}}
    for minutes, sentence in (
        ([7.04, 7.46], " A whole run takes 7.0 to 7.5 minutes on 2 cores."),
        ([7.0, 7.0], " A whole run takes 7.0 minutes on 2 cores."),
        ([7.0, None], ""),
    ):
        for seed, took in zip(results["seeds"], minutes, strict=True):
            seed["minutes"] = took
        text = render_readme(alone)
        assert f"10 moves at most.{sentence}\n" in text
        assert "10 moves at most.\n" in render_readme(results)  # side by side
    assert table_rows(text, "**after GRPO**") == [
        "| **after GRPO** | 62.5\u202f% (59.4–65.6) | 62.5\u202f% (62.5–62.5) |"
    ]
    assert table_rows(text, "random legal moves")[0].endswith("(20.0–20.0) |  |")


def test_curves_of_a_seed_share_one_clock():
    seed = make_seed(1, 400)
    assert stage_curve(seed, "warm_start") == [(50.0, 0.2), (100.0, 0.4)]
    assert stage_curve(seed, "grpo") == [(100.0, 0.4), (200.0, 0.5), (300.0, 0.65)]
    # The control has no validation of its own beginning: it takes the last one of the warm start.
    assert stage_curve(seed, "control_teacher") == [(100.0, 0.4), (210.0, 0.42), (301.5, 0.44)]
    assert stage_curve(seed, "control_optimal") == []


def test_mean_curve_of_unequal_lengths():
    mean = mean_curve([[(0.0, 0.0), (10.0, 1.0)], [(2.0, 0.25), (6.0, 0.25), (20.0, 0.95)]])
    # From where the second begins to where the first ends, at equal x.
    assert mean[0] == pytest.approx((2.0, (0.2 + 0.25) / 2))
    assert mean[12] == pytest.approx((6.0, (0.6 + 0.25) / 2))
    assert mean[-1] == pytest.approx((10.0, (1.0 + 0.45) / 2))
    assert mean_curve([[(0.0, 0.0), (10.0, 1.0)], [(10.0, 0.0), (20.0, 1.0)]]) == []
    assert mean_curve([[(0.0, 0.5), (3.0, 1.0)]]) == [(0.0, 0.5), (3.0, 1.0)]


def test_figure_stands_alone():
    for results, words in (
        (make_results(make_seed(0, 420), make_seed(1, 380)), ("GRPO", "random legal moves")),
        (make_answer_results(), ("Geometry: accuracy on 256 validation problems, sampled", "most frequent answer")),
    ):
        text = draw_study(results)
        shown = " ".join(ElementTree.fromstring(text).itertext())
        assert all(word in shown for word in words) and "prefers-color-scheme:dark" in shown
        used = re.findall(r"var\(--([a-z]+)\)", text)
        assert used and all(text.count(f"--{name}:#") == 2 for name in used)  # light and dark


def test_everything_is_written_and_prose_stays(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    page = docs / "learning.md"
    page.write_text("before\n<!-- study:default:begin -->\n<!-- study:default:end -->\nafter\n")
    with pytest.raises(MarkerError, match=r"README\.md"):
        check_docs(docs, "default")
    (tmp_path / "README.md").write_text("<!-- readme:results:begin --><!-- readme:results:end -->")
    check_docs(docs, "default")
    results = make_results(make_seed(0, 420))
    written = render_docs(docs, results)
    assert list(written) == [
        "docs/results/default.json",
        "docs/img/learning_default.svg",
        "docs/studies/default.md",
        "docs/learning.md",
        "README.md",
    ]
    text = written["docs/learning.md"]
    assert text.startswith("before\n") and text.endswith("after\n") and render_summary(results) in text
    assert written["docs/studies/default.md"] == f"{render_tables(results)}\n"
    page.write_text(text)
    assert render_docs(docs, json.loads(written["docs/results/default.json"])) == written
    with pytest.raises(MarkerError, match="study:long:begin"):
        render_docs(docs, copy.deepcopy(results) | {"study": "long"})


@pytest.mark.parametrize("name", STUDIES)
def test_committed_docs_are_what_their_results_give(name):
    docs, stored = ROOT / "docs", ROOT / "docs" / "results" / f"{name}.json"
    page, readme = docs / "learning.md", ROOT / "README.md"
    sections = {page: study_marker(name), **({readme: README_MARKERS[name]} if name in README_MARKERS else {})}
    written = [read_section(place.read_text(encoding="utf-8"), marker, place) for place, marker in sections.items()]
    if not stored.is_file():
        assert not any(written), f"the docs have a section of {name}, but docs/results no {stored.name}"
        return
    results = json.loads(stored.read_text(encoding="utf-8"))
    assert results["study"] == name
    assert results["chosen_on"], "the docs should say whether the recipe was chosen with these seeds"
    assert written == [section.strip() for section in render_sections(results)]
    assert (docs / "img" / f"learning_{name}.svg").read_text(encoding="utf-8") == draw_study(results)
    assert (docs / "studies" / f"{name}.md").read_text(encoding="utf-8") == f"{render_tables(results)}\n"


def _stored(name):
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _leads(seeds, over, measure="solved"):
    """Points by which the final policy leads, and whether the intervals are apart, by mode: one for each seed."""
    bar = {"player": "final", "over": over, "measure": measure, "at_least": 0.0, "apart": True}
    verdicts = {mode: [judge_criterion(bar | {"mode": mode}, seed["rows"]) for seed in seeds] for mode in MODES}
    return {
        mode: [(float(found.text.partition(",")[0].replace("−", "-")), "apart" in found.text) for found in row]
        for mode, row in verdicts.items()
    }


@pytest.mark.parametrize("name", STUDIES)
def test_grpo_ends_above_what_it_started_from_as_the_page_claims(name):
    """The first bullet of docs/learning.md, and its smallest lead."""
    seeds = _stored(name)["seeds"]
    known = {row["player"] for seed in seeds for row in seed["rows"]}
    others = {"teacher", "random_legal", "warm_start", "control_teacher"} & known
    assert {"warm_start"} < others
    for over in others:
        for found in _leads(seeds, over).values():
            assert all(lead >= 10 and apart for lead, apart in found), (over, found)


def test_where_an_expert_is_better_or_worse_as_the_page_claims():
    """SFT on the optimal expert; and the expert of two boxes."""
    for name, sign in (("default", -1), ("geo3k", 1)):
        for found in _leads(_stored(name)["seeds"], "control_optimal").values():
            assert all(sign * lead > 0 and apart for lead, apart in found), name
    seeds = _stored("geo3k_multi_turn")["seeds"]
    last, first = (_leads(seeds, "control_optimal", measure) for measure in ("solved", "first_attempt"))
    assert [lead > 0 for lead, _ in last["sampled"] + last["greedy"]] == [True] * 6
    assert [apart for _, apart in last["sampled"]] == [True, True, False]
    assert [lead > 0 for lead, _ in first["sampled"] + first["greedy"]] == [False] * 3 + [True] * 3
    assert [apart for _, apart in first["sampled"] + first["greedy"]] == [True, False, False, False, True, False]
    (_, boxes) = _stored("long")["sets"]
    assert boxes["name"] == "two_boxes"
    for over, sign, wanted in (("teacher", -1, True), ("random_legal", 1, False)):
        ((lead, apart),) = _leads(boxes["seeds"], over)["sampled"]
        assert sign * lead > 0 and apart == wanted, over
