"""Every field of the data options acts on the rows that come out; what it does there is tested beside its code.

The tables are complete by construction: each field of the models has the parameters with which it acts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import BaseModel

from geo_sokoban_pipeline.envs.geo3k import data_steps as problem_nodes
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions
from geo_sokoban_pipeline.envs.geo3k.sources import open_source
from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.envs.rows import HubReader
from geo_sokoban_pipeline.envs.sokoban import data_steps as level_nodes
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.sources import read_source
from geo_sokoban_pipeline.pipelines.hub_rows import hub_reader, hub_rows
from geo_sokoban_pipeline.runs.fingerprint import unflatten
from option_fields import leaves
from problem_rows import image_file, source_row, uri, write_uris

ALL = {"train": None, "validation": None, "eval": None}
FEW = {"counts.train": 8, "counts.validation": 2, "counts.eval": 2}
GRID = " # \t # \t # \t # \t # \n # \t P \t X \t O \t # \n # \t # \t # \t # \t # "
SAID = (
    "<|im_start|>user\nSymbols:\n# Wall | _ Floor | O Target | X Box | P You\n\n"
    "Rules:\n1. Push boxes.\n2. Avoid walls (#).\n\n"
    f"[Current Observation]:\n{GRID}\nDecide the next action:\nNow.<|im_end|>\n<|im_start|>assistant\n<think>"
)
LONG = " # \t # \t # \t # \t # \t # \n # \t P \t X \t _ \t O \t # \n # \t # \t # \t # \t # \t # "
PUSHED = LONG.replace("P \t X \t _", "_ \t P \t X")
RAW = {"id": "r", "prompt": SAID, "ability": "bfs"}
WIDE, SMALL = (image_file(Image.new("RGB", size, "red")) for size in ((120, 30), (30, 30)))
PROCESSED = {
    "prompt": "see <image>",
    "images": [png_data_uri(WIDE)],
    "extra_info": {"env_config": Board.from_text(GRID).to_env_config()},
}


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files that the tables name lie in the working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("data"))
        Path("one.xsb").write_text("#######\n#@ $ .#\n#######\n")
        Path("two.xsb").write_text("#####\n#@$.#\n#####\n")
        Path("xsb.jsonl").write_text(json.dumps({"xsb": "#####\n#@$.#\n#####\n"}) + "\n")
        levels = outcome(SokobanDataOptions, {"counts.train": 60})
        Path("levels.txt").write_text("\n".join(f"; {n}\n{row['level_xsb']}\n" for n, row in enumerate(levels)))
        paths = [{**RAW, "prompt": SAID.replace(GRID, grid)} for grid in (LONG, PUSHED, LONG)]
        for name, rows in {"raw": [RAW], "paths": paths, "processed": [PROCESSED]}.items():
            Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("image.png").write_bytes(SMALL)
        clear = image_file(Image.new("RGBA", (40, 30), (255, 0, 0, 0)))
        for name, problems in {
            "rows": [source_row(n) for n in range(60)],
            "others": [source_row(n) for n in range(60, 65)],
            "shared": [source_row(0), source_row(1) | {"images": source_row(60)["images"]}, source_row(60)],
            "bad": [source_row(0, problem="<image>Give \boxed{x}.")],
            "clear": [source_row(0, images=[uri(clear)])],
            "by_name": [source_row(0), source_row(1, images=["image.png"])],
            "bare": [source_row(0), source_row(1, images=None, problem="Find x.")],
            "two_images": [
                source_row(0, images=[uri(SMALL)]),
                source_row(1, images=[uri(WIDE), uri(WIDE)], problem="<image><image>Which?"),
            ],
        }.items():
            write_uris(Path(f"{name}.parquet"), problems)
        yield


def outcome(model: type[BaseModel], given: dict[str, Any]) -> Any:
    """The prompts that options give, or why there are none."""
    options = model.model_validate(unflatten(FEW | given)).model_dump(mode="json")
    try:
        if model is SokobanDataOptions:
            frames = level_nodes.make_prompts(level_nodes.read_levels(options)[0], options)
            return [row for frame in frames for row in frame.to_dict("records")]
        raw = problem_nodes.read_problems(options, "geo3k")
        index, _ = problem_nodes.check_problems(raw, options, "geo3k")
        return [list(rows) for rows in problem_nodes.make_prompts(raw, index, options, "geo3k")]
    except ValueError as error:
        return str(error)


def file(path: str, **changes: Any) -> dict[str, Any]:
    return {"source": "file", **{f"counts.{split}": None for split in ALL}, "file.path": path, **changes}


def shares(given: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    more_eval, more_validation = (
        {"shares.train": 0.3, "shares.eval": 0.6},
        {"shares.train": 0.3, "shares.validation": 0.6},
    )
    even = {f"shares.{split}": share for split, share in zip(ALL, (0.8, 0.1, 0.1), strict=True)}
    changes = {"train": more_eval, "validation": more_validation, "eval": more_eval}
    return {f"shares.{split}": (given | even, change) for split, change in changes.items()}


# Given and changed values: at the limits by as little as counts.
LEVELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "source": ({}, file("one.xsb")),
    "file.path": (file("one.xsb"), {"file.path": "two.xsb"}),
    "file.format": (file("xsb.jsonl"), {"file.format": "raw_parquet"}),
    "seed": ({"seed": 0}, {"seed": 1}),
    "height": ({}, {"height": 7}),
    "width": ({}, {"width": 7}),
    "boxes": ({"max_solution": 4}, {"boxes": 2}),
    "inner_walls": ({}, {"inner_walls": [3, 3]}),
    "min_solution": ({}, {"min_solution": 3}),
    "max_solution": ({}, {"max_solution": 4}),
    "equal_lengths": ({}, {"equal_lengths": False}),
    **{f"counts.{split}": ({}, {f"counts.{split}": 4}) for split in ALL},
    **shares(file("levels.txt")),
    "solver_states": (file("one.xsb", solver_states=1000), {"solver_states": 1}),
    "collapse": (file("paths.jsonl", collapse="states") | {"file.format": "raw_parquet"}, {"collapse": "rows"}),
    "cell_px": ({}, {"cell_px": 24}),
    "max_steps": ({}, {"max_steps": 7}),
    "instruction": ({}, {"instruction": "Go <image>!"}),
    "observation": ({}, {"observation": "text"}),
    "pictures": (file("processed.jsonl", pictures="keep"), {"pictures": "render"}),
    "limits.max_bytes": (
        file("processed.jsonl", pictures="keep", **{"limits.max_bytes": len(WIDE)}),
        {"limits.max_bytes": len(WIDE) - 1},
    ),
    "limits.max_pixels": (
        file("processed.jsonl", pictures="keep", **{"limits.max_pixels": 3600}),
        {"limits.max_pixels": 3599},
    ),
    "strip_chat_markup": (file("raw.jsonl", instruction="full", strip_chat_markup=True), {"strip_chat_markup": False}),
    "consistent_legend": (file("raw.jsonl", instruction="full", consistent_legend=True), {"consistent_legend": False}),
}
PROBLEMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "source": ({}, file("rows.parquet")),
    "file.path": (file("rows.parquet"), {"file.path": "others.parquet"}),
    "file.validation_path": (file("rows.parquet"), {"file.validation_path": "others.parquet"}),
    "file.eval_path": (file("rows.parquet"), {"file.eval_path": "others.parquet"}),
    "seed": ({"seed": 0}, {"seed": 1}),
    "problems.difficulty": ({"problems.difficulty": "tiny"}, {"problems.difficulty": "easy"}),
    "problems.families": ({}, {"problems.families": {"linear_pair": 1.0}}),
    "problems.picture_scale": ({}, {"problems.picture_scale": 2.0}),
    "problems.angle_step": ({}, {"problems.angle_step": 10}),
    "problems.held_out_angles": ({"counts.train": 40}, {"problems.held_out_angles": {}}),
    "problems.lengths": ({}, {"problems.lengths": (80, 99)}),
    **{f"counts.{split}": ({}, {f"counts.{split}": 4}) for split in ALL},
    **shares(file("rows.parquet")),
    "instruction": ({}, {"instruction": "boxed"}),
    "exclude_overlaps": (
        file("shared.parquet", **{"file.eval_path": "others.parquet", "exclude_overlaps": "pairs"}),
        {"exclude_overlaps": "images"},
    ),
    "repair_control_characters": (
        file("bad.parquet", repair_control_characters=True),
        {"repair_control_characters": False},
    ),
    "transparency": (file("clear.parquet", transparency="white"), {"transparency": "drop"}),
    "image_folder": (file("by_name.parquet"), {"image_folder": "."}),
    "rows_without_image": (file("bare.parquet", rows_without_image="reject"), {"rows_without_image": "keep"}),
    **{
        f"limits.{name}": (file("two_images.parquet", **{f"limits.{name}": most}), {f"limits.{name}": less})
        for name, most, less in (
            ("max_bytes", len(WIDE), len(WIDE) - 1),
            ("max_pixels", 3600, 3599),
            ("max_aspect", 4.0, 3.9),
            ("max_images", 2, 1),
        )
    },
}
OF_THE_HUB = {
    SokobanDataOptions: {"hub.dataset", "hub.revision", "hub.split", "hub.processed"},
    Geo3kDataOptions: {"hub.dataset", "hub.revision", "hub.train", "hub.validation", "hub.eval", "hub.streaming"},
}
FIELDS = [
    (model, name) for model, table in ((SokobanDataOptions, LEVELS), (Geo3kDataOptions, PROBLEMS)) for name in table
]


@pytest.mark.parametrize(("model", "name"), FIELDS)
def test_each_field_acts(model: type[BaseModel], name: str) -> None:
    given, change = (LEVELS if model is SokobanDataOptions else PROBLEMS)[name]
    rows = outcome(model, given)
    assert isinstance(rows, list) and rows == outcome(model, given)
    assert rows != outcome(model, given | change)


@pytest.mark.parametrize(("name", "mark"), [("strip_chat_markup", "<|im_start|>"), ("consistent_legend", "(#)")])
def test_texts_of_raw_levels_lose_their_marks_by_option(name: str, mark: str) -> None:
    for on in (True, False):
        (row,) = outcome(SokobanDataOptions, file("raw.jsonl", instruction="full", **{name: on}))
        assert (mark in row["prompt"]) != on


def test_every_field_is_shown_to_act() -> None:
    assert set(LEVELS) | OF_THE_HUB[SokobanDataOptions] == set(leaves(SokobanDataOptions))
    assert set(PROBLEMS) | OF_THE_HUB[Geo3kDataOptions] == set(leaves(Geo3kDataOptions))


def asked_of_the_hub(patch: pytest.MonkeyPatch, ask: Any) -> list[Any]:
    """Arguments of the calls to the library that knows the hub."""
    import datasets

    asked: list[Any] = []

    def load_dataset(*names: Any, **arguments: Any) -> Any:
        asked.append((names, arguments))
        raise ValueError("no such split")

    patch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(Exception, match="somebody"):
        list(ask())
    return asked


def test_levels_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**changes: Any) -> SokobanDataOptions:
        return SokobanDataOptions.model_validate({"source": "hub", "counts": ALL, **changes})

    hub = {"dataset": "somebody/levels", "revision": "abc", "split": "train+test"}
    given = options(hub=hub).hub
    asked = asked_of_the_hub(monkeypatch, lambda: hub_rows(given, given.split, section="sokoban"))
    assert asked == [(("somebody/levels",), {"revision": "abc", "split": "train+test", "streaming": False})]
    for is_processed, row, other in ((False, RAW, PROCESSED), (True, PROCESSED, RAW)):
        given = options(hub={"processed": is_processed})
        assert len(read_source(given, HubReader(lambda hub: [], lambda hub, split, row=row: [row])).levels) == 1
        with pytest.raises(ValueError, match="level"):
            read_source(given, HubReader(lambda hub: [], lambda hub, split, other=other: [other]))


def test_problems_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub: dict[str, Any] = {"dataset": "somebody/problems", "revision": "abc", "train": "t", "eval": "e"}

    def parts(validation: str | None, there: list[str]) -> Counter[str]:
        values = {"source": "hub", "counts": ALL, "hub": hub | {"validation": validation}}
        reader = HubReader(lambda options: there, lambda options, split: [source_row(len(split), answer=split)])
        rows = open_source(Geo3kDataOptions.model_validate(values), "geo3k", reader)
        return Counter((row["source_split"], row["answer"]) for row in rows)

    assert set(parts("v", [])) == {("train", "t"), ("validation", "v"), ("eval", "e")}
    assert set(parts("auto", ["validation"])) == {("train", "t"), ("validation", "validation"), ("eval", "e")}
    assert set(parts("auto", ["t"])) == set(parts(None, ["validation"])) == {("train", "t"), ("eval", "e")}
    for streaming in (False, True):
        given = {"source": "hub", "counts": ALL, "hub": hub | {"validation": "v", "streaming": streaming}}
        options = Geo3kDataOptions.model_validate(given).model_dump(mode="json")
        asked = asked_of_the_hub(
            monkeypatch, lambda options=options: problem_nodes.read_problems(options, "geo3k", hub_reader("geo3k"))
        )
        assert asked[0] == (("somebody/problems",), {"revision": "abc", "split": "t", "streaming": streaming})
