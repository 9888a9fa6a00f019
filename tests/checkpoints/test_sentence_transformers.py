"""`encode` applies sentence-transformers' modules after the encoder, or refuses them by name."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.sentence_transformers import read_modules
from tests.helpers.models import CONFIG_JSON, PIECES, assert_trees_equal, state_dict

SIZE = CONFIG_JSON["hidden_size"]
TEXTS = ["the old river", "a", "the road of the king and the city"]
TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"


def write_model(directory, modules, **files):
    """Writes an encoder and `modules`: (type, values of its config.json, tensors) of each."""
    directory.mkdir(parents=True)
    config = {"model_type": "bert", "architectures": ["BertModel"]} | CONFIG_JSON
    tensors = {name: value for name, value in state_dict().items() if name.startswith("bert.")}
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for index, (name, values, weights) in enumerate(modules, start=1):
        path = f"{index}_{name}"
        (directory / path).mkdir()
        (directory / path / "config.json").write_text(json.dumps(values))
        if weights:
            save_file(weights, directory / path / "model.safetensors")
        entries.append(
            {
                "idx": index,
                "name": f"{index}",
                "path": path,
                "type": name if "." in name else f"sentence_transformers.models.{name}",
            }
        )
    files = {
        "config": config,
        "modules": entries,
        "tokenizer_config": {"do_lower_case": True},
    } | files
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    save_file(tensors, directory / "model.safetensors")
    return directory


def pooling(*modes):
    return ("Pooling", {"word_embedding_dimension": SIZE, "pooling_mode": list(modes)}, {})


def dense(inputs, outputs, activation=TANH, **options):
    rng = np.random.default_rng(outputs)
    tensors = {"linear.weight": rng.normal(size=(outputs, inputs)).astype(np.float32)}
    if options.get("bias", True):
        tensors["linear.bias"] = rng.normal(size=outputs).astype(np.float32)
    values = {"in_features": inputs, "out_features": outputs, "activation_function": activation}
    return ("Dense", values | options, tensors)


def splade(**options):
    return ("SpladePooling", options, {})


NORMALIZE = ("Normalize", {}, {})
MASKED_LM = {"sentence_bert_config": {"transformer_task": "fill-mask"}}


def test_poolings_projections_and_normalization_are_applied(tmp_path):
    first, second = dense(2 * SIZE, 7), dense(7, 3, IDENTITY, bias=False)
    modules = [pooling("max", "cls"), first, ("Dropout", {"dropout": 0.1}, {}), second, NORMALIZE]
    model = bert_jax.load(write_model(tmp_path / "m", modules))
    pooled = np.concatenate([model.encode(TEXTS, pooling=name) for name in ("max", "cls")], axis=1)
    hidden = np.tanh(pooled @ first[2]["linear.weight"].T + first[2]["linear.bias"])
    expected = hidden @ second[2]["linear.weight"].T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-5)
    assert model.encode([]).shape == (0, 3) and model.encode(TEXTS[0]).shape == (3,)


@pytest.mark.parametrize("key", ["pooling_mode_cls_token", "pooling_mode_weightedmean_tokens"])
def test_older_names_of_poolings_are_read(key, tmp_path):
    values = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": False, key: True}
    model = bert_jax.load(write_model(tmp_path / "m", [("Pooling", values, {})]))
    name = "cls" if "cls" in key else "weightedmean"
    np.testing.assert_array_equal(model.encode(TEXTS), model.encode(TEXTS, pooling=name))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sentence_bert_config": {"max_seq_length": 4}}, 4),
        (
            {"sentence_bert_config": {"max_seq_length": None}},
            CONFIG_JSON["max_position_embeddings"],
        ),
        ({"tokenizer_config": {"do_lower_case": True, "model_max_length": 5}}, 5),
        (
            {"tokenizer_config": {"model_max_length": 10**30}},
            CONFIG_JSON["max_position_embeddings"],
        ),
    ],
)
def test_maximum_length_is_read_from_the_model(files, expected, tmp_path):
    model = bert_jax.load(write_model(tmp_path / "m", [pooling("mean")], **files))
    assert model.head["max_seq_length"] == expected


def test_default_prompt_precedes_every_text(tmp_path):
    files = {"prompts": {"query": "the old ", "passage": ""}, "default_prompt_name": "query"}
    model = bert_jax.load(
        write_model(tmp_path / "m", [pooling("mean")], config_sentence_transformers=files)
    )
    plain = bert_jax.load(write_model(tmp_path / "n", [pooling("mean")]))
    np.testing.assert_array_equal(
        model.encode(["river", "a"]), plain.encode(["the old river", "the old a"])
    )
    # "passage" is the name that this model has for the prompt of documents.
    documents = model.encode(["river"], prompt_name="document")
    np.testing.assert_array_equal(documents, plain.encode(["river"]))
    np.testing.assert_array_equal(documents, model.encode(["river"], prompt_name="passage"))
    with pytest.raises(ValueError, match=r"'title'.*query, document"):
        model.encode(["river"], prompt_name="title")
    with pytest.raises(ValueError, match=r"prompt_name='query'.*pooling"):
        model.encode(["river"], pooling="mean", prompt_name="query")


def test_encoder_in_a_separate_folder_is_read(tmp_path):
    model = write_model(tmp_path / "m", [pooling("cls"), NORMALIZE])
    expected = bert_jax.load(model).encode(TEXTS)
    folder = model / "0_Transformer"
    folder.mkdir()
    for path in [
        path for path in model.iterdir() if path.is_file() and path.name != "modules.json"
    ]:
        path.rename(folder / path.name)
    modules = json.loads((model / "modules.json").read_text())
    modules[0]["path"] = folder.name
    (model / "modules.json").write_text(json.dumps(modules))
    np.testing.assert_array_equal(bert_jax.load(model).encode(TEXTS), expected)


def test_modules_survive_conversion_to_native_and_back(tmp_path):
    modules = [pooling("cls", "mean"), dense(2 * SIZE, 6), dense(6, 4, IDENTITY), NORMALIZE]
    prompt = {"prompts": {"p": "the ", "query": "a "}, "default_prompt_name": "p"}
    source = write_model(tmp_path / "m", modules, config_sentence_transformers=prompt)
    model = read_model(source)
    write_checkpoint(tmp_path / "native", model.params, model.settings, model.tokenizer)
    native = read_model(tmp_path / "native")
    save_huggingface(tmp_path / "back", native.params, native.settings, native.tokenizer)
    expected = bert_jax.load(source).encode(TEXTS)
    for directory in (tmp_path / "native", tmp_path / "back"):
        assert read_model(directory).settings["head"]["prompts"] == prompt["prompts"]
        assert_trees_equal(read_model(directory).params, model.params)
        np.testing.assert_array_equal(bert_jax.load(directory).encode(TEXTS), expected)
    assert [type_ for type_ in read_modules(tmp_path / "back").head["projections"]] == (
        model.settings["head"]["projections"]
    )


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        ([("WordWeights", {}, {})], {}, "lists the modules Transformer, WordWeights"),
        ([pooling("mean"), ("LayerNorm", {}, {})], {}, "Transformer, Pooling, LayerNorm"),
        ([("mine.Pooling", {}, {})], {}, "lists the modules Transformer, mine.Pooling"),
        ([pooling("mean"), ("Dense", {}, {})], {}, "has none of model.safetensors"),
        ([pooling("mean"), NORMALIZE, dense(SIZE, 3)], {}, "a Dense module after Normalize"),
        ([pooling("attention")], {}, r"pooling \['attention'\] is not supported"),
        ([("Pooling", {"pooling_mode_new": True}, {})], {}, r"pooling \['pooling_mode_new'\]"),
        ([pooling("mean"), dense(SIZE, 3, "torch.nn.modules.activation.ELU")], {}, "ELU, expected"),
        ([pooling("mean"), dense(SIZE, 3, "mine.Tanh")], {}, "activation_function is mine.Tanh"),
        ([pooling("mean"), dense(SIZE, 3, use_residual=True)], {}, "use_residual is True"),
        (
            [pooling("mean"), dense(SIZE, 3, module_input_name="token_embeddings")],
            {},
            "module_input_name is 'token_embeddings'",
        ),
        (
            [pooling("mean")],
            {"config_sentence_transformers": {"similarity_fn_name": "jaccard"}},
            "similarity_fn_name is 'jaccard'",
        ),
        (
            [pooling("mean")],
            {"sentence_bert_config": {"transformer_task": "fill-mask"}},
            "transformer_task is 'fill-mask'",
        ),
        (
            [pooling("mean")],
            {
                "sentence_bert_config": {"do_lower_case": True},
                "tokenizer_config": {"do_lower_case": False},
            },
            "do_lower_case of a cased tokenizer is not supported",
        ),
        (
            [("Pooling", {"pooling_mode": "mean", "include_prompt": False}, {})],
            {"config_sentence_transformers": {"prompts": {"p": "x"}, "default_prompt_name": "p"}},
            "include_prompt=False is not supported with a prompt",
        ),
        (
            [("Pooling", {"pooling_mode": "mean", "include_prompt": False}, {})],
            {"config_sentence_transformers": {"prompts": {"query": "x"}}},
            "include_prompt=False is not supported with a prompt",
        ),
        ([pooling("mean"), dense(SIZE + 1, 3)], {}, "projection_0.weight: exp"),
        *(
            ([pooling("mean")], {"sentence_bert_config": {name: {"x": 1}}}, rf"{name} is \{{'x': 1")
            for name in ("model_args", "tokenizer_args", "config_args", "model_kwargs")
        ),
        (
            [pooling("mean")],
            {"sentence_bert_config": {"processor_kwargs": {"padding_side": "left"}}},
            r"sentence_bert_config\.json: processor_kwargs is \{'padding_side': 'left'\}",
        ),
        (
            [pooling("mean")],
            {"sentence_bert_config": {"modality_config": {"text": {"method": "pooled"}}}},
            "modality_config is",
        ),
        (
            [pooling("mean")],
            {"sentence_bert_config": {"new": "z"}},
            "the option new='z' is not sup",
        ),
        ([pooling("mean"), ("Normalize", {"p": 1}, {})], {}, "the option p=1 is not supported"),
        ([pooling("mean"), dense(SIZE, 3, gated=True)], {}, "the option gated=True is not"),
        ([("Pooling", {"pooling_mode": "cls", "scale": 2}, {})], {}, "scale=2"),
        (
            [pooling("mean")],
            {"config_sentence_transformers": {"model_type": "SparseEncoder"}},
            "model_type is 'SparseEncoder'",
        ),
        ([splade()], {}, "transformer_task"),
        ([splade()], MASKED_LM, "needs the tensors of 'mlm'"),
        ([splade(pooling_strategy="mean")], MASKED_LM, "pooling_strategy is 'mean'"),
        ([splade(scale=2)], MASKED_LM, "scale=2"),
        (
            [splade()],
            MASKED_LM | {"config_sentence_transformers": {"max_active_dims": 0}},
            "max_active_dims is 0",
        ),
        (
            [splade()],
            MASKED_LM | {"config_sentence_transformers": {"similarity_fn_name": "euclidean"}},
            "similarity_fn_name",
        ),
        ([pooling("mean"), ("SparseAutoEncoder", {}, {})], {}, "modules .*SparseAutoEncoder"),
        (
            [pooling("mean")],
            {"sentence_bert_config": {"max_seq_length": 0}},
            r"sentence_bert_config\.json: max_seq_length is 0",
        ),
        (
            [pooling("mean")],
            {"sentence_bert_config": {"max_seq_length": "64"}},
            "max_seq_length is '64'",
        ),
        (
            [pooling("mean")],
            {"tokenizer_config": {"model_max_length": 2}},
            r"tokenizer_config\.json: model_max_length is 2",
        ),
    ],
)
def test_unsupported_options_that_change_the_vectors_are_refused_by_name(
    modules, files, message, tmp_path
):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bert_jax.load(write_model(tmp_path / "m", modules, **files))


@pytest.mark.parametrize("folder", ["1_Pooling", "2_Dense"])
def test_missing_file_of_a_module_is_named(folder, tmp_path):
    model = write_model(tmp_path / "m", [pooling("mean"), dense(SIZE, 3)])
    (model / folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=rf"modules\.json needs .*{folder}/config.json, wh"):
        bert_jax.load(model)


def test_files_of_version_6_are_read(tmp_path):
    """As sentence-transformers 6.2.0 saves a model, with every option that it writes."""
    names = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    modules = [
        (
            "Pooling",
            {"embedding_dimension": SIZE, "pooling_mode": "cls", "include_prompt": True},
            {},
        ),
        dense(SIZE, 3, **names),
        ("Normalize", names, {}),
    ]
    files = {
        "sentence_bert_config": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": text},
            "module_output_name": "token_embeddings",
        },
        "config_sentence_transformers": {
            "__version__": {
                "pytorch": "2.13.0+cpu",
                "sentence_transformers": "6.2.0",
                "transformers": "5.23.0",
            },
            "default_prompt_name": None,
            "model_type": "SentenceTransformer",
            "prompts": {"document": "", "query": ""},
            "similarity_fn_name": "cosine",
        },
    }
    model = bert_jax.load(write_model(tmp_path / "m", modules, **files))
    assert model.encode(TEXTS).shape == (len(TEXTS), 3) and model.head["pooling"] == "cls"
