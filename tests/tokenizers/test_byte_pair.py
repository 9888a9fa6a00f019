"""RoBERTa's byte-level BPE: every option of its files is applied, or refused by name."""

import json
import pickle

import numpy as np
import pytest

from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import store_tokenizer, train_bpe

TEXT = "The old boat crossed the river, and the boats of Zürich 😀 are old.\n" * 20
# `<s> a`, without an end.
ONLY_FIRST = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
TEXTS = ["The boat", " the boats,  of\n\nZürich", "😀👍🏽 \u200b <s>", "", " ", "x\x00y\ufffd 北京"]
ROBERTA = {"tokenizer_class": "RobertaTokenizer"}
NAMES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
ROBERTA_NAMES = {f"{field}_token": name for field, name in NAMES.items()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_bpe(tmp_path_factory.mktemp("bpe"), TEXT)


@pytest.fixture(scope="module")
def spec(tokenizer):
    """The tokenizer.json of RoBERTa, as transformers 4 saves it."""
    return json.loads(transformers_files(tokenizer.stored, 512)["tokenizer.json"])


def write(directory, **files):
    """Writes JSON files, such as tokenizer_config={...}, into a new directory."""
    directory.mkdir()
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def write_older(directory, spec, **files):
    """Writes vocab.json and merges.txt, as RoBERTa was released."""
    write(directory, vocab=spec["model"]["vocab"], **files)
    merges = "".join(f"{' '.join(pair)}\n" for pair in spec["model"]["merges"])
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    return directory


def test_trained_tokenizer_equals_robertas(tokenizer):
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert [tokenizer.id_to_token(index) for index in range(5)] == names
    assert tokenizer.special_ids == (1, 3, 0, 2, 4) and tokenizer.mask_token == "<mask>"
    assert tokenizer.vocab_size == 300 and not tokenizer.lower_case
    assert tokenizer.layout == Layout(num_separators=2, has_segments=False)
    tokens, start = make_sequence(tokenizer, tokenizer.encode("A b"), tokenizer.encode("C"))
    assert tokenizer.decode(tokens) == "<s>A b</s></s>C</s>" and start == len(tokens)


def test_every_text_is_decoded_without_unknown_or_special_tokens(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.special_ids)


def test_a_word_begins_with_its_space(tokenizer):
    ids = tokenizer.encode("The boats, of Zürich")
    starts = [tokenizer.piece_text(i) for i in ids if tokenizer.word_start[i]]
    assert len(starts) == 3 and starts[0].startswith("b") and starts[1] == "of"
    assert tokenizer.word_start[list(tokenizer.special_ids)].all()


def test_it_is_stored_pickled_and_read_again(tokenizer, tmp_path):
    others = [
        pickle.loads(pickle.dumps(tokenizer)),
        store_tokenizer(tokenizer, tmp_path / "stored"),
    ]
    for other in others:
        assert (other.sha256, other.files()) == (tokenizer.sha256, tokenizer.files())
        assert (other.layout, other.mask_lstrip) == (tokenizer.layout, True)
        assert other.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_every_format_of_the_files_is_the_same_tokenizer(tokenizer, spec, tmp_path):
    expected = tokenizer.encode_batch(TEXTS)
    mask = {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}
    directories = [
        write_older(tmp_path / "older", spec),
        write_older(tmp_path / "named", spec, special_tokens_map={"mask_token": mask}),
        write_older(tmp_path / "config", spec, tokenizer_config={"add_prefix_space": False}),
        write(tmp_path / "newer", tokenizer=spec, tokenizer_config=ROBERTA),
        write(tmp_path / "alone", tokenizer=spec),
    ]
    paths = [*directories, tmp_path / "older/vocab.json", tmp_path / "older/merges.txt"]
    for path in paths:
        found = load_tokenizer(path)
        assert found.files() == tokenizer.files(), path
        assert found.encode_batch(TEXTS) == expected


@pytest.mark.parametrize("name", ["LongformerTokenizer", "LongformerTokenizerFast"])
@pytest.mark.parametrize("version", ["4.44.2", "5.23.0"])
def test_tokenizer_class_of_longformer_in_transformers_4_is_that_of_roberta(
    name, version, tokenizer, spec, tmp_path
):
    model = {"model_type": "longformer", "transformers_version": version}
    config = {"tokenizer_class": name}
    directories = [
        write(tmp_path / "saved", tokenizer=spec, tokenizer_config=config, config=model),
        write_older(tmp_path / "older", spec, tokenizer_config=config, config=model),
        write_older(tmp_path / "of model", spec, config=model | config),
    ]
    for directory in directories:
        assert load_tokenizer(directory).files() == tokenizer.files()


@pytest.mark.parametrize("change", ["none", "prefix", "no lstrip", "bert", "added", "generic"])
def test_transformers_files_are_read_back_as_the_same_tokenizer(change, spec, tmp_path):
    spec, config = json.loads(json.dumps(spec)), dict(ROBERTA)
    if change == "prefix":
        config["add_prefix_space"] = True
    elif change == "no lstrip":
        spec["added_tokens"][4]["lstrip"] = False
    elif change == "added":
        token = dict(spec["added_tokens"][4], id=300, content="<URL>", special=False)
        spec["added_tokens"].append(token)
    elif change in ("bert", "generic"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        spec["normalizer"] = {"type": "NFC"}
    if change == "bert":  # `<s> a </s> b </s>`
        item = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
        cls, sep = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>"))
        ids = {"<s>": 0, "</s>": 2}
        names = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in ids.items()}
        spec["post_processor"] = {"type": "TemplateProcessing", "special_tokens": names}
        spec["post_processor"]["single"] = [cls, item[0], sep]
        spec["post_processor"]["pair"] = [cls, item[0], sep, item[1], sep]
    directory = write(tmp_path / "m", tokenizer=spec, tokenizer_config=config)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.layout == Layout(1 if change == "bert" else 2, False)
    assert tokenizer.mask_lstrip == (change != "no lstrip")
    assert tokenizer.id_to_token(tokenizer.encode("The")[0]).startswith("Ġ") == (change == "prefix")
    assert tokenizer.encode(".", continues=True) == [tokenizer.token_to_id(".")]
    ids = tokenizer.encode("the<URL>")
    assert (ids[-1] == 300) == (change == "added")
    assert change != "added" or tokenizer.word_start[300]
    files = transformers_files(tokenizer.stored, 64)
    is_generic = change in ("bert", "generic")
    name = "PreTrainedTokenizerFast" if is_generic else "RobertaTokenizer"
    assert files["tokenizer_config.json"]["tokenizer_class"] == name
    exported = write(tmp_path / "n")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (exported / name).write_text(text)
    assert load_tokenizer(exported).files() == tokenizer.files()


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": False,
    "use_regex": True,
}


