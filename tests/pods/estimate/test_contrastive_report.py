"""The report of a bi-encoder's training, with a fake compiler."""

import collections

import jax
import pytest

from bert_jax.configs.finetune import contrastive, retrieval
from bert_jax.model import bert
from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate import compilation, contrastive_report, pod_report
from bert_jax.pods.estimate.hlo_cost import Cost
from bert_jax.training import metrics


def test_step_is_sharded_over_all_devices_and_its_microbatches_are_counted(monkeypatch):
    compiled, options = [], []

    def compile_program(*arguments):
        compiled.append(arguments)
        return {"activations": 1}, ""

    def step_cost(*_, **given):
        options.append(given)
        cycles = collections.Counter({("batch loss", "forward"): 3.6 * 1500e6})
        return Cost(cycles, 2.0, {}, {}, 0.0, [], {}, [])

    devices = CHIPS["v5e"], jax.devices()
    monkeypatch.setattr(compilation, "describe_topology", lambda topology: devices)
    monkeypatch.setattr(compilation, "compile_program", compile_program)
    monkeypatch.setattr(pod_report, "step_cost", step_cost)
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    config = contrastive.get_config()
    config.batch_size, config.per_device_batch_size = 1000, 4
    report = contrastive_report.report(config, "v5e:2x4", "tiny", train_examples=10_500)

    ((_, _, rows, *_),) = compiled
    assert rows["tokens"].shape == (1, 1024, 256)  # Of one trial; 32 microbatches of 4 x 8 rows.
    assert rows["tokens"].sharding.shard_shape(rows["tokens"].shape) == (1, 128, 256)
    assert options[0]["unknown_trips"] == 32
    assert report["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1}
    assert report["max_seq_length"] == 256 and report["per_device_batch_size"] == 4
    assert report["num_steps"] == round(config.num_epochs * 11)
    assert report["total_hours"] == pytest.approx(report["num_steps"] / 1000)
    forward = bert.flops_per_row(bert.BertConfig.named("tiny"), 128, 128, 0, 0)
    assert report["model_flops_per_row"] == 3 * 2 * forward
    assert report["mfu"] == pytest.approx(1000 / 3.6 / 8 * 6 * forward / 1e12)


@pytest.mark.parametrize(
    ("argument", "loss"),
    [
        ("cross_encoder", ""),
        ("bi_encoder", "cosent"),
        ("bi_encoder", "triplet"),
        ("bi_encoder,splade", ""),
        ("bi_encoder,colbert", ""),
    ],
)
def test_other_models_and_losses_have_no_report(argument, loss):
    config = retrieval.get_config(argument)
    config.loss.name = loss
    with pytest.raises(ValueError, match=f"no report for .*config.loss.name={loss}:"):
        contrastive_report.report(config, "v5e:2x4")
