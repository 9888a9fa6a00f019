"""Tokenizers of BERT's descendants against transformers: 10,000 strings each."""

import itertools
import json
import random
import re

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2

from bert_jax.data.features import make_sequence
from bert_jax.inference.masked_text import tokenize_masked
from bert_jax.tokenizers.characters import BLANK
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.golden import make_tokenization as golden
from tests.helpers.corpora import store_tokenizer

transformers = pytest.importorskip("transformers")

NUM_TEXTS = 10_000
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ADDED = ["<URL>", "covid-19", "New York"]


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(1)
    texts = [golden.random_text(rng) for _ in range(NUM_TEXTS - len(golden.CASES))] + golden.CASES
    # transformers recognizes the special tokens in a text; we do not, as the released code.
    for token in ("[CLS]", "[SEP]", "[MASK]", *ROBERTA_TOKENS):
        texts = [text.replace(token, token[1:-1]) for text in texts]
    numbers = ["In 1999, 9, 19, and 2,000, ``quoted'' 'it' 3,", "``a'' `b' \"c\" ''''"]
    return [*texts[: NUM_TEXTS - len(numbers)], *numbers]


@pytest.fixture(scope="module")
def roberta_files(texts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("roberta")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(texts[:4000], vocab_size=8000, special_tokens=ROBERTA_TOKENS)
    trained.save_model(str(directory))
    (directory / "config.json").write_text('{"model_type": "roberta"}')
    return directory


@pytest.fixture(scope="module")
def albert_model(texts, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("albert") / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(text.split()) for text in texts[:4000]),
        model_prefix=str(prefix),
        vocab_size=6000,
        character_coverage=0.98,  # So that some characters are unknown.
        hard_vocab_limit=False,
        pad_id=0,
        pad_piece="<pad>",
        unk_id=1,
        unk_piece="<unk>",
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        minloglevel=2,
    )
    return prefix.with_suffix(".model").read_bytes()


def assert_equal(ours, reference, texts, tmp_path):
    """Compares ids, offsets, sequences and pairs, also of the stored and exported tokenizer."""
    encoded = reference(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = ours.encode_batch(texts)
    different = [t for t, a, b in zip(texts, ids, encoded["input_ids"], strict=True) if a != b]
    assert not different, f"{len(different)} of {len(texts)} differ, first: {different[0]!r}"
    assert store_tokenizer(ours, tmp_path / "stored").encode_batch(texts) == ids
    others = ids[1:] + ids[:1]
    pairs = reference(texts, texts[1:] + texts[:1], return_token_type_ids=True, verbose=False)
    for number, (first, second) in enumerate(zip(ids, others, strict=True)):
        tokens, start = make_sequence(ours, first, second)
        assert tokens.tolist() == pairs["input_ids"][number]
        segments = [0] * start + [1] * (len(tokens) - start)
        if ours.layout.cls_last and start < len(tokens):
            segments[-1] = 2
        assert segments == pairs["token_type_ids"][number]
    assert_equal_offsets(ours, encoded["offset_mapping"], texts)
    few = texts[-1000:]
    expected = reference(few, verbose=False)["input_ids"]
    assert [make_sequence(ours, each)[0].tolist() for each in ids[-1000:]] == expected
    (tmp_path / "exported").mkdir()
    for name, content in transformers_files(ours.stored, 10_000).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "exported" / name).write_text(text)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported(few, verbose=False)["input_ids"] == expected
    again = exported(few, few[1:] + few[:1], verbose=False)["input_ids"]
    assert again[:-1] == pairs["input_ids"][-1000:-1]


def assert_equal_offsets(tokenizer, expected, texts):
    """Compares the library's offsets, and ours in texts without hidden characters.

    Our offsets exclude white space at the ends, and characters that the normalizer drops belong to
    the piece before them. Hidden characters belong to no piece: tests/tokenizers/test_tokenizer.py.
    """
    assert [offsets for _, offsets in tokenizer._encode_raw(texts)] == expected
    count = 0
    for text, (_, offsets), reference in zip(
        texts, tokenizer.encode_with_offsets(texts), expected, strict=True
    ):
        if not re.search(f"[{BLANK}]", text):
            spans = []
            for (first, last), (limit, _) in itertools.pairwise([*reference, (len(text), 0)]):
                dropped = re.match(r"\S*", text[last:limit])[0]
                span = text[first:last] + dropped
                start = last + len(dropped) - len(span.lstrip())
                spans.append([start, start + len(span.strip())])
            assert offsets.tolist() == spans
            count += 1
    assert count > 0.3 * len(texts)


