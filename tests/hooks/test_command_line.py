"""Commands as typed, and what they end with: one line, exit code 1, no traceback."""

from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import click
import pytest
import yaml
from click.testing import CliRunner
from kedro.framework.cli.cli import KedroCLI
from kedro.framework.cli.utils import _split_params

from geo_sokoban_pipeline.__main__ import main as own_command
from geo_sokoban_pipeline.config.base import ParameterError
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.hooks.command_line import CommandLineHooks, explain, prepare_params, protect_words, read_lists
from geo_sokoban_pipeline.hooks.parameters import check_parameters
from runs import ROOT


@pytest.fixture(scope="module")
def command():
    return KedroCLI(ROOT)


@pytest.fixture
def type_command(tmp_path, monkeypatch, command):
    """`type_command("run", …)`: `kedro run …` in this process, through Kedro's own entry; its result."""
    monkeypatch.setenv("GEO_SOKOBAN_DATA_ROOT", str(tmp_path / "data"))
    monkeypatch.chdir(ROOT)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield lambda *words: CliRunner().invoke(command, ["run", *words])
    for number, handler in before.items():
        signal.signal(number, handler)


def file(folder, text):
    path = folder / "file.txt"
    path.write_text(text)
    return path


REFUSED = [
    (["--pipelines=train_sokban"], "--pipelines=train_sokban: no such pipeline. Did you mean train_sokoban?"),
    (["--pipelines=train_sokoban,x"], "--pipelines=x: no such pipeline. There are "),
    (["--env=tset"], "--env=tset: no such environment. Did you mean test?"),
    (
        ["--env=zzz"],
        "--env=zzz: no such environment. There are cluster, megatron, qwen3vl, sglang_cpu, slime_exact, test.",
    ),
    (["--from-nodes=train_sokoban.train_grop"], "--from-nodes=train_sokoban.train_grop: no such node. Did you mean"),
    (["--to-nodes=warm_start"], "--to-nodes=warm_start: no such node. Did you mean train_sokoban.warm_start?"),
    (["--nodes=report"], "--nodes=report: no such node. There are "),
    (["--tags=trian"], "--tags=trian: no such tag. Did you mean train?"),
    (["--from-inputs=sokoban.prompt"], "--from-inputs=sokoban.prompt: no such dataset. Did you mean sokoban.prompts?"),
    (["--to-outputs=nothing"], "--to-outputs=nothing: no such dataset. There are "),
    (["--namespaces=train"], "--namespaces=train: no such namespace. "),
    (["--async"], "--async: the parts of a GRPO iteration must be saved one after the other"),
    (["--runner-params=is_async=True"], "is_async: the parts of a GRPO iteration must be saved one after the other"),
    (["--runner=ParallelRunner"], "runner=ParallelRunner: the parts of a GRPO iteration must be saved"),
    (["-r", "ThreadRunner"], "runner=ThreadRunner: the parts of a GRPO iteration must be saved"),
    (
        ["--only-missing-outputs"],
        "only_missing_outputs: it would leave an evaluation and a report of an older checkpoint",
    ),
    (["--only-missing-outputs", "--pipelines=evaluate_geo3k"], "only_missing_outputs: it would leave an evaluation"),
    (["--runner=Foo"], "--runner=Foo: no such runner"),
    (["--config=none.yml"], "--config=none.yml: no such file."),
    (
        ["--pipelines=evaluate_sokoban", "--params=evaluate_sokoban.source.run_id=nope"],
        "source.checkpoint=latest of train_sokoban/nope: train_sokoban/nope has no checkpoint; train it first.",
    ),
    (
        ["--pipelines=update_sokoban", "--params=update_sokoban.source.iteration=7"],
        "train_sokoban/default has no trajectories below ",
    ),
    (["--params=sed=1"], "sed=1: unknown name. Did you mean seed?"),
    (["--params=train_sokban.seed=5"], "train_sokban: unknown name. Did you mean train_sokoban?"),
    (
        ["--params=train_sokoban.loop.iteration=5"],
        "train_sokoban.loop.iteration=5: unknown name. Did you mean train_sokoban.loop.iterations?",
    ),
    (
        ["--params=train_sokoban.loop.iterations=0"],
        "train_sokoban.loop.iterations=0: input should be greater than or equal to 1.",
    ),
    (
        ["--params=train_sokoban.grpo.groups=many"],
        'train_sokoban.grpo.groups="many": input should be a valid integer',
    ),
    (
        ["--params=train_sokoban.grpo.filter=mixed"],
        "train_sokoban.grpo.filter=\"mixed\": input should be 'none', 'zero_variance' or 'mixed_success'.",
    ),
    (["--params=run_id=../up"], 'run_id="../up": a run id is the name of a folder'),
    (
        ["--params=sokoban.source=fil"],
        "sokoban.source=\"fil\": input should be 'generate', 'hub' or 'file'. Did you mean file?",
    ),
    (["--params", "run_id=a", "--params=fresh=true"], "--params: it is given more than once, and Kedro reads"),
]


