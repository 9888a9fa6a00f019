"""Scores the ensemble of the seeds of a finished run beside each of them, with an interval.

    python -m bert_jax.finetune --config=… --workdir=runs/r8 --config.num_seeds=3
    python benchmarks/ensembles.py --run=runs/r8 --split=test

docs/finetuning.md has figures of two runs from the MiniLM weights: of
configs/finetune/reuters_r8.py with --config.max_seq_length=64 --config.num_epochs=1.0, and of
configs/finetune/squad.py with the two files of tools/split_squad.py, --config.max_seq_length=256
--config.num_epochs=2.0 --config.batch_size=8 --config.learning_rate=3e-4.

The ensemble is that of `bert_jax.predict --model=… --model=…`. Its gain is its score less the mean
of the members' scores; the 95 % interval is by the paired bootstrap over the examples. It is that
of the choice of the examples, not of the seeds.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from absl import app, flags

from bert_jax.runtime.command_line import parse_flags
from bert_jax.tasks.resampling import bootstrap_interval
from bert_jax.tasks.scored_predictions import read_scored

flags.DEFINE_string("run", None, "Workdir of a finished run of several seeds.", required=True)
flags.DEFINE_string("split", "test", "The examples that are scored.")
flags.DEFINE_string("metric", "accuracy", "The score, such as `f1` of answers.")
NUM_SAMPLES = 10_000


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    seeds = sorted(pathlib.Path(values.run).glob("seed_*"))
    if not pathlib.Path(values.run, "result.json").exists():
        sys.exit(f"ensembles: {values.run} has no result.json: expected a finished run")
    settings = json.loads((seeds[0] / "config.json").read_text(encoding="utf-8"))
    answers_questions = "null_answers" in settings["head"]
    name = f"{values.split}/predictions.json" if answers_questions else f"{values.split}.jsonl"
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory, name)
        output.parent.mkdir(exist_ok=True)
        models = [f"--model={seed}" for seed in seeds]
        files = [f"--input={settings['data'][values.split]}", f"--output={output}"]
        if "header_lines" in settings["data"]:
            files.append(f"--header_lines={settings['data']['header_lines']}")
        command = [sys.executable, "-m", "bert_jax.predict", *models, *files]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        folders = [*(seed / "predictions" for seed in seeds), pathlib.Path(directory)]
        *members, ensemble = (
            read_scored(folder, values.split, values.metric, settings) for folder in folders
        )
    assert all(member.examples == ensemble.examples for member in members)

    def gain(rows: np.ndarray) -> float:
        return ensemble.score(rows) - np.mean([member.score(rows) for member in members])

    rows = np.arange(len(ensemble.examples))
    low, high = bootstrap_interval(gain, len(rows), num_samples=NUM_SAMPLES)
    own = ", ".join(f"{member.score(rows):.4f}" for member in members)
    print(f"{values.split}/{values.metric} of {len(rows):,} examples: {own}")
    print(f"ensemble: {ensemble.score(rows):.4f}, {gain(rows):+.4f} ({low:+.4f} to {high:+.4f})")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
