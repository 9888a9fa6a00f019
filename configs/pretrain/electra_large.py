"""ELECTRA_LARGE: 24 layers, hidden 1024, 16 heads; a generator of a quarter; 335 M parameters.

Source: Clark et al. (2020), table 6: as electra_base.py, with 400,000 steps of 2,048 rows and masks
of 25 % of the tokens.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: MNLI-m 90.9, SQuAD 1.1 EM 89.7 for the released model, trained for 1.75 M steps on
more text (README of the released code). Not run at full size.

    python -m bert_jax.pretrain --config=configs/pretrain/electra_large.py --workdir=runs/electra \
        --config.long_phase.corpus=corpus/512

The corpus is the same as for electra_base.py.
`electra_large.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import electra_base, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = electra_base.get_config()
    config.model.size = "large"
    config.generator.hidden_fraction = 0.25
    config.masking.rate = 0.25
    config.long_phase.num_steps = 400_000
    config.long_phase.batch_size = 2048
    config.per_device_batch_size = 16
    return fields.apply_runlocal(config, arg)
