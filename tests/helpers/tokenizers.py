"""Small tokenizers of every kind, trained on random texts in many scripts."""

import base64
import functools
import io
import json
import pathlib
import random
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from bert_corpus.vocabulary import train_byte_pair
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.golden import make_tokenization as golden

ADDED = ("[E1]", "<URL>", "New York")
"""Tokens of `with_added`."""


NEW_WORDS = (
    "stent",
    "stenting",
    "troponin",
    "Kardiologie",
    "naïveté",
    "глюкоза",
    "गुर्दा",
    "dlrs",
    "edema",
    "covid",
    "étage",
    "Zürich",
    "straße",
    "ingress",
    "ed",
    "xing",
)
"""Words to add, among them such as others begin with."""
FORMS = (
    "{}s",
    "{}ing",
    "{}{}",
    "({})",
    "{},",
    "x{}",
    "{}-graft",
    "{}_",
    "{}'s",
    "{}1",
    "{}é",
    "a{}",
    '"{}"',
    "{}\u0301",
)


@functools.cache
def training_texts() -> tuple[str, ...]:
    """Returns texts of random words, punctuation, accents and scripts to train on."""
    rng = random.Random(1)
    return tuple([golden.random_text(rng) for _ in range(1000)] + golden.CASES)


@functools.cache
def random_texts(count: int, seed: int = 2) -> tuple[str, ...]:
    """Returns other such texts, without special tokens.

    In every other text there are words of `NEW_WORDS`, also in other cases and inside of others.
    """
    rng = random.Random(seed)
    texts = [golden.random_text(rng) for _ in range(count - len(golden.CASES))] + golden.CASES
    for index in range(0, count, 2):
        word = rng.choice(NEW_WORDS)
        word = rng.choice([word, word, word.upper(), word.title(), word.lower()])
        form = rng.choice(["{}", *FORMS]).replace("{}", word)
        texts[index] = rng.choice([" ", "\n", "  ", ""]).join([texts[index], form, "of a", word])
    for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "<pad>", "</s>", "<unk>"):
        texts = [text.replace(token, token[1:-1]) for text in texts]
    return tuple(texts)


def wordpiece(directory: pathlib.Path, lower_case: bool = True, added: bool = False) -> None:
    """Writes BERT's `vocab.txt`, with three `[unused]` pieces, and `config.json`."""
    pieces = golden.train_vocabulary([*training_texts()], lower_case, size=2500)
    pieces = [*pieces[:1], *(f"[unused{number}]" for number in range(3)), *pieces[1:]]
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    write_config(directory, "bert", {"do_lower_case": lower_case})
    if added:
        ids = {token: len(pieces) + number for number, token in enumerate(ADDED)}
        (directory / "added_tokens.json").write_text(json.dumps(ids))


def bpe(directory: pathlib.Path, prefix: bool = False, added: bool = False) -> None:
    """Writes RoBERTa's `tokenizer.json` and `config.json`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(" ".join(text.split()) for text in training_texts()))
        file.flush()
        spec = json.loads(train_byte_pair(file.name, 2500))
    if added:
        options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
        size = len(spec["model"]["vocab"])
        spec["added_tokens"] += [
            {"id": size + number, "content": token, "special": False} | options
            for number, token in enumerate(ADDED)
        ]
    spec["pre_tokenizer"]["add_prefix_space"] = prefix
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    write_config(directory, "roberta", {"add_prefix_space": prefix})


def unigram(directory: pathlib.Path, model_type: str) -> None:
    """Writes the SentencePiece model of an "albert" or "deberta-v2", and `config.json`."""
    is_albert = model_type == "albert"
    content = train_sentencepiece("unigram", pad_piece="<pad>" if is_albert else "[PAD]")
    (directory / ("spiece.model" if is_albert else "spm.model")).write_bytes(content)
    write_config(directory, model_type, {})


def xlm_roberta(directory: pathlib.Path) -> None:
    """Writes the `tokenizer.json` of an XLM-R, whose mask is the last piece, and `config.json`."""
    model = sentencepiece_model_pb2.ModelProto.FromString(
        train_sentencepiece("unigram", pad_piece="<pad>")
    )
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = [
        *([name, 0.0] for name in special),
        *([piece.piece, piece.score] for piece in model.pieces[5:]),
        ["<mask>", 0.0],
    ]
    charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    options = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": [name for name, _ in vocabulary].index(name), "content": name, **options}
            | {"lstrip": name == "<mask>"}
            for name in [*special, "<mask>"]
        ],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace | {"split": True}],
        },
        "decoder": metaspace | {"split": True},
        "model": {"type": "Unigram", "unk_id": 3, "vocab": vocabulary, "byte_fallback": False},
    }
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    write_config(directory, "xlm-roberta", {})


def sentencepiece_alone(directory: pathlib.Path, model_type: str) -> None:
    """Writes a `spiece.model` of "unigram" or "bpe", with BERT's special tokens."""
    content = train_sentencepiece(model_type, pad_piece="[PAD]", unk_piece="[UNK]")
    (directory / "spiece.model").write_bytes(content)


def train_sentencepiece(model_type: str, **names) -> bytes:
    """Trains a SentencePiece model of 6,000 pieces, to which some characters are unknown."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(text.split()) for text in training_texts()),
        model_writer=model,
        model_type=model_type,
        vocab_size=6000,
        character_coverage=0.98,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        minloglevel=2,
        **{"unk_piece": "<unk>" if names["pad_piece"] == "<pad>" else "[UNK]"} | names,
    )
    return model.getvalue()


def write_config(directory: pathlib.Path, model_type: str, options: dict) -> None:
    """Writes what transformers has beside a vocabulary."""
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    (directory / "tokenizer_config.json").write_text(json.dumps(options))


WRITERS = {
    "wordpiece": wordpiece,
    "cased wordpiece with added tokens": functools.partial(wordpiece, lower_case=False, added=True),
    "bpe": bpe,
    "bpe with added tokens": functools.partial(bpe, prefix=True, added=True),
    "albert": functools.partial(unigram, model_type="albert"),
    "deberta": functools.partial(unigram, model_type="deberta-v2"),
    "xlm-r": xlm_roberta,
    "sentencepiece unigram": functools.partial(sentencepiece_alone, model_type="unigram"),
    "sentencepiece bpe": functools.partial(sentencepiece_alone, model_type="bpe"),
}
"""Name of a kind of tokenizer -> writes one into a directory."""


def write_tokenizer(name: str, directory: pathlib.Path):
    """Writes a tokenizer of `WRITERS` into a new directory; returns it, loaded."""
    directory.mkdir(parents=True)
    WRITERS[name](directory)
    return load_tokenizer(directory)
