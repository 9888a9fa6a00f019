"""DeBERTa-v3, base: 12 layers, hidden 768, 12 heads; 184 M parameters, and a generator of 6 layers.

Source: the released code (`rtd.sh`, `rtd_base.json`) for what He et al. (2021) describe; the runs
of the paper may have had other batches. Replaced tokens, with a generator of half the layers and
the same width, and embeddings whose gradients are disentangled; one million steps of 256 rows of
512 tokens, learning rate 1e-4, warm-up of 10,000 steps; 15 % of the tokens are masked, always by
[MASK]; a vocabulary of 128,100 pieces. The weight of the discriminator's loss is 50 in the paper,
and 10 in the code, as here.

Differences: the discriminator's head is ELECTRA's (the released one also reads the hidden state of
[CLS]); and the generator predicts with a plain head, without the enhanced mask decoder, which is
an objective of its own (--config.objective=enhanced_masked_lm, without a discriminator).

The sizes of `--config.model.size` are xsmall, small, base and large, and v2-xlarge and v2-xxlarge
of version 2, with their convolution. For xsmall, the released code has 64 rows and a learning rate
of 3e-4.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: MNLI-m 90.6, SQuAD 2.0 F1 88.4 in the paper, on 160 GB of text. Not run at full
size.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=MODEL \
        --rows=document_sentences --max_seq_length=512 --output=corpus/512
    python -m bert_jax.pretrain --config=configs/pretrain/deberta_v3_base.py \
        --workdir=runs/deberta --config.corpus=corpus/512

MODEL is a directory with a tokenizer, such as one of DeBERTa-v3.
`deberta_v3_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields
from bert_jax.runtime.config_fields import make_config


def get_config(arg: str = "") -> ConfigDict:
    of_bert = {name for name in fields.TRAINING if name.startswith("model.")}
    others = {name: field for name, field in fields.FIELDS.items() if name not in of_bert}
    config = make_config(others | fields.DEBERTA | fields.GENERATOR)
    config.program = "pretrain"
    config.objective = "replaced_tokens"
    config.next_sentence = False
    config.masking.mask_fraction = 1.0
    config.masking.keep_fraction = config.masking.random_fraction = 0.0
    config.generator.hidden_fraction = 1.0
    config.generator.num_layers = 6
    config.generator.disentangles_embeddings = True
    config.generator.discriminator_weight = 10.0

    config.max_seq_length = 512
    config.batch_size = 256
    config.num_steps = 1_000_000
    config.long_phase.num_steps = 0
    config.learning_rate = 1e-4
    config.warmup_steps = 10_000
    return fields.apply_runlocal(config, arg)
