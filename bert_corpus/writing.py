"""The corpus on disk: shuffled shards of blocks of rows, and a manifest, which is written last."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from absl import logging
from array_record.python.array_record_module import ArrayRecordWriter

from bert_jax.data.rows import MANIFEST, checksum_of_ends
from bert_jax.runtime.buckets import as_path, copy_to_bucket, is_bucket
from bert_jax.runtime.cache import cache_directory

SCRATCH = ".spill"  # inside the output directory, so that finished shards are moved, not copied
FINGERPRINT = "fingerprint.json"  # in `SCRATCH`: identifies the build


@contextlib.contextmanager
def open_scratch(
    directory: str | os.PathLike, fingerprint: list, overwrite: bool = False
) -> Iterator[pathlib.Path]:
    """Yields the scratch directory in `directory`, with the files of an interrupted equal build.

    If `directory` is on a bucket, the build is in a local cache directory. Locks out other builds
    of this host. After a ValueError nothing is left, because the input or a setting must change.
    Raises FileExistsError for a complete corpus unless `overwrite` is set, OSError, and what
    `as_path` raises for a bucket.
    """
    output = directory = as_path(directory)
    if is_bucket(output):
        directory = cache_directory("builds", str(output))
    if os.fsencode(directory) != str(directory).encode(errors="replace"):
        raise ValueError(f"--output={str(directory)!r} is not UTF-8, which ArrayRecord needs")
    scratch, content = directory / SCRATCH, json.dumps(fingerprint).encode()
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another build is writing to {directory}; wait for it") from None
        except OSError as error:
            raise _not_writable(directory, error) from error
        # After the lock: another build may just have completed it.
        if (output / MANIFEST).exists() and not overwrite:
            message = f"{output} holds a complete corpus; replace it with --overwrite"
            raise FileExistsError(message)
        try:
            if not scratch.exists() or _read(scratch / FINGERPRINT) != content:
                if scratch.exists():
                    logging.info("Discarding an interrupted build of something else")
                remove_scratch(scratch)
                scratch.mkdir()
                with replace_file(scratch / FINGERPRINT) as stream:
                    stream.write(content)
        except OSError as error:
            raise _not_writable(directory, error) from error
        try:
            yield scratch
        except ValueError:
            remove_scratch(scratch)
            raise


def _not_writable(directory: pathlib.Path, error: OSError) -> OSError:
    return type(error)(f"cannot write into --output={directory}: {error.strerror}")


def _read(path: pathlib.Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def remove_scratch(scratch: pathlib.Path) -> None:
    """Removes the scratch directory; if interrupted, the remaining files belong to no build."""
    (scratch / FINGERPRINT).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def replace_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file that gets its name when it is complete. Raises OSError if the disk is full."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # It may concern another file, which is read meanwhile.
        raise OSError(f"cannot write {path}: {error}; free disk space and run again") from error
    os.replace(partial, path)


def write_shard(path: pathlib.Path, rows: np.ndarray, block_rows: int) -> dict[str, str | int]:
    """Writes records of `block_rows` rows (the last may hold fewer); returns the manifest's entry.

    Raises OSError if the disk is full.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        # Compresses each record separately, so that a block can be read without its neighbors.
        writer = ArrayRecordWriter(str(partial), "group_size:1")
        for start in range(0, len(rows), block_rows):
            writer.write(rows[start : start + block_rows].tobytes())
        writer.close()
    except RuntimeError as error:  # raised by the writer when the disk is full
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}; free disk space and run again") from error
    os.replace(partial, path)
    return {
        "file": path.name,
        "rows": len(rows),
        "bytes": path.stat().st_size,
        "crc32_of_ends": checksum_of_ends(path),
    }


def encode_manifest(manifest: dict) -> bytes:
    """Returns the content of the manifest's file."""
    return f"{json.dumps(manifest, indent=2)}\n".encode()


def publish(
    scratch: pathlib.Path, directory: str | os.PathLike, names: list[str], manifest: dict
) -> None:
    """Moves the finished files to `directory`, replacing an older corpus there.

    Can be interrupted and repeated. A directory with a manifest holds a complete corpus.
    """
    directory = as_path(directory)
    for name in names:
        # An interrupted call has moved it, but to a bucket only copied it.
        is_moved = not is_bucket(directory) and (directory / name).exists()
        if not (scratch / name).exists() and not is_moved:
            remove_scratch(scratch)
            raise OSError(f"{directory / name} was removed while it was built; run again")
    (directory / MANIFEST).unlink(missing_ok=True)
    if is_bucket(directory):
        copy_to_bucket(scratch, directory, names)
    else:
        for name in names:
            if (scratch / name).exists():
                os.replace(scratch / name, directory / name)
    for split in ("train", "heldout"):
        for path in directory.glob(f"{split}-?????-of-?????.array_record"):
            if path.name not in names:
                path.unlink()
    if is_bucket(directory):  # An object appears once it is complete.
        (directory / MANIFEST).write_bytes(encode_manifest(manifest))
    else:
        with replace_file(directory / MANIFEST) as stream:
            stream.write(encode_manifest(manifest))
    remove_scratch(scratch)