@pytest.mark.parametrize("post_processor", [None, BYTE_LEVEL])
@pytest.mark.parametrize(
    ("version", "config", "is_bare"),
    [
        ("4.44.2", {}, True),
        ("4.9.0.dev0", ROBERTA, True),
        ("5.23.0", ROBERTA, False),
        ("5.23.0", {}, False),
        ("5.23.0", {"tokenizer_class": "TokenizersBackend"}, True),
        (None, {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
    ],
)
def test_sequences_are_bare_where_the_library_that_trained_adds_nothing(
    version, config, is_bare, post_processor, spec, tmp_path
):
    """As transformers 4.44 and 5.23; a tokenizer of `ByteLevelBPETokenizer` has no layout."""
    spec, names = json.loads(json.dumps(spec)), ROBERTA_NAMES if config else {}
    spec["post_processor"] = post_processor
    model = {"model_type": "roberta", "transformers_version": version}
    directory = write(tmp_path / "m", tokenizer=spec, tokenizer_config=config | names, config=model)
    if not is_bare:
        assert load_tokenizer(directory).layout == Layout(2, False)
        return
    with pytest.warns(UserWarning, match="adds no special tokens: texts are read") as warned:
        tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("The boat")
    exported = write(tmp_path / "n")
    for name, content in transformers_files(tokenizer.stored, 64).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (exported / name).write_text(text)
    with pytest.warns(UserWarning, match="adds no special tokens"):
        again = load_tokenizer(exported)
    for each in (tokenizer, store_tokenizer(tokenizer, tmp_path / "stored"), again):
        assert make_sequence(each, ids)[0].tolist() == ids
        assert make_sequence(each, ids, ids)[0].tolist() == ids + ids
    # The warning has what to add.
    message = str(warned[0].message)
    spec["post_processor"] = json.loads(message.partition('"post_processor": ')[2])
    fixed = write(tmp_path / "o", tokenizer=spec, tokenizer_config=config | names, config=model)
    assert load_tokenizer(fixed).layout == Layout(2, False)


def test_a_byte_without_a_piece_is_reported(spec, tmp_path):
    spec = json.loads(json.dumps(spec))
    del spec["model"]["vocab"]["Q"]
    with pytest.warns(UserWarning, match="1 of the 256 bytes have no piece, and are dropped"):
        load_tokenizer(write(tmp_path / "m", tokenizer=spec))


@pytest.mark.parametrize(
    ("change", "files", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, {}, "pre_tokenizer is .* expected ByteLevel"),
        ({"model": {"dropout": 0.1}}, {}, r"model\.dropout=0\.1 is not supported"),
        ({"model": {"end_of_word_suffix": "</w>"}}, {}, "end_of_word_suffix='</w>' is not supp"),
        ({"post_processor": ONLY_FIRST}, {}, r"post_processor gives the ids"),
        ({}, {"tokenizer_class": "GPT2Tokenizer"}, "'GPT2Tokenizer' is not supported"),
        ({}, {"tokenizer_class": "BertTokenizer"}, "'BertTokenizer' is not supported"),
        ({}, {"cls_token": "[CLS]"}, r"lacks \[CLS\]"),
        ({}, {"do_lower_case": True}, r"say \{'do_lower_case': True\}"),
        ({"normalizer": {"type": "NFC"}}, ROBERTA, r"say \{'tokenizer_class'"),
        ({}, {"truncation_side": "left"}, "truncation_side='left' is not supported"),
        (
            {},
            {"added_tokens_decoder": {"4": {"content": "<mask>", "rstrip": True}}},
            "rstrip of the",
        ),
    ],
)
def test_unsupported_options_that_change_the_ids_are_refused_by_name(
    change, files, message, spec, tmp_path
):
    spec = json.loads(json.dumps(spec))
    for name, value in change.items():
        defaults = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        kept = spec[name] if name == "model" else {} if name == "post_processor" else defaults
        spec[name] = kept | value
    directory = write(tmp_path / "m", tokenizer=spec, tokenizer_config=files)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(directory)


def test_missing_and_damaged_files_are_clear_errors(spec, tokenizer, tmp_path):
    directory = write(tmp_path / "m", vocab=spec["model"]["vocab"])
    with pytest.raises(FileNotFoundError, match=r"has no merges\.txt"):
        load_tokenizer(directory)
    (directory / "merges.txt").write_text("#version: 0.2\nT h e\n")
    with pytest.raises(ValueError, match=r"vocab\.json and merges\.txt are not intact"):
        load_tokenizer(directory)
    (tmp_path / "bpe.json").write_text(json.dumps(spec)[:99])
    with pytest.raises(ValueError, match=r"bpe\.json is not JSON"):
        load_tokenizer(tmp_path / "bpe.json")
    with pytest.raises(ValueError, match="the casing of a BPE tokenizer is fixed"):
        load_tokenizer(write(tmp_path / "n", tokenizer=spec), lower_case=True)


def test_offsets_cover_whole_characters(tokenizer):
    text = "Zürich 😀, e\u0301"
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    assert len(ids) > len(np.unique(offsets, axis=0))  # A character of several pieces.
    covered = {text[start:end] for start, end in offsets.tolist()}
    assert "😀" in covered and "".join(covered) >= ""
    assert {place for span in offsets for place in range(*span)} == {
        place for place, character in enumerate(text) if character != " "
    }


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_the_merges_that_are_named_are_read(tmp_path, tokenizer, spec, name):
    other = train_bpe(tmp_path, "quick foxes jump over lazy dogs\n" * 20, 290)
    other_spec = json.loads(transformers_files(other.stored, 512)["tokenizer.json"])
    directory = write_older(tmp_path / "m", spec, tokenizer=other_spec, tokenizer_config=ROBERTA)
    assert load_tokenizer(directory / name).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert load_tokenizer(directory).vocab_size == other.vocab_size
    assert load_tokenizer(directory / "tokenizer.json").vocab_size == other.vocab_size
