"""Members side by side: order, limit, failures, interruption; the commands are small programs that do as told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from geo_sokoban_pipeline.runs.lock import RunLock
from geo_sokoban_pipeline.studies.plan import StudyRun
from geo_sokoban_pipeline.studies.run import StudyError, StudyFolder, run_members, seconds_left

PROGRAM = """
import json, os, shutil, sys, time
from pathlib import Path
wanted = json.loads(Path(sys.argv[1].removeprefix("--config=")).read_text())["run"]["params"]
root = Path(os.environ["GEO_SOKOBAN_DATA_ROOT"])
with (root / "events").open("a") as events:
    print("begin", wanted["run_id"], file=events, flush=True)
    time.sleep(wanted.get("seconds", 0.0))
    for _ in range(1500):  # half a minute, should the event never come
        if wanted.get("until", "") in (root / "events").read_text():
            break
        time.sleep(0.02)
    print("end", wanted["run_id"], file=events, flush=True)
print("threads", os.environ["OMP_NUM_THREADS"], "fresh", wanted.get("fresh"))
models, outputs = (root / layer / "evaluate_sokoban" / wanted["run_id"] for layer in ("06_models", "07_model_output"))
if wanted.get("fresh"):
    shutil.rmtree(models, ignore_errors=True)
    (outputs / "commands.json").unlink(missing_ok=True)
outputs.mkdir(parents=True, exist_ok=True)
if not (outputs / "commands.json").exists():
    (outputs / "commands.json").write_text(json.dumps([{"started": time.time_ns()}]))
if wanted.get("code"):
    sys.exit("the reason")
