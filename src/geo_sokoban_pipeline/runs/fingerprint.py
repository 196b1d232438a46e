"""Code of the user's behind a parameter: which files it is, what is in them, and where in them an error arose.

A run depends on what these files do, so their hashes are part of its fingerprint. Imports are followed without running
anything, and only to files of the same folder tree: libraries have versions, and data files are not looked at.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from geo_sokoban_pipeline.config.grpo import TrainOptions
from geo_sokoban_pipeline.config.policy import PolicyOptions
from geo_sokoban_pipeline.config.server import HASHED, hash_secret
from geo_sokoban_pipeline.seeding import content_hash

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")})
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
# Set on a module by `pin`: what its files held when it was loaded, which is what this process runs.
_PINNED = "__own_code__"


def own_files(spec: str) -> dict[str, Path]:
    """Files of the code that a parameter names, by their path below the folder of the first one, which comes first.

    Args:
        spec: as `envs.plugins.load_object` takes it.

    Returns:
        The named file and what it imports from its own folder tree, directly or not. Nothing for code of this project,
        for built-in code, and for what does not exist.
    """
    path = spec.rpartition(":")[0] or spec
    if path.endswith(".py"):
        file = Path(path).expanduser().resolve()
        return _follow([file], file.parent, None) if file.is_file() and not _is_project(file) else {}
    module = spec.rpartition(".")[0]
    top = module.partition(".")[0]
    if not top or top == _PACKAGE.name:
        return {}
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return {}
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return {}
    file = Path(found.origin).resolve()
    if _is_standard(file):
        return {}
    is_package = file.name == "__init__.py"
    root = file.parents[module.count(".") + is_package]
    # Beside an installed package lie others that have nothing to do with it.
    limit = top if _is_library(file) else None
    return _follow([file, *_modules(root, module.split("."), limit)], root, limit)


def hash_own_code(spec: str) -> dict[str, str]:
    """Content hashes of `own_files`: as they were loaded where this process has loaded them, else as they are now."""
    files = own_files(spec)
    if not files:
        return {}
    module = _loaded(next(iter(files.values())))
    if module is not None:
        pinned: Mapping[Path, tuple[str, str]] = vars(module)[_PINNED]
        return dict(pinned.values())
    return {name: _digest(file) for name, file in files.items()}


def pin(module: ModuleType, spec: str) -> None:
    """Note on a module what its files hold, so that the fingerprint tells what was loaded, not what was saved since."""
    if not hasattr(module, _PINNED):
        setattr(module, _PINNED, {file: (name, _digest(file)) for name, file in own_files(spec).items()})


def forget_edited() -> None:
    """Make modules whose files have changed since they were loaded be loaded again: for commands of one process."""
    for module in list(sys.modules.values()):
        pinned = vars(module).get(_PINNED) if isinstance(module, ModuleType) else None
        if pinned and any(_digest(file) != digest for file, (_, digest) in pinned.items()):
            for name, other in list(sys.modules.items()):
                if _file_of(other) in pinned:
                    del sys.modules[name]
            linecache.checkcache()


def explain(error: BaseException) -> str:
    """An error in one line: its class, its text, and the last line of the user's code in its traceback, if any."""
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{where(error)}"


