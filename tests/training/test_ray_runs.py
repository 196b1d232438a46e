"""Whole runs in a Ray cluster equal those on this machine, whoever dies; nothing of a run outlives it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from geo_sokoban_pipeline.events import Event
from geo_sokoban_pipeline.runs.storage import read_json
from kill_hook import kill_at
from ray_cluster import RayCluster, is_server, submit, wait_until
from runs import ROOT, assert_same_run, beside, finish, kedro_command, params, read_run
from servers import ON_CPU, all_gone, need_environment, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group("ranks")]

RUN = "train_sokoban"
LOOP = f"--to-nodes={RUN}.train_grpo"  # no evaluation and no report
SHAPE = {
    "processes": 2,
    "warm_start.steps": 4,
    "loop.iterations": 2,
    "grpo.kl_coefficient": 0.01,
    "grpo.old_log_probs": "recompute",
}
SHARDED = {**SHAPE, "warm_start.steps": 0, "sharding": "full"}
APART = {"placement": "ray", "ray.strategy": "STRICT_SPREAD"}
MOMENTS = "optimizer-00001-of-00002.safetensors"
OWN_REWARD = """
import words


def reward(result, args):
    return {"reward": words.HALF * len(result.responses) + result.metrics["success"]}
"""
# The own rollout of every rank; the second one ends between its parts of the first checkpoint, once.
DYING = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
from geo_sokoban_pipeline.events import EVENT, Event
from geo_sokoban_pipeline.rollout.rollout import rollout

arrivals = []


def hear(name, given):
    is_part = name == EVENT and given == (Event.TENSOR, "model.safetensors")
    if is_part and dist.is_initialized() and dist.get_rank() == 1:
        arrivals.append(given)
        if len(arrivals) == 7 and not Path("{mark}").exists():
            Path("{mark}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(hear)
"""
GEOMETRY = "train_geo3k_multi_turn"


def submit_run(cluster: RayCluster, data: Path, *words: str) -> subprocess.Popen[str]:
    """A command with its data root, as a job of the cluster."""
    entry = f"cd {ROOT} && exec {sys.executable} -m kedro run --env=test {' '.join(words)}"
    variables = {"GEO_SOKOBAN_DATA_ROOT": str(data), "PYTHONPATH": str(ROOT / "src")}
    return submit(cluster, ["sh", "-c", entry], variables)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data root of the run on this machine, with sharded weights."""
    root = tmp_path_factory.mktemp("local")
    finish(kedro_command(*params(SHARDED), data_root=root))
    return root


@pytest.fixture(scope="module")
def undisturbed(stored: Path) -> dict[str, Any]:
    """What that run has stored."""
    return read_run(stored)


def test_a_submitted_run_on_two_nodes_has_the_same_bits_as_one_of_this_machine(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Ranks and rollout workers have an empty working folder, a data root that they cannot see, and the user's code.

    Of geometry; those of Sokoban are below.
    """
    own = ray_cluster.hidden / "own"
    own.mkdir()
    (own / "reward.py").write_text(OWN_REWARD, encoding="utf-8")
    (own / "words.py").write_text("HALF = 0.5\n", encoding="utf-8")
    # Without the KL term: the driver alone scores with a whole reference policy, and the ranks of a cluster share that.
    shape = {
        **SHAPE,
        "loop.iterations": 3,
        "grpo.kl_coefficient": 0.0,
        "grpo.advantage": "dr_grpo",
        "reward.function": f"{own}/reward.py",
        "rollout.workers": 2,
        "ray.cpus": 0.5,
    }
    data = ray_cluster.hidden / "submitted"
    with beside(kedro_command(*params(shape, run=GEOMETRY), data_root=tmp_path)):
        submitted = submit_run(ray_cluster, data, *params(shape, APART, run=GEOMETRY))
        output, _ = submitted.communicate(timeout=600)
        assert submitted.returncode == 0, output[-4000:]
    assert_same_run(read_run(tmp_path, GEOMETRY), read_run(data, GEOMETRY))
    assert os.listdir(ray_cluster.folder) == []
    assert ray_cluster.ranks_left() == []


