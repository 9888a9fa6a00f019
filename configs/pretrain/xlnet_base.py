"""XLNet, base: 12 layers, hidden 768, 12 heads; 117 M parameters; permutation language modeling.

Source: Yang et al. (2019), the hyperparameters of the large model (table 8 of the appendix, from
memory: 500,000 steps of 8,192 rows of 512 tokens, learning rate 4e-4 with 40,000 steps of warm-up
and linear decay, epsilon 1e-6, weight decay 0.01), with BERT_BASE's sizes, and its 256 rows,
1e-4 and 10,000 steps of warm-up, as in the comparison at equal data (section 3.4). A sixth of the
tokens are predicted, in n-grams of 1 to 5 words, as in the released code (85 of 512).

Differences: no memory of earlier segments, and so permutations of whole sequences of 512 tokens,
not of halves; no second half of a batch that is read from right to left; rows of full sentences,
not pairs, whose labels XLNet does not predict either.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: MNLI-m 86.8 of the released model, which was trained on more text, with memory.
Not run at full size.

    python tools/train_vocab.py --input='texts/*.txt' --kind=xlnet --size=32000 --output=xlnet.json
    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=xlnet.json --rows=full_sentences \
        --max_seq_length=512 --output=xlnet/512
    python -m bert_jax.pretrain --config=configs/pretrain/xlnet_base.py --workdir=runs/xlnet \
        --config.corpus=xlnet/512

--vocab may also be the directory of a released XLNet, with its `spiece.model` and `config.json`.
`xlnet_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields
from bert_jax.runtime.config_fields import make_config

NOT_OF_XLNET = ("model.embedding_size", "model.shares_layers")


def get_config(arg: str = "") -> ConfigDict:
    known = {name: field for name, field in fields.FIELDS.items() if name not in NOT_OF_XLNET}
    config = make_config(known)
    config.program = "pretrain"
    config.model.architecture = "xlnet"
    config.objective = "permutation"
    config.next_sentence = False
    config.masking.rate = 1 / 6
    config.masking.unit = "ngram"
    config.masking.keep_fraction = 1.0  # Predicted tokens are not replaced.
    config.masking.mask_fraction = config.masking.random_fraction = 0.0

    config.long_phase.num_steps = 0
    config.max_seq_length = 512
    config.num_steps = 1_000_000
    config.batch_size = 256
    config.learning_rate = 1e-4
    config.warmup_steps = 10_000
    return fields.apply_runlocal(config, arg)
