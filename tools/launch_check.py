r"""Checks, before anything costs money, that a job can run on the chips of a launcher.

XLA_FLAGS=--xla_force_host_platform_device_count=N \
    python tools/launch_check.py NUM_SLICES pretrain|finetune|sweep FLAG...

Builds the run's mesh, and for pre-training its optimizer and state shapes, on as many simulated
devices as the chips have, but compiles nothing and opens no corpus, weights or examples.
"""

import os
import pathlib
import sys

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from bert_jax.finetuning import finetune_fields
from bert_jax.pods.estimate import compilation, planned
from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.runtime.main import define_flags
from bert_jax.sharding.mesh import make_mesh
from bert_jax.sweeps.configurations import grid_overrides, make_configurations
from bert_jax.sweeps.settings import complete, known_fields
from bert_jax.training.phases import (
    check_has_corpus,
    check_numbers,
    corpus_weights,
    phase_configs,
    prefix_of,
)
from bert_jax.training.pretrain_setup import setup_pretraining


def check_paths(config: ConfigDict) -> None:
    """Raises ValueError for a path that the hosts do not have or that is lost with them."""
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    if os.path.isabs(file) or file.startswith(".."):
        raise ValueError(f"--config={file}: expected a path relative to the repository")
    paths = [("workdir", flags.FLAGS.workdir)]
    prefix, run = ("config.base", config.base) if "base" in config else ("config", config)
    if "task" in run:
        names = ("train", "dev", "test", "passages", "directory", "data_dir")
        paths += [(f"{prefix}.data.{name}", run.data.get(name)) for name in names]
        paths.append((f"{prefix}.teacher", run.teacher))
    else:
        for name, phase in phase_configs(config).items():
            weights = corpus_weights(name, phase) if phase.corpus else ()
            paths += [(f"{prefix_of(name)}corpus", path) for path in weights]
        paths.append(("config.distillation.teacher", config.distillation.teacher))
        paths.append(("config.init_optimizer_from", config.init_optimizer_from))
        paths.append(("config.estimate", config.estimate))
    paths.append((f"{prefix}.init_from", run.init_from))
    for name, path in paths:
        if not path or path.startswith(("tfds:", "hub:")):
            continue
        if not path.startswith("/gcs/"):
            expected = "expected a path below /gcs, where --bucket is mounted"
            raise ValueError(f"--{name}={path}: {expected}")


def check_corpora(config: ConfigDict) -> None:
    """Raises ValueError for a phase with steps that has no corpus; only the hosts can open it."""
    for name, phase in phase_configs(config).items():
        check_has_corpus(name, phase)


def check_mesh(config: ConfigDict, num_slices: int) -> None:
    """Raises ValueError for a mesh that does not fit the simulated devices or their slices."""
    # The simulated devices do not belong to slices, so that make_mesh cannot check this.
    if (data := make_mesh(**config.mesh).shape["data"]) % num_slices:
        raise ValueError(
            f"the mesh has data={data}, but it must be a multiple of the {num_slices} slices: "
            "choose a smaller trial, fsdp or tensor"
        )


def check_finetuning(config: ConfigDict, num_slices: int) -> None:
    """Raises ValueError for a fine-tuning run or a sweep that cannot run on the simulated chips."""
    if "base" in config:
        config = complete(config)
        if "grid" in config:
            make_configurations(config, grid_overrides(config), pathlib.Path("trials"))
    run = config.base if "base" in config else config
    finetune_fields.check_numbers(run)
    check_mesh(run, num_slices)


def check_pretraining(config: ConfigDict, num_slices: int) -> None:
    """Raises ValueError for a configuration that cannot run on the chips that JAX simulates."""
    check_numbers(config)
    phases = planned.planned_phases(config, (1, 1))  # The row lengths do not matter here.
    teacher = compilation.assumed_teacher(config, phases[0].objective_class)
    tokenizer = planned.released_tokenizer(config.model)
    setup_pretraining(config, phases, tokenizer, teacher_settings=teacher)
    check_mesh(config, num_slices)


def main(argv: list[str]) -> None:
    if len(argv) != 3 or not argv[1].isdecimal():
        sys.exit(f"expected NUM_SLICES, the program and its flags, got {argv[1:]}")
    num_slices, config = int(argv[1]), flags.FLAGS.config
    program = config.get("program", argv[2])
    if argv[2] != program:
        sys.exit(f"the configuration is for bert_jax.{program}: set --program={program}")
    for name in ("coordinator", "num_processes", "process_id"):
        if flags.FLAGS[name].present:
            why = "it would be the same on all hosts, and the hosts of a slice find each other"
            sys.exit(f"remove --{name}: {why}")
    try:
        check_paths(config)
        if program == "pretrain":
            check_corpora(config)
            check_pretraining(config, num_slices)
        else:
            check_finetuning(config, num_slices)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(describe_error(error))


if __name__ == "__main__":
    define_flags(known_fields)
    flags.FLAGS.set_gnu_getopt()  # Flags follow the program.
    app.run(main, flags_parser=parse_flags)
