"""ALBERT_BASE: 12 layers that share their parameters, hidden 768; 12 M parameters.

Source: Lan et al. (2020), sections 3 and 4.1: batches of 4,096 rows of 512 tokens, 125,000 steps;
LAMB, learning rate 1.76e-3; masks of up to three words (p proportional to 1 / n); sentence order
instead of next sentence; a SentencePiece vocabulary of 30,000 pieces. The warm-up of 3,125 steps
and no dropout are from the released version 2.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: MNLI-m 84.6, SQuAD 1.1 F1 90.2: the released version 2,
trained for 10 M steps on more text. Not run at full size.

    python tools/train_vocab.py --kind=sentencepiece --size=30000 --input='texts/*.txt' \
        --output=albert/spiece.model
    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=albert/spiece.model \
        --rows=sentence_order --max_seq_length=512 --output=albert/512
    python -m bert_jax.pretrain --config=configs/pretrain/albert_base.py --workdir=runs/albert \
        --config.long_phase.corpus=albert/512

`albert_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_base.get_config()
    config.model.family = "albert"  # How other libraries store it.
    config.model.embedding_size = 128  # A dense layer widens it to the hidden size.
    config.model.shares_layers = True  # All layers share one set of parameters.
    config.model.activation = "gelu_tanh"  # Of feed-forward layers and the masked-LM head.
    config.model.dropout_rate = 0.0
    config.masking.unit = "ngram"

    config.num_steps = 0  # Skips the phase with rows of 128.
    config.long_phase.num_steps = 125_000
    config.batch_size = config.long_phase.batch_size = 4096
    config.per_device_batch_size = 16
    config.shard_weight_update = True
    config.optimizer = "lamb"
    config.learning_rate = 1.76e-3
    config.warmup_steps = 3_125
    return fields.apply_runlocal(config, arg)
