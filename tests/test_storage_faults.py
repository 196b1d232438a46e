"""Writers that fail, or are killed, at each of their system calls in turn: the old state or the new one is visible.

An audit hook counts the calls that touch the case's folder, as the interpreter announces them: whoever calls, by
whatever name. A run without a fault tells how many calls there are; then one run each for an error at every one of
them, and, in a forked child, for a kill.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kedro.io import DatasetError

from builders import CONTEXT, make_trajectories
from geo_sokoban_pipeline.datasets import CheckpointsDataset, TrajectoriesDataset
from geo_sokoban_pipeline.datasets.iterations import read_resume_state
from geo_sokoban_pipeline.runs import storage
from geo_sokoban_pipeline.runs.folders import RunFolders
from geo_sokoban_pipeline.runs.policy_folder import open_policy, write_policy
from geo_sokoban_pipeline.runs.storage import (
    MANIFEST,
    Complete,
    NewCheckpoint,
    Rewind,
    read_json,
    read_manifest,
    remove_folder,
    write_folder,
    write_json,
)
from geo_sokoban_pipeline.trajectories.types import trajectories_to_table

ANNOUNCED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "ctypes.dlsym"}
KILLED, FAILED, DONE = 77, 78, 0
Fault = Callable[[int], None]  # called with the number of the next call
Call = tuple[str, ...]  # name of the call, then the files that it names, relative to the folder


WATCHED: list[tuple[Path, Callable[[Call], None]]] = []  # the folder, and what is called before each call on it


def note(name: str, *paths: Any) -> None:
    names = [os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
    for folder, before in WATCHED:
        # Removal of trees names files relative to the handle of their folder.
        inside = [name for name in names if not name.startswith("/") or Path(name).is_relative_to(folder)]
        if inside:
            before((name, *(name.removeprefix(f"{folder}/") for name in inside)))


def hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not WATCHED or event not in ANNOUNCED:
        return
    if event == "ctypes.dlsym":
        note("os.exchange", arguments[1])
    elif event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR):  # who only reads changes nothing
        note(event, *arguments[: 2 if event in ("os.rename", "os.link") else 1])


@pytest.fixture(scope="module", autouse=True)
def _calls_are_heard() -> Iterator[None]:
    flush = os.fsync  # the one call that is not announced

    def fsync(handle: int) -> None:
        note("os.fsync", os.readlink(f"/proc/self/fd/{handle}"))
        flush(handle)

    sys.addaudithook(hear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def play(folder: Path, act: Callable[[], Any], fault: Fault) -> tuple[int, list[Call]]:
    """Act with a fault; returns how it ended and the calls that were made."""
    calls: list[Call] = []

    def before(call: Call) -> None:
        calls.append(call)
        fault(len(calls))

    WATCHED.append((folder, before))
    try:
        act()
    except (OSError, DatasetError):
        return FAILED, calls
    finally:
        WATCHED.pop()
    return DONE, calls


def play_in_child(folder: Path, act: Callable[[], Any], fault: Fault) -> int:
    """Act with a fault that may end the process; returns how it ended."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code, _ = play(folder, act, fault)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def nothing(count: int) -> None:
    """No fault."""


def killed_at(number: int) -> Fault:
    return lambda count: os._exit(KILLED) if count == number else None


def failing_at(number: int) -> Fault:
    def fault(count: int) -> None:
        if count == number:
            raise OSError(errno.ENOSPC, "No space left on device")

    return fault


@dataclass(frozen=True)
class Case:
    """A writer over a folder.

    Attributes:
        before: makes the old state.
        act: what is interrupted.
        look: what a reader sees; raises where anything is torn.
        states: that may be seen, the old one first, the new one last.
        tidy: what the next run does before anything else.
    """

    before: Callable[[Path], Any]
    act: Callable[[Path], Any]
    look: Callable[[Path], Any]
    states: list[Any]
    tidy: Callable[[Path], Any] = storage.remove_temporaries


def look_json(folder: Path) -> Any:
    return read_json(folder / "x.json") if (folder / "x.json").exists() else None


