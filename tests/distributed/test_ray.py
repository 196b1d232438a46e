"""Ranks in a Ray cluster of two nodes: they compute what ranks of this machine do, and a lost one is named at once."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forked import ForkedCommand
from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.process import WorkerDied, WorkerError
from geo_sokoban_pipeline.distributed.ray_cluster import NoPlaceError
from geo_sokoban_pipeline.distributed.ray_process import CHUNK_BYTES, RayProcess, start_ray_processes
from rank_jobs import build, close, join, run
from ray_cluster import RayCluster, joined
from runs import finish

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group("ranks")]
APART = RayOptions(strategy="STRICT_SPREAD", patience=60)


@pytest.fixture(scope="module", autouse=True)
def _joined(ray_cluster: RayCluster) -> Iterator[None]:
    with joined(ray_cluster, APART, 2):
        yield


def start(options: RayOptions = APART) -> list[RayProcess]:
    """Two ranks that have joined."""
    ranks = start_ray_processes(["process 1 of 2", "process 2 of 2"], "2 ranks of", options)
    for rank in ranks:
        rank.build(build)
    join(ranks, ranks[0].where.address, [rank.where.address for rank in ranks])
    return ranks


def test_two_nodes_sum_as_one_process_does_folders_travel_and_a_failure_is_named(
    ray_cluster: RayCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hidden = ray_cluster.unseen / "two_nodes"
    hidden.mkdir()
    ranks = start()
    try:
        ranks[0].call("sleep", 2.1).result()  # long enough to be logged
        assert len({rank.where.node for rank in ranks}) == 2
        found = run(ranks, "sum_gradients", [()] * 2)
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
            (hidden / "given" / name).parent.mkdir(parents=True, exist_ok=True)
            (hidden / "given" / name).write_bytes(os.urandom(size))
        places = [rank.place(hidden / "given") for rank in ranks]
        assert places == [rank.place(hidden / "given") for rank in ranks], "sent once"
        looks = run(ranks, "look", [(place,) for place in places])
        for rank in ranks:
            rank.clear(hidden / "given")
        assert [content for _, _, content in looks] == [given, given]
        folders = [folder for folder, _, _ in looks]
        assert len(set(folders)) == 2
        assert [listed for _, listed, _ in looks] == [["1"], ["1"]], "the copy alone"
        assert all(os.listdir(folder) == [] for folder in folders), "it is gone afterwards"

        (hidden / "made").mkdir()
        boxes = [rank.outbox(hidden / "made") for rank in ranks]
        parts = run(ranks, "write_rank", [(box, CHUNK_BYTES + 1) for box in boxes])
        for rank, box, known in zip(ranks, boxes, parts, strict=True):
            rank.take(box, hidden / "made", known)
        assert [sorted(known) for known in parts] == [["0.bin"], ["1.bin"]]
        assert (hidden / "made" / "1.bin").read_bytes() == b"\1" * (CHUNK_BYTES + 1)
        box = ranks[0].outbox(hidden / "made")
        wrong = ranks[0].call("write_rank", box, 3, True).result()
        with pytest.raises(WorkerError, match="0.bin did not arrive as process 1 of 2 .* has written it"):
            ranks[0].take(box, hidden / "made", wrong)

        shown, deadline = "", time.monotonic() + 60
        lines = ("INFO awake again", "INFO sleep: 2.1 s")  # of any module of the package
        while not all(line in shown for line in lines) and time.monotonic() < deadline:
            time.sleep(0.1)
            shown += "".join(capfd.readouterr())
        for line in lines:
            assert re.search(rf"\(process 1 of 2 pid=\d+[^)]*\)\S* {line}", shown), shown

        said = r"(?s)process 2 of 2 \(pid \d+ on [\d.]+\) failed:.*Traceback.*ValueError: out of luck"
        assert not isinstance(failure_of(ranks, "raise", said), WorkerDied)
    finally:
        close(ranks, patient=False)


def test_what_a_node_has_under_the_same_path_does_not_travel(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Unless it is another folder there."""
    hidden = ray_cluster.unseen / "not_shared"
    hidden.mkdir()
    ranks = start()
    try:
        for folder, is_shared in ((hidden, False), (tmp_path, True)):
            (folder / "file.json").write_text("{}", encoding="utf-8")
            places, boxes = ([getattr(rank, name)(folder) for rank in ranks] for name in ("place", "outbox"))
            assert {place == folder for place in (*places, *boxes)} == {is_shared}
            assert {rank.shares(folder) for rank in ranks} == {is_shared}
            for rank in ranks:
                rank.clear(folder)
            assert "file.json" in os.listdir(folder)
        parts = run(ranks, "write_rank", [(box, 3) for box in boxes])
        for rank, box, known in zip(ranks, boxes, parts, strict=True):
            rank.take(box, tmp_path, known)
        assert sorted(os.listdir(tmp_path)) == ["0.bin", "1.bin", "file.json"], "and nothing is left of the question"
    finally:
        close(ranks, patient=False)


def test_a_rank_that_is_killed_while_the_other_waits_is_named() -> None:
    ranks = start()
    try:
        said = r"process 2 of 2 \(pid \d+ on [\d.]+\) has ended: .*died.* Its log is in .*/logs"
        assert isinstance(failure_of(ranks, "kill", said), WorkerDied)
    finally:
        close(ranks, patient=False)


def failure_of(ranks: list[RayProcess], how: str, said: str) -> WorkerError:
    """The error, soon, of a sum before which the second rank fails."""
    began = time.monotonic()
    with pytest.raises(WorkerError, match=said) as caught:
        run(ranks, "fail_then_sum", [(failing, True) for failing in ("", how)])
    assert time.monotonic() - began < 20
    return caught.value


def test_ranks_that_find_no_place_are_an_error_with_what_there_is() -> None:
    said = r"(?s)2 ranks of 2 CPU each, .*found no place in 1 s: .*2 CPU.*Lower processes"
    with pytest.raises(NoPlaceError, match=said):
        start(APART.model_copy(update={"cpus": 2.0, "patience": 1.0}))


def test_a_process_that_fails_before_it_is_placed_is_not_tried_again() -> None:
    with pytest.raises(WorkerError, match="broken has ended"):
        start_ray_processes(["broken"], "broken with", APART, files={".": b"no file"})


def test_a_connection_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    """Also that of a cluster of this process's own, whose token another cluster must not be shown."""
    code = """
import os
from geo_sokoban_pipeline.config.ray import RayOptions
from geo_sokoban_pipeline.distributed.ray_cluster import connected
before = dict(os.environ)
with connected(RayOptions(), 1):
    assert "RAY_AUTH_TOKEN" in os.environ
assert dict(os.environ) == before, set(os.environ) ^ set(before)
print("as before")
"""
    (tmp_path / "connect.py").write_text(code, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    said = finish(ForkedCommand(["connect.py"], tmp_path, environment))
    assert said.splitlines()[-1:] == ["as before"], said[-2000:]
