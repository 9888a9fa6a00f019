"""BERT, ALBERT and ELECTRA as Google released them, written by TensorFlow (`make tf-parity`)."""

import json
import pathlib

import numpy as np
import pytest

from bert_jax.checkpoints.read import read_model
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.encoder import EncoderModel
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.replaced_tokens import Discriminator
from tests.helpers.corpora import write_albert_vocabulary
from tests.helpers.models import TORCH_PIECES, TORCH_SIZES, batch_of_row

tf = pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def save_variables(prefix: pathlib.Path, values: dict[str, np.ndarray]) -> None:
    """Writes a TensorFlow 1 checkpoint."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in values.items():
            tf.compat.v1.get_variable(name, initializer=value, use_resource=False)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(prefix))


def test_checkpoint_of_bert_with_the_released_names_is_read_exactly(tmp_path):
    hidden, feed_forward, rng = 24, 20, np.random.default_rng(0)
    layer = {
        **{f"attention/self/{part}/kernel": (hidden, hidden) for part in ("query", "key", "value")},
        **{f"attention/self/{part}/bias": (hidden,) for part in ("query", "key", "value")},
        "attention/output/dense/kernel": (hidden, hidden),
        "attention/output/dense/bias": (hidden,),
        "attention/output/LayerNorm/gamma": (hidden,),
        "attention/output/LayerNorm/beta": (hidden,),
        "intermediate/dense/kernel": (hidden, feed_forward),
        "intermediate/dense/bias": (feed_forward,),
        "output/dense/kernel": (feed_forward, hidden),
        "output/dense/bias": (hidden,),
        "output/LayerNorm/gamma": (hidden,),
        "output/LayerNorm/beta": (hidden,),
    }
    shapes = {
        "bert/embeddings/word_embeddings": (40, hidden),
        "bert/embeddings/position_embeddings": (16, hidden),
        "bert/embeddings/token_type_embeddings": (2, hidden),
        "bert/embeddings/LayerNorm/gamma": (hidden,),
        "bert/embeddings/LayerNorm/beta": (hidden,),
        **{f"bert/encoder/layer_{i}/{name}": size for i in (0, 1) for name, size in layer.items()},
        "bert/pooler/dense/kernel": (hidden, hidden),
        "bert/pooler/dense/bias": (hidden,),
        "cls/predictions/transform/dense/kernel": (hidden, hidden),
        "cls/predictions/transform/dense/bias": (hidden,),
        "cls/predictions/transform/LayerNorm/gamma": (hidden,),
        "cls/predictions/transform/LayerNorm/beta": (hidden,),
        "cls/predictions/output_bias": (40,),
        "cls/seq_relationship/output_weights": (2, hidden),
        "cls/seq_relationship/output_bias": (2,),
    }
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    slots = {f"{name}/adam_{m}": values[name] for name in values for m in "mv"}
    save_variables(tmp_path / "bert_model.ckpt", values | slots | {"global_step": np.int64(7)})
    (tmp_path / "bert_config.json").write_text(json.dumps(TORCH_SIZES | {"type_vocab_size": 2}))
    (tmp_path / "vocab.txt").write_text("\n".join(TORCH_PIECES) + "\n")

    params, _, _, report = read_model(tmp_path)
    assert set(report.loaded) == set(values) and not report.missing
    assert set(report.unused) == {*slots, "global_step"}
    bert, layers = params["encoder"], params["encoder"]["layers"]
    embeddings = bert["embeddings"]
    expected = {
        "bert/embeddings/word_embeddings": embeddings["token_embedding"]["embedding"][:40],
        "bert/embeddings/position_embeddings": bert["embeddings"]["position_embedding"][
            "embedding"
        ],
        "bert/embeddings/token_type_embeddings": bert["embeddings"]["segment_embedding"][
            "embedding"
        ],
        "bert/embeddings/LayerNorm": bert["embeddings"]["layer_norm"],
        "bert/pooler/dense": bert["pooler"]["dense"],
        "cls/predictions/transform/dense": params["mlm"]["transform"],
        "cls/predictions/transform/LayerNorm": params["mlm"]["layer_norm"],
        "cls/predictions/output_bias": params["mlm"]["bias"][:40],
        "cls/seq_relationship/output_weights": params["nsp"]["dense"]["kernel"].T,
        "cls/seq_relationship/output_bias": params["nsp"]["dense"]["bias"],
    }
    modules = {
        "attention/self/query": "query",
        "attention/self/key": "key",
        "attention/self/value": "value",
        "attention/output/dense": "attention_output",
        "attention/output/LayerNorm": "attention_layer_norm",
        "intermediate/dense": "intermediate",
        "output/dense": "output",
        "output/LayerNorm": "output_layer_norm",
    }
    for index in (0, 1):
        for reference, ours in modules.items():
            one_layer = {leaf: value[index] for leaf, value in layers[ours].items()}
            expected[f"bert/encoder/layer_{index}/{reference}"] = one_layer
    leaves = {"kernel": "kernel", "bias": "bias", "gamma": "scale", "beta": "bias"}
    for name, value in values.items():
        module, leaf = name.rsplit("/", 1)
        actual = expected[name] if name in expected else expected[module][leaves[leaf]]
        np.testing.assert_array_equal(actual, value, err_msg=name)


ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
ALBERT_IN_TENSORFLOW = "bert/encoder/transformer/group_0/inner_group_0"
# Names of transformers, or how they begin -> of the released variables; the first that fits counts.
ALBERT_NAMES = {
    f"{ALBERT_LAYER}.full_layer_layer_norm": f"{ALBERT_IN_TENSORFLOW}/LayerNorm_1",
    f"{ALBERT_LAYER}.attention.LayerNorm": f"{ALBERT_IN_TENSORFLOW}/LayerNorm",
    f"{ALBERT_LAYER}.attention.dense": f"{ALBERT_IN_TENSORFLOW}/attention_1/output/dense",
    f"{ALBERT_LAYER}.attention": f"{ALBERT_IN_TENSORFLOW}/attention_1/self",
    f"{ALBERT_LAYER}.ffn_output": f"{ALBERT_IN_TENSORFLOW}/ffn_1/intermediate/output/dense",
    f"{ALBERT_LAYER}.ffn": f"{ALBERT_IN_TENSORFLOW}/ffn_1/intermediate/dense",
    "albert.encoder": "bert/encoder",
    "albert.embeddings": "bert/embeddings",
    "albert.pooler": "bert/pooler/dense",
    "predictions.bias": "cls/predictions/output_bias",
    "predictions": "cls/predictions/transform",
    "sop_classifier.classifier.weight": "cls/seq_relationship/output_weights",
    "sop_classifier.classifier.bias": "cls/seq_relationship/output_bias",
}
DISCRIMINATOR_NAMES = {
    "discriminator_predictions.dense_prediction": "discriminator_predictions/dense_1",
    "discriminator_predictions": "discriminator_predictions",
    "electra": "electra",
}
GENERATOR_NAMES = {
    "electra.embeddings.": "electra/embeddings/",
    "electra": "generator",
    "generator_lm_head.bias": "generator_predictions/output_bias",
    "generator_predictions": "generator_predictions",
}


def released_variables(model, names: dict[str, str]) -> dict[str, np.ndarray]:
    """Returns the parameters of a model of transformers as Google's code stores them."""
    variables = {}
    for stored, parameter in model.named_parameters():  # Tied ones only once.
        old = next(old for old in names if stored.startswith(old))
        name = (names[old] + stored.removeprefix(old)).replace(".", "/")
        name, value = name.replace("encoder/layer/", "encoder/layer_"), parameter.detach().numpy()
        if "LayerNorm" in name:
            name = name.replace("/weight", "/gamma").replace("/bias", "/beta")
        elif "embeddings/" in name:
            name = name.removesuffix("/weight")
        elif name.endswith("/weight"):
            name, value = name.replace("/weight", "/kernel"), value.T
        variables[name] = value
    return variables


