"""Mutation testing: how many small faults the tests would notice.

The tests run once under coverage, which says which of them execute which line, and how long each takes. Then a seeded
random sample is drawn of all mutants that mutmut's operators make of the modules below. Each is put alone into a
scratch copy of the checkout and meets the tests that execute its statement: first those in files with the module's
name, then the shortest ones, up to a budget of seconds. It is noticed when a test fails or takes far longer than
without it. The checkout itself is never touched. With `--again`, the survivors of an earlier result meet the tests that
were written since; with `--slow`, slow tests count, too.

    make mutants MUTANTS_ARGS="--count 40 --seed 1 --only training/"
    make mutants MUTANTS_ARGS="--count 40 --seed 1 --only training/ --again mutants.json --budget 600"

Changes that no test should notice are left out: texts of errors and of the log, annotations and type aliases,
`strict=` of zip.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/geo_sokoban_pipeline")
# Modules whose mutants are drawn: what computes results, and what keeps them.
MODULES = (
    "grpo/*.py",
    "training/*.py",
    "training/backends/*.py",
    "distributed/*.py",
    "rollout/*.py",
    "rollout/engines/*.py",
    "evaluation/*.py",
    "envs/metrics.py",
    "envs/*/evaluation.py",
    "rewards/*.py",
    "runs/storage.py",
    "runs/own_code.py",
    "runs/fingerprint.py",
)
# They need SGLang servers, or look at documents alone.
LEFT_OUT = ("tests/rollout/engines/sglang", "tests/docs")
HEAVY = (
    "torch",
    "transformers",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "pandas",
    "pyarrow.parquet",
)
LOGGERS = {"debug", "info", "warning", "error", "exception"}


@dataclass
class Mutant:
    """One change of a module, and what became of it: `noticed`, `survived`, or `untested` where no test executes it."""

    file: str
    line: int
    diff: list[str]
    code: str
    outcome: str = ""
    seconds: float = 0.0
    tests: list[str] = field(default_factory=list)
    noticed_by: str = ""


@dataclass
class Coverage:
    """Which tests execute which line.

    Attributes:
        seconds: of each test, while it was measured.
        lines: tests by module and line; lines executed at the import of a module belong to no test.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def tests_of(self, mutant: Mutant, budget: float) -> tuple[list[str], float]:
        """Tests that execute the statement of a mutant, those most likely to notice it first, and their seconds.

        Others that execute the module follow: what its import executes (constants, decorators) belongs to whichever
        test imported it first.

        Args:
            budget: seconds that they take together at most, but for the first one.
        """
        lines = self.lines.get(mutant.file, {})
        statement = statement_at((ROOT / PACKAGE / mutant.file).read_text(encoding="utf-8"), mutant.line)
        own = {test for line in statement for test in lines.get(line, ())}
        found = {test for tests in lines.values() for test in tests}
        name, chosen, total = Path(mutant.file).stem, list[str](), 0.0
        for test in sorted(
            found, key=lambda test: (test not in own, name not in test.partition("::")[0], self.seconds[test], test)
        ):
            if not chosen or total + self.seconds[test] <= budget:
                chosen.append(test)
                total += self.seconds[test]
        return chosen, total


def main() -> int:
    """Measure, draw, run, report; returns 0 also where mutants survive."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=300, help="mutants in the sample (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--only", default="", help="beginning of the modules' paths in the package, such as training/")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tested side by side (2)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests that a mutant meets at most (60)")
    parser.add_argument("--again", type=Path, help="result of the same sample; its survivors are tested again")
    parser.add_argument("--slow", action="store_true", help="slow tests too")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="where the result is written")
    options = parser.parse_args()
    modules = [path for path in list_modules() if path.startswith(options.only)]
    sample, population = draw(modules, options.count, options.seed)
    print(f"{len(sample)} of {population} mutants of {len(modules)} modules, seed {options.seed}", flush=True)
    if options.again:
        take_over(sample, json.loads(options.again.read_text(encoding="utf-8"))["mutants"])
    waiting = [mutant for mutant in sample if mutant.outcome != "noticed"]
    for name in HEAVY:
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_checkout(Path(folder) / str(number)) for number in range(options.jobs)]
        print("the tests without a mutant, under coverage", flush=True)
        coverage = measure(trees, slow=options.slow)
        if coverage is None:  # they would notice all mutants
            print("Tests fail without a mutant; mend them first.", file=sys.stderr)
            return 1
        run_all(waiting, trees, coverage, options.budget)
    report(sample, population, options)
    return 0


def list_modules() -> list[str]:
    """Paths of all modules whose mutants are drawn, relative to the package."""
    paths = {path for pattern in MODULES for path in (ROOT / PACKAGE).glob(pattern) if path.name != "__init__.py"}
    return sorted(path.relative_to(ROOT / PACKAGE).as_posix() for path in paths)


def statement_at(source: str, line: int) -> range:
    """Lines of the innermost statement that holds a line; of one with a body, those before the body."""
    found = range(line, line + 1)
    least = len(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            if node.lineno <= line <= end and end - node.lineno < least:
                found, least = range(node.lineno, end + 1), end - node.lineno
    return found


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


class Recorder:
    """Plugin of pytest: notes which lines of the package each test executes, and its seconds."""

    def __init__(self, tree: Path) -> None:
        import coverage

        settings = tree / "coverage.ini"
        settings.write_text(
            f"[run]\nsource={tree / PACKAGE}\ndata_file={tree / '.lines'}\nparallel=true\n"
            "concurrency=thread\npatch=\n fork\n _exit\n"
        )
        self._times = tree / "times.json"
        self._seconds: dict[str, float] = {}
        self._coverage = coverage.Coverage(config_file=str(settings))
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count a test, its fixtures included."""
        self._coverage.switch_context(item.nodeid)
        began = time.perf_counter()
        outcome = yield
        self._seconds[item.nodeid] = time.perf_counter() - began
        self._coverage.switch_context("")
        return outcome

    def pytest_unconfigure(self) -> None:
        """Write what was noted."""
        self._coverage.stop()
        self._coverage.save()
        self._times.write_text(json.dumps(self._seconds))


