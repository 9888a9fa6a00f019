"""Vocabularies hold what the text holds, or what is lost is said."""

import collections
import json
import random

import pytest
import tokenizers

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.inputs import find_inputs, split_into_units
from bert_corpus.vocabulary import text_of_units, train_vocabulary
from bert_jax.data.rows import Rows
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes

GERMAN = "Es ist schon spät. Das Wetter ist schön. Der Zug fahrt nicht, er fährt schnell.\n\n"


def write(tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    return [str(tmp_path / "text.txt")]


def test_lost_accents_are_counted_with_examples(tmp_path, capsys):
    inputs = write(tmp_path, GERMAN * 9 + "Schön schön.\n")
    content = train_vocabulary(inputs, "wordpiece", 200, True, num_processes=1)
    assert "schön".encode() not in content and b"schon\n" in content
    output = capsys.readouterr()
    share = (9 * 3 + 2) / (9 * 15 + 2)
    assert f"warning: {share:.2%} of the words have accents" in output.err
    assert "2 words become equal to others (schön and schon, fährt and fahrt)" in output.err
    assert "--nostrip_accents and --output=NAME.json" in output.err


@pytest.mark.parametrize(
    ("text", "lower_case", "strip_accents"),
    [(GERMAN, True, False), (GERMAN, False, None), ("Es ist so.\n", True, None)],
)
def test_no_note_where_no_accents_are_lost(tmp_path, capsys, text, lower_case, strip_accents):
    arguments = write(tmp_path, text * 9), "wordpiece", 200, lower_case
    train_vocabulary(*arguments, num_processes=1, strip_accents=strip_accents)
    output = capsys.readouterr()
    assert "accents" not in output.err + output.out


def test_few_accents_are_a_note(tmp_path, capsys):
    inputs = write(tmp_path, "The old town of the river is here.\n\n" * 99 + "A café.\n")
    train_vocabulary(inputs, "wordpiece", 200, True, num_processes=1)
    output = capsys.readouterr()
    assert "of the words have accents" in output.out and "warning" not in output.err


def test_characters_are_counted_as_if_all_text_were_stripped(tmp_path):
    rng = random.Random(0)
    parts = [
        *"abAB",
        "\u00e4",
        "\u00d6",
        "e\u0301",
        "\u037e",
        "\u0130",
        "\u00df",
        "\u6771",
        "\u304c",
    ]
    parts += [" ", ".", "\u0e01\u0e31", "\u1fef", "\uac00"]
    lines = ["".join(rng.choices(parts, k=30)) for _ in range(300)]
    ((unit,),) = split_into_units(find_inputs(write(tmp_path, "\n\n".join(lines))))
    sentences, counts = text_of_units([unit], True, True)
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    stripped = [normalizer.normalize_str(sentence) for sentence in sentences]
    words = [word for text in stripped for word, _ in splitter.pre_tokenize_str(text)]
    assert counts.words["all"] == len(words)
    assert counts.word_initial == collections.Counter(word[0] for word in words)
    assert counts.word_internal == collections.Counter(c for word in words for c in word[1:])


@pytest.fixture
def german(tmp_path):
    """A lower-cased tokenizer that keeps accents, and its text."""
    inputs = write(tmp_path, GERMAN * 9)
    content = train_vocabulary(inputs, "wordpiece", 200, True, 1, strip_accents=False)
    (tmp_path / "german.json").write_bytes(content)
    return load_tokenizer(tmp_path / "german.json")


def test_kept_accents_stay_in_tokenizer_corpus_and_export(tmp_path, german):
    assert german.lower_case and not german.strips_accents
    ids = german.encode_batch(["Schön", "schon", "SCHÖN", "scho\u0308n"])
    assert ids[0] == ids[2] != ids[1] and german.decode(ids[0]) == "schön"
    config = CorpusConfig(
        heldout_fraction=0, rows="full_sentences", language="de", drop_duplicates=False
    )
    arguments = str(tmp_path / "text.txt"), german, tmp_path / "corpus", config
    build_corpus(*arguments, num_processes=1)
    stored = Rows(tmp_path / "corpus", "train")
    assert stored.tokenizer.sha256 == german.sha256 and not stored.tokenizer.strips_accents
    assert "schön" in stored.tokenizer.decode(stored.read(0, 1)["tokens"][0].tolist())
    directory = tmp_path / "exported"
    directory.mkdir()
    for name, values in transformers_files(german.stored, 64).items():
        values = values if isinstance(values, str) else json.dumps(values)
        (directory / name).write_text(values)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["do_lower_case"] is True and config["strip_accents"] is False
    again = load_tokenizer(directory)
    assert again.encode_batch(["Schön, fährt spät"]) == german.encode_batch(["Schön, fährt spät"])


def test_accents_of_cased_text_can_be_stripped(tmp_path):
    arguments = write(tmp_path, GERMAN * 9), "wordpiece", 200, False, 1
    tokenizer = tokenizer_from_bytes(
        "wordpiece.json", train_vocabulary(*arguments, strip_accents=True)
    )
    assert tokenizer.strips_accents and not tokenizer.lower_case
    assert tokenizer.decode(tokenizer.encode("Das schöne Wetter")) != "das schone wetter"
    assert tokenizer.encode("schön") == tokenizer.encode("schon") != tokenizer.encode("Schon")


DNA = "\n".join("".join(random.Random(n).choices("ACGT", k=600)) for n in range(20))


def test_dna_without_spaces_is_an_error_of_wordpiece_that_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"all 20 words .*200 char.*spaces.*--kind=bpe"):
        train_vocabulary(write(tmp_path, DNA.replace("\n", "\n\n")), "wordpiece", 100, True, 1)


@pytest.mark.parametrize(("kind", "size"), [("sentencepiece", 60), ("bpe", 300)])
def test_dna_without_spaces_gives_a_vocabulary(tmp_path, capsys, kind, size):
    inputs = write(tmp_path, DNA.replace("\n", "")[:9000])  # A sentence of over 4,192 bytes.
    content = train_vocabulary(inputs, kind, size, False, 1)
    names = {"sentencepiece": "spiece.model", "bpe": "bpe.json"}
    tokenizer = tokenizer_from_bytes(names[kind], content)
    assert len(tokenizer.encode(DNA[:600])) < 400 and "not trained" not in capsys.readouterr().out


def test_xlnet_has_the_special_pieces_of_the_released_models_and_cls_last(tmp_path):
    text = "The café of Zoë is by the old river.\n" * 20
    content = train_vocabulary(write(tmp_path, text), "xlnet", 60, False, 1)
    tokenizer = tokenizer_from_bytes("xlnet.json", content)
    names = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    assert [tokenizer.id_to_token(index) for index in range(9)] == names
    assert tokenizer.special_ids == (5, 0, 3, 4, 6) and tokenizer.layout == Layout(cls_last=True)
    assert tokenizer.decode(tokenizer.encode("The café <eop> of")) == "The cafe<eop> of"
    assert not {"é", "ë"} & {tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)}


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "bpe", "xlnet"])
def test_blank_text_is_a_clear_error(tmp_path, kind):
    with pytest.raises(ValueError, match="the input holds no words to train on"):
        train_vocabulary(write(tmp_path, "\n \n"), kind, 300, True, 1)
