"""SQuAD from its files to predictions in the official format, and `model.answer`."""

import json

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.huggingface import HEAD_KEY
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import squad as squad_config
from bert_jax.finetune import train_and_evaluate
from bert_jax.finetuning.finetune_fields import check_numbers
from bert_jax.model.heads import make_model
from bert_jax.tasks.squad import get_task, read_questions
from bert_jax.tasks.squad_scores import evaluate_v2
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_tfds, write_vocabulary
from tests.helpers.json_lines import write_lines
from tests.helpers.models import batch_of_row, small_model_config, write_head
from tests.helpers.predict_equals_load import predict

pytestmark = pytest.mark.usefixtures("two_devices")

CONTEXT = "the old king built a road . the small village grew north of the river ."


def entry(number, answer=None, context=CONTEXT, **fields):
    values = {"id": f"q{number}", "question": f"{WORDS[number]} king"}
    if answer is not None:
        start = max(context.find(answer), 0)
        values["answers"] = [{"text": answer, "answer_start": start}] if answer else []
    return values | fields


def write_squad(path, entries, context=CONTEXT):
    paragraphs = [{"context": context, "qas": list(entries)}]
    path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt"))


@pytest.fixture(scope="module")
def pretrained(tokenizer, tmp_path_factory):
    """A tiny untrained BERT."""
    directory = tmp_path_factory.mktemp("pretrained") / "1"
    config = small_model_config(tokenizer.vocab_size, num_layers=1, max_position_embeddings=32)
    batch = batch_of_row(np.zeros((1, 8), np.int32))
    model = make_model(config, {"task": "span", "labels": ["start", "end"]})
    params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
    params = {"encoder": params["encoder"]}
    write_checkpoint(directory, params, model_settings(config, params), tokenizer)
    return str(directory)


def make_config(version, **data):
    config = squad_config.get_config(f"{version},runlocal")
    for name, value in data.items():
        config.data[name] = value
    return config


def finetune(version, pretrained, directory, **data):
    config = make_config(version, **data)
    config.init_from, config.learning_rate, config.num_epochs = pretrained, 1e-3, 2.0
    config.per_device_batch_size = 4  # The programs of all runs have the same shapes.
    return train_and_evaluate(config, str(directory))


@pytest.fixture(scope="module")
def finished(pretrained, tmp_path_factory):
    """A run on questions of which half have no answer, its result and its data."""
    directory = tmp_path_factory.mktemp("v2")
    answered = [entry(n, ["king", "old king", "river", "village"][n % 4]) for n in range(8)]
    unanswered = [entry(n, "", is_impossible=True) for n in range(8, 16)]
    path = write_squad(directory / "data.json", answered + unanswered)
    blind = write_squad(directory / "blind.json", [entry(n) for n in range(3)])
    result = finetune("v2", pretrained, directory / "run", train=path, dev=path, test=blind)
    return directory / "run", result, path


@pytest.mark.slow
def test_predictions_have_the_official_format_and_the_score_of_the_result(finished):
    workdir, result, path = finished
    threshold = bert_jax.load(workdir).head["null_threshold"]
    dev = workdir / "predictions" / "dev"
    files = {each.stem: json.loads(each.read_text()) for each in dev.iterdir()}
    assert set(files) == {"predictions", "nbest_predictions", "null_odds"}
    gold = {
        question.id: [text for text, _ in question.answers]
        for question in read_questions(path, True)
    }
    assert [list(content) for content in files.values()] == [list(gold)] * 3
    found = evaluate_v2(gold, files["predictions"], files["null_odds"])
    scores = {name: value for name, value in result["dev"].items() if name != "loss"}
    assert found == pytest.approx(scores)
    assert found["f1"] == pytest.approx(found["best_f1"])
    for id_, entries in files["nbest_predictions"].items():
        assert sum(each["probability"] for each in entries) == pytest.approx(1)
        assert 2 <= len(entries) <= 21
        assert {"text", "probability", "start_logit", "end_logit"} == set(entries[0])
        texts = [each["text"] for each in entries]
        assert texts.count("") == 1
        assert len(set(texts)) == len(texts)
        best = next(text for text in texts if text)
        answers = files["null_odds"][id_] <= threshold
        assert files["predictions"][id_] == (best if answers else "")