def start(tree: Path, words: Sequence[str], *, recorded: bool = False) -> int:
    """Run pytest in a child of this process, which has imported what is heavy; returns the child's id."""
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
        plugins = [Recorder(tree)] if recorded else []
        status = int(pytest.main(["-q", "--tb=line", "-p", "no:xdist", *words], plugins))
        package = sys.modules.get("geo_sokoban_pipeline")
        if package is not None and not str(package.__file__).startswith(str(tree)):
            status = 71
    finally:
        os._exit(status)


def measure(trees: Sequence[Path], *, slow: bool) -> Coverage | None:
    """Run the tests in unchanged trees, divided among these; None: some fail."""
    from coverage import Coverage as Files

    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    files = [file for file in files if not file.startswith(LEFT_OUT)]
    chosen = [] if slow else ["-m", "not slow"]
    children = {
        start(tree, [*chosen, *files[number :: len(trees)]], recorded=True): tree for number, tree in enumerate(trees)
    }
    passed, found = True, Coverage()
    for child, tree in children.items():
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            print((tree / "pytest.log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
            passed = False
            continue
        found.seconds |= json.loads((tree / "times.json").read_text())
        parts = Files(data_file=str(tree / ".lines"), config_file=False)
        parts.combine([str(tree)])
        data = parts.get_data()
        for path in data.measured_files():
            module = Path(path).relative_to(tree / PACKAGE).as_posix()
            for line, tests in data.contexts_by_lineno(path).items():
                found.lines[module][line] += [test for test in tests if test in found.seconds]
    return found if passed else None


def run_all(sample: Sequence[Mutant], trees: Sequence[Path], coverage: Coverage, budget: float) -> None:
    """Test all mutants, one in each tree at a time."""
    running: dict[int, tuple[Mutant, Path, float, float]] = {}
    waiting, free = list(sample), list(trees)
    try:
        while waiting or running:
            while waiting and free:
                mutant = waiting.pop(0)
                mutant.tests, seconds = coverage.tests_of(mutant, budget)
                if not mutant.tests:
                    mutant.outcome = "untested"
                    continue
                tree = free.pop()
                (tree / PACKAGE / mutant.file).write_text(mutant.code, encoding="utf-8")
                running[start(tree, ["-x", *mutant.tests])] = (mutant, tree, time.monotonic(), 60 + 3 * seconds)
            for child in list(running):
                mutant, tree, began, limit = running[child]
                mutant.seconds = round(time.monotonic() - began, 1)
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended and mutant.seconds <= limit:
                    continue
                kill_session(child)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    if code == 71:
                        raise RuntimeError(f"the tests in {tree} imported the package from elsewhere")
                    mutant.outcome = {0: "survived", 5: "untested"}.get(code, "noticed")
                    log = (tree / "pytest.log").read_text(encoding="utf-8", errors="replace").splitlines()
                    failed = (row for row in log if row.startswith(("FAILED ", "ERROR ")))
                    mutant.noticed_by = next(failed, "" if code == 0 else f"exit code {code}")[:300]
                else:
                    os.waitpid(child, 0)
                    mutant.outcome, mutant.noticed_by = "noticed", f"more than {limit:.0f} seconds"
                del running[child]
                shutil.copy2(ROOT / PACKAGE / mutant.file, tree / PACKAGE / mutant.file)
                free.append(tree)
                print(
                    f"{sum(bool(one.outcome) for one in sample):4}/{len(sample)} {mutant.outcome} "
                    f"{mutant.seconds:.0f} s ({len(mutant.tests)} tests) "
                    f"{mutant.file}:{mutant.line} {mutant.noticed_by[:100]}",
                    flush=True,
                )
                if mutant.outcome != "noticed":
                    print(*mutant.diff[1:], sep="\n", flush=True)
            time.sleep(0.05)
    finally:
        for child in running:
            kill_session(child)


def kill_session(leader: int) -> None:
    """Kill a child and all that it has started: a fault may leave processes that wait for ever."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(leader).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == leader:
                process.kill()


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
