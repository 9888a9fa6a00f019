"""Runs `make demo`: from raw text to a BERT that fills in masks, in minutes on two cores.

Writes to runs/ in the current directory. Prints each command before running it, and skips finished
steps; remove runs/ to start over.
"""

import json
import os
import pathlib
import shlex
import sys
import time

from absl import app, logging

from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.tools.commands import exit_interrupted, run_command

TOOLS = os.path.relpath(os.path.dirname(os.path.abspath(__file__)))
DATA = pathlib.Path("runs/demo-data")
WORKDIR = pathlib.Path("runs/demo")
MASKED = (
    "The capital of the country is [MASK].",
    "He was born in [MASK] and died in 1865.",
    "It is one of the [MASK] important cities in the world.",
)


def run(*command: str) -> None:
    print(f"\n$ python {shlex.join(command)}", flush=True)
    run_command([sys.executable, *command])


def demo() -> None:
    started = time.monotonic()
    if not list(DATA.glob("*.bz2")):
        run(f"{TOOLS}/fetch_data.py", "wikipedia-sample", str(DATA))
    dump = next(DATA.glob("*.bz2"))
    if not (DATA / "vocab.txt").exists():
        run(
            f"{TOOLS}/train_vocab.py",
            f"--input={dump}",
            f"--output={DATA}/vocab.txt",
            "--size=8192",
        )
    for length, dupe_factor in ((16, 10), (64, 4)):  # Short rows truncate sentences.
        corpus = f"corpus-{length}"
        if not (DATA / corpus / "manifest.json").exists():
            run(
                f"{TOOLS}/prepare_corpus.py",
                f"--input={dump}",
                f"--vocab={DATA}/vocab.txt",
                f"--output={DATA}/{corpus}",
                f"--max_seq_length={length}",
                f"--dupe_factor={dupe_factor}",
                "--heldout_fraction=0.2",
            )
    if not (WORKDIR / "result.json").exists():
        run("-m", "bert_jax.pretrain", "--config=configs/pretrain/demo.py", f"--workdir={WORKDIR}")
    run(f"{TOOLS}/plot.py", str(WORKDIR))

    import bert_jax

    print(f'\n>>> model = bert_jax.load("{WORKDIR}")')
    model = bert_jax.load(WORKDIR)
    for text in MASKED:
        print(f">>> model.fill_mask({text!r}, top_k=5)")
        for fill in model.fill_mask(text, top_k=5):
            print(f"    {fill.probability:6.1%}  {fill.token:<12} {fill.text}")

    result = json.loads((WORKDIR / "result.json").read_text(encoding="utf-8"))
    print("\nOn held-out articles             model    word frequencies alone")
    for label, name, baseline, form in (
        ("masked-LM loss (nats)", "mlm_loss", "unigram_entropy", "8.3f"),
        ("masked-LM accuracy", "mlm_accuracy", "unigram_accuracy", "8.1%"),
    ):
        print(f"  {label:<28}{result[name]:{form}}    {result[baseline]:{form}}")
    print(f"  {'next-sentence accuracy':<28}{result['nsp_accuracy']:8.1%}")
    learned = (
        result["mlm_loss"] <= result["unigram_entropy"] - 0.4
        and result["mlm_accuracy"] >= 2 * result["unigram_accuracy"]
    )
    if not learned:
        sys.exit(
            "The model does not beat word frequencies by 0.4 nats of loss and twice the accuracy."
        )
    seconds = time.monotonic() - started
    print(f"\nPre-training took {result['seconds']:.0f} s; this command took {seconds:.0f} s.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX and Orbax log much of what `load` does.
    try:
        demo()
    except OSError as error:
        sys.exit(f"demo: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to resume")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
