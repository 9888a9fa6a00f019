"""mteb's scores of a loaded model against those of the same model in sentence-transformers."""

import os
import pathlib

import numpy as np
import pytest

mteb = pytest.importorskip("mteb")
datasets = pytest.importorskip("datasets")
sentence_transformers = pytest.importorskip("sentence_transformers")

import bert_jax  # noqa: E402
from bert_jax.checkpoints.export import save_huggingface  # noqa: E402
from bert_jax.checkpoints.read import read_model  # noqa: E402
from bert_jax.inference.mteb_models import mteb_model  # noqa: E402
from tests.helpers.corpora import WORDS  # noqa: E402

if "BERT_JAX_MINILM" not in os.environ:
    pytest.skip("needs BERT_JAX_MINILM=DIR", allow_module_level=True)
MINILM = pathlib.Path(os.environ["BERT_JAX_MINILM"]).absolute()
RNG = np.random.default_rng(0)


def make_texts(count, length):
    return [" ".join(RNG.choice(WORDS, length)) for _ in range(count)]


def metadata(kind, score):
    return mteb.TaskMetadata(
        type=kind,
        name=f"Local{kind}",
        main_score=score,
        description="Random words.",
        reference=None,
        dataset={"path": "none", "revision": "none"},
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        modalities=["text"],
    )


class LocalSTS(mteb.abstasks.AbsTaskSTS):
    metadata = metadata("STS", "cosine_spearman")

    def load_data(self, **kwargs):
        columns = {"sentence1": make_texts(50, 8), "sentence2": make_texts(50, 8)}
        columns["score"] = RNG.random(50).tolist()
        self.dataset = {"test": datasets.Dataset.from_dict(columns)}
        self.data_loaded = True


class LocalRetrieval(mteb.abstasks.AbsTaskRetrieval):
    metadata = metadata("Retrieval", "ndcg_at_10")

    def load_data(self, **kwargs):
        passages, queries = make_texts(80, 12), make_texts(20, 4)
        ids = [f"d{number}" for number in range(len(passages))]
        names = [f"q{number}" for number in range(len(queries))]
        self.dataset = {
            "default": {
                "test": {
                    "corpus": datasets.Dataset.from_dict({"id": ids, "text": passages}),
                    "queries": datasets.Dataset.from_dict({"id": names, "text": queries}),
                    "relevant_docs": {
                        name: {str(id_): 1 for id_ in RNG.choice(ids, 3)} for name in names
                    },
                    "top_ranked": None,
                }
            }
        }
        self.data_loaded = True


class LocalReranking(LocalRetrieval):
    metadata = metadata("Reranking", "ndcg_at_10")

    def load_data(self, **kwargs):
        super().load_data()
        split = self.dataset["default"]["test"]
        ids = split["corpus"]["id"]
        split["top_ranked"] = {
            query: list({*RNG.choice(ids, 20).tolist(), *relevant})
            for query, relevant in split["relevant_docs"].items()
        }


def scores_of(model, task):
    result = mteb.evaluate(model, task, cache=None, show_progress_bar=False)
    (scores,) = result.task_results[0].scores["test"]
    return {name: value for name, value in scores.items() if isinstance(value, float)}


@pytest.mark.parametrize("kind", [LocalSTS, LocalRetrieval])
def test_scores_equal_those_of_sentence_transformers(kind):
    task = kind()
    task.load_data()
    found = scores_of(mteb_model(bert_jax.load(MINILM)), task)
    expected = scores_of(sentence_transformers.SentenceTransformer(str(MINILM)), task)
    assert found.keys() == expected.keys() and task.metadata.main_score in found
    assert found == pytest.approx(expected, abs=1e-4, nan_ok=True)


def test_scores_of_a_cross_encoder_equal_those_of_sentence_transformers(tmp_path):
    params, settings, tokenizer, _ = read_model(MINILM)
    kernel = np.random.default_rng(0).normal(size=(384, 1)).astype(np.float32)
    params["head"] = {"kernel": kernel, "bias": np.float32([0.5])}
    head = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": 64}
    settings["head"] = head | {"max_query_length": 32}
    save_huggingface(tmp_path / "out", params, settings, tokenizer)
    task = LocalReranking()
    task.load_data()
    found = scores_of(mteb_model(bert_jax.load(tmp_path / "out")), task)
    expected = scores_of(sentence_transformers.CrossEncoder(str(tmp_path / "out")), task)
    assert found["ndcg_at_10"] < 1
    assert found == pytest.approx(expected, abs=1e-4, nan_ok=True)
