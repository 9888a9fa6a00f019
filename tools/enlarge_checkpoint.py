"""Enlarges a model, which is then trained further: more layers, wider ones, or more positions.

python tools/enlarge_checkpoint.py --model=runs/base --output=runs/deep --num_layers=24
python tools/enlarge_checkpoint.py --model=runs/base --output=runs/wide --hidden_size=1536
python tools/enlarge_checkpoint.py --model=runs/base --output=runs/long \
    --max_position_embeddings=1024

--num_layers: further layers are copies of the model's own, in turn (StackBERT; Gong et al., 2019).
--hidden_size, a multiple of the model's: the outputs stay (Net2Net; Chen et al., 2016), with as
many times the heads and the units of feed-forward layers. --max_position_embeddings: further
positions repeat the old ones (Beltagy et al., 2020). Several flags together are applied in this
order: width, layers, positions.

--model is anything that `bert_jax.load` reads. --output is a checkpoint: `bert_jax.load` and
`init_from` take it, and tools/convert_checkpoint.py exports it. For the optimizer's moments, see
docs/checkpoints.md.
"""

import os
import sys

from absl import app, flags

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.checkpoints.enlarge import write_enlarged
from bert_jax.runtime.command_line import describe_error, log_warnings_only, parse_flags
from bert_jax.runtime.errors import CheckpointError

MODEL = flags.DEFINE_string(
    "model", None, "The model to enlarge: anything that bert_jax.load reads.", required=True
)
OUTPUT = flags.DEFINE_string("output", None, "The new directory.", required=True)
HIDDEN_SIZE = flags.DEFINE_integer(
    "hidden_size", None, "Hidden size of the new model, a multiple of the old one."
)
NUM_LAYERS = flags.DEFINE_integer(
    "num_layers", None, "Number of layers of the new model, more than the old one has."
)
POSITIONS = flags.DEFINE_integer(
    "max_position_embeddings",
    None,
    "Number of positions of the new model, more than the old one has.",
)


def main(argv: list[str]) -> None:
    if argv[1:]:
        sys.exit(f"enlarge_checkpoint: unexpected arguments {argv[1:]}")
    log_warnings_only()
    try:
        sizes = HIDDEN_SIZE.value, NUM_LAYERS.value, POSITIONS.value
        write_enlarged(MODEL.value, OUTPUT.value, *sizes)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"enlarge_checkpoint: {describe_error(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
