"""ESM-2 of 8 M parameters, for proteins: 6 layers, hidden 320, 20 heads; or another of its sizes.

Source: Lin et al. (2023), supplement A.1: 500,000 steps of 2 M tokens, sequences of up to 1,024
tokens, masks of 15 %, no dropout; a learning rate of 4e-4 after 2,000 steps of warm-up; Adam with
beta2 0.98, epsilon 1e-8, weight decay 0.01. Only the steps and tokens were checked against a second
source: compare the rest with the paper before a long run. Differences: there the rate falls to a
tenth, here to 0; and there each sequence is drawn anew from a cluster of similar ones.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: none that compares, as the held-out proteins are others. Not run.

MODEL is a directory with the tokenizer of an ESM.

    python tools/prepare_corpus.py --input=proteins.fasta --rows=single_segments \
        --max_seq_length=1024 --vocab=MODEL --output=proteins/1024
    python -m bert_jax.pretrain --config=configs/pretrain/esm2_8m.py --workdir=runs/esm \
        --config.corpus=proteins/1024

To train a released model further instead: --config=configs/pretrain/continue.py
--config.init_from=MODEL --config.next_sentence=False --config.model.dropout_rate=0.

`--config.model.size=35m` is another size: 150m, 650m, 3b, 15b, or esm-1b, which has a table of
positions. `esm2_8m.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields
from bert_jax.runtime.config_fields import make_config

NOT_OF_ESM = ("model.embedding_size", "model.shares_layers")


def get_config(arg: str = "") -> ConfigDict:
    known = {name: field for name, field in fields.FIELDS.items() if name not in NOT_OF_ESM}
    config = make_config(known)
    config.program = "pretrain"
    config.model.architecture = "esm"
    config.model.size = "8m"
    config.model.dropout_rate = 0.0
    config.model.layer_norm_epsilon = 1e-5
    config.model.max_position_embeddings = 1024
    config.next_sentence = False

    config.long_phase.num_steps = 0
    config.max_seq_length = 1024
    config.num_steps = 500_000
    config.batch_size = 2048
    config.optimizer = "adamw"
    config.learning_rate = 4e-4
    config.warmup_steps = 2_000
    config.beta2 = 0.98
    config.epsilon = 1e-8
    config.decay_from = "warmup_end"
    return fields.apply_runlocal(config, arg)
