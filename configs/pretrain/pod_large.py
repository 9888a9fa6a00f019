"""BERT_LARGE on 64 TPU chips, as in the paper: `pod_large.py:v4`, or v3, v5e, v5p, v6e, tpu7x.

Source: Devlin et al. (2018), appendix A.2: BERT_LARGE on 16 Cloud TPUs, 64 chips. The training
recipe is bert_large.py's; only the sharding differs.

Expected time: 4 days in the paper. Not run at full size; tools/tpu_report.py estimates it.
Expected result: held-out perplexity 3.23 (the paper's table 6). Not run at full size.

    python tools/tpu_report.py --config=configs/pretrain/pod_large.py:v4
    python -m bert_jax.pretrain --config=configs/pretrain/pod_large.py:v4 \
        --workdir=/gcs/runs/large --config.corpus=/gcs/corpus/128 \
        --config.long_phase.corpus=/gcs/corpus/512

The default is v4. `pod_large.py:v4,runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_large, pod_base


def get_config(arg: str = "") -> ConfigDict:
    chip, arg = pod_base.split_chip(arg)
    config = bert_large.get_config(arg)
    config.shard_weight_update = True
    # On the two-dimensional tori of v3 and v5e, all-to-alls take longer than one all-reduce. The
    # collectives of v6e run on SparseCores instead.
    config.overlap_collectives = chip not in ("v3", "v5e")
    return config
