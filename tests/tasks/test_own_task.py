"""A task in a user's own file is trained, saved and loaded, and predicts files.

It needs no edit in the package: grades of answers, from lines of a grade, a tab and the answer.
"""

import pathlib

import numpy as np
import pytest
from ml_collections import ConfigDict

import bert_jax
from bert_jax import finetune, predict
from bert_jax.configs.finetune import text_classification as config_file
from bert_jax.model import heads
from bert_jax.tasks.task import Split, Task, limit_examples, write_json_blocks
from bert_jax.tasks.text_classification import text_features
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines
from tests.helpers.models import write_weights

pytestmark = pytest.mark.usefixtures("two_devices")


def read_answers(path):
    """Yields the grade of each answer, None if it is unknown, and the answer."""
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        grade, _, answer = line.partition("\t")
        yield float(grade) if grade else None, answer


def within_half(outputs, grades) -> float:
    """Returns the fraction of answers whose grade is predicted up to half a grade."""
    return float(np.mean(np.abs(np.ravel(outputs) - grades) <= 0.5))


def get_task(config, tokenizer):
    notes = {}

    def read(name):
        examples = list(read_answers(config.data[name]))
        grades, answers = zip(*limit_examples(examples, config, name, notes), strict=True)
        texts = [(answer,) for answer in answers]
        features, truncated = text_features(texts, grades, tokenizer, config.max_seq_length)
        notes[f"{name} answers truncated"] = truncated
        return features

    features = read("dev")

    def write(outputs, directory):
        np.savetxt(directory / "dev.txt", np.ravel(outputs))
        return directory / "dev.txt"

    def score(outputs):
        return {"within_half": within_half(outputs, [feature.label for feature in features])}

    return Task(
        head=heads.REGRESSION,
        labels=("grade",),
        train=read("train"),
        splits=(Split("dev", features, score, write),),
        metric="dev/within_half",
        notes=notes,
        files={name: config.data[name] for name in ("train", "dev")},
    )


PREDICT_OPTIONS = {}


def get_predictor(trained, options, given):
    return GradePredictor(trained)


class GradePredictor:
    def __init__(self, trained):
        self.writers, self.notes = {".jsonl": write_json_blocks}, {}
        self._trained, self._outputs, self._grades = trained, [], []

    def find_inputs(self, directory):
        return [(path, f"{path.stem}.jsonl") for path in sorted(directory.glob("*.txt"))]

    def read(self, path):
        return read_answers(path)

    def features(self, examples):
        texts, unknown = [(answer,) for _, answer in examples], [None] * len(examples)
        length = self._trained.settings["max_seq_length"]
        return text_features(texts, unknown, self._trained.tokenizer, length)[0]

    def describe(self, examples, outputs):
        for (grade, _), output in zip(examples, outputs, strict=True):
            if grade is not None:
                self._grades.append(grade)
                self._outputs.append(output)
        return [{"prediction": float(output[0])} for output in outputs]

    def scores(self):
        return {"within_half": within_half(self._outputs, self._grades)} if self._grades else {}


@pytest.mark.slow
def test_a_run_trains_it_and_its_predictions_are_those_of_load(tmp_path):
    answers = [" ".join(WORDS[n : n + 3 + n % 4]) for n in range(16)]
    lines = [f"{n % 3}\t{answer}\n" for n, answer in enumerate(answers)]
    (tmp_path / "graded.txt").write_text("".join(lines))
    config = config_file.get_config()
    config.task = __name__
    config.init_from = str(
        write_weights(tmp_path / "weights", write_vocabulary(tmp_path / "v.txt"))
    )
    path = str(tmp_path / "graded.txt")
    config.data = ConfigDict({"train": path, "dev": path})
    config.update({"max_seq_length": 16, "batch_size": 8, "num_epochs": 1.0})
    result = finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    assert (tmp_path / "run" / result["predictions"][0]).exists()
    expected = bert_jax.load(tmp_path / "run").classify(answers)

    scores = predict.predict(tmp_path / "run", path, tmp_path / "found.jsonl")
    assert scores == {"found.jsonl": {"within_half": result["dev"]["within_half"]}}
    found = [line["prediction"] for line in read_lines(tmp_path / "found.jsonl")]
    assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match=r"text=answer is for .* whose options are none"):
        predict.predict(tmp_path / "run", path, tmp_path / "other.jsonl", {"text": "answer"})
