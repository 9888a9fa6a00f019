"""CoNLL files, their features, and the files of predictions."""

import itertools
import json
import random

import numpy as np
import pytest

from bert_jax.configs.finetune import conll2003
from bert_jax.configs.finetune import tagging as tagging_config
from bert_jax.data.features import NO_LABEL
from bert_jax.tasks import tagging
from bert_jax.tasks.conll import Sentence, find_scheme, read_sentences
from bert_jax.tasks.tagging import describe_texts, text_features
from bert_jax.tasks.words import split_words
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, train_bpe, write_vocabulary

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
    blocks = text.strip("\n").split("\n\n")
    assert split.counts == {"sentences": sum("-DOCSTART-" not in block for block in blocks)}
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


def test_byte_level_pieces_predict_each_word_at_its_first_piece(tmp_path):
    tokenizer = train_bpe(tmp_path, "the old boats of Zürich and the new boats\n" * 9)
    words = ["Zürich", ",", "😀", "boats", "\u200b"]
    sentence = Sentence(words, [], ["O", "X", "X", "O", "X"], 0)
    (feature,), (positions,), _ = tagging.tagging_features(
        [sentence], ("O", "X"), tokenizer, 64, document_context=False
    )
    (tokens,) = feature.sequences
    # As transformers reads words: each follows a space, the first one too.
    assert tokens.tolist() == [
        tokenizer.cls_id,
        *tokenizer.encode("".join(f" {word}" for word in words)),
        tokenizer.sep_id,
    ]
    assert tokenizer.word_start[tokens[positions]].all()
    assert np.flatnonzero(tokenizer.word_start[tokens]).tolist() == [0, *positions, len(tokens) - 1]
    assert feature.label[positions].tolist() == [0, 1, 1, 0, 1]
    assert feature.second_starts == (len(tokens),)


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
    assert find_scheme("train", read_sentences(config.data.train)) == (scheme, 0)
    task = tagging.get_task(config, tokenizer)
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert trained_tags(task) == ["B-LOC", "I-LOC", "O", "B-PER", "B-PER", "O"]
    config.data.scheme = scheme
    assert trained_tags(tagging.get_task(config, tokenizer)) == tags.split()


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_comments_and_document_lines_of_every_kind_are_not_words(tmp_path, separator):
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


@pytest.mark.parametrize(
    ("lines", "words", "unsure"),
    [
        # As many fields as the columns: a comment, unless its last one is a tag.
        ("# newpar|Rome PROPN|is VERB||# newpar|Bob PROPN|runs VERB", "Rome is Bob runs", 2),
        ("# newpar|# a comment|the DET|king NOUN", "the king", 1),
        ("## newpar|Rome PROPN|is VERB||  # newpar|Bob PROPN|runs VERB", "Rome is Bob runs", 2),
        ("# DET|the DET|king NOUN", "# the king", 0),
        ("the DET||# DET", "the #", 0),
        ("king NOUN|# SYM|| # SYM|the DET", "king # # the", 0),
        ("the O||# B-MISC|king O", "the # king", 0),
        ("king NOUN|# newpar|the DET", "king # the", 0),  # CoNLL-U has none after a word.
        ("# sent_id = 1|the x DET O|king x NOUN O||# sent_id = O|old x ADJ O", "the king old", 2),
        ("# a SYM O|the x DET O|king x NOUN O", "# the king", 0),
        ("# text = =|the = = O|# = = O||# = = O|king x NOUN O", "the # # king", 1),
        ("#|the||#", "# the #", 0),  # A single column.
        ("# newpar|the\tO|#\tnewpar||#\tnewpar|king\tO", "the # # king", 0),
        ("# a\tnewpar|# b\tO|# c\tO|the\tO", "# b|# c|the", 1),
    ],
)
def test_a_comment_is_no_word_and_a_word_no_comment(tmp_path, caplog, lines, words, unsure):
    path = tmp_path / "train.txt"
    sentences = write_and_read(path, lines.replace("|", "\n") + "\n")
    expected = words.split("|" if "|" in words else " ")
    assert [word for sentence in sentences for word in sentence.words] == expected
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == bool(unsure)
    if unsure:
        assert f"train.txt: {unsure} lines that begin with # are read as comments" in warnings[0]


