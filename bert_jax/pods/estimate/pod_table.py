"""The slices of the pod configurations, and a table of meshes and remat policies of one."""

import pathlib

from ml_collections import ConfigDict

from bert_jax.pods.chips import CHIPS, default_shape, format_shape, parse_topology
from bert_jax.pods.estimate import pod_report, report_text
from bert_jax.training.phases import Phase

# The number of chips for which a configuration in configs/pretrain is reported if no --topology is
# given; for pod_base and pod_large it is the paper's.
NUM_CHIPS = {
    "pod_base": 16,
    "pod_large": 64,
    "adamw_2k": 64,
    "lamb_64k": 64,
    "roberta_base": 64,
    "roberta_large": 64,
    "albert_base": 64,
    "albert_large": 64,
    "albert_xlarge": 64,
    "albert_xxlarge": 64,
    "electra_small": 4,
    "electra_base": 16,
    "electra_large": 64,
    "spanbert": 16,
    "distilbert": 64,
    "tinybert": 4,
}
# The configurations of tools/tpu_tables.py.
PODS = [
    f"{name}.py:{chip}"
    for name in NUM_CHIPS
    for chip in (CHIPS if name.startswith("pod_") else ["v4"])
]


def default_topology(config_file: str) -> str | None:
    """Returns the topology of a configuration that names a chip, such as "pod_base.py:v5e".

    The chip is v4 if none is named. None for a configuration that is not in `NUM_CHIPS`.
    """
    path, _, argument = config_file.partition(":")
    num_chips = NUM_CHIPS.get(pathlib.Path(path).stem)
    if num_chips is None:
        return None
    named = argument.partition(",")[0]
    chip = named if named in CHIPS else "v4"
    return f"{chip}:{format_shape(default_shape(chip, num_chips))}"


def print_sweep(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    meshes: list[str],
    remat: list[str],
) -> bool:
    """Prints a line for each mesh and remat policy, and the best; returns whether any fits."""
    fitting = []
    for row in pod_report.sweep(config, topology, phases, tokenizer, meshes, remat):
        print(report_text.format_sweep_row(row), flush=True)
        if row["fits"]:
            fitting.append(row)
    if not fitting:
        print("nothing fits")
        return False
    best = min(fitting, key=report_text.total_hours)
    print(f"best: {report_text.format_sweep_row(best)}")
    if best["at_max_clock"]:
        at_max = min(fitting, key=lambda row: report_text.total_hours(row["at_max_clock"]))
        if at_max is not best:
            row = report_text.format_sweep_row(at_max)
            print(f"best at the fastest clock that the peak allows: {row}")
        print(f"\n{report_text.caveats(topology)}")
    print(f"\n{report_text.factor_note([parse_topology(topology)[0]])}")
    return True
