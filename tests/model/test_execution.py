"""Plans: which way layers run, decided once, and followed by the model and the step."""

import types

import jax
import pytest

from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Encoder, EncoderModel
from bert_jax.model.execution import (
    Execution,
    ExecutionPlan,
    StepParameters,
    log_path,
    plan_execution,
)
from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.sharding.mesh import make_mesh
from tests.helpers.models import example_batch

CPU, GPU, TPU = (
    types.SimpleNamespace(platform=name, device_kind=name) for name in ("cpu", "gpu", "tpu")
)


@pytest.mark.parametrize(
    ("fields", "device", "uses_kernels", "scans_layers"),
    [
        ({}, TPU, True, True),
        ({}, GPU, False, True),
        ({}, CPU, False, False),
        ({"kernels": "tpu"}, CPU, True, False),
        ({"kernels": "plain"}, TPU, False, True),
        ({"scan_layers": True}, CPU, False, True),
        ({"scan_layers": True}, TPU, True, True),
        ({"scan_layers": False}, TPU, False, False),
        ({"scan_layers": False}, GPU, False, False),
    ],
)
def test_plan_follows_the_device_where_the_configuration_is_silent(
    fields, device, uses_kernels, scans_layers
):
    plan = plan_execution(Execution(**fields, remat="dots", dtype="bfloat16"), device, 4)
    kind = device.device_kind if uses_kernels else ""
    assert plan == ExecutionPlan(uses_kernels, scans_layers, "dots", "bfloat16", 4, kind)


def test_without_a_plan_an_encoder_runs_as_it_is_defined_on_any_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [TPU])
    config = BertConfig()
    for model in (Encoder(config), EncoderModel(config), PretrainingModel(config)):
        assert model.plan == plan_execution(Execution(kernels="plain"), CPU)
        assert model.plan.path(config, 512) == "unrolled" and model.plan.dtype == "float32"


def test_a_loaded_model_runs_on_the_device_of_its_parameters(monkeypatch):
    params = {"encoder": jax.device_put(0.0, jax.devices("cpu")[1])}
    monkeypatch.setattr(jax, "devices", lambda: [TPU])
    model = PretrainedModel(BertConfig(), None, params, dtype="bfloat16")
    assert model.plan == ExecutionPlan(scans_layers=True, dtype="bfloat16")


@pytest.mark.parametrize(
    ("length", "fields", "tensor_shards", "reason"),
    [
        (
            8200,
            {},
            1,
            "rows of 8200 tokens are longer than 8192, the limit of the attention kernel",
        ),
        (16, {"hidden_size": 192, "num_heads": 3}, 1, "heads of 64 in 192 lanes"),
        (16, {"hidden_size": 96, "num_heads": 1}, 1, "heads of 96 in 96 lanes"),
        (16, {}, 2, "heads of 64 in 64 lanes"),
        (16, {"num_layers": 1}, 1, "a single layer needs no loop"),
    ],
)
def test_layers_that_the_fast_path_cannot_run_fall_back_and_the_reason_is_logged(
    caplog, length, fields, tensor_shards, reason
):
    config = BertConfig(**({"hidden_size": 128, "num_heads": 2} | fields))
    plan = ExecutionPlan(uses_kernels=True, tensor_shards=tensor_shards)
    assert plan.path(config, length) == "unrolled"
    log_path(plan, config, length)
    (message,) = [record.message for record in caplog.records]
    assert "run without the fast path for TPUs" in message and reason in message


def test_layers_unrolled_on_request_run_without_the_fast_path_and_the_reason_is_logged(caplog):
    plan = plan_execution(Execution(kernels="tpu", scan_layers=False), CPU)
    assert plan == ExecutionPlan()
    (message,) = [record.message for record in caplog.records]
    assert message == "Layers run without the fast path for TPUs: scan_layers is False"


def test_nothing_is_logged_of_a_fast_path_that_was_not_asked_for(caplog):
    caplog.set_level("INFO", "absl")
    for fields, device in (({}, CPU), ({}, GPU), ({"kernels": "plain"}, TPU)):
        log_path(plan_execution(Execution(**fields), device), BertConfig(), 520)
    assert not caplog.records


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "relu"},
        # ALBERT_XLARGE: heads of 128.
        {"hidden_size": 2048, "activation": "gelu_tanh", "shares_layers": True, "num_heads": 16},
    ],
)
def test_fast_path_is_logged_and_so_is_that_its_kernels_are_interpreted(caplog, fields):
    caplog.set_level("INFO", "absl")
    config = BertConfig(**fields)
    for device in (CPU, TPU):
        plan = plan_execution(Execution(kernels="tpu"), device)
        assert plan.path(config, 512) == "fast"
        log_path(plan, config, 512)
    interpreted, *runs = [record.message for record in caplog.records]
    assert interpreted == "Kernels for TPUs are interpreted on the cpu, slowly"
    size = fields.get("hidden_size", 768)
    expected = f"The 12 layers of hidden size {size} run on the fast path for TPUs"
    assert runs == [expected + ", in rows of 512 tokens"] * 2


LIMIT = "rows of {} tokens are longer than {}, the limit of the attention kernel"
NO_LONG_ROWS = "the attention kernel for long rows does not run on TPU v"


@pytest.mark.parametrize(
    ("kind", "dtype", "config", "length", "reason"),
    [
        ("TPU v2", "float32", BertConfig(), 512, NO_LONG_ROWS + "2"),
        ("TPU v3", "bfloat16", BertConfig(), 512, NO_LONG_ROWS + "3"),
        ("TPU v3", "bfloat16", ModernBertConfig(), 0, NO_LONG_ROWS + "3"),
        ("TPU v4", "bfloat16", BertConfig(), 8192, LIMIT),
        ("TPU v4", "float32", ModernBertConfig(), 8192, LIMIT),
        ("TPU v5 lite", "float32", BertConfig(), 8192, LIMIT),
    ],
)
def test_the_fast_path_ends_where_no_kernel_computes_the_rows(kind, dtype, config, length, reason):
    device = types.SimpleNamespace(platform="tpu", device_kind=kind)
    plan = plan_execution(Execution(dtype=dtype), device)
    for runs in {length, min(length, 128)} - {0}:
        assert plan.path(config, runs) == "fast"
    for too_long in (length + 1, 9000):
        assert plan.path(config, too_long) == "scan"
    assert plan.why_not_fast(config, length + 1) == reason.format(length + 1, length)


@pytest.mark.parametrize("length", [512, 520])
def test_the_step_fuses_projections_where_the_encoder_takes_the_fast_path(length):
    config = BertConfig(num_layers=2, hidden_size=128, num_heads=2, max_position_embeddings=520)
    plan = ExecutionPlan(uses_kernels=True, device_kind="TPU v3")
    init = EncoderModel(config, plan).init
    params = jax.eval_shape(init, jax.random.key(0), example_batch())["params"]
    replicated = jax.sharding.NamedSharding(make_mesh(), jax.sharding.PartitionSpec())
    shardings = jax.tree.map(lambda _: replicated, params)
    layout = StepParameters(plan, {"encoder": config}, shardings, length)
    prepared = jax.eval_shape(jax.jit(layout.prepare), params)["encoder"]["layers"]
    is_fused = "kernel" not in prepared.get("query", {})
    assert is_fused == (plan.path(config, length) == "fast") == (length <= 512)
