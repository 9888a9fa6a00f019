"""Sequences per second and model FLOPs utilization of a training run."""

import time

import jax

from bert_jax.model.config import BertConfig

# Dense bf16 peak of one JAX device in FLOP/s, from the vendors' data sheets. TPU v4 and v5p have
# one device per chip, v2 and v3 one per core.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


class Throughput:
    """Measures the speed of training between reports; what happens before `restart` is excluded."""

    def __init__(self, row_flops: float, batch_size: int):
        self._row_flops, self._batch_size = row_flops, batch_size
        self.restart(0)

    def restart(self, step: int) -> None:
        """Starts the clock after `step`, as after a compilation or an evaluation."""
        self._step, self._time = step, time.monotonic()

    def measure(self, step: int) -> dict[str, float]:
        """Returns the metrics of the steps since the restart; none if there were no steps."""
        if step == self._step:
            return {}
        rate = (step - self._step) * self._batch_size / (time.monotonic() - self._time)
        utilization = model_flops_utilization(self._row_flops * rate)
        return {"sequences_per_second": rate} | ({"mfu": utilization} if utilization else {})


def flops_per_row(config: BertConfig, length: int, num_predictions: int, num_pairs: int) -> float:
    """Returns the FLOPs of the matrix products of one training step for one row.

    Two per multiply-add, in three passes (forward, gradients of inputs, gradients of weights), with
    attention over the whole row; gathers, LayerNorm and softmax are not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = length * (4 * hidden**2 + 2 * hidden * inner) + 2 * length**2 * hidden
    mlm = num_predictions * (hidden**2 + hidden * config.padded_vocab_size)
    nsp = num_pairs * (hidden**2 + 2 * hidden)
    return 2 * 3 * (config.num_layers * layer + mlm + nsp)


def model_flops_utilization(flops_per_second: float) -> float | None:
    """Returns the share of all devices' peak (PaLM, appendix B), None if the peak is unknown."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return flops_per_second / (peak * jax.device_count()) if peak else None