@pytest.mark.slow
def test_unlabeled_questions_are_predicted_but_not_scored(finished):
    workdir, result, _ = finished
    predictions = json.loads((workdir / "predictions" / "test" / "predictions.json").read_text())
    assert list(predictions) == ["q0", "q1", "q2"]
    assert "test" not in result


@pytest.mark.slow
def test_loaded_model_answers_as_the_run_predicted(finished):
    workdir, _, path = finished
    model = bert_jax.load(workdir / "best")
    dev = workdir / "predictions" / "dev"
    predictions, nbest, odds = (
        json.loads((dev / f"{name}.json").read_text())
        for name in ("predictions", "nbest_predictions", "null_odds")
    )
    for question in read_questions(path, True):
        answers = model.answer(question.question, question.context, top_k=3)
        # The threshold is the odds of one question, where rounding decides.
        if abs(odds[question.id] - model.head["null_threshold"]) > 1e-5:
            assert answers[0].text == predictions[question.id]
        expected = {each["text"]: each["probability"] for each in nbest[question.id]}
        for answer in answers:
            assert question.context[answer.start : answer.end] == answer.text
            assert answer.probability == pytest.approx(expected[answer.text], rel=1e-3)


@pytest.mark.slow
def test_threshold_decides_between_an_answer_and_none(finished):
    model = bert_jax.load(finished[0] / "best")
    for threshold, answers in ((1e9, True), (-1e9, False)):
        model.head["null_threshold"] = threshold
        assert bool(model.answer("the king", CONTEXT)[0].text) == answers
    # As an argument, it lets any head give no answer.
    del model.head["null_answers"]
    assert model.answer("the king", CONTEXT)[0].text
    assert not model.answer("the king", CONTEXT, null_threshold=-1e9)[0].text
    with pytest.raises(TypeError, match="null_threshold must be a number, got '0'"):
        model.answer("the king", CONTEXT, null_threshold="0")


@pytest.mark.slow
def test_tuned_threshold_is_kept_with_the_head(finished, tmp_path):
    run, _, _ = finished
    searched = bert_jax.load(run).head["null_threshold"]
    assert searched not in (0, 7.5)
    # Also if the questions to predict would give another: here, none has an answer.
    unanswered = [entry(n, "", is_impossible=True) for n in range(8, 16)]
    blind = [entry(n) for n in range(3)]
    for split, entries in (("dev", unanswered), ("test", blind)):
        source = write_squad(tmp_path / f"{split}.json", entries)
        predict(str(run), source, str(tmp_path / f"{split}_predictions.json"))
        texts = json.loads((tmp_path / f"{split}_predictions.json").read_text())
        files = run / "predictions" / split
        odds = json.loads((files / "null_odds.json").read_text())
        assert len(texts) == len(entries)
        assert all(bool(texts[id_]) == (odds[id_] <= searched) for id_ in texts)
        expected = json.loads((files / "predictions.json").read_text())
        assert texts == {id_: expected[id_] for id_ in texts}


def test_answers_outside_their_contexts_are_named(tokenizer, tmp_path, caplog):
    second = [{"text": text, "answer_start": 8} for text in ("king", "castle", "village")]
    entries = [entry(0, "king"), entry(1, answers=second), entry(2, "mountain")]
    path = write_squad(tmp_path / "data.json", entries)
    task = get_task(make_config("v1", train=path, dev=path), tokenizer)
    assert list(task.notes.values()) == [1, 3]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    location = f"{path}, article 1, paragraph 1, question"
    says = "Answers not at answer_start:"
    assert lines == [
        f"{says} 1 ({location} 3 (id q2))",
        f"{says} 3 ({location} 2 (id q1); {location} 3 (id q2))",
    ]


@pytest.mark.slow
def test_exported_head_keeps_its_config(finished, tmp_path):
    expected = read_model(finished[0] / "best")
    save_huggingface(tmp_path / "huggingface", *expected[:3])
    found = read_model(tmp_path / "huggingface").settings["head"]
    assert found == expected.settings["head"]
    assert found["null_answers"] and "null_threshold" in found and "max_query_length" in found


