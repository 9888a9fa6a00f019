"""BERT_BASE on 16 TPU chips, as in the paper: `pod_base.py:v4`, or v3, v5e, v5p, v6e, tpu7x.

Source: Devlin et al. (2018), appendix A.2: BERT_BASE on 4 Cloud TPUs, 16 chips. The training
recipe is bert_base.py's; only the sharding differs, the same for every chip.

Expected time: 4 days in the paper. Not run at full size; tools/tpu_report.py estimates it.
Expected result: held-out perplexity 3.99 (the paper's table 6). Not run at full size.

    python tools/tpu_report.py --config=configs/pretrain/pod_base.py:v4
    python -m bert_jax.pretrain --config=configs/pretrain/pod_base.py:v4 \
        --workdir=/gcs/runs/base --config.corpus=/gcs/corpus/128 \
        --config.long_phase.corpus=/gcs/corpus/512

The default is v4. `pod_base.py:v4,runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base

CHIPS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")


def get_config(arg: str = "") -> ConfigDict:
    _, arg = split_chip(arg)
    config = bert_base.get_config(arg)
    config.shard_weight_update = True
    config.overlap_collectives = True
    return config


def split_chip(arg: str) -> tuple[str, str]:
    """Splits "v5e,runlocal" into the chip, v4 if none is named, and "runlocal".

    tools/tpu_report.py compiles for this chip, unless it is given a topology.
    """
    chip, _, rest = arg.partition(",")
    if chip in CHIPS:
        return chip, rest
    if arg not in ("", "runlocal"):
        raise ValueError(
            f"unknown argument {arg!r} after the colon: expected one of {', '.join(CHIPS)}, "
            "'runlocal', or both separated by a comma"
        )
    return "v4", arg
