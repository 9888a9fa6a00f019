"""transformers' tokenizer files: every option is applied, or refused by name."""

import json
import pickle
from contextlib import nullcontext

import pytest

from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import store_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "boat", "crossed", "london", "uber", "über", "cafe", "café", "The", ".", "url"]
WORDS += ["漢", "字", "漢字", "##字", "e", "##1", "x", "##x", "<", ">"]
PIECES = [*SPECIAL, *WORDS]
LOWER = {"do_lower_case": True}


def write(directory, pieces=PIECES, **files):
    """Writes a vocabulary and JSON files, such as tokenizer_config={...}, into a new directory."""
    directory.mkdir(exist_ok=True)
    if pieces:
        (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def added_token(index, content, **options):
    token = {"id": index, "content": content, "single_word": False, "lstrip": False}
    return token | {"rstrip": False, "normalized": True, "special": False} | options


def tokenizer_json(**changes):
    """The content of a tokenizer.json, as transformers saves it."""
    layout = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
        ],
        "pair": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
        ],
        "special_tokens": {
            name: {"id": name, "ids": [PIECES.index(name)], "tokens": [name]}
            for name in ("[CLS]", "[SEP]")
        },
    }
    return {
        "version": "1.0",
        # A model of sentence-transformers truncates and pads.
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": None,
        "added_tokens": [
            added_token(i, name, normalized=False, special=True) for i, name in enumerate(SPECIAL)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": layout,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: index for index, piece in enumerate(PIECES)},
        },
    } | changes


def tokens(tokenizer, text):
    return [tokenizer.id_to_token(index) for index in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LOWER, ["uber", "cafe", "the", "漢", "字"]),
        (LOWER | {"strip_accents": False}, ["über", "café", "the", "漢", "字"]),
        ({"do_lower_case": False}, ["[UNK]", "café", "The", "漢", "字"]),
        ({"do_lower_case": False, "strip_accents": True}, ["[UNK]", "cafe", "The", "漢", "字"]),
        (LOWER | {"tokenize_chinese_chars": False}, ["uber", "cafe", "the", "漢字"]),
    ],
)
@pytest.mark.parametrize("has_json", [False, True])
def test_options_of_the_config_are_honored(config, expected, has_json, tmp_path):
    files = {"tokenizer": tokenizer_json()} if has_json else {}
    tokenizer = load_tokenizer(write(tmp_path / "m", tokenizer_config=config, **files))
    assert tokens(tokenizer, "Über café The 漢字") == expected
    assert tokenizer.lower_case == config["do_lower_case"]
    assert "do_lower_case in tokenizer_config.json" in tokenizer.casing


def test_normalizer_of_tokenizer_json_counts_without_options_in_the_config(tmp_path):
    normalizer = tokenizer_json()["normalizer"] | {"lowercase": False}
    spec = tokenizer_json(normalizer=normalizer)
    assert load_tokenizer(write(tmp_path / "a", tokenizer=tokenizer_json())).lower_case
    tokenizer = load_tokenizer(write(tmp_path / "b", tokenizer=spec))
    assert not tokenizer.lower_case and "normalizer of tokenizer.json" in tokenizer.casing
    # For a generic class, transformers reads nothing else.
    config = LOWER | {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert not load_tokenizer(
        write(tmp_path / "c", tokenizer=spec, tokenizer_config=config)
    ).lower_case
    plain = tokenizer_json(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]})
    tokenizer = load_tokenizer(write(tmp_path / "d", tokenizer=plain))
    assert tokens(tokenizer, "CAFÉ") == ["café"] and not tokenizer.splits_at_spaces


