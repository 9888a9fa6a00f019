# ruff: noqa: RUF001 (articles use characters that look like ASCII ones)

import collections

import pytest

from bert_corpus import sentences
from bert_corpus.readers import Document
from bert_corpus.unclosed import repeated_characters
from bert_corpus.variants import resolve_variants
from bert_corpus.wikitext import article_passages, extract_passages

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
        ("A &amp;nbsp;b &ndash; c.", "A b – c."),
        (
            "An [[unclosed link and {{unclosed template.",
            "An [[unclosed link and {{unclosed template.",
        ),
    ],
)
def test_markup_inside_a_sentence(markup, passage):
    assert extract_passages(markup) == [passage]


FILLINGS = [" " * 200_000, "(" * 20_000, ", " * 50_000, "[[" * 30_000]
FILLINGS += [
    "[[a:b]] " * 20_000 + "c",
    "\n" + "[[a:" * 20_000,
    "\u200b\1" * 100_000,
    "\u200b" * 200_000,
]


@pytest.mark.parametrize("filling", FILLINGS)
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


@pytest.mark.parametrize(
    ("markup", "passage"),
    [
        ("Born 1848{{snd}}27 June, 1934.", "Born 1848 – 27 June, 1934."),
        ("It is 12{{nbsp}}km, or 7{{Spaces|2}}miles, away.", "It is 12 km, or 7 miles, away."),
        ("Of 1775{{ndash}}83, it is.", "Of 1775–83, it is."),
        ("An order{{mdashb}}a good one{{spaced em dash}}came.", "An order—a good one — came."),
        ("The ''Eagle''{{'s}} crew and O{{'}}Brien.", "The Eagle's crew and O'Brien."),
        ("It has no breaks{{clarify|why?}}in it.", "It has no breaks in it."),
        (
            "It has no breaks<ref>A</ref>in it.<ref name=a />It is old.",
            "It has no breaks in it. It is old.",
        ),
        ("A [[File:A.png|20px]] b[[File:B.png|20px]]c{{x}}{{y}}d.", "A b c d."),
        ("See <math>x</math>now<code>y</code>here.", "See now here."),
        ("He said:<blockquote>Go away.</blockquote>They went.", "He said: Go away. They went."),
        ("One<div>two</div>three four.", "One two three four."),
        # MediaWiki shows nothing at these places, not even a space.
        (
            "Mathe<!-- hidden -->matics and a [[dog]]<nowiki/>s<wbr>tail.",
            "Mathematics and a dogstail.",
        ),
        ("It (A{{x}}) is; {{x}}b, “{{x}}c”.", "It (A) is; b, “c”."),
        ("Dis{{shy}}cover the A{{music|flat}} key, 5{{times}}5.", "Discover the A♭ key, 5×5."),
        ("東京{{要出典}}は<ref>注</ref>日本の首都である。", "東京は日本の首都である。"),
        ("東京（{{読み}}、1950年）は（{{読み}}）首都である。", "東京（1950年）は首都である。"),
    ],
)
def test_dropped_markup_never_joins_words(markup, passage):
    assert extract_passages(markup) == [passage]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("-{zh-hans:计算机;zh-hant:電腦}-好", "计算机好"),
        ("-{zh-tw:軟體; zh-cn:软件;}-好", "软件好"),
        ("-{zh-tw:軟體;zh-hk:軟件}-好", "軟體好"),
        ("-{不转换}-", "不转换"),
        ("-{A|zh-cn:大;zh-tw:小}-", "大"),
        ("-{H|zh-cn:大;zh-tw:小;}-文", "文"),
        ("-{T|zh-cn:大;zh-tw:小;}-文", "文"),
        ("-{-|zh-cn:大;zh-tw:小;}-文", "文"),
        ("-{R|zh-cn:大}-", "zh-cn:大"),
        ("-{zh-hans;zh-hant|文}-", "文"),
        ("-{A;H|zh-cn:大;zh-tw:小}-文", "文"),
        ("-{H|巨集=>zh-cn:宏;}-文", "文"),
        ("-{zh-hans:外-{内}-外;zh-hant:x}-", "外内外"),
        ("-{zh-hans:[[甲|乙]];zh-hant:[[丙|丁]]}-", "[[甲|乙]]"),
        ("-{zh-hans:&lt;甲;zh-hant:乙}-", "&lt;甲"),
        ("-{zh-hans:{{nowrap|甲}};zh-hant:乙}-", "{{nowrap|甲}}"),
        ("-{{{nowrap|甲}}}-", "{{nowrap|甲}}"),
        ("-{sr-ec:Љ;sr-el:Lj}-", "Љ"),
        ("post-{{convert|5|km}}-pre", "post-{{convert|5|km}}-pre"),
        ("-{未闭 and }- }-", "未闭 and  }-"),
        ("-{未闭", "-{未闭"),
    ],
)
def test_one_variant_of_a_text_is_kept(markup, text):
    assert resolve_variants(markup) == text


