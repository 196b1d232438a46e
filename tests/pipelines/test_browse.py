"""browse_* on finished runs: the site in the catalog, of one run and of two."""

from __future__ import annotations

import re
import shutil

import pyarrow.compute as pc
import pytest

from geo_sokoban_pipeline.formats import find_row
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories, write_trajectories
from reporting.sites import read_columns, read_script

pytestmark = pytest.mark.slow


def test_the_site_of_a_run(clone, caplog):
    edited = clone.folder("07_model_output") / "held_out_trajectories" / "iter=00001" / "part-000.parquet"
    table = read_trajectories(edited)
    place = table.schema.get_field_index("reward")
    write_trajectories(edited, table.set_column(place, "reward", pc.add(table["reward"], 1.0)))
    clone.succeed("--pipelines=browse_sokoban", "--params=browse_sokoban.first_iteration=1")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("held_out_trajectories/iter=00001/part-000" in line and "reward" in line for line in said)
    caplog.clear()
    assert clone.command("--pipelines=report_sokoban").exit_code == 0
    again = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("held_out_trajectories/iter=00001/part-000" in line and "reward" in line for line in again)
    page = clone.load("browse_sokoban.site")
    assert page.name == "index.html" and page.is_relative_to(clone.folder("08_reporting", "browse_sokoban"))
    rows = read_columns(page.parent)
    stored = clone.load("train_sokoban.episodes").to_pylist()
    wanted = [row["trajectory_id"] for row in stored if row["split"] != "train" or row["iteration"] >= 1]
    assert [row["trajectory_id"] for row in rows] == wanted and all(row["chunk"] >= 0 for row in rows)
    site = read_script(page.parent / "data" / "site.js")
    settings = site["runs"]["train_sokoban/default"]["settings"]
    assert settings["grpo.loss_args.clip_high"] == 0.28
    assert (page.parent / site["runs"]["train_sokoban/default"]["report"]).is_file()
    # A report that is written again links to the site.
    assert clone.command("--pipelines=train_sokoban", "--tags=report").exit_code == 0
    report = clone.load("train_sokoban.report")
    links = set(re.findall(r'href="([^"#]*site/index.html)#', report))
    assert {(clone.folder("08_reporting") / link).resolve() for link in links} == {page.resolve()}
    # Tokens are shown as the policy's tokenizer writes them.
    chunk = read_script(page.parent / "data" / "episodes" / "0.js")
    assert "<|im_start|>" in chunk["tokens"].values()


def test_scores_and_a_second_run_are_shown(clone):
    source = {"run": "train_sokoban", "run_id": "default", "checkpoint": "latest"}
    clone.run("score_sokoban", params={"score_sokoban": {"source": source, "limit": 4, "occlusion": 1}})
    shutil.copytree(clone.folder("07_model_output"), clone.folder("07_model_output", run_id="seed2"))
    clone.run("browse_sokoban", params={"browse_sokoban": {"source": source, "runs": ["seed2"], "pages": None}})
    folder = clone.load("browse_sokoban.site").parent
    rows = read_columns(folder)
    assert [row["run"] for row in rows] == [f"train_sokoban/{name}" for name in ("default", "seed2") for _ in rows[::2]]
    scored = set(clone.load("score_sokoban.token_scores@pandas")["trajectory_id"])
    pages = [read_script(folder / "data" / "episodes" / f"{row['chunk']}.js")["episodes"][row["place"]] for row in rows]
    shown = {(row["run"], row["trajectory_id"]) for row, page in zip(rows, pages, strict=True) if page["scores"]}
    assert shown == {("train_sokoban/default", name) for name in scored}
    mapped = set(clone.load("score_sokoban.occlusion@pandas")["trajectory_id"])
    assert len(mapped) == 1
    found = {(row["run"], row["trajectory_id"]) for row, page in zip(rows, pages, strict=True) if page["maps"]}
    assert found == {("train_sokoban/default", name) for name in mapped}
    assert {row["trajectory_id"] for row in rows if row["image_reliance"] is not None} == scored
    # What the evaluation loses without images is shown as the summary has it.
    tables = read_script(folder / "data" / "site.js")["runs"]["train_sokoban/default"]["ablations"]
    blank = find_row(clone.load("train_sokoban.eval_summary"), "final_blank", "sampled")
    sampled = next(table for table in tables if table["mode"] == "sampled")
    assert sampled["policy"] == "final" and sampled["names"][1] == "blank"
    assert [cells[1] for _, cells in sampled["lines"]] == [
        [one["solved"], one["episodes"]] for one in blank["by_length"]
    ]
