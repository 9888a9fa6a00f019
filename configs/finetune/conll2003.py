"""CoNLL-2003 named entities in English news: persons, organizations, locations, miscellaneous.

Source: Devlin et al. (2018), section 5.3 and table 7: 96.4 dev and 92.4 test F1 for BERT_BASE
(cased, with document context), 96.6 and 92.8 for BERT_LARGE. Appendix A.3 gives the ranges: batch
16 or 32, learning rate 5e-5, 3e-5 or 2e-5, 2 to 4 epochs.

Expected time: 12 min 30 s with the 6-layer uncased MiniLM weights and learning rate 2e-4, on two
cores shared with other programs (2026-11-21). Not measured with BERT_BASE.
Expected result: 91.4 dev and 87.3 test F1 with MiniLM (seed 0, best epoch 3).

    python tools/fetch_data.py conll2003 runs/data/conll2003
    python -m bert_jax.finetune --config=configs/finetune/conll2003.py --workdir=runs/conll2003 \
        --config.init_from=runs/base

    python tools/fetch_data.py minilm runs/data/minilm
    python -m bert_jax.finetune --config=configs/finetune/conll2003.py --workdir=runs/conll_minilm \
        --config.init_from=runs/data/minilm --config.learning_rate=2e-4

The data are for research only. For your own files, see tagging.py.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import tagging


def get_config(arg: str = "") -> ConfigDict:
    config = tagging.get_config(arg)
    config.data.train = "runs/data/conll2003/train.txt"
    config.data.dev = "runs/data/conll2003/valid.txt"
    config.data.test = "runs/data/conll2003/test.txt"
    return config
