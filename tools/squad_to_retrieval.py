"""Converts questions and paragraphs of a SQuAD file into queries and passages for retrieval.

python tools/squad_to_retrieval.py xquad.en.json runs/data/xquad --heldout_articles=8

Writes `train.jsonl` and `dev.jsonl`, split by article: each question with its paragraph and, as
negatives, the other paragraphs of its article that do not answer the same question; and
`passages.jsonl`, all paragraphs of the file. Texts are compared by their words.
"""

import collections
import json
import pathlib
import sys

from absl import app, flags

from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.tasks.squad import read_questions

DEV_ARTICLES = flags.DEFINE_integer(
    "heldout_articles",
    None,
    "Number of articles at the end of the file to hold out for dev.",
    lower_bound=1,
    required=True,
)


def normalized(text: str) -> str:
    """Returns the text with single spaces, in lower case."""
    return " ".join(text.lower().split())


def article_queries(article: dict) -> list[dict]:
    """Returns the answerable questions of an article, each with its own and other paragraphs."""
    asked = [
        (question, paragraph["context"])
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
        if not question.get("is_impossible", False)
    ]
    positives = collections.defaultdict(set)
    for question, context in asked:
        positives[normalized(question["question"])].add(normalized(context))
    contexts = {normalized(each["context"]): each["context"] for each in article["paragraphs"]}
    return [
        {
            "id": question["id"],
            "query": question["question"],
            "positive": context,
            "negatives": [
                other
                for key, other in contexts.items()
                if key not in positives[normalized(question["question"])]
            ],
        }
        for question, context in asked
    ]


def convert(source: pathlib.Path, directory: pathlib.Path, heldout_articles: int) -> None:
    """Writes the three files; raises ValueError, naming article and question, for a bad file."""
    read_questions(str(source), null_answers=True)
    articles = json.loads(source.read_text(encoding="utf-8-sig"))["data"]
    queries = [article_queries(article) for article in articles]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    if heldout_articles >= len(articles):
        raise ValueError(
            f"--heldout_articles must be less than the {len(articles)} articles of {source}"
        )
    contexts = {normalized(paragraph["context"]): paragraph["context"] for paragraph in paragraphs}
    files = {
        "train": [query for article in queries[:-heldout_articles] for query in article],
        "dev": [query for article in queries[-heldout_articles:] for query in article],
        "passages": [{"text": context} for context in contexts.values()],
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        with open(directory / f"{name}.jsonl", "w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
        print(f"{directory / name}.jsonl: lines: {len(lines):,}")


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise app.UsageError("expected a SQuAD file and a directory")
    try:
        convert(pathlib.Path(argv[1]), pathlib.Path(argv[2]), DEV_ARTICLES.value)
    except (OSError, ValueError) as error:
        sys.exit(f"squad_to_retrieval: {describe_error(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
