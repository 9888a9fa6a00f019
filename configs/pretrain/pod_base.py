"""BERT_BASE on 16 TPU chips, as in the paper: `pod_base.py:v4`, or v3, v5e, v5p, v6e, tpu7x.

Source: Devlin et al. (2018), appendix A.2: BERT_BASE on 4 Cloud TPUs, 16 chips. The training
recipe is bert_base.py's; only the topology and the sharding differ.

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

TOPOLOGIES = {
    "v3": "v3:4x4",
    "v4": "v4:2x2x4",
    "v5e": "v5e:4x4",
    "v5p": "v5p:2x2x4",
    "v6e": "v6e:4x4",
    "tpu7x": "tpu7x:2x2x4",
}


def get_config(arg: str = "") -> ConfigDict:
    topology, arg = choose_topology(TOPOLOGIES, arg)
    config = bert_base.get_config(arg)
    config.topology = topology  # The default of tools/tpu_report.py.
    config.shard_weight_update = True
    config.overlap_collectives = True
    return config


def choose_topology(topologies: dict[str, str], arg: str) -> tuple[str, str]:
    """Splits "v5e,runlocal" into the topology of v5e (v4 if none is named) and "runlocal"."""
    chip, _, rest = arg.partition(",")
    if chip in topologies:
        return topologies[chip], rest
    if arg not in ("", "runlocal"):
        raise ValueError(
            f"unknown argument {arg!r} after the colon: expected one of {', '.join(topologies)}, "
            "'runlocal', or both separated by a comma"
        )
    return topologies["v4"], arg
