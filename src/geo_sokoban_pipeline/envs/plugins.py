"""User code by name: a dotted path or a `.py` file in the parameters becomes the object it names.

A file is executed once per process and path, under a module name derived from its path, so two files of one name do
not collide. Its folder is added at the end of the Python path, so that it can import the files beside it. Errors in
finding the object name the path that was tried; errors inside the user's code pass unchanged (`own_code.explain`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from geo_sokoban_pipeline.runs.own_code import own_files, pin

# Environments of other libraries: `<library>:<name>` is what this function makes of the name.
ADAPTERS = {
    "gymnasium": "geo_sokoban_pipeline.envs.adapters.gymnasium.factory",
    "openenv": "geo_sokoban_pipeline.envs.adapters.openenv.factory",
}


class PluginError(ValueError):
    """A parameter names an object that cannot be found."""


def load_object(spec: str, default_name: str = "") -> Any:
    """The object that a parameter names.

    Args:
        spec: `package.module.name`, `path/to/file.py:name`, or `path/to/file.py` with a default name. Relative
            paths start at the working directory. Or `<library>:<name>` of `ADAPTERS`.
        default_name: name to look up if the file is given without one, such as `build_env`.

    Raises:
        PluginError: spec has none of these forms, or the module, the file or the name in it does not exist.
    """
    if adapter_of(spec) is not None:
        library, _, name = spec.partition(":")
        return load_object(ADAPTERS[library])(name)
    path, _, name = (spec, "", default_name) if spec.endswith(".py") else spec.rpartition(":")
    if path.endswith(".py"):
        return _attribute(_file_module(path, spec), name, spec)
    module, dot, name = spec.rpartition(".")
    if not dot or not all(part.isidentifier() for part in spec.split(".")):
        raise PluginError(f"{spec!r} is not the name of an object; write package.module.name or path/to/file.py:name")
    return _attribute(_module(module, spec), name, spec)


def adapter_of(spec: str) -> str | None:
    """The library of a name such as `gymnasium:<id>`; None of all others."""
    library, colon, _ = spec.partition(":")
    return library if colon and library in ADAPTERS else None


def load_module(spec: str) -> ModuleType:
    """The module of a dotted name or a `.py` file.

    Raises:
        PluginError: there is none.
    """
    return _file_module(spec, spec) if spec.endswith(".py") else _module(spec, spec)


def _module(module: str, spec: str) -> ModuleType:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only the named module itself or a parent: a missing import inside the user's code is the user's error.
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise PluginError(
                f"{spec!r}: there is no module {error.name!r}; check the spelling and the Python path"
            ) from error
        raise
    pin(found, spec)
    return found


def _file_module(path: str, spec: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise PluginError(f"{spec!r}: there is no file {file}; relative paths start at {Path.cwd()}")
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise PluginError(f"{spec!r}: {file} cannot be loaded as Python source")
    _check_names(file, spec)
    if str(file.parent) not in sys.path:
        # At the end: a file beside it must not hide a library's module from the rest of the process.
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(found)
    pin(module, str(file))
    # Registered before execution: dataclasses and pydantic look their module up there.
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_names(file: Path, spec: str) -> None:
    """Check that no other module has the name of a module that a file imports from its own folder."""
    for name, path in own_files(str(file)).items():
        module = ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        taken = getattr(sys.modules.get(module), "__file__", None)
        if path != file and isinstance(taken, str) and Path(taken).resolve() != path:
            raise PluginError(
                f"{spec!r}: it imports {path}, but {taken} already has the name {module!r}; rename {path.name}"
            )


def _attribute(module: ModuleType, name: str, spec: str) -> Any:
    if not hasattr(module, name):
        public = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:12]) or "nothing"
        raise PluginError(f"{spec!r}: {module.__name__} has no {name!r}; it defines {public}")
    return getattr(module, name)
