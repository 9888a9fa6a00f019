r"""Search in stages: mined negatives, a bi-encoder, a cross-encoder, and its student.

    python experiments/search.py --xquad=xquad.en.json --workdir=runs/search

From the paragraphs and questions of XQuAD and the weights of MiniLM: embed, mine hard negatives,
train a bi-encoder, mine again with it, train a cross-encoder on what it finds, and distill the
cross-encoder into a bi-encoder. The first are also searched with the vectors of the sentences of
each paragraph. Every stage is scored on the questions of the last 8 of 36 articles, which none is
trained on or chosen by, over all paragraphs. It is no table of a paper. At this scale only. A
stopped study resumes with the same command.

Settings are to be chosen with --choose, which leaves the test articles out: it scores the last 8 of
the articles to train on, after training on the others.
"""

import csv
import datetime
import json
import pathlib
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import app, flags
from study_report import machine

import bert_jax
from bert_corpus.files import Document
from bert_corpus.sentences import split_sentences
from bert_jax.checkpoints.save import save_model
from bert_jax.runtime.command_line import parse_flags
from bert_jax.tasks.retrieval import dense_layer
from bert_jax.tasks.retrieval_scores import bootstrap_intervals, find_ranks, query_scores
from bert_jax.tasks.tables import write_json_lines
from bert_jax.tools.commands import run_command
from bert_jax.tools.fetch_data import fetch

REPORT = pathlib.Path(__file__).parent / "reports/search.md"
REPORT_TEXT = """\
# Search in stages

    python experiments/search.py --xquad=xquad.en.json --workdir=runs/search

MiniLM (6 layers, hidden size 384) with a dense layer that begins as a rotation to the principal
components of its vectors, trained on the questions of 28 articles of XQuAD, and scored on
{count} questions of 8 others over all 180 paragraphs. Scores of the first seed, with 95 % intervals
by the bootstrap over questions, which say nothing of the seed; number of seeds: {num_seeds}, with
several their mean, minimum and maximum in the last column. Nothing is chosen by these questions:
the last step of each run is scored. With sentences, the score of a paragraph is the mean of its
cosine and that of the sentence in it that is closest to the question.

{table}

The bi-encoders are trained for vectors of {sizes} dimensions at once. Of the nDCG@10 of all {full}
(mean over the seeds), the first {quarter} have {first:.1%}, and the {quarter} principal components
of the vectors of all paragraphs {components:.1%}.

CPU minutes of the first seed, the stages in alphabetical order: {costs}; together {total:.0f}.
On {machine}, shared with other programs, {date}.
"""
HELDOUT_ARTICLES = 8
SIZES = (384, 192, 96)  # Of Matryoshka vectors.
QUARTER = SIZES[-1]
START = "MiniLM"
ROTATED = f"MiniLM, {QUARTER} principal components"
IN_BATCH, MINED = "bi-encoder, negatives of the batch", "bi-encoder, mined negatives"
TRUNCATED = f"mined negatives, the first {QUARTER} dimensions"
COMPRESSED = f"mined negatives, {QUARTER} principal components of the paragraphs"
# With sentences, the share of the best one in the score of a paragraph. Of 0.25, 0.5, 0.75 and 1 it
# is the best for MiniLM on the questions of the training articles, which it is not trained on.
SENTENCE_WEIGHT = 0.5
METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_1", "recall_at_10")
TEMPERATURE = 0.05
SEARCHED_LENGTH = 512  # Tokens of a passage that is searched; fewer are trained on, for time.
LENGTHS = {"max_seq_length": 256, "data.max_query_length": 48}
BI_ENCODER = {
    "loss.matryoshka_sizes": SIZES,
    "similarity.temperature": TEMPERATURE,
    "similarity.vector_size": SIZES[0],
    "freeze_layers": 4,  # Of 6.
    "batch_size": 16,
    "learning_rate": 1e-4,
    "model.dropout_rate": 0.0,
    "log_every": 1,
}
# As many steps each: a third of the questions has hard negatives.
ALL_QUESTIONS, HARD_QUESTIONS = {"num_epochs": 1.0}, {"num_epochs": 3.0}
CROSS_ENCODER = LENGTHS | {
    "batch_size": 8,
    "learning_rate": 1e-4,
    "num_epochs": 2.0,
    "model.dropout_rate": 0.0,
    "log_every": 1,
}
STUDENT = {
    "loss.name": "margin_mse",
    "similarity.vector_size": SIZES[0],
    "freeze_layers": 4,
    "batch_size": 16,
    "learning_rate": 2e-5,
    "num_epochs": 1.0,
    "model.dropout_rate": 0.0,
    "log_every": 1,
}
NUM_NEGATIVES = 1
# The filter drops what scores over 110 % of the positive. It is a loose one: a question of XQuAD is
# about one paragraph, and others rarely answer it.
MINING = ("--relative_margin=-0.1",)
# For a bi-encoder, questions without a negative above this score, which MiniLM answers already, are
# left out: the others take a part of the time. A cross-encoder has to learn from all.
MIN_SCORE = "--min_score=0.45"


