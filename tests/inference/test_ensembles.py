"""Several models predict together what the mean of their outputs says."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy.special import expit, softmax

import bert_jax
from bert_jax import predict as program
from bert_jax.inference.ensembles import average_answers, average_outputs, make_ensemble
from bert_jax.tasks.spans import Answer, RankedAnswers
from bert_jax.tasks.thresholds import exceed_thresholds
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.models import write_head

pytestmark = pytest.mark.filterwarnings("ignore:.*are truncated to")


def write_pair(directory, **head):
    """Writes two models with the same head and other parameters; returns their directories."""
    first = write_head(directory, **head)
    model = bert_jax.load(first)
    rng = np.random.default_rng(1)
    model.params = jax.tree.map(lambda x: np.float32(x * rng.normal(1, 0.5, x.shape)), model.params)
    model.save(directory / "second")
    return [first, directory / "second"]


def test_means_are_those_of_probabilities_values_and_logits():
    rng = np.random.default_rng(0)
    outputs = rng.normal(0, 3, (3, 5, 4)).astype(np.float32)  # Models, examples, classes.
    found = softmax(average_outputs("class", outputs), axis=-1)
    np.testing.assert_allclose(found, softmax(outputs, axis=-1).mean(axis=0), rtol=1e-5)
    found = expit(average_outputs("label_set", outputs))
    np.testing.assert_allclose(found, expit(outputs).mean(axis=0), rtol=1e-5)
    for predicts in ("choice", "value", "tag"):
        found = average_outputs(predicts, outputs)
        np.testing.assert_allclose(found, outputs.mean(axis=0), rtol=1e-5, atol=1e-6)
    extreme = np.float32([[[1e4, -1e4]], [[1e4, -1e4]]])
    for predicts in ("class", "label_set"):
        (found,) = average_outputs(predicts, extreme)
        assert np.isfinite(found).all() and found[0] > found[1]


def test_classes_have_the_mean_of_the_probabilities_of_both_models(tmp_path):
    models = write_pair(tmp_path, task="classification", labels=["no", "yes", "maybe"])
    rows = [{"text": text, "label": "yes"} for text in ("the river", "a king", "the old city")]
    path, options = write_lines(tmp_path / "new.jsonl", rows), {"text": "text", "label": "label"}
    scores = program.predict(models, path, tmp_path / "found.jsonl", options)
    singles = [bert_jax.load(model).predict(path, **options).rows for model in models]
    assert singles[0] != singles[1]
    for line, *each in zip(read_lines(tmp_path / "found.jsonl"), *singles, strict=True):
        for name, probability in line["probabilities"].items():
            expected = np.mean([row["probabilities"][name] for row in each])
            assert probability == pytest.approx(expected, abs=1e-5)
        assert line["prediction"] == max(line["probabilities"], key=line["probabilities"].get)
    assert scores["found.jsonl"]["examples"] == 3


@pytest.mark.slow
def test_a_ranking_is_that_of_the_mean_scores_of_both_models(tmp_path):
    models = write_pair(tmp_path, task="multiple_choice", labels=["score"], max_seq_length=32)
    settings = {"task": "retrieval", "data": {"role": "cross_encoder"}}
    for model in models:
        loaded = bert_jax.load(model)
        loaded.settings |= settings
        loaded.save(model, overwrite=True)
    query, passages = "the king", ["a river", "the old city", "a war of the people", "the north"]
    line = {"query": query, "positive": passages[0], "negatives": passages[1:]}
    path = write_lines(tmp_path / "new.jsonl", [line])
    program.predict(models, path, tmp_path / "found.jsonl")
    singles = [bert_jax.load(model).rank(query, passages) for model in models]
    expected = {
        text: np.mean([each.score for ranked in singles for each in ranked if each.text == text])
        for text in passages
    }
    (found,) = read_lines(tmp_path / "found.jsonl")
    scores = dict(zip(found["negatives"], found["scores"], strict=True))
    scores[found["positive"]] = found["positive_score"]
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len(set(scores.values())) == len(passages)


def naive_means(lists):
    """Returns each text's probability, the sum over lists divided by their number."""
    means = {}
    for answers in lists:
        for text, probability in answers:
            means[text] = means.get(text, 0) + probability / len(lists)
    return means


