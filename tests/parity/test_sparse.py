"""Sparse vectors of masked LMs against sentence-transformers' SparseEncoder."""

import random

import numpy as np
import pytest

import bert_jax
from tests.helpers.models import TORCH_PIECES, write_torch_model

pytest.importorskip("sentence_transformers")

from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling


@pytest.mark.parametrize("top_k", [None, 7])
def test_sparse_vectors_equal_sentence_transformers(top_k, tmp_path):
    write_torch_model(tmp_path, "BertForMaskedLM")
    rng = random.Random(0)
    texts = [" ".join(rng.choices(TORCH_PIECES[5:], k=rng.randint(1, 12))) for _ in range(50)]
    reference = SparseEncoder(
        modules=[Transformer(str(tmp_path), transformer_task="fill-mask"), SpladePooling("max")]
    )
    expected = reference.encode(texts, max_active_dims=top_k, convert_to_sparse_tensor=False)
    found = bert_jax.load(tmp_path).encode_sparse(texts, top_k=top_k)
    assert found.shape == (50, len(TORCH_PIECES)) and found.dtype == np.float32
    np.testing.assert_allclose(found.toarray(), expected.cpu().numpy(), atol=1e-5)
    assert top_k is None or np.all(np.diff(found.indptr) <= top_k)
