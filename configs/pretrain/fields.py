"""The fields of pre-training configurations: default, meaning, bounds, and which may change.

The defaults are those of bert_base.py.
"""

import re
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

FROM_0_BELOW_1 = Bounds(0, 1, excludes_maximum=True)
A_RATE = Bounds(0.001, 0.999)
MAX_SEQ_LENGTH = Field(
    None, "Row length; a corpus with another length is refused. None: any.", AT_LEAST_1, kind=int
)
ROPE_BASES = {
    f"model.{kind}_rope_base": Field(None, f"RoPE base (theta) of {kind} layers.", kind=float)
    for kind in ("global", "local")
}

# A phase after the first: the fields that it sets anew, with the names that they have for the first
# phase. None: as in the phase before, unless said otherwise. Those of paths and of running may
# change when a run is resumed, like the tables below.
PHASE_PATHS = {
    "corpus": Field(None, "Directory of its corpus, or a mixture.", kind=str),
}
PHASE_TRAINING = {
    "num_steps": Field(0, "Updates; 0: the phase is skipped.", AT_LEAST_0),
    "batch_size": Field(None, "Rows per update, over all devices.", AT_LEAST_1, kind=int),
    "max_seq_length": MAX_SEQ_LENGTH,
    "max_predictions": Field(None, "None: from masking.rate (77 of 512 tokens).", kind=int),
    # A new warm-up and decay begin with the phase if it sets one of the next two.
    "learning_rate": Field(
        None,
        "Peak, for a warm-up and decay of its own. None: as in the phase before.",
        POSITIVE,
        kind=float,
    ),
    "warmup_steps": Field(
        None,
        "Warm-up steps of this phase's own schedule. None: 0 if learning_rate is set; otherwise "
        "the schedule continues.",
        kind=int,
    ),
    "masking.rate": Field(None, "Fraction of the tokens to predict.", A_RATE, kind=float),
    # Fields of the model that change none of its parameters.
    **ROPE_BASES,
    "model.max_position_embeddings": Field(None, "Tokens of the longest sequence.", kind=int),
}
PHASE_RUNNING = {
    "per_device_batch_size": Field(
        None, "Rows per device and microbatch; 0: one batch.", AT_LEAST_0, kind=int
    ),
}
MAKE_LATER_PHASES = "make them with make_later_phases of configs/pretrain/fields.py"
PHASE = PHASE_PATHS | PHASE_TRAINING | PHASE_RUNNING
LONG_PHASE_TRAINING = PHASE_TRAINING | {
    "num_steps": Field(100_000, "Updates on longer rows; 0: none.", AT_LEAST_0),
    "batch_size": Field(256, "Longer rows per update, over all devices.", AT_LEAST_1),
}