def prepare(workdir: pathlib.Path, source: pathlib.Path, chooses: bool) -> pathlib.Path:
    """Writes queries and passages of the file `source`; returns their directory.

    To choose settings, the test articles are left out, and the last others take their place.
    """
    data = workdir / "data"
    if not (data / "passages.jsonl").exists():
        data.mkdir(parents=True, exist_ok=True)
        if chooses:
            content = json.loads(source.read_text(encoding="utf-8"))
            content["data"] = content["data"][:-HELDOUT_ARTICLES]
            source = data / "train_articles.json"
            source.write_text(json.dumps(content), encoding="utf-8")
        arguments = [str(source), str(data), f"--heldout_articles={HELDOUT_ARTICLES}"]
        run_command([sys.executable, "tools/squad_to_retrieval.py", *arguments])
    return data


class Runs(NamedTuple):
    """The programs of one seed, and what they write.

    Attributes:
      directory: of all that they write.
      data: `train.jsonl`, `dev.jsonl`, which is the test, and `passages.jsonl`.
      seed: of the training.
    """

    directory: pathlib.Path
    data: pathlib.Path
    seed: int

    def run(self, name: str, output: pathlib.Path, *command: str) -> None:
        """Runs a program unless its output exists; notes its CPU time."""
        if output.exists():
            return
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_command([sys.executable, *command])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (self.directory / f"{name}.cpu_seconds").write_text(f"{seconds:.0f}\n", encoding="utf-8")

    def finetune(self, name: str, role: str, settings: Mapping, test: pathlib.Path) -> pathlib.Path:
        """Trains and ranks the test; returns the workdir."""
        run = self.directory / name
        settings = settings | {"data.test": test, "seed": self.seed, "save_training_state": False}
        flags = [f"--config.{field}={value}" for field, value in settings.items()]
        module = ["-m", "bert_jax.finetune", f"--config=configs/finetune/retrieval.py:{role}"]
        self.run(name, run / "result.json", *module, f"--workdir={run}", *flags)
        return run

    def bi_encoder(self, name: str, settings: Mapping) -> pathlib.Path:
        settings = LENGTHS | settings | {"data.passages": self.data / "passages.jsonl"}
        return self.finetune(name, "bi_encoder", settings, self.data / "dev.jsonl")

    def mine(self, name: str, model: pathlib.Path, *options: str) -> pathlib.Path:
        """Returns a file of the training questions with negatives that `model` finds."""
        output = self.directory / f"{name}.jsonl"
        queries, passages = self.data / "train.jsonl", self.data / "passages.jsonl"
        flags = [f"--model={model}", f"--queries={queries}", f"--passages={passages}"]
        flags += [f"--output={output}", f"--num_negatives={NUM_NEGATIVES}", *MINING, *options]
        self.run(output.name, output, "tools/mine_negatives.py", *flags)
        return output

    def teach(self, name: str, cross_encoder: pathlib.Path, queries: pathlib.Path) -> pathlib.Path:
        """Returns a file of `queries` with the scores of a cross-encoder, on the scale of cosines.

        Both were trained with a softmax, the bi-encoder on cosines / `TEMPERATURE`.
        """
        scored, output = self.directory / f"{name}_logits.jsonl", self.directory / f"{name}.jsonl"
        flags = [f"--model={cross_encoder}", f"--input={queries}", f"--output={scored}"]
        self.run(name, scored, "-m", "bert_jax.predict", *flags)
        lines = read_lines(scored)
        for line in lines:
            line["positive_score"] *= TEMPERATURE
            line["scores"] = [score * TEMPERATURE for score in line["scores"]]
        write_json_lines(output, lines)
        return output


