"""Tries a job's arguments as the run would take them, on as many devices as it will have.

python tools/launch_check.py ACCELERATOR_TYPE NUM_SLICES ARGUMENT...

For tools/launch_tpu.py, before anything costs money. The devices are simulated, nothing is
compiled, and the corpora need not be here: what is found is a wrong flag, field or number, a
corpus that is not below the bucket's /gcs, and a mesh, batch or topology that the slice does not
match.
"""

import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch_commands import chips_of_slice
from ml_collections import ConfigDict

DEVICES_ON_CHIP = {"v2": 2, "v3": 2}  # One elsewhere.


def check(config: ConfigDict, accelerator_type: str, num_slices: int) -> None:
    """ValueError for a configuration that could not run on these slices, or was not meant for them.

    JAX must have as many devices.
    """
    from bert_jax import partitioning, settings, tpu
    from bert_jax.data.batches import local_rows
    from bert_jax.training.assembly import assemble

    kind, num_chips = chips_of_slice(accelerator_type)
    if topology := config.get("topology"):
        expected_kind, sizes, expected_slices = tpu.parse_topology(topology)
        if (expected_kind, math.prod(sizes), expected_slices) != (kind, num_chips, num_slices):
            raise ValueError(
                f"the configuration is for {topology} ({math.prod(sizes)} chips of {expected_kind}"
                f" in each of {expected_slices} slices), but --accelerator_type={accelerator_type} "
                f"has {num_chips} chips of {kind} and --num_slices={num_slices}: change one of "
                "them, or say --config.topology=..., after tools/tpu_report.py has shown that it "
                "fits"
            )
    settings.check_numbers(config)
    for name, phase in (("corpus", config), ("long_phase.corpus", config.long_phase)):
        if phase.num_steps and not phase.corpus.startswith("/gcs/"):
            raise ValueError(
                f"--config.{name}={phase.corpus}: expected a directory that every host sees, below "
                "/gcs"
            )
    phases = tpu.planned_phases(config, (1, 1))  # Nothing here depends on the rows' length.
    assembly = assemble(config, phases, tpu.UNCASED_ENGLISH)
    local_rows(partitioning.batch_sharding(assembly.mesh), config.eval_batch_size)


def main(accelerator_type: str, num_slices: int, arguments: list[str]) -> None:
    kind, num_chips = chips_of_slice(accelerator_type)
    num_devices = num_slices * num_chips * DEVICES_ON_CHIP.get(kind, 1)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    from absl import flags

    from bert_jax import command  # noqa: F401  The flags of a run.
    from bert_jax.runtime.flag_errors import parse_flags

    rest = parse_flags(["pretrain", *arguments])[1:]
    if rest:
        sys.exit(f"unexpected arguments: {rest}")
    for name in ("coordinator", "process_id"):
        if flags.FLAGS[name].present:
            sys.exit(f"--{name} is the same on all hosts here, and they know it: leave it away")
    try:
        check(flags.FLAGS.config, accelerator_type, num_slices)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
