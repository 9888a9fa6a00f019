"""Texts with spans of characters, as Prodigy and doccano write them, as tagged words."""

import random

import numpy as np
import pytest

from bert_jax.configs.finetune import tagging as tagging_config
from bert_jax.tasks import tagging
from bert_jax.tasks.character_spans import CharacterSpan, tags_of_spans
from bert_jax.tasks.conll import read_sentences
from bert_jax.tasks.task import TrainedHead
from bert_jax.tasks.words import split_words
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.json_lines import write_lines

TEXT = "Ann left New York."  # Words: 0-3, 4-8, 9-12, 13-17, 17-18.


def spans(*items):
    return [dict(zip(("start", "end", "label"), item, strict=True)) for item in items]


def naive_tags(words, items):
    """Returns the tags of words, and the number of spans that cut one, character by character.

    None if a span has no word, or if two share a word.
    """
    tags, num_cut = ["O"] * len(words), 0
    for start, end, label in items:
        inside = set(range(start, end))
        mine = [n for n, (a, b) in enumerate(words) if inside & set(range(a, b))]
        if not mine or any(tags[n] != "O" for n in mine):
            return None
        for n in mine:
            tags[n] = f"I-{label}"
        tags[mine[0]] = f"B-{label}"
        num_cut += any(not set(range(*words[n])) <= inside for n in mine)
    return tags, num_cut


def test_tags_equal_those_of_a_naive_conversion():
    rng, seen = random.Random(0), []
    for _ in range(3000):
        text = "".join(rng.choices("ab ,é\u0301😀", k=rng.randint(1, 14)))
        words = split_words(text)[1]
        items = []
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            start, end = sorted(rng.sample(range(len(text) + 1), 2))
            items.append(CharacterSpan(start, end, rng.choice(["PER", "LOC"])))
        expected = naive_tags(words, items)
        seen.append("refused" if expected is None else expected[1])
        if expected is None:
            with pytest.raises(ValueError, match=r"^place: "):
                tags_of_spans(text, words, items, "place")
        else:
            assert tags_of_spans(text, words, items, "place") == expected
    assert {"refused", 0, 1, 2} <= set(seen)


def read(tmp_path, *lines, **options):
    path = tmp_path / "data.jsonl"
    write_lines(path, lines)
    return read_sentences(path, **options)


@pytest.mark.parametrize(
    "line",
    [
        {"spans": spans((9, 17, "LOC"), (0, 3, "PER"))},
        {"label": [[0, 3, "PER"], [9, 17, "LOC"]]},
        {"labels": [[0, 3, "PER"], [9, 17, "LOC"]], "id": 7, "Comments": []},
        {"spans": spans((0, 3, "PER"), (9, 17, "LOC")), "answer": "accept", "_task_hash": 1},
        {"spans": [{"start": 0, "end": 3, "label": "PER", "token_end": 0}, [9, 17, "LOC"]]},
    ],
)
def test_each_form_gives_the_same_words_and_tags(tmp_path, line):
    unused, counts = {}, {}
    (sentence,) = read(tmp_path, {"text": TEXT} | line, unused=unused, counts=counts)
    assert sentence.words == ["Ann", "left", "New", "York", "."]
    assert sentence.tags == ["B-PER", "O", "B-LOC", "I-LOC", "O"]
    assert unused == counts == {}


def test_words_are_the_tokens_of_prodigy_without_white_space(tmp_path):
    tokens = [
        {"text": TEXT[start:end], "start": start, "end": end}
        for start, end in ((0, 2), (2, 3), (3, 4), (4, 17), (17, 18))
    ]
    line = {"text": TEXT, "tokens": tokens, "spans": spans((2, 12, "X"))}
    counts = {}
    (sentence,) = read(tmp_path, line, counts=counts)
    assert sentence.words == ["An", "n", "left New York", "."]
    assert sentence.tags == ["O", "B-X", "I-X", "O"]
    assert list(counts.values()) == [1]  # The span is extended to "left New York".


def test_rejected_examples_are_left_out_and_counted(tmp_path):
    lines = [
        {"text": "Ann", "spans": spans((0, 3, "PER")), "answer": answer}
        for answer in ("accept", "reject", "ignore", "reject")
    ]
    counts = {}
    # An accepted text without spans has no entity; a rejected one may have any.
    sentences = read(tmp_path, *lines, {"text": "a b", "answer": "accept"}, counts=counts)
    assert [each.tags for each in sentences] == [["B-PER"], ["O", "O"]]
    assert sorted(counts.values()) == [1, 2] and all("left out" in what for what in counts)


