"""Retrieval: a bi-encoder finds passages by their embeddings, a cross-encoder reranks them.

Both are trained on queries, each with a passage that answers it and, optionally, some that do not:
one `{"query": ..., "positive": ..., "negatives": [...]}` per line. Lines with equal queries are one
query with several positives.

Two queries or passages are equal if their token ids are equal: in training the ids that the model
sees, in rankings all ids, because truncation must not make a passage equal to a
relevant one.
"""

import string
from collections.abc import Mapping, Sequence, Set

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import ModelInput
from bert_jax.model import heads
from bert_jax.model.pooling import POOLINGS
from bert_jax.runtime.config_fields import Bounds, check_bounds
from bert_jax.tasks import tables
from bert_jax.tasks.judged_split import make_judged_split
from bert_jax.tasks.prompts import prompt_settings
from bert_jax.tasks.qrels import read_judged, training_queries
from bert_jax.tasks.queries import (
    Inputs,
    Query,
    TokenizedTexts,
    choose_negatives,
    make_feature,
    read_classes,
    read_passages,
    read_queries,
)
from bert_jax.tasks.rankings import make_ranking_split
from bert_jax.tasks.reranking import RerankPredictor
from bert_jax.tasks.retrieval_losses import TrainingLoss, find_loss, head_with_loss
from bert_jax.tasks.retrieval_scores import TOP, score_names
from bert_jax.tasks.task import Task, TrainedHead, limit_examples
from bert_jax.tasks.text_pairs import (
    PAIR_METRICS,
    TextPair,
    check_metric_of_pairs,
    make_pair_split,
    read_pairs,
)
from bert_jax.tasks.token_vectors import TokenRules
from bert_jax.tasks.vectors import SearchPredictor, VectorPredictor
from bert_jax.tokenizers.tokenizer import Tokenizer

