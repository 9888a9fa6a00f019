"""Builds the task, model, optimizer and steps of a fine-tuning configuration."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import partitioning
from bert_jax.data.features import RowShape, batch_indices, steps_per_epoch
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import make_model
from bert_jax.tasks.pretrained_head import initial_params, use_labels_of_head
from bert_jax.tasks.task import Task
from bert_jax.tokenization import Tokenizer
from bert_jax.training.finetune_step import default_microbatch_rows, fit_microbatch_rows
from bert_jax.training.optimizer import freeze, linear_schedule, make_optimizer
from bert_jax.training.setup import check_bounds
from bert_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class FinetuneSetup:
    """The task, model and steps that the runs of all seeds share.

    `settings` are stored in checkpoints; `init` turns a key and the `pretrained` parameters into
    the initial state; `predict_rows` is the number of rows per forward pass in prediction.
    """

    config: ConfigDict
    task: Task
    tokenizer: Tokenizer
    settings: dict
    pretrained: dict
    shape: RowShape
    microbatch_rows: int
    predict_rows: int
    steps_per_epoch: int
    num_steps: int
    model: object
    mesh: Mesh
    schedule: Callable[[int], jax.Array]
    optimizer: optax.GradientTransformation
    init: Callable[[jax.Array, dict], TrainState]
    shardings: TrainState


def setup_finetuning(
    config: ConfigDict, params: dict, settings: dict, tokenizer: Tokenizer
) -> FinetuneSetup:
    """Reads the examples and builds what all seeds run with.

    `params`, `settings` and `tokenizer` are those of the weights to start from. Raises ValueError
    or FileNotFoundError if anything is wrong with the configuration or the files.
    """
    found = settings["head"] if "head" in params else None
    name = f"bert_jax.tasks.{config.task}"
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"--config.task={config.task}: expected a file name in bert_jax/tasks")
    module = importlib.import_module(name)
    task = module.get_task(use_labels_of_head(config, module, found), tokenizer)
    fields = {name: value for name, value in config.model.items() if value is not None}
    bert = BertConfig(**(settings["bert"] | {"dtype": "float32"} | fields))
    described = {"task": task.head.name, "labels": list(task.labels), **task.head_settings}
    pretrained = initial_params(params, found, described, config.new_head)
    if "head" in pretrained:
        task.head_settings.update({name: found[name] for name in task.tuned if name in found})
        described |= task.head_settings
    model = make_model(bert, described)
    num_batches = steps_per_epoch(len(task.train), config.batch_size)
    num_steps = round(config.num_epochs * num_batches)
    if not num_steps and task.labels and "head" not in pretrained:
        why = f"num_epochs is {config.num_epochs:g}" if task.train else "there is no training data"
        raise ValueError(
            f"{why}, and {config.init_from} has no head for this task, or new_head ignores it: "
            "give the workdir of a run that trained one"
        )

    if config.max_seq_length > bert.max_position_embeddings:
        raise ValueError(
            f"max_seq_length is {config.max_seq_length}, but the position table of "
            f"{config.init_from} ends at {bert.max_position_embeddings}"
        )
    mesh = partitioning.make_mesh(**config.mesh)
    num_sequences = len((task.train or task.splits[0].features)[0].sequences)
    shape = RowShape(  # Holds any feature.
        length=config.max_seq_length * num_sequences,
        num_sequences=max(config.max_seq_length // 8, 1) * num_sequences,
        labels=task.head.labels,
        pad_id=tokenizer.pad_id,
        sequences_per_feature=num_sequences,
    )
    predict_rows = default_microbatch_rows(shape.length, config.per_device_batch_size, mesh)
    microbatch_rows = predict_rows
    if task.train and not config.per_device_batch_size:
        sizes = []  # Numbers of rows of the first batches, as a sample of all.
        for step in range(min(50, num_batches)):
            indices = batch_indices(len(task.train), config.batch_size, config.seed, step)
            sizes.append(len(shape.pack([task.train[index] for index in indices])))
        num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        microbatch_rows = fit_microbatch_rows(predict_rows, sizes, num_shards)

    schedule = linear_schedule(
        config.learning_rate, max(num_steps, 1), round(config.warmup_fraction * num_steps)
    )
    optimizer = make_optimizer(
        config.optimizer, schedule, weight_decay=config.weight_decay, clip_norm=config.clip_norm
    )
    if not task.head.trains_encoder:
        optimizer = freeze(optimizer, ("bert",))

    def init(key, pretrained):
        row = {name: jnp.asarray(values) for name, values in shape.empty(1).items()}
        fresh = model.init(key, row)["params"]
        params = fresh | pretrained | {"bert": fresh["bert"] | pretrained["bert"]}
        return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))

    shapes = jax.eval_shape(init, jax.random.key(0), pretrained)
    resolved = config.to_dict() | {
        "bert": dataclasses.asdict(bert),
        "head": described,
        "absent": ["mlm", "nsp", *([] if task.head.pooled else ["bert/pooler"])],
        "num_steps": num_steps,
    }
    tokens, rows = sum(map(len, task.train)), len(shape.pack(task.train))
    logging.info(
        "%d training features of %.1f tokens on average, in rows of %d tokens, %.0f %% full; "
        "%d steps; splits: %s; %s",
        len(task.train),
        tokens / max(len(task.train), 1),
        shape.length,
        100 * tokens / max(rows * shape.length, 1),
        num_steps,
        ", ".join(f"{split.name} ({len(split.features)})" for split in task.splits),
        ", ".join(f"{name}: {count}" for name, count in task.notes.items()),
    )
    return FinetuneSetup(
        config=config,
        task=task,
        tokenizer=tokenizer,
        settings=resolved,
        pretrained=pretrained,
        shape=shape,
        microbatch_rows=microbatch_rows,
        predict_rows=predict_rows,
        steps_per_epoch=num_batches,
        num_steps=num_steps,
        model=model,
        mesh=mesh,
        schedule=schedule,
        optimizer=optimizer,
        init=init,
        shardings=partitioning.infer_shardings(shapes, mesh, partitioning.TASK_RULES),
    )


def check_numbers(config: ConfigDict) -> None:
    """Validates the numeric fields of a fine-tuning configuration. Raises ValueError."""
    check_bounds(
        config,
        ("num_epochs per_device_batch_size eval_every weight_decay seed", 0, math.inf),
        ("num_seeds batch_size log_every stall_seconds", 1, math.inf),
        ("max_seq_length", 8, math.inf),
        ("learning_rate clip_norm", 1e-30, math.inf),
        ("warmup_fraction", 0, 1),
    )
