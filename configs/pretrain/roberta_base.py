"""RoBERTa_BASE: 12 layers, hidden 768, 12 heads; byte-level BPE; 125 M parameters.

Source: Liu et al. (2019), section 4 and table 9: masked LM alone, without next-sentence prediction;
batches of 8K rows of 512 tokens, 500,000 steps; Adam with beta2 0.98, epsilon 1e-6, weight decay
0.01, no gradient clipping; learning rate 6e-4 after 24,000 steps of warm-up; dynamic masking; one
segment, and positions that begin at 2. fairseq's instructions have a shorter recipe: 125,000 steps
of 2,048 rows, 5e-4 after 10,000 steps (--config.long_phase.num_steps, batch_size, learning_rate and
warmup_steps).

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: MNLI-m 87.6 in the paper, on 160 GB of text. Not run at full size.

    python tools/train_vocab.py --kind=bpe --size=50265 --input='texts/*.txt' \
        --output=roberta/bpe.json
    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=roberta/bpe.json \
        --rows=full_sentences --max_seq_length=512 --output=roberta/512
    python -m bert_jax.pretrain --config=configs/pretrain/roberta_base.py --workdir=runs/roberta \
        --config.long_phase.corpus=roberta/512

`roberta_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_base.get_config()
    config.model.family = "roberta"  # How other libraries store it.
    config.model.type_vocab_size = 1  # Segments.
    config.model.position_offset = 2  # Rows of the position table before the first token's.
    config.model.layer_norm_epsilon = 1e-5
    config.next_sentence = False

    config.num_steps = 0  # Skips the phase with rows of 128.
    config.long_phase.num_steps = 500_000
    config.batch_size = config.long_phase.batch_size = 8192
    config.per_device_batch_size = 16
    config.shard_weight_update = True
    config.optimizer = "adamw"
    config.learning_rate = 6e-4
    config.warmup_steps = 24_000
    config.beta2 = 0.98
    config.clip_norm = 1e9  # No clipping.
    config.decay_from = "warmup_end"
    return fields.apply_runlocal(config, arg)
