"""Builds the model, mesh, schedule and steps of a fine-tuning configuration."""

import dataclasses
import functools
from collections.abc import Mapping

import flax.linen as nn
from absl import logging
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.checkpoints.parameters import LoadedModel, modules_of, trained_length
from bert_jax.checkpoints.peft import PeftFormat, is_base_of_peft, peft_format
from bert_jax.checkpoints.transformers_config import format_of
from bert_jax.data.features import steps_per_epoch, unpack_rows
from bert_jax.finetuning.hyperparameters import (
    RATES,
    finetune_optimizer,
    make_hyperparameters,
    model_config_of_trial,
)
from bert_jax.finetuning.soft_targets import with_soft_targets
from bert_jax.finetuning.stack_steps import StackSteps, build_stack_steps
from bert_jax.finetuning.step import (
    default_rows_per_microbatch,
    fit_rows_per_microbatch,
    max_rows_of_whole_batch,
    sample_batch_sizes,
)
from bert_jax.finetuning.task_data import TO_PREDICT, TaskData, log_task
from bert_jax.model.architecture import config_from_settings, config_to_settings
from bert_jax.model.config import pools_last
from bert_jax.model.execution import Execution, log_path, plan_execution
from bert_jax.model.heads import Head, make_model
from bert_jax.model.layer_stack import num_stacked_layers
from bert_jax.model.lora import Lora, choose_layers, dense_layers
from bert_jax.runtime.config_fields import Bounds, check_bounds
from bert_jax.sharding.mesh import make_mesh
from bert_jax.tasks.task import Task
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.optimizer import Hyperparameters


@dataclasses.dataclass(frozen=True)
class FinetuneSetup:
    """How the trials of a stack are trained; their configurations differ at most in `PER_TRIAL`.

    Attributes:
      config: of the run, or of the first trial.
      tokenizer: that of the weights to start from.
      data: what they are trained on.
      model, mesh: of all trials; the model's dropout rates are those of the weights.
      steps: the jitted functions.
      lora: the adapters that are trained instead of the encoder; None: without LoRA.
      steps_per_epoch: number of batches.
      rows_per_microbatch: in training, over all devices.
      rows_per_prediction: rows per forward pass in prediction, over all devices.
      trained_length: length up to which the weights have trained positions; None if unknown.
    """

    config: ConfigDict
    tokenizer: Tokenizer
    data: TaskData
    model: nn.Module
    mesh: Mesh
    steps: StackSteps
    lora: Lora | None
    steps_per_epoch: int
    rows_per_microbatch: int
    rows_per_prediction: int
    trained_length: int | None

    def num_steps(self, trial: ConfigDict) -> int:
        """Returns the number of updates of a trial, unless its patience is exhausted before."""
        return round(trial.num_epochs * self.steps_per_epoch)

    def hyperparameters(self, trial: ConfigDict) -> Hyperparameters:
        """Returns the hyperparameters of a trial, arguments of the compiled step."""
        return make_hyperparameters(trial, self.model.config, self.num_steps(trial))

    def settings(self, trial: ConfigDict) -> dict:
        """Returns the settings of a trial, which checkpoints store and a resumed run must equal."""
        return trial.to_dict() | {
            "data": self.data.fields,
            "architecture": config_to_settings(model_config_of_trial(trial, self.model.config)),
            "head": self.data.head_settings,
            "modules": modules_of(self.steps.model_shapes),
            "num_steps": self.num_steps(trial),
            "trained_length": self.trained_length,
            # Prevents resuming a run, or considering it finished, with other files or weights.
            "contents": self.data.contents,
        }

    def peft_format(self) -> PeftFormat | None:
        """Returns how `peft` stores the adapters; None without LoRA, or if it cannot."""
        if self.lora is None:
            return None
        base = self.config.init_from
        try:
            stored = peft_format(
                self.lora,
                self.model.config,
                self.data.head_settings,
                self.steps.shapes.params,
                self.steps.model_shapes,
                base,
            )
        except ValueError as error:
            logging.warning("No adapter for peft is written, only the merged model: %s", error)
            return None
        if not is_base_of_peft(base):
            text = (
                "bert_jax reads the adapters, but peft cannot load their base model %s: convert it "
                "with tools/convert_checkpoint.py --to=huggingface, and set "
                "base_model_name_or_path in adapter_config.json"
            )
            logging.log_first_n(logging.WARNING, text, 1, base)  # Not for each stack of a sweep.
        return stored

    def check(self, trial: ConfigDict) -> None:
        """Raises ValueError if settings of a trial are invalid."""
        if not self.num_steps(trial):
            raise ValueError(
                f"config.num_epochs={trial.num_epochs:g} rounds to 0 steps (an epoch has "
                f"{self.steps_per_epoch}): set a larger num_epochs"
            )
        limit = "the number of steps"
        check_bounds(trial, Bounds(0, self.num_steps(trial)), "warmup_steps", limited_by=limit)
        check_patience(trial, self.data.task)
        check_batch_is_compared(trial, self.data.task.head)
        model_config_of_trial(trial, self.model.config)  # Raises for invalid dropout rates.


