"""Every field of the data options has the effect that its description promises, on the rows that come out.

Each effect is a function under the names of its fields, for levels and for problems; a new field without one fails.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from geo_sokoban_pipeline.envs.geo3k import data_steps as problem_nodes
from geo_sokoban_pipeline.envs.geo3k.config import Geo3kDataOptions
from geo_sokoban_pipeline.envs.geo3k.sources import open_source
from geo_sokoban_pipeline.envs.images import png_data_uri, read_data_uri
from geo_sokoban_pipeline.envs.rows import HubReader
from geo_sokoban_pipeline.envs.sokoban import data_steps as level_nodes
from geo_sokoban_pipeline.envs.sokoban.board import Board
from geo_sokoban_pipeline.envs.sokoban.config import SokobanDataOptions
from geo_sokoban_pipeline.envs.sokoban.env import build_env
from geo_sokoban_pipeline.envs.sokoban.sources import Reading, read_source
from geo_sokoban_pipeline.pipelines.hub_rows import hub_reader, hub_rows
from option_fields import leaves
from problem_rows import drawing, image_file, source_row, uri, write_uris

Effect = Callable[[Path, pytest.MonkeyPatch], None]
LEVELS: dict[str, Effect] = {}
PROBLEMS: dict[str, Effect] = {}
ALL = {"train": None, "validation": None, "eval": None}
SPLITS = ("train", "validation", "eval")


def levels(*fields: str) -> Callable[[Effect], Effect]:
    return _registered(LEVELS, fields)


def problems(*fields: str) -> Callable[[Effect], Effect]:
    return _registered(PROBLEMS, fields)


def _registered(table: dict[str, Effect], fields: tuple[str, ...]) -> Callable[[Effect], Effect]:
    def register(check: Effect) -> Effect:
        assert not set(table) & set(fields)
        table.update(dict.fromkeys(fields, check))
        return check

    return register


def test_every_field_is_shown_to_have_an_effect() -> None:
    assert set(LEVELS) == set(leaves(SokobanDataOptions))
    assert set(PROBLEMS) == set(leaves(Geo3kDataOptions))


# Levels


FEW = {"counts": {"train": 8, "validation": 2, "eval": 2}}


def level_options(**changes: Any) -> SokobanDataOptions:
    return SokobanDataOptions.model_validate(FEW | changes)


def read(**changes: Any) -> Reading:
    return read_source(level_options(**changes))


def level_prompts(**changes: Any) -> list[dict[str, Any]]:
    options = level_options(**changes).model_dump(mode="json")
    frames = level_nodes.make_prompts(level_nodes.read_levels(options)[0], options)
    return [row for frame in frames for row in frame.to_dict("records")]


def boards(**changes: Any) -> list[Board]:
    return [level.board for level, _ in read(**changes).levels]


def image(row: dict[str, Any]) -> Image.Image:
    return read_data_uri(row["images"][0], max_bytes=1 << 24, max_pixels=1 << 24).convert("RGB")


@levels("source", "file.path", "file.format")
def _level_files(folder: Path, patch: pytest.MonkeyPatch) -> None:
    text = "#####\n#@$.#\n#####\n"
    (folder / "a.xsb").write_text(text)
    (folder / "b.txt").write_text(f"; 7\n{text}")
    given: dict[str, Any] = {"source": "file", "counts": ALL}
    for name in ("a.xsb", "b.txt"):
        found = read(**given, file={"path": str(folder / name)})
        assert [level.solution_length for level, _ in found.levels] == [1]
    # A format that is said is taken, whatever the name says.
    (folder / "c.jsonl").write_text(json.dumps({"xsb": text}) + "\n")
    assert len(read(**given, file={"path": str(folder / "c.jsonl"), "format": "boxoban"}).levels) == 1
    with pytest.raises(ValueError, match="level"):
        read(**given, file={"path": str(folder / "c.jsonl"), "format": "raw_parquet"})
    assert len(read().levels) == 12


@levels("seed")
def _level_seed(folder: Path, patch: pytest.MonkeyPatch) -> None:
    assert boards() == boards(seed=0) != boards(seed=1)


@levels("height", "width", "boxes", "inner_walls")
def _sizes(folder: Path, patch: pytest.MonkeyPatch) -> None:
    config = [row["extra_info"]["env_config"] for row in level_prompts(height=7, width=6, inner_walls=[2, 2])]
    assert {tuple(one["grid_size"]) for one in config} == {(7, 6)}
    rows = level_prompts(height=7, width=6, inner_walls=[2, 2])
    assert {row["level_xsb"].count("#") for row in rows} == {2 * 7 + 2 * 4 + 2}
    assert {row["level_xsb"].count("#") for row in level_prompts(inner_walls=[0, 3])} <= {20, 21, 22, 23}
    two = level_prompts(boxes=2, counts={"train": 2, "validation": 0, "eval": 0}, max_solution=4)
    assert {row["level_xsb"].count("$") + row["level_xsb"].count("*") for row in two} == {2}


@levels("min_solution", "max_solution", "equal_lengths")
def _lengths(folder: Path, patch: pytest.MonkeyPatch) -> None:
    train = {"counts": {"train": 12, "validation": 0, "eval": 0}}
    found = Counter(level.solution_length for level, _ in read(**train, min_solution=2, max_solution=5).levels)
    assert found == {2: 3, 3: 3, 4: 3, 5: 3}
    drawn = Counter(level.solution_length for level, _ in read(**train, min_solution=2, equal_lengths=False).levels)
    assert set(drawn) <= set(range(2, 9)) and len(set(drawn.values())) > 1


@levels("counts.train", "counts.validation", "counts.eval")
def _level_counts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    counts = {"train": 5, "validation": 3, "eval": 4}
    assert Counter(split for _, split in read(counts=counts).levels) == counts


def _shares(count: Callable[[dict[str, float]], Counter[str]]) -> None:
    for most in SPLITS:
        shares = dict.fromkeys(SPLITS, 0.1) | {most: 0.8}
        found = count(shares)
        assert found[most] > 2 * sum(found[other] for other in SPLITS if other != most)


@levels("shares.train", "shares.validation", "shares.eval")
def _level_shares(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Of what is read, as of what is generated."""
    text = "\n".join(f"; {n}\n{row['level_xsb']}\n" for n, row in enumerate(level_prompts(counts={"train": 60})))
    (folder / "levels.txt").write_text(text)
    given: dict[str, Any] = {"source": "file", "counts": ALL, "file": {"path": str(folder / "levels.txt")}}
    _shares(lambda shares: Counter(split for _, split in read(**given, shares=shares).levels))


