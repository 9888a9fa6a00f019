"""BERT's descendants against transformers in torch: hidden states, logits, losses, gradients."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.export import params_to_huggingface, save_huggingface
from bert_jax.checkpoints.huggingface import (
    config_from_huggingface,
    head_from_huggingface,
    params_from_huggingface,
)
from bert_jax.data.features import unpack_rows
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import HEADS, make_model
from bert_jax.model.layers import cross_entropy
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.replaced_tokens import Discriminator, discriminator_sums
from bert_jax.tokenizers.export import transformers_files
from tests.helpers.corpora import train_bpe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5  # Absolute for outputs and losses, relative for gradients; all in float32.
LENGTHS, LENGTH, NUM_LABELS = (13, 4, 9), 13, 4

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
}
DISTILBERT_SIZES = {
    "vocab_size": 61,
    "dim": 24,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 40,
    "max_position_embeddings": 20,
}
MODERNBERT_SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 20,
    "local_attention": 4,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "bos_token_id": 2,
    "sep_token_id": 3,
    "eos_token_id": 3,
}
LONGFORMER_SIZES = SIZES | {"type_vocab_size": 1, "attention_window": 4}
ESM_SIZES = SIZES | {"pad_token_id": 1, "mask_token_id": 32, "token_dropout": True}
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
# Family -> options of its configurations, each with a seed of its own.
OPTIONS = {
    "Bert": (
        {},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "relu"},
        {"num_hidden_layers": 1},
        {"layer_norm_eps": 1e-5},
        {"type_vocab_size": 3},
    ),
    "Roberta": (
        {"type_vocab_size": 1},
        {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
        {"type_vocab_size": 1, "num_hidden_layers": 1},
        {"num_attention_heads": 2},
        {"type_vocab_size": 1, "hidden_size": 30},
        {"type_vocab_size": 1, "intermediate_size": 17},
    ),
    "DistilBert": (
        {},
        {"activation": "relu"},
        {"n_layers": 1},
        {"sinusoidal_pos_embds": True},
        {"n_heads": 4},
        {"hidden_dim": 17},
    ),
    "Albert": (
        {"embedding_size": 8},
        {"embedding_size": 8, "num_hidden_layers": 4, "num_hidden_groups": 2},
        {"embedding_size": 24},
        {"embedding_size": 8, "hidden_act": "gelu"},
        {"embedding_size": 10, "num_hidden_layers": 1},
        {"embedding_size": 8, "num_hidden_layers": 5, "layer_norm_eps": 1e-6},
    ),
    "Electra": (
        {"embedding_size": 8},
        {"embedding_size": 24},
        {"embedding_size": 30},
        {"embedding_size": 8, "num_hidden_layers": 1},
        {"embedding_size": 8, "layer_norm_eps": 1e-6},
        {"embedding_size": 8, "type_vocab_size": 1},
    ),
    "ModernBert": (
        {},
        {"global_attn_every_n_layers": 1, "classifier_pooling": "mean"},
        {"global_attn_every_n_layers": 2, "local_attention": 2, "norm_bias": True},
        {"num_hidden_layers": 1, "attention_bias": True, "hidden_activation": "gelu_new"},
        {"tie_word_embeddings": False, "mlp_bias": True, "classifier_pooling": "mean"},
        {"decoder_bias": False, "classifier_bias": True, "local_attention": 26},
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "norm_eps": 1e-3,
        },
    ),
    "MPNet": (
        {},
        {"hidden_act": "relu"},
        {"num_hidden_layers": 1},
        {"num_attention_heads": 4, "layer_norm_eps": 1e-5},
        {"hidden_size": 30, "num_hidden_layers": 3},
        {"intermediate_size": 17, "hidden_act": "gelu_new"},
    ),
    "Esm": (
        {"position_embedding_type": "rotary"},
        {"position_embedding_type": "absolute", "emb_layer_norm_before": True},
        {"position_embedding_type": "rotary", "token_dropout": False, "layer_norm_eps": 1e-5},
        {"position_embedding_type": "rotary", "num_hidden_layers": 1, "rope_theta": 100.0},
        {"position_embedding_type": "absolute", "num_attention_heads": 4},
        {
            "position_embedding_type": "rotary",
            "emb_layer_norm_before": True,
            "hidden_size": 30,
            "intermediate_size": 17,
        },
    ),
    "DebertaV2": (
        DEBERTA,  # Version 3: no distance is as far as half of the buckets.
        DEBERTA | {"position_buckets": 8, "conv_kernel_size": 3, "conv_act": "gelu"},
        DEBERTA | {"position_buckets": 10, "legacy": False, "type_vocab_size": 2},
        DEBERTA
        | {
            "position_buckets": 6,
            "share_att_key": False,
            "norm_rel_ebd": "none",
            "conv_kernel_size": 5,
            "num_hidden_layers": 1,
        },
        DEBERTA
        | {
            "position_buckets": -1,
            "max_relative_positions": 6,
            "pos_att_type": ["c2p"],
            "position_biased_input": True,
            "embedding_size": 10,
        },
        DEBERTA
        | {
            "position_buckets": 4,
            "pos_att_type": ["p2c"],
            "share_att_key": False,
            "hidden_act": "relu",
            "pooler_hidden_act": "tanh",
            "layer_norm_eps": 1e-5,
        },
        {"type_vocab_size": 3},  # Without distances.
    ),
    "Longformer": (
        {},
        {"attention_window": [4, 8], "layer_norm_eps": 1e-5},
        {"attention_window": 6, "num_hidden_layers": 1, "hidden_act": "relu"},
        {"attention_window": [8, 16, 4], "num_hidden_layers": 3, "num_attention_heads": 2},
        {"attention_window": 26, "hidden_size": 30, "type_vocab_size": 2},
        {"attention_window": [6, 6], "intermediate_size": 17, "sep_token_id": 7},
    ),
    # Arithmetic of RoBERTa's or of BERT's.
    "XLMRoberta": ({"type_vocab_size": 1}, {"layer_norm_eps": 1e-5}),
    "Camembert": ({"type_vocab_size": 1}, {"layer_norm_eps": 1e-5}),
    "Data2VecText": ({"type_vocab_size": 1}, {"layer_norm_eps": 1e-5}),
    "Ernie": (
        {"use_task_id": True},
        {"use_task_id": False, "hidden_act": "relu"},
        {"use_task_id": True, "task_type_vocab_size": 1, "type_vocab_size": 4},
    ),
}
FAMILY_SIZES = {
    "DistilBert": DISTILBERT_SIZES,
    "ModernBert": MODERNBERT_SIZES,
    "Esm": ESM_SIZES,
    "Longformer": LONGFORMER_SIZES,
}
CLASSES = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
# Of ELECTRA alone: the discriminator.
CASES = [
    (family, each)
    for family in OPTIONS
    for each in CLASSES
    if hasattr(transformers, f"{family}{each}")
]
CASES += [("Electra", "ForPreTraining")]
SEEDED_CASES = [(*case, seed) for case in CASES for seed in range(len(OPTIONS[case[0]]))]


def random_model(family: str, head: str, seed: int):
    """Returns a model of transformers whose biases and scales are random, too."""
    torch.manual_seed(seed)
    options = (
        FAMILY_SIZES.get(family, SIZES)
        | OPTIONS[family][seed]
        | {"num_labels": 2 if head in ("ForQuestionAnswering", "ForPreTraining") else NUM_LABELS}
    )
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_scale = value.ndim == 1 and "norm" in name.lower() and name.endswith("weight")
            value.copy_(is_scale + 0.2 * torch.randn(value.shape))
    model.config.architectures = [f"{family}{head}"]
    return model


def random_rows(config, seed: int, lengths: tuple[int, ...]) -> tuple[dict, dict]:
    """Returns rows with one pair each, and the inputs of transformers."""
    rng, num_segments = np.random.default_rng(seed), getattr(config, "type_vocab_size", 0)
    tokens = rng.integers(2, config.vocab_size, (len(lengths), LENGTH)).astype(np.int32)
    bounds = np.zeros((len(lengths), 1, 3), np.int32)
    for row, length in enumerate(lengths):
        second = length // 2 if num_segments > 1 else length
        bounds[row, 0] = 0, second, length
        tokens[row, length:] = getattr(config, "position_offset", 0) > 0  # The id of padding.
        if hasattr(config, "sep_id"):  # The texts of a pair end there.
            tokens[row, tokens[row] == config.sep_id] = config.sep_id + 1
            tokens[row, [1, 2, length - 1]] = config.sep_id
    rows = {"tokens": tokens, "sequence_bounds": bounds}
    batch = unpack_rows(rows)
    inputs = {"input_ids": tokens, "attention_mask": batch["sequence_ids"] > 0}
    if num_segments:
        inputs["token_type_ids"] = batch["segment_ids"]
    return rows, {name: torch.tensor(np.asarray(value)).long() for name, value in inputs.items()}


def check_round_trip(model, params, config, head) -> None:
    """Asserts that exactly the tensors of the model are written."""
    written = params_to_huggingface(params, config, head)
    expected = {
        name: value.numpy()
        for name, value in model.state_dict().items()
        if "position_ids" not in name and "contact_head" not in name
    }
    ties = getattr(config, "ties_embeddings", True)
    tied = {name for name in expected if name.endswith("decoder.weight") and ties}
    tied |= {"lm_head.decoder.bias", "predictions.decoder.bias", "cls.predictions.decoder.bias"}
    tied |= {"vocab_projector.weight", "generator_lm_head.weight"}
    assert written.keys() == expected.keys() - tied
    for name, value in written.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def our_outputs(config, head: dict | None, params: dict, rows: dict) -> jax.Array:
    """Returns the outputs of the head, or without one the logits of all positions."""
    if head:
        return make_model(config, head).apply({"params": params}, rows | unpack_rows(rows))
    if "discriminator" in params:
        return Discriminator(config).apply({"params": params}, unpack_rows(rows))
    positions = jnp.broadcast_to(jnp.arange(LENGTH), rows["tokens"].shape)
    model = PretrainingModel(config, next_sentence=False)
    logits = model.apply({"params": params}, unpack_rows(rows), positions, method="predict_tokens")
    return logits[..., : config.vocab_size]


def our_loss(head: dict | None, outputs: jax.Array, rows: dict, labels: np.ndarray) -> jax.Array:
    """Returns the mean loss over the labels, of which -100 are none."""
    weights = labels >= 0
    if outputs.ndim == labels.ndim and head is None:  # Whether each token was replaced.
        batch = unpack_rows(rows)
        loss, count = discriminator_sums(outputs, jnp.asarray(labels == 1), batch)["replaced_loss"]
        return loss / count
    if head is None:
        losses, _ = cross_entropy(outputs, jnp.asarray(labels))
    else:
        losses = HEADS[head["task"]].loss(outputs, rows | {"labels": jnp.asarray(labels)})
    weights = weights.all(-1) if weights.ndim > losses.ndim else weights
    return jnp.sum(losses * weights) / np.sum(weights)


def random_labels(task: str | None, config, is_real: np.ndarray, seed: int) -> tuple:
    """Returns labels in our layout, and as transformers takes them."""
    rng = np.random.default_rng(seed)
    if task == "replaced_tokens":
        labels = rng.integers(0, 2, is_real.shape)
        return labels, {"labels": torch.tensor(labels)}
    if task in (None, "tagging"):
        count = config.vocab_size if task is None else NUM_LABELS
        labels = np.where(is_real, rng.integers(0, count, is_real.shape), -100)
        return labels, {"labels": torch.tensor(labels)}
    if task == "span":
        labels = np.sort(rng.integers(0, LENGTH, (len(is_real), 1, 2)))
        start, end = (torch.tensor(each) for each in labels[:, 0].T)
        return labels, {"start_positions": start, "end_positions": end}
    if task == "multiple_choice":
        return np.array([1]), {"labels": torch.tensor([1])}
    labels = rng.integers(0, NUM_LABELS, (len(is_real), 1))
    return labels, {"labels": torch.tensor(labels[:, 0])}


@pytest.mark.parametrize(("family", "head_class", "seed"), SEEDED_CASES)
def test_hidden_states_logits_loss_and_gradients_equal_transformers(family, head_class, seed):
    model = random_model(family, head_class, seed)
    values = json.loads(model.config.to_json_string(use_diff=False))
    config, head = config_from_huggingface(values), head_from_huggingface(values)
    task = "replaced_tokens" if head_class == "ForPreTraining" else head and head["task"]
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    params, report = params_from_huggingface(tensors, config, head)
    assert all("position_ids" in name or "contact_head" in name for name in report.unused)
    check_round_trip(model, params, config, head)

    # transformers' loss of spans includes the scores of padding.
    lengths = (LENGTH,) * len(LENGTHS) if task == "span" else LENGTHS
    rows, inputs = random_rows(config, seed, lengths)
    is_real = np.arange(LENGTH) < np.array(lengths)[:, None]
    with torch.no_grad():
        expected = model.base_model(**inputs, output_hidden_states=True).hidden_states
    states = Encoder(config).apply(
        {"params": params["encoder"]}, unpack_rows(rows), method="all_hidden_states"
    )
    for ours, reference in zip(states[1:], expected[1:], strict=True):
        assert np.max(np.abs(ours - reference.numpy())[is_real]) < TOLERANCE
    if head_class == "Model":
        return

    if task == "multiple_choice":  # The rows are the choices of one example.
        inputs = {name: value[None] for name, value in inputs.items()}
    labels, reference_labels = random_labels(task, config, is_real, seed)
    reference = model(**inputs, **reference_labels)
    reference.loss.backward()

    def loss_fn(params):
        outputs = our_outputs(config, head, params, rows)
        if task == "multiple_choice":
            outputs = outputs.reshape(1, -1)
            return cross_entropy(outputs, jnp.asarray(labels))[0][0], outputs
        return our_loss(head, outputs, rows, labels), outputs

    (loss, outputs), gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    assert abs(float(loss) - reference.loss.item()) < TOLERANCE
    if task == "span":
        logits = torch.stack([reference.start_logits, reference.end_logits], -1)
    else:
        logits = reference.logits
    logits = logits.detach().numpy()
    difference = np.abs(np.reshape(outputs, logits.shape) - logits)
    per_position = logits.shape[:2] == is_real.shape
    assert np.max(difference[is_real] if per_position else difference) < TOLERANCE
    written = params_to_huggingface(gradients, config, head)
    for name, parameter in model.named_parameters():
        if name not in written or parameter.grad is None or name.endswith("key.bias"):
            continue  # The gradient of keys' biases is 0, up to rounding.
        exact = parameter.grad.numpy()
        error = np.max(np.abs(written[name] - exact)) / max(np.max(np.abs(exact)), 0.1)
        assert error < TOLERANCE, name


TWO_WAY_CASES = [
    *CASES,
    *(("Bert", f"For{each}") for each in ("PreTraining", "NextSentencePrediction")),
    *(("Ernie", f"For{each}") for each in ("PreTraining", "NextSentencePrediction")),
    ("Albert", "ForPreTraining"),
]


@pytest.mark.parametrize(("family", "head_class"), TWO_WAY_CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_exported_model_is_the_same_in_the_same_class(family, head_class, tmp_path):
    model = random_model(family, head_class, 0)
    source, written = tmp_path / "source", tmp_path / "written"
    model.save_pretrained(source)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if model.config.pad_token_id == 1:
        names = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    (source / "vocab.txt").write_text("\n".join([*names, *(f"w{i}" for i in range(56))]))
    config = {"tokenizer_class": "BertTokenizer"}
    if family == "Longformer":  # It takes pairs with two separators between the texts.
        config = {"tokenizer_class": "MPNetTokenizer"}
        config |= {f"{name[1:-1].lower()}_token": name for name in names}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = bert_jax.load(source)
    save_huggingface(written, loaded.params, loaded.settings, loaded.tokenizer)
    tokens = torch.tensor([[2, 7, 11, 13, 5, 3], [2, 9, 60, 44, 23, 3]])
    if family == "Longformer":  # Which finds the texts of a pair by its separators.
        tokens[:, 0], tokens[:, [2, 3, 5]] = 0, 2
    tokens = tokens[None] if head_class == "ForMultipleChoice" else tokens
    again = type(model).from_pretrained(written).eval()
    assert again.config.architectures == model.config.architectures
    with torch.no_grad():
        expected, found = model(tokens).to_tuple(), again(tokens).to_tuple()
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6)


def test_roberta_with_its_tokenizer_encodes_and_classifies_as_transformers(tmp_path):
    text = "the boat crossed the river . Émile paid 12 dollars 🙂 in cash " * 40
    bpe = train_bpe(tmp_path / "bpe", text)
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": bpe.vocab_size, "max_position_embeddings": 66}
    config = transformers.RobertaConfig(**sizes, type_vocab_size=1, num_labels=3)
    model = transformers.RobertaForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    source, written = tmp_path / "source", tmp_path / "written"
    model.save_pretrained(source)
    for name, content in transformers_files(bpe.stored, 64).items():
        content = content if isinstance(content, str) else json.dumps(content)
        (source / name).write_text(content)
    loaded = bert_jax.load(source)
    save_huggingface(written, loaded.params, loaded.settings, loaded.tokenizer)
    texts = ["the boat paid", ("Émile crossed 🙂", "the river")]
    for directory in (source, written):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        reference = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory
        ).eval()
        for text in texts:
            pair = text if isinstance(text, tuple) else (text,)
            inputs = tokenizer(*pair, return_tensors="pt")
            with torch.no_grad():
                expected = torch.softmax(reference(**inputs).logits[0], -1).numpy()
                states = reference.base_model(**inputs).last_hidden_state[0].numpy()
            ours = loaded.hidden_states(text, layers=-1)[:, 0]
            np.testing.assert_allclose(ours, states, atol=TOLERANCE)
            ranked = {each.label: each.probability for each in loaded.classify(text, top_k=3)}
            np.testing.assert_allclose(
                [ranked[label] for label in loaded.head["labels"]], expected, atol=TOLERANCE
            )
