"""Special and added tokens in the files of transformers' tokenizers: names, ids and options."""

import pathlib
from collections.abc import Mapping

from bert_jax.tokenizers.stored import SpecialTokens, ids_of_model

_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", *SpecialTokens._fields))


def names_of_special_tokens(stated: Mapping, defaults: SpecialTokens) -> SpecialTokens:
    """Returns the names of the special tokens, or the defaults of those that are not `stated`."""
    names = {}
    for field, default in defaults._asdict().items():
        name = stated.get(f"{field}_token", default)
        names[field] = name["content"] if isinstance(name, Mapping) else name
    return SpecialTokens(**names)


def check_names(
    source: pathlib.Path, stated: Mapping, names: SpecialTokens, model: Mapping
) -> None:
    """Raises ValueError if [CLS], [SEP] or [UNK] of XLM-R or CamemBERT is not the one that is used.

    Around a text, transformers puts the tokens named `bos_token` and `eos_token`; the model's own
    `unk_id` stands for what it does not know.
    """
    for key, used, expected in (
        ("cls_token", stated.get("bos_token") or "<s>", names.cls),
        ("sep_token", stated.get("eos_token") or "</s>", names.sep),
        ("unk_token", model["vocab"][model.get("unk_id") or 0][0], names.unk),
    ):
        token = used["content"] if isinstance(used, Mapping) else used
        if token != expected:
            raise ValueError(
                f"{source}: {key} is {expected!r}, but transformers puts {token!r} there (the "
                "bos_token, the eos_token, and the piece at unk_id): make them agree"
            )


def mask_takes_space(source: pathlib.Path, stated: Mapping, masks: list[dict]) -> bool:
    """Returns whether a mask takes the white space before it; RoBERTa's does unless a file says so.

    Raises ValueError for a mask that takes other characters.
    """
    mask = stated.get("mask_token")
    (mask,) = masks or [mask if isinstance(mask, Mapping) else {}]
    for name in ("rstrip", "single_word"):
        if mask.get(name):
            raise ValueError(f"{source}: {name} of the mask token is not supported")
    return mask.get("lstrip", True)


def named_tokens(stated: Mapping) -> list[dict]:
    """Returns the tokens named as special, in the order in which transformers numbers new ones."""
    own = [name for name in stated if name.endswith("_token") and name not in _NAMES]
    tokens = [stated.get(name) for name in (*_NAMES, *own)]
    tokens += (stated.get("model_specific_special_tokens") or {}).values()
    extra = stated.get("extra_special_tokens") or []
    if isinstance(extra, Mapping):
        tokens, extra = [*tokens, *extra.values()], []
    tokens += extra or stated.get("additional_special_tokens") or []
    return [
        dict(token) if isinstance(token, Mapping) else {"content": token}
        for token in tokens
        if isinstance(token, str | Mapping)
    ]


def added_tokens(
    source: pathlib.Path,
    spec: Mapping,
    decoder: Mapping,
    older: Mapping,
    named: list[dict],
    special_tokens: SpecialTokens,
) -> list[dict]:
    """Returns the tokens that are read in texts as one piece, in the order of their ids.

    They are in `tokenizer.json` (`spec`), `added_tokens_decoder` in `tokenizer_config.json`
    (`decoder`) or, in older models, `added_tokens.json` (`older`); tokens that are `named` as
    special without an id are pieces of the vocabulary, or get the next id. Raises ValueError if two
    of these have the same id.
    """
    options = {"single_word": False, "lstrip": False, "rstrip": False}
    by_content = {token["content"]: options | token for token in spec["added_tokens"]}
    for index, token in decoder.items():
        by_content[token["content"]] = options | token | {"id": int(index)}
    special = {token["content"] for token in named}
    for content, index in older.items():
        by_content.setdefault(content, options | {"content": content, "id": index})
    ids = ids_of_model(spec)
    next_id = 1 + max([*ids.values(), *(token["id"] for token in by_content.values())])
    for token in named:
        content = token["content"]
        is_required = content in special_tokens[:4]  # If it is missing, that is an error.
        if content in by_content or is_required or (content in special_tokens and content in ids):
            continue
        # The name of a mask that the vocabulary lacks has an id, but stands in no text.
        if content != special_tokens.mask:
            by_content[content] = options | token | {"id": ids.get(content, next_id)}
        next_id += content not in ids
    pieces = {index: piece for piece, index in ids.items()}
    for token in by_content.values():
        if (piece := pieces.setdefault(token["id"], token["content"])) != token["content"]:
            both = f"{piece!r} and {token['content']!r}"
            raise ValueError(f"{source}: {both} have the same id {token['id']}")
        token.setdefault("special", token["content"] in special)
        token.setdefault("normalized", not token["special"])
    return sorted(by_content.values(), key=lambda token: token["id"])


def add_piece(model: dict, token: Mapping) -> None:
    """Makes a special token a piece of a model, unless it is one."""
    if isinstance(model["vocab"], dict):
        model["vocab"].setdefault(token["content"], token["id"])
    elif token["content"] not in dict(model["vocab"]):
        while len(model["vocab"]) < token["id"]:
            model["vocab"].append([f"[no piece {len(model['vocab'])}]", 0.0])
        model["vocab"].append([token["content"], 0.0])
