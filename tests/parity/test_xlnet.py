"""XLNet against transformers in torch: one stream and two, heads, and whole directories."""

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
from bert_jax.model.config import pools_last
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.heads import HEADS, make_model
from bert_jax.model.layers import cross_entropy
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.permutation import Permutation
from tests.suites.objectives import make_masking

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5  # Absolute for outputs and losses, relative for gradients; all in float32.
LENGTHS, LENGTH, NUM_LABELS = (13, 4, 9), 13, 4
SIZES = {"vocab_size": 61, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 40}
OPTIONS = (
    {},
    {"ff_activation": "relu", "clamp_len": 3},
    {"n_layer": 1, "summary_activation": "gelu", "summary_type": "cls_index"},
    {"n_head": 2, "d_model": 20, "layer_norm_eps": 1e-3, "mem_len": 4, "untie_r": False},
    {"ff_activation": "gelu_new", "d_inner": 17, "n_layer": 3, "clamp_len": 20},
    {"attn_type": "uni", "n_head": 4},
)
CLASSES = (
    "Model",
    "LMHeadModel",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnsweringSimple",
    "ForMultipleChoice",
)


def random_model(head: str, seed: int):
    """Returns a model of transformers whose biases and scales are random, too."""
    torch.manual_seed(seed)
    num_labels = 2 if head == "ForQuestionAnsweringSimple" else NUM_LABELS
    options = SIZES | OPTIONS[seed] | {"num_labels": num_labels}
    model = getattr(transformers, f"XLNet{head}")(transformers.XLNetConfig(**options)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_scale = name.endswith("layer_norm.weight")
            value.copy_(is_scale + 0.2 * torch.randn(value.shape))
    model.config.architectures = [f"XLNet{head}"]
    return model


def read(model) -> tuple:
    """Returns the model config, head and parameters, of exactly the tensors of a model."""
    values = json.loads(model.config.to_json_string(use_diff=False))
    config, head = config_from_huggingface(values), head_from_huggingface(values)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    params, report = params_from_huggingface(tensors, config, head)
    assert not report.unused
    written = params_to_huggingface(params, config, head)
    assert written.keys() == tensors.keys() - {"lm_loss.weight"}
    for name, value in written.items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)
    return config, head, params


