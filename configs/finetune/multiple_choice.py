"""Multiple choice of your own, in JSONL: which of several choices answers or continues a text.

Source: Devlin et al. (2018), section 4.4: batch 16, learning rate 2e-5, 3 epochs.

Expected time and result: depend on your data; swag.py is the paper's.

    python -m bert_jax.finetune --config=configs/finetune/multiple_choice.py \
        --workdir=runs/choices --config.init_from=runs/base \
        --config.data.train=train.jsonl --config.data.dev=dev.jsonl

A line has a context, a question, or both, and the choices; the label is the index of the correct
one, from 0: {"context": "It rained.", "question": "What is wet?", "choices": ["The street", "The
sun"], "label": 0}. All examples of a run have the same number of choices; a trained head takes any.
A `test` file without labels is predicted, but not scored.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import fields
from bert_jax.runtime.config_fields import Field

DATA_PATHS = {
    "data.train": Field("", "Examples to train on, in JSONL, Parquet or TFDS."),
    "data.dev": Field("", "Its accuracy selects the best checkpoint."),
    "data.test": Field("", "Only predicted by the best checkpoint, and scored if it has labels."),
    "data.directory": Field(
        "", "In place of these, SWAG: with train.csv and val.csv, or tfds:NAME."
    ),
    "data.data_dir": Field("", "Directory of prepared TFDS sets; default: TFDS's own."),
}
DATA = {}


def get_config(arg: str = "") -> ConfigDict:
    config = fields.make_task_config("multiple_choice", DATA_PATHS | DATA)
    config.batch_size = 16
    config.learning_rate = 2e-5
    return fields.apply_runlocal(config, arg)