@levels("solver_states")
def _solver_states(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "a.xsb").write_text("#######\n#@ $ .#\n#######\n")
    given: dict[str, Any] = {"source": "file", "counts": ALL, "file": {"path": str(folder / "a.xsb")}}
    for states, length in ((0, None), (1, None), (1000, 3)):
        (found,) = read(**given, solver_states=states).levels
        assert found[0].solution_length == length


GRID = " # \t # \t # \t # \t # \n # \t P \t X \t O \t # \n # \t # \t # \t # \t # "
SAID = (
    "<|im_start|>user\nSymbols:\n# Wall | _ Floor | O Target | X Box | P You\n\n"
    "Rules:\n1. Push boxes.\n2. Avoid walls (#).\n\n"
    f"[Current Observation]:\n{GRID}\nDecide the next action:\nNow.<|im_end|>\n<|im_start|>assistant\n<think>"
)


def raw_file(folder: Path, grids: list[str]) -> dict[str, Any]:
    rows = [
        {"id": f"r{n}", "prompt": SAID.replace(GRID, grid), "reward_model": {"ground_truth": 4}}
        for n, grid in enumerate(grids)
    ]
    (folder / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "file", "counts": ALL, "file": {"path": str(folder / "raw.jsonl"), "format": "raw_parquet"}}


