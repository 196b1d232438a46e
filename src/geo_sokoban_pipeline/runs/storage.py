"""Files appear whole or not at all: written under a temporary name, flushed, renamed; folders show by their manifest.

A manifest (`manifest.json`) is the last file of a folder and holds size and blake2b digest of every other one. So a
folder without a manifest does not exist, and a truncated file, or a foreign one that a loader of weights would look at,
is named before anything is read. Contents reach the disk before the name does, and the name before a writer returns:
what a reader has seen survives a power cut.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

MANIFEST = "manifest.json"
COMPLETE_FILE = "COMPLETE.json"  # beside the checkpoints of a loop that has reached its goal
_LOADED = (".json", ".safetensors")  # files that libraries find by their names
_HERE = -100  # AT_FDCWD of the system: relative paths begin at the working folder
_EXCHANGE = 2  # RENAME_EXCHANGE of the system
_FULL = {errno.ENOSPC, errno.EDQUOT}
_RIGHTS = {errno.EACCES, errno.EPERM}
_CLOSED = {*_RIGHTS, errno.EROFS}

Files = dict[str, dict[str, Any]]  # of a manifest: {relative name: {"bytes", "blake2b"}}


class CorruptFolderError(RuntimeError):
    """A folder's files do not match its manifest; the message names the file and the way out."""


def write_atomic(path: Path, write: Callable[[Path], object], *, flush: bool = True) -> None:
    """Call `write` with a temporary path beside `path`, flush it to disk, then rename it to `path`.

    Args:
        flush: off for files that are made again if they are torn.

    Raises:
        OSError: no space, read-only folder; `path` is then unchanged and the temporary file is gone.
    """
    with _written(path, write, flush) as temporary:
        temporary.replace(path)
        if flush:
            flush_to_disk(path.parent)


def write_once(path: Path, write: Callable[[Path], Any], holds: Callable[[Path], bool | None]) -> bool:
    """Write a file where there is none; a file that is there stays.

    Several processes may make the same file at once: the first to finish puts it in place, by a link that fails where
    there is a file already, and each of the others compares its own with it.

    Args:
        write: fills the temporary file that it is given.
        holds: whether the stored file holds what a temporary one holds; None: it is damaged, and is replaced.

    Returns:
        Whether the stored file now holds what was written; False: another one was there, and still is.

    Raises:
        OSError: no space, read-only folder; the stored file is unchanged.
    """
    with _written(path, write) as temporary:
        if not _put_first(temporary, path):
            if (same := holds(temporary)) is not None:
                return same
            temporary.replace(path)
        flush_to_disk(path.parent)
    return True


@contextmanager
def _written(path: Path, write: Callable[[Path], object], flush: bool = True) -> Iterator[Path]:
    """A temporary file beside a path, written and flushed; it is gone after the `with` block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        write(temporary)
        if flush:
            flush_to_disk(temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def _put_first(made: Path, path: Path) -> bool:
    """Give a file its name unless another one has it."""
    if path.exists():
        return False
    try:
        os.link(made, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        made.replace(path)
    return True


def to_json(value: Any) -> str:
    """Readable JSON; keys keep their order, floats round-trip exactly."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value as readable JSON, atomically."""
    text = to_json(value)
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CorruptFolderError: the text is not JSON; the message names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptFolderError(f"{path} is not readable JSON ({error}). Restore it or delete it.") from error


def find_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file."""
    return cast("dict[str, Any]", read_json(path)) if path.is_file() else None


def file_digest(path: Path) -> str:
    """Hexadecimal blake2b digest (128 bits) of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def partition(iteration: int) -> str:
    """Partition of an iteration, the inverse of `iteration_of`."""
    return f"iter={iteration:05d}"


def iteration_of(name: str) -> int | None:
    """Iteration of `iter=00012`, `iter=00012/part-000` or `iter=00012.json`; None for names that are not ours."""
    number = name.split("/", maxsplit=1)[0].removeprefix("iter=").removesuffix(".json")
    return int(number) if name.startswith("iter=") and number.isdigit() else None


@dataclass(frozen=True)
class Filled:
    """Result of a folder's writer that has taken digests while it wrote.

    Attributes:
        entries: of the manifest, beside its files.
        files: those whose digests are known; all others are read once more.
    """

    entries: dict[str, Any]
    files: Files


