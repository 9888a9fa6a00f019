"""Search, in the two roles that BERT plays there: `:bi_encoder` finds, `:cross_encoder` reranks.

Source: not of the BERT paper. The bi-encoder is that of Karpukhin et al. (2020, "Dense passage
retrieval"), with the other passages of the batch as negatives, but one encoder with mean pooling
and cosine similarities as in Reimers and Gurevych (2019); the cross-encoder that of Nogueira and
Cho (2019), trained to choose the passage among its negatives.

Expected time: not measured; two epochs of the command below took 35 minutes on two cores that were
busy with other work.
Expected result: on XQuAD's last 8 articles (200 questions, to be found among all 180 paragraphs)
MiniLM, which is a sentence encoder already, has MRR@10 0.907 and recall@1 0.850 as it is, and 0.912
and 0.855 after this command with two epochs (one seed; the first epoch was the best).

    python tools/squad_to_retrieval.py xquad.en.json runs/data/xquad --heldout_articles=8
    python -m bert_jax.finetune --config=configs/finetune/retrieval.py:bi_encoder \
        --workdir=runs/bi_encoder --config.init_from=runs/data/minilm \
        --config.data.train=runs/data/xquad/train.jsonl \
        --config.data.dev=runs/data/xquad/dev.jsonl \
        --config.data.passages=runs/data/xquad/passages.jsonl --config.num_epochs=2

A line is `{"query": "...", "positive": "...", "negatives": ["...", ...]}`, the hardest negatives
first, with an `id` if you like. Without `positive` in `dev` or `test` the passages are ranked and
nothing is scored. What is written to `predictions` has the same form, so that what the bi-encoder
finds is what the cross-encoder learns from, or reranks. Afterwards `bert_jax.load(DIR).encode(...)`
gives the bi-encoder's vectors, of queries with `max_length=64` (data.max_query_length), and
`.rank(query, passages)` the cross-encoder's order.
"""

from ml_collections import ConfigDict

from configs.finetune import text_classification


def get_config(arg: str = "") -> ConfigDict:
    role, _, rest = arg.partition(",")
    if role not in ("bi_encoder", "cross_encoder"):
        role, rest = "bi_encoder", arg
    config = text_classification.get_config()
    config.task = "retrieval"

    config.data = ConfigDict()
    config.data.role = role
    config.data.train = ""
    config.data.dev = ""  # Its MRR@10 decides which checkpoint is kept.
    config.data.test = ""
    # More passages to find in, {"text": "..."} a line, besides those in dev and test themselves.
    # The cross-encoder ranks those of each query alone.
    config.data.passages = ""
    config.data.max_query_length = 64  # Tokens; a longer query is cut.
    config.data.num_negatives = 0 if role == "bi_encoder" else 3  # The first so many of each query.

    config.similarity = ConfigDict()  # Of the bi-encoder.
    config.similarity.pooling = "mean"  # Or "cls"; what `encode` gives if not told otherwise.
    config.similarity.normalize = True  # Cosine; False: dot product, which wants temperature 1.
    config.similarity.temperature = 0.05

    config.max_seq_length = 256  # Tokens of a passage, or of a query and a passage.
    config = text_classification.cut_down(config, rest)
    config.data.max_query_length = min(config.data.max_query_length, config.max_seq_length // 2)
    return config
