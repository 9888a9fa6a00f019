"""SWAG: which of four endings goes on with a story; 73,546 examples to train on, 20,006 for dev.

Source: Devlin et al. (2018), section 4.4: batch 16, learning rate 2e-5, 3 epochs.

Expected result: dev accuracy 81.6 with BERT_BASE and 86.6 with BERT_LARGE (table 4). Not run at
full size here: the data is not to be had from a package index.
Expected time: not measured.

    python -m bert_jax.finetune --config=configs/finetune/swag.py --workdir=runs/swag \
        --config.init_from=runs/base --config.data.directory=swag/data

`directory` holds train.csv, val.csv and perhaps test.csv, of which predictions are written, or is
the name of a TFDS set with their columns, as tfds:NAME, prepared as ArrayRecord. Afterwards
`bert_jax.load(DIR).rank(story, endings)` gives the order of any number of endings. With
`--config.num_epochs=0` and the workdir of such a run as `init_from` nothing is trained: train.csv
is not read, and val.csv scored if it is there.
"""

from ml_collections import ConfigDict

from configs.finetune import text_classification


def get_config(arg: str = "") -> ConfigDict:
    config = text_classification.get_config()
    config.task = "multiple_choice"
    config.data = ConfigDict({"directory": ""})
    config.batch_size = 16
    config.learning_rate = 2e-5
    return text_classification.cut_down(config, arg)
