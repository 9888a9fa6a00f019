"""The feature-based approach on CoNLL-2003: a BiLSTM on hidden states of a frozen encoder.

Source: Devlin et al. (2018), section 5.3 and table 7. Development F1 for BERT_BASE, cased:

    features           paper
    embeddings         91.0
    second_to_last     95.6
    last               94.9
    weighted_sum       95.5 (all layers)
    sum_last_four      95.9 (weighted in the paper)
    concat_last_four   96.1

Expected time: not measured.
Expected result: the table above. Not run at full size.

    python tools/fetch_data.py conll2003 runs/data/conll2003
    python -m bert_jax.finetune --config=configs/finetune/feature_based.py --workdir=runs/features \
        --config.init_from=runs/base --config.features=last
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import conll2003, fields
from bert_jax.runtime.config_fields import Field, make_config

# Further fields of this configuration.
FIELDS = {
    "features": Field(
        "concat_last_four", "Hidden states that the BiLSTM reads: a row of the table above."
    ),
    "lstm_size": Field(768, "Units per direction, in each of two layers."),
}


def get_config(arg: str = "") -> ConfigDict:
    config = conll2003.get_config()
    config.update(make_config(FIELDS))
    config.learning_rate = 1e-3  # Only the new head is trained.
    config.num_epochs = 10.0
    if arg:
        config.lstm_size = 64
    return fields.apply_runlocal(config, arg)
