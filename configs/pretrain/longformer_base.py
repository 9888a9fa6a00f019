"""Longformer, base: a RoBERTa_BASE with windows and tiled positions, trained on rows of 4,096.

Source: Beltagy et al. (2020), section 5 and table 5: 65,000 updates of batches of 2^18 tokens (64
rows of 4,096), learning rate 3e-5 after 500 steps of warm-up, then a decay with power 3; the other
hyperparameters are RoBERTa's: masked LM, Adam with beta2 0.98, epsilon 1e-6, weight decay 0.01, no
gradient clipping. No token is global: tools/make_longformer.py copies the projections of global
tokens again afterwards.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: bits per character on held-out text 1.957 before, 1.753 after 2,000 steps and 1.705
after all; RoBERTa_BASE on rows of 512 has 1.846 (table 5). Not run at full size.

    python tools/make_longformer.py --model=roberta-base --output=longformer
    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=longformer \
        --rows=full_sentences --max_seq_length=4096 --output=corpus/4096
    python -m bert_jax.pretrain --config=configs/pretrain/longformer_base.py \
        --workdir=runs/longformer --config.init_from=longformer --config.corpus=corpus/4096
    python tools/make_longformer.py --model=runs/longformer --output=longformer_trained

For a model of another size, add --config.model.size=None, and with other windows nothing: they are
those of the weights. `longformer_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields
from bert_jax.runtime.config_fields import Field, make_config

NOT_OF_LONGFORMER = ("model.embedding_size", "model.shares_layers")
WINDOW = Field(None, "Half of it is on each side. None: that of the weights, or 512.", kind=int)


def get_config(arg: str = "") -> ConfigDict:
    known = {name: field for name, field in fields.FIELDS.items() if name not in NOT_OF_LONGFORMER}
    config = make_config(known | {"model.attention_window": WINDOW})
    config.program = "pretrain"
    config.model.architecture = "longformer"
    config.model.layer_norm_epsilon = 1e-5
    config.model.max_position_embeddings = 4096
    config.next_sentence = False

    config.long_phase.num_steps = 0
    config.max_seq_length = 4096
    config.num_steps = 65_000
    config.batch_size = 64
    config.optimizer = "adamw"
    config.learning_rate = 3e-5
    config.warmup_steps = 500
    config.decay_from = "warmup_end"
    config.decay_power = 3.0
    config.beta2 = 0.98
    config.clip_norm = 1e9  # No clipping.
    return fields.apply_runlocal(config, arg)
