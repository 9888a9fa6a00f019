"""Entities and their scores; tests/parity compares them with seqeval."""

import pytest

from bert_jax.tasks.conll import convert_tags
from bert_jax.tasks.tagging_scores import (
    count_all_entities,
    entity_scores,
    find_entities,
    find_strict_entities,
    type_table,
)

# Tags, the entities that conlleval finds, and those that are strictly IOB2.
EDGE_CASES = [
    ("", [], []),
    ("O O", [], []),
    ("B-A I-A O B-B", ["A02", "B34"], ["A02", "B34"]),
    ("I-A I-A O I-B", ["A02", "B34"], []),  # Begins with I.
    ("B-A I-B I-B", ["A01", "B13"], ["A01"]),  # Changes its type inside.
    ("O I-A B-A", ["A12", "A23"], ["A23"]),
    ("B-A B-A I-A", ["A01", "A13"], ["A01", "A13"]),
    ("B-A O I-A", ["A01", "A23"], ["A01"]),
    ("B-X-Y I-X-Y", ["X-Y02"], ["X-Y02"]),
]


def entity_strings(entities):
    return [f"{entity.type}{entity.start}{entity.end}" for entity in entities]


@pytest.mark.parametrize(("tags", "loose", "strict"), EDGE_CASES)
def test_invalid_sequences_are_read_like_conlleval_unless_strict(tags, loose, strict):
    assert entity_strings(find_entities(tags.split())) == loose
    assert entity_strings(find_strict_entities(tags.split())) == strict


@pytest.mark.parametrize(
    ("scheme", "tags", "strict"),
    [
        ("bioes", "S-A B-A I-A E-A B-A E-A", ["A01", "A14", "A46"]),
        ("bioes", "B-A I-A O E-A S-B I-B", ["B45"]),
        ("bioes", "B-A E-B I-A E-A", []),
        ("iob1", "I-A I-A B-A I-B", ["A02", "A23", "B34"]),
        ("iob1", "B-A O B-A I-A", ["A34"]),
        ("iob1", "I-A B-A B-B", ["A01"]),
    ],
)
def test_strict_entities_of_each_scheme(scheme, tags, strict):
    assert entity_strings(find_strict_entities(tags.split(), scheme)) == strict


@pytest.mark.parametrize("scheme", ["iob1", "iob2", "bioes", "bilou"])
def test_conversion_to_any_scheme_keeps_the_entities(scheme):
    for tags, loose, _ in EDGE_CASES:
        converted = convert_tags(tags.split(), scheme)
        assert entity_strings(find_entities(converted)) == loose
        assert entity_strings(find_strict_entities(converted, scheme)) == loose
        if scheme == "bilou":  # The same as BIOES by other letters.
            letters = str.maketrans("LU", "ES")
            assert [tag.translate(letters) for tag in converted] == convert_tags(converted, "bioes")


def test_scores_count_whole_entities_of_the_correct_type():
    expected = [["B-A", "I-A", "O", "B-B"], ["B-A"]]
    predicted = [["B-A", "O", "O", "B-B"], ["B-B"]]
    scores = entity_scores(predicted, expected)
    assert scores["precision"] == pytest.approx(1 / 3)
    assert scores["recall"] == pytest.approx(1 / 3)
    assert scores["f1"] == pytest.approx(1 / 3)
    assert (scores["f1/A"], scores["precision/B"], scores["recall/B"]) == (0, 0.5, 1)


def test_the_table_of_types_has_the_counts_and_scores_of_each():
    expected = [["B-A", "I-A", "O", "B-B"], ["B-A"]]
    predicted = [["B-A", "I-A", "O", "B-C"], ["B-B"]]
    header, *rows = type_table(count_all_entities(predicted, expected, find_entities))
    assert header == ("type", "examples", "precision", "recall", "f1", "predicted", "correct")
    assert rows == [
        ("A", 2, 1.0, 0.5, 0.6667, 1, 1),
        ("B", 1, 0.0, 0.0, 0.0, 1, 0),
        ("C", 0, 0.0, 0.0, 0.0, 1, 0),
    ]


def test_no_entities_score_zero():
    assert entity_scores([["O"]], [["O"]]) == {"precision": 0, "recall": 0, "f1": 0}


def test_a_missing_tag_raises_a_clear_error():
    with pytest.raises(ValueError, match="a tag for each word; their numbers are 2 and 1"):
        entity_scores([["O"]], [["O", "O"]])
