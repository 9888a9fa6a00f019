"""What a corpus is on disk: shuffled shards of blocks of rows, and a manifest, written last."""

import json
import os
import pathlib

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

MANIFEST = "manifest.json"
SCRATCH = ".spill"  # inside the output directory, so that a finished shard is moved, not copied
FORMAT_VERSION = 1
# Each record is compressed alone, so that a block can be read without its neighbours.
WRITER_OPTIONS = "group_size:1"


def shard_name(split: str, index: int, num_shards: int) -> str:
    return f"{split}-{index:05d}-of-{num_shards:05d}.array_record"


def prepare_directory(directory: str | os.PathLike, overwrite: bool) -> pathlib.Path:
    """Makes the output directory and an empty scratch folder in it, whose path it returns.

    Raises:
      FileExistsError: the directory holds a complete corpus and `overwrite` is false.
      OSError: the directory cannot be made or written to.
    """
    directory = pathlib.Path(directory)
    scratch = directory / SCRATCH
    if (directory / MANIFEST).exists() and not overwrite:
        raise FileExistsError(
            f"{directory} holds a complete corpus already; choose another --output, or replace it "
            "with --overwrite"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_scratch(scratch)  # of a build that was interrupted
        scratch.mkdir()
    except OSError as error:
        raise type(error)(
            f"cannot write into --output={directory} ({error.strerror}); expected a directory, new "
            "or not, with write permission"
        ) from error
    return scratch


def remove_scratch(scratch: pathlib.Path) -> None:
    if scratch.is_dir():
        for path in scratch.iterdir():
            path.unlink()
        scratch.rmdir()


def write_shard(
    path: pathlib.Path, dtype: np.dtype, block_rows: int, seed: tuple[int, ...]
) -> tuple[int, int]:
    """Shuffles the rows spilled to `path` and writes them beside it as `path`.array_record.

    Each record is the bytes of `block_rows` consecutive rows; the last may hold fewer.

    Args:
      path: of the spill file, which holds rows and nothing else, and fits into memory.
      dtype: of a row.
      block_rows: rows in a record.
      seed: of the shuffle.

    Returns:
      The numbers of rows and of bytes written.
    """
    rows = np.fromfile(path, dtype)
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    shard = path.with_name(path.name + ".array_record")
    try:
        writer = ArrayRecordWriter(str(shard), WRITER_OPTIONS)
        for start in range(0, len(rows), block_rows):
            writer.write(rows[start : start + block_rows].tobytes())
        writer.close()
    except RuntimeError as error:  # What the writer makes of a full disk.
        raise OSError(f"cannot write {shard}: {error}; free the disk and run again") from error
    path.unlink()
    return len(rows), shard.stat().st_size


def publish(directory: pathlib.Path, scratch: pathlib.Path, manifest: dict) -> None:
    """Moves the finished files of `scratch` into `directory`, in place of an older corpus there.

    The manifest goes first from the old corpus and comes last to the new: where there is one, the
    corpus is complete.
    """
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in directory.glob("*-?????-of-?????.array_record"):
        path.unlink()
    for path in sorted(scratch.iterdir()):
        os.replace(path, directory / path.name)
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(scratch / MANIFEST, directory / MANIFEST)
