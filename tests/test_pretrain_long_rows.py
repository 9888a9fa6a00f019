"""The real main on rows of 8,192 tokens."""

import math

import pytest

from bert_jax import pretrain
from bert_jax.configs.pretrain import modernbert_base
from bert_jax.configs.pretrain.fields import make_later_phases
from bert_jax.data.rows import Rows
from tests.helpers.corpora import build_small_corpus
from tests.helpers.json_lines import read_lines


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_a_run_on_rows_of_many_short_sequences(tmp_path):
    sizes = {"max_seq_length": 8192, "max_sequences": 200, "rows": "document_sentences"}
    corpus = build_small_corpus(tmp_path, num_documents=500, **sizes)
    rows = Rows(corpus)
    ends = rows.read(0, rows.num_rows)["sequence_bounds"][..., 2]
    assert (ends > 0).sum(axis=1).max() > 64 and ends.max() > 8000

    config = modernbert_base.get_config("runlocal")
    config.model.update({"size": None, "num_layers": 2, "hidden_size": 16, "num_heads": 2})
    config.model.update({"intermediate_size": 16, "attention_pattern": "gl"})
    config.update({"num_steps": 2, "warmup_steps": 1, "decay_steps": 0, "batch_size": 2})
    config.update({"eval_batch_size": 2, "eval_every": 0, "checkpoint_every": 2})
    config.corpus, config.later_phases = str(corpus), make_later_phases()
    pretrain.train_and_evaluate(config.lock(), tmp_path / "run")
    losses = [line["train/mlm_loss"] for line in read_lines(tmp_path / "run/metrics.jsonl")[:2]]
    # At first, all of the vocabulary of 34 is about equally likely.
    assert losses == pytest.approx([math.log(34)] * 2, abs=0.2)
