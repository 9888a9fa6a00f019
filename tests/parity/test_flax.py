"""Old Flax checkpoints: read here, exported, and read by transformers in torch.

The Flax classes are in transformers 4 only. With BERT_JAX_FLAX, a directory of directories that its
`save_pretrained` wrote, each with the outputs of its class in `reference.npz` (its inputs are
`in_input_ids`, ...), those are compared as well.
"""

import json
import os
import pathlib

import flax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import unpack_rows
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import make_model
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.replaced_tokens import Discriminator
from bert_jax.tokenizers.export import transformers_files
from tests.helpers.corpora import random_text, train_bpe
from tests.helpers.models import TORCH_PIECES, TORCH_SIZES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
LENGTHS, LENGTH = (11, 4, 7), 11

TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
CLASSES = {
    "Bert": ("Model", *(f"For{task}" for task in ("PreTraining", "MaskedLM", *TASKS))),
    "Roberta": ("Model", *(f"For{task}" for task in ("MaskedLM", *TASKS))),
    "XLMRoberta": ("Model", *(f"For{task}" for task in ("MaskedLM", *TASKS))),
    "DistilBert": ("Model", *(f"For{task}" for task in ("MaskedLM", *TASKS))),
    "Albert": ("Model", *(f"For{task}" for task in ("PreTraining", "MaskedLM", *TASKS))),
    "Electra": ("Model", *(f"For{task}" for task in ("PreTraining", "MaskedLM", *TASKS))),
}
CASES = [(family, head) for family, heads in CLASSES.items() for head in heads]
CASES.append(("Bert", "ForNextSentencePrediction"))
CAUSAL = ("LMHeadModel", "ForCausalLM")  # The same class, by two names.
CASES += [
    ("Bert", CAUSAL[0]),
    *((name, CAUSAL[1]) for name in ("Roberta", "XLMRoberta", "Electra")),
]


def flax_tree(model) -> dict:
    """Returns the parameters of a model in torch as the Flax class of its name stores them."""
    names = {torch.nn.Linear: "kernel", torch.nn.Embedding: "embedding"}
    names[torch.nn.LayerNorm] = "scale"
    modules, arrays, seen = dict(model.named_modules()), {}, set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:  # The weights of a tied decoder.
            continue
        seen.add(id(parameter))
        *path, leaf = name.split(".")
        module = modules[".".join(path)]
        value = parameter.detach().numpy()
        if leaf == "weight":
            [leaf] = [name for kind, name in names.items() if isinstance(module, kind)]
        arrays[(*path, leaf)] = value.T if leaf == "kernel" else value
    return flax.traverse_util.unflatten_dict(arrays)


def write_flax(directory: pathlib.Path, tree: dict, max_bytes: int) -> None:
    """Writes a tree as `save_pretrained` of a Flax class does, in files of about `max_bytes`."""
    arrays = flax.traverse_util.flatten_dict(tree, sep="/")
    if not max_bytes:
        (directory / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(tree))
        return
    shards, weight_map = [{}], {}
    for name, array in arrays.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + array.nbytes > max_bytes:
            shards.append({})
        shards[-1][name] = array
    for index, shard in enumerate(shards, start=1):
        filename = f"flax_model-{index:05}-of-{len(shards):05}.msgpack"
        tree = flax.traverse_util.unflatten_dict(shard, sep="/")
        (directory / filename).write_bytes(flax.serialization.to_bytes(tree))
        weight_map |= dict.fromkeys(shard, filename)
    content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "flax_model.msgpack.index.json").write_text(json.dumps(content))
    assert len(shards) > 2


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(tmp_path_factory.mktemp("bpe"), random_text(20))