def test_words_that_may_be_comments_without_a_space_are_named(tmp_path, caplog):
    path = tmp_path / "train.txt"
    sentences = write_and_read(path, "#Rome B-LOC\nis O\n\n#sent 1\nthe O\n\n#old O\n")
    assert [each.words for each in sentences] == [["#Rome", "is"], ["#sent", "the"], ["#old"]]
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "1 lines that begin with # are read as words" in warning and "line 4" in warning


def test_the_tags_of_another_file_show_that_a_mark_is_a_word(tmp_path):
    path = tmp_path / "dev.txt"
    path.write_text("# SYM\nthe DET\n")
    assert read_sentences(path)[0].words == ["the"]
    assert read_sentences(path, known_tags=("DET", "SYM"))[0].words == ["#", "the"]


@pytest.mark.parametrize("num_columns", [2, 3, 4])
@pytest.mark.parametrize("separator", [" ", "\t"])
def test_comments_among_random_sentences_change_no_word(tmp_path, num_columns, separator):
    """The marks of the words have tags of other words; comments have any number of fields."""
    rng, path = random.Random(num_columns), tmp_path / "train.txt"
    for _ in range(50):
        expected = [
            [rng.choice(["#", "#1", "##", "king", "1", "="]) for _ in range(rng.randint(1, 5))]
            for _ in range(8)
        ] + [["king", "king", "old"]]
        lines = []
        for words in expected:
            for _ in range(rng.randint(0, 2)):
                fields = rng.choices(["newpar", "text", "=", "#", "12", "id"], k=rng.randint(0, 4))
                lines.append(" ".join(["#", *fields, "no_tag"]))
            tags = "XYZ" if words is expected[-1] else rng.choices("XYZ", k=len(words))
            for word, tag in zip(words, tags, strict=True):
                lines.append(separator.join([word, *["_"] * (num_columns - 2), tag]))
            lines.append("")
        path.write_text("\n".join(lines))
        assert [sentence.words for sentence in read_sentences(path)] == expected


NER = {"id": "0", "tokens": ["the", "king", "Bob"], "ner_tags": [0, 0, 1]}


def test_tags_that_are_numbers_have_the_names_of_their_order(tmp_path, tokenizer, caplog):
    """As in datasets of the Hugging Face Hub."""
    config = make_config(tmp_path)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(NER) + "\n" + json.dumps(NER | {"ner_tags": [0, 2, 0]}) + "\n")
    config.data.train = config.data.dev = str(path)
    with pytest.raises(ValueError, match=r"train\.jsonl: the tags are numbers without names"):
        tagging.get_task(config, tokenizer)
    config.data.labels = ("O,B-PER,B-LOC,I-LOC",)
    with caplog.at_level("INFO"):
        task = tagging.get_task(config, tokenizer)
    assert task.labels == ("O", "B-PER", "B-LOC", "I-LOC") and "read from 'ner_tags'" in caplog.text
    assert trained_tags(task) == ["O", "O", "B-PER", "O", "B-LOC", "O"]
    assert task.splits[0].score is not None
    path.write_text(json.dumps(NER | {"ner_tags": [0, 4, 0]}) + "\n")
    with pytest.raises(
        ValueError, match=r"line 1: 'ner_tags' has 4, but there are only 4 names of"
    ):
        tagging.get_task(config, tokenizer)


def test_numbers_may_be_tags_themselves(tmp_path, tokenizer):
    config = make_config(tmp_path)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(NER | {"ner_tags": [10, 9, 10]}) + "\n")
    config.data.train, config.data.scheme = str(path), "none"
    task = tagging.get_task(config, tokenizer)
    assert task.labels == ("9", "10") and trained_tags(task) == ["10", "9", "10"]
    config.data.labels = ("9", "10", "11")
    assert trained_tags(tagging.get_task(config, tokenizer)) == ["10", "9", "10"]


def test_one_of_several_kinds_of_tags_is_chosen(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(NER | {"pos_tags": ["D", "N", "N"]}) + "\n")
    with pytest.raises(ValueError, match=r"several kinds of tags, 'ner_tags', 'pos_tags'"):
        read_sentences(path)
    assert read_sentences(path, tags_key="pos_tags")[0].tags == ["D", "N", "N"]
    assert read_sentences(path, tags_key="ner_tags")[0].tags == ["0", "0", "1"]