def with_prefix(prefix: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    """Returns a table of fields, those of the group `prefix`."""
    return {f"{prefix}.{name}": field for name, field in fields.items()}


# Paths. They may change when a run is resumed: their contents are compared instead, and of
# `branch_from`, which is not read again, the step.
PATHS = {
    "corpus": Field(
        "",
        "Directory written by tools/prepare_corpus.py, with rows of 128 tokens; or a mixture of "
        "several by weight, such as wiki:0.7,books:0.3, or by size: wiki,books.",
    ),
    "long_phase.corpus": Field("", "Directory of a corpus with longer rows, or a mixture."),
    "init_from": Field(
        "",
        "Weights to start from: a workdir, a checkpoint, or a directory of Hugging Face or of "
        "Google's release; missing parts are randomly initialized. Default: a random "
        "initialization.",
    ),
    "branch_from": Field(
        "",
        "A checkpoint of another run, DIR/checkpoints/STEP, from which this run continues: several "
        "decays (decay_steps) of one run at a constant rate.",
    ),
    "distillation.teacher": Field(
        "",
        'The model that objective "distillation" learns from, in any form that `init_from` takes, '
        "with the corpus's vocabulary.",
    ),
}

# What is trained, and how. A run is resumed only with the same values.
TRAINING = {
    "seed": Field(0, "Of initial values, order of the rows, masking and dropout.", AT_LEAST_0),
    "corpus_temperature": Field(
        None,
        "Of mixtures by size: a corpus weighs (its number of rows) ** (1 / temperature), so that a "
        "higher one favors small corpora (3.3 in XLM-R). None: 1.",
        POSITIVE,
        kind=float,
    ),
    "num_steps": Field(900_000, "Updates in the first phase; 0 skips it.", AT_LEAST_0),
    "batch_size": Field(256, "Rows per update, over all devices.", AT_LEAST_1),
    "objective": Field(
        "masked_lm",
        'A file in bert_jax/objectives, or the dotted name of your own module. "left_to_right": '
        "causal attention, predicting the next token at every position; `masking` and "
        '`max_predictions` then have no effect. "span_boundary": masked LM, and each token of a '
        "span is also predicted from the two tokens around the span (SpanBERT). "
        '"enhanced_masked_lm": masked LM through DeBERTa\'s decoder. "masked_diffusion": predicts '
        "the masked tokens at rates from 0 to 1; `masking` and `max_predictions` have no effect. "
        '"permutation": XLNet\'s, in two streams.',
    ),
    "next_sentence": Field(True, "False: without next-sentence loss, its head and the pooler."),
    "max_predictions": Field(
        None,
        "Maximum number of masked positions per row. None: from masking.rate (20 of 128 tokens).",
        kind=int,
    ),
    "max_seq_length": MAX_SEQ_LENGTH,
    # A second phase, on longer rows. It has a warm-up and decay of its own if learning_rate or
    # warmup_steps is given; otherwise there is one over both phases.
    **with_prefix("long_phase", LONG_PHASE_TRAINING),
    "later_phases": Field(
        {},
        "Further phases: the result of make_later_phases in configs/pretrain/fields.py. Their "
        "fields are those of long_phase, such as later_phases.phase_3.batch_size.",
    ),
    "init_optimizer": Field(
        False,
        "Also take the optimizer's moments from `init_from`, a pre-training workdir or checkpoint.",
    ),
    "init_optimizer_from": Field(
        "",
        "The run whose moments are taken instead, where they fit: the one from which the weights "
        "in `init_from` were made, by more layers, other tokens or by hand.",
    ),
    # The model config; vocab_size is the corpus's.
    "model.architecture": Field(
        "bert", "A file in bert_jax/model, or the dotted name of your own module."
    ),
    "model.size": Field("base", "Sets the next four. None: the size of `init_from`."),
    "model.num_layers": Field(None, "None: set by `size`.", kind=int),
    "model.hidden_size": Field(None, "None: set by `size`.", kind=int),
    "model.num_heads": Field(None, "None: follows hidden_size.", kind=int),
    "model.intermediate_size": Field(
        None, "Units of the feed-forward layers; None: follows hidden_size.", kind=int
    ),
    "model.embedding_size": Field(
        None, "Then widened (ALBERT, ELECTRA); None: hidden_size.", kind=int
    ),
    "model.shares_layers": Field(
        None, "All layers share one set of parameters (ALBERT).", kind=bool
    ),
    "model.dropout_rate": Field(0.1, "Of hidden states."),
    "model.attention_dropout_rate": Field(None, "None: dropout_rate.", kind=float),
    "model.initializer_range": Field(0.02, "Standard deviation of the initial weights."),
    "model.layer_norm_epsilon": Field(1e-12, "Added to the variance in LayerNorm."),
    "model.max_position_embeddings": Field(512, "Tokens of the longest sequence."),
    # Masking. How the tokens to predict are corrupted: the three fractions sum to 1.
    "masking.rate": Field(0.15, "Fraction of the tokens to predict.", A_RATE),
    "masking.unit": Field(
        "token", 'Or "whole_word", "span" (SpanBERT) or "ngram" (ALBERT, XLNet).'
    ),
    "masking.repeat_after": Field(
        0, "Epochs after which a row's masks repeat; 0 means never.", AT_LEAST_0
    ),
    "masking.mask_fraction": Field(0.8, "Fraction of them that is replaced by [MASK]."),
    "masking.keep_fraction": Field(0.1, "Fraction that is predicted, but not changed."),
    "masking.random_fraction": Field(0.1, "Fraction that is replaced by a random token."),
    # Only objective "distillation" reads these; the defaults are DistilBERT's.
    "distillation.temperature": Field(
        2.0, "Divides the logits of both models for the soft targets.", AT_LEAST_1
    ),
    # Weights of the losses; 0: a loss is not computed.
    "distillation.weights.soft": Field(
        5.0, "Weight: the teacher's distribution at the masked positions.", AT_LEAST_0
    ),
    "distillation.weights.mlm": Field(2.0, "Weight: the masked tokens.", AT_LEAST_0),
    "distillation.weights.cosine": Field(
        1.0, "Weight: the direction of the last hidden states.", AT_LEAST_0
    ),
    "distillation.weights.attention": Field(
        0.0, "Weight: attention scores before the softmax.", AT_LEAST_0
    ),
    "distillation.weights.hidden": Field(
        0.0, "Weight: the outputs of all layers of the student.", AT_LEAST_0
    ),
    "distillation.weights.embeddings": Field(
        0.0, "Weight: the input of the first layer.", AT_LEAST_0
    ),
    "distillation.layers": Field(
        (),
        "The teacher's layer, counted from 1, that each student layer is compared with in "
        '"attention" and "hidden". Default: equally spaced, up to the teacher\'s last layer.',
    ),
    "distillation.init_layers": Field(
        (),
        "The teacher's layers, counted from 1, that initialize the student's layers, such as "
        "1,3,5,8,10,12; also copies embeddings and masked-LM head. Default: random "
        "initialization.",
    ),
    "optimizer": Field("bert_adam", 'Or "adamw", "lamb" or "stable_adamw".'),
    "learning_rate": Field(1e-4, "Peak, after the warm-up.", POSITIVE),
    "warmup_steps": Field(10_000, "Steps in which the learning rate rises from 0."),
    "decay_from": Field("step_0", 'As in the released code; or "warmup_end", as in transformers.'),
    "decay_power": Field(1.0, "Polynomial decay: 1 is linear, 0 constant.", AT_LEAST_0),
    "decay_steps": Field(
        None,
        "Last steps of the run, in which the learning rate falls to 0; until then it keeps its "
        "peak (warm-up, stable, decay). 0: it never falls. None: it decays as decay_from and "
        "decay_power say.",
        kind=int,
    ),
    "decay_shape": Field(
        None, 'Of decay_steps: "linear", or "1-sqrt" of the steps done, as for None.', kind=str
    ),
    "weight_decay": Field(0.01, "Decoupled, as in AdamW; not of biases and LayerNorm.", AT_LEAST_0),
    "clip_norm": Field(
        1.0,
        "Maximum norm of the gradient, over all parameters; stable_adamw clips its updates "
        "instead.",
        POSITIVE,
    ),
    "beta1": Field(0.9, "Decay of Adam's mean of the gradients.", FROM_0_BELOW_1),
    "beta2": Field(0.999, "Decay of Adam's mean of the squared gradients.", FROM_0_BELOW_1),
    "epsilon": Field(1e-6, "Added to Adam's denominator.", POSITIVE),
}

# How it runs. These may change when a run is resumed: they change nothing but speed, rounding
# (`model.dtype` the most), and when is evaluated and saved.
RUNNING = {
    # Fields of bert_jax.model.execution.Execution.
    "model.dtype": Field("bfloat16", "Of the computation; or float32."),
    "model.kernels": Field(
        "auto",
        '"auto": layers run in kernels on a TPU; "plain": never; "tpu": always, to test them.',
    ),
    "model.scan_layers": Field(
        None,
        "True: compile one layer and loop over it; False: all layers. Default: all layers on a "
        "CPU.",
        kind=bool,
    ),
    "model.remat": Field(
        "none", "Recompute in the backward pass: none, dots (all but products) or full."
    ),
    "mesh.data": Field(-1, "Devices along this axis of the mesh; -1: all remaining ones."),
    "mesh.fsdp": Field(1, "Devices along this axis; -1: all remaining ones."),
    "mesh.tensor": Field(1, "Devices along this axis; -1: all remaining ones."),
    "stop_diverged": Field(
        True, "End the run if its loss rises to twice the lowest of the phase, and by 1 at least."
    ),
    "shard_weight_update": Field(
        False, "Also shard parameters, optimizer state and weight update over `data` (ZeRO-1)."
    ),
    "overlap_collectives": Field(
        False, "With shard_weight_update: communicate in each layer, overlapped with computation."
    ),
    "per_device_batch_size": Field(
        0, "Rows per device and microbatch, with gradient accumulation; 0: one batch.", AT_LEAST_0
    ),
    **with_prefix("long_phase", PHASE_RUNNING),
    "log_every": Field(100, "Steps between training losses in metrics.jsonl.", AT_LEAST_1),
    "eval_every": Field(
        10_000, "Steps between evaluations on held-out rows; 0: only at the end.", AT_LEAST_0
    ),
    "eval_batch_size": Field(256, "Held-out rows per batch, over all devices.", AT_LEAST_1),
    "max_eval_batches": Field(
        0, "Evaluates on the first N batches of held-out rows; 0: on all rows.", AT_LEAST_0
    ),
    "checkpoint_every": Field(5_000, "Steps between checkpoints.", AT_LEAST_1),
    "keep_checkpoints": Field(3, "Keeps the last N checkpoints.", AT_LEAST_1),
    "keep_every": Field(0, "Also keeps a checkpoint every N steps; 0 means none.", AT_LEAST_0),
    "checksums": Field(
        True,
        "Writes a checksum of each file of a checkpoint, and verifies them on resuming. False "
        "saves reading terabytes once more.",
    ),
    "profile_steps": Field(0, "Steps whose trace is written to the workdir, from the third."),
    "estimate": Field(
        "",
        "The file that `tools/tpu_report.py --json=FILE` wrote for this configuration and these "
        "devices, to compare the speed of the run with.",
    ),
    "tracker": Field(
        "",
        'Also send metrics to "wandb", "mlflow" or "trackio" (pip install \'bert_jax[trackers]\').',
    ),
    "stall_seconds": Field(
        600, "Seconds without a step before the stacks of all threads are printed.", AT_LEAST_1
    ),
}

# The fields of every pre-training configuration.
FIELDS = PATHS | TRAINING | RUNNING

# Fields that only some configurations have.
OPTIONAL = {
    "program": Field("pretrain", "python -m bert_jax.pretrain reads this configuration."),
    "model.family": Field("bert", "How other libraries store the model, such as electra."),
    "model.activation": Field("gelu", "Of feed-forward layers and the masked-LM head."),
    "model.type_vocab_size": Field(2, "Segments; 0: none."),
    "model.position_offset": Field(0, "Rows of the position table before the first token's."),
    "model.pooler_activation": Field("tanh", "Of the dense layer below a classifier."),
}
_SIZES = "num_layers", "hidden_size", "num_heads", "intermediate_size"
# The model config of ModernBERT, in place of BERT's fields that begin with "model.".
MODERNBERT = {
    "model.architecture": Field("modernbert", TRAINING["model.architecture"].meaning),
    "model.size": Field("base", "Sets the next four. None: the size of `init_from`."),
    **{f"model.{name}": Field(None, "None: set by `size`.", kind=int) for name in _SIZES},
    "model.attention_pattern": Field(
        "gll", "Global (g) and local (l) layers, repeated up to the number of layers."
    ),
    "model.attention_window": Field(
        128, "Window of local layers: they see half as many tokens on each side."
    ),
    **ROPE_BASES,
    "model.dropout_rate": Field(0.0, "Within feed-forward layers."),
    "model.embedding_dropout_rate": Field(None, "None: dropout_rate.", kind=float),
    "model.attention_dropout_rate": Field(
        None, "Of attention's probabilities and output. None: dropout_rate.", kind=float
    ),
    "model.attention_output_dropout_rate": Field(
        None, "Of attention's output alone. None: attention_dropout_rate.", kind=float
    ),
    "model.initializer_range": TRAINING["model.initializer_range"],
    "model.layer_norm_epsilon": Field(1e-5, "Added to the variance in LayerNorm."),
    "model.max_position_embeddings": Field(None, "Tokens of the longest sequence.", kind=int),
}
# The same of DeBERTa.
DEBERTA = {
    "model.architecture": Field("deberta", TRAINING["model.architecture"].meaning),
    **{name: MODERNBERT[name] for name in ("model.size", *(f"model.{each}" for each in _SIZES))},
    "model.num_buckets": Field(
        None, "Distances on each side with vectors of their own; 0: all. None: 256.", kind=int
    ),
    "model.dropout_rate": Field(0.1, "Of hidden states, and of the vectors of distances."),
    "model.attention_dropout_rate": TRAINING["model.attention_dropout_rate"],
    "model.initializer_range": TRAINING["model.initializer_range"],
    "model.layer_norm_epsilon": Field(1e-7, "Added to the variance in LayerNorm."),
    "model.max_position_embeddings": Field(512, "Tokens of the longest sequence."),
}
# Of objective "replaced_tokens" (ELECTRA).
GENERATOR = {
    "generator.hidden_fraction": Field(
        0.25, "Hidden size, heads and feed-forward size, relative to the discriminator."
    ),
    "generator.num_layers": Field(None, "None: as many as the discriminator.", kind=int),
    "generator.ties_embeddings": Field(
        True, "Shares the discriminator's embeddings; False: the generator has its own."
    ),
    "generator.disentangles_embeddings": Field(
        False,
        "Shares only the tables of tokens and positions; the discriminator trains none of them, "
        "but differences that it adds (DeBERTaV3).",
    ),
    "generator.discriminator_weight": Field(
        50.0, "Of the discriminator's loss; the generator's has 1.", AT_LEAST_0
    ),
}

# Every known field, in whichever configuration, but those of `later_phases`.
KNOWN = MODERNBERT | DEBERTA | FIELDS | OPTIONAL | GENERATOR

# Those that may differ when a run is resumed.
MAY_CHANGE = (PATHS.keys() - {"branch_from"}) | RUNNING.keys()


def make_later_phases(*phases: Mapping[str, object]) -> ConfigDict:
    """Returns `config.later_phases`: a group phase_3, phase_4, ... for each of `phases`, in order.

    Each has the dotted names of fields of `PHASE` and their values. Raises KeyError for others.
    """
    later = ConfigDict()
    for number, values in enumerate(phases, 3):
        phase = make_config(PHASE).lock()
        phase.update_from_flattened_dict(values)
        later[f"phase_{number}"] = phase.unlock()
    return later


def phases_of(config: Mapping) -> dict[str, Mapping]:
    """Returns the group of fields of each phase, in their order; "" has those of the first.

    `config` is a configuration, or what a run of some version has stored of it.
    """
    later = config.get("later_phases") or {}
    for name in later:
        if not re.fullmatch(r"phase_([3-9]|[1-9]\d+)", name):
            raise ValueError(
                f"config.later_phases.{name}: not phase_3, phase_4, ...; {MAKE_LATER_PHASES}"
            )
    names = sorted(later, key=lambda name: int(name.removeprefix("phase_")))
    groups = {"": config, "long_phase": config.get("long_phase") or {}}
    return groups | {f"later_phases.{name}": later[name] for name in names}


def known_fields(config: ConfigDict) -> dict[str, Field]:
    """Returns the known fields of a configuration, those of its later phases included."""
    known = dict(KNOWN)
    for name in config.get("later_phases", ()):
        known |= with_prefix(f"later_phases.{name}", PHASE)
    return known


def may_change(config: ConfigDict) -> set[str]:
    """Returns the settings of a run that may differ when it is resumed: fields, and the model's.

    A checkpoint has the model config of the phase that wrote it.
    """
    # In earlier versions `corpus` was one directory, and `mixture` had the others.
    names = MAY_CHANGE | {"mixture"}
    for name, phase in phases_of(config).items():
        if name:
            names |= with_prefix(name, PHASE_PATHS | PHASE_RUNNING).keys()
            names.add(f"{name}.mixture")
            given = [field for field, value in phase.model.items() if value is not None]
            names |= {f"architecture.{field}" for field in given}
    return names


def apply_runlocal(config: ConfigDict, arg: str) -> ConfigDict:
    """Cuts the run down to a few steps of eight rows if `arg` is "runlocal", as a smoke test."""
    if not arg:
        return config
    if arg != "runlocal":
        raise ValueError(
            f"unknown argument {arg!r} after the colon: expected 'runlocal' or nothing"
        )
    config.model.dtype = "float32"
    config.per_device_batch_size = 0
    config.batch_size = config.eval_batch_size = 8
    config.num_steps = 10 if config.num_steps else 0
    config.warmup_steps = 2
    config.max_seq_length = None  # Any corpus will do.
    for name, phase in phases_of(config).items():
        if not name:
            continue
        phase.batch_size, phase.max_seq_length = 8, None
        phase.num_steps = 4 if phase.num_steps else 0
        if phase.warmup_steps is not None:
            phase.warmup_steps = 2
    if config.decay_steps:
        config.decay_steps = 2
    config.log_every = 1  # The curves have a point for each of the few steps.
    config.eval_every = config.checkpoint_every = 5
    return config