@pytest.mark.parametrize(
    ("prefix", "added", "saved"),
    [(False, False, False), (False, True, True), (True, True, False), (True, False, True)],
)
def test_roberta_equals_transformers(prefix, added, saved, roberta_files, texts, tmp_path):
    """`saved`: as transformers saves it (tokenizer.json), or in the older files."""
    source = roberta_files
    reference = transformers.AutoTokenizer.from_pretrained(source, add_prefix_space=prefix)
    assert type(reference).__name__ == "RobertaTokenizer"
    if added:
        texts = [
            f"{text}{ADDED[number % 3]} {text[:4]}" if number % 4 == 0 else text
            for number, text in enumerate(texts)
        ]
        reference.add_tokens(ADDED)
    if saved:
        source = tmp_path / "saved"
        reference.save_pretrained(source)
    else:
        source = tmp_path / "older"
        source.mkdir()
        for name in ("vocab.json", "merges.txt", "config.json"):
            (source / name).write_bytes((roberta_files / name).read_bytes())
        config = {"add_prefix_space": prefix}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
        if added:
            ids = {token: len(reference) - len(ADDED) + i for i, token in enumerate(ADDED)}
            (source / "added_tokens.json").write_text(json.dumps(ids))
    ours = load_tokenizer(source)
    assert (ours.layout.num_separators, ours.layout.has_segments) == (2, False)
    assert_equal(ours, reference, texts, tmp_path)