def where(error: BaseException) -> str:
    """`, in file.py, line 3: the line`, the last one of the user's code in an error's traceback; empty without any."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f", in {_shown(Path(error.filename))}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f", in {_shown(Path(last.filename))}, line {last.lineno}" + (f": {last.line}" if last.line else "")


def _follow(files: list[Path], root: Path, top: str | None) -> dict[str, Path]:
    """Files and what they import below `root`, by relative path; with `top`, only names that begin with it."""
    found: dict[str, Path] = {}
    waiting = [*files]
    while waiting:
        path = waiting.pop(0)
        name = path.relative_to(root).as_posix()
        if name not in found:
            found[name] = path
            waiting += _imported(path, root, top)
    return {name: found[name] for name in (next(iter(found)), *sorted([*found][1:]))}


def _imported(file: Path, root: Path, top: str | None) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever loads the file says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules(root, alias.name.split("."), top)
        elif isinstance(node, ast.ImportFrom):
            base, words = root, node.module.split(".") if node.module else []
            if node.level:
                if len(file.relative_to(root).parts) < node.level:
                    continue
                base = file.parents[node.level - 1]
            names = [[*words, alias.name] for alias in node.names]
            for parts in (words, *names):
                yield from _modules(base, parts, None if node.level else top)


def _modules(base: Path, parts: list[str], top: str | None) -> Iterator[Path]:
    """Files that `import a.b.c` runs: the packages on the way and the module, as far as they lie below `base`."""
    if not parts or (top is not None and parts[0] != top):
        return
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            resolved = file.resolve()
            if resolved.is_file() and resolved.is_relative_to(base) and not _is_project(resolved):
                yield resolved
                break


def _digest(file: Path) -> str:
    try:
        return content_hash(file.read_bytes())[:12]
    except OSError:
        return "missing"


def _loaded(file: Path) -> ModuleType | None:
    """The module that `pin` was called with for a file."""
    pinned = (module for module in list(sys.modules.values()) if isinstance(module, ModuleType))
    return next((module for module in pinned if _PINNED in vars(module) and _file_of(module) == file), None)


def _file_of(module: object) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def _is_own(filename: str) -> bool:
    file = Path(filename)
    if not file.is_file() or _is_project(file.resolve()) or _is_standard(file.resolve()):
        return False
    return not _is_library(file.resolve()) or _loaded(file.resolve()) is not None


def _is_project(file: Path) -> bool:
    return file.is_relative_to(_PACKAGE)


def _is_library(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _LIBRARIES)


def _is_standard(file: Path) -> bool:
    return file.is_relative_to(_STANDARD) and not _is_library(file)


def _shown(file: Path) -> str:
    """A path as people know it: from the working directory where it lies below it."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


# Fingerprints: what a stored result depends on, as a flat table that can be hashed, compared and shown.


Fingerprint = dict[str, Any]
_SHOWN = 12
# What of the rollout's options shapes a demonstration.
_DEMONSTRATED = {"max_turns", "preset", "rules", "max_context_tokens", "max_response_tokens"}

# At these values nothing is computed otherwise than without the name, so a run that was stored without it goes on.
_OPTIONAL = {"rollout.over_sampling": 1.0, "rollout.partial": False, "grpo.mixed_versions": "drop"}

# What is computed together, and what ends a run that goes wrong: no result depends on it beyond the order of sums, so a
# run that was out of memory goes on with smaller sizes.
_SIZES = frozenset({"optimizer.logit_chunk", "optimizer.max_tokens", "warm_start.max_tokens"})
_LIMITS = frozenset({"optimizer.max_skipped", "rollout.max_failed_share"})
# These also decide when a reply is there, and with over-sampling that decides which groups are aborted.
_PLAYED_SIZES = frozenset(
    {"rollout.draft_share", "rollout.max_conversations", "rollout.prefill_tokens", "rollout.reuse_cache"}
)
_VARIABLES = "rollout.server.environment."  # values may be secrets
_CODE = ":"  # between the option that names own code and a file of it, which no name of an option holds


class FingerprintError(RuntimeError):
    """Stored results were made with other parameters or inputs."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    """Nested mappings as one flat one with dotted names; lists and scalars are leaves, as JSON values.

    An empty mapping leaves nothing, so that a difference is always in the names that one side has.
    """
    flat: Fingerprint = {}
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            flat |= flatten(value, path)
        else:
            flat[path] = json.loads(json.dumps(value))
    return flat


def differences(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """One line per name that differs, sorted; empty where both are equal but for sizes that change no result."""
    lines = []
    stored, current = hide_secrets(stored), hide_secrets(current)
    free = _sizes(stored, current) | _LIMITS
    for name in sorted({*stored, *current} - free):
        before, now = stored.get(name, "(absent)"), current.get(name, "(absent)")
        if before != now:
            lines.append(f"{_described(name)}: stored {_short(before)}, now {_short(now)}")
    return lines


def hide_secrets(fingerprint: Fingerprint) -> Fingerprint:
    """The same with hashes in place of the servers' variables; a stored value that is no hash is hashed."""
    return {
        name: hash_secret(name.removeprefix(_VARIABLES), value)
        if name.startswith(_VARIABLES) and isinstance(value, str) and not value.startswith(HASHED)
        else value
        for name, value in fingerprint.items()
    }