@pytest.mark.parametrize("threshold", [None, -2.0, 0.0, 2.0])
def test_answers_have_the_mean_of_their_probabilities_in_each_list(threshold):
    rng = np.random.default_rng(0)
    words = "abcdefgh" if threshold is None else " abcdefgh"  # " " is no answer.
    for _ in range(50):
        found = []
        for _ in range(3):
            texts = rng.permutation(list(words))[: rng.integers(2, 9)]
            values = softmax(rng.normal(0, 2, len(texts))).tolist()
            places = rng.integers(0, 99, len(texts)).tolist()
            listed = zip((text.strip() for text in texts.tolist()), values, places, strict=True)
            answers = [Answer(text, p, place, place + len(text)) for text, p, place in listed]
            found.append(RankedAnswers(answers, rng.normal(0, 2)))
        answers, null_odds = average_answers(found, threshold)
        means = naive_means([[each[:2] for each in ranked.answers] for ranked in found])
        assert {each.text: each.probability for each in answers} == pytest.approx(means)
        assert null_odds == pytest.approx(np.mean([ranked.null_odds for ranked in found]))
        is_null = threshold is not None and null_odds > threshold and "" in means
        assert (answers[0].text == "") == is_null
        best = max((text for text in means if text), key=means.get)
        assert RankedAnswers(answers, null_odds).best_text == best
        assert answers[1:] == sorted(answers[1:], key=lambda answer: -answer.probability)
        # The place of a text is that in the list where it is most probable.
        for answer in answers:
            own = [each for ranked in found for each in ranked.answers if each.text == answer.text]
            assert answer.start == max(own, key=lambda each: each.probability).start


def test_models_with_other_tokens_and_lengths_answer_together(tmp_path):
    head = {"task": "span", "labels": ["start", "end"], "null_answers": True}
    first = write_head(tmp_path, **head, max_seq_length=32, null_threshold=1.0)
    second = write_head(
        tmp_path / "b", **head, max_seq_length=16, null_threshold=-2.0, doc_stride=4
    )
    other = load_tokenizer(write_vocabulary(tmp_path / "other.txt", sorted(WORDS)[::-1]))
    model = bert_jax.load(second)
    dataclasses.replace(model, tokenizer=other).save(second, overwrite=True)
    contexts = ["a river of the old", "the war of the north"]  # All answers are listed.
    rows = [
        {"id": str(n), "question": "the king", "context": context, "answers": answers}
        for n, (context, answers) in enumerate(
            zip(contexts, ([{"text": "river", "answer_start": 2}], []), strict=True)
        )
    ]
    path = write_lines(tmp_path / "new.jsonl", rows)
    scores = program.predict([first, second], path, tmp_path / "found.jsonl")["found.jsonl"]
    singles = []
    for number, each in enumerate((first, second)):
        program.predict(each, path, tmp_path / f"{number}.jsonl")
        singles.append(read_lines(tmp_path / f"{number}.jsonl"))
    for line, *each in zip(read_lines(tmp_path / "found.jsonl"), *singles, strict=True):
        lists = [[(a["text"], a["probability"]) for a in own["answers"]] for own in each]
        assert lists[0] != lists[1]
        means = naive_means(lists)
        listed = {answer["text"]: answer["probability"] for answer in line["answers"]}
        assert listed == pytest.approx(means, abs=1e-5)
        assert line["prediction"] == line["answers"][0]["text"]
    assert scores["questions"] == 2


def test_an_ensemble_of_a_model_with_itself_predicts_what_the_model_does(tmp_path):
    model = write_head(tmp_path, task="span", labels=["start", "end"], max_seq_length=32)
    question = {"id": "1", "question": "the king", "context": "a river of the old city"}
    path = write_lines(tmp_path / "new.jsonl", [question])
    program.predict(model, path, tmp_path / "one.jsonl")
    program.predict([model, model], path, tmp_path / "two.jsonl")
    assert read_lines(tmp_path / "two.jsonl") == read_lines(tmp_path / "one.jsonl")


def test_the_threshold_is_the_mean_and_a_temperature_is_left_out(tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="span", labels=["start", "end"]))
    other = bert_jax.load(tmp_path / "model")
    model.settings["head"] |= {"null_threshold": 1.0}
    other.settings["head"] |= {"null_threshold": 2.0}
    assert make_ensemble([model, other], ()).head["null_threshold"] == 1.5
    assert model.head["null_threshold"] == 1.0


def models_with(directory, *heads, **head):
    """Returns models that differ in these settings of their head."""
    model = bert_jax.load(write_head(directory, **head))
    return [dataclasses.replace(model, settings={"head": model.head | own}) for own in heads]


