"""BERT_BASE, uncased: 12 layers, hidden 768, 12 heads, 110 M parameters.

Source: Devlin et al. (2018), section 3.1 and appendix A.2: batch 256; 900,000 steps on rows of 128
tokens, then 100,000 on rows of 512; Adam, learning rate 1e-4, 10,000 steps of warm-up. Every other
configuration in this directory derives from this one.

Expected time: 4 days on 16 TPU chips in the paper. Not run at full size here.
Expected result: held-out perplexity 3.99 (the paper's table 6). Not run at full size here.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_base.py --workdir=runs/base \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str = "") -> ConfigDict:
    config = ConfigDict()
    config.program = "pretrain"  # python -m bert_jax.pretrain reads it.
    config.seed = 0  # Of the initial values, the order of the rows, masking and dropout.

    config.corpus = ""  # Directory written by tools/prepare_corpus.py, with rows of 128 tokens.
    config.num_steps = 900_000  # Updates in the first phase; 0 skips it.
    config.batch_size = 256  # Rows per update, over all devices.
    # A file in bert_jax/objectives, or the dotted name of your own module. "left_to_right":
    # causal attention, predicting the next token at every position; `masking` and
    # `max_predictions` then have no effect. "span_boundary": masked LM, and each token of a span is
    # also predicted from the two tokens around the span (SpanBERT).
    config.objective = "masked_lm"
    config.next_sentence = True  # False: without next-sentence loss, its head and the pooler.
    # Maximum number of masked positions per row. None: from masking.rate (20 of 128 tokens).
    config.max_predictions = placeholder(int)

    # A second phase on longer rows.
    config.long_phase = ConfigDict()
    config.long_phase.corpus = ""  # Directory of a corpus with longer rows.
    config.long_phase.num_steps = 100_000  # Updates in this phase; 0 skips it.
    config.long_phase.batch_size = 256  # Rows per update, over all devices.
    config.long_phase.max_predictions = placeholder(int)  # None: 77 of 512 tokens.
    # Both None: one warm-up and decay over both phases. Otherwise each phase has its own.
    config.long_phase.learning_rate = placeholder(float)  # None: as in the first phase.
    config.long_phase.warmup_steps = placeholder(int)  # None: 0.
    config.long_phase.per_device_batch_size = placeholder(int)  # None: as in the first phase.

    # Weights to start from: a workdir, a checkpoint, or a directory of Hugging Face or of Google's
    # release; missing parts are randomly initialized. Default: a random initialization.
    config.init_from = ""
    # Also take the optimizer's moments from `init_from`, a pre-training workdir or checkpoint.
    config.init_optimizer = False

    config.model = model_config()
    config.masking = ConfigDict()
    config.masking.rate = 0.15  # Fraction of the tokens to predict.
    config.masking.unit = "token"  # Or "whole_word", "span" (SpanBERT) or "ngram" (ALBERT).
    config.masking.repeat_after = 0  # Epochs after which a row's masks repeat; 0 means never.
    # How the tokens to predict are corrupted; the three fractions sum to 1.
    config.masking.mask_fraction = 0.8  # Replaced by [MASK].
    config.masking.keep_fraction = 0.1  # Predicted, but not changed.
    config.masking.random_fraction = 0.1  # Replaced by a random token.

    config.distillation = distillation_config()  # Only objective "distillation" reads it.

    config.optimizer = "bert_adam"  # Or "adamw" or "lamb".
    config.learning_rate = 1e-4  # Peak, after the warm-up.
    config.warmup_steps = 10_000  # Steps in which the learning rate rises from 0.
    config.decay_from = "step_0"  # As in the released code; or "warmup_end", as in transformers.
    config.decay_power = 1.0  # Polynomial decay: 1 is linear, 0 constant.
    config.weight_decay = 0.01  # Decoupled, as in AdamW; not of biases and LayerNorm.
    config.clip_norm = 1.0  # Maximum norm of the gradient, over all parameters.
    config.beta1 = 0.9  # Decay of Adam's mean of the gradients.
    config.beta2 = 0.999  # Decay of Adam's mean of the squared gradients.
    config.epsilon = 1e-6  # Added to Adam's denominator.

    # Devices along each axis of the mesh; -1 means all remaining devices.
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})
    # Also shard parameters, optimizer state and weight update over `data` (ZeRO-1).
    config.shard_weight_update = False
    # With shard_weight_update: communicate in each layer, overlapped with computation.
    config.overlap_collectives = False
    # Rows per device and microbatch, with gradient accumulation; 0 means a single microbatch.
    config.per_device_batch_size = 0

    config.log_every = 100  # Steps between lines with the training loss in metrics.jsonl.
    config.eval_every = 10_000  # Steps between evaluations on held-out rows; 0: only at the end.
    config.eval_batch_size = 256  # Held-out rows per batch, over all devices.
    config.max_eval_batches = 0  # Batches per evaluation; 0 means all held-out rows.
    config.checkpoint_every = 5_000  # Steps between checkpoints.
    config.keep_checkpoints = 3  # Keeps the last N checkpoints.
    config.keep_every = 0  # Also keeps a checkpoint every N steps; 0 means none.
    # Writes a checksum of each file of a checkpoint, and verifies them on resuming. False saves
    # reading terabytes once more.
    config.checksums = True
    config.profile_steps = 0  # Steps whose trace is written to the workdir, from the third.
    # Also send metrics to "wandb", "mlflow" or "trackio" (pip install 'bert_jax[trackers]').
    config.tracker = ""
    # Seconds without a step before the stacks of all threads are printed.
    config.stall_seconds = 600

    return apply_runlocal(config, arg)


def model_config() -> ConfigDict:
    """Returns the fields of the architecture (vocab_size is the corpus's), and how it runs."""
    model = ConfigDict()
    # A file in bert_jax/model, or the dotted name of your own module.
    model.architecture = "bert"
    model.size = "base"  # None: the size of `init_from`.
    # Set by `size` unless given; the number of heads and the feed-forward size follow hidden_size.
    for name in ("num_layers", "hidden_size", "num_heads", "intermediate_size"):
        model[name] = placeholder(int)  # None: set by `size`.
    model.embedding_size = placeholder(int)  # Then widened (ALBERT, ELECTRA); None: hidden_size.
    model.shares_layers = placeholder(bool)  # All layers share one set of parameters (ALBERT).
    model.dropout_rate = 0.1  # Of hidden states.
    model.attention_dropout_rate = placeholder(float)  # None: dropout_rate.
    model.initializer_range = 0.02  # Standard deviation of the initial weights.
    model.layer_norm_epsilon = 1e-12  # Added to the variance in LayerNorm.
    model.max_position_embeddings = 512  # Tokens of the longest sequence.
    # How the model runs, which changes only speed and rounding: fields of
    # bert_jax.model.execution.Execution.
    model.dtype = "bfloat16"
    # "auto": layers run in kernels on a TPU; "plain": never.
    model.kernels = "auto"
    # True: compile one layer and loop over it; False: all layers. Default: all layers on a CPU.
    model.scan_layers = placeholder(bool)
    model.remat = "none"  # Recompute in the backward pass: none, dots (all but products) or full.
    return model


def distillation_config() -> ConfigDict:
    """Returns the fields of objective "distillation"; the defaults are DistilBERT's."""
    distillation = ConfigDict()
    # The model to learn from, in any form that `init_from` takes, with the corpus's vocabulary.
    distillation.teacher = ""
    distillation.temperature = 2.0  # Divides the logits of both models for the soft targets.
    # Weights of the losses; 0: a loss is not computed.
    distillation.weights = ConfigDict()
    distillation.weights.soft = 5.0  # The teacher's distribution at the masked positions.
    distillation.weights.mlm = 2.0  # The masked tokens.
    distillation.weights.cosine = 1.0  # The direction of the last hidden states.
    distillation.weights.attention = 0.0  # Attention scores before the softmax.
    distillation.weights.hidden = 0.0  # The outputs of all layers of the student.
    distillation.weights.embeddings = 0.0  # The input of the first layer.
    # The teacher's layer, counted from 1, that each student layer is compared with in "attention"
    # and "hidden". Default: equally spaced, up to the teacher's last layer.
    distillation.layers = ()
    # The teacher's layers, counted from 1, that initialize the student's layers, such as
    # 1,3,5,8,10,12; also copies embeddings and masked-LM head. Default: random initialization.
    distillation.init_layers = ()
    return distillation


def apply_runlocal(config: ConfigDict, arg: str) -> ConfigDict:
    """Cuts the run down to a few steps of eight rows if `arg` is "runlocal", as a smoke test."""
    if not arg:
        return config
    if arg != "runlocal":
        raise ValueError(
            f"unknown argument {arg!r} after the colon: expected 'runlocal' or nothing"
        )
    config.model.dtype = "float32"
    config.num_steps = 10 if config.num_steps else 0
    config.per_device_batch_size = 0
    config.batch_size = config.long_phase.batch_size = config.eval_batch_size = 8
    config.long_phase.num_steps = 4 if config.long_phase.num_steps else 0
    config.warmup_steps = 2
    if config.long_phase.warmup_steps is not None:
        config.long_phase.warmup_steps = 2
    config.log_every = 1  # The curves have a point for each of the few steps.
    config.eval_every = config.checkpoint_every = 5
    return config
