"""Compiles the update step of stacked fine-tuning trials for a TPU topology, and compares stacks.

The step is the same as in the run, but without its weights and examples: the model is a BERT of a
published size, and each example takes a row.
"""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from bert_jax.data.features import RowShape
from bert_jax.finetuning.finetune_fields import check_numbers
from bert_jax.finetuning.finetune_setup import model_execution
from bert_jax.finetuning.hyperparameters import RATES, finetune_optimizer, make_hyperparameters
from bert_jax.finetuning.stack_steps import StackSteps, build_stack_steps
from bert_jax.finetuning.task_data import row_shape
from bert_jax.model import heads
from bert_jax.model.config import BertConfig
from bert_jax.model.execution import plan_execution
from bert_jax.pods.chips import CHIPS, GIB, parse_topology
from bert_jax.pods.estimate import compilation, pod_report
from bert_jax.pods.estimate.hlo_cost import step_cost
from bert_jax.sharding.mesh import batch_sharding, make_mesh

HEADS = {
    "text_classification": heads.CLASSIFICATION,
    "glue": heads.CLASSIFICATION,
    "tagging": heads.TAGGING,
    "squad": heads.SPAN,
}
COLUMNS = (
    "trials",
    "devices",
    "cycles per step",
    "ms per step",
    "relative to one trial",
    "collectives",
    "HBM, GiB",
)


def report(config: ConfigDict, topology: str, model_size: str = "base") -> dict:
    """Compiles one trial on a device, one on each device of `topology`, and four on a device.

    Returns the figures of each stack under "stacks". `config` is a fine-tuning configuration, the
    model a BERT of `model_size`. Raises ValueError if it, or the topology, is invalid.
    """
    check_numbers(config)
    if config.task not in HEADS:
        raise ValueError(f"no report for the task {config.task}: expected {', '.join(HEADS)}")
    if config.lora.rank:
        raise ValueError(f"no report for config.lora.rank={config.lora.rank}: expected 0")
    chip, devices = compilation.describe_topology(topology)
    stacks = []
    for num_trials, used in ((1, devices[:1]), (len(devices), devices), (4, devices[:1])):
        figures = {"trials": num_trials, "devices": len(used)}
        name = f"trials: {num_trials}, devices: {len(used)}"
        try:
            with pod_report.progress(f"compiling {name}"):
                hbm, hlo = compile_stack(config, num_trials, used, model_size)
        except compilation.DoesNotFit as error:
            stacks.append(figures | {"fits": False, "hbm_bytes_per_device": error.num_bytes})
            continue
        cost = step_cost(hlo, parse_topology(topology)[0])
        used_bytes = sum(hbm.values())
        figures |= {
            "fits": used_bytes <= chip.usable_hbm_bytes,
            "hbm_bytes_per_device": used_bytes,
            "cycles_per_step": cost.cycles.total(),
            "collectives": cost.collectives,
        }
        stacks.append(figures)
    return {
        "topology": topology,
        "model_size": model_size,
        "batch_size": config.batch_size,
        "max_seq_length": config.max_seq_length,
        "dtype": config.model.dtype or "float32",
        "fits": all(stack["fits"] for stack in stacks),
        "stacks": stacks,
    }


def compile_stack(
    config: ConfigDict, num_trials: int, devices: Sequence[jax.Device], model_size: str
) -> tuple[dict[str, int], str]:
    """Compiles the step of `num_trials` sharded over `devices`, as `compile_program`."""
    mesh = make_mesh(trial=len(devices), data=1, devices=devices)
    head = HEADS[config.task]
    settings = {"task": head.name, "labels": ["a", "b"], "lstm_size": config.model.lstm_size}
    model = build_model(config, settings, mesh, model_size)
    shape = row_shape(config.max_seq_length, 1, head, pad_id=0)
    steps = build_steps(config, model, head, mesh, shape, config.batch_size)
    return compile_update(config, steps, mesh, shape, config.batch_size, num_trials)


def build_model(config: ConfigDict, head_settings: dict, mesh: Mesh, model_size: str) -> nn.Module:
    """Builds a BERT of `model_size` with a head, as it runs on the devices of `mesh`."""
    rates = {name: config.model[name] for name in RATES if config.model[name] is not None}
    device, tensor = mesh.devices.flat[0], mesh.shape["tensor"]
    plan = plan_execution(model_execution(config), device, tensor)
    return heads.make_model(BertConfig.named(model_size, **rates), head_settings, plan)


def build_steps(
    config: ConfigDict,
    model: nn.Module,
    head: heads.Head,
    mesh: Mesh,
    shape: RowShape,
    rows_per_microbatch: int,
) -> StackSteps:
    """Builds the functions of a stack of trials."""
    return build_stack_steps(
        model,
        mesh,
        head=head,
        train_head=head,
        optimizer=functools.partial(finetune_optimizer, config, model.config, head.trains_encoder),
        row=shape.build([], 1),
        pretrained={"encoder": {}},
        rows_per_microbatch=rows_per_microbatch,
        batch_size=config.batch_size,
    )


def compile_update(
    config: ConfigDict,
    steps: StackSteps,
    mesh: Mesh,
    shape: RowShape,
    num_rows: int,
    num_trials: int = 1,
) -> tuple[dict[str, int], str]:
    """Compiles the update step for batches of `num_rows`, as `compile_program`."""

    def abstract(leaf, *axes):
        sharding = NamedSharding(mesh, P("trial", *axes))
        return jax.ShapeDtypeStruct((num_trials, *leaf.shape), leaf.dtype, sharding=sharding)

    key = jax.eval_shape(lambda: jax.random.key(0))
    row_axes = batch_sharding(mesh).spec
    empty = shape.build([], num_rows)
    rows = {name: abstract(array, *row_axes) for name, array in empty.items()}
    hyperparameters = make_hyperparameters(config, BertConfig(), num_steps=1)
    num_microbatches = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, P()))
    return compilation.compile_program(
        steps.update,
        steps.abstract_state(num_trials),
        rows,
        num_microbatches,
        abstract(key),
        jax.tree.map(abstract, hyperparameters),
    )


def format_report(report: dict) -> str:
    """Formats the stacks as a Markdown table."""
    lines = [
        f"BERT_{report['model_size'].upper()} on {report['topology']}: batch size "
        f"{report['batch_size']}, rows of {report['max_seq_length']} tokens, {report['dtype']}\n",
        f"| {' | '.join(COLUMNS)} |",
        "| --- " * len(COLUMNS) + "|",
    ]
    alone = report["stacks"][0].get("cycles_per_step")
    clock = CHIPS[parse_topology(report["topology"])[0]].clock_hz
    for stack in report["stacks"]:
        cells = [stack["trials"], stack["devices"], "does not fit", "", "", ""]
        if "cycles_per_step" in stack:
            kinds = ", ".join(f"{name} x{v['count']}" for name, v in stack["collectives"].items())
            ratio = f"{stack['cycles_per_step'] / alone:.3f}" if alone else ""
            cycles = stack["cycles_per_step"]
            cells[2:] = [f"{cycles:,}", f"{1e3 * cycles / clock:,.2f}", ratio, kinds or "none"]
        used = stack["hbm_bytes_per_device"]
        cells.append(f"{used / GIB:.2f}" if used else "unknown")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
