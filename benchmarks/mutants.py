"""Mutation testing: how many small faults the tests would notice.

Draws a seeded random sample of all mutants that mutmut's operators make of the modules below, puts each alone into a
scratch copy of the checkout, and runs the test files that are nearest to its module, without their slow tests. A mutant
is noticed when a test fails or takes far longer than without it. The checkout itself is never touched. With `--again`,
the survivors of an earlier result meet the tests that were written since, and with `--slow` the slow ones too.

    make mutants MUTANTS_ARGS="--count 40 --seed 1 --only training/"
    make mutants MUTANTS_ARGS="--count 40 --seed 1 --only training/ --again mutants.json"

What no test should notice is left out: texts of errors and of the log, annotations and type aliases, `strict=` of zip.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import fnmatch
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/geo_sokoban_pipeline")
STEP = ["tests/training/test_reference_step.py", "tests/training/test_options_in_force.py"]
LOOP = ["tests/training/test_loop_wiring.py", "tests/training/test_options_in_force.py", "tests/training/test_loop.py"]
FURTHER = ["tests/training/test_seeds.py", "tests/training/test_control.py"]
# Modules, and the tests of each: the first pattern that fits counts. `{name}` is the module's own name.
NEAREST: dict[str, list[str]] = {
    "grpo/loss.py": [
        "tests/grpo/test_loss.py",
        "tests/grpo/test_log_probs.py",
        "tests/training/test_updating.py",
        *STEP,
    ],
    "grpo/scoring.py": ["tests/grpo/test_scoring.py", *STEP],
    "grpo/*.py": ["tests/grpo/test_{name}.py", "tests/grpo", *STEP],
    "training/backends/*.py": [
        "tests/training/test_optimizers.py",
        "tests/training/test_updating.py",
        "tests/training/test_worker_group.py",
        *STEP,
    ],
    "training/sft_control.py": ["tests/training/test_control.py"],
    "training/sft.py": ["tests/training/test_control.py", "tests/training/test_worker_group.py", *STEP, *LOOP],
    "training/worker*.py": ["tests/training/test_worker_jobs.py", "tests/training/test_worker_group.py"],
    "distributed/*.py": [
        "tests/distributed/test_{name}.py",
        "tests/distributed/test_ranks.py",
        "tests/training/test_worker_group.py",
    ],
    "training/runtime.py": ["tests/training/test_process.py", "tests/training/test_memory.py"],
    "training/collecting.py": ["tests/training/test_collecting.py", "tests/training/test_partial_rollouts.py", *LOOP],
    "training/checkpoint.py": [
        "tests/training/test_checkpoint_history.py",
        "tests/training/test_final_choice.py",
        *STEP,
        *LOOP,
    ],
    "training/batch.py": ["tests/grpo/test_scoring.py", *STEP],
    "training/*.py": ["tests/training/test_{name}.py", *STEP, *LOOP, *FURTHER],
    "rollout/engines/*.py": [
        "tests/rollout/engines/test_{name}.py",
        "tests/rollout/engines",
        "tests/rollout/test_options_in_force.py",
        "tests/training/test_partial_rollouts.py",
    ],
    "rollout/*.py": [
        "tests/rollout/test_{name}.py",
        "tests/rollout",
        "tests/training/test_partial_rollouts.py",
        *LOOP,
    ],
    "evaluation/audit.py": [
        "tests/test_audit_files.py",
        "tests/evaluation/test_token_parity.py",
        "tests/test_thinning.py",
        "tests/pipelines/test_audit.py",
    ],
    "evaluation/*.py": [
        "tests/evaluation/test_{name}.py",
        "tests/evaluation",
        "tests/training/test_options_in_force.py",
    ],
    "envs/metrics.py": ["tests/evaluation"],
    "envs/*/evaluation.py": ["tests/evaluation"],
    "rewards/*.py": ["tests/rewards/test_{name}.py", "tests/rewards", "tests/config/test_bounds.py"],
    "runs/storage.py": ["tests/test_storage_faults.py", "tests/datasets", "tests/training/test_updating.py"],
    "runs/own_code.py": ["tests/test_own_code.py", "tests/test_fingerprint_inputs.py"],
    "runs/fingerprint.py": [
        "tests/test_fingerprint_inputs.py",
        "tests/preflight/test_fingerprints.py",
        "tests/pipelines/test_runs.py",
    ],
}
# Whole runs of several processes, killed and continued runs: with `--slow`.
WHOLE_RUNS = [
    "tests/training/test_worker_group.py",
    "tests/training/test_reproducibility.py",
    "tests/training/test_resume.py",
    "tests/training/test_run_quality.py",
]
# They need SGLang servers.
LEFT_OUT = ["tests/rollout/engines/sglang"]
HEAVY = (
    "torch",
    "transformers",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "pandas",
    "pyarrow.parquet",
    "pytest",
)
LOGGERS = {"debug", "info", "warning", "error", "exception"}


@dataclass
class Mutant:
    """One change of a module, and what became of it: `noticed`, `survived`, or `untested` where no test is near."""

    file: str
    line: int
    diff: list[str]
    code: str
    outcome: str = ""
    seconds: float = 0.0
    tests: list[str] = field(default_factory=list)
    noticed_by: str = ""


def main() -> int:
    """Draw, run, report; returns 0 also where mutants survive."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=300, help="mutants in the sample (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--only", default="", help="beginning of the modules' paths in the package, such as training/")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tested side by side (2)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a mutant is noticed (600)")
    parser.add_argument("--unchecked", action="store_true", help="the tests are known to pass without a mutant")
    parser.add_argument("--again", type=Path, help="result of the same sample; its survivors are tested again")
    parser.add_argument("--slow", action="store_true", help="slow tests too")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="where the result is written")
    options = parser.parse_args()
    modules = [path for path in nearest_modules() if path.startswith(options.only)]
    sample, population = draw(modules, options.count, options.seed)
    print(f"{len(sample)} of {population} mutants of {len(modules)} modules, seed {options.seed}", flush=True)
    if options.again:
        take_over(sample, json.loads(options.again.read_text(encoding="utf-8"))["mutants"])
    waiting = [mutant for mutant in sample if mutant.outcome != "noticed"]
    for name in HEAVY:
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_checkout(Path(folder) / str(number)) for number in range(options.jobs)]
        used = sorted({test for mutant in waiting for test in tests_of(mutant.file)})
        # Tests that fail without any mutant would notice all of them.
        print(f"the tests without a mutant: {len(used)} files and folders", flush=True)
        if not options.unchecked and not pass_without(trees, used):
            print("Tests fail without a mutant; mend them first.", file=sys.stderr)
            return 1
        run_all(waiting, trees, options.timeout, slow=options.slow)
    report(sample, population, options)
    return 0


