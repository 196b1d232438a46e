"""Ranks in a Ray cluster of two nodes: they compute what ranks of this machine do, and a lost one is named at once."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.messages import DeadRankError, RankError
from geo_sokoban_pipeline.distributed.ray_actors import CHUNK_BYTES
from geo_sokoban_pipeline.distributed.ray_placement import RayRanks, connected
from rank_jobs import FailThenSum, JoinAt, Look, OpenMeeting, Sleep, SumGradients, WriteRank, build
from ray_cluster import RayCluster

pytestmark = pytest.mark.slow
APART = RayOptions(strategy="STRICT_SPREAD", patience=60)


@pytest.fixture(scope="module", autouse=True)
def _joined(ray_cluster: RayCluster) -> Iterator[None]:
    """This process as a driver."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_cluster.environment.items():
            patch.setenv(name, value)
        with connected(APART, 2):
            yield


def start(options: RayOptions = APART) -> RayRanks:
    """Two ranks that have joined."""
    ranks = RayRanks(2, build, options)
    port = ranks.run([OpenMeeting(2, ranks.host)])[0]
    ranks.run([JoinAt(rank, 2, ranks.host, port, place.address) for rank, place in enumerate(ranks.places)])
    return ranks


def test_two_nodes_sum_as_one_process_does_and_folders_travel(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start()
    try:
        ranks.run([Sleep(2.1)])  # long enough to be logged
        assert not ranks.is_on_one_machine
        found = ranks.run([SumGradients()] * 2)
        for count, sums in zip((40_001, 3), zip(*found, strict=True), strict=False):
            terms = []
            for rank in range(2):
                generator = torch.Generator().manual_seed(rank)
                terms.append([torch.randn(length, generator=generator) for length in (40_001, 3)])
            expected = [a + b for a, b in zip(*terms, strict=True)][0 if count > 3 else 1]
            assert all(torch.equal(own, expected) for own in sums)

        # A folder with a file of several chunks and an empty one; the manifest stays here.
        given = {"a/long.bin": CHUNK_BYTES + 5, "empty.json": 0}
        for name, size in {**given, "manifest.json": 7}.items():
            (tmp_path / "given" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "given" / name).write_bytes(os.urandom(size))
        looks = ranks.read(tmp_path / "given", Look)
        assert [content for _, _, content in looks] == [given, given]
        folders = [folder for folder, _, _ in looks]
        assert len(set(folders)) == 2
        assert [listed for _, listed, _ in looks] == [["1"], ["2"]], "the copy alone"
        assert all(os.listdir(folder) == [] for folder in folders), "it is gone afterwards"

        (tmp_path / "made").mkdir()
        files = ranks.write(tmp_path / "made", lambda folder: WriteRank(folder, CHUNK_BYTES + 1), 2)
        assert sorted(files) == ["0.bin", "1.bin"]
        assert (tmp_path / "made" / "1.bin").read_bytes() == b"\1" * (CHUNK_BYTES + 1)
        with pytest.raises(RankError, match="0.bin did not arrive as process 1 of 2 .* has written it"):
            ranks.write(tmp_path / "made", lambda folder: WriteRank(folder, 3, wrong=True), 2)

        shown, deadline = "", time.monotonic() + 60
        while "INFO Sleep: 2.1 s" not in shown and time.monotonic() < deadline:
            time.sleep(0.1)
            shown += "".join(capfd.readouterr())
        assert re.search(r"\(process 1 of 2 pid=\d+[^)]*\)\S* INFO Sleep: 2.1 s", shown), shown
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", RankError, r"(?s)process 2 of 2 \(pid \d+ on [\d.]+\) failed:.*Traceback.*ValueError: out of luck"),
        ("kill", DeadRankError, r"process 2 of 2 \(pid \d+ on [\d.]+\) has ended: .*died.* Its log is in .*/logs"),
    ],
)
def test_a_rank_that_fails_while_the_other_waits_is_named(how: str, kind: type[RankError], message: str) -> None:
    ranks = start()
    began = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        ranks.run([FailThenSum(failing, gradients=True) for failing in ("", how)])
    assert type(caught.value) is kind
    assert time.monotonic() - began < 20
    with pytest.raises(RankError, match="closed"):
        ranks.run([SumGradients()] * 2)


def test_ranks_that_do_not_answer_in_time_count_as_lost() -> None:
    ranks = RayRanks(2, build, APART.model_copy(update={"job_timeout": 2.0}))
    late = r"^process 1 of 2 \(pid \d+ on \S+\): no answer in 2 s \(ray.job_timeout\)"
    with pytest.raises(DeadRankError, match=late):
        ranks.run([Sleep(60)])
    assert not ranks.is_open


def test_ranks_that_find_no_place_are_an_error_with_what_there_is() -> None:
    with pytest.raises(
        RankError, match=r"(?s)2 ranks of 2 CPU each, .*found no place in 1 s: .*2 CPU.*Lower processes"
    ):
        RayRanks(2, build, APART.model_copy(update={"cpus": 2.0, "patience": 1.0}))