@pytest.mark.parametrize(
    "paragraph",
    [
        "東京は日本の首都であり、世界でも有数の大都市である。",
        "彼は「東京は日本の首都である。」",
        "北京是中华人民共和国的首都，位于华北平原的北部，有三千多年的历史",
        "กรุงเทพมหานครเป็นเมืองหลวงและนครที่มีประชากรมากที่สุดของประเทศไทย",
        "ភ្នំពេញជារាជធានីនៃព្រះរាជាណាចក្រកម្ពុជា។",
        "နေပြည်တော်သည်မြန်မာနိုင်ငံ၏မြို့တော်ဖြစ်သည်။",
        "ວຽງຈັນເປັນນະຄອນຫຼວງຂອງສາທາລະນະລັດປະຊາທິປະໄຕປະຊາຊົນລາວ",
        "ལྷ་ས་ནི་བོད་ཀྱི་རྒྱལ་ས་ཡིན།",
        "서울은 대한민국의 수도이다.",
    ],
)
def test_articles_in_languages_without_spaces_are_kept(paragraph):
    skipped = collections.Counter()
    assert extract_passages(f"{paragraph}\n\n東京の夜景\n\n[[分類:都市|東京]]", skipped) == [
        paragraph
    ]
    assert article_passages(f"{paragraph}\n\n歴史\n\n") == [paragraph]
    assert skipped == {"fragments": 1, "words_in_fragments": 3}


UNCLOSED = ["{{a|", "{{a|b=", "{{{a|", "[[a|", "<ref>", "<b ", "<ref name=", "x<y and ", "<!--"]
UNCLOSED += ["{|\n|", "\n{|\n|{{a|", "[http://a ", "{{a|<ref>}}</ref>", "{{a|[[b|}}]]", "<math>"]


