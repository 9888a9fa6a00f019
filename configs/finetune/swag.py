"""SWAG: choose which of four endings continues a story; 73,546 examples in train, 20,006 in dev.

Source: Devlin et al. (2018), section 4.4: batch 16, learning rate 2e-5, 3 epochs.

Expected time: not measured.
Expected result: dev accuracy 81.6 with BERT_BASE, 86.6 with BERT_LARGE (table 4). Not run at full
size.

    python -m bert_jax.finetune --config=configs/finetune/swag.py --workdir=runs/swag \
        --config.init_from=runs/base --config.data.directory=swag/data

`directory` holds train.csv, val.csv and optionally test.csv, which is only predicted; or it is
tfds:NAME, a TFDS set with the same columns, prepared as ArrayRecord. Afterwards
`bert_jax.load(DIR).rank(story, endings)` ranks any number of endings. For your own choices, see
multiple_choice.py.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import multiple_choice


def get_config(arg: str = "") -> ConfigDict:
    return multiple_choice.get_config(arg)
