"""Gold: digests of small whole runs at a commit, which no rearrangement of the code may change.

Each combination of task, processes, sharding, rollout workers, staleness, placement and backend that the options allow
is a run of `--env=test`: all that is stored of it is hashed, but for what depends on the clock. Two commits have equal
digests, or one of them computes something else. Digests hold on one machine only: the base commit is recorded again on
each.

    python -m benchmarks.gold --of HEAD~1 --out base.json                 # twelve runs, which hold every pair of values
    python -m benchmarks.gold --of HEAD --compare base.json
    python -m benchmarks.gold --of HEAD --set all --out base.json         # every combination; goes on where it stopped

The worktree of the commit lies in a temporary folder and uses this checkout's environment.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from benchmarks.records import ROOT, write_json

AXES: dict[str, tuple[Any, ...]] = {
    "task": ("sokoban", "geo3k", "geo3k_multi_turn"),
    "processes": (1, 2),
    "sharding": ("none", "full", "hybrid"),
    "workers": (0, 1, 2),
    "staleness": (0, 1),
    "placement": ("local", "ray"),
    "backend": ("fsdp", "megatron"),
}
Combination = dict[str, Any]


def is_allowed(one: Combination) -> bool:
    """Whether the options take a combination; the reasons are in `TrainOptions`."""
    return (one["workers"] > 0 or not one["staleness"]) and not (
        one["backend"] == "megatron" and one["sharding"] == "hybrid"
    )


def list_combinations() -> list[Combination]:
    """All that the options allow."""
    every = (dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values()))
    return [one for one in every if is_allowed(one)]


def choose_pairwise(combinations: Sequence[Combination], most: int = 12) -> list[Combination]:
    """Few combinations that hold each pair of values which any combination holds; the same in every process.

    Raises:
        ValueError: no such choice of at most so many was found.
    """
    wanted = set().union(*map(pairs_of, combinations))
    for seed in range(1000):
        order = random.Random(seed).sample(combinations, len(combinations))
        missing, chosen = set(wanted), list[Combination]()
        while missing and len(chosen) < most:
            best = max(order, key=lambda one: len(missing & pairs_of(one)))
            chosen.append(best)
            missing -= pairs_of(best)
        if not missing:
            return chosen
    raise ValueError(f"no {most} combinations hold all pairs")


def pairs_of(one: Combination) -> set[tuple[tuple[str, Any], ...]]:
    """Pairs of values of a combination."""
    return set(itertools.combinations(one.items(), 2))


def main() -> int:
    """Record, or compare; 1 where a digest differs."""
    parser = argparse.ArgumentParser(prog="gold", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--of", required=True, help="commit that is run")
    parser.add_argument("--set", choices=["pairs", "all"], default="pairs", help="which combinations (pairs)")
    parser.add_argument("--out", type=Path, help="where the digests are written; runs that it holds are not repeated")
    parser.add_argument("--compare", type=Path, help="digests of another commit")
    options = parser.parse_args()
    combinations = list_combinations()
    chosen = choose_pairwise(combinations) if options.set == "pairs" else combinations
    commit = git("rev-parse", options.of)
    found = read_record(options.out, commit)
    with tempfile.TemporaryDirectory(prefix="gold-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            for number, one in enumerate(chosen):
                name = name_of(one)
                if name in found["runs"]:
                    continue
                began = time.monotonic()
                found["runs"][name] = record(one, tree, Path(folder) / str(number))
                print(f"{number + 1}/{len(chosen)} {name}: {time.monotonic() - began:.0f} s", flush=True)
                if options.out:
                    write_json(options.out, found)
        finally:
            git("worktree", "remove", "--force", str(tree))
    differences = list(compare(json.loads(options.compare.read_text()), found)) if options.compare else []
    print(*differences, sep="\n")
    print(f"{len(chosen)} runs at {commit[:7]}" + (f", {len(differences)} differences" if options.compare else ""))
    return 1 if differences else 0


def name_of(one: Combination) -> str:
    """Name of a combination in the record."""
    return " ".join(f"{axis}={value}" for axis, value in one.items())


def git(*words: str) -> str:
    """Output of a git command in the checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def read_record(path: Path | None, commit: str) -> dict[str, Any]:
    """The records of a commit so far.

    Raises:
        ValueError: the file is of another commit.
    """
    if path is None or not path.is_file():
        return {"commit": commit, "runs": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    if found["commit"] != commit:
        raise ValueError(f"--out={path}: it holds the digests of {found['commit']}; name another file.")
    return found


def record(one: Combination, tree: Path, folder: Path) -> dict[str, str]:
    """Run a combination in a worktree; digests by the path of what is stored.

    Raises:
        CalledProcessError: the run failed; its output is printed.
    """
    run = f"train_{one['task']}"
    train: dict[str, Any] = {
        "processes": one["processes"],
        "sharding": one["sharding"],
        "placement": one["placement"],
        "backend": one["backend"],
        "rollout": {"workers": one["workers"] or None},
        "loop": {"max_staleness": one["staleness"]},
    }
    if one["sharding"] == "hybrid":
        train["replicas"] = one["processes"]
    if one["backend"] == "megatron":
        train["megatron"] = {"tensor_parallel": one["processes"]}
    config = folder / "config.json"
    write_json(config, {"run": {"pipelines": run, "env": "test", "params": {run: train}}})
    environment = {
        **os.environ,
        "GEO_SOKOBAN_DATA_ROOT": str(folder / "data"),
        "KEDRO_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(tree / "src"),
    }
    command = [sys.executable, "-m", "kedro", "run", f"--config={config}"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(name_of(one), done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    done.check_returncode()
    return dict(digest_files(folder / "data"))


def digest_files(root: Path) -> Iterator[tuple[str, str]]:
    """Digests of weights and moments, columns of episodes but `timings`, metrics but `perf/*`, and evaluations."""
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        place = path.relative_to(root).as_posix()
        if path.suffix == ".safetensors":
            yield place, hash_bytes([path.read_bytes()])
        elif path.suffix == ".parquet" and "trajectories" in place:
            table = pq.read_table(path)
            for name in table.schema.names:
                if name != "timings":
                    yield f"{place}:{name}", hash_bytes([json.dumps(table[name].to_pylist(), default=repr).encode()])
        elif path.match("metrics/iter=*.json") or path.name == "eval_summary.json":
            values = {
                name: value for name, value in json.loads(path.read_text()).items() if not name.startswith("perf/")
            }
            yield place, hash_bytes([json.dumps(values, sort_keys=True).encode()])


def hash_bytes(parts: Iterable[bytes]) -> str:
    """Hexadecimal digest."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def compare(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """A line for each digest of the second record that differs in the first, and for each run that the first lacks."""
    for name, other in sorted(second["runs"].items()):
        one = first["runs"].get(name)
        if one is None:
            yield f"{name}: not recorded"
            continue
        for place in sorted(one.keys() | other.keys()):
            if one.get(place) != other.get(place):
                yield f"{name}: {place}"


if __name__ == "__main__":
    sys.exit(main())
