"""Each key of `tokenizer_config.json`, changed: ids as transformers, or an error that names it."""

import json

import pytest

from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
# Family -> class, and special tokens in the order of their ids.
FAMILIES = {
    "bert": ("BertTokenizer", ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")),
    "distilbert": ("DistilBertTokenizer", ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")),
    "roberta": ("RobertaTokenizer", ROBERTA),
    "mpnet": ("MPNetTokenizer", ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")),
    "xlm-roberta": ("XLMRobertaTokenizer", ROBERTA),
    "camembert": ("CamembertTokenizer", ROBERTA),
    "albert": ("AlbertTokenizer", ("[CLS]", "<unk>", "[SEP]", "<pad>", "[MASK]")),
    "xlnet": ("XLNetTokenizer", ("<unk>", "<pad>", "<sep>", "<cls>", "<mask>")),
}
# Without special tokens, which transformers finds in a text, and this project does not.
TEXTS = ("a", "a b", "A  á学 b a", "ab\tc", " x a ", "b#a bb", "a e\u0301 Á", "")
BOTH = (True, False)
KEYS: dict[str, tuple] = {
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "trim_offsets"), BOTH),
    **dict.fromkeys(("do_lower_case", "strip_accents", "tokenize_chinese_chars"), BOTH),
    **dict.fromkeys(("keep_accents", "remove_space", "do_basic_tokenize"), BOTH),
    **dict.fromkeys(("split_special_tokens", "clean_up_tokenization_spaces", "legacy"), BOTH),
    "truncation_side": ("left", "right"),
    "padding_side": ("left",),
    "model_max_length": (5,),
    "max_len": (5,),
    "errors": ("ignore",),
    "never_split": (["b#a"],),
    "sp_model_kwargs": ({"enable_sampling": True},),
    "wordpieces_prefix": ("@@",),
    **dict.fromkeys(
        (f"{each}_token" for each in ("cls", "sep", "unk", "pad", "bos", "eos")), ("<n>",)
    ),
    "mask_token": ("<n>", None),
    "own_token": ("#",),
    "extra_special_tokens": (["#", "c"], {"own_token": "c"}),
    "additional_special_tokens": (["#"],),
    "model_specific_special_tokens": ({"own_token": "c"},),
    "added_tokens_decoder": ({"7": {"content": "b", "lstrip": True, "special": False}},),
    "fast_tokenizer_files": (["tokenizer.4.0.0.json", "tokenizer.json"],),
    "tokenizer_file": ("tokenizer.4.0.0.json",),
    "vocab_file": ("other.txt",),
    "unk_id": (5,),
    "backend": ("sentencepiece", "tokenizers"),
    "use_fast": BOTH,
    "pad_token_type_id": (1,),
    "tokenizer_truncation": (
        {"max_length": 2, "direction": "right", "stride": 0, "strategy": "longest_first"},
    ),
}


def write_tokenizer(directory, family: str, **changes) -> None:
    """Writes tokenizer.json with a few pieces, and its configuration with `changes`."""
    tokenizer_class, special = FAMILIES[family]
    fields = ["cls", "pad", "sep", "unk", "mask"]
    if family == "albert":  # Its class takes 1 for the id of the unknown token.
        fields[1], fields[3] = fields[3], fields[1]
    if family == "xlnet":  # And this one 0.
        fields[0], fields[3] = fields[3], fields[0]
    names = dict(zip(fields, special, strict=True))
    cls, sep = names["cls"], names["sep"]
    own = ["a", "b", "c", "A", "á", "学", "#", "e", "Á", "<n>"]
    split: dict = {"type": "BertPreTokenizer"}
    normalizer: dict | None = {"type": "BertNormalizer", "clean_text": True, "lowercase": False}
    normalizer |= {"handle_chinese_chars": True, "strip_accents": None}
    model = {"type": "WordPiece", "unk_token": names["unk"], "continuing_subword_prefix": "##"}
    model |= {"max_input_chars_per_word": 100}
    own += ["##a", "##b", "##c", "@@b"]
    processor: dict = {"type": "BertProcessing", "sep": [sep, 2], "cls": [cls, 0]}
    if tokenizer_class == "RobertaTokenizer":
        split = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        split["trim_offsets"] = True
        model = {"type": "BPE", "merges": ["Ġ a", "Ġ b"]}
        own = [*own[:3], "Ġ", "Ġa", "Ġb", "A", "#", "Ã", "¡", "<n>"]
        processor |= {"type": "RobertaProcessing", "add_prefix_space": False, "trim_offsets": True}
    elif family not in ("bert", "distilbert", "mpnet"):
        split = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
        model = {"type": "Unigram", "unk_id": fields.index("unk"), "byte_fallback": False}
        own = [*own[:10], "▁a", "▁b", "▁", "▁A"]
        if family in ("albert", "xlnet"):
            steps = [("``", '"'), ("''", '"')]
            replace = [
                {"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in steps
            ]
            normalizer = {"type": "Sequence", "normalizers": [*replace, {"type": "NFKD"}]}
            normalizer["normalizers"] += [{"type": "StripAccents"}]
            normalizer["normalizers"] += [{"type": "Lowercase"}] * (family == "albert")
    if model["type"] != "WordPiece" and family not in ("albert", "xlnet"):
        normalizer = None
    pieces = [*special, *own]
    ids = {piece: index for index, piece in enumerate(pieces)}
    scores = [[piece, -1.0 - index / 8] for index, piece in enumerate(pieces)]
    model["vocab"] = scores if model["type"] == "Unigram" else ids
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": piece, "special": True} | options
        for index, piece in enumerate(special)
    ]
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": split,
        "post_processor": processor,
        "decoder": None,
        "model": model,
    }
    config = {f"{field}_token": name for field, name in names.items()}
    config |= {"tokenizer_class": tokenizer_class, "do_lower_case": family == "albert"}
    directory.mkdir()
    other = json.loads(json.dumps(spec))  # Of another version of transformers.
    if model["type"] == "Unigram":
        for piece in other["model"]["vocab"]:
            piece[0] = {"▁a": "▁b", "▁b": "▁a"}.get(piece[0], piece[0])
    else:
        other["model"]["vocab"] |= {"a": ids["b"], "b": ids["a"]}
    files = {
        "tokenizer": spec,
        "tokenizer.4.0.0": other,
        "tokenizer_config": config | changes,
        "config": {"model_type": family, "transformers_version": transformers.__version__},
    }
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_every_key_is_honored_or_refused_by_name(family, tmp_path):
    failed, refused, count = [], set(), 0
    for key, values in KEYS.items():
        for number, value in enumerate(values):
            directory = tmp_path / f"{key}_{number}"
            write_tokenizer(directory, family, **{key: value})
            try:
                theirs = transformers.AutoTokenizer.from_pretrained(directory)
                expected = [theirs(text)["input_ids"] for text in TEXTS]
                pairs = [theirs(text, "b a")["input_ids"] for text in TEXTS]
            except Exception:  # transformers has no such tokenizer.
                continue
            count += 1
            try:
                ours = load_tokenizer(directory)
            except ValueError as error:
                if key not in str(error) and str(value) not in str(error):
                    failed.append(f"{key}={value!r} is refused without its name: {error}")
                refused.add(f"{key}={value}")
                continue
            for text, one, two in zip(TEXTS, expected, pairs, strict=True):
                ids = ours.encode(text)
                found = make_sequence(ours, ids)[0].tolist()
                if found != one:
                    failed.append(f"{key}={value!r}: {text!r} is {found}, expected {one}")
                    break
                found = make_sequence(ours, ids, ours.encode("b a"))[0].tolist()
                if found != two:
                    failed.append(f"{key}={value!r}: {text!r}, 'b a' is {found}, expected {two}")
                    break
    assert not failed, "\n".join(failed)
    assert count > 30, (count, refused)