def random_parameters(model):
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data += 1
    return model.eval()


def torch_ids(ids: np.ndarray):
    return torch.tensor(ids, dtype=torch.long)


def hidden_states_apart(read, encoder, ids: np.ndarray) -> float:
    """Returns the maximum difference of our hidden states from the `encoder` in torch."""
    model = EncoderModel(config_from_settings(read.settings))
    ours = model.apply({"params": {"encoder": read.params["encoder"]}}, batch_of_row(ids))
    with torch.no_grad():
        reference = encoder(torch_ids(ids)).last_hidden_state.numpy()
    assert np.abs(reference).max() > 1
    return float(np.abs(np.asarray(ours) - reference).max())


def test_checkpoint_of_albert_has_the_hidden_states_of_transformers(tmp_path):
    sizes = TORCH_SIZES | {"embedding_size": 8, "type_vocab_size": 2}
    model = random_parameters(
        transformers.AlbertForPreTraining(transformers.AlbertConfig(**sizes, hidden_act="gelu_new"))
    )
    values = released_variables(model, ALBERT_NAMES)
    slots = {f"{name}/lamb_{m}": values[name] for name in values for m in "mv"}
    save_variables(tmp_path / "model.ckpt-best", values | slots | {"global_step": np.int64(7)})
    google = sizes | {"hidden_act": "gelu", "num_hidden_groups": 1, "inner_group_num": 1}
    (tmp_path / "albert_config.json").write_text(json.dumps(google))
    write_albert_vocabulary(tmp_path / "30k-clean.model")

    read = read_model(tmp_path)
    assert set(read.report.loaded) == set(values) and not read.report.missing
    assert set(read.report.unused) == {*slots, "global_step"}
    ids = np.random.default_rng(0).integers(5, 40, (1, 16), dtype=np.int32)
    assert hidden_states_apart(read, model.albert, ids) < 1e-5
    batch = batch_of_row(ids) | {"target_positions": np.arange(16)[None]}
    batch |= {"pooled_positions": np.zeros((1, 1), np.int32)}
    logits, order = PretrainingModel(config_from_settings(read.settings)).apply(
        {"params": read.params}, batch
    )
    expected = model(torch_ids(ids))
    np.testing.assert_allclose(logits[..., :40], expected.prediction_logits.detach(), atol=2e-5)
    np.testing.assert_allclose(order[:, 0], expected.sop_logits.detach(), atol=2e-5)