def setup_finetuning(config: ConfigDict, source: LoadedModel, data: TaskData) -> FinetuneSetup:
    """Builds the model, mesh and steps that train on `data`, starting from the weights `source`.

    Raises ValueError if the configuration is invalid.
    """
    model_config = config_from_settings(source.settings)
    rates = dict.fromkeys(getattr(model_config, "pretraining_rates", ()))
    if (rate := config.model.get("classifier_dropout_rate")) is not None:
        rates["classifier_dropout_rate"] = rate
    model_config = dataclasses.replace(model_config, **rates)
    mesh = make_mesh(**config.mesh)
    execution = model_execution(config)
    if config.lora.rank:
        # The kernels compute layers without adapters.
        execution = dataclasses.replace(execution, kernels="plain")
    plan = plan_execution(execution, mesh.devices.flat[0], mesh.shape["tensor"])
    model = make_model(model_config, data.head_settings, plan)

    task, shape = data.task, data.shape
    rows_per_prediction = default_rows_per_microbatch(
        shape.length, config.per_device_batch_size, mesh
    )
    rows_per_microbatch = rows_per_prediction
    if not config.per_device_batch_size:
        sizes = sample_batch_sizes(task.train, shape, config.batch_size)
        num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        max_whole = 0
        if task.head.predicts == "sparse_vector":  # Logits take more memory than activations.
            max_whole = rows_per_prediction
        elif task.head.batch_loss:
            max_whole = max_rows_of_whole_batch(
                model_config, shape.length, rows_per_prediction, mesh
            )
        rows_per_microbatch = fit_rows_per_microbatch(
            rows_per_prediction, sizes, num_shards, max_whole
        )

    train_head = task.head
    if config.teacher and task.head.soft_loss:
        train_head = with_soft_targets(task.head, **config.distillation)
    row = shape.build([], 1)
    lora = None
    if config.lora.rank:
        lora = choose_adapters(config, model, task.head, row, data.pretrained)
    steps = build_stack_steps(
        model,
        mesh,
        head=task.head,
        train_head=train_head,
        optimizer=functools.partial(
            finetune_optimizer, config, model_config, task.head.trains_encoder
        ),
        row=row,
        pretrained=data.pretrained,
        rows_per_microbatch=rows_per_microbatch,
        batch_size=config.batch_size,
        lora=lora,
    )
    setup = FinetuneSetup(
        config=config,
        tokenizer=source.tokenizer,
        data=data,
        model=model,
        mesh=mesh,
        steps=steps,
        lora=lora,
        steps_per_epoch=steps_per_epoch(len(task.train), config.batch_size),
        rows_per_microbatch=rows_per_microbatch,
        rows_per_prediction=rows_per_prediction,
        trained_length=trained_length(source.settings),
    )
    log_setup(setup)
    setup.check(config)
    return setup


def choose_adapters(
    config: ConfigDict, model: nn.Module, head: Head, row: Mapping, pretrained: Mapping
) -> Lora:
    """Returns the adapters that `config.lora` describes. Raises ValueError if it is invalid."""
    rank, alpha, targets = config.lora.rank, config.lora.alpha, config.lora.targets
    if not head.trains_encoder:
        raise ValueError(
            f"config.lora.rank={rank}: expected 0, as the head {head.name} reads a fixed encoder"
        )
    dense = dense_layers(model, row | unpack_rows(row, pools_last(model.config)))
    stored = format_of(model.config)
    groups = choose_layers(
        pretrained["encoder"], dense, targets, stored.fused_layers() if stored else ()
    )
    kernels = flatten_dict({"encoder": pretrained["encoder"]}, sep="/")
    for path in (path for group in groups for path in group if path.startswith("encoder/layers/")):
        if len(kernels[f"{path}/kernel"]) != num_stacked_layers(model.config):
            raise ValueError(
                f"config.lora.targets={targets!r}: it is found in {path}, which only some layers "
                "have: expected dense layers that all layers have"
            )
    return Lora(rank, alpha or rank, groups)