def fill(text: str) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "deep").mkdir()
        (folder / "deep" / "weights.safetensors").write_text(text * 10)
        (folder / "config.json").write_text(f'{{"text": "{text}"}}')
        return {"text": text}

    return write


def fill_one(text: str) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "config.json").write_text(text)
        return {"text": text}

    return write


def look_folder(folder: Path) -> Any:
    manifest = read_manifest(folder / "made")
    if manifest is None:
        return None
    assert (folder / "made" / "deep" / "weights.safetensors").read_text() == manifest["text"] * 10
    return manifest["text"]


def checkpoints(folder: Path) -> CheckpointsDataset:
    return CheckpointsDataset(str(folder))


def save_three(folder: Path) -> None:
    checkpoints(folder).save({f"iter={n:05d}": NewCheckpoint(fill_one(str(n))) for n in range(3)})
    checkpoints(folder).save(Complete(3))


def look_checkpoints(folder: Path) -> Any:
    dataset = checkpoints(folder)
    found = dataset.load()
    for entry in found.values():
        read_manifest(entry["dir"])
        assert entry["manifest"]["text"] == str(entry["iteration"])
    state = read_resume_state(folder)
    assert state["stored"] == [entry["iteration"] for entry in found.values()]
    return state["stored"], state["complete"] is not None


def save_fourth(folder: Path) -> None:
    checkpoints(folder).save({"iter=00003": NewCheckpoint(fill_one("3"), keep=[1, 3])})
    checkpoints(folder).save(Complete(4))


EPISODES = [trajectories_to_table(make_trajectories(4, seed=seed), CONTEXT) for seed in range(3)]
PARTS = [f"iter=00000/part-{number:03d}" for number in range(2)]


def look_episodes(folder: Path) -> Any:
    seen = []
    for read in TrajectoriesDataset(str(folder)).load().values():
        table = read()
        seen.append(next(n for n, one in enumerate(EPISODES) if table.equals(one.unify_dictionaries(), False)))
    return seen


CASES: dict[str, Case] = {
    "a new file": Case(
        lambda folder: None, lambda folder: write_json(folder / "x.json", [1]), look_json, [None, [1]]
    ),
    "a file in place of one": Case(
        lambda folder: write_json(folder / "x.json", [0] * 999),
        lambda folder: write_json(folder / "x.json", [1]),
        look_json,
        [[0] * 999, [1]],
    ),
    "a new folder": Case(
        lambda folder: None, lambda folder: write_folder(folder / "made", fill("b")), look_folder, [None, "b"]
    ),
    "a folder in place of one": Case(
        lambda folder: write_folder(folder / "made", fill("a")),
        lambda folder: write_folder(folder / "made", fill("b")),
        look_folder,
        ["a", "b"],
    ),
    "a policy that is linked": Case(
        lambda folder: write_folder(folder / "source", fill("c")),
        lambda folder: write_policy(folder / "made", open_policy(folder / "source")),
        look_folder,
        [None, "c"],
    ),
    "a folder that is removed": Case(
        lambda folder: write_folder(folder / "made", fill("a")),
        lambda folder: remove_folder(folder / "made"),
        look_folder,
        ["a", None],
    ),
    "a checkpoint, older ones and the mark": Case(
        save_three,
        save_fourth,
        look_checkpoints,
        # The mark goes first: never is a run complete whose newest checkpoint it does not know.
        [
            ([0, 1, 2], True),
            ([0, 1, 2], False),
            ([0, 1, 2, 3], False),
            ([1, 2, 3], False),
            ([1, 3], False),
            ([1, 3], True),
        ],
        lambda folder: checkpoints(folder).save(Rewind(9)),
    ),
    "checkpoints that are taken back": Case(
        save_three,
        lambda folder: checkpoints(folder).save(Rewind(0)),
        look_checkpoints,
        [([0, 1, 2], True), ([0, 1, 2], False), ([0, 1], False), ([0], False)],
        lambda folder: checkpoints(folder).save(Rewind(9)),
    ),
    "parts of episodes": Case(
        lambda folder: TrajectoriesDataset(str(folder)).save({PARTS[0]: EPISODES[0]}),
        lambda folder: TrajectoriesDataset(str(folder)).save(dict(zip(PARTS, EPISODES[1:], strict=True))),
        look_episodes,
        [[0], [1], [1, 2]],
        lambda folder: TrajectoriesDataset(str(folder)).save(Rewind(9)),
    ),
}  # fmt: skip


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[Case], Path]:
    """Factory of folders with a case's old state."""
    numbers = iter(range(10_000))
    old: dict[int, Path] = {}

    def make(case: Case) -> Path:
        if id(case) not in old:
            old[id(case)] = tmp_path / f"old{len(old)}"
            old[id(case)].mkdir()
            case.before(old[id(case)])
        return shutil.copytree(old[id(case)], tmp_path / f"{next(numbers)}")

    return make


def temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.tmp"))


@pytest.mark.parametrize("name", CASES)
def test_old_state_or_new_one_after_a_fault_at_any_call(name: str, fresh: Callable[[Case], Path]) -> None:
    case = CASES[name]
    folder = fresh(case)
    assert case.look(folder) == case.states[0]
    ended, calls = play(folder, lambda: case.act(folder), nothing)
    assert (ended, case.look(folder), temporaries(folder)) == (DONE, case.states[-1], [])
    seen = []
    for number, call in enumerate(calls, 1):
        for is_killed in (True, False):
            folder, where = fresh(case), f"{'killed' if is_killed else 'failing'} at {number}, {call}"
            if is_killed:
                ended = play_in_child(folder, lambda folder=folder: case.act(folder), killed_at(number))
            else:
                ended, _ = play(folder, lambda folder=folder: case.act(folder), failing_at(number))
            # An error while something is cleared away is no reason to stop.
            assert ended in (KILLED if is_killed else FAILED, DONE), where
            assert case.look(folder) in case.states, where
            seen.append(case.look(folder))
            if not is_killed and call[0] not in ("os.remove", "os.rmdir"):
                assert temporaries(folder) == [], where
            case.tidy(folder)
            assert temporaries(folder) == [], where
            case.act(folder)
            assert (case.look(folder), temporaries(folder)) == (case.states[-1], []), where
    assert case.states[0] in seen and case.states[-1] in seen


def last_rename(calls: list[Call]) -> int:
    return max(n for n, call in enumerate(calls) if call[0] in ("os.rename", "os.exchange"))


@pytest.mark.parametrize("name", ["a new file", "a file in place of one"])
def test_a_file_is_on_disk_before_its_name_and_its_name_before_the_end(
    name: str, fresh: Callable[[Case], Path]
) -> None:
    folder = fresh(CASES[name])
    _, calls = play(folder, lambda: CASES[name].act(folder), nothing)
    renamed = last_rename(calls)
    _, temporary, target = calls[renamed]
    assert target == "x.json"
    before, after = calls[:renamed], calls[renamed + 1 :]
    opened = max(n for n, call in enumerate(before) if call == ("open", temporary))
    assert ("os.fsync", temporary) in before[opened:]
    assert ("os.fsync", str(folder)) in after


@pytest.mark.parametrize("name", ["a new folder", "a folder in place of one", "a policy that is linked"])
def test_a_folder_is_on_disk_before_its_name_and_its_manifest_is_last(name: str, fresh: Callable[[Case], Path]) -> None:
    folder = fresh(CASES[name])
    _, calls = play(folder, lambda: CASES[name].act(folder), nothing)
    named = last_rename(calls)
    flushed = [call[1] for call in calls[:named] if call[0] == "os.fsync"]
    temporary = next(call[1] for call in calls if call[0] == "os.mkdir" and call[1].startswith(".made."))
    sealed = next(n for n, call in enumerate(calls) if call[0] == "os.rename" and call[-1] == f"{temporary}/{MANIFEST}")
    files = [f"{temporary}/{file}" for file in ("config.json", "deep/weights.safetensors", "deep")]
    before_seal = [call[1] for call in calls[:sealed] if call[0] == "os.fsync"]
    assert set(files) <= set(before_seal)
    assert flushed[-1] == temporary, "the manifest's name"
    assert ("os.fsync", str(folder)) in calls[named + 1 :]


