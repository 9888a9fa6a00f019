"""Scores the predictions of finished runs with the reference implementations of the metrics.

.venv-parity/bin/python tools/fetch_data.py conlleval runs/data/conlleval
.venv-parity/bin/python benchmarks/rescore.py RUN... --conlleval=runs/data/conlleval/conlleval \
    --squad_script=evaluate-v1.1.py

A RUN is the workdir of classification (scikit-learn), of tagging in IOB2 (seqeval, and conlleval,
which needs Perl) or of question answering (SQuAD's official script). The exit code is 1 if a score
in its result.json differs in any digit that the reference prints.
"""

import json
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Iterator

from absl import app, flags

from bert_jax.tasks.tables import read_table

CONLLEVAL = flags.DEFINE_string("conlleval", None, "The script of the CoNLL shared tasks.")
SQUAD_SCRIPT = flags.DEFINE_string(
    "squad_script", None, "The official script for the version of the data."
)

Scores = Iterator[tuple[str, str, float, float]]
"""Name of the reference, name of our metric, the reference's score, and the tolerance."""


def rescore_classes(data: dict, predictions: pathlib.Path, split: str) -> Scores:
    import sklearn.metrics

    records = read_table(data[split], (data["label"],), data["header_lines"])
    expected = [record.columns[data["label"]] for record in records]
    lines = (predictions / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    predicted = [json.loads(line)["prediction"] for line in lines]
    yield "scikit-learn", "accuracy", sklearn.metrics.accuracy_score(expected, predicted), 1e-12
    macro_f1 = sklearn.metrics.f1_score(expected, predicted, average="macro", zero_division=0)
    yield "scikit-learn", "macro_f1", macro_f1, 1e-12


def rescore_tags(data: dict, predictions: pathlib.Path, split: str) -> Scores:
    del data
    import seqeval.metrics
    import seqeval.scheme

    text = (predictions / f"{split}.txt").read_text(encoding="utf-8")
    blocks = [block.splitlines() for block in text.split("\n\n") if block.strip()]
    tags = [[[line.split()[column] for line in lines] for lines in blocks] for column in (1, 2)]
    for name in ("accuracy", "precision", "recall", "f1"):
        yield "seqeval", name, getattr(seqeval.metrics, f"{name}_score")(*tags), 1e-12
    strict = {"mode": "strict", "scheme": seqeval.scheme.IOB2}
    yield "seqeval, strict", "strict_f1", seqeval.metrics.f1_score(*tags, **strict), 1e-12
    if CONLLEVAL.value:
        command = ["perl", CONLLEVAL.value]
        report = subprocess.run(
            command,
            input=text,
            capture_output=True,
            check=True,
            encoding="utf-8",
            errors="replace",
        )
        words = report.stdout.splitlines()[1].replace(";", "").split()
        for name, value in zip(words[::2], words[1::2], strict=True):
            ours = {"FB1:": "f1"}.get(name, name.rstrip(":"))
            yield "conlleval", ours, float(value.rstrip("%")) / 100, 0.5e-4 + 1e-12


def rescore_answers(data: dict, predictions: pathlib.Path, split: str) -> Scores:
    if not SQUAD_SCRIPT.value:
        sys.exit("rescore: question answering needs --squad_script=FILE")
    command = [sys.executable, SQUAD_SCRIPT.value, data[split]]
    command.append(str(predictions / split / "predictions.json"))
    output = subprocess.run(
        command, capture_output=True, check=True, encoding="utf-8", errors="replace"
    ).stdout
    scores = json.loads(output)
    yield "official", "exact", scores.get("exact_match", scores.get("exact")) / 100, 1e-12
    yield "official", "f1", scores["f1"] / 100, 1e-12


RESCORE = {"classification": rescore_classes, "tagging": rescore_tags, "span": rescore_answers}


def main(argv: list[str]) -> None:
    warnings.simplefilter("ignore")  # seqeval warns of types that are never predicted.
    differs = False
    for run in map(pathlib.Path, argv[1:]):
        settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        rescore = RESCORE[settings["head"]["task"]]
        for split in ("dev", "test"):
            if split not in result:
                continue
            for reference, name, expected, tolerance in rescore(
                settings["data"], run / "predictions", split
            ):
                ours = result[split][name]
                differs |= (wrong := abs(ours - expected) > tolerance)
                remark = "  differs" if wrong else ""
                print(f"{run.name} {split} {name}: {ours:.6f}, {reference} {expected:.6f}{remark}")
    sys.exit(int(differs))


if __name__ == "__main__":
    app.run(main)
