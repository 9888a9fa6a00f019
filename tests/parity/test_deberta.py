"""DeBERTa's objectives against references in float64, built of transformers' layers in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.checkpoints.export import params_to_huggingface
from bert_jax.model.deberta_names import config_to_json
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.enhanced_masked_lm import EnhancedMaskedLm
from bert_jax.objectives.replaced_tokens import GeneratorSettings, ReplacedTokens, replace_tokens
from tests.helpers.models import random_params, small_deberta_config
from tests.suites.objectives import make_masking, make_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 100, 32
TOLERANCE = 1e-5  # Absolute for losses, relative for gradients; ours are in float32.
MASKING = make_masking()


def reference_model(config, encoder: dict, head: dict | None = None):
    """Returns transformers' model in float64, with the parameters of ours."""
    params = {"encoder": encoder} | ({"mlm": head} if head else {})
    tensors = params_to_huggingface(params, config)
    values = config_to_json(config)
    del values["dtype"]
    kind = transformers.DebertaV2ForMaskedLM if head else transformers.DebertaV2Model
    model = kind(transformers.DebertaV2Config(**values)).double().eval()
    tensors = {name: torch.tensor(np.array(value)).double() for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and all("decoder" in name for name in missing)
    model.requires_grad_(requires_grad=True)
    if head:
        model.tie_weights()
    return model


def mean_nats(logits, targets, weights):
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (losses * weights.flatten()).sum() / weights.sum()


def torch_batch(batch) -> dict:
    names = ("tokens", "targets", "target_positions", "position_ids")
    found = {name: torch.tensor(np.array(batch[name])).long() for name in names}
    found["weights"] = torch.tensor(np.array(batch["target_weights"])).double()
    found["mask"] = torch.tensor(np.array(batch["sequence_ids"]) > 0).long()
    return found


def at(states, positions):
    return torch.gather(states, 1, positions[..., None].expand(-1, -1, states.shape[-1]))


def assert_close(ours, exact, name=""):
    exact = exact.detach().numpy()
    error = np.max(np.abs(np.asarray(ours) - exact)) / max(np.max(np.abs(exact)), 0.1)
    assert error < TOLERANCE, (name, error)


def single_rows() -> dict:
    return make_rows([(32,), (20,), (9,), (14,)])


def test_enhanced_mask_decoder_equals_the_last_layer_applied_twice():
    """The formula of the released code, with transformers' layers."""
    config = small_deberta_config(
        VOCAB, num_layers=3, max_position_embeddings=LENGTH, dropout_rate=0.0
    )
    objective = EnhancedMaskedLm(MASKING)
    batch = objective.prepare(single_rows(), jax.random.key(0))
    model = objective.make_model(config, ExecutionPlan())
    params = random_params(model, batch)

    def loss_fn(params):
        total, count = objective.sums(model, params, batch)["mlm_loss"]
        return total / count

    loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(params)

    decoder = params["enhanced_decoder"]
    theirs, inputs = reference_model(config, params["encoder"], decoder["head"]), torch_batch(batch)
    positions = torch.tensor(np.array(decoder["positions"]["embedding"])).double()
    positions.requires_grad_()
    encoder = theirs.deberta.encoder
    states = theirs.deberta(
        inputs["tokens"], attention_mask=inputs["mask"], output_hidden_states=True
    ).hidden_states
    hidden = states[-2]
    queries = hidden + positions[inputs["position_ids"]]
    shared = {
        "attention_mask": encoder.get_attention_mask(inputs["mask"]),
        "relative_pos": encoder.get_rel_pos(hidden),
        "rel_embeddings": encoder.get_rel_embedding(),
    }
    for _ in range(2):
        queries, _ = encoder.layer[-1](hidden, query_states=queries, **shared)
    logits = theirs.cls(at(queries, inputs["target_positions"]))
    reference = mean_nats(logits, inputs["targets"], inputs["weights"])
    reference.backward()
    assert abs(float(loss) - reference.item()) < TOLERANCE
    assert_close(gradients["enhanced_decoder"]["positions"]["embedding"], positions.grad)
    written = params_to_huggingface(
        {"encoder": gradients["encoder"], "mlm": gradients["enhanced_decoder"]["head"]}, config
    )
    compared = 0
    for name, parameter in theirs.named_parameters():
        if name in written and parameter.grad is not None:
            assert_close(written[name], parameter.grad, name)
            compared += 1
    assert compared > 40


def test_disentangled_embeddings_have_the_gradients_of_the_formula():
    """Of the shared table: the generator's alone; of the difference: the discriminator's."""
    config = small_deberta_config(
        VOCAB,
        max_position_embeddings=LENGTH,
        dropout_rate=0.0,
        has_positions=True,
    )
    settings = GeneratorSettings(
        hidden_fraction=1.0, num_layers=1, disentangles_embeddings=True, discriminator_weight=7.0
    )
    objective = ReplacedTokens(MASKING, settings)
    batch = objective.prepare(single_rows(), jax.random.key(0))
    model = objective.make_model(config, ExecutionPlan())
    params = random_params(model, batch)
    assert set(params["difference"]) == {"token_embedding", "position_embedding"}
    samples = jnp.array(np.random.default_rng(0).integers(5, VOCAB, batch["targets"].shape))

    def loss_fn(params):
        sums = objective.sums(model, params, batch)
        losses = {name: sums[name][0] / sums[name][1] for name in ("mlm_loss", "replaced_loss")}
        return objective.total_loss(losses)

    # The samples are discrete: any will do, the same on both sides.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.objectives.replaced_tokens.sample_tokens", lambda *_: samples)
        loss, gradients = jax.value_and_grad(loss_fn)(params)

    encoder = {name: x for name, x in params["encoder"].items() if name != "pooler"}
    shared, own = encoder["embeddings"], params["generator"]["encoder"]["embeddings"]
    tables = {name: shared[name] for name in params["difference"]}
    of_generator = params["generator"]["encoder"] | {"embeddings": own | tables}
    generator_config = settings.config(config)
    generator = reference_model(generator_config, of_generator, params["generator"]["mlm"])
    discriminator, inputs = reference_model(config, encoder), torch_batch(batch)
    states = generator.deberta(inputs["tokens"], attention_mask=inputs["mask"]).last_hidden_state
    logits = generator.cls(at(states, inputs["target_positions"]))
    reference = mean_nats(logits, inputs["targets"], inputs["weights"])

    replaced, is_replaced = replace_tokens(batch, samples)
    differences, weights = {}, {}
    for name, table in (
        ("word_embeddings", "token_embedding"),
        ("position_embeddings", "position_embedding"),
    ):
        size = len(getattr(discriminator.embeddings, name).weight)
        difference = torch.tensor(np.array(params["difference"][table]["embedding"])[:size])
        differences[table] = difference.double().requires_grad_()
        weight = getattr(generator.deberta.embeddings, name).weight.detach() + differences[table]
        weights[f"embeddings.{name}.weight"] = weight
    arguments = {
        "input_ids": torch.tensor(np.array(replaced["tokens"])).long(),
        "attention_mask": inputs["mask"],
    }
    output = torch.func.functional_call(discriminator, weights, (), arguments)
    head = jax.tree.map(lambda x: torch.tensor(np.array(x)).double(), params["discriminator"])
    hidden = output.last_hidden_state @ head["dense"]["kernel"] + head["dense"]["bias"]
    logits = torch.nn.functional.gelu(hidden) @ head["output"]["kernel"] + head["output"]["bias"]
    is_real = inputs["mask"] > 0
    labels = torch.tensor(np.array(is_replaced)).double()[is_real]
    reference = reference + 7.0 * torch.nn.functional.binary_cross_entropy_with_logits(
        logits[..., 0][is_real], labels
    )
    reference.backward()
    assert abs(float(loss) - reference.item()) < 7 * TOLERANCE
    for table, name in (
        ("token_embedding", "word_embeddings"),
        ("position_embedding", "position_embeddings"),
    ):
        exact = getattr(generator.deberta.embeddings, name).weight.grad
        found = gradients["encoder"]["embeddings"][table]["embedding"]
        assert_close(found[: len(exact)], exact, table)
        exact = differences[table].grad
        found = gradients["difference"][table]["embedding"]
        assert_close(found[: len(exact)], exact, table)
        assert exact.abs().max() > 1e-3
