"""Buckets of weights, and their files, which equal those of the libraries byte for byte; digests are those of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from geo_sokoban_pipeline.policies.policy import Policy, load_policy, save_policy
from geo_sokoban_pipeline.policies.weights import (
    SharedBytes,
    TensorFile,
    TensorSpec,
    WeightSource,
    plan_buckets,
    write_tensors,
)
from geo_sokoban_pipeline.runs.storage import (
    CorruptFolderError,
    Filled,
    describe_files,
    file_digest,
    read_manifest,
    write_folder,
)
from given_weights import named_tensors, source_of

TENSORS = {
    "b.weight": torch.arange(6.0).view(2, 3),
    "a.weight": torch.ones(5, dtype=torch.bfloat16),
    "c.bias": torch.zeros(0, 4),
    "é": torch.full((3,), 0.5, dtype=torch.float16),
    "A.weight": torch.linspace(0, 1, 7, dtype=torch.float64),
    "d.transposed": torch.arange(8.0).view(2, 4).T,
}
SPECS = {name: TensorSpec.of(tensor) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("names", [[], ["b.weight"], list(TENSORS)])
def test_a_file_is_that_of_the_library(tmp_path: Path, names: list[str], metadata: dict[str, str] | None) -> None:
    chosen = {name: TENSORS[name].contiguous() for name in names}
    save_file(chosen, tmp_path / "theirs.safetensors", metadata=metadata)
    ours = tmp_path / "ours.safetensors"
    record = write_tensors(ours, {name: SPECS[name] for name in names}, TENSORS.__getitem__, metadata)
    assert ours.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert record == {ours.name: {"bytes": ours.stat().st_size, "blake2b": file_digest(ours)}}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("a.weight", TENSORS["a.weight"], "takes A.weight, .* not a.weight"),
        ("A.weight", TENSORS["A.weight"].float(), "dtype='float64'.* not A.weight, .*dtype='float32'"),
        ("A.weight", TENSORS["A.weight"][:3], r"shape=\(7,\).* not .*shape=\(3,\)"),
        ("A.weight", TENSORS["A.weight"], "b.weight was not written"),
    ],
)
def test_another_tensor_than_the_next_one_is_refused_and_a_file_without_all(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message), TensorFile(tmp_path / "file.safetensors", SPECS) as file:
        file.write(name, tensor)


@pytest.mark.parametrize("largest", [10**9, 100_000])
def test_a_saved_policy_is_that_of_the_library(tiny_policy: Policy, tmp_path: Path, largest: int) -> None:
    """One file, and several with their index."""
    tiny_policy.model.save_pretrained(tmp_path / "theirs", max_shard_size=largest)
    records = save_policy(tiny_policy, tmp_path / "ours", largest=largest)
    theirs = sorted((tmp_path / "theirs").glob("model*"))
    assert (len(theirs) > 3) == (largest < 10**9)
    for path in [*theirs, tmp_path / "theirs" / "config.json"]:
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes(), path.name
    described = describe_files(tmp_path / "ours")
    assert set(records) == {path.name for path in theirs if path.suffix == ".safetensors"}
    assert all(described[name] == record for name, record in records.items())
    loaded = dict(load_policy(tmp_path / "ours").model.named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in tiny_policy.model.named_parameters())


def test_digests_that_a_writer_took_go_into_the_manifest(tmp_path: Path) -> None:
    """But not those of a file that is shorter than it was written."""

    def write(folder: Path, lost: int = 0) -> Filled:
        path = folder / "t.safetensors"
        filled = Filled({"entry": 1}, write_tensors(path, SPECS, TENSORS.__getitem__))
        path.write_bytes(path.read_bytes()[: path.stat().st_size - lost])
        (folder / "plain.txt").write_text("x")
        return filled

    manifest = write_folder(tmp_path / "made", write)
    assert manifest["entry"] == 1 and set(manifest["files"]) == {"plain.txt", "t.safetensors"}
    assert manifest == read_manifest(tmp_path / "made"), "digests are those of the files"
    told = {"plain.txt": {"bytes": 1, "blake2b": "taken while writing"}}
    assert describe_files(tmp_path / "made", told)["plain.txt"] == told["plain.txt"], "not read again"
    with pytest.raises(CorruptFolderError, match=r"t\.safetensors has \d+ bytes, but \d+ were written"):
        write_folder(tmp_path / "short", partial(write, lost=1))
    assert not (tmp_path / "short").exists()


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([1, 1, 1], 8, [[0, 1], [2]]),
        ([5, 1, 1], 8, [[0], [1, 2]]),  # larger than a bucket: alone
        ([1, 5, 1], 8, [[0], [1], [2]]),
        ([], 8, []),
        ([1, 1, 1], 1000, [[0, 1, 2]]),
    ],
)
def test_buckets(sizes: list[int], limit: int, expected: list[list[int]]) -> None:
    source = source_of(named_tensors(sizes))
    plan = list(plan_buckets(source.specs, limit))
    assert [[int(name) for name in specs] for specs in plan] == expected
    # Of two bytes each, which is the type that is sent, as many have room in half of the bytes.
    sent = source.cast(dict.fromkeys(source.specs, "bfloat16")).specs
    assert [list(specs) for specs in plan_buckets(sent, limit // 2)] == [list(specs) for specs in plan]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_delivered_in_the_type_that_is_asked_for(tiny_policy: Policy, dtype: str) -> None:
    source = WeightSource.of_model(tiny_policy.model)
    own = dict(tiny_policy.model.named_parameters())
    sent = dict(source.cast(dict.fromkeys(own, dtype)).read())
    assert list(sent) == list(own)
    for name, weight in sent.items():
        assert not weight.requires_grad and weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, own[name].detach().to(weight.dtype)), name


def test_a_folder_holds_every_tensor_once_in_files_of_the_library(tmp_path: Path) -> None:
    """A file is a bucket; no tensor of the next bucket is read before it is needed."""
    given = named_tensors([3, 1, 700, 2])
    source, read = source_of(given), []

    def collect(specs: Mapping[str, TensorSpec], memory: SharedBytes | None) -> torch.Tensor:
        read.append((list(specs), len(list((tmp_path / "new").iterdir()))))
        return source.collect(specs, memory)

    replace(source, collect=collect).write(tmp_path / "new", 16)
    assert read == [(["0", "1"], 0), (["2"], 1), (["3"], 2)]
    for (names, _), path in zip(read, sorted((tmp_path / "new").iterdir()), strict=True):
        save_file({name: given[name] for name in names}, tmp_path / "theirs")
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
        assert list(load_file(path)) == names
    again = dict(WeightSource.of_folder(tmp_path / "new").read())
    assert again.keys() == given.keys() and all(torch.equal(given[name], tensor) for name, tensor in again.items())
