"""Collects what GLUE runs have predicted into the zip file that the benchmark's server takes.

python tools/glue_submission.py runs/cola runs/mnli ... --output=submission.zip

Each run is a workdir of configs/finetune/glue.py, or of one of its seeds. The server wants eleven
files: those that no run has are named, and so are those with another number of examples than the
test set has.
"""

import pathlib
import sys
import zipfile
from collections.abc import Sequence

from absl import app, flags

OUTPUT = flags.DEFINE_string("output", "submission.zip", "The file to write; must not exist.")

# Examples in each test set.
SIZES = {
    "CoLA": 1063,
    "SST-2": 1821,
    "MRPC": 1725,
    "STS-B": 1379,
    "QQP": 390_965,
    "MNLI-m": 9796,
    "MNLI-mm": 9847,
    "QNLI": 5463,
    "RTE": 3000,
    "WNLI": 146,
    "AX": 1104,
}


def find_predictions(runs: Sequence[str]) -> dict[str, pathlib.Path]:
    """Name of the set -> its file; ValueError for a run without one, or a set that is there twice.

    Raises FileNotFoundError where there is no run.
    """
    found: dict[str, pathlib.Path] = {}
    for run in map(pathlib.Path, runs):
        if not run.is_dir():
            raise FileNotFoundError(f"no workdir {run}")
        files = [run / "predictions" / f"{name}.tsv" for name in SIZES]
        files = [path for path in files if path.exists()]
        if not files:
            hint = f"; of its seeds give one, as {run}/seed_0" if any(run.glob("seed_*")) else ""
            raise ValueError(f"{run} holds no predictions of a GLUE test set{hint}")
        for path in files:
            if path.stem in found:
                raise ValueError(f"{path} and {found[path.stem]}: give one run of each set")
            found[path.stem] = path
    return found


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError("expected workdirs of GLUE runs")
    try:
        found = find_predictions(argv[1:])
        with zipfile.ZipFile(OUTPUT.value, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, size in SIZES.items():
                if name not in found:
                    continue
                archive.write(found[name], f"{name}.tsv")
                count = len(found[name].read_text().splitlines()) - 1
                warning = "" if count == size else f": expected {size:,}, is the test set whole?"
                print(f"{name}.tsv: {count:,} predictions{warning}")
    except (ValueError, OSError) as error:
        sys.exit(f"glue_submission: {error}")
    missing = [name for name in SIZES if name not in found]
    print(f"written to {OUTPUT.value}")
    if missing:
        print(f"missing, and the server wants all: {', '.join(missing)}")


if __name__ == "__main__":
    app.run(main)
