"""ELECTRA_SMALL: 12 layers, hidden 256, embeddings 128; a generator of a quarter; 14 M parameters.

Source: Clark et al. (2020), sections 2 and 3, table 6 and the released code: a generator replaces
15 % of the tokens, of which its input shows 85 % as [MASK] and the others as they are; the
discriminator, with 50 times the generator's weight, finds the replaced ones. A million steps of 128
rows of 128 tokens; Adam, learning rate 5e-4 after 10,000 steps of warm-up; no next-sentence
prediction. The released code's rows are two consecutive spans; the closest row format here is
sentence order, which swaps the spans in half of the rows. The released small model has a generator
as large as the discriminator, and more steps: --config.generator.hidden_fraction=1.0.

Expected time: 4 days on one V100 in the paper; tools/tpu_report.py estimates it on TPUs.
Expected result: MNLI-m 81.3 for the released model, 78.9 for one trained for a million steps on
OpenWebText (README of the released code). Not run at full size.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=vocab.txt \
        --rows=sentence_order --max_seq_length=128 --output=corpus/128
    python -m bert_jax.pretrain --config=configs/pretrain/electra_small.py --workdir=runs/electra \
        --config.corpus=corpus/128

`electra_small.py:runlocal` runs a few steps of eight rows instead. The run's workdir is the
discriminator's, to fine-tune; its generator is written by tools/convert_checkpoint.py --generator.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, pod_base
from bert_jax.runtime.config_fields import make_config


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_base.get_config()
    config.model.family = "electra"  # How other libraries store it.
    config.model.hidden_size = 256
    config.model.embedding_size = 128  # A dense layer widens it to the hidden size.
    config.model.pooler_activation = "gelu"  # Of the dense layer below a classifier.

    config.objective = "replaced_tokens"
    config.next_sentence = False
    config.generator = make_config(fields.GENERATOR).generator
    config.masking.mask_fraction = 0.85
    config.masking.keep_fraction = 0.15
    config.masking.random_fraction = 0.0

    config.num_steps = 1_000_000
    config.batch_size = 128
    config.long_phase.num_steps = 0  # All rows have 128 tokens.
    config.shard_weight_update = True
    config.learning_rate = 5e-4
    config.warmup_steps = 10_000
    return fields.apply_runlocal(config, arg)