def random_rows(config, seed: int, lengths: tuple[int, ...]) -> dict:
    """Returns rows with one pair each, of which the last token is <cls>."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, config.vocab_size, (len(lengths), LENGTH)).astype(np.int32)
    bounds = np.array([[[0, length // 2, length]] for length in lengths], np.int32)
    return {"tokens": tokens, "sequence_bounds": bounds}


def torch_inputs(rows: dict, lengths) -> dict:
    """Returns the inputs of transformers, which pads on the left."""
    tokens, mask, segments = np.full((3, len(lengths), LENGTH), 3)
    mask[:] = 0
    for row, (length, bounds) in enumerate(zip(lengths, rows["sequence_bounds"], strict=True)):
        own = np.repeat([0, 1, 2], [bounds[0, 1], length - 1 - bounds[0, 1], 1])
        tokens[row, LENGTH - length :] = rows["tokens"][row, :length]
        mask[row, LENGTH - length :], segments[row, LENGTH - length :] = 1, own
    found = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": segments}
    return {name: torch.tensor(value).long() for name, value in found.items()}


def unpadded(values, lengths) -> np.ndarray:
    """Joins what transformers, padding on the left, or we, on the right, have at all tokens."""
    values = values.detach().numpy()
    return np.concatenate([row[LENGTH - n :] for row, n in zip(values, lengths, strict=True)])


def assert_gradients_equal(model, gradients, config, head, expected_names=()) -> None:
    written, compared = params_to_huggingface(gradients, config, head), set()
    for name, parameter in model.named_parameters():
        if name in written and parameter.grad is not None:
            exact = parameter.grad.numpy()
            error = np.max(np.abs(written[name] - exact)) / max(np.max(np.abs(exact)), 0.1)
            assert error < TOLERANCE, (name, error)
            compared.add(name)
    assert {"transformer.layer.0.rel_attn.r", *expected_names} <= compared


def random_labels(task: str | None, config, lengths, seed: int) -> tuple:
    """Returns labels in our layout, and as transformers takes them."""
    rng = np.random.default_rng(seed)
    if task in (None, "tagging"):
        count = config.vocab_size if task is None else NUM_LABELS
        is_real = np.arange(LENGTH) < np.array(lengths)[:, None]
        labels = np.where(is_real, rng.integers(0, count, is_real.shape), -100)
        theirs = [np.roll(row, LENGTH - n) for row, n in zip(labels, lengths, strict=True)]
        return labels, {"labels": torch.tensor(np.stack(theirs))}
    if task == "span":
        labels = np.sort(rng.integers(0, LENGTH, (len(lengths), 1, 2)))
        start, end = (torch.tensor(each) for each in labels[:, 0].T)
        return labels, {"start_positions": start, "end_positions": end}
    if task == "multiple_choice":
        return np.array([1]), {"labels": torch.tensor([1])}
    labels = rng.integers(0, NUM_LABELS, (len(lengths), 1))
    return labels, {"labels": torch.tensor(labels[:, 0])}


@pytest.mark.parametrize("seed", range(len(OPTIONS)))
@pytest.mark.parametrize("head_class", CLASSES)
def test_hidden_states_logits_loss_and_gradients_equal_transformers(head_class, seed):
    model = random_model(head_class, seed)
    config, head, params = read(model)
    task = head and head["task"]
    # transformers' loss of spans includes the scores of padding; its causal model takes no mask.
    is_whole = task == "span" or config.causal
    lengths = (LENGTH,) * len(LENGTHS) if is_whole else LENGTHS
    rows = random_rows(config, seed, lengths)
    inputs, batch = torch_inputs(rows, lengths), rows | unpack_rows(rows, pools_last(config))
    if config.causal:
        del inputs["attention_mask"]
    is_real = np.array(batch["sequence_ids"]) > 0
    with torch.no_grad():
        expected = model.base_model(**inputs, output_hidden_states=True).hidden_states
    states = Encoder(config).apply({"params": params["encoder"]}, batch, method="all_hidden_states")
    for ours, theirs in zip(states, expected, strict=True):
        assert np.max(np.abs(ours[is_real] - unpadded(theirs, lengths))) < TOLERANCE
    if head_class == "Model":
        return

    if task == "multiple_choice":  # The rows are the choices of one example.
        inputs = {name: value[None] for name, value in inputs.items()}
    labels, reference_labels = random_labels(task, config, lengths, seed)
    reference = model(**inputs, **reference_labels)
    reference.loss.backward()
    positions = jnp.broadcast_to(jnp.arange(LENGTH), rows["tokens"].shape)

    def loss_fn(params):
        if head is None:
            batch["target_positions"] = positions
            outputs, _ = PretrainingModel(config, next_sentence=False).apply(
                {"params": params}, batch
            )
            outputs = outputs[..., : config.vocab_size]
            losses = cross_entropy(outputs, jnp.asarray(labels))[0]
        else:
            outputs = make_model(config, head).apply({"params": params}, batch)
            if task == "multiple_choice":
                outputs = outputs.reshape(1, -1)
                return cross_entropy(outputs, jnp.asarray(labels))[0][0], outputs
            losses = HEADS[task].loss(outputs, rows | {"labels": jnp.asarray(labels)})
        weights = labels >= 0
        weights = weights.all(-1) if weights.ndim > losses.ndim else weights
        return jnp.sum(losses * weights) / np.sum(weights), outputs

    (loss, outputs), gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    assert abs(float(loss) - reference.loss.item()) < TOLERANCE
    if task == "span":
        logits = torch.stack([reference.start_logits, reference.end_logits], -1)
    else:
        logits = reference.logits
    if logits.shape[:2] == is_real.shape:
        outputs, logits = np.array(outputs)[is_real], unpadded(logits, lengths)
    else:
        logits = logits.detach().numpy()
    assert np.max(np.abs(np.reshape(outputs, logits.shape) - logits)) < TOLERANCE
    assert_gradients_equal(model, gradients, config, head)


def test_rows_of_700_tokens_equal_transformers():
    """As many as `model_max_length` states; rows of more than 512 are read by blocks."""
    model = random_model("Model", 1)
    values = json.loads(model.config.to_json_string(use_diff=False)) | {"model_max_length": 700}
    config = config_from_huggingface(values)
    assert config.max_position_embeddings == 700
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    params, _ = params_from_huggingface(tensors, config, None)
    tokens = np.random.default_rng(0).integers(9, config.vocab_size, (1, 700)).astype(np.int32)
    rows = {"tokens": tokens, "sequence_bounds": np.array([[[0, 700, 700]]], np.int32)}
    batch = rows | unpack_rows(rows, pools_last(config))
    states = jax.jit(Encoder(config).apply)({"params": params["encoder"]}, batch)
    with torch.no_grad():
        expected = model(torch.tensor(tokens).long(), token_type_ids=torch.zeros(1, 700).long())
    assert np.max(np.abs(states - expected.last_hidden_state.numpy())) < TOLERANCE


# With `perm_mask`, a left-to-right model of transformers fails on batches of more than one row.
BIDIRECTIONAL = [seed for seed, own in enumerate(OPTIONS) if own.get("attn_type") != "uni"]


@pytest.mark.parametrize("seed", BIDIRECTIONAL)
def test_two_streams_equal_transformers(seed):
    """Hidden states of both, logits, loss and gradients, with the masks that we draw as ranks."""
    model = random_model("LMHeadModel", seed)
    config, _, params = read(model)
    rows = random_rows(config, seed, (LENGTH,) * 3)
    rng, batch = np.random.default_rng(seed), unpack_rows(rows)
    ranks = np.stack([rng.permutation([0] * 7 + list(range(1, 7))) for _ in range(3)])
    positions = np.stack([np.flatnonzero(row) for row in ranks])
    targets = np.take_along_axis(rows["tokens"], positions, 1)
    batch |= {"ranks": ranks, "target_positions": positions, "targets": targets}
    batch = {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}
    batch["target_weights"] = jnp.ones(targets.shape)
    inputs = torch_inputs(rows, (LENGTH,) * 3)
    mapping = np.zeros((3, 6, LENGTH), np.float32)
    np.put_along_axis(mapping, positions[..., None], 1, axis=2)
    inputs["target_mapping"] = torch.tensor(mapping)
    inputs["perm_mask"] = torch.tensor((ranks[:, :, None] <= ranks[:, None]) * (ranks[:, None] > 0))
    inputs["perm_mask"] = inputs["perm_mask"].float()
    reference = model(**inputs, labels=torch.tensor(targets).long(), output_hidden_states=True)
    reference.loss.backward()

    objective = Permutation(make_masking())
    ours = objective.make_model(config, ExecutionPlan())

    def loss_fn(params):
        total, count = objective.sums(ours, params, batch)["permutation_loss"]
        return total / count

    loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(params)
    assert abs(float(loss) - reference.loss.item()) < TOLERANCE
    logits, _ = jax.jit(ours.apply)({"params": params}, batch)
    logits = logits[..., : config.vocab_size]
    assert np.max(np.abs(logits - reference.logits.detach().numpy())) < TOLERANCE
    streams = Encoder(config).apply({"params": params["encoder"]}, batch)
    *_, content, query = (x.detach().numpy() for x in reference.hidden_states)
    assert np.max(np.abs(streams.content - content)) < TOLERANCE
    at_targets = np.take_along_axis(np.array(streams.query), positions[..., None], 1)
    assert np.max(np.abs(at_targets - query)) < TOLERANCE
    assert_gradients_equal(model, gradients, config, None, ["transformer.mask_emb"])


WORDS = ["the", "boat", "crossed", "river", "and", "paid", "12", "dollars", "in", "cash", "it"]
WORDS += ["with", "old", "town"]


def write_directory(directory, head_class: str):
    """Writes a model and a tokenizer of a few words; returns both, as transformers reads them."""
    model = random_model(head_class, 0)
    names = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    pieces = [*names, "▁", *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz0123456789"]
    vocabulary = [(piece, -float(index)) for index, piece in enumerate(pieces)]
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = transformers.XLNetTokenizer(vocab=vocabulary, model_input_names=inputs)
    assert len(tokenizer) <= model.config.vocab_size
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


TEXTS = ["the boat crossed the old river", "it paid 12 dollars", "cash in the town and the river"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_directory_classifies_and_attends_as_transformers(tmp_path):
    """So does its export, of texts and pairs in one batch, padded by transformers on the left."""
    model, tokenizer = write_directory(tmp_path / "source", "ForSequenceClassification")
    loaded = bert_jax.load(tmp_path / "source")
    save_huggingface(tmp_path / "written", loaded.params, loaded.settings, loaded.tokenizer)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "written")
    again_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "written")
    pairs = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))
    for texts in (TEXTS, pairs):
        ranked = loaded.classify(texts, top_k=NUM_LABELS)
        ours = [{each.label: each.probability for each in one} for one in ranked]
        for theirs, reader in ((model, tokenizer), (again.eval(), again_tokenizer)):
            inputs = reader(texts, padding=True, return_tensors="pt")
            assert inputs["input_ids"][1, 0] == 5 and "token_type_ids" in inputs
            with torch.no_grad():
                expected = theirs(**inputs).logits.softmax(-1).numpy()
            names = [theirs.config.id2label[i] for i in range(NUM_LABELS)]
            found = [[one[name] for name in names] for one in ours]
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    maps = loaded.attention(TEXTS[0]).probabilities
    with torch.no_grad():
        inputs = tokenizer(TEXTS[0], return_tensors="pt")
        expected = model(**inputs, output_attentions=True).attentions
    np.testing.assert_allclose(maps, np.concatenate(expected), atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_masks_are_filled_as_transformers_predicts_them_from_all_other_tokens(tmp_path):
    model, tokenizer = write_directory(tmp_path / "source", "LMHeadModel")
    text = "the boat <mask> the old river <mask> it"
    loaded = bert_jax.load(tmp_path / "source")
    inputs = tokenizer(text, return_tensors="pt")
    (masks,) = torch.nonzero(inputs["input_ids"][0] == tokenizer.mask_token_id, as_tuple=True)
    length = inputs["input_ids"].shape[1]
    hidden = torch.zeros(1, length, length)
    hidden[:, :, masks] = 1
    mapping = torch.nn.functional.one_hot(masks, length).float()[None]
    with torch.no_grad():
        logits = model(**inputs, perm_mask=hidden, target_mapping=mapping).logits[0]
    expected = logits.softmax(-1)[:, : len(tokenizer)]
    for fills, row in zip(loaded.fill_mask(text, top_k=3), expected, strict=True):
        np.testing.assert_allclose(
            [fill.probability for fill in fills], row.topk(3).values, atol=TOLERANCE
        )
    scored = loaded.score("the boat crossed it")
    ids = tokenizer("the boat crossed it", return_tensors="pt")["input_ids"]
    for place, found in enumerate(scored.log_probabilities):
        masked = ids.clone()
        masked[0, place] = tokenizer.mask_token_id
        length = ids.shape[1]
        hidden, mapping = torch.zeros(1, length, length), torch.zeros(1, 1, length)
        hidden[:, :, place] = mapping[:, :, place] = 1
        segments = torch.zeros_like(ids)
        segments[0, -1] = 2
        with torch.no_grad():
            logits = model(
                masked, perm_mask=hidden, target_mapping=mapping, token_type_ids=segments
            ).logits[0, 0]
        assert abs(logits.log_softmax(-1)[ids[0, place]].item() - found) < TOLERANCE


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_text_is_generated_as_a_loop_over_transformers_does(tmp_path):
    """The surest mask first: each is predicted from all tokens that are known by then."""
    model, tokenizer = write_directory(tmp_path / "source", "LMHeadModel")
    loaded, text = bert_jax.load(tmp_path / "source"), "the <mask> crossed <mask> old river"
    ids = tokenizer(text + 2 * "<mask>", return_tensors="pt")["input_ids"]
    length, segments = ids.shape[1], torch.zeros_like(ids)
    segments[0, -1] = 2
    never = [*loaded.tokenizer.special_ids, *range(len(tokenizer), model.config.vocab_size)]
    steps = []
    while (ids == tokenizer.mask_token_id).any():
        (masks,) = torch.nonzero(ids[0] == tokenizer.mask_token_id, as_tuple=True)
        hidden = torch.zeros(1, length, length)
        hidden[:, :, masks] = 1
        mapping = torch.nn.functional.one_hot(masks, length).float()[None]
        with torch.no_grad():
            logits = model(
                ids, perm_mask=hidden, target_mapping=mapping, token_type_ids=segments
            ).logits[0]
        logits[:, never] = -torch.inf
        best = logits.log_softmax(-1).max(-1)
        surest = best.values.argmax()
        ids[0, masks[surest]] = best.indices[surest]
        steps.append(ids[0].tolist())
    shown = []
    found = loaded.generate(
        text, 2, temperature=0, order="confidence", on_step=lambda each: shown.append(each)
    )
    assert len(shown) == len(steps) == 4 and shown[-1] == found
    assert loaded.tokens(found).ids.tolist() == ids[0].tolist()