DEFAULT_METRICS = {"ranking": f"mrr_at_{TOP}", "similarity": "spearman"}
"""What dev and test are scored by, and the score that selects the best checkpoint."""
ROLES = ("bi_encoder", "cross_encoder")
QUERY_EXPANSIONS = ("hidden", "attended", "none")
"""Whether a multi-vector model fills queries with masks, and whether tokens attend to these."""
HEADS = {
    "dense": heads.EMBEDDING,
    "sparse": heads.SPARSE_EMBEDDING,
    "multi_vector": heads.MULTI_VECTOR,
}
"""The head of a bi-encoder, by `config.similarity.vectors`."""


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/retrieval.py."""
    data = config.data
    files = tables.files_from_config(data)
    loss = _check_config(config)
    is_bi_encoder = data.role == "bi_encoder"
    notes: dict[str, int] = {}
    is_ranking = dict.fromkeys(files, data.evaluation == "ranking")
    is_ranking["train"] = loss.labels not in ("pair", "class")
    rankings = {name: path for name, path in files.items() if is_ranking[name]}
    judged = read_judged(config, rankings, notes) if data.queries else None
    lines = {} if judged else _read_splits(config, rankings, notes)
    queries = TokenizedTexts(tokenizer, data.max_query_length, data.query_prompt)
    passages = TokenizedTexts(tokenizer, config.max_seq_length, data.passage_prompt)
    vectors, rules = config.similarity.vectors, None
    settings = {"max_query_length": data.max_query_length}
    if vectors == "multi_vector":
        settings |= _multi_vector_settings(config)
        rules = TokenRules(settings, tokenizer)
    elif is_bi_encoder:
        settings |= prompt_settings(data.query_prompt, data.passage_prompt)
    if is_bi_encoder and vectors == "dense":
        settings |= {name: config.similarity[name] for name in ("pooling", "normalize")}
        if size := config.similarity.vector_size:
            settings["projections"] = [dense_layer(size)]
    inputs = Inputs(tokenizer, is_bi_encoder, config.max_seq_length, queries, passages, rules)
    queries.add(line.text for each in lines.values() for line in each)
    # Predictions take as long as there are passages, so these are limited too.
    collection = [] if judged else _read_collection(data, notes)
    collection = limit_examples(collection, config, "collection", notes)
    passages.add(collection)
    if judged and "train" in judged.splits:
        train = training_queries(judged.splits.pop("train"), judged.corpus, passages, notes)
        _check_num_negatives(train, data.num_negatives)
        queries.add(line.text for line in train)
        lines["train"] = train

    all_train = lines.pop("train", [])
    if loss.labels != "teacher_scores":
        notes["train lines with a teacher's scores, which this loss does not use"] = sum(
            line.scores is not None for line in all_train
        )
    used = limit_examples(all_train, config, "train", notes)
    features = []
    if used:
        num_negatives = data.num_negatives or 0
        features = _train_features(used, all_train, num_negatives, loss.labels, inputs, notes)
    elif "train" in files and loss.labels == "pair":
        features = _pair_features(config, loss, inputs, notes)
    elif "train" in files and loss.labels == "class":
        features = _class_features(config, inputs, notes)
    head, labels = (HEADS[vectors], ()) if is_bi_encoder else (heads.CROSS_ENCODER, ("score",))
    longest = max((np.size(feature.label) for feature in features), default=0)
    head = head_with_loss(head, loss, config, longest)
    splits = []
    for name, each in lines.items():
        # Keeps either all lines of a query or none.
        distinct = list(dict.fromkeys(queries.identity[line.text] for line in each))
        kept = set(limit_examples(distinct, config, name, notes))
        each = [line for line in each if queries.identity[line.text] in kept]
        splits.append(make_ranking_split(name, each, inputs, collection, data.cutoffs, notes))
        used = [*used, *each]
    for name, each in (judged.splits if judged else {}).items():
        each = limit_examples(each, config, name, notes)
        queries.add(query.text for query in each)
        splits.append(make_judged_split(name, each, judged.corpus, inputs, config, notes))
        used = [*used, *each]
    for name in (each for each in files if each != "train" and not is_ranking[each]):
        pairs = limit_examples(_read_pairs(config, name, files[name], notes), config, name, notes)
        if name == "dev":
            check_metric_of_pairs(data.metric, pairs, files[name])
        queries.add(pair.first for pair in pairs)
        passages.add(pair.second for pair in pairs)
        splits.append(make_pair_split(name, pairs, inputs))
    notes["queries truncated"] = queries.num_truncated(line.text for line in used)
    notes["passages truncated"] = passages.num_truncated(passages.ids)
    return Task(
        head=head,
        labels=labels,
        train=features,
        splits=tuple(splits),
        metric=f"dev/{data.metric or DEFAULT_METRICS[data.evaluation]}",
        notes=notes,
        head_settings=settings,
        files=files | {name: data[name] for name in ("passages", "queries", "run") if data[name]},
    )


def _check_config(config: ConfigDict) -> TrainingLoss:
    """Returns the loss. Raises ValueError if a field of the task is invalid."""
    data, pooling = config.data, config.similarity.pooling
    if data.role not in ROLES:
        raise ValueError(f"config.data.role={data.role}: expected {' or '.join(ROLES)}")
    if pooling not in POOLINGS:
        raise ValueError(f"config.similarity.pooling={pooling}: expected {' or '.join(POOLINGS)}")
    if config.similarity.vectors == "sparse":
        for name, default in (("pooling", "mean"), ("normalize", True)):
            if (value := config.similarity[name]) != default:
                problem = "sparse vectors are neither pooled hidden states nor normalized"
                raise ValueError(f"config.similarity.{name}={value}: {problem}: leave it out")
    is_bi_encoder = data.role == "bi_encoder"
    for name in ("query_prompt", "passage_prompt"):
        if data[name] and not is_bi_encoder:
            raise ValueError(f"config.data.{name}={data[name]!r}: only a bi_encoder takes prompts")
    if data.run and not data.queries:
        raise ValueError(f"config.data.run={data.run} has ids: set config.data.queries, too")
    cutoffs = data.cutoffs
    if (
        not cutoffs
        or not all(type(k) is int and k > 0 for k in cutoffs)
        or len({*cutoffs}) < len(cutoffs)
    ):
        expected = "different whole numbers from 1, such as (1, 10, 100)"
        raise ValueError(f"config.data.cutoffs={cutoffs}: expected {expected}")
    if data.evaluation not in DEFAULT_METRICS:
        expected = " or ".join(DEFAULT_METRICS)
        raise ValueError(f"config.data.evaluation={data.evaluation}: expected {expected}")
    is_ranking = data.evaluation == "ranking"
    if data.queries and not is_ranking:
        raise ValueError("config.data.evaluation=similarity: with data.queries, set it to ranking")
    names = score_names(cutoffs) if is_ranking else PAIR_METRICS
    metric = data.metric or DEFAULT_METRICS[data.evaluation]
    if metric not in names:
        default = "" if data.metric else ", the default"
        raise ValueError(
            f"config.data.metric={metric}{default}: expected one of {', '.join(names)}"
        )
    loss = find_loss(config)
    _check_multi_vector(config)
    min_negatives = loss.min_negatives if data.train else 0
    # The cross-encoder needs room for a passage beside the query.
    bounds = Bounds(3, config.max_seq_length // (1 if is_bi_encoder else 2))
    limit = "max_seq_length" if is_bi_encoder else "half of max_seq_length"
    check_bounds(config, bounds, "data.max_query_length", limited_by=limit)
    check_bounds(config, Bounds(min_negatives), "data.num_negatives")
    if min_negatives and data.num_negatives is None:
        raise ValueError(
            "config.data.num_negatives is not set: this loss compares the passages of a query: "
            f"expected at least {min_negatives}"
        )
    return loss


def dense_layer(size: int) -> dict:
    """Returns the settings of a dense layer of `size` outputs after the encoder."""
    return {"size": size, "has_bias": False, "activation": "identity"}


def _multi_vector_settings(config: ConfigDict) -> dict:
    """Returns the settings of a new multi-vector head."""
    fields, data = config.similarity, config.data
    kind, expansion = fields.query_expansion or "hidden", None
    if kind != "none":
        expansion = {"strategy": "fixed", "length": data.max_query_length, "token": None}
        expansion["attend"] = kind == "attended"
    size = fields.vector_size or 128
    return {
        "projections": [dense_layer(size)],
        "normalize": fields.normalize,
        "query_expansion": expansion,
        "skip_words": [] if fields.skip_punctuation is False else list(string.punctuation),
        "prompts": {"query": data.query_prompt, "document": data.passage_prompt},
    }


def _check_multi_vector(config: ConfigDict) -> None:
    """Raises ValueError for a field that only multi-vector models have, or that they lack."""
    fields = config.similarity
    if fields.vectors != "multi_vector":
        names = ("query_expansion", "skip_punctuation")
        has_size = fields.vectors == "dense" and config.data.role == "bi_encoder"
        for name in names if has_size else ("vector_size", *names):
            if fields[name] is not None:
                expected = "leave it out, or set similarity.vectors=multi_vector"
                raise ValueError(f"config.similarity.{name}={fields[name]}: {expected}")
        return
    if fields.query_expansion not in (None, *QUERY_EXPANSIONS):
        expected = ", ".join(QUERY_EXPANSIONS)
        raise ValueError(
            f"config.similarity.query_expansion={fields.query_expansion}: expected {expected}"
        )
    if fields.pooling != "mean":
        why = "a multi-vector model does not pool: leave it out"
        raise ValueError(f"config.similarity.pooling={fields.pooling}: {why}")
    if config.data.evaluation != "ranking":
        why = "a multi-vector model ranks: expected ranking"
        raise ValueError(f"config.data.evaluation={config.data.evaluation}: {why}")


def _read_splits(
    config: ConfigDict, files: dict[str, str], notes: dict[str, int]
) -> dict[str, list[Query]]:
    """Returns the lines of each split; counts what is unusual in `notes`."""
    lines = {}
    for name, path in files.items():
        unused: dict[str, int] = {}
        lines[name] = read_queries(path, name == "train", True, unused)
        tables.note_unused_keys(unused, f"{name} lines", notes)
        empty = [
            (line.location, f"the {name_of_text}")
            for line in lines[name]
            for name_of_text, texts in (("query", (line.text,)), ("negative", line.negatives))
            if not all(map(str.strip, texts))
        ]
        is_labeled = lines[name][0].positive is not None
        tables.check_empty_texts(name, empty, is_labeled, bool(config.data.train), notes)
    _check_num_negatives(lines.get("train", []), config.data.num_negatives)
    return lines


def _read_pairs(config: ConfigDict, name: str, path: str, notes: dict[str, int]) -> list[TextPair]:
    """Returns the text pairs of a split; counts what is unusual in `notes`."""
    unused: dict[str, int] = {}
    pairs = read_pairs(path, name == "train", True, unused)
    tables.note_unused_keys(unused, f"{name} lines", notes)
    empty = [
        (pair.location, name_of_text)
        for pair in pairs
        for name_of_text, text in (("the first text", pair.first), ("the second text", pair.second))
        if not text.strip()
    ]
    is_labeled = pairs[0].label is not None
    tables.check_empty_texts(name, empty, is_labeled, bool(config.data.train), notes)
    return pairs


def _check_num_negatives(train: Sequence[Query], num_negatives: int | None) -> None:
    """Raises ValueError for negatives if it is not set how many to train with."""
    with_negatives = [line for line in train if line.negatives]
    if num_negatives is None and with_negatives:
        fewest = min(len(line.negatives) for line in train)
        raise ValueError(
            f"{with_negatives[0].location}: it has 'negatives', but config.data.num_negatives is "
            "not set: set it to 0 to train without them, or to the number to train with per line "
            f"(each has at least {fewest})"
        )


def _read_collection(data: ConfigDict, notes: dict[str, int]) -> list[str]:
    """Returns the passages of `data.passages`, if any; counts what is unusual in `notes`."""
    if not data.passages:
        return []
    unused: dict[str, int] = {}
    collection = read_passages(data.passages, not data.train, unused)
    tables.note_unused_keys(unused, "passages", notes)
    notes["passages that are empty"] = sum(not text.strip() for text in collection)
    if data.role == "cross_encoder":
        notes["passages that a cross_encoder does not rank"] = len(collection)
        return []
    return collection


def _train_features(
    train: Sequence[Query],
    all_lines: Sequence[Query],
    num_negatives: int,
    labels: str,
    inputs: Inputs,
    notes: dict[str, int],
) -> list[ModelInput]:
    """Returns a feature for each line in `train`, a part of `all_lines`.

    A positive of a query, on any of `all_lines`, is never a negative for this query. `labels` is
    that of a `TrainingLoss`.
    """
    queries, passages = inputs.queries, inputs.passages
    positives: dict[bytes, dict[str, None]] = {queries.seen(line.text): {} for line in train}
    for line in all_lines:
        if (query := queries.seen(line.text)) in positives:
            positives[query][line.positive] = None
    passages.add(text for texts in positives.values() for text in texts)
    passages.add(text for line in train for text in line.negatives[:num_negatives])
    numbers: dict[bytes, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(passages.seen(text), len(numbers))

    features, num_left_out, num_unused = [], 0, 0
    for line in train:
        relevant = positives[queries.seen(line.text)]
        room = inputs.room(line.text)
        negatives, left_out = choose_negatives(line, relevant, passages, num_negatives, room)
        if len(negatives) < num_negatives:
            flag = f"config.data.num_negatives={num_negatives}"
            why = f", without {left_out} that answer the query" if left_out else ""
            found = f"fewer negatives ({len(negatives)}{why}) than {flag}"
            raise ValueError(f"{line.location}: {found}: set it lower, or add negatives")
        num_left_out += left_out
        num_unused += len(line.negatives) - len(negatives) - left_out
        candidates = (line.positive, *negatives)
        if inputs.is_bi_encoder:
            sequences = inputs.singles([line.text], candidates)
        else:
            sequences = inputs.pairs(line.text, candidates)
        label = 0  # The positive is first.
        if labels == "passages":
            own = [number(text) for text in candidates]
            others = {number(text) for text in relevant} - {own[0]}
            label = np.array([*own, *sorted(others)], np.int32)
        elif labels == "relevance":
            label = np.zeros(len(candidates), np.float32)
            label[0] = line.grade
        elif labels == "teacher_scores":
            label = _teacher_scores(line, candidates)
        features.append(make_feature(sequences, label))
    notes["train negatives left out because they answer the query"] = num_left_out
    notes[f"train negatives not used, after the first {num_negatives} of a line"] = num_unused
    return features


def _pair_features(
    config: ConfigDict, loss: TrainingLoss, inputs: Inputs, notes: dict[str, int]
) -> list[ModelInput]:
    """Returns a feature for each pair of texts in `data.train`."""
    pairs = _read_pairs(config, "train", config.data.train, notes)
    pairs = limit_examples(pairs, config, "train", notes)
    inputs.queries.add(pair.first for pair in pairs)
    inputs.passages.add(pair.second for pair in pairs)
    features = []
    for pair in pairs:
        loss.check_label(pair.label, pair.location)
        if inputs.is_bi_encoder:
            sequences = inputs.singles([pair.first], [pair.second])
        else:
            sequences = inputs.pairs(pair.first, [pair.second])
        features.append(make_feature(sequences, pair.label))
    return features


def _class_features(config: ConfigDict, inputs: Inputs, notes: dict[str, int]) -> list[ModelInput]:
    """Returns a feature for each text with a class in `data.train`."""
    texts = limit_examples(read_classes(config.data.train), config, "train", notes)
    inputs.passages.add(text for text, _ in texts)
    indices = {name: index for index, name in enumerate(sorted({name for _, name in texts}))}
    if len(indices) < 2:
        raise ValueError(f"config.data.train={config.data.train}: expected at least two classes")
    return [make_feature(inputs.singles([], [text]), indices[name]) for text, name in texts]


def _teacher_scores(line: Query, candidates: Sequence[str]) -> np.ndarray:
    """Returns the teacher's score of each of some candidates of a line. Raises ValueError."""
    if line.scores is None:
        raise ValueError(
            f"{line.location}: it has no scores of a teacher, which this loss needs: add "
            "'positive_score' and 'negative_scores'"
        )
    score_of = dict(zip(line.candidates(), line.scores, strict=True))
    return np.array([score_of[text] for text in candidates], np.float32)


PREDICT_OPTIONS = {
    "text": "text",
    "title": "",
    "id": "",
    "header_lines": 1,
    "shard_size": 0,
    "dtype": "float32",
    "passages": "",
    "top_k": 100,
}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]):
    """Returns the predictor of a bi-encoder, for passages or queries, or of a cross-encoder."""
    predicts = heads.find_head(trained.settings).predicts
    if predicts == "token_vectors":
        raise ValueError(
            "a multi-vector model has a vector for each token, which bert_jax.predict does not "
            "write: use bert_jax.load(DIR).encode_tokens, and rank for MaxSim"
        )
    if predicts not in ("vector", "sparse_vector"):
        if given:
            raise ValueError(f"--{min(given)}: a cross-encoder ranks the passages of each query")
        return RerankPredictor(trained)
    # Those of the run are texts; here, passages are vectors.
    if "passages" not in given:
        return VectorPredictor(trained, options)
    if unused := {"shard_size", "dtype"} & given:
        raise ValueError(f"--{min(unused)}: with --passages, no vectors are written")
    return SearchPredictor(trained, options)
