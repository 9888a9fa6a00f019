"""Tables that `PretrainedModel.predict` reads from Python: predictions, scores and errors."""

import random

import pytest

import bert_jax
from tests.helpers.corpora import texts
from tests.helpers.models import write_head


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier")
    return bert_jax.load(write_head(directory, task="classification", labels=["no", "yes"]))


def test_dividing_the_head_by_its_temperature_calibrates_the_probabilities(tmp_path):
    temperature = {"calibration_temperature": 1.7}
    model = write_head(tmp_path, task="classification", labels=["no", "yes"], **temperature)
    model, rng = bert_jax.load(model), random.Random(0)
    table = [{"text": text, "label": rng.choice(["no", "yes"])} for text in texts(20)]
    before = model.predict(table).scores
    temperature, head = model.head.pop("calibration_temperature"), model.params["head"]
    model.params["head"] = {name: values / temperature for name, values in head.items()}
    model.save(tmp_path / "calibrated")
    after = bert_jax.load(tmp_path / "calibrated").predict(table).scores
    assert "calibrated_ece" not in after
    assert after["ece"] == pytest.approx(before["calibrated_ece"], abs=1e-6)
    assert after["ece"] != pytest.approx(before["ece"], abs=1e-3)


def test_table_without_labels_is_only_predicted(tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="classification", labels=["no", "yes"]))
    with pytest.warns(UserWarning, match="^examples with an empty text: 1 of 2$"):
        rows, scores = model.predict([{"text": "the river"}, {"text": " "}])
    assert [row["id"] for row in rows] == ["0", "1"] and scores == {}
    assert rows[0]["prediction"] == model.classify("the river").label
    assert model.predict([]) == ([], {})
    with pytest.warns(UserWarning, match="^examples truncated to 64 tokens: 1 of 2$"):
        model.predict([{"text": "the " * 99}, {"text": "the"}])


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("nowhere.csv", FileNotFoundError, r"no file nowhere\.csv"),
        ("", ValueError, "the path of the table is empty"),
        ([{"body": "the"}], ValueError, "example 0: no column 'text'; found body: set the correct "
         "name in text, text_pair, label, label_columns or id$"),
        ([{"text": float("nan")}], ValueError, "example 0: .*expected text, numbers, or None"),
        ([{"text": b"the"}], ValueError, "example 0: .*expected text, numbers, or None"),
        (["the river"], TypeError, r"example 0 is a str"),
        ({"text": "the"}, TypeError, "dict"),
    ],
)  # fmt: skip
def test_wrong_table_is_an_error_with_the_reason(table, error, message, classifier):
    with pytest.raises(error, match=message):
        classifier.predict(table)


def test_model_without_such_a_head_predicts_no_tables(tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="span", labels=["start", "end"]))
    with pytest.raises(ValueError, match="a head for span, so it cannot predict tables"):
        model.predict([{"text": "the"}])


def test_two_rows_of_a_table_with_one_id_are_an_error(classifier):
    table = [{"text": "the", "key": "a"}, {"text": "river", "key": "a"}]
    with pytest.raises(ValueError, match="example 1: id 'a' is already used in example 0"):
        classifier.predict(table, id="key")