def test_a_folder_that_cannot_be_exchanged_is_put_aside_and_back(
    fresh: Callable[[Case], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "exchange_folders", lambda first, second: False)
    case = CASES["a folder in place of one"]
    folder = fresh(case)
    ended, calls = play(folder, lambda: case.act(folder), nothing)
    assert (ended, case.look(folder), temporaries(folder)) == (DONE, "b", [])
    assert sum(call[0] == "os.rename" for call in calls) == 3  # the manifest, the old folder, the new one
    for number in range(1, len(calls) + 1):
        folder = fresh(case)
        play(folder, lambda folder=folder: case.act(folder), failing_at(number))
        assert case.look(folder) in case.states


@pytest.mark.parametrize("size", [0, 1, 4096, 16_000])
@pytest.mark.parametrize("dies", [True, False], ids=["killed", "error"])
def test_a_part_that_is_cut_off_while_it_is_written(size: int, dies: bool, fresh: Callable[[Case], Path]) -> None:
    """The file may grow to so many bytes: whoever writes it, in whatever language, is stopped there."""
    case = CASES["parts of episodes"]
    folder = fresh(case)

    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if dies else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        case.act(folder)

    assert (folder / f"{PARTS[0]}.parquet").stat().st_size > 16_000
    assert play_in_child(folder, act, nothing) == (-signal.SIGXFSZ if dies else FAILED)
    assert case.look(folder) == [0]
    assert dies or temporaries(folder) == []


def test_the_next_command_of_a_run_clears_what_killed_ones_left(tmp_path: Path) -> None:
    folders = RunFolders.of(tmp_path, "train_sokoban", "default")
    write_json(folders.reports / "eval_summary.json", {})
    write_folder(folders.models / "policy", fill("a"))
    for act in (
        lambda: write_json(folders.reports / "eval_summary.json", {"new": 1}),
        lambda: write_json(folders.outputs / "metrics" / "iter=00000.json", {}),
        lambda: write_folder(folders.models / "policy", fill("b")),
    ):
        _, calls = play(tmp_path, act, nothing)
        play_in_child(tmp_path, act, killed_at(last_rename(calls)))
    assert len(temporaries(tmp_path)) >= 2
    folders.tidy()
    assert temporaries(tmp_path) == []
    assert read_json(folders.reports / "eval_summary.json") == {"new": 1}
    assert open_policy(folders.models / "policy").manifest["text"] == "b"


# A run that is set aside while a new one begins


def run_of(root: Path) -> RunFolders:
    return RunFolders.of(root, "train_sokoban", "default")


def store_run(root: Path, name: str) -> None:
    folders = run_of(root)
    write_json(folders.outputs / "commands.json", [name])
    write_json(folders.outputs / "metrics" / "iter=00000.json", {"run": name})
    write_folder(folders.models / "policy", fill(name))
    write_json(folders.reports / "eval_summary.json", {"run": name})


def recover(root: Path) -> None:
    """Do first what the next command does."""
    run_of(root).settle()
    run_of(root).tidy()


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def set_aside(root: Path) -> None:
    run_of(root).set_aside()


def begin_anew(root: Path, *, commits: bool) -> None:
    set_aside(root)
    store_run(root, "new")
    if commits:
        checkpoints(run_of(root).models / "checkpoints").save({"iter=00000": NewCheckpoint(fill("new"))})


def half_set_aside(root: Path) -> None:
    _, calls = play(root, lambda: set_aside(root), nothing)
    recover(root)
    moves = [number for number, call in enumerate(calls, 1) if call[0] == "os.rename" and ".replaced/" in call[-1]]
    play_in_child(root, lambda: set_aside(root), killed_at(moves[len(moves) // 2]))


# What has happened to a stored run, what is interrupted at each of its calls, and which run is there in the end.
REPLACEMENTS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], str]] = {
    "it is set aside": (lambda root: None, set_aside, "old"),
    "it is put back, half set aside": (half_set_aside, recover, "old"),
    "it is put back, beside a new one": (lambda root: begin_anew(root, commits=False), recover, "old"),
    "it is deleted, since a new one has committed": (lambda root: begin_anew(root, commits=True), recover, "new"),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_old_run_or_new_one_after_a_fault_at_any_call(name: str, tmp_path: Path, fresh: Callable[[Case], Path]) -> None:
    before, act, which = REPLACEMENTS[name]
    store_run(tmp_path / "old", "old")
    begin_anew(tmp_path / "new", commits=True)
    wanted = files(tmp_path / which)
    case = Case(lambda root: (store_run(root, "old"), before(root)), act, files, [])
    root = fresh(case)
    assert files(root) != wanted or act is set_aside
    ended, calls = play(root, lambda: act(root), nothing)
    assert (ended, files(root) == wanted) == (DONE, act is recover)
    for number, call in enumerate(calls, 1):
        for run, fault in ((play_in_child, killed_at), (play, failing_at))[: 2 if act is set_aside else 1]:
            root = fresh(case)
            run(root, lambda root=root: act(root), fault(number))
            recover(root)
            assert files(root) == wanted, f"{fault.__name__}({number}): {call}"


def test_a_run_that_is_set_aside_is_never_overwritten(tmp_path: Path) -> None:
    store_run(tmp_path, "old")
    old = files(tmp_path)
    for _ in range(2):  # `fresh=true` twice, each time without a checkpoint
        run_of(tmp_path).set_aside()
        assert run_of(tmp_path).is_empty and run_of(tmp_path).has_replaced
        store_run(tmp_path, "new")
    recover(tmp_path)
    assert files(tmp_path) == old


@pytest.mark.parametrize(
    ("run", "name", "commits"),
    [
        ("train_sokoban", "06_models/policy/manifest.json", False),
        ("train_sokoban", "07_model_output/metrics/iter=00000.json", False),
        ("train_sokoban", "06_models/checkpoints/iter=00000/manifest.json", True),
        ("update_sokoban", "07_model_output/metrics/iter=00000.json", False),
        ("evaluate_sokoban", "07_model_output/commands.json", False),
        ("evaluate_sokoban", "06_models/data.json", False),
        ("evaluate_sokoban", "06_models/mlflow_run.json", False),
        ("evaluate_sokoban", "08_reporting/eval_summary.json", True),
        ("export_sokoban", "07_model_output/.export.ab.tmp/tokens/x.parquet", False),
        ("export_sokoban", "07_model_output/export/tokens/x.parquet", True),
        ("rollout_sokoban", "07_model_output/trajectories/iter=00000/.part-000.parquet.ab.tmp", False),
        ("rollout_sokoban", "07_model_output/trajectories/iter=00000/part-000.parquet", True),
        ("control_sokoban", "06_models/budget.json", False),
        ("control_sokoban", "06_models/policy/manifest.json", True),
    ],
)
def test_what_commits_a_new_run(tmp_path: Path, run: str, name: str, commits: bool) -> None:
    folders = RunFolders.of(tmp_path, run, "x")
    write_json(folders.reports / "report.html", "old")
    folders.set_aside()
    layer, _, rest = name.partition("/")
    write_json(tmp_path / layer / run / "x" / rest, {})
    assert folders.has_committed is commits
    assert folders.settle() == ("deleted" if commits else "put back")
    assert (folders.reports / "report.html").is_file() is not commits
    assert not folders.has_replaced


def test_texts_are_readable_in_any_language(tmp_path: Path) -> None:
    """JSON files are looked at by people: letters stay letters, in UTF-8."""
    value = {"answer": "∠ABC = 30°", "name": "Größe", "ratio": 0.1, "list": [1, None, True]}
    write_json(tmp_path / "value.json", value)
    text = (tmp_path / "value.json").read_bytes().decode("utf-8")
    assert text.splitlines()[1:3] == [' "answer": "∠ABC = 30°",', ' "name": "Größe",']
    assert read_json(tmp_path / "value.json") == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "value.json", float("nan"))
    assert read_json(tmp_path / "value.json") == value


def test_folders_of_relative_paths_are_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_json(Path(name) / "x.json", name)
    assert storage.exchange_folders(Path("a"), Path("b"))
    assert (read_json(tmp_path / "a/x.json"), read_json(tmp_path / "b/x.json")) == ("b", "a")
