"""Unigram tokenizers: every option of ALBERT's normalization is applied, or refused by name."""

import io
import json
import pickle
import random

import pytest
import sentencepiece

from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import store_tokenizer

TEXT = 'The boats, of Zurich, are old. In 1999, 9, 19, and 29, the "river" crossed the boat.'
TEXTS = (TEXT, TEXT.lower())
ALBERT = {"tokenizer_class": "AlbertTokenizer"}


def train(texts=TEXTS, size=90, **options) -> bytes:
    model = io.BytesIO()
    names = {"pad_piece": "<pad>", "unk_piece": "<unk>"}
    names |= {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
    names["control_symbols"] = ["[CLS]", "[SEP]", "[MASK]"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts] * 20),
        model_writer=model,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **names | options,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def model():
    return train()


def write(directory, model=None, **files):
    directory.mkdir()
    if model:
        (directory / "spiece.model").write_bytes(model)
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def surface(tokenizer, text):
    return "".join(tokenizer.id_to_token(token) for token in tokenizer.encode(text))


def test_text_is_normalized_as_by_albert(model, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m", model, tokenizer_config=ALBERT))
    assert tokenizer.stored.kind == "Unigram" and tokenizer.lower_case
    assert tokenizer.special_ids == (0, 1, 2, 3, 4) and tokenizer.mask_token == "[MASK]"
    assert tokenizer.layout == Layout()
    assert surface(tokenizer, "``The''  ZÜRICH\t") == '▁"the"▁zurich'
    assert tokenizer.decode([2, *tokenizer.encode("The boat"), 3]) == "[CLS] the boat[SEP]"
    assert not set(tokenizer.encode("[CLS] <pad> [MASK]")) & {0, 2, 3, 4}


def numbers(rng):
    return " ".join(f"{rng.choice('ab')} {rng.randint(0, 10 ** rng.randint(1, 4))}," for _ in "123")


def test_commas_after_numbers_are_pieces_of_their_own(tmp_path):
    rng, num_joined = random.Random(0), 0
    options = {"split_by_unicode_script": False, "split_by_number": False}
    model = train([numbers(rng) for _ in range(100)], 200, **options)
    tokenizer = load_tokenizer(write(tmp_path / "m", model, albert_config={}))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for _ in range(300):
        text = numbers(rng)
        assert surface(tokenizer, text) == "▁" + text.replace(" ", "▁")
        pieces = [tokenizer.id_to_token(token) for token in tokenizer.encode(text)]
        assert pieces.count(",") == 3
        num_joined += processor.encode(text, out_type=str).count(",") < 3  # Such as "▁9,".
    assert num_joined


@pytest.mark.parametrize(
    ("files", "text", "expected"),
    [
        ({"tokenizer_config": ALBERT | {"do_lower_case": False}}, "The Zürich", "▁The▁Zurich"),
        ({"tokenizer_config": ALBERT | {"keep_accents": True}}, "é", "▁é"),
        ({"config": {"model_type": "albert"}}, "The ``é''", '▁the▁"e"'),
        ({"albert_config": {}}, "The ``é''", '▁the▁"e"'),  # As Google released it.
    ],
)
def test_options_are_applied(files, text, expected, model, tmp_path):
    directory = write(tmp_path / "m", model, **files)
    for path in (directory, directory / "spiece.model"):
        tokenizer = load_tokenizer(path)
        found = surface(tokenizer, text)
        assert found == expected.replace("é", tokenizer.id_to_token(tokenizer.unk_id))
    lower = load_tokenizer(directory, lower_case=False)
    assert surface(lower, "The").startswith("▁T")


def test_a_model_alone_stays_a_sentencepiece_model(tmp_path):
    model = train(pad_piece="[PAD]", unk_piece="[UNK]")
    directory = write(tmp_path / "m", model)
    for path in (directory, directory / "spiece.model"):
        assert "spiece.model" in load_tokenizer(path).files()


def test_text_after_a_mask_begins_no_word_without_a_space(model, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m", model, tokenizer_config=ALBERT))
    for text, expected in (("s of", "s▁of"), (" s of", "▁s▁of"), (".", "."), ("", "")):
        ids = tokenizer.encode(text, continues=True)
        assert "".join(map(tokenizer.id_to_token, ids)) == expected


@pytest.mark.parametrize("option", [{}, {"do_lower_case": False}, {"add_prefix_space": False}])
def test_transformers_files_are_read_back_as_the_same_tokenizer(option, model, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m", model, tokenizer_config=ALBERT | option))
    exported = write(tmp_path / "n")
    for name, content in transformers_files(tokenizer.stored, 64).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (exported / name).write_text(text)
    spec = json.loads((exported / "tokenizer.json").read_text())
    assert [piece for piece, _ in spec["model"]["vocab"][:3]] == ["<pad>", "<unk>", "[CLS]"]
    others = [
        load_tokenizer(exported),
        store_tokenizer(tokenizer, tmp_path / "stored"),
        pickle.loads(pickle.dumps(tokenizer)),
    ]
    for other in others:
        assert (other.files(), other.special_ids) == (tokenizer.files(), (0, 1, 2, 3, 4))
        assert surface(other, TEXT) == surface(tokenizer, TEXT)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": ALBERT | {"remove_space": False}}, "remove_space=False is not supp"),
        (
            {"tokenizer_config": ALBERT | {"sp_model_kwargs": {"enable_sampling": True}}},
            "sp_model_kwargs=.* is not supported",
        ),
        (
            {"tokenizer_config": {"tokenizer_class": "ReformerTokenizer"}, "albert_config": {}},
            "'ReformerTokenizer' is not supported",
        ),
        ({"tokenizer_config": ALBERT | {"cls_token": "<cls>"}}, "lacks <cls>"),
    ],
)
def test_unsupported_options_that_change_the_ids_are_refused_by_name(
    files, message, model, tmp_path
):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path / "m", model, **files))


