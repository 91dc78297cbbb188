"""Checkpoint folders on disk: sealed by a manifest, put in place in one step, and found again after a crash.

``global_step_N`` is whole wherever it stands: it is written as ``global_step_N.tmp``, every file and folder synced, and
renamed. A folder of the same name is moved to ``.old`` before and deleted after; `recover` ends what a crash cut short.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from podium.utils.errors import UserError

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"

_FORMAT = 2
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_TEMPORARY, _REPLACED = ".tmp", ".old"
_READERS = 4

Files = dict[str, dict[str, Any]]
"""``{relative path: {"bytes": size, "sha256": hex digest}}``."""


class DamagedCheckpointError(UserError):
    """A checkpoint is not as it was written; the message names the file."""


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return run_dir / f"global_step_{step}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name says it holds; None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def beside(final: Path) -> Path:
    """An empty folder to write what shall become `final`."""
    discard(final)
    folder = _temporary(final)
    folder.mkdir(parents=True)
    return folder


def discard(final: Path) -> None:
    """Removes what was written beside, as far as that can be done."""
    shutil.rmtree(_temporary(final), ignore_errors=True)


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + _TEMPORARY)


def seal(paths: Iterable[Path], base: Path) -> Files:
    """Syncs files to the disk and takes their digests, named relative to `base`."""
    return {str(path.relative_to(base)): _digest(path, sync=True) for path in paths}


def write_manifest(folder: Path, files: Files, content: Mapping[str, Any]) -> None:
    """Seals `folder`: `files` and what `content` says go to its manifest; every folder is synced."""
    text = json.dumps({"format": _FORMAT, **content, "files": dict(sorted(files.items()))}, indent=1)
    write_synced(folder / MANIFEST, text + "\n")
    digest = hashlib.sha256((text + "\n").encode()).hexdigest()
    write_synced(folder / MANIFEST_DIGEST, f"{digest}  {MANIFEST}\n")  # as sha256sum writes and checks it
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_manifest` wrote.

    Raises:
        DamagedCheckpointError: there is none, or it is not as it was written.
        UserError: another version of Podium wrote it.
    """
    path = folder / MANIFEST
    try:
        content, digest = path.read_bytes(), (folder / MANIFEST_DIGEST).read_bytes()
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise DamagedCheckpointError(f"{folder} has no {name}: it is no checkpoint, or not a whole one") from None
    if digest != f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode():
        raise DamagedCheckpointError(f"{path} is not what was written: {MANIFEST_DIGEST} differs")
    manifest = json.loads(content)
    if manifest["format"] != _FORMAT:
        raise UserError(f"{path}: checkpoint format {manifest['format']}; this version of Podium reads {_FORMAT}")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Compares every file with the manifest; returns the manifest.

    Raises:
        DamagedCheckpointError: a file is missing, or not what was written.
    """
    manifest = read_manifest(folder)
    names = list(manifest["files"])
    with ThreadPoolExecutor(_READERS) as pool:  # hashing lets go of the interpreter
        found = list(pool.map(lambda name: _digest_if_there(folder / name), names))
    for name, now in zip(names, found, strict=True):
        written = manifest["files"][name]
        if now is None:
            raise DamagedCheckpointError(f"{folder / name} is missing")
        if now["bytes"] != written["bytes"]:
            raise DamagedCheckpointError(f"{folder / name} has {now['bytes']} bytes; {written['bytes']} were written")
        if now["sha256"] != written["sha256"]:
            raise DamagedCheckpointError(f"{folder / name} is not what was written: its checksum differs")
    return manifest


def publish(temporary: Path, final: Path) -> None:
    """Puts a written folder in its place; what was there stays until the new one stands."""
    replaced = final.with_name(final.name + _REPLACED)
    if os.path.lexists(final):  # a link to a disk that is gone, too
        _delete(replaced)
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)
    with contextlib.suppress(OSError):  # `recover` tries again
        _delete(replaced)


def mark(run_dir: Path, step: int, name: str = LATEST) -> None:
    """Writes a step to a marker file, in one step."""
    temporary = run_dir / (name + _TEMPORARY)
    write_synced(temporary, f"{step}\n")
    temporary.replace(run_dir / name)
    sync_folder(run_dir)


def marked(run_dir: Path) -> int | None:
    """The step that `LATEST` names; None where there is no such file.

    Raises:
        DamagedCheckpointError: it names no step.
    """
    try:
        return int((run_dir / LATEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise DamagedCheckpointError(f"{run_dir / LATEST} names no step; write the one to go on from in it") from None


def steps(run_dir: Path) -> list[int]:
    """Steps that have a checkpoint folder, ascending."""
    if not run_dir.is_dir():
        return []
    found = (step_of(path) for path in run_dir.iterdir() if path.is_dir())
    return sorted(step for step in found if step is not None)


def recover(run_dir: Path) -> None:
    """Ends what a crash cut short: unfinished folders go; a replaced one whose successor never came comes back."""
    if not run_dir.is_dir():
        return
    for path in list(run_dir.iterdir()):
        if not path.is_dir():
            continue
        if path.name.endswith(_TEMPORARY):
            _delete(path)
        elif path.name.endswith(_REPLACED):
            final = path.with_name(path.name.removesuffix(_REPLACED))
            if final.exists():
                _delete(path)
            else:
                path.rename(final)


def prune(run_dir: Path, kept: Iterable[int]) -> None:
    """Deletes the checkpoints of all steps but `kept`; one that cannot be deleted is named on stderr."""
    for step in sorted(set(steps(run_dir)) - set(kept)):
        folder = step_folder(run_dir, step)
        # Under its own name, a folder half deleted would look like a damaged checkpoint.
        doomed = folder.with_name(folder.name + _TEMPORARY)
        try:
            _delete(doomed)
            folder.rename(doomed)
            _delete(doomed)
        except OSError as error:
            print(f"checkpoint  {folder} is no longer kept, and was not deleted: {error}", file=sys.stderr, flush=True)


def _delete(folder: Path) -> None:
    """Removes a folder where there is one.

    Of a link to one, the link alone: who moved a checkpoint to another disk decides what becomes of it there.
    """
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def require_space(folder: Path, needed: int) -> None:
    """Sees that `needed` bytes fit where `folder` is.

    Raises:
        OSError: they do not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"a checkpoint takes {_size(needed)}, and {folder} has {_size(free)} free")


def write_synced(path: Path, text: str) -> None:
    """Writes a small file, to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlast a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(path: Path, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _digest_if_there(path: Path) -> dict[str, Any] | None:
    try:
        return _digest(path)
    except FileNotFoundError:
        return None


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