@levels("collapse")
def _collapse(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Of a path of two rows and its first one again: the beginning of paths, the states, the rows."""
    first = " # \t # \t # \t # \t # \t # \n # \t P \t X \t _ \t O \t # \n # \t # \t # \t # \t # \t # "
    second = first.replace("P \t X \t _", "_ \t P \t X")
    given = raw_file(folder, [first, second, first])
    found = {how: len(read(**given, collapse=how).levels) for how in ("levels", "states", "rows")}
    assert found == {"levels": 1, "states": 2, "rows": 3}


@levels("cell_px", "max_steps", "instruction")
def _prompts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for px in (16, 24):
        assert {image(row).size for row in level_prompts(cell_px=px)} == {(6 * px, 6 * px)}
    for steps in (7, 100):
        assert {row["extra_info"]["env_config"]["max_steps"] for row in level_prompts(max_steps=steps)} == {steps}
    texts = {
        name: {row["prompt"] for row in level_prompts(instruction=name)} for name in ("brief", "full", "Go <image>!")
    }
    assert texts["Go <image>!"] == {"Go <image>!"}
    assert max(map(len, texts["brief"])) * 4 < min(map(len, texts["full"]))


@levels("observation")
def _observation(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """As an image, or in symbols: in the prompt, and in what the environment shows after a turn."""
    for how, images in (("image", 1), ("text", 0)):
        for row in level_prompts(observation=how):
            assert (len(row["images"] if row["images"] is not None else []), "<image>" in row["prompt"]) == (
                images,
                how == "image",
            )
            env = build_env(row, {})
            env.reset()
            shown = env.format_observation(env.step("<answer>Up</answer>")[0])
            assert sum(part["type"] == "image" for part in shown["content"]) == images


@levels("pictures", "limits.max_bytes", "limits.max_pixels")
def _processed(folder: Path, patch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 20), "red").save(buffer, "PNG")
    own = png_data_uri(buffer.getvalue())
    config = Board.from_text(GRID).to_env_config()
    row = {"prompt": "see <image>", "images": [own], "extra_info": {"env_config": config}}
    (folder / "p.jsonl").write_text(json.dumps(row) + "\n")
    file = {"path": str(folder / "p.jsonl"), "format": "processed_parquet"}
    given: dict[str, Any] = {"source": "file", "counts": ALL, "file": file, "cell_px": 16}
    assert [image(row).size for row in level_prompts(**given, pictures="keep")] == [(40, 20)]
    assert [image(row).size for row in level_prompts(**given, pictures="render")] == [(80, 48)]
    size = len(buffer.getvalue())
    for name, most, less in (("max_bytes", size, size - 1), ("max_pixels", 800, 799)):
        assert len(read(**given, pictures="keep", limits={name: most}).levels) == 1
        with pytest.raises(ValueError, match="level"):
            read(**given, pictures="keep", limits={name: less})


@levels("strip_chat_markup", "consistent_legend")
def _texts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    given = raw_file(folder, [GRID]) | {"instruction": "full"}
    for field, mark in (("strip_chat_markup", "<|im_start|>"), ("consistent_legend", "(#)")):
        for on in (True, False):
            (row,) = level_prompts(**given, **{field: on})
            assert (mark in row["prompt"]) != on, (field, on, row["prompt"])


@levels("hub.dataset", "hub.revision", "hub.split", "hub.processed")
def _level_hub(folder: Path, patch: pytest.MonkeyPatch) -> None:
    hub = {"dataset": "somebody/levels", "revision": "abc", "split": "train+test"}
    asked = _asked_of_the_hub(patch, lambda: hub_rows(level_options(hub=hub).hub, section="sokoban"))
    assert asked == [(("somebody/levels",), {"revision": "abc", "split": "train+test", "streaming": False})]
    raw = {"id": "r", "prompt": SAID, "ability": "bfs"}
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    config = {"env_config": Board.from_text(GRID).to_env_config()}
    processed = {"prompt": "see <image>", "images": [png_data_uri(buffer.getvalue())], "extra_info": config}
    for is_processed, row in ((False, raw), (True, processed)):
        options = level_options(source="hub", counts=ALL, hub={"processed": is_processed})
        assert len(read_source(options, lambda hub, row=row: [row]).levels) == 1
        with pytest.raises(ValueError, match="level"):
            read_source(options, lambda hub, other=is_processed: [raw if other else processed])


def _asked_of_the_hub(patch: pytest.MonkeyPatch, ask: Callable[[], Any]) -> list[Any]:
    """Arguments of the calls to the library that knows the hub."""
    import datasets

    asked: list[Any] = []

    def load_dataset(*names: Any, **arguments: Any) -> Any:
        asked.append((names, arguments))
        raise ValueError("no such split")

    with patch.context() as changed:
        changed.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(Exception, match="somebody"):
            list(ask())
    return asked


# Problems


def problem_rows(**changes: Any) -> dict[str, list[dict[str, Any]]]:
    """Prompts by split; 12 generated problems by default."""
    counts = {"train": 8, "validation": 2, "eval": 2}
    options = Geo3kDataOptions.model_validate({"counts": counts} | changes).model_dump(mode="json")
    raw = problem_nodes.read_problems(options, "geo3k")
    index, _ = problem_nodes.check_problems(raw, options, "geo3k")
    return dict(zip(SPLITS, map(list, problem_nodes.make_prompts(raw, index, options, "geo3k")), strict=True))


def all_rows(**changes: Any) -> list[dict[str, Any]]:
    return [row for rows in problem_rows(**changes).values() for row in rows]


def from_file(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    path = write_uris(folder / f"{len(list(folder.iterdir()))}.parquet", rows)
    return {"source": "file", "file": {"path": str(path)}, "counts": ALL, **changes}


def sizes(rows: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    return {split: len(found) for split, found in rows.items()}


@problems("source", "file.path", "file.validation_path", "file.eval_path")
def _problem_files(folder: Path, patch: pytest.MonkeyPatch) -> None:
    paths = {
        f"{name}path": str(write_uris(folder / f"{name}rows.parquet", [source_row(first + n) for n in range(count)]))
        for name, first, count in (("", 0, 5), ("validation_", 10, 2), ("eval_", 20, 3))
    }
    given = {"source": "file", "counts": ALL, "file": paths}
    assert sizes(problem_rows(**given)) == {"train": 5, "validation": 2, "eval": 3}
    window = {**paths, "path": f"{paths['path']}@[0:4]"}
    assert sizes(problem_rows(**given | {"file": window})) == {"train": 4, "validation": 2, "eval": 3}
    assert sizes(problem_rows()) == {"train": 8, "validation": 2, "eval": 2}


@problems("seed")
def _problem_seed(folder: Path, patch: pytest.MonkeyPatch) -> None:
    assert all_rows() == all_rows(seed=0) != all_rows(seed=1)
    given = from_file(folder, [source_row(n) for n in range(30)])
    dealt = [{row["prompt"] for row in problem_rows(**given, seed=seed)["eval"]} for seed in (0, 0, 1)]
    assert dealt[0] == dealt[1] != dealt[2]


@problems("problems.difficulty", "problems.families", "problems.picture_scale")
def _kinds(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for name in ("tiny", "easy"):
        assert {row["difficulty"] for row in all_rows(problems={"difficulty": name})} == {name}
    family = all_rows()[0]["family"]
    assert {row["family"] for row in all_rows(problems={"families": {family: 1.0}})} == {family}
    assert len({row["family"] for row in all_rows()}) > 1
    for scale in (1.0, 2.0):
        found = {image(row).size for row in all_rows(problems={"picture_scale": scale})}
        assert found == {(int(128 * scale), int(96 * scale))}


@problems("problems.angle_step", "problems.held_out_angles", "problems.lengths")
def _numbers(folder: Path, patch: pytest.MonkeyPatch) -> None:
    one = {"families": {"linear_pair": 1.0}}
    counts = {"train": 20, "validation": 0, "eval": 20}

    def answers(**changes: Any) -> dict[str, set[int]]:
        rows = problem_rows(counts=counts, problems=one | changes)
        return {split: {int(row["answer"]) for row in found} for split, found in rows.items()}

    assert any(answer % 10 for answer in answers()["train"])
    steps = answers(angle_step=10)
    assert not any(answer % 10 for found in steps.values() for answer in found)
    assert not steps["train"] & steps["eval"]
    shared = answers(angle_step=10, held_out_angles={})
    assert shared["train"] & shared["eval"]
    # Lengths show in images alone: with one length, a figure with equal angles is one image.
    few, many = (
        len({row["images"][0] for row in all_rows(counts=counts, problems={"lengths": lengths})})
        for lengths in ((10, 99), (50, 99))
    )
    assert few == many == 40
    labels = [{row["images"][0] for row in all_rows(problems={"lengths": bounds})} for bounds in ((10, 20), (80, 99))]
    assert not labels[0] & labels[1]


@problems("counts.train", "counts.validation", "counts.eval")
def _problem_counts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    counts = {"train": 5, "validation": 3, "eval": 4}
    assert sizes(problem_rows(counts=counts)) == counts
    given = from_file(folder, [source_row(n) for n in range(60)])
    assert sizes(problem_rows(**given | {"counts": counts})) == counts


@problems("shares.train", "shares.validation", "shares.eval")
def _problem_shares(folder: Path, patch: pytest.MonkeyPatch) -> None:
    given = from_file(folder, [source_row(n) for n in range(60)])
    _shares(lambda shares: Counter(sizes(problem_rows(**given, shares=shares))))


@problems("instruction")
def _problem_texts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    own = {row["prompt"] for row in all_rows(instruction="Say: {question}")}
    bare = {row["prompt"] for row in all_rows(instruction="question")}
    assert all("Say: " in text for text in own) and not any("Say: " in text for text in bare)
    assert all("boxed" in row["prompt"] for row in all_rows(instruction="boxed"))
    lengths = [min(len(row["prompt"]) for row in all_rows(instruction=name)) for name in ("tool_brief", "tool")]
    assert lengths[0] < lengths[1] and all("calc_score" in row["prompt"] for row in all_rows(instruction="tool"))


@problems("exclude_overlaps")
def _overlaps(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Training rows with an image of an evaluation row, one of them with its question too."""
    rows = [source_row(n) for n in range(4)]
    rows[1] = rows[1] | {"images": source_row(9)["images"]}
    rows[2] = source_row(9)
    given = from_file(folder, rows)
    held_out = str(write_uris(folder / "held_out.parquet", [source_row(9)]))
    given["file"] |= {"eval_path": held_out, "validation_path": str(write_uris(folder / "v.parquet", [source_row(8)]))}
    found = {how: sizes(problem_rows(**given, exclude_overlaps=how)) for how in ("none", "pairs", "images")}
    assert {how: one["train"] for how, one in found.items()} == {"none": 4, "pairs": 3, "images": 2}
    assert {one["eval"] for one in found.values()} == {1}


@problems("repair_control_characters", "transparency")
def _repairs(folder: Path, patch: pytest.MonkeyPatch) -> None:
    bad = source_row(0, problem="<image>Give \boxed{x}.")
    (row,) = [row for row in all_rows(**from_file(folder, [bad], repair_control_characters=True))]
    assert "\\boxed" in row["prompt"] and "\b" not in row["prompt"]
    (row,) = [row for row in all_rows(**from_file(folder, [bad], repair_control_characters=False))]
    assert "\b" in row["prompt"]
    clear = Image.new("RGBA", (40, 30), (255, 0, 0, 0))
    given = from_file(folder, [source_row(0, images=[uri(image_file(clear))])])
    colours = {how: image(all_rows(**given, transparency=how)[0]).getpixel((5, 5)) for how in ("white", "drop")}
    assert colours == {"white": (255, 255, 255), "drop": (255, 0, 0)}


@problems("image_folder")
def _folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "one.png").write_bytes(image_file(drawing(3)))
    rows = [source_row(0), source_row(1, images=["one.png"])]
    given = from_file(folder, rows)
    assert len(all_rows(**given)) == 1
    assert len(all_rows(**given, image_folder=str(folder))) == 2