def test_layout_options_of_tokenizer_json_do_not_apply(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m", tokenizer=tokenizer_json()))
    assert tokens(tokenizer, "the boat crossed london . the") == [
        "the",
        "boat",
        "crossed",
        "london",
        ".",
        "the",
    ]


def test_word_of_over_100_characters_is_unknown_as_in_transformers(tmp_path):
    in_transformers = load_tokenizer(write(tmp_path / "m", tokenizer_config=LOWER))
    released = load_tokenizer(write(tmp_path / "n") / "vocab.txt")
    assert len(in_transformers.encode("x" * 100)) == 100
    assert tokens(in_transformers, "x" * 101) == ["[UNK]"]
    assert len(released.encode("x" * 200)) == 200 and tokens(released, "x" * 201) == ["[UNK]"]


ADDED = {"[E1]": 26, "[/E1]": 27, "<url>": 28}


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_are_read_wherever_they_are(where, special, tmp_path):
    options = {"special": special, "normalized": not special}
    each = [added_token(index, name, **options) for name, index in ADDED.items()]
    files, config = {}, dict(LOWER)
    if where == "tokenizer.json":
        files["tokenizer"] = tokenizer_json(added_tokens=[*tokenizer_json()["added_tokens"], *each])
    elif where == "tokenizer_config.json":
        config["added_tokens_decoder"] = {f"{token.pop('id')}": token for token in each}
    else:
        files["added_tokens"] = ADDED
        config["additional_special_tokens"] = [*ADDED] if special else []
    tokenizer = load_tokenizer(write(tmp_path / "m", tokenizer_config=config, **files))
    text = "The boat crossed [E1] London[/E1] <url>." + " <URL>" * (not special)
    expected = [5, 6, 7, 26, 8, 27, 28, 14] + [28] * (not special)
    assert tokenizer.encode(text) == expected and tokenizer.vocab_size == 29
    assert tokenizer.word_start[26:].all() and tokenizer.splits_at_spaces
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    assert ids == expected
    assert [text[start:end] for start, end in offsets[3:7]] == ["[E1]", "London", "[/E1]", "<url>"]
    assert tokenizer.decode([26, 8]).lower() == "[e1] london"


def test_special_token_in_the_vocabulary_is_read_as_one(tmp_path):
    pieces = ["[ENT]" if piece == "url" else piece for piece in PIECES]
    files = {"special_tokens_map": {"additional_special_tokens": ["[ENT]"]}}
    tokenizer = load_tokenizer(write(tmp_path / "m", pieces, tokenizer_config=LOWER, **files))
    assert tokens(tokenizer, "the [ENT] boat") == ["the", "[ENT]", "boat"]
    # One with a space is one token, too, so the text cannot be split at spaces.
    files = {"added_tokens": {"new york": 26}}
    tokenizer = load_tokenizer(write(tmp_path / "n", tokenizer_config=LOWER, **files))
    assert tokenizer.encode("the New York boat") == [5, 26, 6] and not tokenizer.splits_at_spaces


# Names of special tokens that the vocabulary lacks -> the ids that transformers 5.23.0 gives them.
NAMED = [
    ({"tokenizer_config": LOWER | {"bos_token": "<bos>"}}, {"<bos>": 26}),
    ({"special_tokens_map": {"bos_token": {"content": "<bos>", "lstrip": False}}}, {"<bos>": 26}),
    (
        {"tokenizer_config": LOWER | {"eos_token": "<eos>", "bos_token": "<bos>"}},
        {"<bos>": 26, "<eos>": 27},
    ),
    (
        {
            "tokenizer_config": LOWER
            | {
                "own_token": "<own>",
                "extra_special_tokens": {"more_token": "<more>"},
                "additional_special_tokens": ["<last>"],
                "eos_token": "<eos>",
                "add_bos_token": True,  # No token.
            }
        },
        {"<eos>": 26, "<own>": 27, "<more>": 28, "<last>": 29},
    ),
    ({"tokenizer": tokenizer_json(), "tokenizer_config": {"bos_token": "<bos>"}}, {"<bos>": 26}),
    ({"tokenizer_config": LOWER | {"bos_token": "[CLS]", "eos_token": "[SEP]"}}, {}),
    ({"tokenizer_config": LOWER | {"bos_token": None}}, {}),
]


@pytest.mark.parametrize(("files", "expected"), NAMED)
def test_tokens_named_as_special_get_the_next_ids(files, expected, tmp_path):
    files = {"tokenizer_config": LOWER} | files
    tokenizer = load_tokenizer(write(tmp_path / "m", **files))
    assert tokenizer.vocab_size == 26 + len(expected)
    for name, index in expected.items():
        assert tokenizer.encode(f"the {name} boat") == [5, index, 6]


def test_mask_that_the_vocabulary_lacks_counts_in_the_ids_of_others(tmp_path):
    pieces = [piece for piece in PIECES if piece != "[MASK]"]
    files = {"tokenizer_config": LOWER | {"additional_special_tokens": ["[E1]"]}}
    tokenizer = load_tokenizer(write(tmp_path / "m", pieces, **files))
    # transformers 5.23.0 gives [MASK] the id 25.
    assert tokenizer.encode("the [E1]") == [4, 26] and tokenizer.mask_id is None


def test_special_tokens_may_have_other_names(tmp_path):
    names = {"pad": "<pad>", "unk": "<unk>", "cls": "<cls>", "sep": "<sep>", "mask": "<mask>"}
    config = LOWER | {f"{field}_token": name for field, name in names.items()}
    config["mask_token"] = added_token(4, "<mask>")  # As older versions wrote it.
    directory = write(tmp_path / "m", [*names.values(), *WORDS], tokenizer_config=config)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.special_ids == (0, 1, 2, 3, 4) and tokenizer.mask_token == "<mask>"
    assert tokens(tokenizer, "the ★ boat") == ["the", "<unk>", "boat"]
    assert tokens(tokenizer, "<mask>")[0] == "<"  # Special tokens are not recognized in a text.


def test_vocabulary_without_a_mask_is_read_from_a_model_only(tmp_path):
    pieces = [piece for piece in PIECES if piece != "[MASK]"]
    tokenizer = load_tokenizer(write(tmp_path / "m", pieces, tokenizer_config=LOWER))
    assert tokenizer.mask_id is None and tokenizer.mask_token is None
    assert tokenizer.special_ids == (0, 1, 2, 3) and tokens(tokenizer, "the boat") == [
        "the",
        "boat",
    ]
    with pytest.raises(ValueError, match=r"vocab.txt lacks \[MASK\]"):
        load_tokenizer(write(tmp_path / "n", pieces) / "vocab.txt")


def test_repeated_and_blank_lines_of_a_model_keep_the_ids_of_the_others(tmp_path):
    pieces = [*SPECIAL, "the", "boat", "", "the", "london"]
    tokenizer = load_tokenizer(write(tmp_path / "m", pieces, tokenizer_config=LOWER))
    assert tokenizer.encode("the boat london") == [8, 6, 9] and tokenizer.vocab_size == 10
    files = {"added_tokens": {"[E1]": 10}}
    tokenizer = load_tokenizer(write(tmp_path / "n", pieces, tokenizer_config=LOWER, **files))
    assert tokenizer.encode("the [E1]") == [8, 10]


def test_byte_order_mark_is_not_part_of_the_first_piece(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\ufeff" + "\n".join(PIECES), encoding="utf-8")
    assert load_tokenizer(path).special_ids == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_vocabulary_in_a_model_is_read_with_the_files_beside_it(name, tmp_path):
    config = LOWER | {"strip_accents": False}
    files = {"tokenizer": tokenizer_json(), "tokenizer_config": config}
    tokenizer = load_tokenizer(write(tmp_path / "m", **files) / name)
    assert tokens(tokenizer, "CAFÉ") == ["café"]


def test_the_vocabulary_that_is_named_is_read(tmp_path):
    pieces = [*SPECIAL, "boat", "cafe", "the"]
    config = LOWER | {"tokenizer_class": "BertTokenizer"}
    files = {"tokenizer": tokenizer_json(), "tokenizer_config": config}
    directory = write(tmp_path / "m", pieces, **files)
    named = load_tokenizer(directory / "vocab.txt")
    assert named.vocab_size == len(pieces) and tokens(named, "The CAFÉ") == ["the", "cafe"]
    assert "tokenizer.json beside it has other pieces and is not read" in named.casing
    for path in (directory, directory / "tokenizer.json"):
        assert load_tokenizer(path).vocab_size == len(PIECES)
    with pytest.raises(FileNotFoundError, match=r"no vocabulary at .*absent/vocab\.txt"):
        load_tokenizer(tmp_path / "absent" / "vocab.txt")
    (directory / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no vocabulary at .*vocab\.txt: there is no such"):
        load_tokenizer(directory / "vocab.txt")


@pytest.mark.parametrize(
    ("pieces", "lower_case"),
    [
        (["the", "<URL>", "URL", "COVID", *"abcdefghijkl"], True),
        (["the", "[unused1]", "[ENT]", "<Url>"], True),
        (["Paris", "the"], False),
        ([*"abcdefghABC", "the", "river"], False),
        (["漢", "字", "。"], True),
        # Enough single letters decide alone, without them half of the pieces.
        ([*"abcdefghijklmnop", *["the", "of", "and", "to"], *(f"ID{n}" for n in range(20))], True),
        ([*"abcdefghijklmnop", *"ABCDE", *(f"id{n}" for n in range(200))], False),
        ([*"abcdefghijklmnopqrstuvwxyz", *"AB", "##ing"], True),
        (["the", "river", "Paris", "##s"], True),
        (["the", "Paris", "London", "##s"], False),
    ],
)
def test_single_letters_or_most_pieces_say_if_a_vocabulary_is_cased(pieces, lower_case, tmp_path):
    path = write(tmp_path / "m", [*SPECIAL, *pieces]) / "vocab.txt"
    tokenizer = load_tokenizer(path)
    assert tokenizer.lower_case == lower_case and "have upper case" in tokenizer.casing
    # What a user says counts more, and is stored.
    other = load_tokenizer(path, lower_case=not lower_case)
    assert other.lower_case != lower_case and other.sha256 != tokenizer.sha256
    again = store_tokenizer(other, tmp_path / "stored")
    assert again.lower_case != lower_case and again.sha256 == other.sha256
    assert load_tokenizer(path, lower_case=lower_case).sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": LOWER | {"strip_accents": False}},
        {"tokenizer_config": LOWER, "added_tokens": ADDED},
        {"tokenizer": tokenizer_json()},
        {"tokenizer_config": {"do_lower_case": False, "max_input_chars_per_word": 200}},
    ],
)
def test_stored_and_exported_tokenizer_equals_the_original(files, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m", **files))
    texts = ["The CAFÉ [E1] 漢字 ★", "x" * 150, "", "[MASK] <url>"]
    expected = tokenizer.encode_batch(texts)
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, content in transformers_files(tokenizer.stored, 64).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (exported / name).write_text(text)
    others = [
        store_tokenizer(tokenizer, tmp_path / "stored"),
        pickle.loads(pickle.dumps(tokenizer)),
        load_tokenizer(exported),
    ]
    for other in others:
        assert other.encode_batch(texts) == expected
        assert other.sha256 == tokenizer.sha256 and other.special_ids == tokenizer.special_ids


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": {"model": {"type": "WordLevel"}}}, "model.type is 'WordLevel'"),
        (
            {"tokenizer": {"model": {"type": "WordPiece", "continuing_subword_prefix": "@@"}}},
            "continuing_subword_prefix is '@@'",
        ),
        (
            {"tokenizer_config": {"tokenizer_class": "BertJapaneseTokenizer"}},
            "tokenizer_class 'BertJapaneseTokenizer' is not supported",
        ),
        ({"config": {"tokenizer_class": "BertweetTokenizer"}}, "'BertweetTokenizer' is not supp"),
        ({"tokenizer_config": {"do_basic_tokenize": False}}, "do_basic_tokenize=False is not supp"),
        ({"tokenizer_config": {"truncation_side": "left"}}, "truncation_side='left' is not supp"),
        ({"tokenizer_config": {"never_split": ["x"]}}, r"never_split=\['x'\] is not supported"),
        ({"added_tokens": {"[E1]": 5}}, r"'the' and '\[E1\]' have the same id 5"),
        ({"added_tokens": {"x1": 26, "x2": 28}}, "'x2' has id 28"),
        ({"tokenizer_config": {"cls_token": "<s>"}}, "lacks <s>"),
        (
            {
                "tokenizer": tokenizer_json(
                    post_processor={"type": "RobertaProcessing", "sep": ["the", 5]}
                    | {"cls": ["[CLS]", 2], "trim_offsets": True, "add_prefix_space": True}
                )
            },
            r"post_processor gives the ids .* expected \[2, 1, 3, 1, 1, 3\]",
        ),
        ({"tokenizer": tokenizer_json(pre_tokenizer={"type": "?"})}, r"m/tokenizer\.json: "),
    ],
)
def test_unsupported_options_that_change_the_ids_are_refused_by_name(files, message, tmp_path):
    files = {"tokenizer_config": LOWER} | files
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path / "m", **files))