def test_megatrons_ranks_have_the_first_iteration_of_this_machine_and_end_with_their_driver(
    ray_cluster: RayCluster, undisturbed: dict[str, Any]
) -> None:
    """Without Megatron there; every rank reads its pieces of the weights, and of a reference policy.

    The driver is killed in the second iteration; the cluster lives on.
    """
    data = ray_cluster.hidden / "megatron"
    shape = {**SHAPE, "warm_start.steps": 0, "backend": "megatron", "megatron.tensor_parallel": 2}
    environment = {**ray_cluster.environment, **kill_at(f"{Event.COLLECT}:1")}
    finish(kedro_command(*params(shape, APART), LOOP, data_root=data, **environment), -signal.SIGKILL)
    assert ray_cluster.ranks_left(300) == [], "ranks outlive their driver"
    found, name = read_run(data), "trajectories/iter=00000/part-000.parquet"
    ids = [[row["token_ids"] for row in run["episodes"][name]] for run in (undisturbed, found)]
    assert ids[0] == ids[1] and len(ids[0]) == 16
    metrics = [run["metrics"]["iter=00000.json"] for run in (undisturbed, found)]
    train = [{name: value for name, value in row.items() if name.startswith("train/")} for row in metrics]
    assert train[0]["train/kl_loss"] > 0 and train[1] == pytest.approx(train[0], rel=1e-5, abs=1e-6)


def test_a_run_whose_ranks_are_killed_ends_as_the_undisturbed_one(
    ray_cluster: RayCluster, undisturbed: dict[str, Any]
) -> None:
    data = ray_cluster.unseen / "killed"
    environment = {**ray_cluster.environment, "GEO_SOKOBAN_DATA_ROOT": str(data)}

    # One death is more than allowed.
    limited = params(SHARDED, APART, {"ray.max_restarts": 0})
    once = kill_at(f"{Event.UPDATE}:1", whom="rank")
    output = " ".join(finish(kedro_command(*limited, data_root=data, **environment, **once), 1).split())
    assert re.search(r"process 2 of 2 \(pid \d+ on \S+\) has ended: .*died", output), output[-3000:]
    assert "(ray.max_restarts=0); newest checkpoint: iter=00000" in output
    assert "/logs, on its node" in output

    # Two in a row, as the weights are sent, and in a sharded save.
    points = kill_at(f"{Event.FILE_SENT}:{MOMENTS}|{Event.FILE_FETCHED}:{MOMENTS}", 1, 3, whom="rank")
    output = finish(kedro_command(*params(SHARDED, APART), data_root=data, **environment, **points))
    assert "All ranks are built anew (2 of 3)" in output, output[-3000:]
    assert_same_run(undisturbed, read_run(data))
    rows = sorted((data / "07_model_output" / RUN / "default" / "metrics").glob("*.json"))
    assert [read_json(path).get("perf/restarts") for path in rows] == [None, 2]
    assert ray_cluster.ranks_left() == []


def test_ranks_that_share_the_data_root_write_and_read_it_themselves(
    ray_cluster: RayCluster, undisturbed: dict[str, Any], stored: Path, tmp_path: Path
) -> None:
    """One is killed between its parts of a checkpoint; the files are those of the run, and none travels."""
    data, own, mark = tmp_path / "shared", tmp_path / "dying.py", tmp_path / "mark"
    own.write_text(DYING.format(mark=mark), encoding="utf-8")
    environment = {**ray_cluster.environment, "GEO_SOKOBAN_DATA_ROOT": str(data)}
    given = params(SHARDED, APART, {"rollout.function": f"{own}:rollout"})
    travels = kill_at(f"{Event.FILE_SENT}:*|{Event.FILE_FETCHED}:*")
    output = finish(kedro_command(*given, data_root=data, **environment, **travels))
    assert mark.exists() and "All ranks are built anew (1 of 3)" in output, output[-3000:]
    assert_same_run(undisturbed, read_run(data))
    files = [
        {
            path.name: path.read_bytes()
            for path in (root / "06_models" / RUN / "default/checkpoints/iter=00001").iterdir()
        }
        for root in (stored, data)
    ]
    for found in files:
        del found["manifest.json"]  # has the layout
    assert files[0] == files[1]
    assert not list((data / "06_models").rglob(".*.tmp"))
    assert ray_cluster.ranks_left() == []