@problems("rows_without_image")
def _rows_without_image(folder: Path, patch: pytest.MonkeyPatch) -> None:
    given = from_file(folder, [source_row(0), source_row(1, images=None, problem="Find x.")])
    kept = {how: sorted(len(row["images"]) for row in all_rows(**given, rows_without_image=how))
            for how in ("reject", "keep")}  # fmt: skip
    assert kept == {"reject": [1], "keep": [0, 1]}


@problems("hub.dataset", "hub.revision", "hub.train", "hub.validation", "hub.eval", "hub.streaming")
def _problem_hub(folder: Path, patch: pytest.MonkeyPatch) -> None:
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
        asked = _asked_of_the_hub(
            patch, lambda options=options: problem_nodes.read_problems(options, "geo3k", hub_reader("geo3k"))
        )
        assert asked[0] == (("somebody/problems",), {"revision": "abc", "split": "t", "streaming": streaming})


@problems("limits.max_bytes", "limits.max_pixels", "limits.max_aspect", "limits.max_images")
def _limits(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """At the limit a row is taken, beyond it it is not; the plain row beside it always is."""
    wide = image_file(Image.new("RGB", (120, 30), "red"))
    two = source_row(1, images=[uri(wide), uri(wide)], problem="<image><image>Which?")
    small = image_file(Image.new("RGB", (30, 30), "blue"))
    given = from_file(folder, [source_row(0, images=[uri(small)]), two])
    for name, most, less in (
        ("max_bytes", len(wide), len(wide) - 1),
        ("max_pixels", 3600, 3599),
        ("max_aspect", 4.0, 3.9),
        ("max_images", 2, 1),
    ):
        assert [len(all_rows(**given, limits={name: limit})) for limit in (most, less)] == [2, 1], name


@pytest.mark.parametrize("check", dict.fromkeys([*LEVELS.values(), *PROBLEMS.values()]), ids=lambda one: one.__name__)
def test_effects(check: Effect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, monkeypatch)
