r"""Another language and a domain: continued pre-training with a new vocabulary, or from scratch.

    python experiments/vocabulary.py --workdir=runs/vocabulary

English weights (BERT_TINY) are trained on Slovenian comments with a replaced vocabulary, and on
Reuters news with an extended one; beside both, a model of the same size is trained from scratch
with a vocabulary of its own, for the same steps. Losses of different vocabularies are compared in
nats per word: the loss of a token, with whole words masked, times the tokens per word. It is no
table of a paper. At this scale only.
"""

import csv
import json
import pathlib
import statistics
import sys

from absl import app, flags

from bert_jax.runtime.command_line import parse_flags
from bert_jax.tools.commands import run_command
from bert_jax.tools.fetch_data import fetch

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of data and runs.", required=True)
REPORT = pathlib.Path(__file__).parent / "reports/vocabulary.md"
NUM_SEEDS, NUM_WORDS, VOCAB_SIZE = 3, 1000, 4000
# Of all runs. A high rate, as the model is small and the steps are few.
TRAINING = {
    "num_steps": 600,
    "warmup_steps": 60,
    "learning_rate": 2e-3,
    "batch_size": 32,
    "eval_batch_size": 32,
    "long_phase.num_steps": 0,
    "next_sentence": False,
    "masking.unit": "whole_word",
    "optimizer": "adamw",
    "model.dtype": "float32",
    "model.dropout_rate": 0.0,
    "eval_every": 100_000,
    "checkpoint_every": 100_000,
    "log_every": 100,
}
REPORT_TEXT = """\
# A new vocabulary: continued pre-training, or from scratch

    python experiments/vocabulary.py --workdir=runs/vocabulary

English weights (BERT_TINY, 2 layers of hidden size 128) on 1,740 Slovenian comments (sl), with a
vocabulary that `replace_vocab.py` gives them, and on Reuters news (reuters), with {num_words:,}
words of `extend_vocab.py`; beside them models of the same size from scratch, with a vocabulary of
{vocab_size:,} pieces of the text. Each run has {num_steps} steps of 32 rows of 64 tokens at a rate
of {rate:g}, and masks whole words. Nats per word: the held-out loss of a token times the tokens per
word; mean, minimum and maximum over {num_seeds} seeds. The last column is what the frequencies of
tokens alone give.

{table}

A few hundred steps on small texts show how much of the weights survives a new vocabulary, not what
long training reaches. The English vocabulary strips accents, which tell letters of Slovenian apart,
so that its task is easier.
"""


def tool(name: str, *flags: str) -> None:
    run_command([sys.executable, f"tools/{name}.py", *flags])


def write_texts(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Writes a CSV of each text, with the column "text"; returns their paths."""
    (comments,) = fetch("slovenian-comments", workdir / "data")
    news, _ = fetch("reuters-r8", workdir / "data")
    paths = {}
    for name, source, column in (("sl", comments, "Content"), ("reuters", news, "Text")):
        with open(source, encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
        index = rows[0].index(column) if column in rows[0] else 1
        paths[name] = workdir / f"{name}.csv"
        texts = [row[index] for row in rows[3:] if len(row) > index]  # Some lines are empty.
        with open(paths[name], "w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([["text"], *([text] for text in texts)])
    return paths


def starts(workdir: pathlib.Path, texts: dict[str, pathlib.Path]) -> dict[tuple[str, str], tuple]:
    """Makes the vocabularies; returns the tokenizer and weights of each (text, way)."""
    fetch("bert-tiny-mlm", english := workdir / "english")
    own = {"sl": workdir / "sl.json", "reuters": workdir / "reuters.txt"}
    for name, text in texts.items():
        if not own[name].exists():
            flags = (f"--input={text}", f"--output={own[name]}", f"--size={VOCAB_SIZE}")
            # Carons tell letters of Slovenian apart.
            tool("train_vocab", *flags, *["--nostrip_accents"] * (name == "sl"))
    changed = {"sl": workdir / "replaced", "reuters": workdir / "extended"}
    source = f"--model={english}"
    if not changed["sl"].exists():
        flags = (f"--vocab={own['sl']}", f"--input={texts['sl']}")
        tool("replace_vocab", source, *flags, f"--output={changed['sl']}")
    if not changed["reuters"].exists():
        flags = (f"--input={texts['reuters']}", f"--add={NUM_WORDS}")
        tool("extend_vocab", source, *flags, f"--output={changed['reuters']}")
    ways = {}
    for name, verb in (("sl", "replaced"), ("reuters", "extended")):
        ways[name, "from scratch, its own vocabulary"] = own[name], None
        ways[name, f"continued, {verb} vocabulary"] = changed[name], changed[name]
        ways[name, "continued, the English vocabulary"] = english, english
    return ways


def train(workdir: pathlib.Path, text: pathlib.Path, tokenizer, weights, seed: int) -> dict:
    """Runs a pre-training; returns its result, and the tokens per word of its corpus."""
    name = f"{text.stem}-{pathlib.Path(tokenizer).stem}-{'continued' if weights else 'scratch'}"
    corpus = workdir / f"corpus/{text.stem}-{pathlib.Path(tokenizer).stem}"
    if not corpus.exists():
        flags = (f"--input={text}", f"--vocab={tokenizer}", f"--output={corpus}")
        rows = ("--rows=document_sentences", "--max_seq_length=64", "--heldout_fraction=0.1")
        tool("prepare_corpus", *flags, *rows, f"--language={'sl' if text.stem == 'sl' else 'en'}")
    return pretrain(workdir / f"runs/{name}-{seed}", corpus, weights, {"seed": seed})


def pretrain(run: pathlib.Path, corpus: pathlib.Path, weights, fields: dict) -> dict:
    """Runs a pre-training in `run`; returns its result, and the tokens per word of its corpus."""
    config, fields = "bert_tiny", TRAINING | {"corpus": corpus} | fields
    if weights:
        config, fields = "continue", fields | {"init_from": weights}
    if not (run / "result.json").exists():
        flags = [f"--config.{field}={value}" for field, value in fields.items()]
        module = ["-m", "bert_jax.pretrain", f"--config=configs/pretrain/{config}.py"]
        run_command([sys.executable, *module, f"--workdir={run}", *flags])
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    manifest = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))
    return result | {"tokens_per_word": manifest["text"]["tokens_per_word"]}


def main(argv: list[str]) -> None:
    del argv
    workdir = pathlib.Path(WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    texts = write_texts(workdir)
    lines = [
        "| text | way | tokens per word | nats per word: mean, min and max | word frequencies |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (name, way), (tokenizer, weights) in starts(workdir, texts).items():
        results = [
            train(workdir, texts[name], tokenizer, weights, seed) for seed in range(NUM_SEEDS)
        ]
        per_word = results[0]["tokens_per_word"]
        losses = [result["mlm_loss"] * per_word for result in results]
        lines.append(
            f"| {name} | {way} | {per_word:.2f} | {statistics.fmean(losses):.2f} "
            f"({min(losses):.2f} to {max(losses):.2f}) | "
            f"{results[0]['unigram_entropy'] * per_word:.2f} |"
        )
    text = REPORT_TEXT.format(
        num_words=NUM_WORDS,
        vocab_size=VOCAB_SIZE,
        num_steps=TRAINING["num_steps"],
        rate=TRAINING["learning_rate"],
        num_seeds=NUM_SEEDS,
        table="\n".join(lines),
    )
    print(text)
    REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