def test_words_and_parts_of_speech_of_conllu_are_syntactic_words(tmp_path):
    """Of "vámonos al mar" in the specification of CoNLL-U; and of an empty node."""
    rows = ["1-2 vámonos _ _", "1 vamos ir VERB", "2 nos nosotros PRON", "2.1 e _ _"]
    rows += ["3-4 al _ _", "3 a a ADP", "4 el el DET", "5 mar mar NOUN"]
    text = "# text = vámonos al mar\n"
    text += "".join("\t".join([*row.split(), *"______"]) + "\n" for row in rows)
    (tmp_path / "train.conllu").write_text(text)
    (sentence,) = read_sentences(tmp_path / "train.conllu", word_column=1, tag_column=3)
    assert sentence.words == ["vamos", "nos", "a", "el", "mar"]
    assert sentence.tags == ["VERB", "PRON", "ADP", "DET", "NOUN"]


def write_and_read(path, text, **columns):
    path.write_text(text)
    return read_sentences(path, **columns)


def test_only_tabs_separate_the_columns_of_a_line_that_has_one(tmp_path):
    text = "New York\tB-LOC\nin  spring\tO \n\u00a0\tO\t\n\nSan Jose \t B-LOC\t \r\n \t\nby\tO\n"
    sentences = write_and_read(tmp_path / "train.txt", text)
    assert [each.words for each in sentences] == [
        ["New York", "in  spring", "\u00a0"],
        ["San Jose"],
        ["by"],
    ]
    assert [each.tags for each in sentences] == [["B-LOC", "O", "O"], ["B-LOC"], ["O"]]
    assert sentences[1].lines == [5]


def test_an_empty_column_is_one_where_tabs_separate(tmp_path):
    (sentence,) = write_and_read(tmp_path / "train.txt", "New York\t\tB-LOC\nof\tIN\tO\n")
    assert (sentence.words, sentence.tags) == (["New York", "of"], ["B-LOC", "O"])


def test_lines_with_spaces_between_those_with_tabs_are_read_and_reported(tmp_path, caplog):
    text = "New York\tB-LOC\nin O\nspring\tO\n"
    (sentence,) = write_and_read(tmp_path / "train.txt", text)
    assert sentence.words == ["New York", "in", "spring"] and sentence.tags[1:] == ["O", "O"]
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "train.txt: columns are separated by tabs in line 1 and by spaces in 1 lines: 2"
    )


def test_comments_of_a_file_with_tabs_need_no_space(tmp_path):
    text = "#sent_id = 1\n# text = New\tYork is\tbig\n#1\tO\nNew York\tB-LOC\n\n#\tO\n"
    sentences = write_and_read(tmp_path / "train.txt", text)
    assert [each.words for each in sentences] == [["#1", "New York"], ["#"]]


def test_words_of_conllu_may_contain_spaces(tmp_path):
    rows = ["1\tIl\til\tPRON", "2-3\tdu coup\t_\t_", "2\tdu coup\tdu coup\tADV", "2.1\ta b\t_\t_"]
    text = "# text = Il du coup\n" + "".join(
        f"{row}{chr(9)}{chr(9).join('______')}\n" for row in rows
    )
    for word_column, tag_column in ((1, 3), (2, 3), (-9, -7)):
        columns = {"word_column": word_column, "tag_column": tag_column}
        (sentence,) = write_and_read(tmp_path / "train.conllu", text, **columns)
        assert sentence.words[1] == "du coup" and sentence.tags == ["PRON", "ADV"]


@pytest.mark.parametrize("words", [["New York", "of"], ["new", "old", "\u00a0", "#"]])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_predictions_of_words_with_spaces_are_read_back(tmp_path, tokenizer, words, suffix):
    config = make_config(tmp_path)
    path = tmp_path / f"own.{suffix}"
    path.write_text("".join(f"{word}\tB-LOC\n" for word in words))
    if suffix == "jsonl":
        path.write_text(json.dumps({"tokens": words, "tags": ["B-LOC"] * len(words)}) + "\n")
    config.data.dev = str(path)
    task = tagging.get_task(config, tokenizer)
    (split,) = task.splits
    (sentence,) = read_sentences(path)
    assert sentence.words == words
    split.write([np.eye(5)[[0] * (len(words) + 2)]], tmp_path)
    (found,) = read_sentences(tmp_path / "dev.txt", tag_column=1)
    assert found.words == words and found.tags == ["B-LOC"] * len(words)
    assert found.columns == 3
    (predicted,) = read_sentences(tmp_path / "dev.txt")
    assert predicted.tags == ["O"] * len(words)