def nearest_modules() -> list[str]:
    """Paths of all modules with a pattern, relative to the package."""
    paths = sorted(path.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).rglob("*.py"))
    return [
        path for path in paths if any(fits(path, pattern) for pattern in NEAREST) and not path.endswith("__init__.py")
    ]


def fits(path: str, pattern: str) -> bool:
    """Whether a path fits a pattern part by part: a star stands for no slash."""
    return path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern)


def tests_of(module: str) -> list[str]:
    """Test files and folders of a module that exist, nearest first."""
    patterns = next(tests for pattern, tests in NEAREST.items() if fits(module, pattern))
    named = [test.format(name=Path(module).stem) for test in patterns]
    return [test for test in dict.fromkeys(named) if (ROOT / test).exists()]


def draw(modules: Sequence[str], count: int, seed: int) -> tuple[list[Mutant], int]:
    """A random sample of all mutants of some modules, and how many there are, but for those that are left out."""
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import create_mutations

    population = []
    for module in modules:
        source = (ROOT / PACKAGE / module).read_text(encoding="utf-8")
        tree = ast.parse(source)
        texts, names = lines_of_texts(tree), lines_of_names(tree)
        parsed, mutations, _, _ = create_mutations(module, source)
        places = MetadataWrapper(parsed, unsafe_skip_copy=True).resolve(PositionProvider)
        for mutation in mutations:
            place = places[mutation.original_node].start
            is_text = "String" in type(mutation.original_node).__name__
            before = source.splitlines()[place.line - 1][: place.column]
            if place.line in names or (is_text and place.line in texts) or before.endswith("strict="):
                continue
            if not drops_strict(mutation.original_node, mutation.mutated_node):
                population.append((module, source, parsed, mutation))
    sample = []
    for module, source, parsed, mutation in random.Random(seed).sample(population, min(count, len(population))):
        code = parsed.deep_replace(mutation.original_node, mutation.mutated_node).code
        diff = list(difflib.unified_diff(source.splitlines(), code.splitlines(), lineterm="", n=0))[2:]
        line = int(diff[0].split()[1].lstrip("-").split(",")[0]) if diff else 0
        sample.append(Mutant(module, line, diff, code))
    return sample, len(population)


