"""One finished run of `--env=test`, shared by all tests here, and the same commands without a new process."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result
from kedro.framework import project as kedro_project
from kedro.framework.cli.utils import find_run_command
from kedro.framework.session import KedroSession

from runs import ROOT, finish, kedro_command

TRAIN = "train_sokoban"
PACKAGE = "geo_sokoban_pipeline"


@dataclass(frozen=True)
class Project:
    """The project on a data root of its own; every command runs in this process."""

    root: Path
    conf_env: ClassVar[str] = "test"

    def folder(self, layer: str, run: str = TRAIN, run_id: str = "default") -> Path:
        return self.root / layer / run / run_id

    def run(self, name: str = TRAIN, params: dict[str, Any] | None = None, **selection: Any) -> None:
        """`kedro run --pipelines=name --env=<conf_env>`."""
        with self._session(params or {}) as session:
            session.run(pipeline_names=[name], **selection)

    def load(self, name: str, params: dict[str, Any] | None = None) -> Any:
        """`catalog.load(name)`."""
        with self._session(params or {}) as session:
            return session.load_context().catalog.load(name)

    def command(self, *words: str) -> Result:
        """`kedro run words`, with its exit code and what it says."""
        with self._environment():
            return CliRunner().invoke(find_run_command(PACKAGE), [f"--env={self.conf_env}", *words])

    def stamps(self) -> dict[str, int]:
        """Time of writing of every file below the run's models: what a command has made again is seen here."""
        found = sorted(self.root.glob(f"06_models/{TRAIN}/**/*.*"))
        return {str(path.relative_to(self.root)): path.stat().st_mtime_ns for path in found if path.suffix != ".lock"}

    @contextmanager
    def _session(self, params: dict[str, Any]) -> Iterator[KedroSession]:
        with self._environment(), KedroSession.create(ROOT, env=self.conf_env, runtime_params=params) as session:
            yield session

    @contextmanager
    def _environment(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEO_SOKOBAN_DATA_ROOT", str(self.root))
            patch.chdir(ROOT)
            if kedro_project.PACKAGE_NAME != PACKAGE:  # each time takes a third of a second
                kedro_project.configure_project(PACKAGE, preserve_logging=True)
            yield


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
        finish(kedro_command(f"--pipelines=train_{task}", data_root=root))
        return Project(root)

    return make


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
