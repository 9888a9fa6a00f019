"""MPNet, base: 12 layers, hidden 768, 12 heads; 110 M parameters; trained as a masked LM.

Source: the released model (its sizes and LayerNorm's epsilon) and the instructions of its code
(Song et al., 2020): 125,000 steps of rows of 512 tokens; Adam with beta2 0.98, epsilon 1e-6, weight
decay 0.01, no gradient clipping; learning rate 5e-4 after 10,000 steps of warm-up; masks of whole
words, relative positions. The batch of 2,048 rows is that of RoBERTa's instructions for as many
steps: theirs state 256 rows per device. The released model had 500,000 steps.

The difference: a masked LM, the objective "mlm" of that code. MPNet's own objective, which predicts
a permutation of the tokens in two streams, is not implemented here.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: none is published for this objective with relative positions. Not run.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=MODEL --rows=full_sentences \
        --max_seq_length=512 --output=mpnet/512
    python -m bert_jax.pretrain --config=configs/pretrain/mpnet_base.py --workdir=runs/mpnet \
        --config.corpus=mpnet/512

MODEL is a directory with the tokenizer of an MPNet. Padding has the id 1 in it, as transformers
assumes. `mpnet_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields
from bert_jax.runtime.config_fields import make_config

NOT_OF_MPNET = ("model.embedding_size", "model.shares_layers")


def get_config(arg: str = "") -> ConfigDict:
    known = {name: field for name, field in fields.FIELDS.items() if name not in NOT_OF_MPNET}
    config = make_config(known)
    config.program = "pretrain"
    config.model.architecture = "mpnet"
    config.model.layer_norm_epsilon = 1e-5
    config.next_sentence = False
    config.masking.unit = "whole_word"

    config.long_phase.num_steps = 0
    config.max_seq_length = 512
    config.num_steps = 125_000
    config.batch_size = 2048
    config.optimizer = "adamw"
    config.learning_rate = 5e-4
    config.warmup_steps = 10_000
    config.beta2 = 0.98
    config.clip_norm = 1e9  # No clipping.
    config.decay_from = "warmup_end"
    return fields.apply_runlocal(config, arg)
