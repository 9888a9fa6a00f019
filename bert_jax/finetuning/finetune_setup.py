"""Builds the task, model and optimizer of a fine-tuning configuration."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from bert_jax.checkpoints.parameters import modules_of, trained_length
from bert_jax.data.features import (
    NO_LABEL,
    LabelLayout,
    RowShape,
    check_segments,
    steps_per_epoch,
)
from bert_jax.finetuning.pretrained_head import initial_params
from bert_jax.finetuning.soft_targets import with_soft_targets
from bert_jax.finetuning.step import (
    default_rows_per_microbatch,
    fit_rows_per_microbatch,
    make_finetune_step,
    make_predict_step,
    sample_batch_sizes,
)
from bert_jax.model.architecture import (
    architecture_of,
    config_from_settings,
    config_to_settings,
)
from bert_jax.model.encoder import num_stacked_layers
from bert_jax.model.execution import Execution
from bert_jax.model.heads import TARGET_SCALE, make_model, with_target_std
from bert_jax.runtime.named_modules import import_part
from bert_jax.sharding.mesh import make_mesh
from bert_jax.sharding.rules import TASK_RULES, infer_shardings, stack_shardings
from bert_jax.tasks.tables import content_hash
from bert_jax.tasks.task import Task
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.bounds import AT_LEAST_0, AT_LEAST_1, POSITIVE, Bounds, check_bounds
from bert_jax.training.optimizer import (
    Hyperparameters,
    make_optimizer,
    make_schedule,
    scale_updates_by_layer,
)
from bert_jax.training.state import TRIAL_AXES, TrainState, parameters_hash

TO_PREDICT = (
    "to predict with a trained model, run python -m bert_jax.predict --model=DIR --input=FILE "
    "--output=FILE"
)

LARGE_RATIO = 10.0
"""Ratio of the largest class weight to that of the most frequent class that gives a warning."""

# Fields in which the trials of a stack may differ: they change no shape of the program.
PER_TRIAL = (
    "seed",
    "learning_rate",
    "weight_decay",
    "warmup_fraction",
    "num_epochs",
    "model.dropout_rate",
    "model.attention_dropout_rate",
)

# Further fields that change neither the examples of a task nor the weights to start from.
TRAINING_FIELDS = (
    *PER_TRIAL,
    "batch_size",
    "clip_norm",
    "decay_from",
    "decay_power",
    "distillation.alpha",
    "distillation.temperature",
    "eval_every",
    "freeze_layers",
    "layer_decay",
    "log_every",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.trial",
    "model.dtype",
    "model.kernels",
    "model.remat",
    "model.scan_layers",
    "num_seeds",
    "optimizer",
    "per_device_batch_size",
    "save_training_state",
    "stall_seconds",
    "tracker",
)


@dataclasses.dataclass(frozen=True)
class FinetuneSetup:
    """The task, model and optimizer that all trials of a stack share.

    Their configurations differ from `config` at most in `PER_TRIAL`. `head_settings` and `contents`
    (hashes of the files, weights and vocabulary that are read, by name) are stored in checkpoints;
    `rows_per_prediction` is the number of rows per forward pass in prediction; the hyperparameters
    given to `schedule` and `optimizer` may be traced. `teacher_layout` is the layout of a
    teacher's outputs, which the training features then have.
    """

    config: ConfigDict
    task: Task
    tokenizer: Tokenizer
    head_settings: dict
    contents: dict
    pretrained: dict
    model: nn.Module
    mesh: Mesh
    shape: RowShape
    rows_per_microbatch: int
    rows_per_prediction: int
    steps_per_epoch: int
    teacher_layout: LabelLayout | None = None
    trained_length: int | None = None

    @property
    def train_shape(self) -> RowShape:
        """The rows to train on, which also hold the outputs of any teacher."""
        return dataclasses.replace(self.shape, teacher_layout=self.teacher_layout)

    def num_steps(self, trial: ConfigDict) -> int:
        return round(trial.num_epochs * self.steps_per_epoch)

    def architecture(self, trial: ConfigDict):
        """Returns the architecture of a trial; its dropout defaults to the weights' dropout."""
        names = ("dropout_rate", "attention_dropout_rate")
        rates = {name: trial.model[name] for name in names if trial.model[name] is not None}
        return dataclasses.replace(self.model.config, **rates)

    def hyperparameters(self, trial: ConfigDict) -> Hyperparameters:
        num_steps, architecture = self.num_steps(trial), self.architecture(trial)
        attention_dropout_rate = architecture.attention_dropout_rate
        if attention_dropout_rate is None:
            attention_dropout_rate = architecture.dropout_rate
        return Hyperparameters(
            learning_rate=np.float32(trial.learning_rate),
            weight_decay=np.float32(trial.weight_decay),
            warmup_steps=np.float32(round(trial.warmup_fraction * num_steps)),
            num_steps=np.float32(max(num_steps, 1)),
            dropout_rate=np.float32(architecture.dropout_rate),
            attention_dropout_rate=np.float32(attention_dropout_rate),
        )

    def settings(self, trial: ConfigDict) -> dict:
        """Returns what a checkpoint stores of a trial; a run resumes only if they are equal."""
        return trial.to_dict() | {
            "architecture": config_to_settings(self.architecture(trial)),
            "head": self.head_settings,
            "modules": self.modules,
            "num_steps": self.num_steps(trial),
            "trained_length": self.trained_length,
            # Prevents resuming a run, or considering it finished, with other files or weights.
            "contents": self.contents,
        }

    def check(self, trial: ConfigDict) -> None:
        """Raises ValueError if settings of a trial are invalid."""
        if not self.num_steps(trial):
            raise ValueError(
                f"config.num_epochs={trial.num_epochs:g} rounds to 0 steps (an epoch has "
                f"{self.steps_per_epoch}): set a larger num_epochs"
            )
        self.settings(trial)
        self.optimizer(self.hyperparameters(trial))

    def schedule(self, values: Hyperparameters) -> optax.Schedule:
        return make_schedule(
            values.learning_rate,
            values.num_steps,
            values.warmup_steps,
            decay_from=self.config.decay_from,
            power=self.config.decay_power,
        )

    def optimizer(self, values: Hyperparameters) -> optax.GradientTransformation:
        config, num_layers = self.config, self.model.config.num_layers
        fixed = {"weight_decay": values.weight_decay, "clip_norm": config.clip_norm}
        optimizer = make_optimizer(config.optimizer, self.schedule(values), **fixed)
        num_frozen = config.freeze_layers if self.task.head.trains_encoder else num_layers
        return scale_updates_by_layer(optimizer, num_layers, config.layer_decay, num_frozen)

    def init(self, key: jax.Array, pretrained: dict) -> TrainState:
        """Returns the initial state: `pretrained` parameters, the others randomly initialized."""
        row = {name: jnp.asarray(values) for name, values in self.shape.build([], 1).items()}
        fresh = self.model.init(key, row)["params"]
        params = fresh | pretrained | {"encoder": fresh["encoder"] | pretrained["encoder"]}
        opt_state = self.optimizer(self.hyperparameters(self.config)).init(params)
        return TrainState(jnp.zeros([], jnp.int32), params, opt_state)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The shardings of the state of one trial."""
        rules = (*TASK_RULES, *architecture_of(self.model.config).RULES)
        return infer_shardings(self._shapes, self.mesh, rules)

    @functools.cached_property
    def _shapes(self) -> TrainState:
        return jax.eval_shape(self.init, jax.random.key(0), self.pretrained)

    @functools.cached_property
    def modules(self) -> list[str]:
        """The modules of the model, as checkpoints store them."""
        return modules_of(self._shapes.params)

    def init_stack(self, keys: jax.Array, pretrained: dict) -> TrainState:
        """Returns the initial states of several trials, stacked; `keys` are `[trials]`."""
        return jax.vmap(self.init, in_axes=(0, None), out_axes=TRIAL_AXES)(keys, pretrained)

    @functools.cached_property
    def stack_shardings(self) -> TrainState:
        """The shardings of the state of stacked trials."""
        return self.shardings.map_trials(stack_shardings)

    # Jitted once, so that all stacks of one size share the compiled programs.
    @functools.cached_property
    def jitted_init(self) -> Callable:
        return jax.jit(self.init_stack, out_shardings=self.stack_shardings)

    @functools.cached_property
    def select_trials(self) -> Callable:
        """Jitted (stacked state, indices of trials) -> the stacked state of these."""

        def select(state, indices):
            return state.map_trials(lambda tree: index_leaves(tree, indices))

        return jax.jit(select, out_shardings=self.stack_shardings)

    @functools.cached_property
    def pick(self) -> Callable:
        """Jitted (stacked parameters, index of a trial) -> its parameters."""
        return jax.jit(index_leaves, out_shardings=self.shardings.params)

    @functools.cached_property
    def replicate(self) -> Callable:
        """Jitted (metrics of stacked trials) -> the same on all devices."""
        return jax.jit(lambda metrics: metrics, out_shardings=NamedSharding(self.mesh, P()))

    @functools.cached_property
    def update_step(self) -> Callable:
        head = self.task.head
        if self.teacher_layout:
            head = with_soft_targets(head, **self.config.distillation)
        return make_finetune_step(
            self.model, head, self.optimizer, self.shardings, self.rows_per_microbatch
        )

    @functools.cached_property
    def predict_step(self) -> Callable:
        return make_predict_step(self.model, self.mesh, self.task.head)


def index_leaves(tree, index):
    """Returns the tree of the leaves at `index` of their leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def setup_finetuning(
    config: ConfigDict,
    params: dict,
    settings: dict,
    tokenizer: Tokenizer,
    like: FinetuneSetup | None = None,
    labels_of_run: Sequence[str] = (),
) -> FinetuneSetup:
    """Builds the setup, with its examples.

    Args:
      config: the configuration of the run.
      params, settings, tokenizer: of the initial weights.
      like: a setup whose examples and hashes are reused; its configuration may differ only in
        `TRAINING_FIELDS`.
      labels_of_run: the labels of a run to resume.

    Raises:
      ValueError, FileNotFoundError: if the configuration or the files are invalid.
    """
    fields = {name: value for name, value in config.model.items() if value is not None}
    for name in ("dropout_rate", "attention_dropout_rate"):  # May differ between trials.
        fields.pop(name, None)
    lstm_size = fields.pop("lstm_size", 0)
    architecture = config_from_settings(settings)
    if (rate := fields.pop("classifier_dropout_rate", None)) is not None:
        architecture = dataclasses.replace(architecture, classifier_dropout_rate=rate)
    execution = Execution(**fields)
    limit = "the number of layers of init_from"
    check_bounds(config, Bounds(0, architecture.num_layers), "freeze_layers", limited_by=limit)
    bounds = Bounds(8, architecture.max_position_embeddings)
    check_bounds(
        config, bounds, "max_seq_length", limited_by="max_position_embeddings of init_from"
    )
    if num_stacked_layers(architecture) < architecture.num_layers:
        for name, expected in (("layer_decay", 1), ("freeze_layers", 0)):
            if config[name] != expected:
                raise ValueError(
                    f"config.{name}={config[name]}: expected {expected}, as the layers of this "
                    "model share their parameters"
                )
    saved_head = settings.get("head")
    task = like.task if like else read_task(config, saved_head, tokenizer, labels_of_run)
    if not task.train:
        raise ValueError(f"task={config.task} has no examples to train on; {TO_PREDICT}")
    head_settings = {"task": task.head.name, "labels": list(task.labels)}
    head_settings |= {"max_seq_length": config.max_seq_length} | task.head_settings
    if lstm_size:
        if task.head.module or "lstm_size" not in task.head.options:
            name = task.head.name
            raise ValueError(f"config.model.lstm_size={lstm_size}: expected 0 for task {name}")
        head_settings["lstm_size"] = lstm_size
    pretrained = initial_params(params, saved_head, head_settings, config.new_head)
    if "head" in pretrained:
        tuned = {name: saved_head[name] for name in task.tuned if name in saved_head}
        task = task.with_settings(tuned)
        head_settings |= tuned
        # A pretrained head keeps the scale of its outputs, whatever the labels of this run.
        for name in TARGET_SCALE:
            head_settings.pop(name, None)
            if name in saved_head:
                head_settings[name] = saved_head[name]
    if "target_std" in head_settings:
        head = with_target_std(task.head, head_settings["target_std"])
        task = dataclasses.replace(task, head=head)
    check_segments(architecture, task.train)
    for split in task.splits:
        check_segments(architecture, split.features)
    mesh = make_mesh(**config.mesh)
    sequences_per_feature = len(task.train[0].sequences)
    shape = RowShape(  # Large enough for any feature.
        length=config.max_seq_length * sequences_per_feature,
        max_sequences=max(config.max_seq_length // 8, 1) * sequences_per_feature,
        label_layout=task.head.label_layout,
        pad_id=tokenizer.pad_id,
        sequences_per_feature=sequences_per_feature,
    )
    rows_per_prediction = default_rows_per_microbatch(
        shape.length, config.per_device_batch_size, mesh
    )
    rows_per_microbatch = rows_per_prediction
    if not config.per_device_batch_size:
        sizes = sample_batch_sizes(task.train, shape, config.batch_size)
        num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        rows_per_microbatch = fit_rows_per_microbatch(rows_per_prediction, sizes, num_shards)
    data_dir = config.data.get("data_dir", "")
    if like:
        contents = like.contents
    else:
        contents = {name: content_hash(each, data_dir) for name, each in task.files.items()}
        contents |= {"init_from": parameters_hash(pretrained), "vocabulary": tokenizer.sha256[:16]}
    trained = trained_length(settings)
    setup = FinetuneSetup(
        config=config,
        task=task,
        tokenizer=tokenizer,
        head_settings=head_settings,
        contents=contents,
        pretrained=pretrained,
        model=make_model(architecture, head_settings, execution),
        mesh=mesh,
        shape=shape,
        rows_per_microbatch=rows_per_microbatch,
        rows_per_prediction=rows_per_prediction,
        steps_per_epoch=steps_per_epoch(len(task.train), config.batch_size),
        trained_length=trained,
    )
    if trained and config.max_seq_length > trained:
        logging.warning(
            "config.max_seq_length=%d, but %s was trained on at most %d tokens: only "
            "fine-tuning trains the positions after them. Expect better scores with "
            "max_seq_length=%d",
            config.max_seq_length,
            config.init_from,
            trained,
            trained,
        )
    log_task(task, shape, setup.num_steps(config))
    setup.check(config)
    return setup


def log_task(task: Task, shape: RowShape, num_steps: int) -> None:
    """Logs the sizes of the task's splits, and how full the rows of its training set are."""
    if task.train:
        num_tokens, num_rows = sum(map(len, task.train)), len(shape.pack(task.train))
        logging.info(
            "%d training features in rows of %d tokens, %.0f %% full; %d steps",
            len(task.train),
            shape.length,
            100 * num_tokens / (num_rows * shape.length),
            num_steps,
        )
    if task.splits:
        splits = (f"{split.name} ({split.describe_size()})" for split in task.splits)
        logging.info("Splits: %s", ", ".join(splits))
    if any(task.notes.values()):
        notes = (f"{name}: {count}" for name, count in task.notes.items() if count)
        logging.info("Notes: %s", "; ".join(notes))


def read_task(
    config: ConfigDict,
    saved_head: dict | None,
    tokenizer: Tokenizer,
    labels_of_run: Sequence[str] = (),
) -> Task:
    """Reads the examples of `config`; `saved_head` describes the head in the weights.

    Labels found in the examples keep the order of the run to resume, or of a head with the same
    labels, because earlier versions may have sorted them otherwise. Raises ValueError or
    FileNotFoundError if the configuration or the files are invalid.
    """
    try:
        module = import_part("bert_jax.tasks", config.task, "get_task")
    except ValueError as error:
        raise ValueError(f"config.task={config.task}: {error}") from None
    task, order = module.get_task(config, tokenizer), list(labels_of_run)
    if not order and saved_head and saved_head["task"] == task.head.name and not config.new_head:
        order = list(saved_head["labels"])
    is_found = "labels" in config.data and not any(map(str, config.data.labels))
    if is_found and order != list(task.labels) and sorted(order) == sorted(task.labels):
        origin = "the run in the workdir" if labels_of_run else "the head in the weights"
        logging.info("The order of the labels is that of %s: %s", origin, ", ".join(order))
        config = config.copy_and_resolve_references()
        config.data.labels = tuple(order)
        task = module.get_task(config, tokenizer)
    head = dataclasses.replace(task.head, class_weights=find_class_weights(config, task))
    return dataclasses.replace(task, head=head)


def find_class_weights(config: ConfigDict, task: Task) -> tuple[float, ...]:
    """Returns the weight of each class; balanced: labels / (classes * labels of the class).

    A class without training examples never enters the loss: it is not counted and has weight 1.
    Raises ValueError if another weight is given for it. Warns if a weight is so large that its
    class is predicted where it is improbable.
    """
    given = weights = tuple(config.class_weights)
    if not given:
        return ()
    has_classes = task.head.name in ("classification", "tagging", "feature_based")
    classes = task.labels if has_classes else ()
    if classes:
        labels = np.concatenate([np.ravel(feature.label) for feature in task.train])
        counts = np.bincount(labels[labels != NO_LABEL], minlength=len(classes))
    if given == ("balanced",) and classes:
        balanced = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        weights = tuple(np.where(counts, balanced, 1.0).tolist())
    is_valid = all(isinstance(each, int | float) and 0 < each < math.inf for each in weights)
    if not is_valid or len(weights) != len(classes):
        valid = f"a positive number for each class ({', '.join(classes)}), or balanced"
        raise ValueError(
            f"config.class_weights={','.join(map(str, given))}: expected "
            f"{valid if classes else 'none, as this task has no classes'}"
        )
    for label, weight, count in zip(classes, weights, counts, strict=True):
        if not count and weight != 1:
            raise ValueError(
                f"config.class_weights={','.join(map(str, given))}: {label!r} has the weight "
                f"{weight:g}, but no examples in train: give it the weight 1, or remove the class"
            )
    warn_of_large_weights(classes, weights, counts)
    return weights


def warn_of_large_weights(
    classes: Sequence[str], weights: Sequence[float], counts: np.ndarray
) -> None:
    """Warns if the weight of a class is so large that it is predicted where it is improbable.

    A calibrated model predicts the class, not the most frequent one, if its probability p times its
    weight exceeds 1 - p times the weight of the most frequent class.
    """
    weights = np.array(weights)
    frequent = int(np.argmax(counts))
    rare = int(np.argmax(np.where(counts > 0, weights, 0)))
    ratio = weights[rare] / weights[frequent]
    if ratio < LARGE_RATIO:
        return
    roots = np.sqrt(weights / weights.min()).round(2)
    logging.warning(
        "class_weights: %r (%d of %d labels in train) has %.3g times the weight of %r (%d), so it "
        "is predicted at any probability above %.2g: more of its examples are found, but up to "
        "%.0f %% of its predictions may be wrong. Compare precision in predictions/*_classes.tsv "
        "with a run without weights, or with their square roots: config.class_weights=%s",
        classes[rare],
        counts[rare],
        counts.sum(),
        ratio,
        classes[frequent],
        counts[frequent],
        1 / (1 + ratio),
        100 * ratio / (1 + ratio),
        ",".join(f"{root:g}" for root in roots),
    )


def check_trains(config: ConfigDict) -> None:
    """Raises ValueError for a configuration with nothing to train with, or no epochs."""
    if not config.data.get("train", True):
        raise ValueError(f"no training data: set config.data.train=FILE; {TO_PREDICT}")
    if not config.num_epochs:
        raise ValueError(f"config.num_epochs=0: expected more; {TO_PREDICT}")


def check_numbers(config: ConfigDict) -> None:
    """Validates the numeric fields of a fine-tuning configuration. Raises ValueError."""
    check_bounds(config, AT_LEAST_0, "num_epochs", "per_device_batch_size", "eval_every")
    check_bounds(config, AT_LEAST_0, "weight_decay", "decay_power", "seed", "model.lstm_size")
    check_bounds(config, AT_LEAST_0, "max_train_examples", "max_eval_examples")
    check_bounds(config, AT_LEAST_1, "num_seeds", "batch_size", "log_every", "stall_seconds")
    check_bounds(config, POSITIVE, "learning_rate", "clip_norm")
    check_bounds(config, Bounds(0, 1, excludes_minimum=True), "layer_decay")
    check_bounds(config, Bounds(0, 1), "warmup_fraction", "distillation.alpha")
    check_bounds(config, AT_LEAST_1, "distillation.temperature")