@pytest.mark.parametrize("token", [" a", "a\tb", "a\n", "a\rb", 1])
def test_tokens_that_columns_cannot_hold_are_refused(tmp_path, token):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"tokens": ["the", token]}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: expected 'tokens'"):
        read_sentences(path)


@pytest.mark.parametrize(
    ("tags", "scheme", "repaired", "count"),
    [
        ("B-A O I-B B-C O B-C I-C", "IOB2", "B-A O B-B B-C O B-C I-C", 1),
        ("B-A I-B I-B O I-A B-A I-A", "IOB2", "B-A B-B I-B O B-A B-A I-A", 2),
        ("I-A B-B I-B O I-A B-A I-A", "IOB2", "B-A B-B I-B O B-A B-A I-A", 2),  # Not IOB1: B-B.
        ("B-A E-A I-A O S-B B-B E-B", "BIOES", "B-A I-A B-A O B-B B-B I-B", 1),
        ("B-A L-A L-A U-A U-B B-B O", "BILOU", "B-A I-A B-A B-A B-B B-B O", 2),
    ],
)
def test_repaired_tags_are_read_like_conlleval_and_counted(
    tmp_path, tokenizer, caplog, tags, scheme, repaired, count
):
    text = "".join(f"the {tag}\n" for tag in tags.split())
    config = make_config(tmp_path, text, dev=text)
    with pytest.raises(ValueError, match=rf"{count} of 7 tags are not {scheme} \(line"):
        tagging.get_task(config, tokenizer)
    config.data.repair_tags = True
    task = tagging.get_task(config, tokenizer)
    assert trained_tags(task) == repaired.split()
    assert task.notes["train tags repaired"] == task.notes["dev tags repaired"] == count
    assert task.notes[f"train sentences in {scheme}"] == 1
    assert f"{count} of 7 tags are not {scheme} (line" in caplog.text
    # The repaired tags are the expected ones of the scores.
    outputs = [np.eye(len(task.labels))[np.maximum(task.train[0].label, 0)]]
    assert task.splits[0].score(outputs)["strict_f1"] == 1


def test_runs_of_plain_tags_are_entities(tmp_path, tokenizer):
    text = "the PER\nking PER\nof O\nold LOC\nriver PER\n"
    config = make_config(tmp_path, text, dev=text)
    config.data.scheme = "io"
    task = tagging.get_task(config, tokenizer)
    assert (task.labels, task.metric) == (("O", "LOC", "PER"), "dev/f1")
    assert trained_tags(task) == ["PER", "PER", "O", "LOC", "PER"]
    assert task.notes["train sentences in IO"] == 1
    (split,) = task.splits
    predicted = np.eye(3)[[0, 2, 2, 0, 1, 1, 0]]  # The last word is a LOC, as the one before.
    scores = split.score([predicted])
    assert scores["f1"] == scores["strict_f1"] == pytest.approx(2 / 5)
    assert scores["f1/PER"] == pytest.approx(2 / 3) and scores["accuracy"] == 0.8
    split.write([predicted], tmp_path)
    written = read_sentences(tmp_path / "dev.txt")[0].tags  # In IOB2, which conlleval knows.
    assert written == ["B-PER", "I-PER", "O", "B-LOC", "I-LOC"]
    table = [line.split("\t") for line in (tmp_path / "dev_types.tsv").read_text().splitlines()]
    assert [row[:2] + row[5:] for row in table[1:]] == [
        ["LOC", "1", "1", "0"],
        ["PER", "2", "1", "1"],
    ]


def test_the_table_of_types_has_each_tag_that_marks_no_entity(tmp_path, tokenizer):
    text = "the DET\nking NOUN\nriver NOUN\n"
    config = make_config(tmp_path, text, dev=text, test="the\nking\n")
    config.data.scheme = "none"
    task = tagging.get_task(config, tokenizer)
    for split in task.splits:
        split.write([np.eye(2)[[0, 0, 1, 0, 0]][: len(split.features[0].sequences[0])]], tmp_path)
    lines = (tmp_path / "dev_types.tsv").read_text().splitlines()
    assert lines[1:] == ["DET\t1\t0.5\t1.0\t0.6667\t2\t1", "NOUN\t2\t1.0\t0.5\t0.6667\t1\t1"]
    assert not (tmp_path / "test_types.tsv").exists()


