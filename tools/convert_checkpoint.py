"""Weights in and out: of transformers and of Google's release to native, and to transformers.

python tools/convert_checkpoint.py --to=native uncased_L-12_H-768_A-12 checkpoints/bert_base
python tools/convert_checkpoint.py --to=huggingface runs/base exported

SRC is a workdir (its last checkpoint is taken) or one checkpoint, a directory that transformers'
`save_pretrained` wrote, or one of Google's (`pip install tensorflow-cpu`, to read it). DST must not
exist, and is whole or not there.
"""

import os
import pathlib
import shutil
import sys

from absl import app, flags, logging

# A conversion is no work for an accelerator, which may be busy training.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.interop.huggingface import save_huggingface
from bert_jax.interop.parameters import table_of_tensors
from bert_jax.interop.read import read_model
from bert_jax.training.checkpoint import CheckpointError, write_checkpoint

WRITERS = {"native": write_checkpoint, "huggingface": save_huggingface}

TO = flags.DEFINE_enum("to", None, list(WRITERS), "The format of DST.", required=True)


def convert(source: pathlib.Path, destination: pathlib.Path, form: str) -> None:
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: give a DST that does not")
    model = read_model(source)
    print(table_of_tensors(model.report))
    unfinished = destination.with_name(f"{destination.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[form](unfinished, model.params, model.settings, model.tokenizer)
    unfinished.rename(destination)
    print(f"{destination}: complete, {form}")


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise app.UsageError("expected SRC and DST")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells a lot.
    source, destination = (pathlib.Path(argument).absolute() for argument in argv[1:])
    try:
        convert(source, destination, TO.value)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"convert_checkpoint: {error}")


if __name__ == "__main__":
    app.run(main)