@dataclass(frozen=True)
class Rewind:
    """Saved in place of data by iteration: go back to where `after` is the last iteration (−1: nothing is left).

    Half-written files of killed processes go too.
    """

    after: int


@dataclass(frozen=True)
class Thin:
    """Saved in place of training episodes: thin those of the iterations `first` to `last` (`trajectories/thinning.py`).

    A file is thinned once; one that is thinned already stays as it is.
    """

    first: int
    last: int
    tokens: bool
    episodes: int
    images: Literal["file", "run"]


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that is to be stored.

    Attributes:
        write: fills the folder it is given and returns the manifest's own entries.
        keep: iterations whose checkpoints stay once this one is sealed; None: all.
    """

    write: Callable[[Path], dict[str, Any] | Filled]
    keep: Sequence[int] | None = None


@dataclass(frozen=True)
class Complete:
    """Saved in place of a checkpoint: the loop has reached its goal of so many iterations."""

    iterations: int


def write_folder(folder: Path, write: Callable[[Path], dict[str, Any] | Filled]) -> dict[str, Any]:
    """Fill a temporary folder beside `folder`, seal it with a manifest, then rename it to `folder`.

    Args:
        folder: final place; an existing folder there is replaced.
        write: fills the folder it is given and returns the manifest's own entries (JSON values).

    Returns:
        The manifest: the entries plus `files`, {relative name: {"bytes", "blake2b"}}.

    Raises:
        CorruptFolderError: a file has another size than its writer has recorded.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(folder)
    temporary.mkdir()
    try:
        written = write(temporary)
        filled = written if isinstance(written, Filled) else Filled(written, {})
        manifest = {**filled.entries, "files": describe_files(temporary, filled.files)}
        for path in temporary.rglob("*"):
            flush_to_disk(path)
        write_json(temporary / MANIFEST, manifest)
        _put_in_place(temporary, folder)
        flush_to_disk(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def flush_to_disk(path: Path) -> None:
    """Have a file's content, or the names in a folder, on disk before anything else happens."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems flush no folders; all of them flush files.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)


def exchange_folders(first: Path, second: Path) -> bool:
    """Give two folders each other's name in one step; False where the system or its file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0


def _put_in_place(made: Path, folder: Path) -> None:
    """Give a folder its name. The folder that had it before has the temporary name then, or is gone.

    Where folders cannot be exchanged the old one is put aside first, and back again if that fails: a process that is
    killed between the two steps leaves no folder.
    """
    if not folder.exists():
        made.replace(folder)
        return
    if exchange_folders(made, folder):
        return
    old = made.with_name(made.name.removesuffix(".tmp") + ".old.tmp")
    folder.replace(old)
    try:
        made.replace(folder)
    except OSError:
        old.replace(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def describe_files(folder: Path, known: Mapping[str, Mapping[str, Any]] | None = None) -> Files:
    """Size in bytes and digest of every file below a folder but its manifest, by relative name, sorted.

    Args:
        known: sizes and digests that the writers of files have recorded; these files are not read.

    Raises:
        CorruptFolderError: a file has another size than its writer has recorded.
    """
    found: Files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        recorded = dict((known or {}).get(name) or {"bytes": size, "blake2b": file_digest(path)})
        if recorded["bytes"] != size:
            raise CorruptFolderError(f"{path} has {size} bytes, but {recorded['bytes']} were written.")
        found[name] = recorded
    return found


def read_manifest(folder: Path, *, verify: bool = True) -> dict[str, Any] | None:
    """Manifest of a folder, or None where there is none (the folder then counts as absent).

    Args:
        verify: compare size and digest of every listed file.

    Raises:
        CorruptFolderError: a listed file is missing, truncated or altered, or weights or settings lie there that are
            not listed; the message names the file.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CorruptFolderError(f"{path} is not a manifest of this project: it has no `files`. Delete {folder}.")
    if verify:
        verify_files(folder, manifest["files"])
    return manifest


def verify_files(folder: Path, files: Files) -> None:
    """Compare a folder's files with their recorded sizes and digests.

    Raises:
        CorruptFolderError: as in `read_manifest`.
    """
    damaged = find_other_sizes(folder, files) or [
        f"{folder / name} differs from its manifest. It was changed after it was written; delete {folder} to have it "
        "made again."
        for name, expected in files.items()
        if file_digest(folder / name) != expected["blake2b"]
    ]
    if damaged:
        raise CorruptFolderError(damaged[0])
    for path in sorted(folder.rglob("*")):
        if path.suffix in _LOADED and path.name != MANIFEST and path.relative_to(folder).as_posix() not in files:
            raise CorruptFolderError(f"{path} is not listed in {folder / MANIFEST}. Take it away: it could be loaded.")


def find_other_sizes(folder: Path, files: Files) -> list[str]:
    """Files that are missing in a folder, or have other sizes than recorded: one text each, with the way out."""
    found = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing but listed in {folder / MANIFEST}. Delete {folder}.")
        elif (size := path.stat().st_size) != expected["bytes"]:
            found.append(
                f"{path} differs from its manifest ({size} bytes, {expected['bytes']} recorded). "
                f"It was truncated or changed after it was written; delete {folder} to have it made again."
            )
    return found


def remove_folder(folder: Path) -> None:
    """Remove a folder so that it never shows half-removed: its manifest goes first. No error if it is absent."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_temporaries(folder: Path) -> None:
    """Remove half-written files of killed processes in a folder and below; no process may be writing there."""
    for path in list(folder.rglob(".*.tmp")):
        with suppress(OSError):
            remove_entry(path)


def remove_entry(path: Path) -> None:
    """Remove a file, link or folder; the target of a link stays. No error if it is absent."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def nearest_folder(path: Path) -> Path:
    """The path itself, or the nearest existing folder above it."""
    # Not Path.is_dir: it raises for names that the system does not take.
    while not os.path.isdir(path) and path != path.parent:
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Free bytes on the file system of a path, which need not exist."""
    return shutil.disk_usage(nearest_folder(path)).free


def held_bytes(folders: Iterable[Path]) -> int:
    """Bytes that deleting folders frees: a file with further hard links elsewhere frees none."""
    links: dict[tuple[int, int], int] = {}
    found = 0
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        status = path.stat()
        key = status.st_dev, status.st_ino
        links[key] = links.get(key, 0) + 1
        found += status.st_size if links[key] == status.st_nlink else 0
    return found


class StorageError(OSError):
    """The disk is full or the folder read-only; the message names the path and the bytes needed."""


@contextmanager
def explain_storage_errors(path: Path, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Context in which "no space" and "read-only" become a `StorageError`.

    Errors about other places pass: a process may lack rights to memory, sockets or other processes, too.

    Args:
        path: what is being written; temporary files lie beside it.
        needed: returns an estimate of its bytes, called only after an error; None: unknown.
    """
    try:
        yield
    except StorageError:
        raise
    except BaseException as error:
        if (number := _storage_errno(error, path.parent.absolute())) is None:
            raise
        raise StorageError(number, _explain(path, number, needed)) from error


def _storage_errno(error: BaseException, folder: Path) -> int | None:
    number, text = getattr(error, "errno", None), str(error)
    files = (getattr(error, name, None) for name in ("filename", "filename2"))
    named = [Path(os.fsdecode(name)).absolute() for name in files if isinstance(name, str | bytes)]
    # A folder above it is one that was to be made.
    inside = [place.is_relative_to(folder) or folder.is_relative_to(place) for place in named]
    if number in _FULL | _CLOSED | {errno.EFBIG}:
        # Writing to an open file names none; rights are checked when it is opened, by a name in the error or its text.
        is_here = any(inside) if inside else number not in _RIGHTS or str(folder) in text
        return int(number) if is_here else None
    # Libraries that write for us have error types without a number; safetensors prints Rust's name of the error.
    if "No space left on device" in text or "StorageFull" in text:
        return errno.ENOSPC
    return errno.EROFS if "Read-only file system" in text else None


def _explain(path: Path, number: int, needed: Callable[[], int | None]) -> str:
    after = "what was committed before stays readable, and the same command continues from it (without fresh=true)"
    if number in _CLOSED:
        return f"{path}: no right to write ({os.strerror(number)}). Allow writing or move data_root; {after}"
    wanted = needed()
    amount = "" if wanted is None else f", about {wanted:,} bytes needed"
    if number in _FULL:
        return f"{path}: disk full{amount}, {free_bytes(path):,} free. Free space or move data_root; {after}"
    return f"{path}: no file may be so large here{amount}. Raise the limit (ulimit -f); {after}"
