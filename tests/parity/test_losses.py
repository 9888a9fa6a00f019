"""Losses of `bert_jax.losses` against the classes of sentence-transformers 6.2.

Their modules get the arrays as the output of a model that computes nothing, in float64; ours
compute in float32, with examples of weight 0 in random places. The errors of values and gradients
over all batches are at most 1e-6 of the largest value, or entry of a gradient: a softmax rounds
relative to its logits, whatever the size of its loss.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from bert_jax.losses import in_batch, lists, pairs, triplets, wrappers
from bert_jax.losses.similarity import own_dot_products, own_max_similarities, unit_vectors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
of_lists = pytest.importorskip("sentence_transformers.cross_encoder.losses")
weightings = pytest.importorskip("sentence_transformers.cross_encoder.losses.lambda_loss")
of_tokens = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")
of_vectors = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
of_sparse = pytest.importorskip("sentence_transformers.sparse_encoder.losses")

BATCHES = 200
SLOTS = 8  # Of which a random part is used, in random places.
SIZE, TOKENS, NEGATIVES = 12, 5, 3


class GivenVectors(torch.nn.Module):
    """Returns the vectors that it gets; stands for a model, or for a guide."""

    def __init__(self, key="vectors"):
        super().__init__()
        self.key, self.max_seq_length = key, 8
        vocabulary = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary)

    def __getitem__(self, index):
        return self

    def get_embedding_dimension(self):
        return SIZE

    def forward(self, features, **options):
        vectors = features[self.key]
        if vectors.ndim == 2:
            return {"sentence_embedding": vectors}
        mask = (vectors != 0).any(-1).long()
        return {"token_embeddings": vectors, "attention_mask": mask}


MODEL, GUIDE = GivenVectors(), GivenVectors("guide")


class GivenScores(sentence_transformers.CrossEncoder):
    """Returns the scores that it gets; its texts are the indices of the scores."""

    def __init__(self, num_labels=1):
        torch.nn.Module.__init__(self)
        self.scores, self.count = None, num_labels

    num_labels = property(lambda self: self.count)
    device = torch.device("cpu")

    def preprocess(self, pairs, **options):
        rows, columns = np.array([[int(each) for each in pair] for pair in pairs]).T
        return {"scores": self.scores[rows, columns]}

    def forward(self, inputs, **options):
        scores = inputs["scores"]
        return {"scores": scores if scores.ndim == 2 else scores[:, None]}


class Batch(NamedTuple):
    """Random inputs of all losses; arrays have a leading axis of `SLOTS` examples.

    Attributes:
      vectors: `[slots, 2 + negatives, SIZE]`.
      guide: those of a guide.
      tokens: `[slots, 2 + negatives, TOKENS, SIZE]`, 0 after the last token of each text.
      activations: `vectors` that are mostly 0, the others positive.
      scores: `[slots, 1 + negatives]`, for the losses of lists.
      teacher: the scores of a teacher.
      numbers: of the passages, all different.
      similarity, binary, classes, relevance, listed: labels: from 0 to 1; 0 or 1; a class; the
        relevance of each passage; that with -inf for entries without a passage.
      weights: 1 for used examples, else 0.
    """

    vectors: np.ndarray
    guide: np.ndarray
    tokens: np.ndarray
    activations: np.ndarray
    scores: np.ndarray
    teacher: np.ndarray
    numbers: np.ndarray
    similarity: np.ndarray
    binary: np.ndarray
    classes: np.ndarray
    relevance: np.ndarray
    listed: np.ndarray
    weights: np.ndarray


def make_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    texts = 2 + NEGATIVES
    vectors = rng.normal(size=(SLOTS, texts, SIZE))
    # Passages resemble their queries, so that not all losses are large.
    vectors[:, 1:] += vectors[:, :1] * rng.uniform(0, 2)
    tokens = rng.normal(0, 1, (SLOTS, texts, TOKENS, SIZE))
    lengths = rng.integers(1, TOKENS + 1, (SLOTS, texts))
    tokens *= (np.arange(TOKENS) < lengths[..., None])[..., None]
    relevance = rng.integers(0, 4, (SLOTS, 1 + NEGATIVES)).astype(np.float32)
    is_listed = np.arange(1 + NEGATIVES) < rng.integers(1, 2 + NEGATIVES, (SLOTS, 1))
    weights = np.zeros(SLOTS, np.float32)
    weights[rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]] = 1
    batch = Batch(
        vectors=vectors,
        guide=rng.normal(size=(SLOTS, texts, 6)) + vectors[..., :6],
        tokens=tokens,
        activations=np.log1p(np.maximum(vectors - 1, 0)),
        scores=rng.normal(0, 3, (SLOTS, 1 + NEGATIVES)),
        teacher=rng.normal(0, 3, (SLOTS, 1 + NEGATIVES)),
        numbers=rng.permutation(SLOTS * (1 + NEGATIVES)).reshape(SLOTS, -1).astype(np.int32),
        similarity=rng.integers(0, 6, SLOTS) / 5,
        binary=rng.integers(0, 2, SLOTS),
        classes=rng.integers(0, 3, SLOTS).astype(np.int32),
        relevance=relevance,
        listed=np.where(is_listed, relevance, -np.inf),
        weights=weights,
    )
    return Batch(*(x if x.dtype == np.int32 else x.astype(np.float32) for x in batch))


class Case(NamedTuple):
    """One loss with its settings.

    Attributes:
      source: the field of `Batch` that gradients are computed for.
      loss: (that array, the batch as ours has it) -> the sum over the examples.
      reference: (that tensor, the used examples of the batch as tensors) -> the mean.
      texts: how many texts of each example are used; None: all.
    """

    source: str
    loss: Callable[[jax.Array, Batch], jax.Array]
    reference: Callable[[Any, Batch], Any]
    texts: int | None = None


def as_tensor(array, **options):
    dtype = torch.float64 if array.dtype == np.float32 else torch.int64
    return torch.tensor(array, dtype=dtype, **options)


def columns(vectors, key="vectors"):
    return [{key: vectors[:, index]} for index in range(vectors.shape[1])]


def of_class(make, label=None):
    """Calls a loss of vectors: `make(model)` builds it; `label` is a field of `Batch`."""

    def reference(vectors, batch):
        labels = getattr(batch, label) if label else None
        loss = make(MODEL)(columns(vectors), labels)
        return sum(loss.values()) if isinstance(loss, dict) else loss

    return reference


def guided(make):
    def reference(vectors, batch):
        features = [
            {"vectors": vectors[:, index], "guide": batch.guide[:, index]}
            for index in range(vectors.shape[1])
        ]
        return make(MODEL, GUIDE)(features, None)

    return reference


def of_passage_lists(make, label):
    """Calls a loss of lists, without the entries whose label is -inf."""

    def reference(scores, batch):
        model = GivenScores()
        model.scores = scores
        labels = [each[torch.isfinite(each)] for each in getattr(batch, label)]
        queries = [str(index) for index in range(len(scores))]
        passages = [[str(index) for index in range(len(each))] for each in labels]
        return make(model)([queries, passages], labels)

    return reference


def of_passage_columns(scores, batch):
    model = GivenScores()
    model.scores = scores
    texts = [[str(index)] * len(scores) for index in range(scores.shape[1])]
    queries = [str(index) for index in range(len(scores))]
    return of_lists.MarginMSELoss(model)([queries, *texts], batch.teacher)


def of_single_passages(positive_weight):
    def reference(scores, batch):
        model = GivenScores()
        model.scores = scores.reshape(-1, 1)
        texts = [str(index) for index in range(scores.numel())], ["0"] * scores.numel()
        labels = batch.relevance.reshape(-1) / 3
        loss = of_lists.BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(positive_weight))
        return loss(texts, labels)

    return reference


def of_choices(scores, batch):
    class Choices(GivenScores):
        def preprocess(self, pairs, **options):
            return {"scores": self.scores}

    model = Choices(scores.shape[1])
    model.scores = scores
    texts = [str(index) for index in range(len(scores))]
    return of_lists.CrossEntropyLoss(model)([texts, texts], batch.classes.long())


def in_batch_case(texts, symmetric):
    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    mode = "per_direction" if symmetric else "joint"
    make = functools.partial(
        of_vectors.MultipleNegativesRankingLoss, directions=directions, partition_mode=mode
    )
    return Case(
        "vectors",
        lambda vectors, batch: in_batch.in_batch_loss(
            unit_vectors(vectors),
            batch.numbers[:, : texts - 1],
            batch.weights,
            symmetric=symmetric,
        ),
        of_class(make),
        texts,
    )


def gist_case(texts, **settings):
    ours = dict(settings)
    names = {"contrast_queries": "contrast_anchors", "contrast_positives": "contrast_positives"}
    theirs = {names.get(name, name): value for name, value in settings.items()}
    if theirs.pop("relative_margin", False):
        theirs["margin_strategy"] = "relative"
    return Case(
        "vectors",
        lambda vectors, batch: in_batch.guided_in_batch_loss(
            vectors,
            batch.guide[:, :texts],
            batch.numbers[:, : texts - 1],
            batch.weights,
            temperature=0.05,
            **ours,
        ),
        guided(functools.partial(of_vectors.GISTEmbedLoss, temperature=0.05, **theirs)),
        texts,
    )


def pair_case(loss, make, label="similarity", texts=2):
    return Case(
        "vectors",
        lambda vectors, batch: loss(vectors, getattr(batch, label), batch.weights),
        of_class(make, label),
        texts,
    )


def distances(theirs, name):
    """Returns the setting of a distance in theirs and in ours."""
    return {"distance_metric": theirs}, {"distance": name}


SIAMESE = of_vectors.SiameseDistanceMetric
TRIPLET = of_vectors.TripletDistanceMetric
HARD = of_vectors.BatchHardTripletLossDistanceFunction
# By our names: the settings of each class.
PAIR_DISTANCES = {"cosine": SIAMESE.COSINE_DISTANCE, "euclidean": SIAMESE.EUCLIDEAN}
TRIPLET_DISTANCES = {"cosine": TRIPLET.COSINE, "euclidean": TRIPLET.EUCLIDEAN}
HARD_DISTANCES = {"cosine": HARD.cosine_distance, "euclidean": HARD.euclidean_distance}
SCHEMES = {
    "none": weightings.NoWeightingScheme,
    "ndcg1": weightings.NDCGLoss1Scheme,
    "ndcg2": weightings.NDCGLoss2Scheme,
    "lambda_rank": weightings.LambdaRankScheme,
    "ndcg2++": weightings.NDCGLoss2PPScheme,
}
NESTED = {"matryoshka_dims": [SIZE, 6, 3], "matryoshka_weights": [1, 0.5, 0.3]}

CASES = {
    "in batch": in_batch_case(2, symmetric=False),
    "in batch, hard negatives": in_batch_case(2 + NEGATIVES, symmetric=False),
    "in batch, symmetric": in_batch_case(2, symmetric=True),
    "in batch, symmetric, hard negatives": in_batch_case(2 + NEGATIVES, symmetric=True),
    "GIST": gist_case(2),
    "GIST, hard negative, margin": gist_case(3, margin=0.1),
    "GIST, relative margin": gist_case(3, margin=0.2, relative_margin=True),
    "GIST, passages only": gist_case(3, contrast_queries=False, contrast_positives=False),
    "CoSENT": pair_case(pairs.cosent_loss, of_vectors.CoSENTLoss),
    "AnglE": pair_case(pairs.angle_loss, of_vectors.AnglELoss),
    "cosine similarity": pair_case(pairs.cosine_similarity_loss, of_vectors.CosineSimilarityLoss),
    "MarginMSE": Case(
        "vectors",
        lambda vectors, batch: lists.margin_mse_loss(
            own_dot_products(vectors), batch.teacher, batch.weights
        ),
        of_class(of_vectors.MarginMSELoss, "teacher"),
    ),
    "teacher's scores": Case(
        "vectors",
        lambda vectors, batch: lists.score_divergence_loss(
            own_dot_products(vectors), batch.teacher, batch.weights, 2.0, 0.5
        ),
        of_class(
            lambda model: of_vectors.DistillKLDivLoss(
                model, student_temperature=2.0, teacher_temperature=0.5
            ),
            "teacher",
        ),
    ),
    "Matryoshka": Case(
        "vectors",
        lambda vectors, batch: wrappers.matryoshka(in_batch.in_batch_loss, *NESTED.values())(
            vectors, batch.numbers, batch.weights
        ),
        of_class(
            lambda model: of_vectors.MatryoshkaLoss(
                model, of_vectors.MultipleNegativesRankingLoss(model), **NESTED
            )
        ),
    ),
    "Matryoshka of CoSENT": pair_case(
        wrappers.matryoshka(pairs.cosent_loss, *NESTED.values()),
        lambda model: of_vectors.MatryoshkaLoss(model, of_vectors.CoSENTLoss(model), **NESTED),
    ),
    "SPLADE": Case(
        "activations",
        lambda vectors, batch: wrappers.splade(
            functools.partial(in_batch.in_batch_loss, temperature=1.0), 0.05, 0.03
        )(vectors, batch.numbers, batch.weights),
        of_class(
            lambda model: of_sparse.SpladeLoss(
                model,
                of_sparse.SparseMultipleNegativesRankingLoss(model),
                document_regularizer_weight=0.03,
                query_regularizer_weight=0.05,
            )
        ),
    ),
    "SPLADE of MarginMSE": Case(
        "activations",
        lambda vectors, batch: wrappers.splade(
            lambda vectors, teacher, weights: lists.margin_mse_loss(
                own_dot_products(vectors), teacher, weights
            ),
            0.05,
            0.03,
        )(vectors, batch.teacher, batch.weights),
        of_class(
            lambda model: of_sparse.SpladeLoss(
                model,
                of_sparse.SparseMarginMSELoss(model),
                document_regularizer_weight=0.03,
                query_regularizer_weight=0.05,
            ),
            "teacher",
        ),
    ),
    "ColBERT": Case(
        "tokens",
        lambda vectors, batch: in_batch.late_interaction_loss(
            vectors, batch.numbers, batch.weights
        ),
        of_class(of_tokens.MultiVectorMultipleNegativesRankingLoss),
    ),
    "ColBERT, MarginMSE": Case(
        "tokens",
        lambda vectors, batch: lists.margin_mse_loss(
            own_max_similarities(vectors), batch.teacher, batch.weights
        ),
        of_class(of_tokens.MultiVectorMarginMSELoss, "teacher"),
    ),
    "ColBERT, teacher's scores": Case(
        "tokens",
        lambda vectors, batch: lists.score_divergence_loss(
            own_max_similarities(vectors), batch.teacher, batch.weights
        ),
        of_class(of_tokens.MultiVectorDistillKLDivLoss, "teacher"),
    ),
    "binary cross-entropy": Case(
        "scores",
        lambda scores, batch: lists.binary_cross_entropy_loss(
            scores, batch.relevance / 3, batch.weights, positive_weight=2.5
        ),
        of_single_passages(2.5),
    ),
    "softmax over a list": Case(
        "scores",
        lambda scores, batch: lists.list_softmax_loss(scores, batch.classes, batch.weights),
        of_choices,
    ),
    "ListNet": Case(
        "scores",
        lambda scores, batch: lists.list_net_loss(scores, batch.listed, batch.weights),
        of_passage_lists(of_lists.ListNetLoss, "listed"),
    ),
    "cross-encoder's MarginMSE": Case(
        "scores",
        lambda scores, batch: lists.margin_mse_loss(scores, batch.teacher, batch.weights),
        of_passage_columns,
    ),
}


def lambda_case(weighting, k):
    return Case(
        "scores",
        lambda scores, batch: lists.lambda_loss(
            scores, batch.listed, batch.weights, weighting, k, sigma=0.7
        ),
        of_passage_lists(
            lambda model: of_lists.LambdaLoss(model, SCHEMES[weighting](), k, sigma=0.7), "listed"
        ),
    )


for name in SCHEMES:
    CASES |= {f"LambdaLoss, {name}, k={k}": lambda_case(name, k) for k in (None, 2)}
for name in ("cosine", "euclidean"):
    CASES[f"contrastive, {name}"] = pair_case(
        functools.partial(pairs.contrastive_loss, distance=name),
        functools.partial(of_vectors.ContrastiveLoss, distance_metric=PAIR_DISTANCES[name]),
        "binary",
    )
    CASES[f"online contrastive, {name}"] = pair_case(
        functools.partial(pairs.online_contrastive_loss, distance=name),
        functools.partial(of_vectors.OnlineContrastiveLoss, distance_metric=PAIR_DISTANCES[name]),
        "binary",
    )
    CASES[f"triplet, {name}"] = Case(
        "vectors",
        functools.partial(
            lambda vectors, batch, name: triplets.triplet_loss(
                vectors, batch.weights, margin=1.0, distance=name
            ),
            name=name,
        ),
        of_class(
            functools.partial(
                of_vectors.TripletLoss, distance_metric=TRIPLET_DISTANCES[name], triplet_margin=1.0
            )
        ),
        texts=3,
    )
    CASES[f"batch-hard triplet, {name}"] = pair_case(
        functools.partial(triplets.batch_hard_triplet_loss, margin=1.0, distance=name),
        functools.partial(
            of_vectors.BatchHardTripletLoss, distance_metric=HARD_DISTANCES[name], margin=1.0
        ),
        "classes",
        texts=1,
    )
    CASES[f"batch-hard triplet, soft margin, {name}"] = pair_case(
        functools.partial(triplets.batch_hard_triplet_loss, distance=name, soft_margin=True),
        functools.partial(
            of_vectors.BatchHardSoftMarginTripletLoss, distance_metric=HARD_DISTANCES[name]
        ),
        "classes",
        texts=1,
    )


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_sentence_transformers(name):
    case = CASES[name]

    @jax.jit
    def ours(x, batch):
        def mean(x):
            return case.loss(x, batch) / jnp.sum(batch.weights)

        return jax.value_and_grad(mean)(x)

    errors, sizes = [], []
    for seed in range(BATCHES):
        batch = make_batch(seed)
        x, used = getattr(batch, case.source)[:, : case.texts], batch.weights > 0
        loss, gradient = jax.device_get(ours(x, batch))
        tensor = as_tensor(x[used], requires_grad=True)
        expected = case.reference(tensor, Batch(*(as_tensor(each[used]) for each in batch)))
        expected.backward()
        expected, slope = expected.item(), tensor.grad.numpy()
        assert not np.any(gradient[~used])
        errors.append((abs(loss - expected), np.abs(gradient[used] - slope).max()))
        sizes.append((abs(expected), np.abs(slope).max()))
    worst = np.max(errors, axis=0) / np.max(sizes, axis=0)
    print(f"{name}: {worst[0]:.1e}, {worst[1]:.1e}")
    assert np.all(worst <= 1e-6), worst