def test_what_works_on_a_stored_run_begins_again_after_a_death(
    ray_cluster: RayCluster, undisturbed: dict[str, Any], stored: Path
) -> None:
    """Where a rank is killed, each ends as it does on this machine: as the iteration of the run, bit for bit.

    While it takes a step, and while it writes what it has trained, which comes after another step; then, when both are
    done again, while it samples the second of two iterations.
    """
    data = ray_cluster.unseen / "stored"
    shutil.copytree(stored, data)
    points = f"{Event.UPDATE}:1|{Event.FILE_FETCHED}:{MOMENTS}|{Event.COLLECT}:1"
    environment = {**ray_cluster.environment, **kill_at(points, 1, 3, 6, whom="rank")}
    environment["GEO_SOKOBAN_DATA_ROOT"] = str(data)
    _, given = params(SHARDED, APART)
    sampled = "rollout_sokoban.source.checkpoint=start,rollout_sokoban.iterations=2"
    words = (
        "--pipelines=rollout_sokoban,update_sokoban",
        f"{given},{sampled},update_sokoban.source.iteration=1",
    )
    finish(kedro_command(*words, data_root=data, **environment))
    assert read_run(data) == undisturbed

    def restarts_of(pipeline: str) -> list[int | None]:
        metrics = data / "07_model_output" / pipeline / "default" / "metrics"
        return [read_json(path).get("perf/restarts") for path in sorted(metrics.glob("*.json"))]

    assert restarts_of("rollout_sokoban") == [None, 1]
    name = "trajectories/iter=00000/part-000.parquet"
    episodes = read_run(data, "rollout_sokoban")["episodes"]
    ids, wanted = ([row["token_ids"] for row in found[name]] for found in (episodes, undisturbed["episodes"]))
    assert ids == wanted
    assert len(episodes["trajectories/iter=00001/part-000.parquet"]) == len(wanted)

    assert restarts_of("update_sokoban") == [2]
    weights = read_run(data, "update_sokoban")["weights"]
    assert weights and weights.items() <= undisturbed["weights"].items()
    assert not list((data / "06_models").rglob(".ahead.*"))
    assert ray_cluster.ranks_left() == []


def test_ranks_a_rollout_worker_and_a_server_on_two_nodes_take_turns_though_the_server_is_killed(
    ray_cluster: RayCluster,
) -> None:
    """Submitted as a job; the server lies beside the first rank, and its log-probs are the trainer's.

    It is killed with its actor in the second iteration. It begins with arbitrary weights both times, so that its
    log-probs could come from no other source than an update. Without the evaluation, which would start a server of its
    own. `test_ray_gpus.py` starts one again in an actor that lives.
    """
    need_environment()
    data = ray_cluster.hidden / "turns"
    server = {name: value for name, value in ON_CPU.items() if not isinstance(value, dict)}
    sampled = {f"rollout.server.{name}": value for name, value in (server | {"colocated": "true"}).items()}
    shape = {
        **SHARDED,
        "ray.cpus": 0.3,
        "threads": 1,
        "rollout.engine": "sglang",
        "rollout.workers": 1,
        "rollout.server.faults.start_timeout": 1200,
        "rollout.server.faults.grace": 1.0,
        **sampled,
    }
    metrics = data / "07_model_output" / RUN / "default" / "metrics"
    submitted = submit_run(ray_cluster, data, *params(shape, APART), LOOP)
    killed: list[psutil.Process] = []
    with suppress(AssertionError, ValueError, psutil.Error):  # what the job says is of more use
        wait_until(lambda: (metrics / "iter=00000.json").exists() or submitted.poll() is not None, "no metrics", 600)
        (actor,) = (process for process in ray_cluster.ranks() if process.children())  # the server's
        killed = actor.children(recursive=True)
        actor.kill()
    output, _ = submitted.communicate(timeout=900)
    assert submitted.returncode == 0, output[-4000:]
    assert len(killed) > 1 and all_gone(killed, 60)
    rows = [read_json(path) for path in sorted(metrics.glob("*.json"))]
    assert [row["policy_version"] for row in rows] == [0, 1]
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows if row["train/steps"])
    assert sum(row["train/steps"] for row in rows) >= 1
    assert all(row["perf/turn_time"] > 0 for row in rows)
    assert "is lost, restart 1: " in " ".join(output.split())
    assert ray_cluster.ranks_left() == []
    assert not [
        process for node in ray_cluster.nodes for process in ray_cluster.processes_of(node) if is_server(process)
    ]
    assert os.listdir(ray_cluster.folder) == []


