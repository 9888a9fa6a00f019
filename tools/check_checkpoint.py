"""Verifies a checkpoint, and optionally copies it atomically.

python tools/check_checkpoint.py runs/base
python tools/check_checkpoint.py runs/base --copy_to=/elsewhere/base-1000000

The source is a checkpoint, or a workdir (whose latest checkpoint is used). The exit code is 1 if
it is damaged: missing or truncated files, non-finite values, wrong shapes. Bytes that changed to
other finite numbers go undetected; a copy is compared with its source byte by byte.
"""

import filecmp
import os
import pathlib
import shutil
import sys

from absl import app, flags

# The accelerator may be busy training.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.interop.read import abstract_params
from bert_jax.runtime.command_line import CheckpointError, parse_flags
from bert_jax.training.checkpoint import find_checkpoint, verify_checkpoint

COPY_TO = flags.DEFINE_string("copy_to", None, "Directory to create for the copy.")


def check(directory: pathlib.Path) -> None:
    """Verifies a checkpoint and prints a summary; raises CheckpointError."""
    sizes = verify_checkpoint(directory, abstract_params)
    print(
        f"{directory}: complete, step {sizes['step']:,}, parameters {sizes['params']:,} bytes, "
        f"training state {sizes['training']:,} bytes"
    )


def copy(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Copies a checkpoint, under a temporary name until the copy has been verified."""
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: choose another --copy_to")
    if destination.is_relative_to(source):
        raise ValueError(f"{destination} is within the checkpoint: choose another --copy_to")
    unfinished = destination.with_name(destination.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished)
    check(unfinished)
    for path in source.rglob("*"):
        copied = unfinished / path.relative_to(source)
        if path.is_file() and not filecmp.cmp(path, copied, shallow=False):
            raise OSError(f"{copied} differs from {path}: the disk or its connection is faulty")
    unfinished.rename(destination)
    print(f"copied to {destination}")


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("expected one argument: a workdir or a checkpoint")
    try:
        source = find_checkpoint(argv[1])
        check(source)
        if COPY_TO.value:
            copy(source, pathlib.Path(COPY_TO.value).absolute())
    except (CheckpointError, OSError, ValueError) as error:
        sys.exit(f"check_checkpoint: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
