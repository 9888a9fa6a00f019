"""ELECTRA_BASE: 12 layers, hidden 768, 12 heads; a generator of a third; 110 M parameters.

Source: Clark et al. (2020), table 6: as electra_small.py, with 766,000 steps of 256 rows of 512
tokens, learning rate 2e-4, and embeddings as wide as the hidden states.

Expected time: 4 days on 16 TPU v3 in the paper; tools/tpu_report.py estimates it.
Expected result: MNLI-m 88.8, SQuAD 1.1 EM 86.8 for the released model (README of the released
code). Not run at full size.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=vocab.txt \
        --rows=sentence_order --max_seq_length=512 --output=corpus/512
    python -m bert_jax.pretrain --config=configs/pretrain/electra_base.py --workdir=runs/electra \
        --config.long_phase.corpus=corpus/512

`electra_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import electra_small, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = electra_small.get_config()
    config.model.hidden_size = None  # As set by `size`, "base".
    config.model.embedding_size = None  # As wide as the hidden states.
    config.generator.hidden_fraction = 1 / 3
    config.num_steps = 0  # All rows have 512 tokens.
    config.long_phase.num_steps = 766_000
    config.long_phase.batch_size = 256
    config.learning_rate = 2e-4
    return fields.apply_runlocal(config, arg)