def test_modernbert_equals_transformers(texts, tmp_path):
    """Its tokens of white space precede the special ones, and all follow the pieces."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = tokenizers.normalizers.NFC()
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet)
    trained.train_from_iterator(texts[:4000], trainer)
    spaces = [" " * size for size in (24, 16, 8, 4, 3, 2)]
    trained.add_tokens([tokenizers.AddedToken(space) for space in spaces])
    trained.add_tokens([tokenizers.AddedToken("|||EMAIL_ADDRESS|||", normalized=False)])
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    trained.add_special_tokens(
        [tokenizers.AddedToken(token, lstrip=token == "[MASK]") for token in special]
    )
    trained.add_tokens([f"[unused{number}]" for number in range(3)])
    around = [(token, trained.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=around
    )
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, model_input_names=["input_ids", "attention_mask"], **names
    ).save_pretrained(tmp_path / "source")
    (tmp_path / "source/config.json").write_text('{"model_type": "modernbert"}')
    for token in ("[PAD]", "[UNK]"):
        texts = [text.replace(token, token[1:-1]) for text in texts]
    texts = [
        f"{text}{spaces[number % 6]}|||EMAIL_ADDRESS|||" if number % 4 == 0 else text
        for number, text in enumerate(texts)
    ]
    ours = load_tokenizer(tmp_path / "source")
    assert not ours.layout.has_segments and ours.vocab_size == trained.get_vocab_size()
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "source")
    assert_equal(ours, reference, texts, tmp_path)


@pytest.mark.parametrize("saved", [False, True])
def test_mpnet_equals_transformers(saved, texts, tmp_path):
    special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    trained = tokenizers.BertWordPieceTokenizer(unk_token="[UNK]", lowercase=True)
    trained.train_from_iterator(texts[:4000], vocab_size=6000, special_tokens=special)
    source = tmp_path / "source"
    source.mkdir()
    trained.save_model(str(source))
    (source / "config.json").write_text('{"model_type": "mpnet"}')
    reference = transformers.AutoTokenizer.from_pretrained(source)
    assert type(reference).__name__ == "MPNetTokenizer"
    if saved:
        source = tmp_path / "saved"
        reference.save_pretrained(source)
    ours = load_tokenizer(source)
    assert (ours.layout.num_separators, ours.layout.has_segments) == (2, False)
    texts = [text.replace("[UNK]", "UNK") for text in texts]
    assert_equal(ours, reference, texts, tmp_path)
    text = "The  <mask> of <mask>."
    assert tokenize_masked(text, ours) == reference(text)["input_ids"]


@pytest.mark.parametrize(
    ("options", "saved"),
    [({}, False), ({}, True), ({"do_lower_case": False}, True), ({"keep_accents": True}, False)],
)
def test_albert_equals_transformers(options, saved, albert_model, texts, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "spiece.model").write_bytes(albert_model)
    config = options | {"tokenizer_class": "AlbertTokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(source)
    assert type(reference).__name__ == "AlbertTokenizer"
    if saved:
        source = tmp_path / "saved"
        reference.save_pretrained(source)
    ours = load_tokenizer(source)
    assert ours.stored.kind == "Unigram"
    assert ours.lower_case == options.get("do_lower_case", True)
    assert_equal(ours, reference, texts, tmp_path)


@pytest.fixture(scope="module")
def deberta_model(texts, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("deberta") / "spm"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(text.split()) for text in texts[:4000]),
        model_prefix=str(prefix),
        vocab_size=6000,
        character_coverage=0.98,
        hard_vocab_limit=False,
        pad_id=0,
        pad_piece="[PAD]",
        bos_id=1,
        bos_piece="[CLS]",
        eos_id=2,
        eos_piece="[SEP]",
        unk_id=3,
        unk_piece="[UNK]",
        minloglevel=2,
    )
    return prefix.with_suffix(".model").read_bytes()


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, False),
        ({}, True),
        ({"do_lower_case": True, "split_by_punct": True}, True),
        ({"add_prefix_space": False}, False),
    ],
)
def test_deberta_equals_transformers(options, saved, deberta_model, texts, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "spm.model").write_bytes(deberta_model)
    (source / "config.json").write_text('{"model_type": "deberta-v2"}')
    (source / "tokenizer_config.json").write_text(json.dumps(options))
    reference = transformers.AutoTokenizer.from_pretrained(source)
    assert type(reference).__name__ == "DebertaV2Tokenizer"
    if saved:
        source = tmp_path / "saved"
        reference.save_pretrained(source)
    ours = load_tokenizer(source)
    assert ours.mask_id == reference.mask_token_id == ours.vocab_size - 1
    assert ours.lower_case == options.get("do_lower_case", False)
    texts = [text.replace("[PAD]", "PAD").replace("[UNK]", "UNK") for text in texts]
    assert_equal(ours, reference, texts, tmp_path)


@pytest.fixture(scope="module")
def xlnet_model(texts, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("xlnet") / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(text.split()) for text in texts[:4000]),
        model_prefix=str(prefix),
        vocab_size=6000,
        character_coverage=0.98,
        hard_vocab_limit=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=5,
        pad_piece="<pad>",
        control_symbols=["<cls>", "<sep>"],
        user_defined_symbols=["<mask>", "<eod>", "<eop>"],
        minloglevel=2,
    )
    return prefix.with_suffix(".model").read_bytes()


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}, False),
        ({"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}, True),
        ({"do_lower_case": True}, False),
        ({"do_lower_case": True}, True),
    ],
)
def test_xlnet_equals_transformers(options, saved, xlnet_model, texts, tmp_path):
    """<cls> is the last token, in segment 2; "<eop>" in a text is a token."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "spiece.model").write_bytes(xlnet_model)
    (source / "config.json").write_text('{"model_type": "xlnet"}')
    (source / "tokenizer_config.json").write_text(json.dumps(options))
    reference = transformers.AutoTokenizer.from_pretrained(source)
    assert type(reference).__name__ == "XLNetTokenizer"
    if saved:
        source = tmp_path / "saved"
        reference.save_pretrained(source)
    ours = load_tokenizer(source)
    assert ours.special_ids == (5, 0, 3, 4, 6) and ours.layout.cls_last
    assert ours.lower_case == options.get("do_lower_case", False)
    texts = [re.sub("<(cls|sep|pad|unk|mask)>", r"\1", text) for text in texts]
    texts = [f"{text[:9]}<eop> {text}" if n % 9 == 0 else text for n, text in enumerate(texts)]
    assert_equal(ours, reference, texts, tmp_path)


