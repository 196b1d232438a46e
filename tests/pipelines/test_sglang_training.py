"""GRPO with a real server: the pipeline itself, in this process, over the server of the tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedServer
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from proxies import Proxy
from runs import finish, kedro_command
from servers import ON_CPU, need_environment, processes_with, tree

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
SECRET, KEY = "swordfish-0123456789", "marlin-0123456789"
# Iterations of each task.
TASKS = {"sokoban": 3, "geo3k": 1, "geo3k_multi_turn": 1}


def assert_nowhere(folder: Path, *secrets: str) -> None:
    """No file below a folder holds a secret, in its content or its name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    found = [path for path in files for secret in secrets if secret.encode() in os.fsencode(path) + path.read_bytes()]
    assert found == []


def server_parameters(url, task="sokoban", **rollout):
    server = {"mode": "attach", "urls": [url], "faults": ON_CPU["faults"]}
    return {f"train_{task}": {"rollout": {"engine": "sglang", "server": server, **rollout}, "processes": 1}}


def read(project, run="train_sokoban"):
    """Rows of metrics and of trajectories, by iteration."""
    folder = project.folder("07_model_output", run)
    metrics = [read_json(path) for path in sorted((folder / "metrics").glob("iter=*.json"))]
    rows = [read_trajectories(path).to_pylist() for path in sorted((folder / "trajectories").glob("iter=*/part-*"))]
    return metrics, rows


@pytest.mark.parametrize(("task", "iterations"), TASKS.items(), ids=TASKS)
def test_grpo_over_a_server(project, sglang_server, task, iterations, capfd, monkeypatch):
    """Saving validates the contract; here it is what only a server can get wrong, and that secrets stay secrets."""
    monkeypatch.setenv("MY_KEY", KEY)
    run = f"train_{task}"
    parameters = server_parameters(sglang_server, task)
    # The server has no key and takes any.
    secrets = {"api_key_variable": "MY_KEY", "environment": {"HF_TOKEN": SECRET}}
    parameters[run]["rollout"]["server"] |= secrets
    parameters[run] |= {"loop": {"iterations": iterations}, "policy": {"tiny": {"texts": "sokoban"}}}  # the server's
    project.run(run, params=parameters)
    metrics, rows = read(project, run)
    assert [row["policy_version"] for row in metrics] == list(range(iterations))
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-3 for row in metrics if row["train/steps"])
    assert sum(row["train/steps"] for row in metrics) >= iterations
    for version, episodes in enumerate(rows):
        assert {episode["policy_version"] for episode in episodes} == {version}
        assert {span["version"] for episode in episodes for span in episode["weight_spans"]} == {version}
        sampling = [json.loads(episode["sampling"]) for episode in episodes]
        assert {(how["engine"], how["seeded"]) for how in sampling} == {("sglang", False)}
        assert any(episode["trained"] for episode in episodes)
    assert_nowhere(project.root, SECRET, KEY)
    said = "".join(capfd.readouterr())
    assert SECRET not in said and KEY not in said


def test_the_demonstration(sglang_server, tmp_path):
    """As the README has it: one command, which launches a server of its own and leaves none."""
    counts = "sokoban.counts.train=64,sokoban.counts.validation=16,sokoban.counts.eval=32,sokoban.max_solution=4"
    words = ("--pipelines=rollout_sokoban", f"--params={counts}")
    output = finish(kedro_command(*words, data_root=tmp_path, conf_env="sglang_cpu"), timeout=600)
    assert processes_with(f"GEO_SOKOBAN_DATA_ROOT={tmp_path}") == []
    (path,) = (tmp_path / "07_model_output").glob("*/*/trajectories/iter=*/part-*.parquet")
    episodes = read_trajectories(path).to_pylist()
    assert {json.loads(episode["sampling"])["engine"] for episode in episodes} == {"sglang"}, output[-2000:]
    assert {episode["status"] for episode in episodes} <= {"completed", "truncated"}
    assert "server_0.log" in {path.name for path in (tmp_path / "servers").iterdir()}


def test_over_sampling_aborts_what_is_not_needed(project, sglang_server):
    grpo = {"groups": 3, "group_size": 2, "filter": "none"}
    parameters = server_parameters(sglang_server, over_sampling=3.0, max_turns=8)
    parameters["train_sokoban"] |= {"grpo": grpo, "loop": {"iterations": 1, "eval_interval": 0}}
    project.run("train_sokoban", params=parameters, to_nodes=["train_sokoban.train_grpo"])
    _, (episodes,) = read(project)
    trained = {episode["group_index"] for episode in episodes if episode["trained"]}
    assert len(episodes) == 18 and len(trained) == 3
    assert all(episode["trained"] == (episode["group_index"] in trained) for episode in episodes)
    reasons = {episode["drop_reason"] for episode in episodes if not episode["trained"]}
    assert reasons <= {"aborted", "surplus"}
    for episode in episodes:
        assert (episode["status"] == "aborted") == (episode["reward"] is None)


