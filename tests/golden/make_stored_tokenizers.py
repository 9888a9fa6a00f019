"""Generates stored_tokenizers.json.gz: tokenizers as they were stored until November 2026, in one
file each, and what they did.

PYTHONPATH=. python tests/golden/make_stored_tokenizers.py, at revision 99fe624, the last that
stores them so.
"""

import base64
import gzip
import io
import itertools
import json
import pathlib
import string
import tempfile

import sentencepiece

from bert_corpus.vocabulary import train_vocabulary
from bert_jax.data.features import make_sequence
from bert_jax.inference.masked_text import tokenize_masked
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.golden.make_tokenization import CASES

TEXT = (
    "The old boats of Zürich crossed the river; Ångström's café, naïve façade!\n"
    'In 1999, 9, 19, and 29, the "river" crossed the boat: it isn\'t over.\n'
    "Der schöne Fluß und die Brücke. 東京 タワー, Привет мир\n"
)
TEXTS = [*CASES, *TEXT.split("\n"), "the <URL> of [E1] New York's", " x  y", "<s> </s> <mask>"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = {"tokenizer_class": "RobertaTokenizer"}
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}


def lines(*pieces: str, end: str = "\n") -> bytes:
    return "".join(f"{piece}{end}" for piece in (*SPECIAL, *pieces)).encode()


def added_token(index: int, content: str, **options) -> dict:
    defaults = {"single_word": False, "lstrip": False, "rstrip": False}
    defaults |= {"normalized": False, "special": True}
    return {"id": index, "content": content} | defaults | options


def sentencepiece_model(pad: str, unk: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 20),
        model_writer=model,
        vocab_size=150,
        hard_vocab_limit=False,
        pad_id=0,
        pad_piece=pad,
        unk_id=1,
        unk_piece=unk,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        normalization_rule_name="identity",  # Other rules have tables of 200 kB.
        minloglevel=2,
    )
    return model.getvalue()


def directories(trained: dict[str, bytes], spec: dict) -> dict[str, dict[str, bytes | dict]]:
    """Returns the files of tokenizers of transformers. `spec` is the tokenizer.json of a BPE."""
    vocabulary = trained["uncased"].decode().split("\n")[5:-1]
    size = len(vocabulary) + 5
    own_names = [f"<{name}>" for name in ("pad", "unk", "cls", "sep", "mask")]
    own = {
        f"{field}_token": name
        for field, name in zip(("pad", "unk", "cls", "sep", "mask"), own_names, strict=True)
    }
    no_lstrip = json.loads(json.dumps(spec))
    no_lstrip["added_tokens"][4]["lstrip"] = False
    url = added_token(size_of(spec), "<URL>", special=False)
    no_lstrip["added_tokens"].append(url)
    one_separator = json.loads(json.dumps(spec)) | {"normalizer": {"type": "NFC"}}
    one_separator["post_processor"] = {"type": "BertProcessing", "sep": ["</s>", 2]}
    one_separator["post_processor"]["cls"] = ["<s>", 0]
    xlm = {"tokenizer_class": "XLMRobertaTokenizer"}
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the"]
    pieces += [*string.ascii_lowercase, "'", ",", " "]
    pieces += ["▁river", "▁boat", "▁of", "<mask>"]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    unigram = spec | {
        "pre_tokenizer": metaspace | {"split": True},
        "decoder": metaspace | {"split": True},
        "added_tokens": [added_token(len(pieces) - 1, "<mask>", lstrip=True)],
        "model": {
            "type": "Unigram",
            "unk_id": 3,
            "vocab": [[piece, -1.0 - n / 8] for n, piece in enumerate(pieces)],
            "byte_fallback": False,
        },
        "post_processor": None,
    }
    return {
        "bert": {"vocab.txt": lines(*vocabulary), "config.json": {"model_type": "bert"}},
        "bert as released": {
            "vocab.txt": lines(*vocabulary),
            "tokenizer_config.json": {"do_lower_case": True, "max_input_chars_per_word": 200},
        },
        "bert that keeps accents": {
            "vocab.txt": lines(*vocabulary),
            "tokenizer_config.json": {"do_lower_case": True, "strip_accents": False},
        },
        "bert with tokens of its own": {
            "vocab.txt": lines(*vocabulary),
            "tokenizer_config.json": {"do_lower_case": True},
            "added_tokens.json": {"[E1]": size, "<URL>": size + 1, "new york": size + 2},
        },
        "bert with repeated and blank lines": {
            "vocab.txt": lines(*vocabulary[:50], "", *vocabulary[40:]),
            "tokenizer_config.json": {"do_lower_case": False},
        },
        "bert with other names": {
            "vocab.txt": "".join(f"{piece}\n" for piece in (*own_names, *vocabulary)).encode(),
            "tokenizer_config.json": own,
        },
        "bert without a mask": {
            "vocab.txt": lines(*vocabulary).replace(b"[MASK]\n", b""),
            "tokenizer_config.json": {"do_lower_case": True},
        },
        "bert without segments": {
            "vocab.txt": lines(*vocabulary),
            "tokenizer_config.json": {
                "tokenizer_class": "BertTokenizer",
                "model_input_names": ["input_ids", "attention_mask"],
            },
        },
        "roberta": {"tokenizer.json": spec, "tokenizer_config.json": ROBERTA},
        "roberta with a prefix and a token": {
            "tokenizer.json": no_lstrip,
            "tokenizer_config.json": ROBERTA | {"add_prefix_space": True},
        },
        "bpe with one separator": {
            "tokenizer.json": one_separator,
            "tokenizer_config.json": GENERIC
            | {
                f"{field}_token": name
                for field, name in zip(
                    ("pad", "unk", "cls", "sep", "mask"),
                    ("<pad>", "<unk>", "<s>", "</s>", "<mask>"),
                    strict=True,
                )
            },
        },
        "albert": {
            "spiece.model": sentencepiece_model("<pad>", "<unk>"),
            "tokenizer_config.json": {"tokenizer_class": "AlbertTokenizer"},
        },
        "cased albert": {
            "spiece.model": sentencepiece_model("<pad>", "<unk>"),
            "tokenizer_config.json": {
                "tokenizer_class": "AlbertTokenizer",
                "do_lower_case": False,
                "keep_accents": True,
            },
        },
        "xlm-roberta": {"tokenizer.json": unigram, "tokenizer_config.json": xlm},
    }