def test_adjacent_entities_that_plain_tags_join_are_counted(tmp_path, tokenizer):
    config = make_config(tmp_path)
    config.data.scheme = "io"
    task = tagging.get_task(config, tokenizer)
    assert trained_tags(task) == ["LOC", "LOC", "O", "PER", "PER", "O"]
    count = task.notes["train entities joined to an adjacent one, as IO cannot separate them"]
    assert count == 1


@pytest.mark.parametrize(
    ("labels", "scheme", "entities"),
    [
        (["O", "PER", "LOC"], None, ["PER the king", "LOC river", "PER the"]),
        (["O", "PER", "LOC"], "io", ["PER the king", "LOC river", "PER the"]),
        (["O", "PER", "LOC"], "none", []),
        (["O", "E-mail", "PER"], None, ["E-mail the king", "PER river", "E-mail the"]),
        (["O", "B-PER", "I-PER"], None, ["PER the", "PER king river", "PER the"]),
        (["O", "B-PER", "X"], None, ["PER the", "PER king", "X river", "PER the"]),
        (["PRON", "NOUN", "VERB"], None, ["NOUN the king", "VERB river", "PRON of", "NOUN the"]),
    ],
)
def test_tags_of_a_text_mark_entities_with_and_without_prefixes(
    tokenizer, labels, scheme, entities
):
    text = split_words("the king river of the")
    _, positions = text_features([text], None, tokenizer, 32)
    outputs = [np.eye(3)[[0, 1, 1, 2, 0, 1, 0]]]
    (found,) = describe_texts([text], positions, outputs, labels, scheme)
    assert [f"{entity.type} {entity.text}" for entity in found.entities] == entities


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


