"""Writes the CRC-32 of each file of a checkpoint, and compares it when the checkpoint is read.

Orbax stores arrays in OCDBT, which has checksums of its index but not of the values: without those
here, a flipped bit of a value would be read as another number.
"""

import json
import pathlib
import zlib
from collections.abc import Collection, Iterator

from absl import logging

from bert_jax.runtime.errors import CheckpointError

CHECKSUMS = "checksums.json"
BUFFER_BYTES = 1 << 18  # Stays in a core's cache between reading and summing.


def file_checksum(path: pathlib.Path) -> str:
    """Returns the CRC-32 of a file: eight hexadecimal digits."""
    value, buffer = 0, memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            value = zlib.crc32(buffer[:size], value)
    return f"{value:08x}"


def write_checksums(directory: pathlib.Path) -> None:
    """Reads back every file of a checkpoint's items and writes `checksums.json`.

    Two files that Orbax writes later are not included, because no reader needs their content:
    _CHECKPOINT_METADATA, with the time, and commit_success.txt, which marks a complete checkpoint.
    """
    names = [
        f"{item.name}/{name}"
        for item in directory.iterdir()
        if item.is_dir()
        for name in _walk(item)
    ]
    checksums = {name: file_checksum(directory / name) for name in sorted(names)}
    (directory / CHECKSUMS).write_text(
        json.dumps({"crc32": checksums}, indent=1) + "\n", encoding="utf-8"
    )


def _walk(directory: pathlib.Path) -> Iterator[str]:
    """Yields the relative paths of all files below a directory, which may be on a bucket."""
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from (f"{entry.name}/{name}" for name in _walk(entry))
        else:
            yield entry.name


def read_checksums(directory: pathlib.Path) -> dict[str, str]:
    """Returns the CRC-32 of each file, by its path in the checkpoint.

    Returns an empty dict for a checkpoint that was written without checksums. Raises
    CheckpointError if `checksums.json` is damaged.
    """
    path = directory / CHECKSUMS
    try:
        return dict(json.loads(path.read_bytes())["crc32"])
    except FileNotFoundError:
        logging.debug("%s has no checksums: its files are not checked", directory)
        return {}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}; {_ADVICE}") from error


_ADVICE = "copy the checkpoint again from where it is intact, or use another one"


def check_files(
    directory: pathlib.Path, items: Collection[str] = (), share: tuple[int, int] = (0, 1)
) -> None:
    """Compares the files of a checkpoint with their checksums, if it has any.

    Args:
      directory: the checkpoint.
      items: the items whose files are checked, such as ("params",); () for all.
      share: (process index, number of processes); each process checks its share of the files.

    Raises:
      CheckpointError: for the first file that cannot be read or differs.
    """
    checksums = read_checksums(directory)
    names = [name for name in checksums if not items or name.split("/")[0] in items]
    for name in names[share[0] :: share[1]]:
        path = directory / name
        try:
            found = file_checksum(path)
        except (OSError, ValueError) as error:  # A damaged name may be no valid path.
            raise CheckpointError(f"{path} cannot be read: {error}; {_ADVICE}") from error
        if found != checksums[name]:
            raise CheckpointError(
                f"{path} is damaged: its CRC-32 is {found}, but was {checksums[name]} when it was "
                f"written; {_ADVICE}"
            )