def test_partial_rollouts_are_gone_on_with_by_new_weights(project, sglang_server):
    """What an iteration gave up is finished in the next, and only the tokens of the newest weights are trained."""
    grpo = {"groups": 3, "group_size": 2, "groups_per_step": 1, "filter": "none", "mixed_versions": "mask"}
    parameters = server_parameters(
        sglang_server, over_sampling=3.0, partial=True, max_turns=1, max_tokens_per_turn=200, max_response_tokens=None
    )
    train = parameters["train_sokoban"]
    train["rollout"]["server"]["concurrency"] = 4  # so that responses do not all end together
    train |= {"grpo": grpo, "loop": {"iterations": 3, "eval_interval": 0}, "warm_start": {"steps": 0}}
    project.run("train_sokoban", params=parameters, to_nodes=["train_sokoban.train_grpo"])
    metrics, rows = read(project)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-3 for row in metrics)
    mixed = [row for row in rows[1] + rows[2] if len(row["weight_spans"]) > 1]
    assert mixed
    for row in mixed:
        versions = [span["version"] for span in row["weight_spans"]]
        assert versions == sorted(set(versions))
        assert sum(row["loss_mask"]) == sum(span["end"] - span["start"] for span in row["weight_spans"])
    assert any(row["trained"] for row in mixed)


def test_rollouts_beside_the_training(project, sglang_server):
    """Iteration k is sampled by a real server with the weights of k - 1, and trained against their log-probs."""
    parameters = server_parameters(sglang_server)
    train = parameters["train_sokoban"]
    train["rollout"]["server"]["update"] = "tensors"
    train |= {"loop": {"iterations": 3, "eval_interval": 2, "max_staleness": 1}}
    project.run("train_sokoban", params=parameters, to_nodes=["train_sokoban.train_grpo"])
    metrics, rows = read(project)
    assert [row["policy_version"] for row in metrics] == [0, 0, 1]
    assert [row["rollout/staleness"] for row in metrics] == [0.0, 1.0, 1.0]
    for number, episodes in enumerate(rows):
        assert {span["version"] for row in episodes for span in row["weight_spans"]} == {max(number - 1, 0)}
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in metrics if row["train/steps"]]
    assert gaps[0] < 1e-3 and len(gaps) > 1
    folder = project.folder("07_model_output", "train_sokoban") / "eval_trajectories"
    versions = {path.parent.name: read_trajectories(path).to_pylist() for path in folder.glob("iter=*/part-*")}
    for name, episodes in versions.items():
        assert {f"iter={row['policy_version']:05d}" for row in episodes} == {name}, "validations see whole versions"
    assert len(versions) == 2


class TurnProxy(Proxy):
    """Notes what matters to servers that take turns with the trainer.

    Attributes:
        calls: what the server was asked to do, each kind of several in a row once.
        in_flight: requests without an answer at each release.
    """

    NAMES = {
        "/generate": "sample",
        "/update_weights_from_tensor": "weights",
        "/release_memory_occupation": "release",
        "/resume_memory_occupation": "resume",
    }

    def __init__(self, target):
        self.calls, self.in_flight = [], []
        super().__init__(target)

    async def _pass(self, request):
        name = self.NAMES.get(request.path)
        if name == "release":
            self.in_flight.append(self.seen.count("/generate") - self.answered)
        if name == "resume":
            name += " " + " ".join((await request.json())["tags"])
        if name is not None and self.calls[-1:] != [name]:
            self.calls.append(name)
        return await super()._pass(request)


def test_a_server_and_the_trainer_take_turns(project, monkeypatch):
    """The order of a colocated layout, also where a server is killed while it sleeps: a fresh one is awake."""
    need_environment()
    proxies, turns = {}, []

    def url(server):
        target = f"http://127.0.0.1:{server.port}"
        return proxies.setdefault(target, TurnProxy(target)).url if target not in proxies else proxies[target].url

    onload = TorchBackend.onload

    def noting(self):
        (proxy,) = proxies.values()
        turns.append(len(proxy.calls))
        if len(turns) == 2:
            (server,) = launched
            for process in tree(server.pid):
                process.kill()
        onload(self)

    launched = []
    start = LaunchedServer.start
    monkeypatch.setattr(LaunchedServer, "url", property(url))
    monkeypatch.setattr(TorchBackend, "onload", noting)
    monkeypatch.setattr(LaunchedServer, "start", lambda self, **given: launched.append(self) or start(self, **given))
    parameters = server_parameters("")
    train = parameters["train_sokoban"]
    train["rollout"]["server"] = {**ON_CPU, "colocated": True, "faults": {**ON_CPU["faults"], "first_pause": 0.0}}
    train |= {"loop": {"iterations": 3, "eval_interval": 0}, "warm_start": {"play_every": 0, "steps": 20}}
    try:
        project.run("train_sokoban", params=parameters, to_nodes=["train_sokoban.train_grpo"])
        (proxy,) = proxies.values()
    finally:
        for one in proxies.values():
            one.close()
        for server in launched:
            server.end()
    turn = ["release", "resume weights", "weights", "resume kv_cache"]
    killed = ["release", "resume weights", "weights"]  # the last words to the old server, and the new one's weights
    assert proxy.calls == ["weights", "sample", *turn, "sample", *killed, "sample", *turn]
    assert proxy.in_flight == [0, 0, 0]
    assert [proxy.calls[number - 1] for number in turns] == ["release"] * 3, "the trainer wakes up when servers sleep"
    assert len({server.number for server in launched}) == 1 and len(launched) == 2
    metrics, rows = read(project)
    assert len(rows) == 3 and all(row["perf/turn_time"] > 0 for row in metrics)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in metrics if row["train/steps"])
