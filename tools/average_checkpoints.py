"""Averages the weights of several checkpoints, such as the last ones of a run.

python tools/average_checkpoints.py runs/base/checkpoints/900000 runs/base/checkpoints/950000 OUT
python tools/average_checkpoints.py --last=3 runs/base OUT

With --last, the last N checkpoints of a workdir (`keep_checkpoints` of them are kept). OUT must not
exist. It has no optimizer state: `bert_jax.load`, `init_from` and tools/convert_checkpoint.py take
it like any other model. Checkpoints of other architectures, RoPE bases or vocabularies are refused.
"""

import os
import pathlib
import sys

from absl import app, flags

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.checkpoints.average import average_models
from bert_jax.checkpoints.native import find_checkpoint, saved_steps, write_checkpoint
from bert_jax.runtime.buckets import absolute, as_path
from bert_jax.runtime.command_line import describe_error, log_warnings_only, parse_flags
from bert_jax.runtime.errors import CheckpointError

LAST = flags.DEFINE_integer("last", None, "Averages the last N of a workdir.", lower_bound=2)


def last_checkpoints(workdir: str, count: int) -> list[pathlib.Path]:
    """Returns the last `count` checkpoints of a workdir. Raises ValueError if it has fewer."""
    directory = absolute(as_path(workdir)) / "checkpoints"
    steps = saved_steps(directory)
    if len(steps) < count:
        found = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"--last={count}: {directory} has {len(steps)} checkpoints ({found})")
    return [directory / str(step) for step in steps[-count:]]


def average(checkpoints: list[pathlib.Path], destination: str | pathlib.Path) -> None:
    """Writes the mean of checkpoints to a new directory, which may be on a bucket."""
    destination = as_path(destination)
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: choose another OUT")
    model = average_models(checkpoints)
    write_checkpoint(destination, model.params, model.settings, model.tokenizer)
    print(f"Wrote the mean of {', '.join(map(str, checkpoints))} to {destination}")


def main(argv: list[str]) -> None:
    *sources, destination = argv[1:] or [None]
    if not sources or (LAST.value and len(sources) != 1):
        raise app.UsageError("expected CKPT CKPT ... OUT, or --last=N WORKDIR OUT")
    log_warnings_only()
    try:
        if LAST.value:
            checkpoints = last_checkpoints(sources[0], LAST.value)
        else:
            checkpoints = [find_checkpoint(source) for source in sources]
        average(checkpoints, destination)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"average_checkpoints: {describe_error(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
