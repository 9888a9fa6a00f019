"""Contrastive pre-training of a bi-encoder on weakly supervised pairs: `:base`, `:small`, `:large`.

Source: E5 (Wang et al., 2022, "Text embeddings by weakly-supervised contrastive pre-training",
section 4 and appendix B). 270 M pairs, such as titles and passages or questions and answers of
forums; batches of 32,768 pairs, each query against the passages of all of them; 20,000 steps, 2.4
epochs; cosine divided by 0.01, mean pooling, "query: " and "passage: "; texts of 128 tokens; AdamW
with weight decay 0.01, 1,000 steps of warm-up, linear decay.

    | | small | base | large |
    | --- | --- | --- | --- |
    | starts from | MiniLM | bert-base-uncased | bert-large-uncased-whole-word-masking |
    | learning rate | 3e-4 | 2e-4 | 1e-4 |
    | V100 GPUs, days in the paper | 16, 1 | 32, 1 | 64, 2 |

Expected time: 38 hours on eight v5e chips for base, if all texts have 128 tokens, as
tools/tpu_report.py estimates it; shorter ones share rows. Not run at full size.
Expected result: weights for the second stage, retrieval.py:bi_encoder,e5.

    python tools/tpu_report.py --config=configs/finetune/contrastive.py --topology=v5e:2x4 \
        --train_examples=270_000_000
    python -m bert_jax.finetune --config=configs/finetune/contrastive.py --workdir=/gcs/runs/pairs \
        --config.init_from=/gcs/bert-base-uncased --config.data.train=/gcs/pairs.jsonl \
        --config.data.dev=/gcs/dev.jsonl

A pair is a line `{"query": "...", "positive": "..."}`. Every host has all pairs in memory: see
docs/finetuning.md#contrastive-pre-training. `contrastive.py:base,runlocal` runs a few steps of
eight pairs instead.
"""

import math

from ml_collections import ConfigDict

from bert_jax.configs.finetune import fields, retrieval

NUM_PAIRS = 270_000_000
LEARNING_RATES = {"small": 3e-4, "base": 2e-4, "large": 1e-4}


def get_config(arg: str = "") -> ConfigDict:
    size, _, rest = arg.partition(",")
    if size in ("", "runlocal"):
        size, rest = "base", arg
    if size not in LEARNING_RATES:
        raise ValueError(
            f"unknown argument {arg!r} after the colon: expected one of "
            f"{', '.join(LEARNING_RATES)}, 'runlocal', or both separated by a comma"
        )
    config = retrieval.get_config("bi_encoder")
    config.data.query_prompt, config.data.passage_prompt = "query: ", "passage: "
    config.similarity.temperature = 0.01
    config.max_seq_length = config.data.max_query_length = 128
    config.batch_size = 32_768
    config.num_epochs = 20_000 / math.ceil(NUM_PAIRS / config.batch_size)
    config.learning_rate = LEARNING_RATES[size]
    config.warmup_fraction = 1_000 / 20_000
    config.decay_from = "warmup_end"
    config.weight_decay = 0.01
    config.eval_every = 1_000
    config.model.dtype = "bfloat16"
    config = fields.apply_runlocal(config, rest)
    config.data.max_query_length = min(config.data.max_query_length, config.max_seq_length)
    return config
