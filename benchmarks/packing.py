r"""Compares training on packed rows with training on rows of one sentence pair each.

python benchmarks/packing.py --dump=enwiki-latest-pages-articles1.xml.bz2 --vocab=vocab.txt

Builds both corpora of the same text, rows of 128 tokens, and pre-trains BERT_TINY (2 layers, 128).
In the first thousands of steps the loss hardly moves, then falls, from a step that depends on the
seed more than on the rows. So one run on half of the steps of each corpus is a common start; from
it, runs with several seeds see about the same number of real tokens (padding is not counted) of
each corpus. Prints real tokens per second after the first steps, their ratio, the masked-LM losses
on the same held-out rows with the same masks, and their mean difference with its standard error.
"""

import json
import pathlib
import statistics
import tempfile

from absl import app, flags
from ml_collections import ConfigDict

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax.configs.pretrain import bert_tiny
from bert_jax.interop.read import read_model
from bert_jax.partitioning import batch_sharding
from bert_jax.pretrain import evaluate, train_and_evaluate
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.pretrain_step import make_eval_step
from bert_jax.training.setup import open_phases, setup_pretraining

DUMP = flags.DEFINE_string("dump", None, "A Wikipedia dump.", required=True)
VOCAB = flags.DEFINE_string("vocab", None, "A WordPiece vocabulary.", required=True)
START = flags.DEFINE_integer("start_steps", 4000, "Steps of the common start.")
STEPS = flags.DEFINE_integer("steps", 2000, "Steps on packed rows.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs on each corpus.")
BATCH_SIZE = 32


def make_config(corpus: pathlib.Path, num_steps: int, seed: int, start: str = "") -> ConfigDict:
    """Returns the configuration of a run from `start`, a workdir or "" for random parameters."""
    config = bert_tiny.get_config().unlock()
    config.update(
        corpus=str(corpus),
        seed=seed,
        init_from=start,
        init_optimizer=bool(start),
        warmup_steps=num_steps // 10,
        learning_rate=1e-3,
        num_steps=num_steps,
        batch_size=BATCH_SIZE,
        log_every=50,
        eval_every=num_steps,
        checkpoint_every=num_steps,
    )
    config.model.dtype = "float32"
    config.long_phase.num_steps = 0
    return config.lock()


def heldout_loss(corpus: pathlib.Path, workdir: pathlib.Path) -> float:
    """Returns the masked-LM loss of a run on the held-out rows of `corpus`."""
    config = make_config(corpus, 1, seed=0)
    (phase,) = open_phases(config)
    setup = setup_pretraining(config, [phase], phase.train.load_tokenizer())
    eval_step = make_eval_step(setup.model, setup.mesh, setup.masking(phase), seed=0)
    params = read_model(workdir).params
    sharding = batch_sharding(setup.mesh)
    return evaluate(eval_step, params, phase, sharding, config, lambda **_: None)["mlm_loss"]


def main(argv: list[str]) -> None:
    del argv
    tokenizer, runs = load_tokenizer(VOCAB.value), {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, max_pairs in {"packed": 8, "one pair per row": 1}.items():
            corpus = pathlib.Path(scratch, f"corpus-{max_pairs}")
            config = CorpusConfig(max_pairs_per_row=max_pairs, heldout_fraction=0.1, dupe_factor=4)
            split = build_corpus(DUMP.value, tokenizer, corpus, config)["splits"]["train"]
            runs[name] = corpus, split["tokens"] / split["rows"], [], []
        heldout = runs["packed"][0]
        start = ""
        for number, (corpus, *_) in enumerate(runs.values()):
            workdir = pathlib.Path(scratch, f"start-{number}")
            train_and_evaluate(make_config(corpus, START.value // 2, seed=0, start=start), workdir)
            start = str(workdir)
        print(f"common start: held-out masked-LM loss {heldout_loss(heldout, start):.4f}")
        num_tokens = STEPS.value * BATCH_SIZE * runs["packed"][1]
        for seed in range(1, SEEDS.value + 1):  # The sides alternate.
            for name, (corpus, tokens_per_row, rates, losses) in runs.items():
                num_steps = round(num_tokens / BATCH_SIZE / tokens_per_row)
                workdir = pathlib.Path(scratch, f"{name}-{seed}")
                train_and_evaluate(make_config(corpus, num_steps, seed, start), workdir)
                records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
                speeds = [r["rows_per_second"] for r in records if "rows_per_second" in r]
                rates.append(statistics.median(speeds) * tokens_per_row)
                losses.append(heldout_loss(heldout, workdir))
                print(
                    f"{name}, seed {seed}: {tokens_per_row / 128:.1%} full, {num_steps} steps, "
                    f"{rates[-1]:,.0f} real tokens/s, held-out masked-LM loss {losses[-1]:.4f}",
                    flush=True,
                )
    (_, _, packed, packed_losses), (_, _, single, single_losses) = runs.values()
    ratios = [ours / theirs for ours, theirs in zip(packed, single, strict=True)]
    differences = [ours - theirs for ours, theirs in zip(packed_losses, single_losses, strict=True)]
    print(f"real tokens per second, packed / one pair per row: {statistics.median(ratios):.3f}")
    print(f"difference of the losses: {statistics.mean(differences):+.4f}", end="")
    if len(differences) > 1:
        print(f", standard error {statistics.stdev(differences) / len(differences) ** 0.5:.4f}")


if __name__ == "__main__":
    app.run(main)
