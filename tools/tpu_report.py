"""Estimates memory, FLOPs and training time of a configuration on a TPU pod, without a TPU.

Compiles the real training step for a TPU topology with the TPU compiler (`libtpu`, installed by
`pip install 'jax[tpu]'`) and reports the compiler's figures.

python tools/tpu_report.py --config=configs/pretrain/pod_large.py:v4 --json=report.json
python tools/tpu_report.py --config=configs/pretrain/bert_large.py --topology=v4:4x4x4 --sweep
python tools/tpu_report.py --config=configs/sweeps/paper.py:glue:mrpc --topology=v4:2x2x4
python tools/tpu_report.py --config=configs/finetune/contrastive.py --topology=v5e:2x4

For a fine-tuning run or a sweep it compares stacks of trials on one chip and on all; for a
bi-encoder it compiles one run on all chips.
"""

import json
import os
import pathlib
import sys

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from bert_jax.model.config import SIZES
from bert_jax.model.execution import CHOICES
from bert_jax.pods.chips import parse_topology, shape_name
from bert_jax.pods.estimate import (
    compilation,
    contrastive_report,
    planned,
    pod_report,
    pod_table,
    report_text,
    stack_report,
)
from bert_jax.pods.estimate.calibration import Calibration, calibration_of
from bert_jax.runtime.command_line import (
    define_config,
    describe_error,
    log_warnings_only,
    parse_flags,
)
from bert_jax.sweeps.settings import known_fields
from bert_jax.training.phases import Phase

HELP = "Configuration of a pre-training run, a fine-tuning run or a sweep."
CONFIG = define_config(HELP, known_fields)
TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "TPU topology to compile for, such as v4:4x4x4 or v4-128. Default: for a configuration of a "
    "pod, as many chips as its paper used, of the chip after the colon, such as pod_base.py:v5e; "
    "v4 if none is named.",
)
PHASES = flags.DEFINE_enum("phases", "all", ["all", "first", "last"], "Phases to compile.")
LENGTH = flags.DEFINE_integer(
    "max_seq_length",
    None,
    "Row length of the first phase, if no corpus is given. Default: the configuration's, or 128.",
    1,
)
LONG_LENGTH = flags.DEFINE_integer(
    "long_max_seq_length",
    None,
    "Row length of later phases, if no corpus is given. Default: the configuration's, or 512.",
    1,
)
DOCUMENT_TOKENS = flags.DEFINE_integer(
    "document_tokens",
    None,
    "Mean tokens of documents in rows of more than 512 tokens: the attention kernel skips what no "
    "document needs. Documents have exponential lengths, follow one another, are cut where rows "
    "end, and attend only to themselves. Default: each row is one document.",
    1,
)
PRICE = flags.DEFINE_float(
    "price_per_chip_hour", None, "Price of one chip for an hour, in any currency.", 0
)
CALIBRATION = flags.DEFINE_string(
    "calibration",
    None,
    "File of tools/calibrate.py, measured on the chip. Default: what others published of the chip.",
)
JSON = flags.DEFINE_string("json", None, "JSON file for the full report.")
DUMP_HLO = flags.DEFINE_string("dump_hlo", None, "File for the scheduled HLO of the first phase.")
COSTLIEST = flags.DEFINE_integer(
    "costliest", 0, "Number of costliest instructions and largest collectives to list.", 0
)
MODEL_SIZE = flags.DEFINE_enum(
    "model_size", "base", list(SIZES), "Size of the BERT that a fine-tuning run starts from."
)
TRAIN_EXAMPLES = flags.DEFINE_integer(
    "train_examples",
    None,
    "Pairs that a bi-encoder is trained on: config.num_epochs is then converted to hours.",
    1,
)
ADVISE = flags.DEFINE_bool("advise", True, "If a step does not fit, find a variant that does.")
SWEEP = flags.DEFINE_bool(
    "sweep", False, "Compare meshes and remat policies, and find their maximum batch sizes."
)
MESHES = flags.DEFINE_list(
    "sweep_meshes", ["-1x1x1", "-1x4x1"], "Meshes to compare, each as data x fsdp x tensor."
)
REMAT = flags.DEFINE_list("sweep_remat", list(CHOICES["remat"]), "Remat policies to compare.")

# Flags that have no effect, by mode.
REPORT_FLAGS = (
    "json",
    "dump_hlo",
    "costliest",
    "advise",
    "price_per_chip_hour",
    "calibration",
    "document_tokens",
)
SWEEP_FLAGS = ("sweep_meshes", "sweep_remat")
PRETRAINING_FLAGS = (
    *SWEEP_FLAGS,
    "sweep",
    "phases",
    "max_seq_length",
    "long_max_seq_length",
    "document_tokens",
    "advise",
)
FINETUNING_FLAGS = ("model_size", "train_examples")
UNUSED_FLAGS = {
    "a single report": (*SWEEP_FLAGS, *FINETUNING_FLAGS),
    "--sweep": (*REPORT_FLAGS, *FINETUNING_FLAGS),
    "a configuration of trials": (*REPORT_FLAGS[1:], *PRETRAINING_FLAGS, "train_examples"),
    "a bi-encoder": PRETRAINING_FLAGS,
}