def take_over(sample: Sequence[Mutant], earlier: Sequence[dict[str, Any]]) -> None:
    """Give the mutants of a sample what became of them in an earlier run.

    Raises:
        ValueError: the earlier sample was another one.
    """
    if [(one.file, one.line, one.diff) for one in sample] != [
        (old["file"], old["line"], old["diff"]) for old in earlier
    ]:
        raise ValueError("--again: the result is of another sample or other code; give its count, seed and only")
    for mutant, old in zip(sample, earlier, strict=True):
        mutant.outcome, mutant.seconds, mutant.tests = old["outcome"], old["seconds"], old["tests"]
        mutant.noticed_by = old["noticed_by"]


def drops_strict(original: Any, mutated: Any) -> bool:
    """Whether a call has `strict=True` no more."""
    values = [
        [getattr(given.value, "value", "") for given in node.args if given.keyword and given.keyword.value == "strict"]
        for node in (original, mutated)
        if hasattr(node, "func")
    ]
    return len(values) == 2 and values[0] != values[1]


def lines_of_texts(tree: ast.Module) -> set[int]:
    """Lines of errors that are raised, of assertions, and of calls of a logger."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_log = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGERS
        if isinstance(node, ast.Raise | ast.Assert) or (isinstance(node, ast.Call) and is_log):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def lines_of_names(tree: ast.Module) -> set[int]:
    """Lines of what only names something: type aliases, loggers, `__all__`, and what only type checkers read."""
    lines: set[int] = set()
    for node in tree.body:
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        is_alias = isinstance(node, ast.Assign) and (
            isinstance(node.value, ast.Subscript | ast.Name) or bool({"__all__", "logger"} & set(names))
        )
        is_variable = isinstance(node, ast.Assign) and "TypeVar" in ast.unparse(node.value)
        if is_alias or is_variable or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def copy_checkout(tree: Path) -> Path:
    """Copy what git knows or does not ignore; the environment is shared."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
    return tree


