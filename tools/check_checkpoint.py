"""Verifies a checkpoint, and optionally copies it atomically.

python tools/check_checkpoint.py runs/base
python tools/check_checkpoint.py runs/base --copy_to=/elsewhere/base-1000000

The source is a checkpoint, or a workdir (whose best checkpoint is used, or else its latest). The
exit code is 1 for a damaged checkpoint: missing files, files that do not match their checksums,
non-finite values, wrong shapes. The last line says if a checkpoint was written without checksums;
then bytes that changed to other finite numbers cannot be detected. A copy is compared with its
source byte by byte.
"""

import os
import pathlib
import sys

from absl import app, flags

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.checkpoints.native import find_checkpoint
from bert_jax.checkpoints.tensors import WEIGHTS_FILENAMES
from bert_jax.checkpoints.verify import copy_verified, print_summary
from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.runtime.errors import CheckpointError

COPY_TO = flags.DEFINE_string("copy_to", None, "Directory to create for the copy.")


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("expected one argument: a workdir or a checkpoint")
    try:
        if any((pathlib.Path(argv[1]) / name).exists() for name in WEIGHTS_FILENAMES):
            fix = "bert_jax.load reads it, and names what is damaged"
            raise ValueError(f"{argv[1]} is a model of another library, without checksums: {fix}")
        source = find_checkpoint(argv[1])
        print_summary(source)
        if COPY_TO.value:
            copy_verified(source, pathlib.Path(COPY_TO.value).absolute())
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"check_checkpoint: {describe_error(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
