"""The user's own code that a parameter names: its files, their hashes, and the line where an error arose.

A run depends on these files, so their hashes are part of its fingerprint. Imports are followed without running any
code, and only within the folder tree of the first file: libraries have versions, and data files are not looked at.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from geo_sokoban_pipeline.seeding import content_hash

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = {
    *(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")),
    *(Path(entry).resolve() for entry in sys.path if "site-packages" in entry),
}
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
    if not (files := own_files(spec)):
        return {}
    if (module := _loaded(next(iter(files.values())))) is not None:
        pinned: Mapping[Path, tuple[str, str]] = vars(module)[_PINNED]
        return dict(pinned.values())
    return {name: _digest(file) for name, file in files.items()}


def pin(module: ModuleType, spec: str) -> None:
    """Store the hashes of a module's files on it: the fingerprint needs the loaded code, not what was saved since."""
    if not hasattr(module, _PINNED):
        setattr(module, _PINNED, {file: (name, _digest(file)) for name, file in own_files(spec).items()})


def forget_edited() -> None:
    """Unload modules whose files have changed since they were loaded, for the next command of this process."""
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
    for last in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own(last.filename):
            return f", in {_shown(Path(last.filename))}, line {last.lineno}" + (f": {last.line}" if last.line else "")
    return ""


def where_defined(function: object) -> str:
    """`, in file.py, line 3` of a function of the user's code; empty for other code."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return (
        f", in {_shown(Path(code.co_filename))}, line {code.co_firstlineno}"
        if code and is_own(code.co_filename)
        else ""
    )


def _follow(files: list[Path], root: Path, top: str | None) -> dict[str, Path]:
    """Files and what they import below `root`, by relative path; with `top`, only names that begin with it."""
    found: dict[str, Path] = {}
    waiting = [*files]
    while waiting:
        path = waiting.pop(0)
        if (name := path.relative_to(root).as_posix()) not in found:
            found[name] = path
            waiting += _imported(path, root, top)
    return {name: found[name] for name in (next(iter(found)), *sorted([*found][1:]))}


def _imported(file: Path, root: Path, top: str | None) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # loading the file raises it again, with a message
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


def is_own(filename: str) -> bool:
    """Whether a file is neither of this package nor of an installed library."""
    file = Path(filename).resolve()
    if not Path(filename).is_file() or _is_project(file) or _is_standard(file):
        return False
    return not _is_library(file) or _loaded(file) is not None


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
