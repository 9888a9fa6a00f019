"""CoNLL-2003: the named entities of news in English; persons, organizations, locations, others.

Source: Devlin et al. (2018), section 5.3 and table 7: 96.4 dev and 92.4 test F1 for BERT_BASE
(cased, with document context), 96.6 and 92.8 for BERT_LARGE; batch 16 or 32, learning rate 5e-5,
3e-5 or 2e-5 and 2 to 4 epochs are the ranges of appendix A.3.

Expected time: BERT_BASE has not been run. The 6-layer, uncased MiniLM weights, with a rate of 2e-4,
took 12 min 30 s on two cores with other programs at work (2026-11-21).
Expected result: of those 91.4 dev and 87.3 test F1, seed 0; the best epoch was the third.

    python tools/fetch_data.py conll2003 runs/data/conll2003
    python -m bert_jax.finetune --config=configs/finetune/conll2003.py --workdir=runs/conll2003 \
        --config.init_from=runs/base

    python tools/fetch_data.py minilm runs/data/minilm
    python -m bert_jax.finetune --config=configs/finetune/conll2003.py --workdir=runs/conll_minilm \
        --config.init_from=runs/data/minilm --config.learning_rate=2e-4

For other CoNLL files name their columns; a `test` of fewer columns than `train` has no tags, and is
predicted without a score. The data are for research only.
"""

from ml_collections import ConfigDict

from configs.finetune import text_classification


def get_config(arg: str = "") -> ConfigDict:
    config = text_classification.get_config()
    config.task = "tagging"

    config.data = ConfigDict()
    config.data.train = "runs/data/conll2003/train.txt"
    config.data.dev = "runs/data/conll2003/valid.txt"
    config.data.test = "runs/data/conll2003/test.txt"
    config.data.word_column = 0
    config.data.tag_column = -1  # The last.
    # What is trained, whatever the files have: iob1, iob2 or bioes. With none the tags, such as
    # parts of speech, mark no entities, and are scored by accuracy.
    config.data.scheme = "iob2"
    config.data.labels = ()  # As found in train, if not given.
    # As in the paper the sentences around, of the same document, fill the window. It costs far more
    # time: every sentence is a window of max_seq_length. A file without -DOCSTART- is one document.
    config.data.document_context = False

    config.max_seq_length = 128
    config.batch_size = 32
    config.num_epochs = 4.0
    config.learning_rate = 5e-5
    return text_classification.cut_down(config, arg)