def test_padding_on_the_left_is_a_warning(tmp_path):
    files = {"tokenizer_config": LOWER | {"padding_side": "left"}}
    with pytest.warns(UserWarning, match=r"tokenizer_config\.json: padding_side='left'"):
        load_tokenizer(write(tmp_path / "m", **files))


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"} | {
    f"{name.strip('[]').lower()}_token": name for name in SPECIAL
}
BERT_CLASS = {"tokenizer_class": "BertTokenizer"}
WITHOUT_SEGMENTS = {"model_input_names": ["input_ids", "attention_mask"]}


@pytest.mark.parametrize(
    ("config", "version", "has_layout", "expected", "second"),
    [
        (BERT_CLASS, None, False, [2, 5, 3, 6, 3], 2),
        (BERT_CLASS, "5.23.0", False, [2, 5, 3, 6, 3], 2),
        (BERT_CLASS, "4.44.2", False, [5, 6], 1),
        (BERT_CLASS, "4.44.2", True, [2, 5, 3, 6, 3], 2),
        (BERT_CLASS | WITHOUT_SEGMENTS, "4.44.2", True, [2, 5, 3, 6, 3], 0),
        (GENERIC, None, False, [5, 6], 1),
        (GENERIC, "4.44.2", True, [2, 5, 3, 6, 3], 2),
        (GENERIC, "5.23.0", False, [5, 6], 0),
        (GENERIC, "5.23.0", True, [2, 5, 3, 6, 3], 0),
        (GENERIC | WITHOUT_SEGMENTS, None, True, [2, 5, 3, 6, 3], 0),
        (
            GENERIC | {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]},
            "5.23.0",
            True,
            [2, 5, 3, 6, 3],
            2,
        ),
    ],
)
def test_texts_are_joined_as_transformers_joins_them(
    config, version, has_layout, expected, second, tmp_path
):
    """Of transformers 5.23.0, or of the version 4 that `config.json` says.

    `second`: how many of the tokens are segment 1, as the model's inputs have them.
    """
    spec = tokenizer_json() if has_layout else tokenizer_json(post_processor=None)
    model = {"model_type": "bert"} | ({"transformers_version": version} if version else {})
    directory = write(tmp_path / "m", (), tokenizer=spec, tokenizer_config=config, config=model)
    is_bare = len(expected) == 2
    with pytest.warns(UserWarning, match="adds no special tokens") if is_bare else nullcontext():
        tokenizer = load_tokenizer(directory)
    exported = write(tmp_path / "n", ())
    for name, content in transformers_files(tokenizer.stored, 64).items():
        (exported / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.warns(UserWarning, match="adds no special tokens") if is_bare else nullcontext():
        again = load_tokenizer(exported)
    for each in (tokenizer, store_tokenizer(tokenizer, tmp_path / "stored"), again):
        tokens, start = make_sequence(each, each.encode("the"), each.encode("boat"))
        assert tokens.tolist() == expected and len(tokens) - start == second


def test_damaged_json_and_a_git_lfs_pointer_are_clear_errors(tmp_path):
    path = tmp_path / "wordpiece.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"wordpiece\.json: model.type is None"):
        load_tokenizer(path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name in ("vocab.txt", "tokenizer.json"):
        directory = write(tmp_path / name[:5], tokenizer_config=LOWER)
        (directory / name).write_text(pointer)
        with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer, not the file"):
            load_tokenizer(directory)
    for name in ("vocab.txt", "own.model", "spiece.model", "bpe.json"):  # Without other files.
        path = tmp_path / "alone" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(pointer)
        with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer, not the file"):
            load_tokenizer(path)
        with pytest.raises(ValueError, match="is a Git LFS pointer, not the file"):
            load_tokenizer(path.parent)
