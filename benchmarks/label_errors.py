"""Counts how many wrong labels tools/errors.py lists first, of labels that this flips in R8.

    python tools/fetch_data.py reuters-r8 runs/data/reuters-r8
    python benchmarks/label_errors.py --train=runs/data/reuters-r8/reuters-r8-train.tab

Gives a share of the training examples another class, drawn with a seed, and ranks all labels.
"""

import pathlib
import tempfile

import numpy as np
from absl import app, flags

from bert_jax.configs.finetune import reuters_r8
from bert_jax.runtime.command_line import parse_flags
from bert_jax.tasks import tables, text_classification
from bert_jax.tools.errors import find_label_errors

flags.DEFINE_string("train", None, "The training file of R8.", required=True)
flags.DEFINE_float("share", 0.05, "Of the labels that are flipped.", 0, 1)
flags.DEFINE_integer("seed", 0, "Of the choice of the examples and of their wrong classes.")


def main(argv: list[str]) -> None:
    values, data = flags.FLAGS, reuters_r8.get_config().data
    records = text_classification.read_records(values.train, "train", data, {})
    names = sorted({record.columns[data.label] for record in records})
    rng = np.random.default_rng(values.seed)
    count = round(values.share * len(records))
    flipped = rng.choice(len(records), count, replace=False).tolist()
    steps = dict(zip(flipped, rng.integers(1, len(names), count).tolist(), strict=True))
    lines = []
    for number, record in enumerate(records):
        index = names.index(record.columns[data.label]) + steps.get(number, 0)
        label = names[index % len(names)]
        lines.append({data.text: record.columns[data.text], data.label: label})
    with tempfile.TemporaryDirectory() as directory:
        data.train = str(pathlib.Path(directory, "train.jsonl"))
        tables.write_json_lines(pathlib.Path(data.train), lines)
        found = find_label_errors(data, ())
    listed = [int(line["location"].rpartition(" ")[2]) - 1 for line in found]
    for share in (values.share, 2 * values.share):
        first = listed[: round(share * len(records))]
        num_found = len(steps.keys() & set(first))
        print(f"in the first {len(first):,} of {len(records):,}: {num_found} of {count} flipped")
    probable = [
        number for number, line in zip(listed, found, strict=True) if line["is_probable_error"]
    ]
    print(f"probable errors: {len(probable)}, flipped: {len(steps.keys() & set(probable))}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