@pytest.mark.slow
def test_head_without_config_uses_windows_that_fit_its_positions(finished, tmp_path):
    save_huggingface(tmp_path / "huggingface", *read_model(finished[0] / "best")[:3])
    config = tmp_path / "huggingface" / "config.json"
    values = json.loads(config.read_text())
    del values[HEAD_KEY]
    config.write_text(json.dumps(values))
    model = bert_jax.load(tmp_path / "huggingface")
    (answer,) = model.answer("who built the old road", " ".join([CONTEXT] * 5))
    assert answer.text
    assert 0 < answer.probability <= 1


@pytest.mark.slow
def test_version_1_answers_every_question_and_counts_skipped_ones(pretrained, tmp_path):
    entries = [entry(n, "village") for n in range(6)]
    entries += [entry(6, "mountain"), entry(7, "king", question="king " * 40)]
    entries[1]["answers"][0]["answer_start"] += 1
    path = write_squad(tmp_path / "data.json", entries)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    with pytest.warns(UserWarning, match="1 of 8 questions are truncated to 8 tokens"):
        task = get_task(make_config("v1", train=path, dev=path), tokenizer)
        result = finetune("v1", pretrained, tmp_path / "run", train=path, dev=path)
    assert list(task.notes.values()) == [2, 2]
    files = sorted((tmp_path / "run" / "predictions" / "dev").iterdir())
    assert [each.name for each in files] == ["nbest_predictions.json", "predictions.json"]
    assert all(json.loads(files[1].read_text()).values())
    assert set(result["dev"]) == {"exact", "f1", "loss"}


@pytest.mark.slow
def test_answers_do_not_depend_on_how_windows_are_batched(finished, monkeypatch):
    model = bert_jax.load(finished[0] / "best")
    context = " ".join([CONTEXT] * 8)
    together = model.answer("old king", context, top_k=5)
    whole = type(model).head_outputs
    monkeypatch.setattr(
        type(model), "head_outputs", lambda self, all_: [whole(self, [one])[0] for one in all_]
    )
    for one, other in zip(together, model.answer("old king", context, top_k=5), strict=True):
        assert one[2:] == other[2:]
        assert one.probability == pytest.approx(other.probability, rel=1e-4)


@pytest.mark.slow
def test_a_list_of_questions_is_answered_as_each_alone(finished):
    model = bert_jax.load(finished[0] / "best")
    questions, contexts = ["old king", "the road"], [" ".join([CONTEXT] * 4), CONTEXT]
    together = model.answer(questions, contexts, top_k=2)
    for found, *asked in zip(together, questions, contexts, strict=True):
        alone = model.answer(*asked, top_k=2)
        assert [each[2:] for each in found] == [each[2:] for each in alone]
        probabilities = [each.probability for each in alone]
        assert [each.probability for each in found] == pytest.approx(probabilities, rel=1e-4)
    assert model.answer(questions, CONTEXT)[1][0].text == together[1][0].text
    assert model.answer([], CONTEXT) == []


def test_jsonl_and_tfds_give_the_same_questions_as_the_official_file(tmp_path):
    entries = [entry(1, "king"), entry(2, ""), entry(3, "river")]
    expected = read_questions(write_squad(tmp_path / "data.json", entries), True)
    lists = [
        {name: [answer[name] for answer in each["answers"]] for name in ("text", "answer_start")}
        for each in entries
    ]

    for name, answers in {"dicts": [each["answers"] for each in entries], "lists": lists}.items():
        path = tmp_path / f"{name}.jsonl"
        lines = zip(entries, answers, strict=True)
        lines = [each | {"context": CONTEXT, "answers": own} for each, own in lines]
        write_lines(path, lines)
        found = read_questions(str(path), True)
        assert [each[:4] for each in found] == [each[:4] for each in expected]
        assert found[1].location == f"{path}, line 2"

    text = tfds.features.Text()
    answers = tfds.features.Sequence({"text": text, "answer_start": np.int32})
    features = {"id": text, "question": text, "context": text, "answers": answers}
    write_tfds(tmp_path / "tfds", "squad/v2.0", {"validation": lines}, features)
    found = read_questions("tfds:squad/v2.0#validation", True, str(tmp_path / "tfds"))
    assert sorted(each[:4] for each in found) == [each[:4] for each in expected]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_ids_that_are_numbers_are_read_and_written_as_text(tokenizer, tmp_path, suffix):
    entries = [entry(n, "king", id=id_) for n, id_ in enumerate((7, "a", 2.0))]
    path = tmp_path / f"data.{suffix}"
    write_squad(path, entries)
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(e | {"context": CONTEXT}) + "\n" for e in entries))
    assert [question.id for question in read_questions(str(path), False)] == ["7", "a", "2"]
    (split,) = get_task(make_config("v1", dev=str(path)), tokenizer).splits
    outputs = [np.zeros((len(feature), 2), np.float32) for feature in split.features]
    split.score(outputs)
    split.write(outputs, tmp_path)
    for name in ("predictions", "nbest_predictions"):
        assert [*json.loads((tmp_path / "dev" / f"{name}.json").read_text())] == ["7", "a", "2"]


