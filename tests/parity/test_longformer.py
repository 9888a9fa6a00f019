"""Longformer against transformers: chosen global tokens, long rows, attention maps, tokenizer.

`test_families.py` compares its classes with their own global tokens, in short rows.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.export import params_to_huggingface, save_huggingface
from bert_jax.checkpoints.huggingface import config_from_huggingface, params_from_huggingface
from bert_jax.data.features import unpack_rows
from bert_jax.model.encoder import Encoder
from bert_jax.tokenizers.export import transformers_files
from tests.helpers.corpora import train_bpe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 1602,
    "type_vocab_size": 1,
}
SEP = 2
# Windows of the layers, lengths of two rows, and the global tokens of each.
CASES = {
    "one": ([4, 8], (13, 9), ((0,), (0,))),
    "several": ([4, 8], (24, 17), ((0, 5, 6, 23), (16,))),
    "none in a row": ([8, 8], (24, 24), ((3,), ())),
    "all": ([4, 4], (12, 12), (range(12), range(12))),
    "row of blocks": ([64, 128], (900, 700), ((0, 450, 451, 899), (0, 3))),
    "wide window in a row of blocks": ([512, 512], (1500, 600), ((0,), (0, 599))),
}


def random_model(class_name: str, **options):
    """Returns a model of transformers whose parameters are all random."""
    torch.manual_seed(0)
    config = transformers.LongformerConfig(**SIZES | options)
    model = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_scale = name.endswith("LayerNorm.weight") or name.endswith("layer_norm.weight")
            value.copy_(is_scale + 0.2 * torch.randn(value.shape))
    model.config.architectures = [class_name]
    return model


def read(model) -> tuple:
    """Returns the model config and the parameters of a model of transformers."""
    config = config_from_huggingface(json.loads(model.config.to_json_string(use_diff=False)))
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    params, report = params_from_huggingface(tensors, config, None)
    assert not report.unused
    return config, params


def make_rows(lengths, positions) -> tuple[dict, dict]:
    """Returns rows with their global positions, and the inputs of transformers."""
    rng = np.random.default_rng(0)
    shape = len(lengths), max(lengths)
    is_real = np.arange(shape[1]) < np.array(lengths)[:, None]
    tokens = np.where(is_real, rng.integers(3, 61, shape), 1).astype(np.int32)
    is_global = np.zeros(shape, bool)
    for row, numbers in enumerate(positions):
        is_global[row, list(numbers)] = True
    bounds = np.array([[[0, length, length]] for length in lengths], np.int32)
    inputs = {"input_ids": tokens, "attention_mask": is_real, "global_attention_mask": is_global}
    rows = {"tokens": tokens, "sequence_bounds": bounds, "is_global": is_global}
    return rows, {name: torch.tensor(value).long() for name, value in inputs.items()}


@pytest.mark.parametrize("case", CASES)
def test_states_and_gradients_with_chosen_global_tokens_equal_transformers(case):
    windows, lengths, positions = CASES[case]
    model = random_model("LongformerForMaskedLM", attention_window=windows)
    config, params = read(model)
    rows, inputs = make_rows(lengths, positions)
    expected = model.base_model(**inputs, output_hidden_states=True)
    weights = np.random.default_rng(1).normal(size=expected.last_hidden_state.shape)
    weights *= np.asarray(inputs["attention_mask"])[..., None]
    loss = (expected.last_hidden_state * torch.tensor(weights).float()).sum() / 100
    loss.backward()

    def states_of(encoder):
        return Encoder(config).apply(
            {"params": encoder}, unpack_rows(rows), method="all_hidden_states"
        )

    def loss_fn(encoder):
        states = states_of(encoder)
        return jnp.sum(states[-1] * weights.astype(np.float32)) / 100, states

    (ours, states), gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(
        params["encoder"]
    )
    is_real = np.asarray(inputs["attention_mask"]) > 0
    for found, exact in zip(states[1:], expected.hidden_states[1:], strict=True):
        assert np.max(np.abs(found - exact.detach().numpy())[is_real]) < TOLERANCE
    assert abs(float(ours) - loss.item()) < 1e-4
    written = params_to_huggingface({**params, "encoder": gradients}, config)
    checked = 0
    for name, parameter in model.named_parameters():
        if name not in written or parameter.grad is None or name.endswith(("key.bias", "al.bias")):
            continue
        exact = parameter.grad.numpy()
        error = np.max(np.abs(written[name] - exact)) / max(np.max(np.abs(exact)), 0.1)
        assert error < TOLERANCE, name
        checked += 1
    assert checked > 35


@pytest.mark.parametrize("text_positions", [(0,), (0, 7, 20), ()])
def test_attention_maps_equal_transformers(text_positions, tmp_path):
    """Theirs hold the window of a query: of local queries [global keys, window], else all keys."""
    windows = [8, 4]
    model = random_model("LongformerModel", attention_window=windows)
    config, params = read(model)
    rows, inputs = make_rows((24,), (text_positions,))
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
    states = Encoder(config).apply(params_of(params), unpack_rows(rows), method="all_hidden_states")
    scores = Encoder(config).apply(
        params_of(params), unpack_rows(rows), states, method="attention_scores"
    )
    is_global, count = rows["is_global"][0], len(text_positions)
    for layer, (layer_scores, mask) in enumerate(scores):
        visible = np.asarray(mask.pairs())[0, 0]
        found = np.where(visible, np.asarray(layer_scores[0], np.float64), -np.inf)
        found = np.exp(found - found.max(-1, keepdims=True))
        found /= found.sum(-1, keepdims=True)
        theirs = expected.attentions[layer][0].numpy()
        side = windows[layer] // 2
        for query in range(24):
            if is_global[query]:
                own = text_positions.index(query)
                exact = expected.global_attentions[layer][0, :, :, own].numpy()
            else:
                exact = np.zeros((3, 24))
                exact[:, list(text_positions)] = theirs[:, query, :count]
                for offset in range(-side, side + 1):
                    key = query + offset
                    if 0 <= key < 24 and not is_global[key]:
                        exact[:, key] += theirs[:, query, count + side + offset]
            np.testing.assert_allclose(found[:, query], exact, atol=TOLERANCE)


def params_of(params: dict) -> dict:
    return {"params": params["encoder"]}


def test_with_its_tokenizer_it_encodes_answers_and_classifies_as_transformers(tmp_path):
    """Ids, states with chosen global tokens, and the outputs of heads with those of the head."""
    text = "the boat crossed the river . Émile paid 12 dollars 🙂 in cash " * 40
    bpe = train_bpe(tmp_path / "bpe", text)
    sizes = {"vocab_size": bpe.vocab_size, "attention_window": 8, "num_labels": 2}
    texts = [
        "the boat paid",
        ("Émile crossed 🙂 the river", "the river in cash . the boat crossed"),
    ]
    for class_name in ("LongformerForSequenceClassification", "LongformerForQuestionAnswering"):
        model = random_model(class_name, **sizes)
        source, written = tmp_path / class_name, tmp_path / f"{class_name} again"
        model.save_pretrained(source)
        for name, content in transformers_files(bpe.stored, 64).items():
            if name == "tokenizer_config.json" and "Question" in class_name:
                content["tokenizer_class"] = "LongformerTokenizerFast"  # As transformers 4 does.
            content = content if isinstance(content, str) else json.dumps(content)
            (source / name).write_text(content)
        loaded = bert_jax.load(source)
        save_huggingface(written, loaded.params, loaded.settings, loaded.tokenizer)
        for directory in (source, written):
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            reference = getattr(transformers, class_name).from_pretrained(directory).eval()
            for each in texts:
                if isinstance(each, str) and "Question" in class_name:
                    continue
                inputs = tokenizer(
                    *(each if isinstance(each, tuple) else (each,)), return_tensors="pt"
                )
                batch = loaded.batch([each])
                np.testing.assert_array_equal(batch["tokens"], inputs["input_ids"])
                with torch.no_grad():
                    expected = reference(**inputs, output_hidden_states=True)
                    is_global = torch.zeros_like(inputs["input_ids"])
                    is_global[0, [1, 4]] = 1
                    chosen = reference.base_model(**inputs, global_attention_mask=is_global)
                ours = loaded.hidden_states(each, layers=-1)[:, 0]
                exact = expected.hidden_states[-1][0].numpy()
                np.testing.assert_allclose(ours, exact, atol=TOLERANCE)
                ours = loaded.hidden_states(each, layers=-1, global_positions=[1, 4])[:, 0]
                exact = chosen.last_hidden_state[0].numpy()
                np.testing.assert_allclose(ours, exact, atol=TOLERANCE)
                vector = loaded.encode(each, global_positions=[1, 4])
                np.testing.assert_allclose(vector, exact.mean(0), atol=TOLERANCE)
                outputs = np.asarray(loaded.module.apply({"params": loaded.params}, batch))[0]
                if "Question" in class_name:
                    exact = torch.stack([expected.start_logits, expected.end_logits], -1)[0]
                else:
                    exact = expected.logits
                np.testing.assert_allclose(outputs, exact.numpy(), atol=TOLERANCE)
