"""BERT_LARGE in 8,599 steps: LAMB with batches of 65,536 rows of 128, then 32,768 of 512.

Source: You et al. (2020), appendix: the learning rate scales with the square root of the batch
size and the warm-up with the batch size, at an equal number of rows:

    batch   steps       learning rate       warm-up   SQuAD 1.1 F1
    512     1,000,000   5 / (2^3.0 * 1e3)   1/320     91.752
    1K      500,000     5 / (2^2.5 * 1e3)   1/160     91.761
    2K      250,000     5 / (2^2.0 * 1e3)   1/80      91.946
    4K      125,000     5 / (2^1.5 * 1e3)   1/40      91.137
    8K      62,500      5 / (2^1.0 * 1e3)   1/20      91.263
    16K     31,250      5 / (2^0.5 * 1e3)   1/10      91.345
    32K     15,625      5 / (2^0.0 * 1e3)   1/5       91.475
    64K/32K 8,599                                     90.584    (this configuration)

The last row has 7,038 steps at 64K and 1,561 at 32K, and warms up again for the longer rows. The
paper gives no learning rates for it: 6e-3 with 2,000 steps of warm-up, then 4e-3 with 200, are from
NVIDIA's reproduction. For another row of the table, set --config.batch_size, num_steps,
learning_rate and warmup_steps, with nine tenths of the steps on rows of 128.

Expected time: 76 minutes on 1,024 TPU v3 chips in the paper. Not run at full size;
tools/tpu_report.py estimates it for 64 v4 chips.
Expected result: SQuAD 1.1 F1 90.58 in the paper. Not run at full size.

    python tools/tpu_report.py --config=configs/pretrain/lamb_64k.py
    python -m bert_jax.pretrain --config=configs/pretrain/lamb_64k.py --workdir=/gcs/runs/lamb \
        --config.corpus=/gcs/corpus/128 --config.long_phase.corpus=/gcs/corpus/512

`lamb_64k.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_large, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_large.get_config()
    config.num_steps = 7_038
    config.batch_size = 65_536
    config.long_phase.num_steps = 1_561
    config.long_phase.batch_size = 32_768
    config.per_device_batch_size = 16
    config.shard_weight_update = True
    config.optimizer = "lamb"
    config.learning_rate = 6e-3
    config.warmup_steps = 2_000
    config.long_phase.learning_rate = 4e-3
    config.long_phase.warmup_steps = 200
    return fields.apply_runlocal(config, arg)
