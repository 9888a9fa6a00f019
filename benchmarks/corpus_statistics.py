r"""Compares the statistics of sentence pairs with the script released with BERT.

python benchmarks/corpus_statistics.py --dump=enwiki-latest-pages-articles1.xml.bz2 \
    --vocab=vocab.txt --released=DIR --tensorflow_python=PYTHON

DIR and PYTHON are as for `benchmarks/corpus.py`. Both programs make pairs of the same text with
several seeds, ours with `--rows=released_pairs`; each run yields one value per statistic, and
Welch's t-test compares the runs. Pairs of one document are not independent samples: all lengths
depend on one draw. In the text every sentence begins with "{" and ends with "}", so that
truncation shows.
"""

import collections
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import scipy.stats
from absl import app, flags
from corpus import SHIM  # the benchmark beside this one

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.inputs import Unit, find_inputs
from bert_corpus.readers import read_documents
from bert_corpus.sentences import split_sentences
from bert_jax.data.rows import Rows
from bert_jax.tokenizers.tokenizer import load_tokenizer

SEEDS = flags.DEFINE_integer("seeds", 12, "Runs of each program.")
FLAGS = flags.FLAGS
LENGTH = 128
SHORT = 96  # tokens: shorter pairs come from shortened documents, or the end of a document
MIN_P_VALUE = 0.01

# Runs where TensorFlow is: reads the pairs of a TFRecord, with their masked tokens restored.
READ = """
import json, sys
import tensorflow as tf
pairs = []
for record in tf.data.TFRecordDataset(sys.argv[1]):
    example = tf.train.Example.FromString(record.numpy())
    field = {n: list(f.int64_list.value) for n, f in example.features.feature.items()}
    tokens, length = field["input_ids"], sum(field["input_mask"])
    for position, target in zip(field["masked_lm_positions"], field["masked_lm_ids"]):
        if position:
            tokens[position] = target
    second = length - sum(field["segment_ids"])
    spans = tokens[1:second - 1], tokens[second:length - 1]
    pairs.append((*spans, field["next_sentence_labels"][0]))
print(json.dumps(pairs))
"""


def released_pairs(text: str, seed: int) -> list:
    with tempfile.TemporaryDirectory() as scratch:
        settings = {"input_file": text, "output_file": f"{scratch}/out", "dupe_factor": 1}
        settings |= {"vocab_file": FLAGS.vocab, "max_seq_length": LENGTH, "random_seed": seed}
        command = [FLAGS.tensorflow_python, "-c", SHIM, FLAGS.released]
        command += [f"--{name}={value}" for name, value in settings.items()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        command = [FLAGS.tensorflow_python, "-c", READ, f"{scratch}/out"]
        return json.loads(
            subprocess.check_output(command, stderr=subprocess.DEVNULL).splitlines()[-1]
        )


def our_pairs(text: str, seed: int) -> list:
    config = CorpusConfig(
        rows="released_pairs",
        sentences="lines",
        heldout_fraction=0,
        seed=seed,
        max_seq_length=LENGTH,
    )
    with tempfile.TemporaryDirectory() as output:
        build_corpus(text, load_tokenizer(FLAGS.vocab), output, config)
        rows = Rows(output)
        batch = rows.read(0, rows.num_rows)
    return [
        (tokens[start + 1 : second - 1], tokens[second : end - 1], label)
        for tokens, bounds, labels in zip(
            batch["tokens"].tolist(),
            batch["sequence_bounds"].tolist(),
            batch["nsp_labels"].tolist(),
            strict=True,
        )
        for (start, second, end), label in zip(bounds, labels, strict=True)
        if end
    ]


def statistics_of(pairs: list, begin: int, end: int) -> dict[str, float]:
    """Returns one value per statistic; sentences are between the ids `begin` and `end`."""
    firsts, seconds, labels = zip(*pairs, strict=True)
    lengths = np.array([len(first) + len(second) + 3 for first, second, _ in pairs])
    result = {
        "pairs": len(pairs),
        "share labeled NotNext": np.mean(labels),
        "mean tokens of a pair": lengths.mean(),
        "share of pairs of under 96 tokens": np.mean(lengths < SHORT),
        "deviation of the tokens of a pair": lengths.std(),
    }
    for name, spans in (("first", firsts), ("second", seconds)):
        result |= {
            f"mean tokens of the {name} span": np.mean(list(map(len, spans))),
            f"share of {name} spans truncated at the front": np.mean(
                [span[0] != begin for span in spans]
            ),
            f"share of {name} spans truncated at the back": np.mean(
                [span[-1] != end for span in spans]
            ),
        }
    return result


def main(argv: list[str]) -> None:
    del argv
    tokenizer = load_tokenizer(FLAGS.vocab)
    begin, end = map(tokenizer.token_to_id, "{}")
    with tempfile.TemporaryDirectory() as scratch:
        text = pathlib.Path(scratch, "text.txt")
        with open(text, "w", encoding="utf-8") as stream:
            for source in find_inputs(FLAGS.dump):
                for document in read_documents(Unit(source, 0, 1), collections.Counter()):
                    for sentence in split_sentences(document):
                        stream.write("{ " + sentence.translate({123: " ", 125: " "}) + " }\n")
                    stream.write("\n")
        runs: dict[str, list[dict]] = {"released": [], "ours": []}
        for seed in range(SEEDS.value):
            for name, make in (("released", released_pairs), ("ours", our_pairs)):
                runs[name].append(statistics_of(make(str(text), seed), begin, end))
    failed = []
    print(f"{'mean of the runs':<48} released     ours   p of Welch's t-test")
    for name in runs["ours"][0]:
        released, ours = (np.array([run[name] for run in runs[side]]) for side in runs)
        p_value = scipy.stats.ttest_ind(released, ours, equal_var=False).pvalue
        print(f"{name:<48} {released.mean():8.4g} {ours.mean():8.4g}   {p_value:.3f}")
        if p_value < MIN_P_VALUE:
            failed.append(name)
    if failed:
        sys.exit(f"differ: {', '.join(failed)}")


if __name__ == "__main__":
    app.run(main)
