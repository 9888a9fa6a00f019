"""BERT's descendants against golden values of transformers; `make parity` compares many more."""

import numpy as np
import pytest

from tests.golden import make_families as golden


@pytest.mark.parametrize("name", golden.MODELS)
def test_hidden_states_and_logits_equal_the_golden_values(name):
    config, head, tensors, rows = golden.make_case(name)
    actual = golden.our_outputs(config, head, tensors, rows)
    is_real = np.arange(golden.LENGTH) < np.array(golden.LENGTHS)[:, None]
    with np.load(golden.PATH) as expected:
        for key, value in actual.items():
            exact = expected[f"{name}/{key}"]
            difference = np.abs(value - exact)
            worst = np.max(difference[is_real] if difference.ndim == 3 else difference)
            assert worst < 1e-5 * max(1, np.max(np.abs(exact))), key
