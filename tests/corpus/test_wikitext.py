import collections

import pytest

from bert_corpus import sentences
from bert_corpus.readers import Document
from bert_corpus.wikitext import extract_passages

ARTICLE = """{{Infobox person|name=Ada|born={{birth date|1815|12|10}}}}
[[File:Ada.jpg|thumb|right|A portrait, with a [[link]] inside.]]
'''Ada Lovelace''' ({{IPAc-en|x}}; born 1815) was an ''English''&nbsp;[[mathematician|student of
numbers]].<ref name="a">Someone, 1980. {{cite book|title=Book}}</ref> She lived {{convert|5|km|mi}}
from {{lang|fr|Paris}}.

== Heading ==
{| class="wikitable"
! Year !! Work
|-
| 1843 || Notes on the engine.
|}
* A list item.
# A numbered item.
: An indented line.
; A term
A second<!-- hidden --> passage, at [http://example.org the site].<ref>Again.</ref>

<gallery>
File:One.jpg|One.
</gallery>
A third one.<br>Another [[Category:People]] line. [[fr:Ada Lovelace]]

A fragment without an end
{{DEFAULTSORT:Lovelace}}
[[Category:Mathematicians|Lovelace]]
"""


def test_passages_are_kept_and_everything_else_is_dropped():
    assert extract_passages(ARTICLE) == [
        "Ada Lovelace (born 1815) was an English student of numbers. She lived 5 km from Paris.",
        "A second passage, at the site.",
        "A third one.",
        "Another line.",
    ]


def test_only_short_fragments_are_dropped_and_their_words_are_counted():
    skipped = collections.Counter()
    passages = [
        "He wrote that a long passage may well end with what somebody said:",
        "It ends with its source. (Quoted in a book)",
        "See also the others",
    ]
    assert extract_passages("\n\n".join(passages), skipped) == passages[:1]
    assert skipped == {"fragments": 2, "words_in_fragments": 9 + 4}


@pytest.mark.parametrize(
    ("markup", "passage"),
    [
        ("Asphalt ({{IPA|x}}), is black.", "Asphalt, is black."),
        ("Rome ({{lang-la|Roma}}; {{IPA|x}}) is old.", "Rome (Roma) is old."),
        ("It is {{convert|5|to|10|km|mi}} long.", "It is 5 to 10 km long."),
        ("{{As of|2015}}, it stands.", "As of 2015, it stands."),
        ("H<sub>2</sub>O is ''wet''.", "H2O is wet."),
        (
            "The [[:Category:Dogs|dogs]] and [[Star Trek: Picard]].",
            "The dogs and Star Trek: Picard.",
        ),
        ("A &amp;nbsp;b &ndash; c.", "A b – c."),  # noqa: RUF001
        (
            "An [[unclosed link and {{unclosed template.",
            "An [[unclosed link and {{unclosed template.",
        ),
    ],
)
def test_markup_inside_a_sentence(markup, passage):
    assert extract_passages(markup) == [passage]


@pytest.mark.parametrize("filling", [" " * 200_000, "(" * 20_000, ", " * 50_000, "[[" * 30_000])
def test_degenerate_pages_take_linear_time(filling):
    # Quadratic time would be minutes.
    extract_passages(f"A page. {filling} b.")


def test_unparsable_markup_raises_what_build_corpus_counts_as_unreadable(monkeypatch):
    def fail(*_):
        raise RecursionError("too deep")

    monkeypatch.setattr(sentences, "extract_passages", fail)
    with pytest.raises(sentences.UNREADABLE, match="too deep"):
        sentences.split_sentences(Document("{{", "wikitext"))


def test_free_text_is_split_into_sentences_across_lines():
    document = Document("Dr. Smith went\nhome. He\nslept well.\n")
    assert sentences.split_sentences(document) == ["Dr. Smith went home.", "He slept well."]


def test_lines_mode_keeps_one_sentence_per_line():
    document = Document("one. two\n three \n")
    assert sentences.split_sentences(document, "lines") == ["one. two", "three"]
