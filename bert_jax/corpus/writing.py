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
FORMAT_VERSION = 1
# Compresses each record alone, so that a block can be read without its neighbors.
WRITER_OPTIONS = "group_size:1"


def shard_name(split: str, index: int, num_shards: int) -> str:
    return f"{split}-{index:05d}-of-{num_shards:05d}.array_record"


def spill_path(shard: pathlib.Path) -> pathlib.Path:
    """Returns the file that collects the rows of `shard` until they are shuffled."""
    return shard.with_suffix("")


@contextlib.contextmanager
def scratch_directory(directory: str | os.PathLike, overwrite: bool) -> Iterator[pathlib.Path]:
    """Creates the output directory, and an empty scratch directory in it that is removed on exit.

    Raises:
      FileExistsError: the directory holds a complete corpus and `overwrite` is false.
      OSError: the directory cannot be created or written to.
    """
    directory = pathlib.Path(directory)
    scratch = directory / SCRATCH
    if (directory / MANIFEST).exists() and not overwrite:
        raise FileExistsError(
            f"{directory} already holds a complete corpus; choose another --output, or replace it "
            "with --overwrite"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)  # left by an interrupted build
        scratch.mkdir()
    except OSError as error:
        raise type(error)(
            f"cannot write into --output={directory} ({error.strerror}); expected a writable "
            "directory or a new path"
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_shard(
    path: pathlib.Path, dtype: np.dtype, block_rows: int, seed: tuple[int, ...]
) -> tuple[int, int]:
    """Shuffles the rows in `spill_path(path)` in memory and writes them to `path`.

    Each record holds the bytes of `block_rows` consecutive rows; the last may hold fewer. Returns
    the number of rows, and the size of the shard in bytes.
    """
    rows = np.fromfile(spill_path(path), dtype)
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    try:
        writer = ArrayRecordWriter(str(path), WRITER_OPTIONS)
        for start in range(0, len(rows), block_rows):
            writer.write(rows[start : start + block_rows].tobytes())
        writer.close()
    except RuntimeError as error:  # raised by the writer when the disk is full
        raise OSError(f"cannot write {path}: {error}; free the disk and run again") from error
    spill_path(path).unlink()
    return len(rows), path.stat().st_size


def publish(scratch: pathlib.Path, manifest: dict) -> None:
    """Moves the finished files out of `scratch`, replacing an older corpus in its parent.

    The old manifest is removed first and the new one written last: a directory with a manifest
    holds a complete corpus.
    """
    directory = scratch.parent
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in directory.glob("*-?????-of-?????.array_record"):
        path.unlink()
    for path in sorted(scratch.iterdir()):
        os.replace(path, directory / path.name)
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(scratch / MANIFEST, directory / MANIFEST)
