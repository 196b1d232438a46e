"""What a record says of program and machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from geo_sokoban_pipeline.runs.provenance import (
    COMMANDS_FILE,
    CommandRecord,
    describe_maker,
    find_commit,
    find_processor,
    read_commands,
    suggest_command,
    summarise_commands,
    typed_command,
)
from geo_sokoban_pipeline.runs.storage import write_json


def git(folder, *words):
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *author, *words], check=True, capture_output=True, text=True
    ).stdout


def test_a_changed_program_is_not_its_commit(tmp_path):
    assert find_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert find_commit(tmp_path) is None
    source = tmp_path / "src" / "a.py"
    source.parent.mkdir()
    source.write_text("a = 1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit.startswith(str(find_commit(tmp_path))) and len(str(find_commit(tmp_path))) == 12
    (tmp_path / "README.md").write_text("no program")
    assert find_commit(tmp_path) == commit[:12]
    source.write_text("a = 2")
    assert find_commit(tmp_path) == f"{commit[:12]}+"
    assert find_commit(tmp_path, ("conf",)) == commit[:12]
    # A folder within somebody else's checkout is not that checkout.
    assert find_commit(source.parent) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\nmodel name\t: other\n", "Some CPU @ 2 GHz"),
        ("processor\t: 0\nBogoMIPS\t: 50\n", None),
        ("model name\t:\n", None),
        (None, None),
    ],
)
def test_name_of_the_processor(tmp_path, text, name):
    table = tmp_path / "cpuinfo"
    if text is not None:
        table.write_text(text)
    assert find_processor(table) == name


def test_maker(tmp_path):
    maker = describe_maker(tmp_path)
    assert maker["commit"] is None
    assert {"version", "python", "torch", "transformers", "processor", "machine", "cores"} < set(maker)


def test_a_run_knows_its_commands_and_its_whole_time(tmp_path):
    assert summarise_commands(read_commands(tmp_path)) is None
    killed = CommandRecord(tmp_path, {"command": "kedro run", "cores": 2})
    stored = read_commands(tmp_path)
    assert [(entry["command"], entry["outcome"]) for entry in stored] == [("kedro run", "running")]
    killed.renew()
    assert read_commands(tmp_path) == stored  # too early for another writing

    # The first command was killed after 100 noted seconds, an hour ago; the second one works for 20 seconds by now.
    now = datetime.now().astimezone()
    stored[0] |= {"started": (now - timedelta(hours=1)).isoformat(), "seconds": 100.0}
    write_json(tmp_path / COMMANDS_FILE, stored)
    last = CommandRecord(tmp_path, {"command": "kedro run --env=test", "cores": 4})
    stored = read_commands(tmp_path)
    stored[1]["started"] = (now - timedelta(seconds=20)).isoformat()
    time = summarise_commands(stored)
    assert time.commands == 2 and time.last["command"] == "kedro run --env=test"
    assert 120 <= time.seconds < 130 and 3590 < (time.ended - time.started).total_seconds() < 3620

    last.close("finished")
    time = summarise_commands(read_commands(tmp_path))
    assert 100 <= time.seconds < 110 and time.last["outcome"] == "finished"
    (tmp_path / COMMANDS_FILE).write_text('[{"seconds"')
    assert read_commands(tmp_path) == []  # a damaged history counts as none


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["/a b/.venv/bin/kedro", "run", "--params=run_id=x y"], "kedro run '--params=run_id=x y'"),
        (["/a/site-packages/kedro/__main__.py", "run"], "kedro run"),
        (["/a/geo_sokoban_pipeline/__main__.py", "--env=test"], "geo-sokoban-pipeline --env=test"),
        (["python -m kedro", "run", "--params=run_id=x y"], "python -m kedro run '--params=run_id=x y'"),
        ([], "''"),
        # Variables of servers may be secrets.
        (
            ["kedro", "run", "--params", "seed=2,train_sokoban.rollout.server.environment.HF_TOKEN=abc,run_id=x"],
            "kedro run --params 'seed=2,train_sokoban.rollout.server.environment.HF_TOKEN=***,run_id=x'",
        ),
        (
            ["kedro", "run", "--params=train_geo3k.rollout.server={environment: {A: abc, B: 'a}b'}, count: 2}"],
            "kedro run '--params=train_geo3k.rollout.server={environment: ***'",
        ),
        (["kedro", "run", "--params=x.server.environment:{A: abc}"], "kedro run '--params=x.server.environment:***'"),
        *(
            (["kedro", "run", f"--params=a=1,x.environment{value}"], f"kedro run '--params=a=1,x.environment{masked}'")
            for value, masked in [
                (".T=ab}cd", ".T=***"),
                (".T=ab]cd,run_id=x", ".T=***,run_id=x"),
                (".T=ab,cd,run_id=x", ".T=***,run_id=x"),
                (".T=ab,cd==,run_id=x", ".T=***,run_id=x"),  # `cd==` is the end of a text in base64
                (".T=ab,cd=", ".T=***"),
                (".T=ab,x.environment.U=cd,y.z=2", ".T=***,x.environment.U=***,y.z=2"),
                (".T=[ab,cd]", ".T=***"),
                (".T=[ab,c=d],run_id=x", ".T=***"),
                (".T=ab[c,d=e],run_id=x", ".T=***"),
                ('.T="ab,c=d",run_id=x', ".T=***"),
                ("={T: ab,c=d}", "=***"),
                ("[T]=ab,run_id=x", "[T]=***,run_id=x"),
            ]
        ),
        (["kedro", "run", "--params=x.server[environment].T=ab"], "kedro run '--params=x.server[environment].T=***'"),
        # So may be passwords in addresses; a user name alone is none.
        *(
            (["kedro", "run", f"--params=tracking.uri={uri},a=1"], f"kedro run '--params=tracking.uri={masked}'")
            for uri, masked in [
                ("postgresql://u:pw@h/db", "postgresql://***@h/db,a=1"),
                ("postgresql://u:p/w@x@h/db", "postgresql://***@h/db,a=1"),
                ("http://:pw@h:80", "http://***@h:80,a=1"),
                ("postgresql://h/db?user=u&password=pw", "postgresql://h/db?user=u&password=***"),
            ]
        ),
        (["kedro", "run", "--params=tracking.uri=http://u@h:80"], "kedro run --params=tracking.uri=http://u@h:80"),
    ],
)
def test_command_as_typed(monkeypatch, words, typed):
    monkeypatch.setattr(sys, "argv", words)
    assert typed_command() == typed


@pytest.mark.parametrize(
    ("words", "config", "env"),
    [
        ([], None, None),
        (["--env=test"], None, "test"),
        (["-e", "test"], None, "test"),
        (["--env=local", "--env=test"], None, "test"),
        (["--config=c.yml"], "run: {env: test}", "test"),
        (["-c", "c.yml", "--env", "local"], "run: {env: test}", "local"),
        (["--config", "c.yml"], "run: {pipelines: audit_sokoban}", None),
        (["--config", "c.yml"], "run:", None),
        (["--config", "c.yml"], None, None),
    ],
)
@pytest.mark.parametrize(("root", "start"), [(None, []), ("", []), ("a b", ["GEO_SOKOBAN_DATA_ROOT=a b"])])
@pytest.mark.parametrize("variable", [None, "slime_exact"])
def test_a_suggested_command_means_the_environment_and_the_data_root_of_this_one(
    tmp_path, monkeypatch, words, config, env, root, start, variable
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kedro", "run", *words])
    for name, value in (("GEO_SOKOBAN_DATA_ROOT", root), ("KEDRO_ENV", variable)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if config is not None:
        (tmp_path / "c.yml").write_text(config)
    named = [f"--env={env or variable}"] if env or variable else []
    found = shlex.split(suggest_command("audit_sokoban", "1.10", "--tags=report"))
    command = [*start, "kedro", "run", "--pipelines=audit_sokoban", "--tags=report", *named]
    assert found == [*command, "--params", "run_id=1.10"]


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["/b/kedro", "run"], "kedro run --pipelines=p"),
        (["/b/kedro", "run", "--conf-source=conf"], "kedro run --pipelines=p"),
        (["/b/kedro", "run", "--conf-source", "my conf"], "kedro run --pipelines=p '--conf-source=my conf'"),
        (["/b/kedro", "run", "-c", "c.yml"], "kedro run --pipelines=p --conf-source=other"),
        (["/b/geo-sokoban-pipeline", "--conf-source=c.gz"], "geo-sokoban-pipeline --pipelines=p --conf-source=c.gz"),
        (["/b/geo_sokoban_pipeline/__main__.py"], "geo-sokoban-pipeline --pipelines=p"),
        (["/b/geo-sokoban-pipeline", "browse", "data"], "kedro run --pipelines=p"),
    ],
)  # fmt: skip
def test_a_suggested_command_has_the_program_and_the_configuration_of_this_one(tmp_path, monkeypatch, words, suggested):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text("run: {conf_source: other}")
    for name in ("GEO_SOKOBAN_DATA_ROOT", "KEDRO_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", words)
    assert suggest_command("p") == suggested
