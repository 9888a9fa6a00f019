"""The corpus on disk: shuffled shards of blocks of rows, and a manifest, which is written last."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

MANIFEST = "manifest.json"
SCRATCH = ".spill"  # inside the output directory, so that finished shards are moved, not copied
FORMAT_VERSION = 2


@contextlib.contextmanager
def scratch_directory(directory: str | os.PathLike, overwrite: bool) -> Iterator[pathlib.Path]:
    """Creates the output directory, and an empty scratch directory in it that is removed on exit.

    Raises FileExistsError for a complete corpus unless `overwrite` is set, and OSError.
    """
    directory = pathlib.Path(directory)
    scratch = directory / SCRATCH
    if (directory / MANIFEST).exists() and not overwrite:
        raise FileExistsError(f"{directory} holds a complete corpus; replace it with --overwrite")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)  # left by an interrupted build
        scratch.mkdir()
    except OSError as error:
        raise type(error)(f"cannot write into --output={directory}: {error.strerror}") from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_shard(path: pathlib.Path, rows: np.ndarray, block_rows: int) -> dict[str, str | int]:
    """Writes records of `block_rows` rows (the last may hold fewer); returns the manifest's entry.

    Raises OSError if the disk is full.
    """
    try:
        # Compresses each record separately, so that a block can be read without its neighbors.
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for start in range(0, len(rows), block_rows):
            writer.write(rows[start : start + block_rows].tobytes())
        writer.close()
    except RuntimeError as error:  # raised by the writer when the disk is full
        raise OSError(f"cannot write {path}: {error}; free disk space and run again") from error
    return {"file": path.name, "rows": len(rows), "bytes": path.stat().st_size}


def publish(scratch: pathlib.Path, manifest: dict) -> None:
    """Moves the finished files out of `scratch`, replacing an older corpus in its parent."""
    directory = scratch.parent
    # Removed first and written last: a directory with a manifest holds a complete corpus.
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in directory.glob("*-?????-of-?????.array_record"):
        path.unlink()
    for path in sorted(scratch.iterdir()):
        os.replace(path, directory / path.name)
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(scratch / MANIFEST, directory / MANIFEST)
