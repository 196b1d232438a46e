"""Finished runs of `--env=test`, shared by all tests here, and the same commands without a new process."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kedro.framework.session import KedroSession

from geo_sokoban_pipeline.studies.plan import merge
from runs import Project, finish, kedro_command

LONGER: dict[str, Any] = {"train_sokoban": {"loop": {"iterations": 4}}}
LEARNT = {"steps": 40, "play_every": 40}  # of the warm start: a few more than `--env=test` has, to answer at all


@dataclass(frozen=True)
class FinishedRun(Project):
    """The finished run; tests that change it take a clone."""

    output: str

    def clone(self, root: Path) -> Project:
        """A copy to be changed; weights, which are never edited in place, are shared."""
        for path in self.root.rglob("*"):
            target = root / path.relative_to(self.root)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif path.suffix != ".lock":
                target.parent.mkdir(parents=True, exist_ok=True)
                (os.link if path.suffix == ".safetensors" else shutil.copyfile)(path, target)
        return Project(root)


@dataclass(frozen=True)
class GeometryRun(Project):
    """A data root with a run of a geometry task, of which each command has the settings."""

    task: str

    def session(self, params: dict[str, Any]) -> AbstractContextManager[KedroSession]:
        return super().session(merge({f"train_{self.task}": {"warm_start": LEARNT}}, params))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """`kedro run --pipelines=train_sokoban --env=test` with tracking, all checkpoints kept, in a process of its own."""
    root = tmp_path_factory.mktemp("finished")
    words = ("--pipelines=train_sokoban", "--params=tracking.enabled=true")
    return FinishedRun(root, finish(kedro_command(*words, data_root=root, PYTHONHASHSEED="1")))


@pytest.fixture(scope="session")
def stored_run(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Project]:
    """`stored_run(task)`: a finished run of `train_<task>`, made once; for tests that find in it what they leave."""

    @cache
    def make(task: str) -> Project:
        root = tmp_path_factory.mktemp(f"stored_{task}")
        if task == "sokoban":
            return finished_run.clone(root / "data")
        project = GeometryRun(root, task)
        project.run(f"train_{task}")
        return project

    return make


@pytest.fixture(scope="session")
def longer_run(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The finished run with one iteration more, which is logged to the MLflow run of the others."""
    project = finished_run.clone(tmp_path_factory.mktemp("longer") / "data")
    project.run(params={**LONGER, "tracking": {"enabled": True, "uri": f"sqlite:///{finished_run.root / 'mlflow.db'}"}})
    return project


@pytest.fixture
def clone(finished_run: FinishedRun, tmp_path: Path) -> Project:
    """A copy of the finished run."""
    return finished_run.clone(tmp_path / "data")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The project without any data."""
    return Project(tmp_path / "data")


@pytest.fixture
def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """`count_calls("package.module.function")` is a list that grows by one entry with each call."""

    def count(name: str) -> list[Any]:
        calls: list[Any] = []
        module, _, function = name.rpartition(".")
        original = getattr(importlib.import_module(module), function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return original(*args, **kwargs)

        monkeypatch.setattr(name, counted)
        return calls

    return count


@pytest.fixture
def offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`datasets` without a network, its cache in a folder of the test."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
