"""The scores of retrieval against trec_eval, ranx and sentence-transformers' evaluators."""

import numpy as np
import pytest

from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.tasks import retrieval
from bert_jax.tasks.retrieval_scores import find_ranks, query_scores
from bert_jax.tasks.similarity_scores import pair_scores
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import write_lines

NAMES = {
    "mrr": "mrr@k",
    "ndcg": "ndcg@k",
    "accuracy": "accuracy@k",
    "recall": "recall@k",
    "precision": "precision@k",
}
# Our names -> trec_eval's and ranx's.
TREC_EVAL = {
    "ndcg": "ndcg_cut_{}",
    "map": "map_cut_{}",
    "accuracy": "success_{}",
    "recall": "recall_{}",
    "precision": "P_{}",
}
RANX = {
    "mrr": "mrr@{}",
    "ndcg": "ndcg@{}",
    "map": "map@{}",
    "accuracy": "hit_rate@{}",
    "recall": "recall@{}",
    "precision": "precision@{}",
}
CUTOFFS = (1, 3, 5, 10, 100)


def random_cases(count):
    """Yields of each query: scores with ties, grades from 0, which passages are listed."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        size = int(rng.integers(1, 60))
        scores = np.round(rng.normal(size=size), int(rng.integers(0, 4)))
        grades = rng.integers(0, 4, size) * (rng.random(size) < rng.choice([0.1, 0.5, 1.0]))
        grades[rng.integers(size)] = rng.integers(1, 4)
        yield scores, grades, rng.permutation(size)[: int(rng.integers(1, size + 1))]


def make_qrels_and_run(count):
    """Returns our scores of each case, and the same qrels and run by id.

    trec_eval and ranx break ties by the id or the order in the run: a name that begins with the
    grade, from high to low, gives the order that we state, lower grades first.
    """
    cases = list(random_cases(count))
    relevant = [np.flatnonzero(grades) for _, grades, _ in cases]
    grades = [grades[own] for (_, grades, _), own in zip(cases, relevant, strict=True)]
    ranks = [
        find_ranks(scores, own, listed, of_own)
        for (scores, _, listed), own, of_own in zip(cases, relevant, grades, strict=True)
    ]
    qrels, run = {}, {}
    for number, (scores, all_grades, listed) in enumerate(cases):
        names = [f"{9 - grade}_{index:03}" for index, grade in enumerate(all_grades)]
        qrels[f"q{number:04}"] = {
            name: int(grade) for name, grade in zip(names, all_grades, strict=True)
        }
        ordered = sorted(listed, key=lambda index: names[index], reverse=True)
        run[f"q{number:04}"] = {names[index]: float(scores[index]) for index in ordered}
    return query_scores(ranks, grades, CUTOFFS), qrels, run


def test_scores_of_tied_and_graded_rankings_equal_trec_eval():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    found, qrels, run = make_qrels_and_run(1000)
    measures = {f"{name.partition('_{}')[0]}.{k}" for name in TREC_EVAL.values() for k in CUTOFFS}
    expected = pytrec_eval.RelevanceEvaluator(qrels, measures | {"recip_rank"}).evaluate(run)
    for name, values in found.items():
        kind, _, k = name.partition("_at_")
        for query, value in zip(qrels, values, strict=True):
            if kind == "mrr":
                reciprocal = expected[query]["recip_rank"]
                reference = reciprocal if reciprocal >= 1 / (int(k) + 1e-9) else 0
            else:
                reference = expected[query][TREC_EVAL[kind].format(k)]
            assert value == pytest.approx(reference, abs=1e-12), (query, name)


def test_scores_of_tied_and_graded_rankings_equal_ranx():
    ranx = pytest.importorskip("ranx")
    found, qrels, run = make_qrels_and_run(1000)
    # It does not say how it orders ties: the order is given by scores of its own.
    untied = {
        query: {
            name: float(-place)
            for place, name in enumerate(sorted(own, key=lambda name: -own[name]))
        }
        for query, own in run.items()
    }
    names = {f"{kind}_at_{k}": name.format(k) for kind, name in RANX.items() for k in CUTOFFS}
    evaluated = ranx.evaluate(
        ranx.Qrels(qrels), ranx.Run(untied), list(names.values()), return_mean=False
    )
    for name, values in found.items():
        np.testing.assert_allclose(values, evaluated[names[name]], atol=1e-12, err_msg=name)


def test_pair_scores_equal_sentence_transformers():
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    classifier = evaluation.BinaryClassificationEvaluator
    rng = np.random.default_rng(0)
    for _ in range(1000):
        size = int(rng.integers(2, 40))
        similarities = rng.normal(size=size)  # Without ties, which its thresholds may split.
        labels = rng.random(size) < 0.4
        labels[:2] = True, False
        found = pair_scores(similarities, labels)
        accuracy, _ = classifier.find_best_acc_and_threshold(similarities, labels, True)
        f1, *_ = classifier.find_best_f1_and_threshold(similarities, labels, True)
        # It always predicts at least one pair as positive.
        assert found["accuracy"] == pytest.approx(max(accuracy, np.mean(~labels)), abs=1e-12)
        assert found["f1"] == pytest.approx(f1, abs=1e-12)


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
            mrr_at_k=[1, 10, 100],
            ndcg_at_k=[1, 10, 100],
            accuracy_at_k=[1, 10, 100],
            precision_recall_at_k=[1, 10, 100],
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
            if kind == "map":  # It divides by k if that is less than the number of positives.
                continue
            assert value == pytest.approx(expected[NAMES[kind]][int(k)], abs=1e-12), (case, name)
