"""What a user reads about a directory that is not read: one test per kind of mistake."""

import json
import warnings

import numpy as np
import pytest
from safetensors.numpy import save_file

import bert_jax
from tests.helpers.models import CONFIG_JSON, PIECES, state_dict

WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
DECODER = {"cls.predictions.decoder.weight": np.zeros((131, 12))}
LAYER = "bert.encoder.layer.0"
PEFT = r"merge it into its model with peft, model\.merge_and_unload\(\).*remove the files of the ad"


def write(directory, tensors=(), files=(), **values):
    """Writes a model of transformers; `files` are further empty ones."""
    directory.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON | values))
    (directory / "vocab.txt").write_text("\n".join(PIECES))
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    return directory


def prefixed(prefix: str) -> dict:
    return {f"{prefix}{name}": value for name, value in state_dict().items()}


def renamed(name: str, new_name: str) -> dict:
    return {new_name if each == name else each: value for each, value in state_dict().items()}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        # What is there, not what a workdir would hold.
        ({"files": ["tf_model.h5"]}, r"^\S+/m holds tf_model\.h5, which is not read"),
        ({"files": ["adapter_config.json"]}, rf"^\S+/m holds adapter_config\.json, .*{PEFT}"),
        (
            {
                "files": [
                    *(f"checkpoint-{step}/model.safetensors" for step in (20, 100)),
                    "training_args.bin",
                ]
            },
            r"^\S+/m holds checkpoints of transformers' Trainer, checkpoint-20, checkpoint-100: "
            r"use \S+/checkpoint-100, the last$",
        ),
        ({}, r"^\S+/m holds config\.json, but no weights"),
        # Stored beside the weights, and not a part of them.
        *(
            ({"tensors": state_dict(), "files": [name]}, rf"^\S+/m holds {name}, .*{PEFT}")
            for name in (
                "adapter_config.json",
                "adapter_model.safetensors",
                "pytorch_adapter.bin",
                "adapter_fusion_config.json",
                "adapters.npz",
                "my_lora.safetensors",
                "adapter_model-00001-of-00002.bin",
                "adapter_model.safetensors.index.json",
            )
        ),
        *(
            (
                {"tensors": state_dict() | {name: np.zeros((4, 12))}},
                rf"1 tensors belong to an adapter, such as {name}, and .* model\.merge_and_unload",
            )
            for name in (
                f"{LAYER}.attention.self.query.lora_A",
                f"{LAYER}.attention.self.query.base_layer.weight",
                f"base_model.model.{LAYER}.attention.self.key.lora_B.default.weight",
                f"{LAYER}.output.adapters.ner.adapter_down.0.weight",
                f"{LAYER}.output.adapter.down_project.weight",
                f"{LAYER}.attention.self.value.ia3_l.default",
                "prefix_encoder.embedding.weight",
            )
        ),
        *(
            (
                {"files": [name]},
                rf"^\S+/m/{name} does not have the name of a weight file .*: {fix}",
            )
            for name, fix in (
                ("model.fp16.safetensors", "rename it to model.safetensors"),
                ("model.bin", "rename it to pytorch_model.bin"),
                ("model.gguf", "convert it to model.safetensors"),
                (
                    "pytorch_model-00002-of-00003.bin",
                    "it is one of several, add pytorch_model.bin.index.json",
                ),
            )
        ),
        (
            {"tensors": state_dict(), "adapters": {"adapters": {"ner": "x"}}},
            "config.json: the model has the adapters ner, which are not read",
        ),
        (
            {"tensors": state_dict(), "auto_map": {"AutoModel": "modeling_x.XModel"}},
            r"AutoModel is modeling_x\.XModel, code of",
        ),
        # Names that are not as expected.
        (
            {"tensors": prefixed("teacher.")},
            r"the file has teacher\.\S+: save only the submodule teacher",
        ),
        (
            {"tensors": state_dict(), "model_type": "albert"},
            r"albert\.\S+: .* the file has bert\.\S+",
        ),
        (
            {"tensors": renamed(WORD_EMBEDDINGS, "bert.embeddings.word_embedding.weight")},
            rf"{WORD_EMBEDDINGS}: .* found no such tensor, the file has bert\.embeddings\.word_emb",
        ),
        (
            {"tensors": state_dict() | DECODER, "tie_word_embeddings": False},
            r"expected a copy of .* \(tie_word_embeddings in config.json\), .*AutoModel\.from_pret",
        ),
        # Other models.
        (
            {"tensors": state_dict(), "model_type": "megatron-bert"},
            "'megatron-bert' .*its LayerNorm comes before",
        ),
        (
            {"tensors": state_dict(), "model_type": "convbert"},
            "'convbert' .*its layers have convolutions",
        ),
    ],
)
def test_error_says_what_is_there_and_what_to_do(contents, message, tmp_path):
    write(tmp_path / "m", **contents)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bert_jax.load(tmp_path / "m")