@pytest.mark.parametrize(
    ("words", "line"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_no_run_can_have_is_refused_in_one_line(type_command, tmp_path, words, line):
    result = type_command(*words)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {line}")
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.output
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: [", "--config={path}: it is not readable YAML"),
        ("pipelines: [data_sokoban]", "--config={path}: it must hold a section `run:`"),
        ("run: nothing", "--config={path}: it must hold a section `run:`"),
        ("run: {params: {run_id: 1.10}}", "--config={path}: run_id=1.10: a text is needed. Quote it: '1.10'."),
        ("run: {params: {run_id: 1e3}}", "--config={path}: run_id=1e3: a text is needed. Quote it: '1e3'."),
        (
            "run: {params: {evaluate_geo3k: {source: {checkpoint: 007}}}}",
            "--config={path}: evaluate_geo3k.source.checkpoint=007: a text",
        ),
        ("run: {params: {seed: 010}}", "--config={path}: seed=010: YAML reads 8 here."),
        ("run: {params: 'run_id=1.10,seed=010'}", "--config={path}: `params:` must hold names and values"),
        ("run: {params: }", "--config={path}: `params:` must hold names and values"),
        ("run: {runner: ThreadRunner}", "runner=ThreadRunner: "),
    ],
)
def test_a_file_of_arguments_that_cannot_be_used(type_command, tmp_path, text, line):
    path = file(tmp_path, text)
    result = type_command("-c", str(path))
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert result.output.startswith(f"Error: {line.format(path=path)}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "sokoban.file.path={path}: no file at {path}; relative paths start at the working folder."),
        ("; only a title\n", "{name} holds no "),
    ],
)
def test_level_files_that_no_run_can_use(type_command, tmp_path, text, line):
    path = tmp_path / "levels.xsb"
    if text is not None:
        path.write_text(text)
    words = f"--params=sokoban.source=file,sokoban.file.path={path}"
    result = type_command("--pipelines=data_sokoban", "--env=test", words)
    assert result.exit_code == 1 and "Traceback" not in result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: " + line.format(path=path, name=path.name))


def test_lists_as_typed(type_command, tmp_path):
    """Too large a list shows in the refusal how it was read."""
    words = "sokoban.inner_walls=[0,2,4],run_id=a,train_sokoban.optimizer.betas=[0.9,0.99,1]"
    result = type_command("--pipelines=data_sokoban", "--params", words)
    assert result.exit_code == 1
    assert "sokoban.inner_walls" in result.stderr and "train_sokoban.optimizer.betas" in result.stderr
    assert "run_id" not in result.stderr


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a=[0,2]", {"a": [0, 2]}),
        ("runs=[default,seed2],b.c=1", {"runs": ["default", "seed2"], "b": {"c": 1}}),
        ("a=[0.9, 0.99]", {"a": [0.9, 0.99]}),
        ("a=[[0,1],[2,3]],b=x", {"a": [[0, 1], [2, 3]], "b": "x"}),
        ("a={x: 1, y: [2,3]}", {"a": {"x": 1, "y": [2, 3]}}),
        ("a=[],b=1", {"a": [], "b": 1}),
        ("a=[1;2]", {"a": [1, 2]}),
        ("a=x;y", {"a": "x;y"}),
        ("runs=[a;1.10;007]", {"runs": ["a", "1.10", "007"]}),
        ("a=x[1,b=[2,3]", {"a": "x[1", "b": [2, 3]}),
    ],
)
def test_lists_reach_the_parameters(text, read):
    assert read_lists(_split_typed(text)) == read
    assert protect_words("a=[0,2") == "a=[0,2"  # a list that does not end is left to Kedro


ALL_ROWS = ["shares.train=0", "shares.validation=0", "shares.eval=1"]
NO_COUNTS = ["counts.train=null", "counts.validation=null", "counts.eval=null"]


@pytest.mark.parametrize("task", ["sokoban", "geo3k", "geo3k_multi_turn"])
@pytest.mark.parametrize(
    ("pipelines", "given", "added"),
    [
        (["--pipelines=data_{0},evaluate_{0}"], ["source=file", "file.path=a.txt"], ALL_ROWS + NO_COUNTS),
        (["--pipeline", "evaluate_{0}"], ["hub.dataset=a/b"], ALL_ROWS + NO_COUNTS),
        (["--pipelines", "evaluate_{0},browse_other"], ["source=hub", "counts.eval=9"], ALL_ROWS),
        (["-p", "evaluate_{0}"], ["source=file", "file.path=a.txt", "shares.eval=0.5"], []),
        (["-p", "evaluate_{0}"], ["source=generate", "file.path=a.txt"], []),
        (["-p", "evaluate_{0}"], ["seed=3"], []),
        (["--pipelines=train_{0},evaluate_{0}"], ["source=file", "file.path=a.txt"], []),
        ([], ["source=file", "file.path=a.txt"], []),
    ],
)
def test_evaluation_alone_takes_all_rows_unless_the_command_says_otherwise(task, pipelines, given, added):
    typed, wanted = (",".join(f"{task}.{one}" for one in parameters) for parameters in (given, given + added))
    words = ["run", *(word.format(task) for word in pipelines), f"--params={typed}"]
    prepare_params(words)
    assert _split(words[-1].removeprefix("--params=")) == _split(wanted)


