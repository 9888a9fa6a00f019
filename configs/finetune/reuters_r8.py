"""Reuters-21578 R8: news items on eight topics; 5,485 for training, 2,189 for testing.

Source: not from the BERT paper; a dataset of the text classification literature (Cardoso-Cachopo,
2007), with the 6-layer MiniLM weights.

Expected time: 22 min on two cores shared with other programs (2026-11-21).
Expected result: 97.8 % test accuracy, 94.2 % macro F1 (seed 0).

    python tools/fetch_data.py reuters-r8 runs/data/reuters-r8
    python tools/fetch_data.py minilm runs/data/minilm
    python -m bert_jax.finetune --config=configs/finetune/reuters_r8.py --workdir=runs/r8 \
        --config.init_from=runs/data/minilm
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import fields, text_classification


def get_config(arg: str = "") -> ConfigDict:
    config = text_classification.get_config()
    config.data.train = "runs/data/reuters-r8/reuters-r8-train.tab"
    config.data.test = "runs/data/reuters-r8/reuters-r8-test.tab"  # There is no development set.
    config.data.text, config.data.label = "Text", "Category"
    config.data.header_lines = 3
    config.max_seq_length = 256
    config.num_epochs = 4.0
    config.learning_rate = 1e-4  # Small models need a higher rate than BERT_BASE.
    return fields.apply_runlocal(config, arg)