def size_of(spec: dict) -> int:
    return len(spec["model"]["vocab"])


def describe(tokenizer) -> dict:
    """Returns what a tokenizer does."""
    ids = tokenizer.encode_batch(TEXTS)
    masked = []
    if tokenizer.mask_token:
        texts = [f"The {tokenizer.mask_token}, {text} {tokenizer.mask_token}s." for text in TEXTS]
        masked = [tokenize_masked(text, tokenizer) for text in texts]
    pairs = [make_sequence(tokenizer, *pair) for pair in itertools.pairwise(ids)]
    return {
        "ids": ids,
        "offsets": [each.tolist() for _, each in tokenizer.encode_with_offsets(TEXTS)],
        "masked": masked,
        "single": [make_sequence(tokenizer, each)[0].tolist() for each in ids],
        "pairs": [tokens.tolist() for tokens, _ in pairs],
        "second_starts": [start for _, start in pairs],
        "decoded": [tokenizer.decode(each) for each in ids],
        "pieces": [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)],
        "piece_texts": [tokenizer.piece_text(index) for index in range(tokenizer.vocab_size)],
        "word_start": tokenizer.word_start.astype(int).tolist(),
        "special_ids": [
            getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "cls", "sep", "mask")
        ],
        "mask_token": tokenizer.mask_token,
        "lower_case": tokenizer.lower_case,
        "strips_accents": tokenizer.strips_accents,
        "splits_at_spaces": tokenizer.splits_at_spaces,
        "word_prefix": tokenizer.word_prefix,
        "mask_lstrip": tokenizer.mask_lstrip,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        text = pathlib.Path(scratch) / "text.txt"
        text.write_text(TEXT * 10, encoding="utf-8")
        arguments = {
            "uncased": ("wordpiece", 200, True),
            "cased": ("wordpiece", 200, False),
            "bpe": ("bpe", 330, False),
        }
        trained = {
            name: train_vocabulary([str(text)], *each, 1) for name, each in arguments.items()
        }
        trained["sentencepiece"] = sentencepiece_model("[PAD]", "[UNK]")
        trained["uncased, accents kept"] = train_vocabulary(
            [str(text)], "wordpiece", 200, True, 1, strip_accents=False
        )
        names = {"bpe": "bpe.json", "sentencepiece": "spiece.model"}
        names |= {"uncased, accents kept": "wordpiece.json"}
        found = []
        for name, content in trained.items():
            tokenizer = tokenizer_from_bytes(names.get(name, "vocab.txt"), content)
            found.append((name, {}, tokenizer))
            if name == "bpe":
                spec = json.loads(transformers_files(tokenizer.stored, 512)["tokenizer.json"])
        tokenizer = tokenizer_from_bytes("vocab.txt", trained["uncased"], False)
        found.append(("uncased, read as cased", {}, tokenizer))
        for name, files in directories(trained, spec).items():
            directory = pathlib.Path(scratch) / name
            directory.mkdir()
            contents = {
                each: value if isinstance(value, bytes) else json.dumps(value).encode()
                for each, value in files.items()
            }
            for each, content in contents.items():
                (directory / each).write_bytes(content)
            found.append((name, contents, load_tokenizer(directory)))
    tokenizers = [
        {
            "name": name,
            "directory": {each: base64.b64encode(c).decode() for each, c in files.items()},
            # What a checkpoint stored; a corpus stored the decoded file under its name.
            "stored": {
                "filename": tokenizer.filename,
                "sha256": tokenizer.sha256,
                "base64": base64.b64encode(tokenizer.content).decode(),
            },
            "does": describe(tokenizer),
        }
        for name, files, tokenizer in found
    ]
    path = pathlib.Path(__file__).with_name("stored_tokenizers.json.gz")
    content = json.dumps({"texts": TEXTS, "tokenizers": tokenizers}, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(content, mtime=0))
    print(f"{path}: {len(tokenizers)} tokenizers, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