def test_deberta_of_transformers_4_follows_its_tokenizer_json(deberta_model, texts, tmp_path):
    """There, the model's own normalization comes first, as in its original code."""
    model = sentencepiece_model_pb2.ModelProto.FromString(deberta_model)
    precompiled = tokenizers.normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    spaces = tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    steps = [tokenizers.normalizers.Strip(), precompiled, spaces]
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    theirs = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=3))
    theirs.normalizer = tokenizers.normalizers.Sequence(steps)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Metaspace()]
    )
    theirs.add_special_tokens([tokenizers.AddedToken("[MASK]", normalized=False)])
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    values = {"model_type": "deberta-v2", "transformers_version": "4.57.0"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = {"tokenizer_class": "DebertaV2TokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    texts = [text.replace("[PAD]", "PAD").replace("[UNK]", "UNK") for text in texts]
    expected = theirs.encode_batch(texts, add_special_tokens=False)
    assert ours.encode_batch(texts) == [each.ids for each in expected]
    assert ours.encode("ﬁ") == ours.encode("fi")


def test_xlm_roberta_equals_transformers(albert_model, texts, tmp_path):
    model = sentencepiece_model_pb2.ModelProto.FromString(albert_model)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [(piece.piece, piece.score) for piece in model.pieces[5:]]
    theirs = transformers.XLMRobertaTokenizer(
        vocab=[*((name, 0.0) for name in special), *pieces, ("<mask>", 0.0)],
        _spm_precompiled_charsmap=model.normalizer_spec.precompiled_charsmap,
    )
    theirs.save_pretrained(tmp_path / "saved")
    ours = load_tokenizer(tmp_path / "saved")
    assert (ours.layout.num_separators, ours.layout.has_segments) == (2, False)
    assert_equal(ours, theirs, texts, tmp_path)


CLASSES = {
    "bert": ("BertTokenizer", "[CLS]", "[SEP]"),
    "distilbert": ("DistilBertTokenizer", "[CLS]", "[SEP]"),
    "roberta": ("RobertaTokenizer", "<s>", "</s>"),
    "albert": ("AlbertTokenizer", "[CLS]", "[SEP]"),
    "xlm-roberta": ("XLMRobertaTokenizer", "<s>", "</s>"),
    "camembert": ("CamembertTokenizer", "<s>", "</s>"),
    "data2vec-text": ("RobertaTokenizer", "<s>", "</s>"),
    "longformer": ("RobertaTokenizer", "<s>", "</s>"),
    "ernie": ("BertTokenizer", "[CLS]", "[SEP]"),
    "mpnet": ("MPNetTokenizer", "<s>", "</s>"),
    "deberta-v2": ("DebertaV2Tokenizer", "[CLS]", "[SEP]"),
}


def small_tokenizer_json(family: str, post_processor: dict | None) -> dict:
    """Returns the tokenizer.json of a vocabulary of "a" and "b"."""
    tokenizer_class, cls, sep = CLASSES[family]
    is_bert = tokenizer_class in ("BertTokenizer", "DistilBertTokenizer")
    is_named = is_bert or family == "deberta-v2"
    pad, unk, mask = ("[PAD]", "[UNK]", "[MASK]") if is_named else ("<pad>", "<unk>", "<mask>")
    pieces = [cls, pad, sep, unk, mask, "a", "b", "▁a", "▁b", "▁"]
    split, byte_level = {"type": "Metaspace"}, {"type": "ByteLevel", "use_regex": True}
    split |= {"replacement": "▁", "prepend_scheme": "always", "split": True}
    byte_level |= {"add_prefix_space": False, "trim_offsets": True}
    scores = [[piece, -float(index)] for index, piece in enumerate(pieces)]
    model = {"type": "Unigram", "unk_id": 3, "vocab": scores, "byte_fallback": False}
    ids = {piece: index for index, piece in enumerate(pieces)}
    if is_bert or family == "mpnet":
        split = {"type": "BertPreTokenizer"}
        model = {"type": "WordPiece", "unk_token": unk, "continuing_subword_prefix": "##"}
        model |= {"max_input_chars_per_word": 100, "vocab": ids}
    elif tokenizer_class == "RobertaTokenizer":
        split, model = byte_level, {"type": "BPE", "vocab": ids, "merges": []}
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": piece, "special": True} | options
        for index, piece in enumerate(pieces[:5])
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": post_processor,
        "decoder": None,
        "model": model,
    }


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("is_generic", [False, True])
@pytest.mark.parametrize("layout", ["none", "bytes", "bert", "roberta"])
@pytest.mark.parametrize("inputs", [None, ("token_type_ids",), ()])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_texts_are_joined_as_transformers_joins_them(family, is_generic, layout, inputs, tmp_path):
    """Ids and, as the model gets them, segments; also of the exported tokenizer."""
    tokenizer_class, cls, sep = CLASSES[family]
    options = {"add_prefix_space": False, "trim_offsets": True}
    layouts = {
        "none": None,
        "bytes": {"type": "ByteLevel", "use_regex": True} | options,
        "bert": {"type": "BertProcessing", "sep": [sep, 2], "cls": [cls, 0]},
        "roberta": {"type": "RobertaProcessing", "sep": [sep, 2], "cls": [cls, 0]} | options,
    }
    spec = small_tokenizer_json(family, layouts[layout])
    names = [each["content"] for each in spec["added_tokens"]]
    fields = ("cls", "pad", "sep", "unk", "mask")
    config = {f"{field}_token": name for field, name in zip(fields, names, strict=True)}
    config["tokenizer_class"] = "PreTrainedTokenizerFast" if is_generic else tokenizer_class
    if inputs is not None:
        config["model_input_names"] = ["input_ids", "attention_mask", *inputs]
    model = {"model_type": family, "transformers_version": transformers.__version__}
    source, exported = tmp_path / "source", tmp_path / "exported"
    files = {"tokenizer": spec, "tokenizer_config": config, "config": model}
    source.mkdir()
    for name, values in files.items():
        (source / f"{name}.json").write_text(json.dumps(values))
    ours = load_tokenizer(source)
    exported.mkdir()
    for name, content in transformers_files(ours.stored, 64).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (exported / name).write_text(text)
    first, second = (
        make_sequence(ours, ours.encode("a")),
        make_sequence(ours, ours.encode("a"), ours.encode("b")),
    )
    segments = [0] * second[1] + [1] * (len(second[0]) - second[1])
    for directory in (source, exported):
        reference = transformers.AutoTokenizer.from_pretrained(directory)
        assert first[0].tolist() == reference("a")["input_ids"]
        pair = reference("a", "b")
        assert second[0].tolist() == pair["input_ids"]
        if family != "distilbert":  # It has no segments.
            assert segments == pair.get("token_type_ids", [0] * len(segments))


TEMPLATES = {
    "bert": ("C A S", "C A S B:1 S:1"),
    "one segment": ("C A S", "C A S B S"),
    "two separators": ("C A S", "C A S S B S"),
    "no last": ("C A", "C A B:1"),
    "no first": ("A S", "A S B:1 S:1"),
    "two first": ("C C A S", "C C A S B:1 S:1"),
    "first again": ("C A S", "C A S C B:1 S:1"),
    "first at the end": ("S A C", "S A C B:1 C:1"),
    "second text first": ("C A S", "C B S A:1 S:1"),
    "bare": ("A", "A B:1"),
    "one text bare": ("A", "C A S B:1 S:1"),
    "pair bare": ("C A S", "A B:1"),
    "segments swapped": ("C:1 A:1 S:1", "C:1 A:1 S:1 B S"),
    "last of segment 0": ("C A S", "C A S B:1 S"),
}


def template(single: str, pair: str, cls: str, sep: str) -> dict:
    """Returns a post-processor; "C A S:1" stands for [CLS], the first text, [SEP] of segment 1."""

    def item(text: str) -> dict:
        name, _, segment = text.partition(":")
        kind = "Sequence" if name in "AB" else "SpecialToken"
        return {kind: {"id": {"C": cls, "S": sep}.get(name, name), "type_id": int(segment or 0)}}

    tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in ((cls, 0), (sep, 2))}
    parts = {"single": [*map(item, single.split())], "pair": [*map(item, pair.split())]}
    return {"type": "TemplateProcessing", "special_tokens": tokens} | parts


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("is_generic", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_templates_join_texts_as_in_transformers_or_are_refused(family, is_generic, tmp_path):
    tokenizer_class, cls, sep = CLASSES[family]
    refused = 0
    for name, (single, pair) in TEMPLATES.items():
        spec = small_tokenizer_json(family, template(single, pair, cls, sep))
        names = [each["content"] for each in spec["added_tokens"]]
        fields = ("cls", "pad", "sep", "unk", "mask")
        config = {f"{field}_token": token for field, token in zip(fields, names, strict=True)}
        config["tokenizer_class"] = "PreTrainedTokenizerFast" if is_generic else tokenizer_class
        model = {"model_type": family, "transformers_version": transformers.__version__}
        source = tmp_path / name
        source.mkdir()
        files = {"tokenizer": spec, "tokenizer_config": config, "config": model}
        for filename, values in files.items():
            (source / f"{filename}.json").write_text(json.dumps(values))
        try:
            ours = load_tokenizer(source)
        except ValueError as error:
            assert "post_processor" in str(error)
            refused += 1
            continue
        reference = transformers.AutoTokenizer.from_pretrained(source)
        first, second = ours.encode("a"), ours.encode("b")
        assert make_sequence(ours, first)[0].tolist() == reference("a")["input_ids"], name
        found = make_sequence(ours, first, second)[0].tolist()
        assert found == reference("a", "b")["input_ids"], name
    assert refused < len(TEMPLATES)


@pytest.mark.parametrize(
    "text", ["The <mask> of <mask>, <mask>s.", "<mask>", " <mask> x", "a\n<mask>"]
)
def test_masked_text_equals_transformers(text, roberta_files, tmp_path):
    mask = tokenizers.AddedToken("<mask>", lstrip=True)  # As in the released files.
    reference = transformers.RobertaTokenizer.from_pretrained(roberta_files, mask_token=mask)
    reference.save_pretrained(tmp_path)
    for source in (roberta_files, tmp_path):
        assert tokenize_masked(text, load_tokenizer(source)) == reference(text)["input_ids"]
    plain = transformers.RobertaTokenizer.from_pretrained(roberta_files)  # lstrip is false.
    plain.save_pretrained(tmp_path)
    assert tokenize_masked(text, load_tokenizer(tmp_path)) == plain(text)["input_ids"]


def test_text_of_each_id_equals_transformers(roberta_files, albert_model, tmp_path):
    """As the pipeline for masks shows it (`token_str`)."""
    (tmp_path / "albert").mkdir()
    (tmp_path / "albert/spiece.model").write_bytes(albert_model)
    config = {"tokenizer_class": "AlbertTokenizer"}
    (tmp_path / "albert/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "bert").mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "river", "##s", ".", "'", "n't", "é"]
    (tmp_path / "bert/vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}')
    for directory in (roberta_files, tmp_path / "albert", tmp_path / "bert"):
        ours = load_tokenizer(directory)
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        for index in range(ours.vocab_size):
            assert ours.decode([index]) == theirs.decode([index]), ours.id_to_token(index)


def test_words_of_a_tagged_text_equal_transformers(roberta_files):
    words = ["Zürich", ",", "😀", "the", "EU's", "(x)", "3.5"]
    reference = transformers.RobertaTokenizer.from_pretrained(roberta_files, add_prefix_space=True)
    encoded = reference(words, is_split_into_words=True, add_special_tokens=False)
    ours = load_tokenizer(roberta_files)
    pieces = ours.encode_batch([ours.word_prefix + word for word in words])
    assert [token for each in pieces for token in each] == encoded["input_ids"]