def test_best_checkpoint_of_a_trainer_is_named(tmp_path):
    for step in (10, 20, 100):
        write(tmp_path / f"run/checkpoint-{step}", state_dict())
    state = {"best_model_checkpoint": "/home/other/run/checkpoint-20"}
    (tmp_path / "run/checkpoint-100/trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(FileNotFoundError, match=r"use \S+/run/checkpoint-20, the best"):
        bert_jax.load(tmp_path / "run")
    bert_jax.load(tmp_path / "run/checkpoint-20")


def test_directory_of_models_names_one_of_them(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / "models" / name, state_dict())
    with pytest.raises(FileNotFoundError, match=r"directories of models"):
        bert_jax.load(tmp_path / "models")


def test_path_of_a_file_names_its_directory(tmp_path):
    write(tmp_path / "m", state_dict())
    with pytest.raises(OSError, match=r"m/model\.safetensors is a file"):
        bert_jax.load(tmp_path / "m/model.safetensors")


def test_layers_beyond_those_of_the_config_are_named(tmp_path):
    write(tmp_path / "m", state_dict(num_layers=3))
    with pytest.warns(UserWarning, match="the file has 3 layers, but config.json says 2"):
        bert_jax.load(tmp_path / "m")
    write(tmp_path / "m", state_dict(num_layers=3), num_hidden_layers=3)
    with warnings.catch_warnings(action="error"):
        bert_jax.load(tmp_path / "m")


@pytest.mark.parametrize("name", ["model_head.pkl", "pytorch_model_head.bin"])
def test_a_head_in_a_file_of_its_own_is_named(name, tmp_path):
    write(tmp_path / "m", state_dict(), files=[name])
    with pytest.warns(UserWarning, match=rf"/m/{name}, .*, is not read"):
        bert_jax.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{LAYER}.attention.self.query_norm.weight", "the encoder may have parts that are not"),
        ("regressor.weight", "a head is loaded if `architectures` in config.json names its class"),
    ],
)
def test_tensors_that_are_not_read_are_named(name, message, tmp_path):
    write(tmp_path / "m", state_dict() | {name: np.zeros((12,))})
    with pytest.warns(UserWarning, match=f"1 tensors are unused, such as {name}; {message}"):
        bert_jax.load(tmp_path / "m")


def test_code_of_a_tokenizer_is_refused(tmp_path):
    directory = write(tmp_path / "m", state_dict())
    values = {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"AutoTokenizer is \['tokenization_x\.XTokenizer', None"):
        bert_jax.load(directory)


def test_second_text_of_a_model_with_one_segment_is_refused(tmp_path):
    tensors = state_dict()
    name = "bert.embeddings.token_type_embeddings.weight"
    tensors[name] = tensors[name][:1].copy()
    directory = write(tmp_path / "m", tensors, type_vocab_size=1)
    model = bert_jax.load(directory)
    model.encode(["w1", "w2"])
    for method in (model.encode, model.hidden_states, model.batch, model.attention):
        with pytest.raises(ValueError, match="type_vocab_size is 1, so the model has no segment"):
            method([("w1", "w2")])
    values = {"model_input_names": ["input_ids", "attention_mask"]}  # As the message says.
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    assert np.isfinite(bert_jax.load(directory).encode([("w1", "w2")])).all()
