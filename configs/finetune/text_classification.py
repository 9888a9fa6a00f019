"""Your own texts, or pairs of texts, to classes or to a number: CSV, TSV or JSONL, no code needed.

Source: fine-tuning as in Devlin et al. (2018), section 4.1 and appendix A.3: batch 16 or 32,
learning rate 5e-5, 3e-5 or 2e-5, 2 to 4 epochs; Adam with bias correction, without which small sets
are unstable (Mosbach et al., 2021). Every other configuration in this directory starts from this
one.

Expected time: depends on your data; it has not been measured.
Expected result: depends on your data.

    python -m bert_jax.finetune --config=configs/finetune/text_classification.py \
        --workdir=runs/mine --config.init_from=runs/base \
        --config.data.train=train.csv --config.data.dev=dev.csv

A file has a header that names its columns, `text` and `label` if not told otherwise. Where labels
are empty in `dev` or `test`, or `test` has no such column, predictions are written and nothing is
scored.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str = "") -> ConfigDict:
    config = ConfigDict()
    config.task = "text_classification"
    config.init_from = ""  # Workdir, checkpoint, or directory of transformers or of Google.
    config.new_head = False  # Put a new head on, though the weights have one for other labels.

    config.data = ConfigDict()
    config.data.train = ""
    config.data.dev = ""  # Its score decides which checkpoint is kept.
    config.data.test = ""
    config.data.text = "text"  # Names of columns.
    config.data.text_pair = ""
    config.data.label = "label"
    config.data.id = ""
    config.data.header_lines = 1  # The first names the columns, the others are skipped.
    config.data.labels = ()  # As found in train, sorted, if not given; a,b as a flag.
    config.data.regression = False  # The label is a number.
    config.data.metric = ""  # Decides; accuracy, or for numbers pearson, if not given.

    config.max_seq_length = 128
    config.batch_size = 32  # Examples in one update, over all devices.
    config.num_epochs = 3.0
    config.seed = 0
    config.num_seeds = 1  # Runs, from `seed` on; several give median and spread.

    config.model = ConfigDict()  # As the checkpoint says, if not given.
    config.model.dropout_rate = placeholder(float)
    config.model.dtype = placeholder(str)  # float32; bfloat16 on TPU and GPU is faster.
    config.model.scan_layers = placeholder(bool)
    config.model.remat = placeholder(str)

    config.optimizer = "adamw"  # Or "bert_adam", as released, or "lamb".
    config.learning_rate = 3e-5
    config.warmup_fraction = 0.1
    config.weight_decay = 0.01
    config.clip_norm = 1.0

    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})
    config.per_device_batch_size = 0  # Rows of packed examples at once; 0: as many as keep it busy.

    config.log_every = 50
    config.eval_every = 0  # Steps; 0: after each epoch.
    config.save_training_state = True  # After each evaluation, for a run that is stopped.
    config.stall_seconds = 600

    return cut_down(config, arg)


def cut_down(config: ConfigDict, arg: str) -> ConfigDict:
    """With "runlocal", short texts and one epoch: it shows that all works, no more."""
    if not arg:
        return config
    if arg != "runlocal":
        raise ValueError(f"unknown argument {arg!r} after the colon: expected 'runlocal' or none")
    config.max_seq_length, config.batch_size, config.num_epochs = 32, 8, 1.0
    return config
