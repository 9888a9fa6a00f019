"""Retrieval: `:bi_encoder` finds passages by their vectors, `:cross_encoder` reranks them.

Source: not from the BERT paper. The bi-encoder follows Karpukhin et al. (2020, "Dense passage
retrieval"), with the other passages of the batch as negatives, but has a single encoder with mean
pooling and cosine similarity as in Reimers and Gurevych (2019). The cross-encoder follows Nogueira
and Cho (2019) and is trained to choose the passage among its negatives.

Expected time: 35 min for the command below on two cores shared with other programs.
Expected result: MRR@10 0.912 and recall@1 0.855 on 200 English questions of XQuAD, the last 8 of 36
articles, over all 180 paragraphs (one seed, best epoch 1; each question has one paragraph, so
recall equals accuracy). MiniLM, a sentence encoder, starts from 0.907 and 0.850.

    python tools/squad_to_retrieval.py xquad.en.json runs/data/xquad --heldout_articles=8
    python -m bert_jax.finetune --config=configs/finetune/retrieval.py:bi_encoder \
        --workdir=runs/bi_encoder --config.init_from=runs/data/minilm \
        --config.data.train=runs/data/xquad/train.jsonl \
        --config.data.dev=runs/data/xquad/dev.jsonl \
        --config.data.passages=runs/data/xquad/passages.jsonl --config.num_epochs=2 \
        --config.data.num_negatives=0

`:bi_encoder,e5` is the second stage of E5 (Wang et al., 2022, "Text embeddings by weakly-supervised
contrastive pre-training", section 4 and appendix B), after contrastive.py: seven mined negatives,
cosine divided by 0.01, mean pooling, "query: " and "passage: ". The learning rate is that of base;
small has 3e-5, large 1e-5. The 400 steps of warm-up are about 0.04 of three epochs of MS MARCO,
Natural Questions and NLI. The paper also distills a cross-encoder, and weights this loss by 0.2;
here it is the only one. Not run here at full size.

With `:bi_encoder,splade`, vectors are sparse: SPLADE, from the masked LM of init_from. Sources: the
learning rate, its 6,000 of 150,000 steps of warm-up, weight decay, batch size and length of
Formal et al. (2021, "SPLADE v2", section 4.1) and of naver/splade, conf/train/config/splade.yaml;
the weights of FLOPS of its config_splade++_max.yaml (Formal et al., 2022, "From distillation to
hard negative sampling"), whose loss is that of the batch, with data.num_negatives=1. For
`loss.name=margin_mse` with a teacher's scores, config_splade++_cocondenser_ensembledistil.yaml has
0.5 and 0.4. Not run here at full size.

`:bi_encoder,colbert` trains a model with a vector of size 128 for each token, compared by late
interaction: ColBERT (Khattab and Zaharia, 2020, sections 3.2 to 3.4), with queries of 32 tokens
that are filled with masks, no vectors of punctuation in passages, and the learning rate 1e-5 and
batch size 32 of ColBERTv2 (Santhanam et al., 2022, section 3 and appendix B). It differs from both
in its loss, a softmax over the passages of the batch, and in writing "[Q] " and "[D] " as text.
ColBERTv2 distills: set loss.name=score_divergence, with a cross-encoder's scores in the file.

Each line is `{"query": "...", "positive": "...", "negatives": ["...", ...]}`, the hardest negatives
first, and optionally an `id`. Lines with equal queries are one query with several positives.
Without `positive` in `dev` or `test` the passages are ranked but not scored. `predictions` has the
same format, so that the cross-encoder can train on or rerank the results of the bi-encoder; see
docs/search.md for other forms, and docs/finetuning.md#retrieval. Afterwards
`bert_jax.load(DIR).encode(...)` returns the bi-encoder's vectors, for queries with
`prompt_name="query"`, and `.rank(query, passages)` returns the cross-encoder's ranking.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import fields
from bert_jax.runtime.config_fields import AT_LEAST_0, AT_LEAST_1, POSITIVE, Bounds, Field

DATA_PATHS = {
    "data.queries": Field(
        "",
        "Queries with ids: train, dev and test are then qrels, and data.passages is their corpus, "
        "as in BEIR.",
    ),
    "data.run": Field(
        "",
        "With data.queries, a run of TREC: the cross-encoder ranks its passages, and those that "
        "are not judged are negatives in training.",
    ),
    "data.train": Field("", "Queries to train on."),
    "data.dev": Field("", "Its MRR@10, or data.metric, selects the best checkpoint."),
    "data.test": Field("", "Only ranked by the best checkpoint, and scored if it has positives."),
    "data.hub": fields.HUB,
    "data.passages": Field(
        "",
        'Passages to search in addition to those in dev and test, {"text": "..."} per line; at '
        "most max_eval_examples of them. The cross-encoder ranks only the passages of each query.",
    ),
}
DATA = {
    "data.role": Field(
        "bi_encoder", "bi_encoder or cross_encoder; set by the argument after the colon."
    ),
    "data.max_query_length": Field(
        64,
        "Tokens, at most max_seq_length, of the cross-encoder half of it; longer queries are "
        "truncated.",
    ),
    "data.cutoffs": Field((1, 10, 100), "Numbers of passages at which rankings are scored."),
    "data.evaluation": Field(
        "ranking",
        "What dev and test have: ranking: queries and passages; similarity: pairs of texts with a "
        "label, a number.",
    ),
    "data.metric": Field(
        "",
        "Score of dev that selects the best checkpoint. Default: mrr_at_10, of pairs spearman.",
    ),
    "data.query_prompt": Field("", 'Bi-encoder: precedes every query, such as "query: ".'),
    "data.passage_prompt": Field("", 'Bi-encoder: precedes every passage, such as "passage: ".'),
    "data.num_negatives": Field(
        None,
        "Trains with the first N negatives of a line; the cross-encoder, and losses of a "
        "bi-encoder that compare the passages of a query, need one or more. For the bi-encoder it "
        "must be set if the file has negatives.",
        kind=int,
    ),
    # Bi-encoder only.
    "similarity.vectors": Field(
        "dense",
        "dense: one vector per text; sparse: a weight of each token of the vocabulary (SPLADE), "
        "from the masked-LM head of init_from, compared by dot products; multi_vector: one vector "
        "per token, compared by late interaction (ColBERT).",
    ),
    "similarity.pooling": Field("mean", 'Dense: or "cls"; also the default of `encode`.'),
    "similarity.normalize": Field(
        True, "Dense: cosine; False: dot product, which needs similarity.temperature=1."
    ),
    "similarity.temperature": Field(
        None,
        "Divides the similarities in the training loss. Default: 0.05; guided_in_batch 0.01, "
        "score_divergence, multi_vector and in_batch of sparse vectors 1.",
        POSITIVE,
        kind=float,
    ),
    "similarity.vector_size": Field(
        None,
        "A dense layer without bias makes vectors of this size: of texts if dense, which have none "
        "by default; of tokens if multi_vector, 128 by default. It is that of init_from, or new.",
        AT_LEAST_1,
        kind=int,
    ),
    "similarity.query_expansion": Field(
        None,
        "multi_vector: fills queries with masks up to data.max_query_length: hidden, the default: "
        "no token attends to these; attended; or none: does not fill.",
        kind=str,
    ),
    "similarity.skip_punctuation": Field(
        None,
        "multi_vector: punctuation in passages has no vectors; default True.",
        kind=bool,
    ),
    "loss.name": Field(
        "",
        "Of a bi-encoder in_batch, guided_in_batch, triplet, margin_mse, score_divergence, cosent, "
        "angle, cosine_similarity, contrastive, online_contrastive or batch_hard_triplet; of a "
        "cross-encoder list_softmax, binary_cross_entropy, list_net, lambda, margin_mse or "
        "score_divergence; of sparse vectors in_batch, triplet, margin_mse, score_divergence, "
        "cosent, angle or cosine_similarity; of multi_vector in_batch, margin_mse or "
        "score_divergence. Default: the first.",
    ),
    # Settings of some losses; one that the chosen loss does not use is refused.
    "loss.symmetric": Field(
        None, "in_batch: also chooses among the queries for each positive.", kind=bool
    ),
    "loss.margin": Field(
        None,
        "triplet, batch_hard_triplet (default 5): how much farther the negative should be; "
        "contrastive, online_contrastive (0.5): the distance beyond which negatives have no loss; "
        "guided_in_batch (0): how much below the positive the guide must find a negative.",
        kind=float,
    ),
    "loss.relative_margin": Field(
        None, "guided_in_batch: the margin is a fraction of the positive's cosine.", kind=bool
    ),
    "loss.distance": Field(
        None,
        "euclidean, the default of triplet and batch_hard_triplet, or cosine, that of contrastive "
        "and online_contrastive.",
        kind=str,
    ),
    "loss.soft_margin": Field(
        None, "batch_hard_triplet: softplus in place of the margin.", kind=bool
    ),
    "loss.positive_weight": Field(
        None, "binary_cross_entropy: weight of the label 1; default 1.", POSITIVE, kind=float
    ),
    "loss.teacher_temperature": Field(
        None, "score_divergence: divides the teacher's scores; default 1.", POSITIVE, kind=float
    ),
    "loss.weighting": Field(
        None,
        "lambda: weights of pairs: none, ndcg1, ndcg2, lambda_rank or ndcg2++ (default).",
        kind=str,
    ),
    "loss.k": Field(
        None, "lambda: counts only pairs with a passage among the best K.", AT_LEAST_1, kind=int
    ),
    "loss.query_flops_weight": Field(
        None,
        "Sparse vectors: weight of the sum of squared mean activations of queries (FLOPS); the "
        "larger, the fewer weights are not 0.",
        AT_LEAST_0,
        kind=float,
    ),
    "loss.passage_flops_weight": Field(None, "The same, of passages.", AT_LEAST_0, kind=float),
    "loss.flops_warmup_fraction": Field(
        None,
        "Fraction of the steps in which both weights rise from 0, quadratically. Default: 1/3.",
        Bounds(0, 1),
        kind=float,
    ),
    "loss.matryoshka_sizes": Field(
        (),
        "Sums any loss of a bi-encoder over vectors truncated to these sizes, and normalized; the "
        "full size should be one of them. Default: only the full vectors.",
    ),
    "loss.matryoshka_weights": Field((), "Weight of the loss of each size. Default: 1 each."),
}
RECIPES = {
    "e5": {
        "data": {"query_prompt": "query: ", "passage_prompt": "passage: ", "num_negatives": 7},
        "similarity": {"temperature": 0.01},
        "learning_rate": 2e-5,
        "warmup_fraction": 0.04,
        "decay_from": "warmup_end",
        "weight_decay": 0.01,
        "batch_size": 256,
        "num_epochs": 3.0,
        "max_seq_length": 192,
    },
    "splade": {
        "similarity": {"vectors": "sparse"},
        "loss": {"query_flops_weight": 3e-4, "passage_flops_weight": 1e-4},
        "learning_rate": 2e-5,
        "warmup_fraction": 0.04,
        "decay_from": "warmup_end",
        "weight_decay": 0.01,
        "batch_size": 128,
    },
    "colbert": {
        "similarity": {"vectors": "multi_vector"},
        "data": {"max_query_length": 32, "query_prompt": "[Q] ", "passage_prompt": "[D] "},
        "learning_rate": 1e-5,
    },
}
"""Fields of published recipes, by the argument after `bi_encoder,`; the docstring has sources."""


def get_config(arg: str = "") -> ConfigDict:
    role, _, rest = arg.partition(",")
    if role in ("", "runlocal"):
        role, rest = "bi_encoder", arg
    recipe, _, others = rest.partition(",")
    if recipe in RECIPES and role == "bi_encoder":
        rest = others
    else:
        recipe = ""
    if role not in ("bi_encoder", "cross_encoder") or rest not in ("", "runlocal"):
        raise ValueError(
            f"unknown argument {arg!r} after the colon: expected 'bi_encoder' or 'cross_encoder', "
            f"or one of them with ',runlocal', or 'bi_encoder,' with {' or '.join(RECIPES)}"
        )
    config = fields.make_task_config("retrieval", DATA_PATHS | DATA)
    config.data.role = role
    if role == "cross_encoder":
        config.data.num_negatives = 3

    config.max_seq_length = 256  # Tokens of a passage, or of a query and a passage.
    config.update(RECIPES.get(recipe, {}))
    config = fields.apply_runlocal(config, rest)
    config.data.max_query_length = min(config.data.max_query_length, config.max_seq_length // 2)
    return config
