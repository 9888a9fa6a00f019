"""Our model and KerasHub's, on the same weights; run by `make keras-parity`."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.model.encoder import Encoder
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.optimizer import make_optimizer
from tests.helpers import batch_of_row, write_random_encoder, write_vocabulary

if importlib.util.find_spec("keras_hub") is None:
    pytest.skip("needs keras_hub", allow_module_level=True)

from benchmarks import keras_side