def model_execution(config: ConfigDict) -> Execution:
    """Returns how the model runs: the fields of `config.model` that no trial or head has."""
    others = (*RATES, "classifier_dropout_rate", "lstm_size")
    given = {name: value for name, value in config.model.items() if value is not None}
    return Execution(**{name: value for name, value in given.items() if name not in others})


def log_setup(setup: FinetuneSetup) -> None:
    """Logs how layers run, and the sizes of the task; warns of positions that are untrained."""
    config, trained = setup.config, setup.trained_length
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
    log_path(setup.model.plan, setup.model.config, setup.data.shape.length)
    log_task(setup.data.task, setup.data.shape, setup.num_steps(config))


def check_patience(trial: ConfigDict, task: Task) -> None:
    """Raises ValueError if a trial with patience has no metric, or depends on its planned end."""
    if not trial.patience:
        return
    start = f"config.patience={trial.patience}"
    if not task.selection_split:
        name = task.metric.partition("/")[0]
        raise ValueError(
            f"{start}: {task.metric} needs examples with labels for {name}, as in "
            f"config.data.{name}=FILE"
        )
    fixes = []
    if trial.decay_power:
        fixes.append("decay_power=0")
    if trial.warmup_steps is None and trial.warmup_fraction:
        fixes.append("warmup_steps=N, or warmup_fraction=0")
    if task.head.predicts == "sparse_vector" and trial.loss.flops_warmup_fraction != 0:
        fixes.append("loss.flops_warmup_fraction=0")
    if fixes:
        raise ValueError(
            f"{start}: the run may stop long before num_epochs, on which its schedules must not "
            f"depend: set {'; '.join(fixes)}"
        )


def check_batch_is_compared(trial: ConfigDict, head: Head) -> None:
    """Raises ValueError for a batch of one example if the loss compares examples."""
    if head.batch_loss and trial.batch_size == 1:
        raise ValueError(
            "config.batch_size=1: the loss compares the examples of a batch: expected at least 2"
        )


def check_against_weights(config: ConfigDict, settings: Mapping) -> None:
    """Raises ValueError if fields of `config` do not fit the model that `settings` describe.

    Must be called before the examples are read, which may take long.
    """
    model_config = config_from_settings(settings)
    check_bounds(
        config,
        Bounds(0, model_config.num_layers),
        "freeze_layers",
        limited_by="the number of layers of init_from",
    )
    check_bounds(
        config,
        Bounds(8, model_config.max_position_embeddings),
        "max_seq_length",
        limited_by="max_position_embeddings of init_from",
    )
    sizes = config.get("loss", {}).get("matryoshka_sizes", ())
    limit, limited_by = model_config.hidden_size, "hidden_size of init_from"
    if size := config.get("similarity", {}).get("vector_size"):
        limit, limited_by = size, "config.similarity.vector_size"
    if sizes and max(sizes) > limit:
        raise ValueError(
            f"config.loss.matryoshka_sizes={tuple(sizes)}: expected at most {limit}, the "
            f"{limited_by}"
        )
    if num_stacked_layers(model_config) < model_config.num_layers:
        for name, expected in (("layer_decay", 1), ("freeze_layers", 0)):
            if config[name] != expected:
                raise ValueError(
                    f"config.{name}={config[name]}: expected {expected}, as the layers of this "
                    "model share their parameters"
                )
    model_execution(config)
    check_lora(config)


def check_lora(config: ConfigDict) -> None:
    """Raises ValueError for fields without an effect: on adapters, or where there are none."""
    if not config.lora.rank:
        for name, unset in (("alpha", 0), ("targets", "")):
            if config.lora[name] != unset:
                raise ValueError(
                    f"config.lora.{name}={config.lora[name]!r}: expected {unset!r} without LoRA; "
                    "set config.lora.rank, such as 8, to train adapters"
                )
        return
    for name, expected in (("layer_decay", 1), ("freeze_layers", 0)):
        if config[name] != expected:
            raise ValueError(
                f"config.{name}={config[name]}: expected {expected} with config.lora.rank, where "
                "the encoder is frozen; config.lora.targets chooses layers"
            )
    if config.model.kernels == "tpu":
        raise ValueError(
            "config.model.kernels=tpu: expected auto or plain with config.lora.rank, as the "
            "kernels compute layers without adapters"
        )


def check_trains(config: ConfigDict) -> None:
    """Raises ValueError for a configuration without training data or epochs."""
    data = config.data
    if not (data.get("train", True) or data.get("directory") or data.get("hub")):
        raise ValueError(f"no training data: set config.data.train=FILE; {TO_PREDICT}")
    if not config.num_epochs:
        raise ValueError(f"config.num_epochs=0: expected more than 0; {TO_PREDICT}")
