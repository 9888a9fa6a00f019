r"""Compares training on packed rows with training on rows of one sentence pair each.

make demo
python benchmarks/packing.py --dump=enwiki-latest-pages-articles1.xml.bz2 --init_from=runs/demo

Builds both corpora of the same text, rows of 128 tokens, and trains a model on about the same
number of real tokens of each (padding is not counted), with several seeds. Both sides start from
the same trained weights: from random ones the loss first hardly moves, then falls from a step that
depends on the seed more than on the rows. Prints real tokens per second after the first steps,
their ratio, the masked-LM losses on the same held-out rows with the same masks, and their mean
difference with its standard error.
"""

import importlib
import json
import pathlib
import statistics
import tempfile

from absl import app, flags
from ml_collections import ConfigDict

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax.checkpoints.read import read_model
from bert_jax.data.batches import heldout_batches
from bert_jax.pretrain import evaluate, train_and_evaluate
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain_setup import setup_pretraining
from bert_jax.training.pretrain_step import make_eval_step

DUMP = flags.DEFINE_string("dump", None, "A Wikipedia dump.", required=True)
START = flags.DEFINE_string("init_from", None, "Weights and vocabulary.", required=True)
STEPS = flags.DEFINE_integer("steps", 500, "Steps on packed rows.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs on each corpus.")
BATCH_SIZE = 8


def make_config(corpus: pathlib.Path, num_steps: int, seed: int) -> ConfigDict:
    continue_pretraining = importlib.import_module("bert_jax.configs.pretrain.continue")
    config = continue_pretraining.get_config().unlock()
    config.update(
        corpus=str(corpus),
        seed=seed,
        init_from=START.value,
        warmup_steps=num_steps // 10,
        learning_rate=1e-4,
        num_steps=num_steps,
        batch_size=BATCH_SIZE,
        log_every=10,
        eval_every=num_steps,
        eval_batch_size=32,
        checkpoint_every=num_steps,
    )
    config.model.dtype = "float32"
    return config.lock()


def heldout_loss(corpus: pathlib.Path, workdir: pathlib.Path) -> float:
    """Returns the masked-LM loss of a run on the held-out rows of `corpus`."""
    config, source = make_config(corpus, 1, seed=0), read_model(workdir)
    (phase,) = open_phases(config)
    setup = setup_pretraining(config, [phase], source.tokenizer, source_settings=source.settings)
    objective = setup.phases[0].objective
    eval_step = make_eval_step(setup.model, setup.mesh, objective, seed=0)
    (rows,) = phase.heldout.values()
    batches = heldout_batches(rows, batch_sharding(setup.mesh), config.eval_batch_size)
    scores = evaluate(objective, eval_step, source.params, batches, lambda limited: None)
    return scores["mlm_loss"]


def main(argv: list[str]) -> None:
    del argv
    tokenizer, runs = read_model(START.value).tokenizer, {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, max_sequences in {"packed": 8, "one pair per row": 1}.items():
            corpus = pathlib.Path(scratch, f"corpus-{max_sequences}")
            config = CorpusConfig(max_sequences=max_sequences, heldout_fraction=0.1, dupe_factor=4)
            split = build_corpus(DUMP.value, tokenizer, corpus, config)["splits"]["train"]
            runs[name] = corpus, split["tokens"] / split["rows"], [], []
        heldout, packed_tokens, *_ = runs["packed"]
        for seed in range(SEEDS.value):  # The sides alternate.
            for name, (corpus, tokens_per_row, rates, losses) in runs.items():
                num_steps = round(STEPS.value * packed_tokens / tokens_per_row)
                workdir = pathlib.Path(scratch, f"{name}-{seed}")
                train_and_evaluate(make_config(corpus, num_steps, seed), workdir)
                records = map(
                    json.loads, (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                )
                speeds = [r["rows_per_second"] for r in records if "rows_per_second" in r]
                rates.append(statistics.median(speeds) * tokens_per_row)
                losses.append(heldout_loss(heldout, workdir))
                print(
                    f"{name}, seed {seed}: {tokens_per_row / 128:.1%} full, {num_steps} steps, "
                    f"{rates[-1]:,.0f} real tokens/s, held-out masked-LM loss {losses[-1]:.4f}",
                    flush=True,
                )
    (_, _, packed, packed_losses), (_, _, single, single_losses) = runs.values()
    ratios = [one / other for one, other in zip(packed, single, strict=True)]
    differences = [one - other for one, other in zip(packed_losses, single_losses, strict=True)]
    print(f"real tokens per second, packed / one pair per row: {statistics.median(ratios):.3f}")
    print(f"difference of the losses: {statistics.mean(differences):+.4f}", end="")
    if len(differences) > 1:
        print(f", standard error {statistics.stdev(differences) / len(differences) ** 0.5:.4f}")


if __name__ == "__main__":
    app.run(main)
