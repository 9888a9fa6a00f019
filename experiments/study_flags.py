"""Flags of all studies, and the checks of the directories that they name."""

from typing import NamedTuple

from absl import flags

Settings = dict[str, object]
"""Values of fields of a configuration, by dotted name."""

SCALE = flags.DEFINE_enum(
    "scale", "laptop", ["laptop", "pod"], "Small runs here, or full-size runs as a script."
)
WORKDIR = flags.DEFINE_string("workdir", "runs/studies", "Directory of all runs; may be shared.")
REPORTS = flags.DEFINE_string(
    "reports",
    "",
    "Directory of the report; default: experiments/reports, or at pod scale one in --workdir.",
)
TEXT = flags.DEFINE_string(
    "text", "", "Text to pre-train on: a path or pattern; laptop scale has a default sample."
)
LAUNCH = flags.DEFINE_bool("launch", False, "At pod scale, run the script.")
SLICE = flags.DEFINE_string(
    "slice",
    "",
    "At pod scale, flags of tools/launch_tpu.py, such as --name, --project, --zone and --bucket: "
    "each run gets its own slice, by default a v4-32, or to pre-train BERT_LARGE a v4-128.",
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Only print the remaining commands; at pod scale, the script."
)
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only write the report of finished runs.")
MODES = ("launch", "dry_run", "report_only")
"""Flags that a report's command and a script do not repeat."""
DIRECTORIES = {  # The default at pod scale, if it is not fetched, and the help.
    "glue_dir": ("glue_data", "Directory of the GLUE download."),
    "squad_dir": ("squad", "Directory of train.json and dev.json, in the format of SQuAD 1.1."),
    "squad2_dir": ("squad2", "Directory of train.json and dev.json, in the format of SQuAD 2.0."),
    "swag_dir": ("swag", "Directory of SWAG's train.csv and val.csv."),
    "conll_dir": ("", "Directory of CoNLL-2003's train.txt, valid.txt and test.txt."),
}
for name, (_, text) in DIRECTORIES.items():
    flags.DEFINE_string(name, "", text)


class Task(NamedTuple):
    """A task of the study, fine-tuned from every row: a configuration, its fields and its score."""

    name: str
    config: str  # As in configs/sweeps/paper.py: glue:mrpc
    metric: str  # As in result.json: dev/accuracy
    settings: Settings


def directory_of(flag: str) -> str:
    """Returns the directory of a flag, or its default at pod scale."""
    return flags.FLAGS[flag].value or DIRECTORIES[flag][0]


def reads(tasks: list[Task], directory: str) -> bool:
    """Returns whether a task reads files of a directory."""
    values = [str(value) for task in tasks for value in task.settings.values()]
    return any(value == directory or value.startswith(f"{directory}/") for value in values)


def check_directories(study: str, tasks: list[Task], scale: str) -> None:
    """Raises ValueError for the flag of a directory that no task of the study `study` reads."""
    for name in DIRECTORIES:
        directory = flags.FLAGS[name].value
        if directory and not reads(tasks, directory):
            scores = ", ".join(task.name for task in tasks)
            raise ValueError(
                f"--{name}={directory}: {study}.py reads no such files at {scale} scale, "
                f"where its scores are {scores}: remove the flag"
            )


def check_slice(tasks: list[Task]) -> None:
    """Raises ValueError for a directory that the runs on slices cannot read."""
    read = {
        name: path for name in DIRECTORIES if (path := directory_of(name)) and reads(tasks, path)
    }
    for name, path in ({"workdir": WORKDIR.value} | read).items():
        if not path.startswith("/gcs/"):
            raise ValueError(
                f"--{name}={path}: with --slice, expected a directory below /gcs, in the bucket"
            )
