"""Writes the files from which transformers reads a tokenizer."""

import json

from bert_jax.tokenizers.byte_pair import byte_level_of, is_roberta
from bert_jax.tokenizers.huggingface import CONFIG_FILENAME, SEGMENTS, TRANSFORMERS_FILENAME
from bert_jax.tokenizers.stored import Layout, StoredTokenizer, bert_processing, ids_of_model
from bert_jax.tokenizers.unigram import show_special_tokens
from bert_jax.tokenizers.wordpiece import VOCABULARY_FILENAME


def transformers_files(stored: StoredTokenizer, max_length: int) -> dict[str, str | dict]:
    """Returns the files, by name, from which transformers reads a tokenizer.

    `max_length` is the maximum of its inputs, in tokens. `read_directory` reads the same tokenizer.
    """
    spec, special_tokens = json.loads(stored.backend.to_str()), stored.special_tokens
    kind, normalizer = spec["model"]["type"], spec["normalizer"]
    is_bert = bool(normalizer) and normalizer["type"] == "BertNormalizer"
    # transformers' BertTokenizer joins texts in BERT's way, whatever the files say.
    is_bert &= stored.layout == Layout()
    config = {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
    }
    if not is_bert:  # Its generic class needs to be told that a pair has segments.
        segments = [SEGMENTS] * stored.layout.has_segments
        config["model_input_names"] = ["input_ids", *segments, "attention_mask"]
    if kind == "WordPiece" and stored.layout == Layout():
        spec["post_processor"] = bert_processing(spec, special_tokens)
    elif kind == "Unigram":
        show_special_tokens(spec, special_tokens)
    elif spec["post_processor"]["type"] == "RobertaProcessing" and is_roberta(spec):
        config["tokenizer_class"] = "RobertaTokenizer"
        config["add_prefix_space"] = byte_level_of(spec)["add_prefix_space"]
    if kind == "WordPiece":
        # transformers ignores it, and has 100.
        config["max_input_chars_per_word"] = spec["model"]["max_input_chars_per_word"]
    if is_bert:
        config |= {
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }
    if stored.filename == VOCABULARY_FILENAME:
        text = stored.content.decode("utf-8-sig")
        return {VOCABULARY_FILENAME: text, CONFIG_FILENAME: config}
    config |= {f"{field}_token": name for field, name in special_tokens._asdict().items()}
    ids, options = ids_of_model(spec), dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    options |= {"normalized": False, "special": True}
    for name in special_tokens:
        if name is not None:
            lstrip = {"lstrip": name == special_tokens.mask and stored.mask_lstrip}
            spec["added_tokens"].append({"id": ids[name], "content": name} | options | lstrip)
    spec["added_tokens"].sort(key=lambda token: token["id"])
    return {TRANSFORMERS_FILENAME: json.dumps(spec, ensure_ascii=False), CONFIG_FILENAME: config}
