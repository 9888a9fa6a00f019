"""The scores of retrieval against sentence-transformers' InformationRetrievalEvaluator."""

import numpy as np
import pytest

from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.tasks import retrieval
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import write_lines

NAMES = {"mrr": "mrr@k", "accuracy": "accuracy@k", "recall": "recall@k"}


def test_scores_equal_sentence_transformers(tmp_path):
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    rng = np.random.default_rng(0)
    corpus = [f"{first} {second}" for first in WORDS[:6] for second in WORDS[:5]]
    for case in range(100):
        queries = WORDS[: int(rng.integers(1, 9))]
        relevant = {
            query: rng.choice(corpus, int(rng.integers(1, 13)), replace=False) for query in queries
        }
        lines = [
            {"query": query, "positive": text} for query in queries for text in relevant[query]
        ]
        rng.shuffle(lines)
        files = {"dev": lines, "passages": [{"text": text} for text in corpus]}
        config = config_file.get_config("bi_encoder,runlocal")
        for name, objects in files.items():
            path = tmp_path / f"{case}_{name}.jsonl"
            write_lines(path, objects)
            config.data[name] = str(path)
        (split,) = retrieval.get_task(config, tokenizer).splits
        vectors = {query: rng.normal(size=4) for query in queries}
        passages = {text: rng.normal(size=4) for text in corpus}
        names = [line["query"] for line in lines]
        outputs = [vectors[name][None] for name in names]
        outputs += [passages[text][None] for text in corpus]
        assert len(split.features) == len(outputs)
        evaluator = evaluation.InformationRetrievalEvaluator(
            {query: query for query in queries},
            {text: text for text in corpus},
            {query: set(texts) for query, texts in relevant.items()},
            mrr_at_k=[10],
            accuracy_at_k=[1, 10],
            precision_recall_at_k=[1, 10],
        )
        expected = evaluator.compute_metrics(
            [
                [
                    {"corpus_id": text, "score": float(vectors[query] @ passages[text])}
                    for text in corpus
                ]
                for query in evaluator.queries_ids
            ]
        )
        for name, value in split.score(outputs).items():
            kind, _, k = name.partition("_at_")
            assert value == pytest.approx(expected[NAMES[kind]][int(k)], abs=1e-12), (case, name)
