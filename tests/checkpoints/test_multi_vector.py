"""Options of MultiVectorEncoder and of PyLate are read, or refused by name."""

import json
import string

import numpy as np
import pytest
from safetensors.numpy import save_file

from bert_jax.checkpoints.multi_vector import (
    is_multi_vector,
    multi_vector_files,
    pylate_files,
    read_multi_vector,
)
from bert_jax.tokenizers.new_words import find_in_texts
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary

SIZE = 4
HEAD = {
    "task": "multi_vector",
    "labels": [],
    "projections": [{"size": 3, "has_bias": False, "activation": "identity"}],
    "normalize": True,
    "query_expansion": {"strategy": "fixed", "length": 8, "attend": True, "token": None},
    "skip_words": ["."],
    "prompts": {"query": "a ", "document": ""},
    "max_seq_length": 16,
    "max_query_length": 8,
}


def write_files(directory, files, changes=()):
    """Writes the JSON files of a head, with changed keys of some files, and its dense layer."""
    for name, values in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        changed = dict(changes).get(name, {})
        path.write_text(json.dumps(values | changed if changed else values))
    save_file({"linear.weight": np.ones((3, SIZE))}, directory / "1_Dense/model.safetensors")
    return directory


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"query_expansion": None, "normalize": False, "similarity": "meanmaxsim"},
        {"query_expansion": HEAD["query_expansion"] | {"strategy": "min"}, "max_query_length": 12},
    ],
)
def test_files_are_read_as_the_same_head(tmp_path, fields):
    head = HEAD | fields
    directory = write_files(tmp_path, multi_vector_files(SIZE, head))
    assert is_multi_vector(directory)
    modules = read_multi_vector(directory)
    assert modules.head == head
    assert modules.tensors["projection_0.weight"].shape == (3, SIZE)


def test_files_for_pylate_are_read_as_the_same_head(tmp_path):
    head = HEAD | {"prompts": {"query": "[Q] ", "document": "a "}}
    files = pylate_files(SIZE, head, {"query": "[Q] "})
    assert files["config_sentence_transformers.json"]["query_prefix"] == "[Q] "
    modules = read_multi_vector(write_files(tmp_path, files))
    assert modules.head == head and modules.markers == ("[Q] ",)


@pytest.mark.parametrize(
    "fields",
    [
        {"normalize": False},
        {"similarity": "meanmaxsim"},
        {"query_expansion": HEAD["query_expansion"] | {"strategy": "min"}},
        {"projections": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_pylate_lacks_is_an_error(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        pylate_files(SIZE, HEAD | fields, {})


def test_defaults_of_pylate_are_those_of_its_earlier_versions(tmp_path):
    files = pylate_files(SIZE, HEAD, {})
    files["config_sentence_transformers.json"] = {"model_type": "ColBERT"}
    modules = read_multi_vector(write_files(tmp_path, files))
    assert modules.head == HEAD | {
        "query_expansion": {"strategy": "fixed", "length": 32, "attend": False, "token": None},
        "skip_words": list(string.punctuation),
        "prompts": {"query": "[Q] ", "document": "[D] "},
        "max_seq_length": 180,
        "max_query_length": 32,
    }
    assert modules.markers == ("[Q] ", "[D] ")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["query"]}, "skiplist_tasks"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [7]}, "keep_only_token_ids"),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "module_input"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "module_input"),
        ("1_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "max"}}, "strategy='max'"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min"}}, "length=None"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "min", "width": 1}},
            "width=1",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "dot"}, "similarity_fn_name"),
        ("config_sentence_transformers.json", {"pool": 2}, "pool=2"),
    ],
)
def test_other_options_are_errors(tmp_path, name, values, message):
    write_files(tmp_path, multi_vector_files(SIZE, HEAD), {name: values})
    with pytest.raises(ValueError, match=message):
        read_multi_vector(tmp_path)


@pytest.mark.parametrize(
    "kind", ["multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling", "Pooling"]
)
def test_other_modules_are_errors(tmp_path, kind):
    files = multi_vector_files(SIZE, HEAD)
    files["modules.json"][-1]["type"] = f"sentence_transformers.{kind}"
    with pytest.raises(ValueError, match=kind.rpartition(".")[2]):
        read_multi_vector(write_files(tmp_path, files))


def test_markers_are_found_in_texts_as_one_token(tmp_path):
    words = ["[unused0]", "king"]
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", words))
    marker = tokenizer.token_to_id("[unused0]")
    assert marker not in tokenizer.encode("[unused0] king")
    with_markers = find_in_texts(tokenizer, ["[unused0] ", "[absent] ", "king "])
    assert with_markers.encode("kings") == tokenizer.encode("kings")
    assert with_markers.encode("[unused0] king") == [marker, tokenizer.token_to_id("king")]
    assert with_markers.vocab_size == tokenizer.vocab_size
