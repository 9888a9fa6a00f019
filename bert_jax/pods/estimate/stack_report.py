"""Compiles the update step of stacked fine-tuning trials for a TPU topology, and compares stacks.

The step is the same as in the run, but without its weights and examples: the model has the size of
BERT_BASE, and each example takes a row of `max_seq_length` tokens.
"""

import functools
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from bert_jax.data.features import RowShape, max_features
from bert_jax.finetuning.finetune_fields import check_numbers
from bert_jax.finetuning.hyperparameters import finetune_optimizer, make_hyperparameters
from bert_jax.finetuning.stack_steps import build_stack_steps
from bert_jax.model import heads
from bert_jax.model.config import BertConfig
from bert_jax.model.execution import Execution, plan_execution
from bert_jax.pods.chips import GIB, parse_topology
from bert_jax.pods.estimate import compilation
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
    "relative to one trial",
    "collectives",
    "HBM, GiB",
)
RATES = ("dropout_rate", "attention_dropout_rate")


def report(config: ConfigDict, topology: str) -> dict:
    """Compiles one trial on a device, one on each device of `topology`, and four on a device.

    Returns the figures of each stack under "stacks". `config` is a fine-tuning configuration.
    Raises ValueError if it, or the topology, is invalid.
    """
    check_numbers(config)
    if config.task not in HEADS:
        raise ValueError(f"no report for the task {config.task}: expected {', '.join(HEADS)}")
    chip, devices = compilation.describe_topology(topology)
    stacks = []
    for num_trials, used in ((1, devices[:1]), (len(devices), devices), (4, devices[:1])):
        figures = {"trials": num_trials, "devices": len(used)}
        try:
            hbm, hlo = compile_stack(config, num_trials, used)
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
        "batch_size": config.batch_size,
        "max_seq_length": config.max_seq_length,
        "dtype": config.model.dtype or "float32",
        "fits": all(stack["fits"] for stack in stacks),
        "stacks": stacks,
    }


def compile_stack(
    config: ConfigDict, num_trials: int, devices: Sequence[jax.Device]
) -> tuple[dict[str, int], str]:
    """Compiles the step of `num_trials` sharded over `devices`, as `compile_program`."""
    mesh = make_mesh(trial=len(devices), data=1, devices=devices)
    fields = {name: value for name, value in config.model.items() if value is not None}
    head = HEADS[config.task]
    settings = {"task": head.name, "labels": ["a", "b"], "lstm_size": fields.pop("lstm_size", 0)}
    rates = {name: fields.pop(name) for name in RATES if name in fields}
    plan = plan_execution(Execution(**fields), devices[0])
    model = heads.make_model(BertConfig(**rates), settings, plan)
    shape = RowShape(
        length=config.max_seq_length,
        max_sequences=max_features(config.max_seq_length),
        label_layout=head.label_layout,
        pad_id=0,
    )
    trains_encoder = head.trains_encoder
    steps = build_stack_steps(
        model,
        mesh,
        head=head,
        train_head=head,
        optimizer=functools.partial(finetune_optimizer, config, model.config, trains_encoder),
        row=shape.build([], 1),
        pretrained={"encoder": {}},
        rows_per_microbatch=config.batch_size,
    )

    def abstract(leaf, *axes):
        sharding = NamedSharding(mesh, P("trial", *axes))
        return jax.ShapeDtypeStruct((num_trials, *leaf.shape), leaf.dtype, sharding=sharding)

    key = jax.eval_shape(lambda: jax.random.key(0))
    row_axes = batch_sharding(mesh).spec
    empty = shape.build([], config.batch_size)
    rows = {name: abstract(array, *row_axes) for name, array in empty.items()}
    hyperparameters = make_hyperparameters(config, model.config, num_steps=1)
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
        f"BERT_BASE on {report['topology']}: batch size {report['batch_size']}, rows of "
        f"{report['max_seq_length']} tokens, {report['dtype']}\n",
        f"| {' | '.join(COLUMNS)} |",
        "| --- " * len(COLUMNS) + "|",
    ]
    alone = report["stacks"][0].get("cycles_per_step")
    for stack in report["stacks"]:
        cells = [stack["trials"], stack["devices"], "does not fit", "", ""]
        if "cycles_per_step" in stack:
            kinds = ", ".join(f"{name} x{v['count']}" for name, v in stack["collectives"].items())
            ratio = f"{stack['cycles_per_step'] / alone:.3f}" if alone else ""
            cells[2:] = [f"{stack['cycles_per_step']:,}", ratio, kinds or "none"]
        used = stack["hbm_bytes_per_device"]
        cells.append(f"{used / GIB:.2f}" if used else "unknown")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
