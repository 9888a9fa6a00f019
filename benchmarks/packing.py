r"""Compares training on packed rows with training on rows of one sentence pair each.

python benchmarks/packing.py --dump=enwiki-latest-pages-articles1.xml.bz2 --vocab=vocab.txt

Builds both corpora of the same text, rows of 128 tokens, and pre-trains BERT_TINY (2 layers, 128)
on about the same number of real tokens of each, padding not counted, with several seeds. Prints
real tokens per second after the first steps, their ratio, the masked-LM losses on held-out text,
and their mean difference with its standard error.
"""

import json
import pathlib
import statistics
import tempfile

from absl import app, flags

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax.configs.pretrain import bert_tiny
from bert_jax.pretrain import train_and_evaluate
from bert_jax.tokenization import load_tokenizer

DUMP = flags.DEFINE_string("dump", None, "A Wikipedia dump.", required=True)
VOCAB = flags.DEFINE_string("vocab", None, "A WordPiece vocabulary.", required=True)
STEPS = flags.DEFINE_integer("steps", 2000, "Steps on packed rows.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs on each corpus.")
BATCH_SIZE = 32


def train(
    corpus: pathlib.Path, workdir: pathlib.Path, num_steps: int, seed: int
) -> tuple[float, float]:
    """Returns the median rows per second, and the held-out masked-LM loss."""
    config = bert_tiny.get_config().unlock()
    config.update(
        corpus=str(corpus),
        seed=seed,
        warmup_steps=num_steps // 10,
        learning_rate=1e-3,
        num_steps=num_steps,
        batch_size=BATCH_SIZE,
        log_every=50,
        eval_every=num_steps,
        checkpoint_every=num_steps,
    )
    config.long_phase.num_steps = 0
    result = train_and_evaluate(config.lock(), workdir)
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    rates = [record["rows_per_second"] for record in records if "rows_per_second" in record]
    return statistics.median(rates), result["mlm_loss"]


def main(argv: list[str]) -> None:
    del argv
    tokenizer, runs = load_tokenizer(VOCAB.value), {}
    with tempfile.TemporaryDirectory() as scratch:
        sides = {"packed": 8, "one pair per row": 1}
        for name, max_pairs in sides.items():
            corpus = pathlib.Path(scratch, f"corpus-{max_pairs}")
            config = CorpusConfig(max_pairs_per_row=max_pairs, heldout_fraction=0.1, dupe_factor=4)
            split = build_corpus(DUMP.value, tokenizer, corpus, config)["splits"]["train"]
            runs[name] = corpus, split["tokens"] / split["rows"], [], []
        num_tokens = STEPS.value * BATCH_SIZE * runs["packed"][1]
        for seed in range(SEEDS.value):  # The sides alternate.
            for name, (corpus, tokens_per_row, rates, losses) in runs.items():
                num_steps = round(num_tokens / BATCH_SIZE / tokens_per_row)
                workdir = pathlib.Path(scratch, f"{name}-{seed}")
                rate, loss = train(corpus, workdir, num_steps, seed)
                rates.append(rate * tokens_per_row)
                losses.append(loss)
                print(
                    f"{name}, seed {seed}: {tokens_per_row / 128:.1%} full, {num_steps} steps, "
                    f"{rates[-1]:,.0f} real tokens/s, held-out masked-LM loss {loss:.4f}",
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
