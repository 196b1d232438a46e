"""GRPO with a real server: the pipeline itself, in this process, over the server of the tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from geo_sokoban_pipeline.rollout.engines.sglang.launcher import LaunchedServer
from geo_sokoban_pipeline.runs.storage import read_json
from geo_sokoban_pipeline.training import grpo_loop
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
from proxies import Proxy
from runs import finish, kedro_command
from servers import ON_CPU, need_environment, processes_with, tree

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sglang")]
SECRET, KEY = "swordfish-0123456789", "marlin-0123456789"
AHEAD = {"iterations": 3, "eval_interval": 2, "max_staleness": 1}
TEXTS = {"tiny": {"texts": "sokoban"}}  # the server's vocabulary
SURPLUS = {"groups": 3, "group_size": 2, "filter": "none"}


def assert_nowhere(folder: Path, *secrets: str) -> None:
    """No file below a folder holds a secret, in its content or its name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    found = [path for path in files for secret in secrets if secret.encode() in os.fsencode(path) + path.read_bytes()]
    assert found == []


def train(project, url, run="train_sokoban", server=None, to_nodes=True, **changes):
    """Rows of metrics and of trajectories by iteration, of a run over a server with these changes of its sections."""
    server = {"mode": "attach", "urls": [url], "faults": ON_CPU["faults"], **(server or {})}
    rollout = {"engine": "sglang", "server": server, **changes.pop("rollout", {})}
    nodes = {"to_nodes": [f"{run}.train_grpo"]} if to_nodes else {}
    project.run(run, params={run: {"processes": 1, "rollout": rollout, **changes}}, **nodes)
    folder = project.folder("07_model_output", run)
    metrics = [read_json(path) for path in sorted((folder / "metrics").glob("iter=*.json"))]
    rows = [read_trajectories(path).to_pylist() for path in sorted((folder / "trajectories").glob("iter=*/part-*"))]
    # The first step of an iteration is taken by the weights that sampled it, or with rollouts beside the training by
    # the next ones.
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in metrics if row["train/steps"]]
    assert gaps and max(gaps[: 1 if "max_staleness" in changes.get("loop", {}) else None]) < 1e-3
    for episodes in rows:
        sampling = [json.loads(episode["sampling"]) for episode in episodes]
        assert {(how["engine"], how["seeded"]) for how in sampling} == {("sglang", False)}
        assert any(episode["trained"] for episode in episodes)
    return metrics, rows


def versions_of(episodes):
    """Versions of the weights that sampled a token."""
    return {span["version"] for episode in episodes for span in episode["weight_spans"]}


def test_grpo_over_a_server(project, sglang_server, capfd, monkeypatch):
    """Saving validates the contract; here it is what only a server can get wrong, and that secrets stay secrets."""
    monkeypatch.setenv("MY_KEY", KEY)
    # The server has no key and takes any.
    secrets = {"api_key_variable": "MY_KEY", "environment": {"HF_TOKEN": SECRET}}
    metrics, rows = train(project, sglang_server, server=secrets, to_nodes=False, loop={"iterations": 2})
    assert [row["policy_version"] for row in metrics] == [0, 1]
    for version, episodes in enumerate(rows):
        assert {episode["policy_version"] for episode in episodes} == versions_of(episodes) == {version}
    # Its turns are continued over the server that the command names.
    given = {"mode": "attach", "urls": [sglang_server], "faults": ON_CPU["faults"], **secrets}
    few = {"limit": 3, "turns": 2, "continuations": 3, "first_continuations": 3}
    project.run("fork_sokoban", params={"train_sokoban": {"rollout": {"server": given}}, "fork_sokoban": few})
    values = project.load("fork_sokoban.turn_values@pandas")
    assert set(values["policy_version"]) == {1} and set(values["continuations"]) == {3}
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


def test_over_sampling_aborts_what_is_not_needed_beside_the_training(project, sglang_server):
    """Iteration k is sampled with the weights of k - 1, and trained against their log-probs."""
    metrics, rows = train(
        project,
        sglang_server,
        "train_geo3k_multi_turn",
        server={"update": "tensors"},
        rollout={"over_sampling": 3.0},
        policy=TEXTS,
        grpo=SURPLUS,
        loop=AHEAD,
    )
    for number, episodes in enumerate(rows):
        assert versions_of(episodes) == {max(number - 1, 0)}
        trained = {episode["group_index"] for episode in episodes if episode["trained"]}
        assert len(episodes) == 18 and len(trained) == 3
        assert all(episode["trained"] == (episode["group_index"] in trained) for episode in episodes)
        reasons = {episode["drop_reason"] for episode in episodes if not episode["trained"]}
        assert reasons <= {"aborted", "surplus"}
        assert all((episode["status"] == "aborted") == (episode["reward"] is None) for episode in episodes)
    assert [row["policy_version"] for row in metrics] == [0, 0, 1]
    assert [row["rollout/staleness"] for row in metrics] == [0.0, 1.0, 1.0]
    folder = project.folder("07_model_output", "train_geo3k_multi_turn") / "eval_trajectories"
    versions = {path.parent.name: read_trajectories(path).to_pylist() for path in folder.glob("iter=*/part-*")}
    for name, episodes in versions.items():
        assert {f"iter={row['policy_version']:05d}" for row in episodes} == {name}, "validations see whole versions"
    assert len(versions) == 2