def test_ids_that_are_the_same_as_text_are_refused(tmp_path):
    entries = [entry(1, "king", id=1), entry(2, "king", id="1")]
    with pytest.raises(ValueError, match=r"question 2 \(id 1\): id '1' is already used"):
        read_questions(write_squad(tmp_path / "data.json", entries), False)


def test_empty_questions_and_contexts_are_predicted_but_not_trained_on(tokenizer, tmp_path):
    path = tmp_path / "blind.jsonl"
    lines = [("", CONTEXT), ("old king", " "), (None, None), ("old king", CONTEXT)]
    lines = [{"question": question, "context": context} for question, context in lines]
    write_lines(path, lines)
    task = get_task(make_config("v1", test=str(path)), tokenizer)
    assert task.notes["test examples with an empty text"] == 3
    (split,) = task.splits
    split.write([np.ones((len(feature), 2), np.float32) for feature in split.features], tmp_path)
    texts = json.loads((tmp_path / "test" / "predictions.json").read_text())
    assert [bool(text) for text in texts.values()] == [True, False, False, True]
    with pytest.raises(ValueError, match="line 1: the question is empty"):
        read_questions(str(path), False)
    paragraph = {"context": None, "qas": [{"id": "1", "question": "old king"}]}
    path = tmp_path / "blind.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    (question,) = read_questions(str(path), False, empty_texts=True)
    assert question.context == ""
    with pytest.raises(ValueError, match=r"question 1 \(id 1\): the context is empty"):
        read_questions(str(path), False)
    train = write_squad(tmp_path / "train.json", [entry(1, "king")])
    dev = write_squad(tmp_path / "dev.json", [entry(1, "king"), entry(2, "king", question="")])
    with pytest.raises(ValueError, match=r"question 2 \(id q2\): the question is empty"):
        get_task(make_config("v1", train=train, dev=dev), tokenizer)


def test_jsonl_without_ids_or_answers_is_numbered_and_only_predicted(tmp_path):
    path = tmp_path / "blind.jsonl"
    path.write_text(json.dumps({"question": "old king", "context": CONTEXT}) + "\n")
    (found,) = read_questions(str(path), False)
    assert found[:4] == ("0", "old king", CONTEXT, None)


