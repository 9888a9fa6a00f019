"""Classification or regression of texts or pairs: CSV, TSV, JSONL, TFDS or a data set of the Hub.

Source: fine-tuning as in Devlin et al. (2018), section 4.1 and appendix A.3: batch 16 or 32,
learning rate 5e-5, 3e-5 or 2e-5, 2 to 4 epochs; Adam with bias correction, without which training
on small sets is unstable (Mosbach et al., 2021). All other configs in this directory build on this
one.

Expected time and result: depend on your data; reuters_r8.py is an example.

    python -m bert_jax.finetune --config=configs/finetune/text_classification.py \
        --workdir=runs/mine --config.init_from=runs/base \
        --config.data.train=train.csv --config.data.dev=dev.csv

A file has a header with the names of its columns, by default `text` and `label`; in TSV a field is
quoted if it begins and ends with a quotation mark and doubles those inside. `tfds:NAME`,
prepared as ArrayRecord, is its train, validation or test split; `tfds:NAME#train[90%:]` another.
`--config.data.hub=nyu-mll/glue:mrpc` reads a data set of the Hugging Face Hub. If the labels of
`dev` or `test` are empty, or `test` has no such column, it is predicted, not scored.
Labels that are numbers are compared as numbers: 1, 1.0 and 01 are one class. An empty text is an
error in `train` and in a labeled `dev`; elsewhere it is predicted.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune.fields import HUB, apply_runlocal, make_task_config
from bert_jax.runtime.config_fields import Field

DATA_PATHS = {
    "data.train": Field("", "Examples to train on."),
    "data.dev": Field("", "Its score selects the best checkpoint."),
    "data.test": Field("", "Only predicted by the best checkpoint, and scored if it has labels."),
    "data.hub": HUB,
    "data.data_dir": Field("", "Directory of prepared TFDS sets; default: TFDS's own."),
}
DATA = {
    "data.text": Field("text", "Column of the text."),
    "data.text_pair": Field("", "Column of the second text of a pair; empty: single texts."),
    "data.label": Field("label", "Column of the label."),
    "data.id": Field("", "Column of unique ids, written to the predictions; empty: numbers."),
    "data.header_lines": Field(1, "The first names the columns, the others are skipped."),
    "data.labels": Field(
        (), "Default: the labels in train, sorted (numbers by value); as a flag: a,b."
    ),
    "data.regression": Field(False, "The label is a number."),
    "data.raw_targets": Field(
        False,
        "Trains a regression on the labels as they are. By default, a new head is trained on "
        "labels standardized by their mean and deviation in train; in both cases it predicts "
        "unscaled labels.",
    ),
    "data.label_separator": Field(
        "",
        "Multi-label: what separates the labels of a text, such as | in a|b. JSONL may also have "
        "lists: [] means no label, null unknown labels.",
    ),
    "data.label_columns": Field(
        (),
        "Multi-label: columns of 0 and 1 (or false and true), one for each label, whose names are "
        "the labels: red,blue. In place of data.label and data.label_separator.",
    ),
    "data.positive_weights": Field(
        (),
        "Multi-label: weights of the positive term of labels in the loss, by name: a=5,b=2 (others "
        "1), or for each label. balanced: negative / positive examples in train. Default: 1 each.",
    ),
    "data.tune_thresholds": Field(
        False,
        "Multi-label: predicts a label above the probability that has the best F1 on dev for this "
        "label, stored with the head. By default above 0.5.",
    ),
    "data.metric": Field(
        "",
        "Selects the best checkpoint; default: accuracy, pearson or micro_f1. Also macro_f1, "
        "spearman, r2, and for two classes matthews, and roc_auc or average_precision of the "
        "positive class: the larger number, or else the second of data.labels.",
    ),
}


def get_config(arg: str = "") -> ConfigDict:
    return apply_runlocal(make_task_config("text_classification", DATA_PATHS | DATA), arg)