def test_options_that_contradict_the_normalizer_are_refused(model, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m", model, tokenizer_config=ALBERT))
    spec = json.loads(transformers_files(tokenizer.stored, 64)["tokenizer.json"])
    config = ALBERT | {"do_lower_case": False}
    with pytest.raises(ValueError, match=r"say \{'do_lower_case': False\}"):
        load_tokenizer(write(tmp_path / "n", tokenizer=spec, tokenizer_config=config))


def test_a_damaged_model_and_one_of_another_algorithm_are_clear_errors(tmp_path):
    directory = write(tmp_path / "m", b"not a model", tokenizer_config=ALBERT)
    with pytest.raises(ValueError, match="is not an intact SentencePiece model"):
        load_tokenizer(directory)
    directory = write(tmp_path / "n", train(model_type="bpe"), tokenizer_config=ALBERT)
    with pytest.raises(ValueError, match="is not a SentencePiece unigram model"):
        load_tokenizer(directory)
    directory = write(tmp_path / "o", b"any", config={"model_type": "bert"})
    with pytest.raises(ValueError, match=r"files that say it is ALBERT's.* found spiece\.model"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "▁The▁Zurich▁of"),
        ({"do_lower_case": True}, "▁the▁zurich▁of"),
        ({"add_prefix_space": False}, "▁The▁Zurich▁of"),  # Only of texts between added tokens.
        ({"split_by_punct": True}, "▁The▁Zurich▁of"),
    ],
    ids=str,
)
def test_deberta_is_cased_and_its_mask_follows_the_pieces(config, expected, tmp_path):
    symbols = ["[CLS]", "[SEP]"]
    model = train(pad_piece="[PAD]", unk_piece="[UNK]", control_symbols=symbols)
    directory = write(tmp_path / "m", tokenizer_config=config, config={"model_type": "deberta-v2"})
    (directory / "spm.model").write_bytes(model)
    tokenizer = load_tokenizer(directory)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    assert tokenizer.special_ids == (0, 1, 2, 3, pieces) and tokenizer.vocab_size == pieces + 1
    assert tokenizer.lower_case == config.get("do_lower_case", False)
    assert surface(tokenizer, "The \t Zurich  of ") == expected
    assert tokenizer.layout == Layout()
    separator = "▁" if "split_by_punct" in config else ""
    assert surface(tokenizer, "old.").endswith(f"old{separator}.")
    assert tokenizer.unk_id in tokenizer.encode("ﬁ")  # There is no compatibility normalization.
    assert store_tokenizer(tokenizer, tmp_path / "stored").files() == tokenizer.files()