def start(tree: Path, tests: Sequence[str], *, slow: bool = False) -> int:
    """Run tests in a child of this process, which has imported what is heavy; returns the child's id."""
    if child := os.fork():
        return child
    status = 70
    try:
        os.setsid()
        os.chdir(tree)
        sink = os.open(tree / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.environ |= {
            "PYTHONPATH": str(tree / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GEO_SOKOBAN_DATA_ROOT": str(tree / "data"),
            "GEO_SOKOBAN_SHARED_DATA": str(
                (ROOT / os.environ.get("GEO_SOKOBAN_SHARED_DATA", "../shared/data")).resolve()
            ),
        }
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(tree / "src")]
        import pytest

        ignored = [f"--ignore={name}" for name in LEFT_OUT]
        chosen = [] if slow else ["-m", "not slow"]
        status = int(pytest.main(["-q", "-x", *chosen, "--tb=line", "-p", "no:xdist", *ignored, *tests]))
        package = sys.modules.get("geo_sokoban_pipeline")
        if package is not None and not str(package.__file__).startswith(str(tree)):
            status = 71
    finally:
        os._exit(status)


def pass_without(trees: Sequence[Path], tests: Sequence[str]) -> bool:
    """Whether all tests pass in unchanged trees, divided among these."""
    tests = [test for test in tests if not any(test.startswith(f"{folder}/") for folder in tests)]
    children = {start(tree, part): tree for number, tree in enumerate(trees) if (part := tests[number :: len(trees)])}
    passed = True
    for child, tree in children.items():
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            print((tree / "pytest.log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
            passed = False
    return passed


def run_all(sample: Sequence[Mutant], trees: Sequence[Path], timeout: float, *, slow: bool = False) -> None:
    """Test all mutants, one in each tree at a time."""
    running: dict[int, tuple[Mutant, Path, str, float]] = {}
    try:
        _run_all(sample, trees, timeout, running, slow)
    finally:
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)


def _run_all(
    sample: Sequence[Mutant],
    trees: Sequence[Path],
    timeout: float,
    running: dict[int, tuple[Mutant, Path, str, float]],
    slow: bool,
) -> None:
    waiting, free = list(sample), list(trees)
    done = 0
    while waiting or running:
        while waiting and free:
            mutant, tree = waiting.pop(0), free.pop()
            file = tree / PACKAGE / mutant.file
            original = file.read_text(encoding="utf-8")
            file.write_text(mutant.code, encoding="utf-8")
            mutant.tests = [*tests_of(mutant.file), *(WHOLE_RUNS if slow else [])]
            running[start(tree, mutant.tests, slow=slow)] = (mutant, tree, original, time.monotonic())
        for child in list(running):
            mutant, tree, original, began = running[child]
            mutant.seconds = round(time.monotonic() - began, 1)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                if code == 71:
                    raise RuntimeError(f"the tests in {tree} imported the package from elsewhere")
                mutant.outcome = {0: "survived", 5: "untested"}.get(code, "noticed")
                log = (tree / "pytest.log").read_text(encoding="utf-8", errors="replace").splitlines()
                mutant.noticed_by = next((row for row in log if row.startswith(("FAILED ", "ERROR "))), "")[:300]
            elif mutant.seconds > timeout:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                mutant.outcome, mutant.noticed_by = "noticed", f"more than {timeout} seconds"
            else:
                continue
            del running[child]
            (tree / PACKAGE / mutant.file).write_text(original, encoding="utf-8")
            free.append(tree)
            done += 1
            print(
                f"{done:4}/{len(sample)} {mutant.outcome} {mutant.seconds:.0f} s {mutant.file}:{mutant.line}",
                flush=True,
            )
            if mutant.outcome != "noticed":
                print(*mutant.diff[1:], sep="\n", flush=True)
        time.sleep(0.05)


def report(sample: Sequence[Mutant], population: int, options: Any) -> None:
    """Print the share and the survivors; write the JSON file."""
    noticed = sum(mutant.outcome == "noticed" for mutant in sample)
    survivors = [mutant for mutant in sample if mutant.outcome != "noticed"]
    for mutant in sorted(survivors, key=lambda one: (one.file, one.line)):
        print(f"\n{mutant.outcome}: {PACKAGE / mutant.file}:{mutant.line}", *mutant.diff[1:], sep="\n  ")
    print(f"\n{noticed} of {len(sample)} noticed, {noticed / max(1, len(sample)):.1%}")
    rows = [{name: value for name, value in asdict(mutant).items() if name != "code"} for mutant in sample]
    result = {
        "population": population,
        "sample": len(sample),
        "seed": options.seed,
        "only": options.only,
        "noticed": noticed,
        "mutants": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {options.out}")


if __name__ == "__main__":
    sys.exit(main())