WORDS = [
    "1.10",
    "007",
    "010",
    "1_000",
    "20241126_1200",
    "12:30",
    "1e3",
    "0x10",
    ".nan",
    "1e400",
    "off",
    "null",
    "a-b.c",
]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("run_id", "{}"),
        ("runs", "[default,{}]"),
        ("runs", "{}"),
        ("evaluate_sokoban.source.run_id", "{}"),
        ("train_sokoban.warm_start.teacher.name", "{}"),
        ("study.name", "{}"),
        ("train_geo3k.policy.freeze", "[{}]"),
        ("train_sokoban.rollout.server.environment", "{{A: {}}}"),
        ("geo3k.file", "{{path: {}, split: x}}"),
    ],
)
def test_a_text_parameter_keeps_the_words_typed(word, name, form):
    keeps_null = word == "null" and name == "geo3k.file"  # the path may be None, and null is how None is typed
    given = _nested(_split_typed(f"seed=3,{name}={form.format(word)},fresh=true"), name)
    meant = {"{}": word, "[default,{}]": ["default", word], "[{}]": [word], "{{A: {}}}": {"A": word}}
    assert given == meant.get(form, {"path": None if keeps_null else word, "split": "x"})


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("null", None),
        ("~", None),
        ("", None),
        ("'007'", "007"),
        ('"a"', "a"),
        ("[a]", "[a]"),
        ("a: b", "a: b"),
        ("#1", "#1"),
        ("C:\\x", "C:\\x"),
        ("{a,b}", "{a,b}"),
        ("ü 50%", "ü 50%"),
        ("/x/[old", "/x/[old"),
        ("{a", "{a"),
        ("it's", "it's"),
        ("a\u2028b\u0085c\x7f", "a\u2028b\u0085c\x7f"),
    ],
)
def test_a_path_may_be_any_words_and_null_where_it_may_be_none(word, read):
    given = _split_typed(f"train_sokoban.policy.path={word},run_id=1.10")
    assert given == {"train_sokoban": {"policy": {"path": read}}, "run_id": "1.10"}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("seed=12", 12),
        ("seed=9007199254740993", 9007199254740993),
        ("train_sokoban.loop.iterations=1_000", 1000),
        ("train_sokoban.loop.iterations=1e3", 1000.0),
        ("train_sokoban.optimizer.lr=1e-5", 1e-5),
        ("train_sokoban.grpo.loss_args.clip_high=.5", 0.5),
        ("train_sokoban.rollout.workers=null", None),
        ("evaluate_sokoban.source.checkpoint=12", 12),
        ("evaluate_sokoban.source.checkpoint=010", "010"),
        ("evaluate_sokoban.source.checkpoint=1.10", "1.10"),
        ("train_sokoban.env.args={a: 1.5, b: [x, 2]}", {"a": 1.5, "b": ["x", 2]}),
        ("train_sokoban.env.args.a='007'", "007"),
        ("train_sokoban.env.args.a=.inf", math.inf),
        ("fresh=true", True),
    ],
)
def test_a_number_is_the_plain_decimal_one(text, read):
    assert _nested(_split_typed(text), text.partition("=")[0]) == read


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed=010", "seed=010: YAML reads 8 here."),
        ("seed=-010", "seed=-010: YAML reads -8 here."),
        ("seed=12:30", "seed=12:30: YAML reads 750 here."),
        ("seed=0x10", "seed=0x10: YAML reads 16 here."),
        ("train_sokoban.optimizer.lr=1e400", "train_sokoban.optimizer.lr=1e400: YAML reads inf here."),
        ("sokoban.inner_walls=[010,2]", "sokoban.inner_walls.0=010: YAML reads 8 here."),
        ("train_sokoban.env.args.stamp=20241126_1200", "train_sokoban.env.args.stamp=20241126_1200: YAML reads 2024"),
        ("train_sokoban.env.args={name: 007}", "train_sokoban.env.args.name=007: YAML reads 7 here."),
    ],
)
def test_a_number_that_yaml_reads_otherwise_is_refused(text, line):
    with pytest.raises(ParameterError) as caught:
        protect_words(text)
    assert str(caught.value).startswith(line)


