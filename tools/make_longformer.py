"""Converts a RoBERTa to a Longformer for long texts (Beltagy et al., 2020, section 5).

python tools/make_longformer.py --model=roberta-base --output=longformer \
    --max_seq_length=4096 --attention_window=512

--model is anything that `bert_jax.load` reads, without the head of a task. The RoBERTa's position
embeddings are tiled up to --max_seq_length; global tokens start from copies of the other tokens'
projections. The result is a checkpoint: `bert_jax.load` and `init_from` take it, and
tools/convert_checkpoint.py exports it. configs/pretrain/longformer_base.py trains it further, which
the tiled position embeddings need.

Pre-training has no global tokens, so it does not train their projections. Before fine-tuning, copy
the trained ones again, which replaces the projections of global tokens:

python tools/make_longformer.py --model=runs/longformer --output=longformer_trained
"""

import os
import pathlib
import sys

from absl import app, flags

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.checkpoints.make_longformer import ATTENTION_WINDOW, MAX_SEQ_LENGTH, write_longformer
from bert_jax.runtime.command_line import describe_error, log_warnings_only, parse_flags
from bert_jax.runtime.errors import CheckpointError

MODEL = flags.DEFINE_string("model", None, "A RoBERTa, or a Longformer.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "The new directory.", required=True)
LENGTH = flags.DEFINE_integer(
    "max_seq_length",
    None,
    f"Tokens of the longest text; None: {MAX_SEQ_LENGTH}. A Longformer keeps its own.",
    lower_bound=1,
)
WINDOW = flags.DEFINE_integer(
    "attention_window",
    None,
    f"Tokens that each token attends to, half on each side; None: {ATTENTION_WINDOW}. A Longformer "
    "keeps its own.",
    lower_bound=2,
)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    log_warnings_only()
    try:
        paths = pathlib.Path(MODEL.value), pathlib.Path(OUTPUT.value)
        write_longformer(*paths, LENGTH.value, WINDOW.value)
        print(f"Wrote a Longformer to {OUTPUT.value}")
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"make_longformer: {describe_error(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