def test_own_data_never_fall_back_to_conll_2003():
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
        ({"train": "the O\nking\n"}, {}, "line 2: expected 2 columns, as in line 1, found 1"),
        ({"train": "the X O\nking O\n"}, {}, "line 2: expected 3 columns, as in line 1, found 2"),
        ({}, {"tag_column": 3}, "train.txt, line 3: no column 3 (number of columns: 3)"),
        ({"train": "the B-A\nking X-A\n"}, {}, "train.txt, line 2: tag 'X-A'"),
        (
            {"train": "a B-A\nb O\nc I-A\n"},
            {},
            "train.txt: 1 of 3 tags are not IOB2 (line 3: 'I-A'), 1 not IOB1, 2 not BIOES, 2 not "
            "BILOU: use one scheme in the whole file, or set config.data.repair_tags=True",
        ),
        (
            {"train": "the S-A\nking B-A\nthe S-A\n"},
            {},
            "1 of 3 tags are not BIOES (line 2: 'B-A')",
        ),
        ({"train": "the B-A\n\nking E-A\n"}, {}, "1 of 2 tags are not IOB2 (line 3: 'E-A'), "),
        (
            {"train": "a B-A\n" + "a O\na I-A\n" * 7},
            {},
            "7 of 15 tags are not IOB2 (line 3: 'I-A', line 5: 'I-A', line 7: 'I-A', line 9: 'I-A',"
            " line 11: 'I-A' and 2 more), 1 not IOB1",
        ),
        ({"train": "a PER\nb O\nc LOC\n"}, {}, "train.txt: the tags LOC, O, PER have no prefixes"),
        ({"train": "a PER\nb O\nc B-PER\n"}, {}, "line 1: tag 'PER'"),
        ({"train": "a X-A\nb B-A\nc X-A\n"}, {}, "in other lines (number of such tags: 2)"),
        ({}, {"labels": ("O", "PER")}, "O, PER are plain tags"),
        ({}, {"labels": ("O", "B-PER"), "scheme": "io"}, "O, B-PER are tags with prefixes"),
        ({}, {"repair_tags": True, "scheme": "none"}, "set config.data.repair_tags=False: with"),
        ({"train": "the\tO\n\tO\n"}, {}, "train.txt, line 2: the word is empty"),
        ({"dev": "the\tO\n\tO\n"}, {}, "dev.txt, line 2: the word is empty"),
        ({"train": "a\tO\tX\nb\t\tX\n"}, {"tag_column": 1}, "line 2: column 1 is empty"),
        ({"train": "New York\tX\tO\nof\tO\n"}, {}, "line 2: expected 3 columns, as in line 1"),
        (
            {"dev": "the O\nking B-ORG\n"},
            {},
            "dev.txt, line 2: tag 'B-ORG' is not one of the labels",
        ),
        ({"dev": "a X O\nb X I-ORG\n"}, {}, "line 2: tag 'I-ORG', trained as 'B-ORG', is"),
        ({"train": "the\nking\n"}, {}, "has only words, but training needs tags"),
        ({"train": "the O\nking O\n"}, {}, "has a single tag, 'O'"),
        ({"train": "\n-DOCSTART- O\n"}, {}, "holds no words"),
        ({}, {"scheme": "iob"}, "config.data.scheme=iob"),
        ({}, {"labels": ("O", "B-LOC")}, "line 4: tag 'I-LOC' is not one of the labels"),
        ({}, {"labels": ("O", "B-A", "S-A")}, "O, B-A, S-A are BIOES tags"),
        ({"train": ""}, {"train": ""}, "no examples"),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I like Paris\u200b.", ["I", "like", "Paris", "."]),
        ("\u200b \u00ad\x00 \ufe0f\ue000\ufffd", []),
        ("\u200eParis\u200f, \u2068Rome\u2069\ufe0f", ["Paris", ",", "Rome"]),
        ("\ufeffParis\u034f\u3164 x", ["Paris", "x"]),
        ("a\u00adb e\u2060f", ["a\u00adb", "e\u2060f"]),
        ("\u0645\u06cc\u200c\u062e \u0995\u09cd\u200d\u09b7", None),  # Persian, Bengali
        ("नदी cafe\u0301 יִשְׂרָאֵל السَّلامُ தமிழ் ភ្នំពេញ", None),
        ("Paris\u200bRome", ["Paris", "Rome"]),
        ("Cafe\u0301's, cafe\u0301's\u0301", ["Cafe\u0301", "'s", ",", "cafe\u0301's\u0301"]),
        ("O'Brien's\u200b dog's\u00adx", ["O'Brien", "'s", "dog's\u00adx"]),
        ("नदी-यमुना ३,५१४", None),
        ("\u2764\ufe0f 1\ufe0f\u20e3 =\u0338 \u845b\U000e0100", None),
        ("\U0001f468\u200d\U0001f469", ["\U0001f468", "\U0001f469"]),
    ],
)
def test_words_hold_combining_marks_and_format_characters_only_inside(text, words):
    same, spans = split_words(text)
    assert same == text
    assert [text[start:end] for start, end in spans] == (text.split() if words is None else words)


def test_spans_of_a_random_text_are_ascending_and_leave_out_only_what_is_not_seen():
    rng = random.Random(0)
    unseen = set(" \n\u200b\u200d\u00ad\ufe0f\u3164\x00")
    characters = [*"ab's-.,1\u0301\u093f$", *sorted(unseen)]
    for _ in range(2000):
        text = "".join(rng.choices(characters, k=20))
        _, spans = split_words(text)
        bounds = [0, *itertools.chain(*spans), len(text)]
        assert bounds == sorted(bounds) and all(start < end for start, end in spans)
        for end, start in zip(bounds[::2], bounds[1::2], strict=True):
            assert unseen.issuperset(text[end:start])
        for start, end in spans:
            assert unseen.isdisjoint([text[start], text[end - 1]])


def test_a_long_run_of_format_characters_takes_linear_time():
    # Quadratic time would be minutes.
    for run in ("\u200d" * 100_000, "x" + "\u00ad" * 100_000, "'s" * 50_000, "x-" * 50_000):
        split_words(run)


def test_entity_ends_before_a_format_character(tokenizer):
    text = "the king\u200b ri\u00adver\u200b."
    labels = ["O", "B-PER", "I-PER"]
    _, positions = text_features([split_words(text)], None, tokenizer, 32)
    outputs = [np.eye(3)[[0, 0, 1, 2, 0, 0]]]
    (found,) = describe_texts([split_words(text)], positions, outputs, labels, None)
    assert [word.word for word in found.words] == ["the", "king", "ri\u00adver", "."]
    (entity,) = found.entities
    assert entity.text == text[entity.start : entity.end] == "king\u200b ri\u00adver"


