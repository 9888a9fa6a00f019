"""Continued pre-training from existing weights on text of your own domain.

Source: Gururangan et al. (2020), section 3: 12,500 steps on text of the domain, before fine-tuning.
The README of the released code recommends this learning rate. Differences: batches of 256, and bias
correction, because the optimizer state starts from zero.

The weights, a workdir, a checkpoint, or a directory of transformers or of Google's release,
determine the model config. The corpus must have their vocabulary. A missing head is randomly
initialized; the log names it.

Expected time: not run at full size.
Expected result: a lower masked-LM loss on text of the domain; by how much depends on the domain.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=bert-base-uncased/vocab.txt \
        --output=corpus/domain --max_seq_length=128
    python -m bert_jax.pretrain --config=configs/pretrain/continue.py --workdir=runs/domain \
        --config.init_from=bert-base-uncased --config.corpus=corpus/domain

`continue.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from bert_jax.configs.pretrain import bert_base, fields


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config()
    config.num_steps = 12_500
    config.long_phase.num_steps = 0

    config.model.architecture = config.model.size = placeholder(str)
    for name, dtype in (("layer_norm_epsilon", float), ("max_position_embeddings", int)):
        config.model[name] = placeholder(dtype)  # From the weights.

    config.optimizer = "adamw"
    config.learning_rate = 2e-5
    config.warmup_steps = 600
    config.eval_every = config.checkpoint_every = 1_000
    return fields.apply_runlocal(config, arg)
