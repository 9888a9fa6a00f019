"""AdamW against torch's (`make parity`); tests/test_optimizer.py has the formulas in float64."""

import jax
import numpy as np
import optax
import pytest
import torch

from bert_jax.checkpoints.huggingface import params_from_huggingface
from bert_jax.training.optimizer import make_optimizer, make_schedule
from tests.golden import make_model as golden

NUM_STEPS, WARMUP_STEPS, PEAK = 100, 10, 1e-3


def rate_factor(step: int) -> float:
    return step / WARMUP_STEPS if step < WARMUP_STEPS else 1 - step / NUM_STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_100_steps_of_adamw_equal_torch(dtype):
    def scaled_tensors(seed, scale):
        tensors = golden.random_tensors(golden.CONFIG, seed)
        return {name: np.float32(scale) * value for name, value in tensors.items()}

    def as_tree(tensors):
        return params_from_huggingface(tensors, golden.CONFIG)[0]

    start = scaled_tensors(seed=0, scale=0.2)
    weights = {name: torch.tensor(value, dtype=dtype) for name, value in start.items()}
    plain = [name for name in weights if "LayerNorm" in name or "bias" in name]
    groups = [
        {"params": [weights[name] for name in weights if name not in plain], "weight_decay": 0.01},
        {"params": [weights[name] for name in plain], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.999), eps=1e-6)
    rates = torch.optim.lr_scheduler.LambdaLR(reference, rate_factor)

    optimizer = make_optimizer("adamw", make_schedule(PEAK, NUM_STEPS, WARMUP_STEPS))
    update = jax.jit(optimizer.update)
    params = as_tree(start)
    state = optimizer.init(params)
    worst = 0.0
    for step in range(NUM_STEPS):
        gradients = scaled_tensors(seed=1 + step, scale=10.0 ** (step % 7 - 4))
        for name, value in gradients.items():
            weights[name].grad = torch.tensor(value, dtype=dtype)
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        reference.step()
        rates.step()
        updates, state = update(as_tree(gradients), state, params)
        params = optax.apply_updates(params, updates)
        expected = as_tree({name: value.numpy() for name, value in weights.items()})
        errors = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), params, expected)
        worst = max(worst, *jax.tree.leaves(errors))
    print(f"adamw against {dtype}: parameters differ by {worst:.1e}")
    moved = max(np.max(np.abs(weights[name].numpy() - start[name])) for name in start)
    assert moved > 0.01
    assert worst < 1e-6