def _split(text):
    return _split_params(click.Context(click.Command("run")), None, text)


def _split_typed(text):
    return _split(protect_words(text))


def _nested(values, name):
    return functools.reduce(dict.__getitem__, name.split("."), values)


@pytest.mark.parametrize("words", [["--params=run_id=1.10"], ["--params", "run_id=1.10"]])
def test_a_run_id_is_the_folder_that_was_typed(type_command, tmp_path, words):
    result = type_command("--pipelines=audit_sokoban", "--env=test", *words)
    assert result.exit_code == 1 and "train_sokoban/1.10" in result.stderr


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--params=run_id=1.10,seed=2"], {"run_id": "1.10", "seed": 2}),
        (["--config={file}"], {"run_id": "0x10"}),
        (["--config", "{file}", "--params", "run_id=1e5"], {"run_id": "1e5"}),
    ],
)
def test_the_own_command_reads_what_kedro_run_reads(tmp_path, monkeypatch, words, given, interactive):
    path = file(tmp_path, "run: {params: {run_id: '0x10'}}")
    monkeypatch.setattr("kedro.framework.cli.project.run.callback", lambda **options: options["params"])
    typed = [word.format(file=path) for word in words]
    if interactive:
        assert own_command(typed, standalone_mode=False) == given
        return
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    seen = []
    monkeypatch.setattr("kedro.framework.cli.project.run.callback", lambda **options: seen.append(options["params"]))
    with pytest.raises(SystemExit) as ended:
        own_command(typed)
    assert (ended.value.code, seen) == (0, [given])


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"run_id": 1.10}, "run_id=1.1: a text is needed, and YAML reads a number. Quote it"),
        ({"train_sokoban": {"policy": {"path": 7}}}, "train_sokoban.policy.path=7: a text is needed"),
        ({"evaluate_sokoban": {"source": {"run_id": 7}}}, "evaluate_sokoban.source.run_id=7: a text is needed"),
        ({"runs": ["a", 2024]}, "runs.1=2024: a text is needed"),
        ({"sokoban": {"file": {"path": True}}}, "sokoban.file.path=true: a text is needed, and YAML reads true"),
    ],
)
def test_yaml_must_quote_a_text_that_looks_like_a_number(params, line):
    with pytest.raises(ParameterError) as caught:
        check_parameters(params, params)
    assert str(caught.value).startswith(line)


def test_an_error_in_own_code_is_told_with_its_place(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward(outcome):\n    return outcome['succes']\n")
    with pytest.raises(KeyError) as caught:
        load_object(f"{path}:reward")({})
    # The frames of this test are somebody's own code, too; the innermost one counts.
    said = f"KeyError: 'succes', in {path}, line 2: return outcome['succes'] ("
    assert explain(caught.value).startswith(said)


def test_a_fault_of_the_program_keeps_its_traceback():
    try:
        protect_words(None)
    except AttributeError as error:
        # Without the frame of this test, as from a command.
        assert explain(error.with_traceback(error.__traceback__.tb_next)) is None


def test_the_cause_that_was_written_for_users_is_told():
    error = RuntimeError("Failed while saving data to dataset X")
    error.__cause__ = ParameterError("seed=x: a number is expected")
    assert explain(error) == "seed=x: a number is expected"


@pytest.mark.parametrize(("code", "said"), [(130, "stopped.\n"), (143, "stopped.\n"), (129, "stopped.\n"), (1, "")])
def test_an_interrupted_command_says_what_it_has_left(capsys, code, said):
    """One that was refused has left nothing."""
    with suppress(SystemExit):
        CommandLineHooks(lambda: ["stopped."]).end_command(SystemExit(code), code)
    assert capsys.readouterr() == ("", said)


@pytest.mark.slow
def test_an_interrupt_ends_a_command_in_order(tmp_path):
    """Ctrl-C in the loop: the last line says what is stored, and the run's history knows how it ended."""
    environment = {**os.environ, "GEO_SOKOBAN_DATA_ROOT": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    words = ["kedro", "run", "--pipelines=train_sokoban", "--env=test", "--params=train_sokoban.loop.iterations=500"]
    # Whoever runs the tests in the background may have the signal ignored, which children inherit.
    script = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.argv = {words!r}\nfrom kedro.framework.cli.cli import main\nmain()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    checkpoints = tmp_path / "06_models/train_sokoban/default/checkpoints"
    deadline = time.monotonic() + 240
    while not list(checkpoints.glob("iter=*/manifest.json")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    last = said.splitlines()[-1]
    assert last.startswith("train_sokoban/default: stopped.") and "of 500 iterations are stored" in last
    history = yaml.safe_load((tmp_path / "07_model_output/train_sokoban/default/commands.json").read_text())
    assert history[-1]["outcome"] == "interrupted"
