"""Compiles the update step of a bi-encoder's training for a TPU topology, for tools/tpu_report.py.

The step is that of the run, with gradient caching over the microbatches, but without its weights
and examples: the model is a BERT of a published size, and each example takes a row of its own, for
texts of `max_seq_length` tokens. Shorter ones share rows: a step then has fewer microbatches, and
only the loss and the update of the parameters take as long as here.
"""

import functools
import math

from ml_collections import ConfigDict

from bert_jax.data.features import steps_per_epoch
from bert_jax.finetuning.finetune_fields import check_numbers
from bert_jax.finetuning.step import default_rows_per_microbatch
from bert_jax.finetuning.task_data import row_shape
from bert_jax.model import heads
from bert_jax.model.architecture import architecture_of
from bert_jax.pods.estimate import compilation, pod_report, stack_report
from bert_jax.pods.estimate.hlo_cost import FINETUNING_PARTS
from bert_jax.sharding.mesh import make_mesh
from bert_jax.tasks.retrieval_losses import find_loss, head_with_loss

TRAINING_PASSES = 3
"""Forward, gradients of inputs and of weights. The second forward pass of the cache is overhead."""


def report(
    config: ConfigDict,
    topology: str,
    model_size: str = "base",
    train_examples: int | None = None,
    **options,
) -> dict:
    """Compiles the step, sharded over `topology`; returns what `pod_report.report` does.

    A row is an example, such as a pair: of `max_seq_length` tokens for each of its texts. `config`
    is that of a bi-encoder with a loss that compares the passages of a batch. `train_examples`
    gives the number of steps, by default that of one; `options` are those of `step_figures`.
    Raises ValueError if the configuration or the topology is invalid.
    """
    check_numbers(config)
    loss = find_loss(config)
    vectors = config.similarity.vectors
    if loss.labels != "passages" or loss.takes_guide or vectors != "dense":
        raise ValueError(
            f"no report for config.data.role={config.data.role} with config.similarity.vectors="
            f"{vectors} and config.loss.name={config.loss.name}: expected a bi_encoder with dense "
            "vectors and the loss in_batch"
        )
    _, devices = compilation.describe_topology(topology)
    mesh = make_mesh(**config.mesh, devices=devices)
    num_texts = 2 + (config.data.num_negatives or 0)
    head = head_with_loss(heads.EMBEDDING, loss, config, num_texts - 1)
    settings = {"task": head.name, "labels": []}
    settings |= {name: config.similarity[name] for name in ("pooling", "normalize")}
    model = stack_report.build_model(config, settings, mesh, model_size)
    shape = row_shape(config.max_seq_length, num_texts, head, pad_id=0)
    rows = default_rows_per_microbatch(shape.length, config.per_device_batch_size, mesh)
    num_microbatches = math.ceil(config.batch_size / rows)
    steps = stack_report.build_steps(config, model, head, mesh, shape, rows)
    forward = architecture_of(model.config).flops_per_row(
        model.config, config.max_seq_length, config.max_seq_length, num_targets=0, num_pairs=0
    )
    epoch = steps_per_epoch(train_examples or config.batch_size, config.batch_size)
    num_steps = round(config.num_epochs * epoch) if train_examples else 1
    axes = {name: size for name, size in mesh.shape.items() if name != "trial"}
    figures = pod_report.step_figures(
        {
            "max_seq_length": shape.length,
            "batch_size": config.batch_size,
            "num_steps": num_steps,
            "mesh": axes,
            "per_device_batch_size": rows // (axes["data"] * axes["fsdp"]),
            "model_flops_per_row": TRAINING_PASSES * num_texts * forward,
        },
        functools.partial(
            stack_report.compile_update, config, steps, mesh, shape, num_microbatches * rows
        ),
        topology,
        mesh.devices,
        checkpoint_every=min(config.eval_every or epoch, num_steps),
        unknown_trips=num_microbatches,
        parts=FINETUNING_PARTS,
        **options,
    )
    parameters = pod_report.num_params(model.config, steps.shapes.params)
    return pod_report.summary([figures], topology, devices, parameters, model.plan.remat)
