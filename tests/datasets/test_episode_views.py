"""Views of a run's episodes as the project's catalog gives them: whole, lazy, or a chosen part of them."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import psutil
import pyarrow as pa
import pytest
from kedro.framework.project import configure_project
from kedro.framework.session import KedroSession
from kedro.io import DataCatalog, DatasetError

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.datasets import TrajectoriesDataset, TrajectoriesFrameDataset
from geo_sokoban_pipeline.datasets.views import object_bytes
from geo_sokoban_pipeline.trajectories.index import INDEX_SCHEMA
from geo_sokoban_pipeline.trajectories.parquet import name_parts
from geo_sokoban_pipeline.trajectories.schema import TRAJECTORY_SCHEMA
from runs import ROOT

KINDS = ("trajectories", "eval_trajectories", "held_out_trajectories")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "07_model_output" / "train_sokoban" / "default"


@pytest.fixture(scope="module")
def catalog(outputs: Path) -> Iterator[DataCatalog]:
    """The project's catalog over a run of three iterations, eight episodes each, every fourth unsolved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEO_SOKOBAN_DATA_ROOT", str(outputs.parents[2]))
        patch.chdir(ROOT)
        configure_project("geo_sokoban_pipeline", preserve_logging=True)
        with KedroSession.create(ROOT, env="test") as session:
            catalog = session.load_context().catalog
            for kind in KINDS:
                for iteration in range(3):
                    episodes = make_trajectories(8, iteration=iteration, evaluation=kind != KINDS[0])
                    for episode in episodes[::4]:
                        episode.metrics = {**episode.metrics, "success": 0.0}
                        episode.turns[-1].text = "no, never " * 9  # has a tag
                    catalog.save(f"train_sokoban.{kind}", name_parts(iteration, episodes, CONTEXT))
            # As a killed process leaves one, or a running one while it writes.
            for folder in ("trajectories", "episodes/trajectories"):
                (outputs / folder / "iter=00001" / ".part-001.parquet.1a2b3c4d.tmp").write_bytes(b"half of a file")
            yield catalog


def load(catalog: DataCatalog, entry: str) -> pa.Table:
    """The rows of a view as an Arrow table, whatever library it is of."""
    value: Any = catalog.load(f"train_sokoban.{entry}")
    if isinstance(value, pl.LazyFrame):
        value = value.collect().to_arrow()
    if hasattr(value, "to_pyarrow"):
        value = value.to_pyarrow()
    return value if isinstance(value, pa.Table) else pa.Table.from_pandas(value, preserve_index=False)


@pytest.mark.parametrize("view", ["pandas", "ibis", "polars"])
@pytest.mark.parametrize("kind", [*KINDS, "episodes"])
def test_all_views_hold_the_same_rows(catalog: DataCatalog, kind: str, view: str) -> None:
    columns = ["trajectory_id", "iteration", "reward", "n_turns"]
    if kind == "episodes":
        expected, names = catalog.load("train_sokoban.episodes").select(columns), INDEX_SCHEMA.names
    else:
        parts = [read(columns=columns) for read in catalog.load(f"train_sokoban.{kind}").values()]
        expected, names = pa.concat_tables(parts), TRAJECTORY_SCHEMA.names
    found = load(catalog, f"{kind}@{view}")
    if view == "pandas" and kind != "episodes":
        names = [*(name for name in names if name != "images"), "partition"]
    assert found.column_names == names
    rows = sorted(found.select(columns).to_pylist(), key=lambda row: (row["iteration"], row["trajectory_id"]))
    assert len(expected) == (72 if kind == "episodes" else 24)
    if kind != "episodes":  # the index has the rows of all three
        assert rows == sorted(expected.to_pylist(), key=lambda row: (row["iteration"], row["trajectory_id"]))


