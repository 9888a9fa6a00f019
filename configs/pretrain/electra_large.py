"""ELECTRA_LARGE: 24 layers, hidden 1024, 16 heads; a generator of a quarter; 335 M parameters.

Source: Clark et al. (2020), table 6: as electra_base.py, with 400,000 steps of 2,048 rows and masks
of 25 % of the tokens.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: MNLI-m 90.9, SQuAD 1.1 EM 89.7 for the released model, trained for 1.75 M steps on
more text (README of the released code). Not run at full size.

    python -m bert_jax.pretrain --config=configs/pretrain/electra_large.py --workdir=runs/electra \
        --config.long_phase.corpus=corpus/512

The corpus is the same as for electra_base.py. The topology is v4's: `electra_large.py:v4`, the
default. `electra_large.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, electra_base, pod_base

TOPOLOGIES = {"v4": "v4:4x4x4"}


def get_config(arg: str = "") -> ConfigDict:
    topology, arg = pod_base.choose_topology(TOPOLOGIES, arg)
    config = electra_base.get_config()
    config.topology = topology
    config.model.size = "large"
    config.generator.hidden_fraction = 0.25
    config.masking.rate = 0.25
    config.long_phase.num_steps = 400_000
    config.long_phase.batch_size = 2048
    config.per_device_batch_size = 16
    return bert_base.apply_runlocal(config, arg)