def read_scores(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the scores of each test question, by name."""
    with open(run / "predictions/test_queries.tsv", encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    return {name: np.array([float(row[name]) for row in rows]) for name in METRICS}


class TextVectors(NamedTuple):
    """Vectors of the test.

    Attributes:
      vectors: float32 `[texts, size]` of the distinct "queries", of all "passages", also those of
        the training articles, and optionally of all their "sentences".
      owners: int `[sentences]`: the index of the passage of each sentence, in ascending order.
      positives: the indices of the passages that answer each query.
    """

    vectors: dict[str, np.ndarray]
    owners: np.ndarray
    positives: list[list[int]]

    def project(self, matrix: np.ndarray) -> "TextVectors":
        """Returns all vectors multiplied by `[size, new size]`."""
        return self._replace(vectors={name: each @ matrix for name, each in self.vectors.items()})


def embed_test(
    model_directory: pathlib.Path, data: pathlib.Path, output: pathlib.Path, with_sentences: bool
) -> TextVectors:
    """Embeds the test questions, all passages and maybe sentences, unless `output` exists."""
    passages = list(dict.fromkeys(line["text"] for line in read_lines(data / "passages.jsonl")))
    positives: dict[str, set[int]] = {}
    for line in read_lines(data / "dev.jsonl"):
        positives.setdefault(line["query"], set()).add(passages.index(line["positive"]))
    sentences = [split_sentences(Document(text)) for text in passages]
    texts = {"queries": list(positives), "passages": passages}
    if with_sentences:
        texts["sentences"] = [sentence for each in sentences for sentence in each]
    if not output.exists():
        model = bert_jax.load(model_directory)
        vectors = {
            name: model.encode(each, max_length=SEARCHED_LENGTH) for name, each in texts.items()
        }
        partial = output.with_suffix(".partial.npz")
        np.savez(partial, **vectors)
        partial.rename(output)
    with np.load(output) as vectors:
        arrays = {name: vectors[name] for name in texts}
    owners = np.repeat(np.arange(len(passages)), [len(each) for each in sentences])
    return TextVectors(arrays, owners, [sorted(each) for each in positives.values()])


def cosines_of_queries(vectors: TextVectors, name: str) -> np.ndarray:
    """Returns the cosines of the queries and other texts, float32 `[queries, texts]`."""
    queries, texts = (
        each / np.linalg.norm(each, axis=1, keepdims=True)
        for each in (vectors.vectors["queries"], vectors.vectors[name])
    )
    return queries @ texts.T


def add_sentences(vectors: TextVectors) -> np.ndarray:
    """Returns the cosines of passages, `SENTENCE_WEIGHT` of each that of its best sentence."""
    whole = cosines_of_queries(vectors, "passages")
    starts = np.searchsorted(vectors.owners, np.arange(whole.shape[1]))  # Each has a sentence.
    best = np.maximum.reduceat(cosines_of_queries(vectors, "sentences"), starts, axis=1)
    return (1 - SENTENCE_WEIGHT) * whole + SENTENCE_WEIGHT * best


def score_ranking(
    similarities: np.ndarray, positives: Sequence[Sequence[int]]
) -> dict[str, np.ndarray]:
    """Returns the scores of each question, by name."""
    rows = zip(similarities, positives, strict=True)
    scores = query_scores([find_ranks(row, own) for row, own in rows])
    return {name: scores[name] for name in METRICS}


def principal_components(vectors: np.ndarray) -> np.ndarray:
    """Returns the right singular vectors of `[texts, size]` as columns, the largest first.

    The vectors are not centered, so that a rotation to all components keeps all cosines.
    """
    return np.linalg.svd(vectors.T @ vectors)[2].T  # Also complete if there are few texts.


def write_rotated(
    model_directory: pathlib.Path, components: np.ndarray, output: pathlib.Path
) -> None:
    """Writes a model whose dense layer rotates the vectors of another to `components`."""
    model = bert_jax.load(model_directory)
    head = {"task": "embedding", "labels": [], "pooling": "mean", "normalize": True}
    head["projections"] = [dense_layer(len(components))]
    kernel = components
    if "projection_0" in model.params:
        kernel = np.asarray(model.params["projection_0"]["kernel"]) @ components
    partial = output.with_suffix(".partial")
    save_model(
        partial,
        config=model.config,
        tokenizer=model.tokenizer,
        params={**model.params, "projection_0": {"kernel": kernel}},
        settings=model.settings | {"head": head},
        overwrite=True,
    )
    partial.rename(output)


def training_components(model_directory: pathlib.Path, data: pathlib.Path) -> np.ndarray:
    """Returns the components of the training questions and of the paragraphs that answer them."""
    lines = read_lines(data / "train.jsonl")
    texts = list(dict.fromkeys(line[name] for line in lines for name in ("query", "positive")))
    model = bert_jax.load(model_directory)
    return principal_components(model.encode(texts, max_length=SEARCHED_LENGTH))


def read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_seed(directory: pathlib.Path, data: pathlib.Path, seed: int) -> dict[str, dict]:
    """Runs the stages of a seed that are missing; returns the scores of each, by its title."""
    runs = Runs(directory, data, seed)
    minilm = directory.parent / "minilm"
    fetch("minilm", minilm)
    rotated = directory.parent / "rotated"
    if not rotated.exists():
        write_rotated(minilm, training_components(minilm, data), rotated)
    scores: dict[str, dict] = {}

    def score(title: str, vectors: TextVectors) -> None:
        similarities = cosines_of_queries(vectors, "passages")
        scores[title] = score_ranking(similarities, vectors.positives)

    def embed_and_score(title: str, model: pathlib.Path, sentences: bool = False) -> TextVectors:
        output = directory / f"{model.name}_vectors.npz"
        vectors = embed_test(model, data, output, sentences)
        score(title, vectors)
        if sentences:
            similarities = add_sentences(vectors)
            scores[f"{title}, with sentences"] = score_ranking(similarities, vectors.positives)
        return vectors

    first = np.eye(SIZES[0], QUARTER, dtype=np.float32)
    if not seed:
        embed_and_score(START, minilm, sentences=True)
        output = directory / "rotated_vectors.npz"
        score(ROTATED, embed_test(rotated, data, output, with_sentences=False).project(first))
    start = {"init_from": rotated}
    in_batch = start | BI_ENCODER | ALL_QUESTIONS
    in_batch |= {"data.train": data / "train.jsonl", "data.num_negatives": 0}
    embed_and_score(IN_BATCH, runs.bi_encoder("in_batch", in_batch), sentences=True)

    mined = runs.mine("mined", minilm, MIN_SCORE)
    negatives = {"data.num_negatives": NUM_NEGATIVES}
    settings = start | BI_ENCODER | HARD_QUESTIONS | negatives | {"data.train": mined}
    bi_encoder = runs.bi_encoder("mined", settings)
    vectors = embed_and_score(MINED, bi_encoder, sentences=True)
    score(TRUNCATED, vectors.project(first))
    components = principal_components(vectors.vectors["passages"])
    score(COMPRESSED, vectors.project(components[:, :QUARTER]))
    if not (compressed := directory / "compressed").exists():
        write_rotated(bi_encoder, components, compressed)
    if seed:
        return scores

    mined_again = runs.mine("mined_again", bi_encoder)
    settings = {"init_from": minilm, "data.train": mined_again} | CROSS_ENCODER | negatives
    found = bi_encoder / "predictions/test.jsonl"
    cross_encoder = runs.finetune("cross_encoder", "cross_encoder", settings, found)
    scores["the 10 best, reranked by a cross-encoder"] = read_scores(cross_encoder)

    taught = runs.teach("taught", cross_encoder, mined_again)
    settings = {"init_from": bi_encoder, "data.train": taught} | STUDENT | negatives
    student = runs.bi_encoder("student", settings)
    embed_and_score("bi-encoder, distilled from the cross-encoder", student)
    return scores


def describe(title: str, seeds: Sequence[Mapping[str, np.ndarray]]) -> str:
    """Returns the line of a stage: the first seed with intervals, and MRR over all seeds."""
    intervals = bootstrap_intervals(seeds[0])
    cells = [
        f"{values.mean():.3f} ({intervals[name][0]:.3f} to {intervals[name][1]:.3f})"
        for name, values in seeds[0].items()
    ]
    means = [float(each["mrr_at_10"].mean()) for each in seeds]
    cells.append(
        f"{np.mean(means):.3f} ({min(means):.3f} to {max(means):.3f})" if len(means) > 1 else ""
    )
    return f"| {title} | {' | '.join(cells)} |"


def run_study(
    xquad: pathlib.Path, workdir: pathlib.Path, num_seeds: int, chooses: bool = False
) -> None:
    """Runs or resumes all stages, and writes the report unless it `chooses` settings."""
    workdir /= "choose" if chooses else "test"
    data = prepare(workdir, xquad, chooses)
    seeds = []
    for seed in range(num_seeds):
        directory = workdir / f"seed_{seed}"
        directory.mkdir(exist_ok=True)
        seeds.append(run_seed(directory, data, seed))
    lines = [
        "| stage | nDCG@10 | MRR@10 | recall@1 | recall@10 | MRR@10, all seeds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for title in seeds[0]:
        lines.append(describe(title, [scores[title] for scores in seeds if title in scores]))
    costs = {
        path.stem: float(path.read_text(encoding="utf-8")) / 60
        for path in sorted((workdir / "seed_0").glob("*.cpu_seconds"))
    }
    full, first, components = (
        np.mean([scores[title]["ndcg_at_10"].mean() for scores in seeds])
        for title in (MINED, TRUNCATED, COMPRESSED)
    )
    text = REPORT_TEXT.format(
        first=first / full,
        components=components / full,
        sizes=", ".join(map(str, SIZES)),
        quarter=QUARTER,
        full=SIZES[0],
        table="\n".join(lines),
        costs=", ".join(f"{name} {minutes:.1f}" for name, minutes in costs.items()),
        total=sum(costs.values()),
        num_seeds=num_seeds,
        machine=machine(),
        date=datetime.date.today(),
        count=len(seeds[0][START]["mrr_at_10"]),
    )
    print(text)
    if not chooses:
        REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    # Here, because tests import the stages beside those of other studies, with flags of their own.
    XQUAD = flags.DEFINE_string("xquad", None, "English file of XQuAD.", required=True)
    WORKDIR = flags.DEFINE_string("workdir", None, "Directory of data and runs.", required=True)
    NUM_SEEDS = flags.DEFINE_integer(
        "num_seeds", 3, "Of the bi-encoders; later stages use the first alone.", lower_bound=1
    )
    CHOOSE = flags.DEFINE_bool("choose", False, "Leave the test articles out, to choose settings.")

    def main(argv: list[str]) -> None:
        del argv
        paths = pathlib.Path(XQUAD.value), pathlib.Path(WORKDIR.value)
        run_study(*paths, NUM_SEEDS.value, CHOOSE.value)

    app.run(main, flags_parser=parse_flags)
