"""CoNLL files, their features, and the files of predictions."""

import itertools
import json
import random

import numpy as np
import pytest

from bert_jax.data.features import NO_LABEL
from bert_jax.tasks import tagging
from bert_jax.tasks.conll import find_scheme, read_sentences
from bert_jax.tasks.tagging import split_words
from bert_jax.tokenization import load_tokenizer
from configs.finetune import conll2003
from configs.finetune import tagging as tagging_config
from tests.helpers import WORDS, write_vocabulary

TRAIN = """-DOCSTART- -X- O

the X B-LOC
river X I-LOC
built X O

king X B-PER
king X B-PER

-DOCSTART- -X- O

old X O
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.txt"))


def make_config(directory, train=TRAIN, **texts):
    config = conll2003.get_config()
    config.data.dev = config.data.test = ""
    for name, text in {"train": train, **texts}.items():
        config.data[name] = str(directory / f"{name}.txt")
        (directory / f"{name}.txt").write_text(text)
    return config


def trained_tags(task):
    """Returns all labels of the training features, in order."""
    return [task.labels[n] for each in task.train for n in each.label if n != NO_LABEL]


def random_text(seed, num_sentences=30):
    """Returns a CoNLL file in which some words have no piece and some have very many."""
    rng = random.Random(seed)
    lines = []
    for number in range(num_sentences):
        if number % 7 == 0:
            lines += ["-DOCSTART- O", ""]
        for _ in range(rng.randint(1, 80)):
            word = rng.choice([*WORDS, "\u200b", "." * rng.choice([2, 40, 600])])
            lines.append(f"{word} {rng.choice(['O', 'B-LOC', 'B-PER'])}")
        lines.append("")
    return "\n".join(lines)


@pytest.mark.parametrize("document_context", [False, True])
@pytest.mark.parametrize("length", [16, 17, 32, 64, 128, 512])
def test_every_word_gets_one_prediction_at_any_length(
    tmp_path, tokenizer, length, document_context
):
    text = random_text(length)
    config = make_config(tmp_path, text, dev=text)
    config.max_seq_length, config.data.document_context = length, document_context
    (split,) = tagging.get_task(config, tokenizer).splits
    assert max(map(len, split.features)) <= length
    # Outputs that are correct at the predicted positions and wrong elsewhere.
    outputs = [np.eye(5, dtype=np.float32)[np.maximum(f.label, 2)] for f in split.features]
    for output, feature in zip(outputs, split.features, strict=True):
        places = np.flatnonzero(feature.label != NO_LABEL)
        output[places] = np.eye(5)[feature.label[places]]
    scores = split.score(outputs)
    assert scores["f1"] == scores["accuracy"] == scores["strict_f1"] == 1
    split.write(outputs, tmp_path)
    lines = [line for line in text.split("\n") if "DOCSTART" not in line]
    written = (tmp_path / "dev.txt").read_text()
    assert [line.split(" ") for line in written.split("\n") if line] == [
        [*line.split(" "), line.split(" ")[1]] for line in lines if line
    ]
    assert written.count("\n\n") == 30  # A blank line after each sentence.


def test_windows_extend_to_both_sides_and_predict_each_word_once():
    rng = random.Random(0)
    for _ in range(300):
        room = rng.randint(2, 40)
        sizes = [rng.randint(1, rng.choice([1, room])) for _ in range(rng.randint(1, 60))]
        cuts = sorted({0, len(sizes), *rng.choices(range(len(sizes)), k=3)})
        windows = tagging.split_into_windows(sizes, itertools.pairwise(cuts), room)
        predicted = [n for _, begin, end, _ in windows for n in range(begin, end)]
        assert predicted == list(range(len(sizes)))
        for start, begin, end, stop in windows:
            size, spare = sum(sizes[start:stop]), room - sum(sizes[begin:end])
            assert start <= begin < end <= stop and size <= room
            # No further word fits at the end, nor at the start without using the end's half.
            assert stop == len(sizes) or size + sizes[stop] > room
            left, right = sum(sizes[start:begin]), sum(sizes[end:])
            assert not start or left + sizes[start - 1] > max(spare // 2, spare - right)


def test_a_sentence_that_fits_is_one_feature(tmp_path, tokenizer):
    task = tagging.get_task(make_config(tmp_path), tokenizer)
    assert [(each.label != NO_LABEL).sum() for each in task.train] == [3, 2, 1]


def test_document_context_shows_neighbors_but_predicts_only_the_sentence(tmp_path, tokenizer):
    config = make_config(tmp_path)
    config.data.document_context = True
    first, second, other = tagging.get_task(config, tokenizer).train
    words = ["[CLS]", "the", "river", "built", "king", "king", "[SEP]"]
    for feature, predicted in ((first, [1, 2, 3]), (second, [4, 5])):
        assert [tokenizer.id_to_token(i) for i in feature.sequences[0]] == words
        assert np.flatnonzero(feature.label != NO_LABEL).tolist() == predicted
    assert len(other) == 3  # Another document.


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [
        ("iob1", "I-LOC I-LOC O I-PER B-PER O"),
        ("iob2", "B-LOC I-LOC O B-PER B-PER O"),
        ("bioes", "B-LOC E-LOC O S-PER S-PER O"),
        ("bilou", "B-LOC L-LOC O U-PER U-PER O"),
    ],
)
def test_every_scheme_is_detected_and_converted(tmp_path, tokenizer, scheme, tags):
    one, two, three, four, five, six = tags.split()
    text = f"the {one}\nriver {two}\nbuilt {three}\n\nking {four}\nking {five}\n\nold {six}\n"
    config = make_config(tmp_path, text)
    assert find_scheme("train", read_sentences(config.data.train, 0, -1)) == scheme
    task = tagging.get_task(config, tokenizer)
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert trained_tags(task) == ["B-LOC", "I-LOC", "O", "B-PER", "B-PER", "O"]
    if scheme != "bilou":  # The same as BIOES, which is what a model learns.
        config.data.scheme = scheme
        assert trained_tags(tagging.get_task(config, tokenizer)) == tags.split()


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_comments_and_documents_of_every_kind_are_no_words(tmp_path, separator):
    lines = """# global.columns = FORM TAG