def test_a_cluster_of_the_runs_own_ends_with_it_and_others_live_on(ray_cluster: RayCluster, tmp_path: Path) -> None:
    own = params(SHAPE, {"placement": "ray"})
    finish(kedro_command(*own, data_root=tmp_path, **kill_at(f"{Event.SFT_STEP}:*", 2)), -signal.SIGKILL)
    # They have inherited the data root from the driver.
    wait_until(lambda: processes_with(f"GEO_SOKOBAN_DATA_ROOT={tmp_path}") == [], "processes of its cluster are left")
    assert all(node.poll() is None for node in ray_cluster.nodes)


# Last: the next file gives the cluster another node.


def test_lost_nodes_cost_their_iterations_and_then_a_rank(
    ray_cluster: RayCluster, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """They go when an iteration is to be trained; another node takes the place of the first, none that of the second.

    Then one rank does the work of two: the same episodes, and the same steps but for the rounding of sums. It offloads,
    so that its engine has to be given what it has trained.
    """
    data = ray_cluster.hidden / "nodes"
    environment = {**ray_cluster.environment, "GEO_SOKOBAN_DATA_ROOT": str(data)}
    allowed = {"ray.min_processes": 1, "ray.patience": 10, "optimizer.offload": "true"}
    mark = tmp_path / "mark"
    losses = kill_at(f"{Event.UPDATE}:*", 1, 3, whom=mark)
    process = kedro_command(*params(SHARDED, APART, allowed), LOOP, data_root=data, **environment, **losses)
    for is_replaced in (True, False):
        wait_until(mark.exists, "no update")
        if is_replaced:  # before it is lost: a busy machine may need longer for a node than the run is patient
            ray_cluster.add_node()
        ray_cluster.remove_node(ray_cluster.nodes[1])
        mark.unlink()
    output = finish(process, timeout=600)
    assert "All ranks are built anew (1 of 3)" in output, output[-3000:]
    assert "the cluster has place for 1 of 2 ranks" in output, output[-3000:]
    found = read_run(data)
    names = [f"trajectories/iter={number:05d}/part-000.parquet" for number in range(2)]
    assert found["episodes"][names[0]] == undisturbed["episodes"][names[0]], "two ranks"
    assert found["metrics"]["iter=00000.json"] == undisturbed["metrics"]["iter=00000.json"]
    weights = "checkpoints/iter=00000/model.safetensors"
    assert found["weights"][weights] == undisturbed["weights"][weights]
    ids, wanted = ([row["token_ids"] for row in run["episodes"][names[1]]] for run in (found, undisturbed))
    assert ids == wanted and len(ids) > 8
    row, other = (run["metrics"]["iter=00001.json"] for run in (found, undisturbed))
    train = [name for name in row if name.startswith("train/")]
    assert {name: row[name] for name in train} == pytest.approx({name: other[name] for name in train}, 1e-3, 1e-5)
    metrics = sorted((data / "07_model_output" / RUN / "default" / "metrics").glob("*.json"))
    stored = [read_json(path) for path in metrics]
    assert [one.get("perf/missing_ranks") for one in stored] == [None, 1]
    assert [one["perf/restarts"] for one in stored] == [1, 1]
    manifests = sorted((data / "06_models" / RUN / "default/checkpoints").glob("iter=*/manifest.json"))
    assert [read_json(path)["layout"]["processes"] for path in manifests] == [2, 1]
    assert ray_cluster.ranks_left() == []
