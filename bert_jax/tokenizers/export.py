"""Writes the files from which transformers reads a tokenizer."""

import json

from bert_jax.tokenizers.byte_pair import byte_level_of, is_roberta
from bert_jax.tokenizers.esm import is_esm
from bert_jax.tokenizers.huggingface import CONFIG_FILENAME, SEGMENTS
from bert_jax.tokenizers.stored import (
    TOKENIZER_FILENAME,
    Layout,
    StoredTokenizer,
    tokenizer_json,
)
from bert_jax.tokenizers.wordpiece import VOCABULARY_FILENAME, vocabulary_alone


def transformers_files(
    stored: StoredTokenizer, max_length: int, reads_vocabulary: bool = True
) -> dict[str, str | dict]:
    """Returns the files, by name, from which transformers reads a tokenizer.

    `max_length` is the maximum of its inputs, in tokens. Without `reads_vocabulary`, the file of a
    WordPiece vocabulary is not enough. `read_directory` reads the same tokenizer.
    """
    spec = tokenizer_json(stored)
    if is_esm(spec, stored.special_tokens):
        return _esm_files(stored, max_length)
    normalizer, processor = spec["normalizer"], spec["post_processor"]
    is_bert = bool(normalizer) and normalizer["type"] == "BertNormalizer"
    # transformers' BertTokenizer joins texts in BERT's way, whatever the files say.
    is_bert &= stored.layout == Layout() and reads_vocabulary
    config = {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
    }
    if not is_bert:  # Its generic class needs to be told that a pair has segments.
        segments = [SEGMENTS] * stored.layout.has_segments
        config["model_input_names"] = ["input_ids", *segments, "attention_mask"]
    if stored.layout.cls_last:  # transformers' heads read the last position of a row.
        config["padding_side"] = "left"
    if stored.kind == "BPE" and processor["type"] == "RobertaProcessing" and is_roberta(spec):
        config["tokenizer_class"] = "RobertaTokenizer"
        config["add_prefix_space"] = byte_level_of(spec)["add_prefix_space"]
    if stored.kind == "WordPiece":
        # transformers ignores it, and has 100.
        config["max_input_chars_per_word"] = spec["model"]["max_input_chars_per_word"]
    if is_bert:
        config |= {
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }
    vocabulary = vocabulary_alone(stored)
    if vocabulary and reads_vocabulary:
        return {VOCABULARY_FILENAME: vocabulary.decode(), CONFIG_FILENAME: config}
    config |= {f"{field}_token": name for field, name in stored.special_tokens._asdict().items()}
    return {TOKENIZER_FILENAME: json.dumps(spec, ensure_ascii=False), CONFIG_FILENAME: config}


def _esm_files(stored: StoredTokenizer, max_length: int) -> dict[str, str | dict]:
    ids = stored.backend.get_vocab(with_added_tokens=False)
    names = stored.special_tokens._asdict()
    names["eos"] = names.pop("sep")
    config = {"tokenizer_class": "EsmTokenizer", "model_max_length": max_length}
    config |= {f"{field}_token": name for field, name in names.items()}
    return {VOCABULARY_FILENAME: "\n".join(sorted(ids, key=ids.get)), CONFIG_FILENAME: config}