summary = root / "08_reporting" / "evaluate_sokoban" / wanted["run_id"] / "eval_summary.json"
summary.parent.mkdir(parents=True, exist_ok=True)
summary.write_text("{}")
"""


@dataclass(frozen=True)
class Program:
    """Stands where `Command` does, with a program of its own."""

    project: Path

    def words(self, config):
        return [sys.executable, "-S", "-c", PROGRAM, f"--config={config}"]

    @staticmethod
    def environment(root):
        return {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(root), "OMP_NUM_THREADS": "1"}


def member(root, run_id, after=None, **told):
    return StudyRun(run_id, "evaluate", "", 0, root, {"run_id": run_id, **told}, {"run_id": run_id}, "sokoban", after)


def run(root, members, workers=2, fresh=False):
    folder = StudyFolder.of(root, "x")
    run_members(members, Program(root), folder, workers, fresh=fresh, name="x")
    return folder


def events(root):
    path = root / "events"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


def test_order_and_limit(tmp_path):
    # Each waits for another one's event, so that the order does not hang on the speed of the machine.
    members = [
        member(tmp_path, "a", seconds=0.2, until="end b-control"),
        member(tmp_path, "b", until="begin a"),
        member(tmp_path, "a-control", after="a"),
        member(tmp_path, "b-control", after="b"),
    ]
    folder = run(tmp_path, members)
    seen = events(tmp_path)
    assert {seen[0], seen[1]} == {("begin", "a"), ("begin", "b")}
    assert seen.index(("end", "b")) < seen.index(("begin", "b-control")) < seen.index(("begin", "a-control"))
    assert seen.index(("end", "a")) < seen.index(("begin", "a-control"))
    running = peak = 0
    for what, _ in seen:
        running += 1 if what == "begin" else -1
        peak = max(peak, running)
    assert peak == 2
    record = folder.read_record(members[0])
    assert record["seconds"] >= 0.2 and record["maker"]["cores"] >= 1
    assert "threads 1 fresh None" in folder.log(members[0]).read_text()
    assert json.loads(folder.config(members[0]).read_text())["run"]["pipelines"]


def test_an_interrupted_fresh_study_is_finished_by_the_next_command(tmp_path):
    """Every member is replaced once: what the first command has made anew is kept, the rest is not taken over."""
    names = ("a", "b", "c")
    members = [member(tmp_path, name) for name in names]
    run(tmp_path, members)
    for begun in members:
        begun.models.mkdir(parents=True, exist_ok=True)
        (begun.models / "old").touch()
    (tmp_path / "events").unlink()
    bad = [members[0], member(tmp_path, "b", code=1), member(tmp_path, "c", after="b")]
    with pytest.raises(StudyError, match="The same command without fresh=true goes on"):
        run(tmp_path, bad, workers=1, fresh=True)
    assert [(begun.models / "old").exists() for begun in members] == [False, False, True]
    for begun, name in zip(members, ("new", "half"), strict=False):
        begun.models.mkdir()
        (begun.models / name).touch()
    (tmp_path / "events").unlink()
    folder = run(tmp_path, members, workers=1)
    assert [name for what, name in events(tmp_path) if what == "end"] == ["b", "c"]
    assert [sorted(path.name for path in begun.models.glob("[!r]*")) for begun in members] == [["new"], ["half"], []]
    assert [folder.read_record(begun)["seconds"] is None for begun in members] == [False, True, False]
    (tmp_path / "events").unlink()
    run(tmp_path, members)
    assert events(tmp_path) == []


def test_a_member_waits_until_its_run_is_free(tmp_path, caplog):
    """As after a study that was killed, where a child of it was left. A study works outside the main thread, too."""
    held, other = member(tmp_path, "held"), member(tmp_path, "other")
    lock = RunLock(held.models)
    study = threading.Thread(target=run, args=(tmp_path, [held, other]))
    study.start()
    deadline = time.monotonic() + 120
    while ("end", "other") not in events(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert ("begin", "held") not in events(tmp_path)
    lock.close()
    study.join(30)
    assert events(tmp_path)[-1] == ("end", "held")
    assert f"held waits. {held.models} is in use by process {os.getpid()}" in caplog.text
    assert caplog.text.count("held waits") == 1


def test_the_others_finish_before_a_failure_is_told(tmp_path):
    bad, good = member(tmp_path, "bad", code=1), member(tmp_path, "good", seconds=0.5)
    needs, last = member(tmp_path, "needs", after="bad"), member(tmp_path, "last", after="good")
    with pytest.raises(StudyError) as error:
        run(tmp_path, [bad, good, needs, last])
    text = str(error.value)
    assert text.startswith("bad ended with exit code 1; its log is ")
    assert str(StudyFolder.of(tmp_path, "x").log(bad)) in text and "  the reason" in text
    assert "needs" not in text
    assert {name for what, name in events(tmp_path) if what == "begin"} == {"bad", "good", "last"}
    mended = member(tmp_path, "bad")
    (tmp_path / "events").unlink()
    run(tmp_path, [mended, good, needs, last])
    assert {name for what, name in events(tmp_path) if what == "begin"} == {"bad", "needs"}


def test_a_run_that_goes_on_has_no_time_of_its_own(tmp_path):
    begun = member(tmp_path, "a")
    begun.models.mkdir(parents=True)
    (begun.models / "run.lock").touch()
    assert run(tmp_path, [begun]).read_record(begun)["seconds"] is not None
    (begun.models / "base_policy").mkdir()
    begun.summary.unlink()
    assert run(tmp_path, [begun]).read_record(begun)["seconds"] is None


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        pytest.param(
            signal.SIGKILL, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
        ),
    ],
)
def test_children_end_with_the_study(tmp_path, number):
    # Whoever runs the tests in the background may have the signals ignored, which children inherit.
    script = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path[:0] = {sys.path!r}
import importlib.util
spec = importlib.util.spec_from_file_location("cases", {__file__!r})
cases = importlib.util.module_from_spec(spec)
sys.modules["cases"] = cases
spec.loader.exec_module(cases)
from pathlib import Path
root = Path({str(tmp_path)!r})
cases.run(root, [cases.member(root, "a", seconds=60), cases.member(root, "b", seconds=60)])
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as study:
        deadline = time.monotonic() + 60
        while len(events(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(events(tmp_path)) == 2, study.stderr and study.stderr.read()
        children = list(filter(is_member, Path(f"/proc/{study.pid}/task/{study.pid}/children").read_text().split()))
        assert len(children) == 2
        study.send_signal(number)
        study.wait(120)
    assert study.returncode != 0
    # After a kill the kernel ends them, a moment later.
    deadline = time.monotonic() + (10 if number == signal.SIGKILL else 0)
    while any(is_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(child) for child in children)
    assert [what for what, _ in events(tmp_path)] == ["begin", "begin"]


def is_member(process: str) -> bool:
    """Whether a child of a study is a member's command; beside them the study asks git for the commit."""
    try:
        return b"--config=" in Path(f"/proc/{process}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def is_alive(process: str) -> bool:
    """Whether a process is there and is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_hangup_that_is_ignored_stays_so(tmp_path):
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP))
        timer.start()
        run(tmp_path, [member(tmp_path, "a", seconds=0.8)])
        timer.join()
        assert events(tmp_path)[-1] == ("end", "a")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("spent", "ages", "waiting", "limit", "left"),
    [
        ([360.0], [360.0], 13, 2, 2340.0),  # the other one is about to end
        ([360.0, 370.0], [9.0], 12, 2, 2368.0),
        ([360.0], [], 1, 8, 360.0),
        ([360.0], [400.0], 0, 2, 0.0),
    ],
)
def test_members_side_by_side_share_what_is_left(spent, ages, waiting, limit, left):
    assert seconds_left(spent, ages, waiting, limit) == left