# newdoc id = a
# text = the # king
the O
# B-PER
king I-PER

# id 1
old O

#begin document (b)
# O
5 O

#end document
#1 O
-DOCSTART- O

new O
"""
    words = [["the", "#", "king"], ["old"], ["#", "5"], ["#1"], ["new"]]
    comments = ("# glob", "# newd", "# text", "# id", "#begin", "#end")
    path = tmp_path / "train.txt"
    path.write_text(
        "\n".join(
            line if line.startswith(comments) else line.replace(" ", separator)
            for line in lines.split("\n")
        )
    )
    sentences = read_sentences(path, 0, -1)
    assert [each.words for each in sentences] == words
    assert [each.document for each in sentences] == [1, 1, 2, 3, 4]
    assert sentences[0].tags == ["O", "B-PER", "I-PER"] and sentences[1].lines == [9]


def test_words_and_parts_of_speech_of_conllu_are_those_of_the_syntax(tmp_path):
    """Of "vámonos al mar" in the specification of CoNLL-U; and of an empty node."""
    rows = ["1-2 vámonos _ _", "1 vamos ir VERB", "2 nos nosotros PRON", "2.1 e _ _"]
    rows += ["3-4 al _ _", "3 a a ADP", "4 el el DET", "5 mar mar NOUN"]
    text = "# text = vámonos al mar\n"
    text += "".join("\t".join([*row.split(), *"______"]) + "\n" for row in rows)
    (tmp_path / "train.conllu").write_text(text)
    (sentence,) = read_sentences(tmp_path / "train.conllu", word_column=1, tag_column=3)
    assert sentence.words == ["vamos", "nos", "a", "el", "mar"]
    assert sentence.tags == ["VERB", "PRON", "ADP", "DET", "NOUN"]


def test_jsonl_gives_the_same_features_as_columns(tmp_path, tokenizer):
    columns = make_config(tmp_path, dev=TRAIN)
    config = tagging_config.get_config()
    lines = [
        {"tokens": ["the", "river", "built"], "tags": ["B-LOC", "I-LOC", "O"], "document": "a"},
        {"tokens": ["king", "king"], "tags": ["B-PER", "B-PER"], "document": "a"},
        {"tokens": ["old"], "tags": ["O"], "document": "b"},
    ]
    for name in ("train", "dev", "test"):
        own = [{"tokens": line["tokens"]} for line in lines] if name == "test" else lines
        config.data[name] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, own)) + "\n")
    for each in (columns, config):
        each.data.document_context = True
    expected, found = (tagging.get_task(each, tokenizer) for each in (columns, config))
    assert found.labels == expected.labels
    np.testing.assert_equal([*map(vars, found.train)], [*map(vars, expected.train)])
    dev, test = found.splits
    np.testing.assert_equal([*map(vars, dev.features)], [*map(vars, found.train)])
    assert test.score is None and len(test.features) == 3
    config.data.test = str(tmp_path / "words.txt")
    (tmp_path / "words.txt").write_text("the\nriver\n")
    assert tagging.get_task(config, tokenizer).splits[1].score is None


def test_own_data_never_fall_back_to_those_of_conll_2003():
    data = tagging_config.get_config().data
    assert (data.train, data.dev, data.test) == ("", "", "")
    data = conll2003.get_config().data
    assert all("conll2003" in data[name] for name in ("train", "dev", "test"))


def test_tags_without_entities_are_scored_by_accuracy(tmp_path, tokenizer):
    config = make_config(tmp_path, "the DT O\nking NN O\n", dev="king NN O\n")
    config.data.tag_column, config.data.scheme = 1, "none"
    task = tagging.get_task(config, tokenizer)
    assert (task.labels, task.metric) == (("DT", "NN"), "dev/accuracy")
    assert task.splits[0].score([np.eye(2)[[0, 1, 0]]]) == {"accuracy": 1}


def test_words_without_tags_are_predicted_but_not_scored(tmp_path, tokenizer):
    task = tagging.get_task(make_config(tmp_path, test="the\nking\n\nold\n"), tokenizer)
    (split,) = task.splits
    assert split.score is None
    split.write([np.eye(5)[[0, 1, 2, 0]], np.eye(5)[[0, 3, 0]]], tmp_path)
    assert (tmp_path / "test.txt").read_text() == "the B-LOC\nking I-LOC\n\nold B-PER\n\n"


def test_labels_can_be_given_without_training_data(tmp_path, tokenizer):
    config = make_config(tmp_path, dev=TRAIN, test="the\nking\n")
    config.data.train, config.data.labels = "", ("O,B-LOC,I-LOC,B-PER,I-PER",)
    task = tagging.get_task(config, tokenizer)
    assert not task.train and task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert [bool(split.score) for split in task.splits] == [True, False]


@pytest.mark.parametrize("tag_column", [-1, 2])
def test_a_test_file_with_fewer_columns_than_train_has_no_tags(tmp_path, tokenizer, tag_column):
    config = make_config(tmp_path, test="the DT\nking NN\n\nold JJ\n")
    config.data.tag_column = tag_column
    task = tagging.get_task(config, tokenizer)
    (split,) = task.splits
    assert split.score is None and split.features[0].label is None
    assert task.notes["test sentences without tags, so not scored"] == 2


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ({"train": "the O\nking\n"}, {}, "line 2: expected 2 columns, as in line 1, found 1: fix"),
        ({"train": "the X O\nking O\n"}, {}, "line 2: expected 3 columns, as in line 1, found 2"),
        ({}, {"tag_column": 3}, "train.txt, line 3: no column 3 (number of columns: 3): set"),
        ({"train": "the B-A\nking X-A\n"}, {}, "train.txt, line 2: tag 'X-A', expected O, or"),
        (
            {"train": "a B-A\nb O\nc I-A\n"},
            {},
            "(line 3: 'I-A' is not IOB2; line 1: 'B-A' is not IOB1",
        ),
        (
            {"train": "the S-A\nking B-A\nthe O\n"},
            {},
            "BIOES; line 1: 'S-A' is not BILOU)",
        ),
        ({"train": "the B-A\n\nking E-A\n"}, {}, "line 1: 'B-A' is not BIOES"),
        (
            {"dev": "the O\nking B-ORG\n"},
            {},
            "dev.txt, line 2: tag 'B-ORG' is not one of the labels",
        ),
        ({"dev": "a X O\nb X I-ORG\n"}, {}, "line 2: tag 'I-ORG', trained as 'B-ORG', is"),
        ({"train": "the\nking\n"}, {}, "has only words, but training needs tags"),
        ({"train": "the O\nking O\n"}, {}, "has a single tag, 'O': expected several in tag_column"),
        ({"train": "\n-DOCSTART- O\n"}, {}, "holds no words"),
        (
            {},
            {"scheme": "iob"},
            "config.data.scheme=iob: expected iob1, iob2, bioes to train",
        ),
        ({}, {"labels": ("O", "B-LOC")}, "line 4: tag 'I-LOC' is not one of the labels"),
        (
            {},
            {"labels": ("O", "B-A", "S-A")},
            "O, B-A, S-A are BIOES tags: set --config.data.scheme=bioes",
        ),
        ({"train": ""}, {"train": ""}, "no examples: set --config.data.train=FILE to train"),
    ],
)
def test_bad_input_raises_an_error_with_its_place(tmp_path, tokenizer, texts, settings, message):
    config = make_config(tmp_path, **texts)
    config.data.update(settings)
    with pytest.raises(ValueError) as error:
        tagging.get_task(config, tokenizer)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_split_words_returns_words_and_their_characters():
    text = "Dr. O'Brien's U.N. talks cost $3,000-5,000 (net)."
    same, spans = split_words(text)
    words = [text[slice(*span)] for span in spans]
    assert same == text
    assert " ".join(words) == "Dr . O'Brien 's U.N . talks cost $ 3,000-5,000 ( net ) ."
    joined, spans = split_words(["New", "York", "."])
    assert joined == "New York ."
    assert [joined[slice(*span)] for span in spans] == ["New", "York", "."]
    with pytest.raises(TypeError, match=r"a list of words, got \[1\]"):
        split_words([1])
