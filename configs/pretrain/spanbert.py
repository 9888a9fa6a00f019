"""SpanBERT, cased: BERT_LARGE, whose spans are also predicted from the tokens around them.

Source: Joshi et al. (2020), sections 3 and 4.2: masks of whole spans of up to 10 words, of
geometric length; the span-boundary objective beside masked LM, with equal weights; single segments
of up to 512 tokens, without next-sentence prediction; 2.4 M updates of 256 rows; learning rate
1e-4, 10,000 steps of warm-up, then linear decay; AdamW with epsilon 1e-8. Weight decay and clipping
are from the released command, which predicts at most 15 tokens of a span from its boundary; here,
all tokens are predicted.

Expected time: 15 days on 32 V100 GPUs in the paper. Not run at full size.
Expected result: F1 of 94.6 on SQuAD 1.1, 88.7 on SQuAD 2.0 (test sets). Not run at full size.

    python tools/train_vocab.py --cased --size=28996 --input='texts/*.txt' \
        --output=spanbert/vocab.txt
    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=spanbert/vocab.txt --cased \
        --rows=single_segments --max_seq_length=512 --output=spanbert/512
    python -m bert_jax.pretrain --config=configs/pretrain/spanbert.py --workdir=runs/spanbert \
        --config.long_phase.corpus=spanbert/512

`--config.model.size=base` is the smaller of the two released models. `spanbert.py:runlocal` runs a
few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_base.get_config()
    config.model.size = "large"
    config.objective = "span_boundary"
    config.next_sentence = False
    config.masking.unit = "span"

    config.num_steps = 0  # Skips the phase with rows of 128.
    config.long_phase.num_steps = 2_400_000
    config.per_device_batch_size = 16
    config.shard_weight_update = True
    config.optimizer = "adamw"
    config.epsilon = 1e-8
    config.decay_from = "warmup_end"
    return fields.apply_runlocal(config, arg)
