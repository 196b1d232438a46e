"""Environment variables of the original launchers: each one sets a parameter, or is reported to have no effect.

The configuration `conf/qwen3vl` reads those that set something; the pre-flight lists the others when they are given, so
that none is ignored silently. `docs/full_size.md` has the same table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from geo_sokoban_pipeline.config.base import nearest

PREFIX = "SLIME_SCRIPT_"
MODEL_NAME = "SLIME_SCRIPT_MODEL_NAME"
SOKOBAN_ROOT = "SLIME_SCRIPT_SOKOBAN_DATA_ROOT"
SOKOBAN_FILE = "SLIME_SCRIPT_SOKOBAN_TRAIN_PATH"
RAY_SUBMIT = "SLIME_SCRIPT_ENABLE_RAY_SUBMIT"
NUM_GPUS = "SLIME_SCRIPT_NUM_GPUS"
EXTERNAL_RAY = "SLIME_SCRIPT_EXTERNAL_RAY"
_NO = ("0", "false", "no", "off")

SIZES = ("2B", "4B", "8B", "30B-A3B", "235B-A22B")
MODELS = tuple(f"Qwen3-VL-{size}-{kind}" for size in SIZES for kind in ("Instruct", "Thinking"))


@dataclass(frozen=True)
class Variable:
    """One variable of the launchers.

    Attributes:
        name: in the environment.
        parameters: it sets, `{run}` standing for the training section; none: it has nothing to set here.
        note: for people: what takes its place, or what is particular.
    """

    name: str
    parameters: tuple[str, ...] = ()
    note: str = ""


VARIABLES = (
    Variable(
        "SLIME_SCRIPT_TRAIN_BACKEND", ("{run}.backend",), "fsdp by default; the layout of megatron is in conf/megatron"
    ),
    Variable(MODEL_NAME, ("{run}.policy.path",), "without Qwen/; one list for all tasks"),
    Variable("SLIME_SCRIPT_DATASET_NAME", ("geo3k.hub.dataset",), "of the task with one response"),
    Variable(
        NUM_GPUS,
        ("{run}.rollout.server.count",),
        "a sampling server each; training takes turns on the first GPU. In --env=cluster {run}.processes: GPUs in all",
    ),
    Variable("SLIME_SCRIPT_SOKOBAN_DATASET_ID", ("sokoban.hub.dataset",)),
    Variable(SOKOBAN_FILE, ("sokoban.file.path",), "sets sokoban.source=file"),
    Variable(SOKOBAN_ROOT, ("sokoban.file.path",), "train.parquet in it; the hub where there is no such file"),
    Variable("SLIME_SCRIPT_SOKOBAN_IMAGES_DIR", (), "images lie in the rows, no folder is written"),
    Variable("SLIME_SCRIPT_SOKOBAN_DOWNLOAD_WORKERS", (), "huggingface_hub fetches side by side by itself"),
    Variable(EXTERNAL_RAY, ("{run}.ray.address",), "only --env=cluster reads it"),
    Variable(RAY_SUBMIT, (), "0 refuses to train; to prepare only, run --pipelines=data_<task> or check_<task>"),
)


def launch_value(name: str) -> str | None:
    """Value that the launchers' variables give a parameter, for `${launch:…}` in the configuration.

    Args:
        name: `sokoban.source` (`file` or `hub`), `sokoban.file.path` (None with the hub), or `ray.address` (`auto` with
            a cluster that is there, else None).

    Raises:
        ValueError: another name.
    """
    path = sokoban_file(os.environ)
    known = {
        "ray.address": "auto" if is_on(os.environ.get(EXTERNAL_RAY, "0")) else None,
        "sokoban.source": "hub" if path is None else "file",
        "sokoban.file.path": path,
    }
    if name not in known:
        raise ValueError(f"${{launch:{name}}}: only {', '.join(known)} are known.")
    return known[name]


def is_on(value: str) -> bool:
    """Whether the value of a switch is not that of one that is off."""
    return value.strip().lower() not in (*_NO, "")


def sokoban_file(environment: Mapping[str, str]) -> str | None:
    """Local file of Sokoban's training rows: the one that is named, or that of the named folder where it is there."""
    if path := environment.get(SOKOBAN_FILE):
        return str(Path(path).expanduser())
    root = environment.get(SOKOBAN_ROOT)
    file = Path(root).expanduser() / "train.parquet" if root else None
    return str(file) if file is not None and file.is_file() else None


def check_submit(environment: Mapping[str, str]) -> None:
    """See that a training run is wanted.

    Raises:
        ValueError: the launchers were told to prepare only.
    """
    if environment.get(RAY_SUBMIT, "1").strip().lower() in _NO:
        raise ValueError(
            f"{RAY_SUBMIT}={environment[RAY_SUBMIT]} asks to prepare only: run --pipelines=data_<task> or "
            "check_<task>, or unset it."
        )


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that only look like the launchers', each with the nearest one that is, if any."""
    known = [variable.name for variable in VARIABLES]
    others = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    return {name: nearest(name, known) for name in others}
