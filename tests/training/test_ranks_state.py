"""State on disk: what any layout has written, every other one reads; files do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.grpo.loss import GrpoObjective
from geo_sokoban_pipeline.policies.policy import save_policy
from geo_sokoban_pipeline.runs.storage import read_json, read_manifest, write_folder
from geo_sokoban_pipeline.training.backends.base import TrainBackend
from geo_sokoban_pipeline.training.backends.factory import build_backend
from geo_sokoban_pipeline.training.backends.ranks import RankedBackend
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.training.checkpoint import CheckpointWriter
from policies.mixtures import build_mixture
from training.four_ranks import ExportWeights, FourRanks
from training.setup import Setup, copied

pytestmark = pytest.mark.slow

LAYOUTS = ("one process", "two replicas", "two shards", "two copies of one shard", "two copies of two shards")
# Moments of AdamW and of Muon. A larger epsilon: moments near 0 would turn rounding into steps of full size.
OPTIONS = OptimizerOptions(matrices="muon", eps=1e-5)
OBJECTIVE = GrpoObjective(GrpoOptions())
RATE = 1e-3

State = tuple[dict[str, float], dict[str, torch.Tensor]]


@contextmanager
def build(four_ranks: FourRanks, setup: Setup, layout: str) -> Iterator[TrainBackend]:
    policy = copied(setup.trained)
    with four_ranks.group(policy, layout) as workers:
        yield build_backend(policy, OPTIONS, 0.9, workers)


def step(backend: TrainBackend, samples: list[TrainSample]) -> State:
    """Metrics of a step, and the weights after it."""
    metrics = backend.step(samples, OBJECTIVE, RATE)
    return metrics, {name: weight.detach().clone() for name, weight in backend.iter_weights()}


@pytest.fixture(scope="module")
def written(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, State]]:
    """By layout: a checkpoint after two steps, and the step after it."""
    found = {}
    for layout in LAYOUTS:
        with build(four_ranks, setup, layout) as backend:
            for _ in range(2):
                backend.step(batches["boards"], OBJECTIVE, RATE)
            folder = tmp_path_factory.mktemp("written") / "checkpoint"
            write_folder(folder, CheckpointWriter(backend, {}))
            found[layout] = folder, step(backend, batches["boards"])
    return found


@pytest.mark.parametrize("reader", LAYOUTS)
def test_every_layout_continues_from_what_any_has_written(
    four_ranks: FourRanks,
    setup: Setup,
    batches: dict[str, list[TrainSample]],
    written: dict[str, tuple[Path, State]],
    tmp_path: Path,
    reader: str,
) -> None:
    continued = {}
    with build(four_ranks, setup, reader) as backend:
        for writer, (folder, _) in written.items():
            backend.load_state(folder)
            backend.export(tmp_path / writer)
            continued[writer] = step(backend, batches["boards"])
    for writer, (folder, (metrics, weights)) in written.items():
        assert (tmp_path / writer / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        found, moved = continued[writer]
        assert found["loss"] == pytest.approx(metrics["loss"], abs=1e-6), writer
        assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5), writer
        for name, weight in weights.items():
            torch.testing.assert_close(moved[name], weight, rtol=0, atol=0.05 * RATE, msg=f"{writer}: {name}")
        if writer == reader:
            assert found == metrics
            assert all(torch.equal(moved[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_a_hugging_face_folder_with_slices_of_moments(
    written: dict[str, tuple[Path, State]], setup: Setup, layout: str
) -> None:
    from transformers import AutoModelForImageTextToText

    folder, _ = written[layout]
    manifest = read_manifest(folder)  # compares the digests that the writers took with the files
    assert manifest is not None
    model = AutoModelForImageTextToText.from_pretrained(folder)
    names = {name: parameter for name, parameter in model.named_parameters()}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {name: list(weight.shape) for name, weight in names.items()} == {
            name: file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118
        }
    moments = sorted(name for name in manifest["files"] if name.startswith("optimizer"))
    if "shard" not in layout:
        assert moments == ["optimizer.safetensors"]
        return
    count = 4 if "two copies of two" in layout else 2
    parts = [f"optimizer-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert moments == [*parts, "optimizer.safetensors.index.json"]
    slices = read_json(folder / moments[-1])["slices"]
    assert {key.split(".", 1)[1] for key in slices} == set(names)
    for key, pieces in slices.items():
        ends = [piece["rows"] for piece in pieces]
        assert [first for first, _ in ends] == [0, *(last for _, last in ends[:-1])], key
        assert ends[-1][1] == len(names[key.split(".", 1)[1]]), key
        for piece in pieces:
            with safe_open(folder / piece["file"], "pt") as file:
                assert file.get_slice(key).get_shape()[0] == piece["rows"][1] - piece["rows"][0]
    sizes = [manifest["files"][part]["bytes"] for part in parts]
    assert max(sizes) <= 1.3 * min(sizes), "each rank writes its part"


@pytest.mark.parametrize("layout", ["two shards", "four shards", "two copies of one shard", "two copies of two shards"])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_ranks_write_the_files_that_one_process_writes(
    four_ranks: FourRanks, setup: Setup, tmp_path: Path, layout: str, kind: str
) -> None:
    """Several files, so that each rank writes some; experts in the layout of the hub."""
    policy = copied(setup.trained) if kind == "dense" else build_mixture(setup.policy)
    largest = 60_000
    save_policy(policy, tmp_path / "one", largest=largest)
    together = tmp_path / "together"
    together.mkdir()
    with four_ranks.group(policy, layout) as workers:
        assert workers is not None
        own, size = RankedBackend(policy, OPTIONS, 0.9, workers).own, workers.size
        jobs = [ExportWeights(together, largest)] * (size - 1)
        parts = workers.run(lambda: own.export(together, largest), jobs)
    files = sorted(path.name for path in (tmp_path / "one").glob("model*"))
    assert len(files) > size + 1 and sorted(path.name for path in together.glob("model*")) == files
    for file in files:
        assert (together / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file
    counts = [len(part) for part in parts]
    assert sum(counts) == len(files) - 1 and max(counts) - min(counts) <= 1, "all but the index, side by side"
