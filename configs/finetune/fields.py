"""The fields of fine-tuning configurations: default, meaning, bounds, and which may change.

Those of `data` are in the file of each task.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from bert_jax.runtime.config_fields import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    Bounds,
    Field,
    make_config,
)

# Paths. They may change when a run is resumed: their contents are compared instead.
PATHS = {
    "init_from": Field("", "Workdir, checkpoint, or Hugging Face or Google directory."),
    "teacher": Field(
        "",
        "A model fine-tuned for the same task and labels, in any form that `init_from` takes: the "
        "run also learns from its outputs for the training examples; not for multi-label. In "
        "retrieval, of a bi-encoder with the loss guided_in_batch, and of a cross-encoder with "
        "list_softmax. Default: none.",
    ),
}

# Of `data`, in tasks that read examples by name.
HUB = Field(
    "",
    "In place of train, dev and test: NAME or NAME:CONFIGURATION of the Hugging Face Hub, or a "
    "folder of datasets.save_to_disk, whose splits train, validation or dev, and test are read. "
    "One split elsewhere: train=hub:NAME:CONFIGURATION#SPLIT.",
)

# The examples and the model. A run is resumed only with the same values.
TASK = {
    "data": Field({}, "The files, and how to read them; every task has its own fields."),
    "task": Field(
        "text_classification", "A file in bert_jax/tasks, or the dotted name of your own module."
    ),
    "new_head": Field(False, "Ignore the head of `init_from` and train a new one."),
    "max_train_examples": Field(0, "Maximum number in train, evenly spaced; 0: all.", AT_LEAST_0),
    "train_fraction": Field(
        0.0,
        "Such as 0.3: trains on this fraction of what max_train_examples leaves, the first "
        "examples of one fixed shuffle, the same for all seeds; smaller fractions are subsets of "
        "larger ones. 0 or 1: all.",
        Bounds(0, 1),
    ),
    "max_eval_examples": Field(
        0, "Maximum number in each of dev and test, evenly spaced; 0: all.", AT_LEAST_0
    ),
    "max_seq_length": Field(128, "Tokens, [CLS] and [SEP] included; longer texts are truncated."),
    "class_weights": Field(
        (),
        "Weight of each class in the loss, in the order of data.labels, or sorted; or by name, "
        'others having weight 1: rare=5. "balanced": inverse to its frequency in train. '
        "Default: 1 each.",
    ),
    "model.classifier_dropout_rate": Field(
        None, "Before the head, if it differs; None: as in the checkpoint.", kind=float
    ),
    "model.lstm_size": Field(
        0,
        "Units per direction of a new BiLSTM between encoder and head, as in the paper's table 5; "
        "0: none.",
        AT_LEAST_0,
    ),
}

# Numbers in which trials may differ that train as one stack: they change no shape of the program.
PER_TRIAL = {
    "seed": Field(0, "Of the order of the examples, a new head, and dropout.", AT_LEAST_0),
    "learning_rate": Field(3e-5, "Peak, after the warm-up.", POSITIVE),
    "weight_decay": Field(0.01, "Decoupled, as in AdamW; not of biases and LayerNorm.", AT_LEAST_0),
    "warmup_fraction": Field(
        0.1, "Fraction of the steps in which the learning rate rises from 0.", Bounds(0, 1)
    ),
    "warmup_steps": Field(
        None, "The number of these steps, in place of warmup_fraction. None: unused.", kind=int
    ),
    "num_epochs": Field(3.0, "Passes over train, such as 0.5 or 3.", AT_LEAST_0),
    "patience": Field(
        0,
        "Stops the run after this many evaluations in a row without a better checkpoint; needs "
        "decay_power=0, and warmup_steps or warmup_fraction=0. 0: never.",
        AT_LEAST_0,
    ),
    "model.dropout_rate": Field(None, "Of hidden states; None: as in the checkpoint.", kind=float),
    "model.attention_dropout_rate": Field(
        None, "Of attention probabilities; None: as in the checkpoint.", kind=float
    ),
}

# How it is trained. Trials with other values still share their examples.
TRAINING = {
    "batch_size": Field(32, "Examples per update, over all devices.", AT_LEAST_1),
    "optimizer": Field(
        "adamw", 'Or "bert_adam", the released optimizer, "lamb" or "stable_adamw".'
    ),
    "decay_from": Field("step_0", 'As in the released code; or "warmup_end", as in transformers.'),
    "decay_power": Field(1.0, "Polynomial decay: 1 is linear, 0 constant.", AT_LEAST_0),
    "clip_norm": Field(1.0, "Maximum norm of the gradient of all parameters.", POSITIVE),
    "layer_decay": Field(
        1.0,
        "Such as 0.9: layer i of N, from 0, has learning_rate * layer_decay^(N - i), and the "
        "embeddings layer_decay^(N + 1). The head and the pooler have learning_rate.",
        Bounds(0, 1, excludes_minimum=True),
    ),
    "freeze_layers": Field(0, "Freezes the embeddings and the N lowest layers; 0: nothing."),
    "lora.rank": Field(
        0,
        "Such as 8: trains only the head, and beside dense layers of the frozen encoder low-rank "
        "adapters (LoRA); 0: trains all parameters.",
        AT_LEAST_0,
    ),
    "lora.alpha": Field(
        0.0,
        "Adapters are scaled by alpha / rank, as in peft; 0: equal to the rank (scale 1).",
        AT_LEAST_0,
    ),
    "lora.targets": Field(
        "",
        "Regular expression that is searched for in the paths of kernels, which then have "
        'adapters: "query|value"; default: all dense layers of the encoder\'s layers.',
    ),
    "distillation.alpha": Field(
        0.5,
        "With a teacher, the loss is alpha * (loss on the labels) + (1 - alpha) * (loss on the "
        "teacher's outputs).",
        Bounds(0, 1),
    ),
    "distillation.temperature": Field(
        2.0, "Divides the logits of both models; not in regression.", AT_LEAST_1
    ),
}

# How it runs. These may change when a run is resumed: they change nothing but speed, rounding
# (`model.dtype` the most), when is evaluated and saved, and how many seeds are run.
RUNNING = {
    "num_seeds": Field(
        1,
        "Number of runs, with seeds starting at `seed`; several report median, min and max. They "
        "train as one stacked program, with memory for all; on a CPU, bert_jax.sweep runs them "
        "faster.",
        AT_LEAST_1,
    ),
    "model.dtype": Field(None, "Default float32; bfloat16 is faster on TPU and GPU.", kind=str),
    "model.kernels": Field(
        None, "Default auto: on TPUs; plain: never; tpu: always, to test them.", kind=str
    ),
    "model.scan_layers": Field(None, "Default: False on a CPU: compile all layers.", kind=bool),
    "model.remat": Field(None, "Recompute in the backward pass: none, dots, full.", kind=str),
    "mesh.trial": Field(1, "Devices along this axis, over which trials are sharded."),
    "mesh.data": Field(-1, "Devices along this axis of the mesh; -1: all remaining ones."),
    "mesh.fsdp": Field(1, "Devices along this axis; -1: all remaining ones."),
    "mesh.tensor": Field(1, "Devices along this axis; -1: all remaining ones."),
    "per_device_batch_size": Field(
        0, "Packed rows per device and microbatch; 0: automatic.", AT_LEAST_0
    ),
    "log_every": Field(50, "Steps between training losses in metrics.jsonl.", AT_LEAST_1),
    "eval_every": Field(0, "Steps between evaluations; 0: after each epoch.", AT_LEAST_0),
    "save_training_state": Field(True, "After each evaluation, to resume from."),
    "tracker": Field(
        "",
        'Also send metrics to "wandb", "mlflow" or "trackio" (pip install \'bert_jax[trackers]\').',
    ),
    "stall_seconds": Field(
        600, "Seconds without a step before the stacks are printed.", AT_LEAST_1
    ),
}

# The fields of every task; those of `data` are its own.
FIELDS = PATHS | TASK | PER_TRIAL | TRAINING | RUNNING

# Fields that only some configurations have.
OPTIONAL = {
    "program": Field("finetune", "python -m bert_jax.finetune reads this configuration."),
}


def make_task_config(task: str, data: Mapping[str, Field]) -> ConfigDict:
    """Returns the configuration of a task, which has the fields `data` of its own."""
    config = make_config(FIELDS | data)
    config.program = "finetune"
    config.task = task
    return config


def apply_runlocal(config: ConfigDict, arg: str) -> ConfigDict:
    """Returns a smoke run if `arg` is "runlocal": a few short texts, one epoch."""
    if not arg:
        return config
    if arg != "runlocal":
        raise ValueError(f"unknown argument {arg!r} after the colon: expected 'runlocal' or none")
    config.max_seq_length, config.batch_size, config.num_epochs = 32, 8, 1.0
    config.max_train_examples = config.max_eval_examples = 64
    config.log_every = 1
    return config