def check_flags() -> None:
    """Raises ValueError for a flag without effect, or a file that cannot be written."""
    mode = "--sweep" if SWEEP.value else "a single report"
    if has_trials(CONFIG.value):
        mode = "a bi-encoder" if is_bi_encoder(CONFIG.value) else "a configuration of trials"
    for name in UNUSED_FLAGS[mode]:
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name} has no effect with {mode}: remove it")
    for flag in (JSON, DUMP_HLO):
        if flag.value is None:
            continue
        path = pathlib.Path(flag.value)
        existing = path if path.exists() else path.parent
        if path.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"--{flag.name}={path} cannot be written: expected a writable file")


def has_trials(config: ConfigDict | None) -> bool:
    """Returns whether `config` is of a fine-tuning run, or of a sweep."""
    return config is not None and config.get("program") != "pretrain"


def is_bi_encoder(config: ConfigDict) -> bool:
    return config.get("task") == "retrieval" and config.data.role == "bi_encoder"


def plan_phases(config: ConfigDict) -> tuple[list[Phase], object]:
    """Returns the phases to compile and the tokenizer, from the corpora if there are any."""
    phases, tokenizer = planned.plan_run(config, (LENGTH.value, LONG_LENGTH.value))
    return {"all": phases, "first": phases[:1], "last": phases[-1:]}[PHASES.value], tokenizer


def run() -> bool:
    """Runs what the flags select. Returns whether it fits; of a sweep, whether any variant does."""
    check_flags()
    config = CONFIG.value
    if config is None:
        raise ValueError("expected --config=FILE")
    config_file = config_flags.get_config_filename(flags.FLAGS["config"])
    topology = TOPOLOGY.value or pod_table.default_topology(config_file)
    if not topology:
        raise ValueError(f"--config={config_file} needs a topology, as in --topology=v4:4x4x4")
    topology = shape_name(topology)
    if has_trials(config) and not is_bi_encoder(config):
        report = stack_report.report(config.get("base", config), topology, MODEL_SIZE.value)
        print(f"{stack_report.format_report(report)}\n\n{report_text.caveats(topology)}")
        return save(report)
    if SWEEP.value:
        return pod_table.print_sweep(
            config, topology, *plan_phases(config), MESHES.value, REMAT.value
        )

    calibration = calibration_of(parse_topology(topology)[0], CALIBRATION.value)
    options = {"num_costliest": COSTLIEST.value, "hlo_path": DUMP_HLO.value}
    if has_trials(config):
        report = contrastive_report.report(
            config, topology, MODEL_SIZE.value, TRAIN_EXAMPLES.value, **options
        )
    else:
        phases, tokenizer = plan_phases(config)
        options["document_tokens"] = DOCUMENT_TOKENS.value
        report = pod_report.report(config, topology, phases, tokenizer, **options)
    if report["fits"]:
        report |= report_text.likely_figures(report, calibration, PRICE.value)
    report["compiler"] = compilation.compiler_versions()
    print(report_text.format_report(report, calibration, PRICE.value), flush=True)
    versions = ", ".join(f"{name} {each}" for name, each in report["compiler"].items())
    print(f"\nCompiled with {versions}.", flush=True)
    if not report["fits"] and ADVISE.value and not has_trials(config):
        report["advice"] = advise(config, topology, phases, tokenizer, report, calibration)
    return save(report)


def advise(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    failed: dict,
    calibration: Calibration,
) -> dict | None:
    """Prints each smaller step as it is compiled; returns the changes of the one that fits."""
    print("\nCompiling variants that need less memory ...", flush=True)
    for changes, report in pod_report.try_smaller_steps(
        config, topology, phases, tokenizer, failed
    ):
        new_flags = report_text.format_flags(changes)
        if report["fits"]:
            hours = report_text.likely_hours(report, calibration)
            print(f"In {hours} hours. This fits: {new_flags}")
            return changes
        failure = next(phase for phase in report["phases"] if not phase["fits"])
        print(f"{new_flags}: {report_text.format_failure(failure)}", flush=True)
    print("None of the variants fits.")
    return None


def save(report: dict) -> bool:
    """Writes --json; returns whether everything in the report fits."""
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report["fits"]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    log_warnings_only()
    try:
        fits = run()
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        sys.exit(f"tpu_report: {' '.join(describe_error(error).split())}")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