def test_a_label_that_all_models_reject_or_accept_is_rejected_or_accepted(tmp_path):
    rng = np.random.default_rng(0)
    labels = [f"label{number}" for number in range(400)]
    thresholds = rng.normal(0, 4, (3, len(labels))).astype(np.float32)
    thresholds[:, 0] = -6, 1, 1
    models = models_with(
        tmp_path,
        *({"logit_thresholds": each.tolist()} for each in thresholds),
        task="multi_label",
        labels=labels,
    )
    mean = make_ensemble(models, ()).head["logit_thresholds"]
    np.testing.assert_allclose(expit(mean), expit(np.float64(thresholds)).mean(0), rtol=1e-5)
    distance = rng.exponential(1, thresholds.shape).astype(np.float32) + np.float32(1e-3)
    distance[:, 0] = 0.5, 0.1, 0.1
    for offset in (-distance, 0 * distance, distance):  # A logit at its threshold is rejected.
        (logits,) = average_outputs("label_set", (thresholds + offset)[:, None])
        assert (exceed_thresholds(logits, mean) == (offset > 0).all(axis=0)).all()


def test_a_model_without_thresholds_has_the_probability_0_5(tmp_path):
    heads = {}, {"logit_thresholds": [-6.0, 2.0]}
    models = models_with(tmp_path, *heads, task="multi_label", labels=["no", "yes"])
    for each in (models, models[::-1]):
        found = expit(make_ensemble(each, ()).head["logit_thresholds"])
        np.testing.assert_allclose(found, (0.5 + expit([-6.0, 2.0])) / 2, rtol=1e-5)
    assert "logit_thresholds" not in make_ensemble([models[0], models[0]], ()).head


@pytest.mark.slow
def test_regressions_trained_on_other_labels_are_averaged_in_the_scale_of_the_labels(tmp_path):
    scales = {"target_mean": 10.0, "target_std": 2.0}, {"target_mean": 30.0, "target_std": 5.0}
    models = models_with(tmp_path, *scales, task="regression", labels=["value"])
    directories = [tmp_path / "first", tmp_path / "second"]
    for model, directory in zip(models, directories, strict=True):
        model.save(directory)
    path = write_lines(tmp_path / "new.jsonl", [{"text": "the king"}, {"text": "a river"}])
    program.predict(directories, path, tmp_path / "found.jsonl")
    single = [row["prediction"] for row in bert_jax.load(directories[0]).predict(path).rows]
    found = [row["prediction"] for row in read_lines(tmp_path / "found.jsonl")]
    raw = (np.array(single) - 10) / 2  # The parameters are equal.
    np.testing.assert_allclose(found, raw * (2 + 5) / 2 + (10 + 30) / 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "options", "is_accepted"),
    [
        ({"id": "number", "header_lines": 3}, {}, True),
        ({"text": "body"}, {}, False),
        ({"text": "body"}, {"text": "text"}, True),
        ({"text": "body", "label": "topic"}, {"text": "text"}, False),
        ({"label_columns": ["no", "yes"]}, {"label": "label"}, True),
    ],
)
def test_only_columns_that_are_read_and_not_given_must_agree(
    tmp_path, fields, options, is_accepted
):
    model = bert_jax.load(write_head(tmp_path, task="multi_label", labels=["no", "yes"]))
    data = {"text": "text", "label": "label", "id": "", "header_lines": 1}
    model.settings |= {"data": data}
    other = dataclasses.replace(model, settings=model.settings | {"data": data | fields})
    columns = program.unset_columns(model, options)
    if is_accepted:
        make_ensemble([model, other], columns)
    else:
        with pytest.raises(ValueError, match=r"config\.data\."):
            make_ensemble([model, other], columns)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda settings: settings["head"].update(labels=["yes", "no"]), "labels"),
        (lambda settings: settings["head"].update(max_seq_length=16), "max_seq_length"),
        (lambda settings: settings.update(data={"text": "body"}), r"config\.data\.text"),
    ],
)
def test_models_that_read_or_predict_otherwise_are_refused_by_name(tmp_path, change, named):
    first = write_head(tmp_path, task="classification", labels=["no", "yes"])
    models = [bert_jax.load(first), bert_jax.load(first)]
    models[1].settings = json.loads(json.dumps(models[1].settings))
    change(models[1].settings)
    with pytest.raises(ValueError, match=named):
        make_ensemble(models, ("text",))


def test_heads_with_and_without_null_answers_are_refused_together(tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="span", labels=["start", "end"]))
    other = dataclasses.replace(model, settings={"head": model.head | {"null_answers": True}})
    with pytest.raises(ValueError, match="null_answers"):
        make_ensemble([model, other], ())


def test_vectors_and_encoders_are_refused(tmp_path):
    bi_encoder = write_head(tmp_path, task="embedding", labels=[])
    with pytest.raises(ValueError, match="embedding"):
        program.predict([bi_encoder, bi_encoder], tmp_path / "vocab.txt", tmp_path / "found.npy")