def test_keys_of_lines_that_are_not_read_are_counted_or_refused(tokenizer, tmp_path):
    path = tmp_path / "test.jsonl"
    line = {"question": "old king", "context": CONTEXT, "title": "a", "question_id": 4}
    path.write_text(f"{json.dumps(line)}\n" * 2)
    notes = get_task(make_config("v1", test=str(path)), tokenizer).notes
    unused = {name: count for name, count in notes.items() if name.endswith("which is not used")}
    assert unused == {"test lines with 'title', which is not used": 2}
    path.write_text(json.dumps(line | {"answer": "king"}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: 'answer' is not read"):
        get_task(make_config("v1", test=str(path)), tokenizer)


def test_an_answer_before_a_zero_width_space_matches_exactly(tokenizer, tmp_path):
    context = "the king of the village\u200b and a river\u00ad ."
    entries = [entry(1, "village", context), entry(2, "river", context)]
    path = write_squad(tmp_path / "data.json", entries, context)
    (split,) = get_task(make_config("v1", dev=path), tokenizer).splits
    outputs = [np.eye(len(each), dtype=np.float32)[list(each.label)].T for each in split.features]
    assert split.score(outputs) == {"exact": 1, "f1": 1} and split.counts == {"questions": 2}
    split.write(outputs, tmp_path)
    predictions = json.loads((tmp_path / "dev" / "predictions.json").read_text())
    assert predictions == {"q1": "village", "q2": "river"}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "no file .*expected SQuAD's JSON"),
        ("{", ValueError, "is not JSON"),
        ('{"data": 3}', ValueError, "'data' must be of type list, found int"),
        ('{"data": [3]}', ValueError, "article 1: 'paragraphs' must be of type list, found none"),
        ('{"data": []}', ValueError, "holds no questions"),
        ([entry(1, "king"), entry(1, "king")], ValueError, r"\(id q1\): id 'q1' is already used"),
        ([entry(1, "king", id=[1])], ValueError, "'id' must be of type str . int . float, found l"),
        ([entry(1, "king", id=True)], ValueError, "'id' must be text or a whole number, found Tr"),
        ([entry(1, "king", id=1.5)], ValueError, r"\(id 1.5\): 'id' must be text or a whole"),
        ([entry(1, "king", id=None)], ValueError, "'id' must be of type .* found none"),
        ([entry(1, "king", question=" ")], ValueError, r"\(id q1\): the question is empty"),
        ([entry(1, "king"), entry(2)], ValueError, r"\(id q2\): no 'answers'"),
        ([entry(1, "")], ValueError, "no answer; only SQuAD 2.0"),
        (
            [entry(1, answers=[{"text": "king"}])],
            ValueError,
            "'answer_start' is missing; found text",
        ),
        ([entry(1)], ValueError, "no question has an answer: training needs one"),
        ([entry(1, "castle")], ValueError, r"\(id q1\): no question .* one at its answer_start"),
        (
            [entry(1, "king", is_impossible="no")],
            ValueError,
            "'is_impossible' must be of type bool",
        ),
        ([entry(1, "king", is_impossible=True)], ValueError, "is_impossible with answers"),
    ],
)
def test_bad_files_raise_a_clear_error(tokenizer, tmp_path, content, error, message):
    path = tmp_path / "data.json"
    if isinstance(content, list):
        write_squad(path, content)
    elif content:
        path.write_text(content)
    with pytest.raises(error, match=message):
        get_task(make_config("v1", train=str(path)), tokenizer)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_query_length", 29, r"data\.max_query_length=29"),
        ("max_query_length", 0, r"data\.max_query_length=0"),
        ("doc_stride", 0, r"data\.doc_stride=0"),
        ("max_answer_length", -1, r"data\.max_answer_length=-1"),
    ],
)
def test_impossible_lengths_raise_a_clear_error(tokenizer, tmp_path, field, value, message):
    config = make_config("v1", train=write_squad(tmp_path / "data.json", [entry(1, "king")]))
    config.max_seq_length, config.data[field] = 32, value
    with pytest.raises(ValueError, match=message):
        check_numbers(config)
        get_task(config, tokenizer)


def test_bad_questions_raise_a_clear_error(pretrained, tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="span", labels=["start", "end"]))
    for arguments, error, message in [
        (([None], CONTEXT), TypeError, "question must be a string or a list .* got None"),
        ((["q"], [CONTEXT] * 2), ValueError, "1 questions and 2 contexts: expected one context"),
        (("q", " "), ValueError, "the context is empty"),
        (("q", CONTEXT, 0), ValueError, r"top_k must be a whole number in \[1, 20\], got 0"),
    ]:
        with pytest.raises(error, match=message):
            model.answer(*arguments)
    with pytest.raises(ValueError, match="no fine-tuned head, so it cannot answer questions"):
        bert_jax.load(pretrained).answer("q", CONTEXT)


def test_missing_files_raise_a_clear_error(tokenizer):
    with pytest.raises(ValueError, match=r"set config\.data\.train=FILE to train"):
        get_task(make_config("v1"), tokenizer)


@pytest.mark.parametrize("argument", ["v3", "v1,fast", "fast"])
def test_unknown_version_raises_a_clear_error(argument):
    with pytest.raises(ValueError, match="unknown argument"):
        squad_config.get_config(argument)