def test_queries_of_lazy_views_read_what_they_name(catalog: DataCatalog) -> None:
    solved = catalog.load("train_sokoban.episodes@ibis")
    shares = solved.filter(solved.split == "train").group_by("iteration").agg(rate=solved.success.mean())
    assert shares.order_by("iteration").execute()["rate"].tolist() == [0.75] * 3
    frame = catalog.load("train_sokoban.trajectories@polars")
    plan = frame.filter(pl.col("iteration") == 1).select("trajectory_id", pl.col("turns").list.len()).explain()
    assert f"PROJECT 3/{len(TRAJECTORY_SCHEMA.names)} COLUMNS" in plan  # neither tokens nor images
    image = frame.select(pl.col("images").list.first().struct.field("bytes")).head(1).collect().item()
    assert image.startswith(b"\x89PNG")


def test_the_queries_of_the_docs_run(
    catalog: DataCatalog, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").symlink_to(outputs.parents[2])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"catalog": catalog}
    for block in re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs" / "trajectories.md").read_text()):
        exec(block, names)
    assert len(names["first"].collect()) == 2 and names["episodes"]["tags"].notna().sum() == 18


# The pandas view of the trajectories: a part of them.


@pytest.fixture(scope="module")
def frames(catalog: DataCatalog) -> Any:
    return catalog["train_sokoban.trajectories@pandas"]


FILTERS: list[tuple[Any, int]] = [
    ([("success", "==", False)], 6),
    ([["success", "==", False], ["iteration", ">=", 1]], 4),
    ([[["success", "==", False]], [["group_index", "==", 1]]], 15),
    ([("group_index", "in", [1]), ("success", "!=", True)], 3),
    ([("iteration", ">", 7)], 0),
]


@pytest.mark.parametrize(("conditions", "count"), FILTERS)
def test_filters_choose_rows(frames: TrajectoriesFrameDataset, conditions: Any, count: int) -> None:
    frame = frames.read(columns=["trajectory_id", "turns"], filter=conditions)
    assert frame.columns.tolist() == ["trajectory_id", "turns", "partition"] and len(frame) == count
    assert all(isinstance(turns, list) for turns in frame["turns"])


def test_columns_and_iterations_are_of_the_entry_or_of_the_call(outputs: Path, catalog: DataCatalog) -> None:
    view = TrajectoriesFrameDataset(
        str(outputs / "trajectories"), ["reward", "iteration"], [0, 2], [["success", "==", True]]
    )
    assert view.load().groupby("iteration")["reward"].count().to_dict() == {0: 6, 2: 6}
    assert view.read(columns=["images"], iterations=range(1, 3)).columns.tolist() == ["images", "partition"]
    image = view.read(columns=["images"]).loc[0, "images"][0]
    assert image["bytes"].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": ["rewards"]}, r"no columns \['rewards'\]; columns are trajectory_id"),
        ({"filter": [("rewards", "==", 1)]}, r"no columns \['rewards'\]"),
        ({"filter": [("reward", "~", 1)]}, "filter=.*Give triples such as"),
        ({"filter": [("reward", ">")]}, "filter=.*Give triples such as"),
        ({"filter": [("turns", "==", 1)]}, "turns has several values per episode"),
    ],
)
def test_what_cannot_be_read_is_named(frames: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        frames.read(**arguments)


def test_what_does_not_fit_is_refused_before_it_is_read(frames: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=200_000))
    with pytest.raises(DatasetError, match=r"(?s)24 episodes take about .* GB in a pandas frame .*@polars") as error:
        frames.load()
    assert "read(columns=" in str(error.value)
    assert len(frames.read(columns=["reward", "success"])) == 24
    assert len(frames.read(filter=[("success", "==", False), ("iteration", "==", 1)])) == 2


def test_estimated_bytes_are_about_those_of_the_frame(tmp_path: Path) -> None:
    TrajectoriesDataset(str(tmp_path)).save(name_parts(0, make_trajectories(64, turns=6, response_tokens=24), CONTEXT))
    view = TrajectoriesFrameDataset(str(tmp_path))
    for columns in (["token_ids", "rollout_log_probs"], ["turns"], ["metrics"], ["reward", "success"]):
        view.read(columns=columns)  # what is imported and cached by the first reading is not counted
        tracemalloc.start()
        frame = view.read(columns=columns)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        count, sizes = object_bytes(tmp_path / "iter=00000" / "part-000.parquet", columns)
        assert count == len(frame) and list(sizes) == columns
        assert 0.5 * taken - 20_000 < sum(sizes.values()) < 2 * taken + 20_000