@pytest.mark.parametrize("max_bytes", [0, 5_000])
@pytest.mark.parametrize(("family", "head"), CASES)
def test_flax_weights_are_exported_as_the_same_model(family, head, max_bytes, bpe, tmp_path):
    settings = TORCH_SIZES | ({"num_labels": 4} if "Classification" in head else {})
    if "Roberta" in family:
        settings |= {"vocab_size": bpe.vocab_size, "type_vocab_size": 1, "pad_token_id": 1}
    if family in ("Albert", "Electra"):
        settings |= {"embedding_size": 8}
    if head in CAUSAL:
        settings |= {"is_decoder": True}
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{family}{head}")
    model = model_class(getattr(transformers, f"{family}Config")(**settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    source, written = tmp_path / "source", tmp_path / "written"
    model.config.architectures = [f"Flax{family}{head}"]
    model.config.save_pretrained(source)
    if "Roberta" in family:
        for name, content in transformers_files(bpe.stored, 16).items():
            content = content if isinstance(content, str) else json.dumps(content)
            (source / name).write_text(content)
    else:
        (source / "vocab.txt").write_text("\n".join(TORCH_PIECES) + "\n")
        (source / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    write_flax(source, flax_tree(model), max_bytes)

    loaded = read_model(source)
    assert not loaded.report.unused
    save_huggingface(written, *loaded[:3])
    again, info = model_class.from_pretrained(written, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.randint(5, settings["vocab_size"], (len(LENGTHS), LENGTH))
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    inputs = {"input_ids": torch.where(mask, tokens, model.config.pad_token_id)}
    inputs["attention_mask"] = mask.long()
    if head in CAUSAL:
        inputs["use_cache"] = False
    if head == "ForMultipleChoice":
        inputs = {name: value[None] for name, value in inputs.items()}
    with torch.no_grad():
        expected, actual = model(**inputs), again.eval()(**inputs)
    assert expected.keys() == actual.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], atol=TOLERANCE, err_msg=name)


def references() -> list[pathlib.Path]:
    if not (directory := os.environ.get("BERT_JAX_FLAX")):
        return []
    return sorted(path.parent for path in pathlib.Path(directory).glob("*/reference.npz"))


needs_references = pytest.mark.skipif(not references(), reason="BERT_JAX_FLAX is not set")
by_directory = pytest.mark.parametrize("directory", references(), ids=lambda path: path.name)


def check_outputs(outputs: dict, reference: dict, tolerance: float) -> None:
    """Compares outputs of transformers' names, those of positions where there are tokens."""
    is_real = reference["in_attention_mask"] > 0
    for name, actual in outputs.items():
        difference = np.abs(np.asarray(actual) - reference[name])
        per_position = difference.shape[: is_real.ndim] == is_real.shape
        assert np.max(difference[is_real] if per_position else difference) < tolerance, name


def our_outputs(directory: pathlib.Path, reference: dict) -> dict:
    """Returns hidden states and logits by transformers' names."""
    params, settings, *_ = read_model(directory)
    config, head = config_from_settings(settings), settings.get("head")
    tokens = reference["in_input_ids"]
    shape, tokens = tokens.shape, tokens.reshape(-1, tokens.shape[-1]).astype(np.int32)
    lengths = reference["in_attention_mask"].reshape(tokens.shape).sum(-1)
    second = lengths
    if (segments := reference.get("in_token_type_ids")) is not None and segments.any():
        second = lengths - segments.reshape(tokens.shape).sum(-1)
    bounds = np.stack([np.zeros_like(lengths), second, lengths], -1)[:, None].astype(np.int32)
    rows = {"tokens": tokens, "sequence_bounds": bounds}
    batch = unpack_rows(rows)
    states = Encoder(config).apply({"params": params["encoder"]}, batch, method="all_hidden_states")
    outputs = {"hidden_states": np.moveaxis(states, 0, 2)} if len(shape) == 2 else {}
    variables = {"params": params}
    if head:
        logits = make_model(config, head).apply(variables, rows | batch)
        if head["task"] == "span":
            return outputs | {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
        return outputs | {"logits": logits.reshape(reference["logits"].shape)}
    if "discriminator" in params:
        return outputs | {"logits": Discriminator(config).apply(variables, batch)}
    if "mlm" not in params:
        return outputs
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = PretrainingModel(config, next_sentence="nsp" in params)
    batch |= {"target_positions": positions, "pooled_positions": jnp.zeros_like(tokens[:, :1])}
    if "nsp" not in params:
        logits = model.apply(variables, batch, positions, method="predict_tokens")
        return outputs | {"logits": logits[..., : config.vocab_size]}
    logits, pairs = model.apply(variables, batch)
    name = "sop_logits" if config.family == "albert" else "seq_relationship_logits"
    return outputs | {"prediction_logits": logits[..., : config.vocab_size], name: pairs[:, 0]}


@needs_references
@by_directory
def test_outputs_equal_the_flax_class(directory):
    reference = dict(np.load(directory / "reference.npz"))
    reference["hidden_states"] = np.moveaxis(reference["hidden_states"], 0, 2)
    check_outputs(our_outputs(directory, reference), reference, 2 * TOLERANCE)


@needs_references
@by_directory
def test_export_in_torch_equals_the_flax_class(directory, tmp_path):
    reference = dict(np.load(directory / "reference.npz"))
    loaded = read_model(directory)
    assert not loaded.report.unused
    save_huggingface(tmp_path / "written", *loaded[:3])
    [name] = json.loads((tmp_path / "written" / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(tmp_path / "written").eval()
    inputs = {
        name.removeprefix("in_"): torch.tensor(value)
        for name, value in reference.items()
        if name.startswith("in_")
    }
    with torch.no_grad():
        outputs = model(**inputs)
    names = [name for name in reference if name.endswith(("logits", "last_hidden_state"))]
    assert names
    check_outputs({name: outputs[name] for name in names}, reference, TOLERANCE)