def test_partial_rollouts_are_gone_on_with_by_new_weights(project, sglang_server):
    """What an iteration gave up is finished in the next, and only the tokens of the newest weights are trained."""
    rollout = {"over_sampling": 3.0, "partial": True, "max_tokens_per_turn": 200, "max_response_tokens": None}
    _, rows = train(
        project,
        sglang_server,
        "train_geo3k",
        server={"concurrency": 4},  # so that responses do not all end together
        rollout=rollout,
        policy=TEXTS,
        grpo=SURPLUS | {"groups_per_step": 1, "mixed_versions": "mask"},
        loop={"iterations": 3, "eval_interval": 0},
        warm_start={"steps": 0},
    )
    mixed = [row for row in rows[1] + rows[2] if len(row["weight_spans"]) > 1]
    assert mixed
    for row in mixed:
        versions = [span["version"] for span in row["weight_spans"]]
        assert versions == sorted(set(versions))
        assert sum(row["loss_mask"]) == sum(span["end"] - span["start"] for span in row["weight_spans"])
    assert any(row["trained"] for row in mixed)


class TurnProxy(Proxy):
    """Notes what matters to servers that take turns with the trainer.

    Attributes:
        calls: what the server was asked to do, each kind of several in a row once.
        left: requests without an answer at each release.
    """

    NAMES = {
        "/generate": "sample",
        "/update_weights_from_tensor": "weights",
        "/update_weights_from_distributed": "weights",  # the way in force on a CPU
        "/release_memory_occupation": "release",
        "/resume_memory_occupation": "resume",
    }

    def __init__(self, target):
        self.calls, self.left = [], []
        super().__init__(target)

    async def _pass(self, request):
        name = self.NAMES.get(request.path)
        if name == "release":
            self.left.append(self.open_requests)
        if name == "resume":
            name += " " + " ".join((await request.json())["tags"])
        if name is not None and self.calls[-1:] != [name]:
            self.calls.append(name)
        return await super()._pass(request)


def test_a_server_and_the_trainer_take_turns(project, monkeypatch):
    """The order of a colocated layout, also where a server is killed while it sleeps: a fresh one is awake.

    Whatever else has the GPU (the trainer, its reference, what follows the engine) finds no server awake there.
    """
    need_environment()
    proxies, turns, launched, references = {}, [], [], []
    server = {**ON_CPU, "mode": "launch", "urls": [], "colocated": True}
    server["faults"] = {**ON_CPU["faults"], "first_pause": 0.0}
    onload, start, reference = TorchBackend.onload, LaunchedServer.start, grpo_loop.open_reference

    def url(server):
        target = f"http://127.0.0.1:{server.port}"
        if target not in proxies:
            proxies[target] = TurnProxy(target)
        return proxies[target].url

    def noting(self):
        (proxy,) = proxies.values()
        turns.append(len(proxy.calls))
        if len(turns) == 1:
            (server,) = launched
            for process in tree(server.pid):
                process.kill()
        onload(self)

    monkeypatch.setattr(
        grpo_loop, "open_reference", lambda *given: references.append(len(launched)) or reference(*given)
    )
    monkeypatch.setattr(LaunchedServer, "url", property(url))
    monkeypatch.setattr(TorchBackend, "onload", noting)
    monkeypatch.setattr(LaunchedServer, "start", lambda self, **given: launched.append(self) or start(self, **given))
    try:
        metrics, rows = train(
            project,
            "",
            server=server,
            loop={"iterations": 2, "eval_interval": 0},
            warm_start={"play_every": 0, "steps": 20},
            grpo={"kl_coefficient": 0.01},
        )
        (proxy,) = proxies.values()
        calls, proxy.calls = proxy.calls, []
        # Nor has the policy of an evaluation a place on a GPU: this machine has none.
        own = {"rollout": {"engine": "sglang", "server": server}, "policy": {"device": "cuda"}}
        own["evaluation"] = {"prompts": 2, "greedy": False, "blank_images": False}
        project.run("evaluate_sokoban", params={"train_sokoban": own})
        evaluated = proxy.calls
    finally:
        for one in proxies.values():
            one.close()
        for server in launched:
            server.end()
    woken = ["resume weights", "weights", "resume kv_cache"]
    # The last words to the old server; the new one has no cache while its weights are on their way.
    killed = ["resume weights", "release", "weights", "resume kv_cache"]
    turn = ["sample", "release"]
    assert calls == ["release", *woken, *turn, *killed, *turn, *woken, "release"]
    assert evaluated == [*woken, *turn]
    assert set(proxy.left) == {0}
    assert references == [0]
    assert [calls[number - 1] for number in turns] == ["release"] * 2, "the trainer wakes up when servers sleep"
    assert len({server.number for server in launched}) == 1 and len(launched) == 2
    assert len(rows) == 2 and all(row["perf/turn_time"] > 0 for row in metrics)