@pytest.mark.parametrize("opening", UNCLOSED)
def test_page_of_unclosed_markup_is_counted_instead_of_parsed(monkeypatch, opening):
    monkeypatch.delattr("mwparserfromhell.parse")  # It would take seconds to hours.
    skipped = collections.Counter()
    document = Document("A page. " + opening * (100_000 // len(opening)), "wikitext")
    with pytest.raises(sentences.UNREADABLE, match="never closed"):
        sentences.split_sentences(document, skipped=skipped)
    assert skipped == {"pages_of_unclosed_markup": 1}


def test_closed_markup_is_parsed_however_much_there_is():
    markup = "{{a|[[b|c]]<ref name=d>{{{e|}}}</ref>}}<br><!-- <b> {{ -->[[f]] [http://g h] {{i|}}\n"
    markup += (
        "<math>{{x}^2}</math><nowiki>{{ [[</nowiki><ref name=j /><div><p>k</div>\n{|\n| l\n|}\n"
    )
    assert repeated_characters(markup * 500) < len(markup) * 500
    assert extract_passages(f"A page. {markup * 500}")


def test_few_unclosed_templates_are_text():
    assert extract_passages("It is {{unclosed|here. " * 3)[0].count("{{unclosed|here.") == 3


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''1848'''{{xyz}}'''27 June''' was the day.", "1848 27 June was the day."),
        ("The ''Titanic''{{efn|x}}''Olympic'' was old.", "The Titanic Olympic was old."),
        ('He said "so"{{cn}}She did not.', 'He said "so" She did not.'),
    ],
)
def test_dropped_markup_beside_bold_or_quotes_never_joins_words(markup, text):
    assert extract_passages(markup) == [text]


@pytest.mark.parametrize("dropped", ["{{x}}", "<ref>a</ref>", "<ref name=a />", "[[File:A.png]]"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("नदी", "यमुना"),
        ("Cafe\u0301", "bar"),
        ("سلامُ", "علیکم"),
        ("தமிழ்", "நாடு"),
        ("יִ", "שְׂרָאֵל"),
        ("50%", "of"),
        ("50\xa0%", "of"),
        ("20°", "north"),
        ("5′ 4″", "tall"),
        ("100 €", "each"),
        ("100₹", "each"),
        ("Name™", "is"),
        ("the dogs'", "tails"),
        ("„Haus“", "und"),
        ("costs", "$50"),
        ("a\u200b", "b"),
        ("a", "\u200eb"),
        ("word…", "And"),
    ],
)
def test_dropped_markup_never_joins_words_of_any_script_or_sign(before, after, dropped):
    before, after = f"It is {before}", f"{after} that stands here."
    (passage,) = extract_passages(before + dropped + after)
    assert passage == f"{before} {after}".replace("\xa0", " ")


@pytest.mark.parametrize(
    ("markup", "passage"),
    [
        ("He paid £{{x}}50 to A/{{x}}B, non-{{x}}stop.", "He paid £50 to A/B, non-stop."),
        ("ក្រុង\u200b{{x}}\u200bភ្នំពេញ{{x}}ជារាជធានី។", "ក្រុង\u200b\u200bភ្នំពេញជារាជធានី។"),
        ("葛\U000e0100{{x}}城市は都市である。", "葛\U000e0100城市は都市である。"),
        ("နေ{{x}}ပြည်တော်သည်မြို့တော်ဖြစ်သည်။", "နေပြည်တော်သည်မြို့တော်ဖြစ်သည်။"),
    ],
)
def test_dropped_markup_leaves_no_space_where_no_words_would_be_joined(markup, passage):
    assert extract_passages(markup) == [passage]


@pytest.mark.parametrize(
    ("markup", "passage"),
    [
        ("A river ({{IPA|x}})is old.", "A river is old."),
        ("A river({{IPA|x}})is old.", "A river is old."),
        ("A river[{{x}}]is old.", "A river is old."),
        ("Cafe\u0301 ({{x}}; {{y}})is old.", "Cafe\u0301 is old."),
        ("版本Windows（{{x}}）XP是系统。", "版本Windows XP是系统。"),
        ("東京({{x}})は都市である。", "東京は都市である。"),
    ],
)
def test_brackets_that_dropped_markup_leaves_empty_never_join_words(markup, passage):
    assert extract_passages(markup) == [passage]


CATEGORIES = [
    "ចំណាត់ថ្នាក់ក្រុម:ទីក្រុង",
    "ကဏ္ဍ:မြို့များ",
    "श्रेणी:भारत के शहर",
    "பகுப்பு:நகரங்கள்",
    "বিষয়শ্রেণী:শহর",
    "વર્ગ:શહેર",
    "ප්\u200dරවර්ගය:නගර",
    "\u200eקטגוריה:ערים",
    "The\u0302\u0309 loa\u0323i:Thành phố",
    "หมวดหมู่:เมือง",
    "Kategorie:Stadt",
]


@pytest.mark.parametrize("title", CATEGORIES)
def test_categories_of_every_language_are_dropped_with_their_sort_keys(title):
    text = "Das ist ein Satz über eine Stadt."
    assert extract_passages(f"{text} [[{title}]]") == [text]
    links = f"[[{title}]]\n[[{title}|*]] [[{title}| Eine Stadt.]]"
    assert extract_passages(f"{text}\n{links}\n") == [text]
    assert extract_passages(f"{text} Siehe [[:{title}]].") == [f"{text} Siehe {title}."]


def test_links_within_a_line_keep_their_text():
    markup = "He saw [[wikt:dog|dogs]] and\n[[Star Trek: Picard|Picard]]\non [[Star Trek: Picard]]."
    assert extract_passages(markup) == ["He saw dogs and Picard on Star Trek: Picard."]


@pytest.mark.parametrize(
    ("markup", "passage"),
    [
        ("Born 1848{{Template:snd}}27 June, 1934.", "Born 1848 – 27 June, 1934."),
        ("It is 12{{ template: Nbsp }}km away.", "It is 12 km away."),
        ("It is {{template:Convert|5|km|mi}} away.", "It is 5 km away."),
        ("It is {{Template:lang|fr|Paris}}.", "It is Paris."),
    ],
)
def test_templates_may_be_named_with_their_namespace(markup, passage):
    assert extract_passages(markup) == [passage]