def test_an_empty_sentence_of_jsonl_is_predicted_but_not_trained_on(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": ["the"]}\n{"tokens": []}\n{"tokens": ["of"]}\n')
    config = tagging_config.get_config()
    config.data.labels, config.data.test = ("O", "B-A", "I-A"), str(path)
    task = tagging.get_task(config, tokenizer)
    assert task.notes["test examples with an empty text"] == 1
    task.splits[0].write([np.eye(3)[[0, 1, 0]], np.eye(3)[[0, 0, 0]]], tmp_path)
    assert (tmp_path / "test.txt").read_text() == "the B-A\n\n\nof O\n\n"
    path.write_text('{"tokens": ["the"], "tags": ["B-A"]}\n{"tokens": [], "tags": []}\n')
    config.data.train = config.data.test
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: 'tokens' is empty"):
        tagging.get_task(config, tokenizer)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"tokens": ["the", "", "river"]}\n{"tokens": [null, " "]}\n'),
        ("a.txt", "the\tX\n\tX\nriver\tX\n\n\tX\n\tX\n"),
    ],
)
def test_an_empty_word_is_predicted_but_not_trained_on(name, text, tmp_path, tokenizer):
    path = tmp_path / name
    path.write_text(text)
    config = tagging_config.get_config()
    config.data.labels, config.data.test = ("O", "B-A", "I-A"), str(path)
    if name == "a.txt":  # Its column X are tags that are no labels: words alone are read.
        config.data.scheme, config.data.labels = "none", ("X", "Y")
    task = tagging.get_task(config, tokenizer)
    assert task.notes["test words that are empty, read as unknown"] == 3
    one, two = (feature.sequences[0].tolist() for feature in task.splits[0].features)
    assert one[2] == tokenizer.unk_id and two[1:-1] == [tokenizer.unk_id] * 2
    tags = np.eye(len(config.data.labels))
    task.splits[0].write([tags[[0] * len(one)], tags[[0] * len(two)]], tmp_path)
    lines = (tmp_path / "test.txt").read_text().split("\n")
    assert [line.split("\t")[0] for line in lines[:6]] == ["the", "", "river", "", "", ""]
    assert [sentence.words for sentence in read_sentences(tmp_path / "test.txt")] == [
        ["the", "", "river"],
        ["", ""],
    ]


def test_an_empty_word_of_jsonl_is_an_error_in_training(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": ["a", ""], "tags": ["O", "B-A"]}\n')
    config = tagging_config.get_config()
    config.data.train = str(path)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1, word 1: the word is empty"):
        tagging.get_task(config, tokenizer)


def test_the_numbers_of_conllu_are_not_read_as_words(tmp_path):
    (tmp_path / "a.conllu").write_text("1\tgo\tgo\tVERB" + "\t_" * 6 + "\n")
    with pytest.raises(ValueError, match=r"CoNLL-U numbers the words: .*word_column=1 \(and"):
        read_sentences(tmp_path / "a.conllu")


def test_a_tab_at_the_end_of_a_line_separates_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("in O\t\nthe B-LOC \n")
    (sentence,) = read_sentences(tmp_path / "a.txt")
    assert (sentence.words, sentence.tags) == (["in", "the"], ["O", "B-LOC"])


def test_keys_of_jsonl_that_are_not_used_are_named(tmp_path, tokenizer):
    """A list as long as the words, in a file without tags, may be the tags."""
    line = {"id": "7", "tokens": ["the", "river"], "ner_tags": ["O", "B-LOC"], "source": "web"}
    config = tagging_config.get_config()
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line | {"pos": [3, 1]}) + "\n")
        config.data[name] = str(tmp_path / f"{name}.jsonl")
    notes = tagging.get_task(config, tokenizer).notes
    unused = {name: count for name, count in notes.items() if "is not used" in name}
    assert unused == {
        f"{split} lines with {key!r}, which is not used": 1
        for split in ("train", "dev")
        for key in ("pos", "source")
    }
    line["labels"] = line.pop("ner_tags")
    (tmp_path / "dev.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(
        ValueError, match=r"dev\.jsonl, line 1: no 'tags', but 'labels' has a value"
    ):
        tagging.get_task(config, tokenizer)
    config.data.tags = "labels"
    (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n")
    assert tagging.get_task(config, tokenizer).splits[0].score
