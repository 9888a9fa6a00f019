"""Collects the predictions of GLUE runs into the zip file that the benchmark's server expects.

python tools/glue_submission.py runs/cola runs/mnli ... --output=submission.zip

Each argument is the workdir of configs/finetune/glue.py or of one seed, or the folder that
`python -m bert_jax.predict --model=runs/cola --input=glue_data --output=DIR` has written. The
server expects eleven files; missing ones, and those with a wrong number of examples, are reported.
"""

import pathlib
import sys
import zipfile
from collections.abc import Sequence

from absl import app, flags

from bert_jax.runtime.command_line import describe_error, parse_flags

OUTPUT = flags.DEFINE_string("output", "submission.zip", "File to write; it must not exist.")

# Examples of each test set.
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
    """Returns the prediction file of each test set, by the name of the set.

    Raises FileNotFoundError for a missing run, and ValueError for one without predictions or
    for a set that two runs have.
    """
    predictions: dict[str, pathlib.Path] = {}
    for run in map(pathlib.Path, runs):
        if not run.is_dir():
            raise FileNotFoundError(f"no workdir {run}")
        folders = run / "predictions", run
        files = [folder / f"{name}.tsv" for folder in folders for name in SIZES]
        files = [path for path in files if path.exists()]
        if not files:
            hint = (
                f"; pass the workdir of one seed, e.g. {run}/seed_0"
                if any(run.glob("seed_*"))
                else ""
            )
            raise ValueError(f"{run} has no predictions of a GLUE test set{hint}")
        for path in files:
            if path.stem in predictions:
                raise ValueError(f"{path} and {predictions[path.stem]}: pass only one run per set")
            predictions[path.stem] = path
    return predictions


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError("expected workdirs of GLUE runs")
    try:
        predictions = find_predictions(argv[1:])
        with zipfile.ZipFile(OUTPUT.value, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, size in SIZES.items():
                if name not in predictions:
                    continue
                archive.write(predictions[name], f"{name}.tsv")
                count = len(predictions[name].read_text(encoding="utf-8").splitlines()) - 1
                warning = "" if count == size else f": expected {size:,}; is the test set complete?"
                print(f"{name}.tsv: {count:,} predictions{warning}")
    except (ValueError, OSError) as error:
        sys.exit(f"glue_submission: {describe_error(error)}")
    missing = [name for name in SIZES if name not in predictions]
    print(f"Wrote {OUTPUT.value}")
    if missing:
        print(f"Missing, but the server expects all: {', '.join(missing)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
