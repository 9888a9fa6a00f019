r"""Compares training on packed rows with training on rows of one sentence pair each.

python benchmarks/packing.py --dump=enwiki-latest-pages-articles1.xml.bz2 --vocab=vocab.txt

Builds both corpora of the same text, rows of 128 tokens, and pre-trains BERT_TINY (2 layers, 128)
on about the same number of real tokens of each, padding not counted. Prints real tokens per second
after the first steps, their ratio, and the masked-LM loss on held-out text.
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
BATCH_SIZE = 32


def train(corpus: pathlib.Path, workdir: pathlib.Path, num_steps: int) -> tuple[float, float]:
    """Returns the median rows per second, and the held-out masked-LM loss."""
    config = bert_tiny.get_config().unlock()
    config.update(
        corpus=str(corpus),
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
    tokens_per_second, tokenizer = {}, load_tokenizer(VOCAB.value)
    with tempfile.TemporaryDirectory() as scratch:
        tokens = None
        for name, max_pairs in (("packed", 8), ("one pair per row", 1)):
            corpus = pathlib.Path(scratch, f"corpus-{max_pairs}")
            config = CorpusConfig(max_pairs_per_row=max_pairs, heldout_fraction=0.1, dupe_factor=4)
            split = build_corpus(DUMP.value, tokenizer, corpus, config)["splits"]["train"]
            tokens_per_row = split["tokens"] / split["rows"]
            tokens = tokens or STEPS.value * BATCH_SIZE * tokens_per_row
            num_steps = round(tokens / BATCH_SIZE / tokens_per_row)
            rate, loss = train(corpus, pathlib.Path(scratch, name), num_steps)
            tokens_per_second[name] = rate * tokens_per_row
            print(
                f"{name}: fill {split['fill']:.1%}, {num_steps} steps, "
                f"{rate * tokens_per_row:,.0f} real tokens/s, held-out masked-LM loss {loss:.3f}",
                flush=True,
            )
    packed, single = tokens_per_second.values()
    print(f"real tokens per second, packed / one pair per row: {packed / single:.3f}")


if __name__ == "__main__":
    app.run(main)
