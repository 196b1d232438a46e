"""State on disk: what a layout of either backend has written, all others read; weights are Hugging Face's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.distributed.slices import Slice, StoredTensors
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.lora import read_adapter
from geo_sokoban_pipeline.policies.policy import Policy, load_empty, load_policy, save_policy
from geo_sokoban_pipeline.runs.storage import Files, read_json, read_manifest, write_folder
from geo_sokoban_pipeline.training.backend import build_backend
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.backends.torch import TorchBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter
from geo_sokoban_pipeline.training.worker import Worker
from open_workers import apply_on_all
from policies.mixtures import build_mixture
from training.four_ranks import FourRanks, megatron_of
from training.setup import Setup, adapted, copied

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

# Layouts, and the files of their moments; None: one without slices.
LAYOUTS: dict[str, int | None] = {
    "one process": None,
    "two replicas": None,
    "two shards": 2,
    "two copies of one shard": 2,
    "two copies of two shards": 4,
    "tensor 1": 1,
    "tensor 2": 2,
    "data 2": 2,
    "tensor 2 x data 2, sequence": 4,
}
# Moments of AdamW and of Muon. A larger epsilon: moments near 0 would turn rounding into steps of full size.
OPTIONS = OptimizerOptions(matrices="muon", eps=1e-5)
OBJECTIVE = GrpoObjective(GrpoOptions())
RATE = 1e-3

State = tuple[dict[str, float], dict[str, Tensor]]


@contextmanager
def build(four_ranks: FourRanks, policy: Policy, layout: str) -> Iterator[TrainBackend]:
    policy = copied(policy)
    with four_ranks.group(policy, layout) as workers:
        yield build_backend(policy, OPTIONS, 0.9, workers, megatron_of(layout))


def step(backend: TrainBackend, samples: list[TrainSample]) -> State:
    """Metrics of a step, and the weights after it."""
    metrics = backend.step(samples, OBJECTIVE, RATE)
    return metrics, {name: weight.detach().clone() for name, weight in backend.weight_source().read()}


def read_moments(folder: Path, policy: Policy) -> dict[str, Tensor]:
    """Whole moments by name."""
    stored = StoredTensors(folder, "optimizer")
    rows = {name: len(weight) for name, weight in policy.model.named_parameters()}
    return {key: stored.read(key, Slice(range(rows[key.split(".", 1)[1]]))) for key in stored.names}


@pytest.fixture(scope="module")
def written(
    four_ranks: FourRanks,
    splittable: Policy,
    batches: dict[str, list[TrainSample]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, State]]:
    """By layout: a checkpoint after two steps, and the step after it."""
    found = {}
    for layout in LAYOUTS:
        with build(four_ranks, splittable, layout) as backend:
            for _ in range(2):
                backend.step(batches["uneven"], OBJECTIVE, RATE)
            folder = tmp_path_factory.mktemp("written") / "checkpoint"
            write_folder(folder, CheckpointWriter(backend, {}))
            found[layout] = folder, step(backend, batches["uneven"])
    return found


# Each layout reads what three have written, itself among them, so that each is read by three, of both backends.
NAMES = list(LAYOUTS)
WRITTEN_BY = [(name, [NAMES[(place + step) % len(NAMES)] for step in (0, 2, 5)]) for place, name in enumerate(NAMES)]


@pytest.mark.parametrize(("reader", "writers"), WRITTEN_BY, ids=NAMES)
def test_every_layout_continues_from_what_others_have_written(
    four_ranks: FourRanks,
    splittable: Policy,
    batches: dict[str, list[TrainSample]],
    written: dict[str, tuple[Path, State]],
    tmp_path: Path,
    reader: str,
    writers: list[str],
) -> None:
    """What is read and written again is the same bit for bit; the next step is that of the writer."""
    continued = {}
    with build(four_ranks, splittable, reader) as backend:
        for writer in writers:
            backend.load_state(written[writer][0])
            backend.export(tmp_path / writer)
            backend.save_state(tmp_path / writer)
            continued[writer] = step(backend, batches["uneven"])
    for writer in writers:
        (folder, (metrics, weights)), again = written[writer], tmp_path / writer
        assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        moments, same = read_moments(folder, splittable), read_moments(again, splittable)
        assert moments.keys() == same.keys() and any(key.startswith("momentum.") for key in moments)
        assert all(torch.equal(moment, same[key]) for key, moment in moments.items()), writer
        found, moved = continued[writer]
        assert found["loss"] == pytest.approx(metrics["loss"], abs=1e-6), writer
        assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5), writer
        for name, weight in weights.items():
            torch.testing.assert_close(moved[name], weight, rtol=0, atol=0.05 * RATE, msg=f"{writer}: {name}")
        if writer == reader:
            assert found == metrics
            assert all(torch.equal(moved[name], weight) for name, weight in weights.items())


ADAPTED_LAYOUTS = [name for name in (*LAYOUTS, "four shards") if "tensor" not in name and "data" not in name]


def test_an_adapter_continues_under_every_layout(
    four_ranks: FourRanks, setup: Setup, batches: dict[str, list[TrainSample]], tmp_path: Path
) -> None:
    """Written by one, read by the next and written again: the same bits, and one file of the adapter."""
    samples, fresh = batches["uneven"], adapted(setup.policy, setup.folder.path)
    expected = np.concatenate(TorchBackend(copied(setup.policy), OPTIONS, 0.9).log_probs(samples))
    before, moved = None, None
    for number, layout in enumerate([*ADAPTED_LAYOUTS, "one process"]):
        folder = tmp_path / str(number)
        with build(four_ranks, fresh, layout) as backend:
            if before is None:
                for _ in range(2):
                    backend.step(samples, OBJECTIVE, RATE)
            else:
                backend.load_state(before)
            assert not list(write_folder(folder, CheckpointWriter(backend, {}))["files"].keys() & {"model.safetensors"})
            backend.export(tmp_path / f"merged {number}")
            np.testing.assert_allclose(np.concatenate(backend.base_log_probs(samples)), expected, atol=1e-6)
            after = step(backend, samples)
        if before is not None and moved is not None:
            for file in ("adapter_model.safetensors", "adapter_config.json"):
                assert (folder / file).read_bytes() == (before / file).read_bytes(), layout
            moments, same = (read_moments(place, fresh) for place in (before, folder))
            assert moments.keys() == same.keys()
            assert all(torch.equal(moment, same[key]) for key, moment in moments.items()), layout
            assert after[0]["loss"] == pytest.approx(moved[0]["loss"], abs=1e-6), layout
            for name, weight in moved[1].items():
                torch.testing.assert_close(after[1][name], weight, rtol=0, atol=0.05 * RATE, msg=f"{layout}: {name}")
        merged = TorchBackend(load_policy(tmp_path / f"merged {number}"), OPTIONS, 0.9)
        one = adapted(setup.policy, setup.folder.path)
        parameters = dict(one.model.named_parameters())
        for name, matrix in read_adapter(folder, parameters).items():
            parameters[name].data.copy_(matrix)
        own = TorchBackend(one, OPTIONS, 0.9)
        np.testing.assert_allclose(
            np.concatenate(merged.log_probs(samples)), np.concatenate(own.log_probs(samples)), atol=1e-5
        )
        before, moved = folder, after


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_a_hugging_face_folder_with_slices_of_moments(
    written: dict[str, tuple[Path, State]], splittable: Policy, layout: str
) -> None:
    from transformers import AutoModelForImageTextToText

    folder, _ = written[layout]
    manifest = read_manifest(folder)  # compares the digests that the writers took with the files
    assert manifest is not None
    model = AutoModelForImageTextToText.from_pretrained(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert shapes == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {key.split(".", 1)[1] for key in read_moments(folder, splittable)} == set(shapes)
    moments, count = sorted(name for name in manifest["files"] if name.startswith("optimizer")), LAYOUTS[layout]
    if count is None:
        assert moments == ["optimizer.safetensors"]
        return
    parts = [f"optimizer-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert moments == [*parts, "optimizer.safetensors.index.json"]
    for key, pieces in read_json(folder / moments[-1])["slices"].items():
        for piece in pieces:
            with safe_open(folder / piece["file"], "pt") as file:
                assert file.get_slice(key).get_shape()[0] == piece["rows"][1] - piece["rows"][0]
    sizes = [manifest["files"][part]["bytes"] for part in parts]
    assert max(sizes) <= 1.3 * min(sizes), "each rank writes its part"


WRITERS = [
    ("two shards", "mixture"),
    ("three shards", "in memory"),
    ("four shards", "adapted"),
    ("two copies of one shard", "in memory"),
    ("two copies of two shards", "mixture"),
    ("tensor 1", "in memory"),
    ("tensor 2", "in memory"),
    ("tensor 2 x data 2", "read"),
]


class Collectives(TorchDispatchMode):
    """Notes the collectives of torch that are called, by name, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.names.add(function.name())
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return function(*args, **(kwargs or {}))