@pytest.mark.parametrize("generator_size", [12, 24])
def test_checkpoint_of_electra_has_both_networks_of_transformers(generator_size, tmp_path):
    sizes = TORCH_SIZES | {"embedding_size": 8, "type_vocab_size": 2}
    small = sizes | {"hidden_size": generator_size, "intermediate_size": 4 * generator_size}
    discriminator = random_parameters(
        transformers.ElectraForPreTraining(transformers.ElectraConfig(**sizes))
    )
    generator = transformers.ElectraForMaskedLM(transformers.ElectraConfig(**small))
    generator = random_parameters(generator)
    generator.electra.embeddings.load_state_dict(discriminator.electra.embeddings.state_dict())
    values = released_variables(discriminator, DISCRIMINATOR_NAMES)
    of_discriminator = set(values)
    of_generator = released_variables(generator, GENERATOR_NAMES)
    values |= of_generator
    slots = {f"{name}/adam_{m}": values[name] for name in values for m in "mv"}
    save_variables(tmp_path / "electra_small", values | slots | {"global_step": np.int64(7)})
    (tmp_path / "vocab.txt").write_text("\n".join(TORCH_PIECES) + "\n")
    ids = np.random.default_rng(0).integers(5, 40, (1, 16), dtype=np.int32)

    discriminator.config.save_pretrained(tmp_path)
    read = read_model(tmp_path)
    assert set(read.report.loaded) == of_discriminator and not read.report.missing
    assert set(read.report.unused) == {*values, *slots, "global_step"} - of_discriminator
    assert hidden_states_apart(read, discriminator.electra, ids) < 1e-5
    logits = Discriminator(config_from_settings(read.settings)).apply(
        {"params": read.params}, batch_of_row(ids)
    )
    expected = discriminator(torch_ids(ids)).logits.detach()
    np.testing.assert_allclose(logits, expected, atol=2e-5)

    generator.config.architectures = ["ElectraForMaskedLM"]
    generator.config.save_pretrained(tmp_path)
    read = read_model(tmp_path)
    assert set(read.report.loaded) == set(of_generator) and not read.report.missing
    assert hidden_states_apart(read, generator.electra, ids) < 1e-5
    logits = PretrainingModel(config_from_settings(read.settings), next_sentence=False).apply(
        {"params": read.params}, batch_of_row(ids), np.arange(16)[None], method="predict_tokens"
    )
    expected = generator(torch_ids(ids)).logits.detach()
    np.testing.assert_allclose(logits[..., :40], expected, atol=2e-5)
