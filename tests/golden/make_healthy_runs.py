"""Generates healthy_runs.json.gz: the metrics and configurations of ten short runs that learn.

python tests/golden/make_healthy_runs.py

Each pre-trains a small model on the language of experiments/toy_language.py, of which it soon
predicts more than the frequencies of words. Takes minutes on a CPU.
"""

import gzip
import json
import pathlib
import random
import sys
import tempfile

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax import pretrain
from bert_jax.configs.pretrain import bert_tiny
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.json_lines import read_lines

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments"))
import toy_language

PATH = pathlib.Path(__file__).with_name("healthy_runs.json.gz")

# What differs from `base_config`.
RUNS = [
    {},
    {"seed": 1, "learning_rate": 1e-3},
    {"seed": 2, "optimizer": "lamb", "learning_rate": 1e-2},
    {"seed": 3, "optimizer": "stable_adamw"},
    {"seed": 4, "next_sentence": False, "batch_size": 16},
    {"seed": 5, "long_phase.num_steps": 100},
    {"seed": 6, "decay_steps": 100},
    {"seed": 7, "objective": "left_to_right", "next_sentence": False},
    {"seed": 8, "log_every": 1, "eval_every": 20},
    {"seed": 9, "model.num_layers": 2, "masking.rate": 0.3},
]


def write_text(path: pathlib.Path) -> None:
    rng = random.Random(0)
    documents = [
        "\n".join(" ".join(toy_language.random_sentence(rng)) for _ in range(30))
        for _ in range(400)
    ]
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def base_config(directory: pathlib.Path):
    config = bert_tiny.get_config()
    config.corpus, config.long_phase.corpus = (str(directory / str(n)) for n in (32, 64))
    config.num_steps, config.long_phase.num_steps, config.warmup_steps = 240, 0, 20
    config.batch_size, config.long_phase.batch_size, config.eval_batch_size = 32, 16, 64
    config.optimizer, config.learning_rate = "adamw", 3e-3
    config.model.num_layers = 1
    config.model.update({"dtype": "float32", "dropout_rate": 0.0, "initializer_range": 0.05})
    config.log_every, config.eval_every, config.checkpoint_every = 10, 40, 1000
    config.max_eval_batches = 4
    return config


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        write_text(directory / "text.txt")
        words = sorted(set((directory / "text.txt").read_text().replace(".", "").split()))
        tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt", words))
        for length in (32, 64):
            settings = CorpusConfig(
                max_seq_length=length, max_sequences=4, heldout_fraction=0.1, sentences="lines"
            )
            text = str(directory / "text.txt")
            build_corpus(text, tokenizer, directory / str(length), settings, num_processes=1)
        runs = []
        for number, changes in enumerate(RUNS):
            config = base_config(directory)
            config.update_from_flattened_dict(changes)
            workdir = directory / f"run_{number}"
            pretrain.train_and_evaluate(config.lock(), workdir)
            stored = json.loads((workdir / "config.json").read_text())
            kept = {name: stored[name] for name in config}
            runs.append({"config": kept, "lines": read_lines(workdir / "metrics.jsonl")})
    content = json.dumps(runs, separators=(",", ":")).encode()
    PATH.write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main()