def export(worker: Worker, folder: Path, largest: int) -> tuple[Files, set[str], int]:
    """Write a rank's part of the policy, into files of at most so many bytes; also what was sent for it."""
    with Collectives() as sent:
        files: Files = worker.backend.export(folder, largest)
    return files, sent.names, sent.bytes


@pytest.mark.parametrize(("layout", "kind"), WRITERS)
def test_ranks_write_the_files_that_one_process_writes(
    four_ranks: FourRanks,
    splittable: Policy,
    setup: Setup,
    tmp_path: Path,
    layout: str,
    kind: str,
) -> None:
    """Of a policy in memory, or one that each rank reads its part of; the sums of an adapter's too.

    The ranks send no weights: they wait for each other, and add up the first matrices of an adapter.
    """
    largest = 20_000
    policy = build_mixture(setup.policy) if kind == "mixture" else copied(splittable)
    if kind == "adapted":
        policy = adapted(setup.policy, setup.folder.path, is_fresh=False)
    save_policy(policy, tmp_path / "one", largest=largest)
    together = tmp_path / "together"
    together.mkdir()
    if kind == "read":
        policy = load_empty(setup.options.policy, tmp_path / "one")
    with four_ranks.group(policy, layout) as workers:
        backend: Any = build_backend(policy, OPTIONS, 0.9, workers, megatron_of(layout))
        if workers is None:
            parts = [backend.export(together, largest)]
        else:
            parts, names, sizes = zip(
                *apply_on_all(workers, partial(export, folder=together, largest=largest)), strict=True
            )
            added = sum(value.nbytes for value in policy.model.state_dict().values()) // 10 if kind == "adapted" else 0
            assert set().union(*names) == {"c10d::allreduce_"} and max(sizes) <= added + 64
    files = sorted(path.name for path in (tmp_path / "one").glob("*"))
    assert len([name for name in files if name.startswith("model-")]) > 5
    assert sorted(path.name for path in together.glob("*")) == files
    for file in files:
        assert (together / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file
    counts = [len([name for name in part if name.startswith("model-")]) for part in parts]
    assert sum(counts) == len([name for name in files if name.startswith("model-")])
    assert max(counts) - min(counts) <= 1, "side by side"