def test_other_spans_are_chosen_by_their_key_and_the_rest_is_counted(tmp_path):
    line = {"text": "Ann", "spans": [], "label": [[0, 3, "PER"]]}
    with pytest.raises(ValueError, match=r"data\.jsonl, line 1.*'label'.*config\.data\.tags"):
        read(tmp_path, line)
    unused = {}
    (sentence,) = read(tmp_path, line | {"note": "x"}, tags_key="spans", unused=unused)
    assert sentence.tags == ["O"] and unused == {"label": 1, "note": 1}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"spans": spans((9, 19, "LOC"))}, "'spans'.* 19"),
        ({"spans": spans((-1, 3, "LOC"))}, r"'spans'.*\[-1"),
        ({"spans": spans((3, 3, "LOC"))}, "'spans'.* 3"),
        ({"spans": spans((3, 4, "LOC"))}, "'spans'.* no word"),
        ({"spans": spans((0, 12, "A"), (9, 17, "B"))}, "'spans'.* overlap .*'New'"),
        ({"spans": spans((0, 17, "A"), (4, 8, "B"))}, "'spans'.* overlap .*'left'"),
        ({"spans": spans((0, 2, "A"), (2, 3, "B"))}, "'spans'.* overlap .*'Ann'"),
        ({"spans": spans((0, True, "LOC"))}, "'spans'.* True"),
        ({"spans": spans((0, 3, None))}, "'spans'.* None"),
        ({"spans": spans((0, 3, "a\tb"))}, "'spans'.*label"),
        ({"spans": [{"start": 0, "label": "LOC"}]}, "'spans'.* None"),
        ({"label": "LOC"}, "'label' is of type str"),
        ({"label": [[0, 3]]}, r"'label' holds \[0, 3\]"),
        ({"spans": [], "answer": "yes"}, "'answer' is 'yes'"),
        ({"spans": [], "text": 3}, "'text'"),
        ({"spans": [], "tokens": [{"start": 0}]}, "'tokens'.*'end'"),
        ({"spans": [], "tokens": [{"start": 4, "end": 40}]}, "'tokens' 0"),
        ({"spans": [], "tokens": [{"start": 1, "end": 3}, {"start": 2, "end": 4}]}, "'tokens' 1"),
    ],
)
def test_what_cannot_be_tags_is_refused_with_its_place(tmp_path, change, place):
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 2: .*{place}"):
        read(tmp_path, {"text": "a", "spans": []}, {"text": TEXT} | change)


def test_texts_with_spans_train_and_are_predicted_as_texts(tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = tagging_config.get_config()
    config.data.train = config.data.dev = str(tmp_path / "data.jsonl")
    config.data.scheme = "bioes"
    lines = [
        {"text": "the old  river", "spans": spans((4, 12, "LOC"))},
        {"text": "king", "spans": spans((0, 4, "PER")), "answer": "accept"},
        {"text": "queen", "answer": "ignore"},
    ]
    write_lines(tmp_path / "data.jsonl", lines)
    task = tagging.get_task(config, tokenizer)
    tags = [[task.labels[n] for n in each.label if n >= 0] for each in task.train]
    assert tags == [["O", "B-LOC", "E-LOC"], ["S-PER"]]
    notes = {name: count for name, count in task.notes.items() if name.startswith("dev ")}
    assert notes["dev spans extended to whole words, which they cut"] == 1
    assert notes["dev examples with the answer ignore, left out"] == 1

    settings = task.head_settings | {"labels": task.labels, "max_seq_length": 32}
    trained = TrainedHead(settings, {}, tokenizer, 32)
    predictor = tagging.get_predictor(trained, tagging.PREDICT_OPTIONS, set())
    examples = list(predictor.read(tmp_path / "data.jsonl"))
    features = predictor.features(examples)
    outputs = [np.eye(len(task.labels))[np.maximum(each.label, 0)] for each in task.train]
    assert len(features) == 2
    first, second = predictor.describe(examples, outputs)
    # Their places are those in the text, which has two spaces.
    assert first["text"] == lines[0]["text"] and first["tokens"] == ["the", "old", "river"]
    (entity,) = first["entities"]
    assert (entity["start"], entity["end"], entity["text"]) == (4, 14, "old  river")
    assert [each["type"] for each in second["entities"]] == ["PER"]
    assert predictor.scores()["f1"] == 1
    assert predictor.notes["examples with the answer ignore, left out"] == 1
