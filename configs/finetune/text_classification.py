"""Classification or regression of your own texts or pairs of texts: CSV, TSV, JSONL or TFDS.

Source: fine-tuning as in Devlin et al. (2018), section 4.1 and appendix A.3: batch 16 or 32,
learning rate 5e-5, 3e-5 or 2e-5, 2 to 4 epochs; Adam with bias correction, without which training
on small sets is unstable (Mosbach et al., 2021). All other configs in this directory build on this
one.

Expected time and result: depend on your data; reuters_r8.py is an example.

    python -m bert_jax.finetune --config=configs/finetune/text_classification.py \
        --workdir=runs/mine --config.init_from=runs/base \
        --config.data.train=train.csv --config.data.dev=dev.csv

A file has a header with the names of its columns, by default `text` and `label`; in TSV a field is
quoted if it begins and ends with a quotation mark and doubles those inside. `tfds:NAME`,
prepared as ArrayRecord, is its train, validation or test split; `tfds:NAME#train[90%:]` another. If
the labels of `dev` or `test` are empty, or `test` has no such column, it is predicted, not scored.
Labels that are numbers are compared as numbers: 1, 1.0 and 01 are one class. An empty text is an
error in `train` and in a labeled `dev`; elsewhere it is predicted.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str = "") -> ConfigDict:
    config = ConfigDict()
    config.program = "finetune"  # python -m bert_jax.finetune reads it.
    # A file in bert_jax/tasks, or the dotted name of your own module.
    config.task = "text_classification"
    config.init_from = ""  # Workdir, checkpoint, or Hugging Face or Google directory.
    config.new_head = False  # Ignore the head of `init_from` and train a new one.
    # A model fine-tuned for the same task and labels, in any form that `init_from` takes: the run
    # also learns from its outputs for the training examples. Default: none.
    config.teacher = ""
    config.distillation = ConfigDict()  # Of a teacher; not for multi-label and retrieval.
    # Loss: alpha * (loss on the labels) + (1 - alpha) * (loss on the teacher's outputs).
    config.distillation.alpha = 0.5
    config.distillation.temperature = 2.0  # Divides the logits of both models; not in regression.

    config.data = ConfigDict()
    config.data.train = ""  # Examples to train on.
    config.data.dev = ""  # Its score selects the best checkpoint.
    config.data.test = ""  # Only predicted by the best checkpoint, and scored if it has labels.
    config.data.data_dir = ""  # Directory of prepared TFDS sets; default: TFDS's own.
    config.data.text = "text"  # Column of the text.
    config.data.text_pair = ""  # Column of the second text of a pair; empty: single texts.
    config.data.label = "label"  # Column of the label.
    config.data.id = ""  # Column of unique ids, written to the predictions; empty: numbers.
    config.data.header_lines = 1  # The first names the columns, the others are skipped.
    # Default: the labels in train, sorted (numbers by value); as a flag: a,b.
    config.data.labels = ()
    config.data.regression = False  # The label is a number.
    # Trains a regression on the labels as they are. By default, a new head is trained on labels
    # standardized by their mean and deviation in train; in both cases it predicts unscaled labels.
    config.data.raw_targets = False
    # Multi-label: what separates the labels of a text, such as | in a|b. JSONL may also have lists:
    # [] means no label, null unknown labels.
    config.data.label_separator = ""
    # Selects the best checkpoint; default: accuracy, pearson or micro_f1. Also macro_f1, spearman,
    # r2, and for two classes matthews, and roc_auc or average_precision of the positive class: the
    # larger number, or else the second of data.labels.
    config.data.metric = ""

    config.max_train_examples = 0  # Maximum number in train, evenly spaced; 0: all.
    config.max_eval_examples = 0  # Maximum number in each of dev and test, evenly spaced; 0: all.
    config.max_seq_length = 128  # Tokens, [CLS] and [SEP] included; longer texts are truncated.
    config.batch_size = 32  # Examples per update, over all devices.
    config.num_epochs = 3.0  # Passes over train, such as 0.5 or 3.
    config.seed = 0  # Of the order of the examples, a new head, and dropout.
    # Number of runs, with seeds starting at `seed`; several report median, min and max. They train
    # as one stacked program, with memory for all; on a CPU, bert_jax.sweep runs them faster.
    config.num_seeds = 1

    config.model = ConfigDict()  # Fields that are not set: as in the checkpoint.
    config.model.dropout_rate = placeholder(float)  # Of hidden states.
    config.model.classifier_dropout_rate = placeholder(float)  # Before the head, if it differs.
    config.model.attention_dropout_rate = placeholder(float)  # Of attention probabilities.
    config.model.dtype = placeholder(str)  # Default float32; bfloat16 is faster on TPU and GPU.
    config.model.kernels = placeholder(str)  # Default auto: on TPUs; plain: none.
    config.model.scan_layers = placeholder(bool)  # Default: False on a CPU: compile all layers.
    config.model.remat = placeholder(str)  # Recompute in the backward pass: none, dots, full.
    # Units per direction of a new BiLSTM between encoder and head, as in the paper's table 5.
    config.model.lstm_size = 0  # 0: none.

    config.optimizer = "adamw"  # Or "bert_adam", the released optimizer, or "lamb".
    config.learning_rate = 3e-5  # Peak, after the warm-up.
    config.warmup_fraction = 0.1  # Fraction of the steps in which the learning rate rises from 0.
    config.decay_from = "step_0"  # As in the released code; or "warmup_end", as in transformers.
    config.decay_power = 1.0  # Polynomial decay: 1 is linear, 0 constant.
    config.weight_decay = 0.01  # Decoupled, as in AdamW; not of biases and LayerNorm.
    config.clip_norm = 1.0  # Maximum norm of the gradient of all parameters.
    # Such as 0.9: layer i of N, from 0, has learning_rate * layer_decay^(N - i), and the embeddings
    # layer_decay^(N + 1). The head and the pooler have learning_rate.
    config.layer_decay = 1.0
    config.freeze_layers = 0  # Freezes the embeddings and the N lowest layers; 0: nothing.
    # Weight of each class in the loss, in the order of data.labels, or sorted; "balanced": inverse
    # to its frequency in train. Default: 1 each.
    config.class_weights = ()

    # Devices along each axis of the mesh; -1: all remaining. Trials are sharded over `trial`.
    config.mesh = ConfigDict({"trial": 1, "data": -1, "fsdp": 1, "tensor": 1})
    config.per_device_batch_size = 0  # Packed rows per device and microbatch; 0: automatic.

    config.log_every = 50  # Steps between lines with the training loss in metrics.jsonl.
    config.eval_every = 0  # Steps between evaluations; 0: after each epoch.
    config.save_training_state = True  # After each evaluation, to resume from.
    # Also send metrics to "wandb", "mlflow" or "trackio" (pip install 'bert_jax[trackers]').
    config.tracker = ""
    config.stall_seconds = 600  # Seconds without a step before the stacks are printed.
    return apply_runlocal(config, arg)


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
