"""Reads a checkpoint from end to end, and copies it so that the copy is whole or not there.

python tools/check_checkpoint.py runs/base
python tools/check_checkpoint.py runs/base --copy_to=/elsewhere/base-1000000

The source is a workdir (its last checkpoint is taken) or one checkpoint. Exit status 1 if it is
damaged: files missing or cut off, values not finite, arrays of other shapes. Bytes that changed
into other numbers are not seen; a copy is compared with its source byte by byte.
"""

import filecmp
import os
import pathlib
import shutil
import sys

from absl import app, flags

# A check is no work for an accelerator, which may be busy training.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.interop.read import abstract_params
from bert_jax.training.checkpoint import CheckpointError, find_checkpoint, verify_checkpoint

COPY_TO = flags.DEFINE_string("copy_to", None, "Directory of the copy; must not exist.")


def check(directory: pathlib.Path) -> None:
    found = verify_checkpoint(directory, abstract_params)
    print(
        f"{directory}: complete, step {found['step']:,}, parameters {found['params']:,} bytes, "
        f"training state {found['training']:,} bytes"
    )


def copy(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Under another name until the copy has been read back."""
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: give a --copy_to that does not")
    if destination.is_relative_to(source):
        raise ValueError(f"{destination} is within the checkpoint: give a --copy_to elsewhere")
    unfinished = destination.with_name(destination.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished)
    check(unfinished)
    for path in source.rglob("*"):
        copied = unfinished / path.relative_to(source)
        if path.is_file() and not filecmp.cmp(path, copied, shallow=False):
            raise OSError(f"{copied} is not what {path} is: the disk or the way to it is faulty")
    unfinished.rename(destination)
    print(f"copied to {destination}")


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("expected one workdir or checkpoint")
    try:
        source = find_checkpoint(argv[1])
        check(source)
        if COPY_TO.value:
            copy(source, pathlib.Path(COPY_TO.value).absolute())
    except (CheckpointError, OSError, ValueError) as error:
        sys.exit(f"check_checkpoint: {error}")


if __name__ == "__main__":
    app.run(main)