def test_xlnet_is_cased_and_its_cls_is_last(tmp_path):
    symbols = ["<cls>", "<sep>"]
    others = {"control_symbols": symbols, "user_defined_symbols": ["<mask>", "<eod>", "<eop>"]}
    model = train(unk_id=0, bos_id=1, eos_id=2, pad_id=5, **others)
    directory = write(tmp_path / "m", model, config={"model_type": "xlnet"})
    tokenizer = load_tokenizer(directory)
    assert tokenizer.special_ids == (5, 0, 3, 4, 6) and not tokenizer.lower_case
    assert surface(tokenizer, "The  boat") == "▁The▁boat"
    assert tokenizer.encode("Th\u00e9") == tokenizer.encode("The")
    assert surface(tokenizer, "a<eop>").endswith("a<eop>")  # One piece, as in transformers.
    assert tokenizer.layout == Layout(cls_last=True)
    assert make_sequence(tokenizer, [9], [10, 11])[0].tolist() == [9, 4, 10, 11, 4, 3]
    assert store_tokenizer(tokenizer, tmp_path / "stored").files() == tokenizer.files()
    (directory / "tokenizer_config.json").write_text('{"keep_accents": true}')
    with pytest.raises(ValueError, match="keep_accents=True is not supported"):
        load_tokenizer(directory)


XLM_ROBERTA = {"tokenizer_class": "XLMRobertaTokenizer"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
REPLACE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}


def xlm_roberta_json(**changes):
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁boat", "s", "▁old", "old", "boat"]
    scores = [0, 0, 0, 0, -9, -1, -2, -3, -4, -5, -5, -6, 0]
    vocabulary = list(zip([*pieces, ".", "<mask>"], scores, strict=True))
    model = {"type": "Unigram", "unk_id": 3, "vocab": vocabulary, "byte_fallback": False}
    split = [{"type": "WhitespaceSplit"}, METASPACE]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": vocabulary[index][0],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index in (0, 1, 2, 3, 12)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": None,
        "decoder": METASPACE,
        "model": model,
    } | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # As some models store it; transformers 5.23 splits at white space there, too.
        {
            "normalizer": {"type": "Sequence", "normalizers": [REPLACE]},
            "pre_tokenizer": METASPACE,
        },
    ],
)
@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": XLM_ROBERTA},
        {"tokenizer_config": {"tokenizer_class": "XLMRobertaTokenizerFast"}},
        {"config": {"model_type": "xlm-roberta"}},
        {"tokenizer_config": {"tokenizer_class": "CamembertTokenizer"}},
        {"config": {"model_type": "camembert"}},
    ],
)
def test_xlm_roberta_has_the_ids_of_transformers(files, changes, tmp_path):
    tokenizer = load_tokenizer(
        write(tmp_path / "m", tokenizer=xlm_roberta_json(**changes), **files)
    )
    texts = ["the  old boats. ", " The boat★ ", "old\tboat the", ""]
    # Of transformers 5.23.0.
    assert tokenizer.encode_batch(texts) == [[5, 8, 6, 7, 11], [4, 3, 6, 3], [8, 6, 5], []]
    assert make_sequence(tokenizer, tokenizer.encode("the old"), tokenizer.encode("boats"))[
        0
    ].tolist() == [0, 5, 8, 2, 2, 6, 7, 2]
    assert tokenizer.special_ids == (1, 3, 0, 2, 12) and tokenizer.layout == Layout(2, False)
    exported = write(tmp_path / "n")
    for name, content in transformers_files(tokenizer.stored, 64).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (exported / name).write_text(text)
    assert load_tokenizer(exported).files() == tokenizer.files()


def test_xlm_roberta_with_what_its_class_would_drop_is_refused(tmp_path):
    changed = xlm_roberta_json(normalizer={"type": "Lowercase"})
    directory = write(tmp_path / "m", tokenizer=changed, tokenizer_config=XLM_ROBERTA)
    with pytest.raises(ValueError, match=r"\['Lowercase'\].*XLMRobertaTokenizer'\}"):
        load_tokenizer(directory)
    directory = write(tmp_path / "n", config={"model_type": "xlm-roberta"})
    (directory / "sentencepiece.bpe.model").write_bytes(train())
    with pytest.raises(ValueError, match=r"XLM-RoBERTa, add their tokenizer\.json"):
        load_tokenizer(directory)