def size_differences(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """One line per size that differs, sorted: a run continues with it, but not to the last bit as without it."""
    both = sorted(name for name in _sizes(stored, current) if name in stored and name in current)
    return [f"{name}: stored {stored[name]}, now {current[name]}" for name in both if stored[name] != current[name]]


def _sizes(*fingerprints: Fingerprint) -> frozenset[str]:
    over_sampling = any(one.get("rollout.over_sampling", 1.0) > 1 for one in fingerprints)
    return _SIZES if over_sampling else _SIZES | _PLAYED_SIZES


def check_fingerprint(what: str, stored: Fingerprint, current: Fingerprint) -> None:
    """Stop unless stored results were made with the current parameters and inputs.

    Raises:
        FingerprintError: with the differences and the two ways out.
    """
    lines = differences(stored, current)
    if lines:
        raise FingerprintError(describe_differences(what, lines))


def describe_differences(what: str, lines: Sequence[str]) -> str:
    """What a `FingerprintError` says: whose settings differ, in which lines, and the two ways out."""
    shown = "\n  ".join([*lines[:_SHOWN], *([f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])])
    return (
        f"{what} of this run id already exists with different settings:\n  {shown}\n"
        "Give the new settings a run of their own with --params run_id=<new>, or start over with --params fresh=true."
    )


def policy_parameters(options: PolicyOptions, seed: int) -> Fingerprint:
    """Parameters that the starting weights depend on; the seed only where the project makes them."""
    chosen = options.model_dump(mode="json", exclude=set() if options.source == "tiny" else {"tiny"})
    return flatten({"policy": chosen, **({"seed": seed} if options.source == "tiny" else {})})


def warm_start_parameters(options: TrainOptions, seed: int, data: Mapping[str, Any]) -> Fingerprint:
    """Parameters that the warm-start policy depends on."""
    rollout = options.rollout.model_dump(mode="json", include=_DEMONSTRATED)
    values = options.model_dump(mode="json", include={"task", "policy", "env"})
    values["warm_start"] = _imitation(options)
    named = {"env.factory": options.env.factory}
    if options.warm_start.steps:  # without one, nobody is imitated
        named["warm_start.teacher.factory"] = options.warm_start.teacher.factory
    return {**flatten({**values, "rollout": rollout, "seed": seed, "data": dict(data)}), **_own_code(named)}


def loop_parameters(options: TrainOptions, seed: int, data: Mapping[str, Any]) -> Fingerprint:
    """Parameters that the loop and its validations depend on; its length, saving, threads and processes are not."""
    apart = {"loop", "evaluation", "threads", "processes", "placement", "warm_start"}
    values = options.model_dump(mode="json", exclude=apart)
    values["rollout"] = _playing(options)
    values["warm_start"] = _imitation(options)
    values["loop"] = options.loop.model_dump(mode="json", include={"eval_interval", "eval_prompts"})
    values["evaluation"] = {"sampling": options.evaluation_sampling.model_dump(mode="json")}
    named = {
        "env.factory": options.env.factory,
        "reward.function": options.reward.function,
        "rollout.function": options.rollout.function,
    }
    flat = flatten({**values, "seed": seed, "data": dict(data)}) | _own_code(named)
    return {name: value for name, value in flat.items() if name not in _OPTIONAL or value != _OPTIONAL[name]}


def _own_code(named: Mapping[str, str]) -> Fingerprint:
    """Hash of each file of own code, by the option that names it and the file; nothing of this project's own code."""
    hashes = ((option, hash_own_code(spec)) for option, spec in named.items())
    return {f"{option}{_CODE}{file}": digest for option, files in hashes for file, digest in files.items()}


def _described(name: str) -> str:
    option, mark, file = name.partition(_CODE)
    return f"{option}, code in {file}" if mark else name


def _playing(options: TrainOptions) -> dict[str, Any]:
    """Options of the rollout; of servers only what replies depend on, and nothing where there are none."""
    values = options.rollout.model_dump(mode="json", exclude={"server"})
    if options.rollout.engine == "sglang":
        values["server"] = options.rollout.server.shaping
    return values


def _imitation(options: TrainOptions) -> dict[str, Any]:
    """Options of the warm start without how often it is looked at, unless that decides when it stops."""
    looks = {"play_every"} | ({"validate_every"} if options.warm_start.stop_below is None else set())
    return options.warm_start.model_dump(mode="json", exclude=looks)


def hash_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Content hash of prompts, in their order: every column, because an environment is built from the whole row."""
    return content_hash(*map(_row_text, rows))


def _row_text(row: Mapping[str, Any]) -> str:
    return orjson.dumps(dict(row), default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()


def hash_files(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Hash of a manifest's files."""
    return content_hash(*(f"{name}:{files[name]['blake2b']}" for name in sorted(files)))


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "…"
