"""Splits a SQuAD file by article: `python tools/split_squad.py FILE.json DIR`.

Writes DIR/train.json and DIR/dev.json. The articles for dev are drawn with `--seed`; no context or
topic is in both files. Meant for small datasets without a split, such as XQuAD. With
`--unanswerable`, about half of the questions have no answer, as in SQuAD 2.0.
"""

import json
import pathlib
import random
import sys

from absl import app, flags

from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.tasks.squad import read_questions

DEV_ARTICLES = flags.DEFINE_integer("dev_articles", 8, "Number of articles for dev.", lower_bound=1)
UNANSWERABLE = flags.DEFINE_bool(
    "unanswerable",
    False,
    "Also pair each question with another paragraph of its article that does not hold an answer.",
)
SEED = flags.DEFINE_integer("seed", 0, "Seed for drawing the articles for dev.")


def split(content: dict, dev_articles: int, seed: int) -> tuple[dict, dict]:
    """Returns the train and dev sets, with their articles in the order of the file."""
    articles = content["data"]
    if not 0 < dev_articles < len(articles):
        raise ValueError(
            f"--dev_articles={dev_articles}: expected 1 to {len(articles) - 1} of the articles"
        )
    held_out = set(random.Random(seed).sample(range(len(articles)), dev_articles))
    train = [article for number, article in enumerate(articles) if number not in held_out]
    dev = [articles[number] for number in sorted(held_out)]
    return content | {"data": train}, content | {"data": dev}


def add_unanswerable(content: dict, seed: int) -> int:
    """Also pairs each question with another paragraph of its article that does not hold an answer.

    Returns how many answerable questions have no such paragraph: those are not repeated.
    """
    rng, num_left_out = random.Random(seed), 0
    for article in content["data"]:
        asked = [(paragraph, qa) for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
        for paragraph, qa in asked:
            if not qa.get("answers"):
                continue  # Already unanswerable, as in SQuAD 2.0.
            answers = [answer["text"].lower() for answer in qa["answers"]]
            others = [
                other
                for other in article["paragraphs"]
                if other is not paragraph
                and not any(answer in other["context"].lower() for answer in answers)
            ]
            if others:
                again = {"id": f"{qa['id']}-unanswerable", "answers": [], "is_impossible": True}
                rng.choice(others)["qas"].append(qa | again)
            num_left_out += not others
    return num_left_out


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise app.UsageError("expected FILE.json and DIR")
    directory = pathlib.Path(argv[2])
    try:
        read_questions(argv[1], null_answers=True)  # Validates the file.
        content = json.loads(pathlib.Path(argv[1]).read_text(encoding="utf-8-sig"))
        if UNANSWERABLE.value:
            count = add_unanswerable(content, SEED.value)
            print(f"not repeated, as no paragraph lacks their answer: {count} questions")
        parts = split(content, DEV_ARTICLES.value, SEED.value)
        directory.mkdir(parents=True, exist_ok=True)
        for name, part in zip(("train", "dev"), parts, strict=True):
            path = directory / f"{name}.json"
            path.write_text(json.dumps(part), encoding="utf-8")
            paragraphs = [
                paragraph for article in part["data"] for paragraph in article["paragraphs"]
            ]
            num_questions = sum(len(paragraph["qas"]) for paragraph in paragraphs)
            print(f"{path}: articles: {len(part['data'])}, questions: {num_questions}")
    except (OSError, ValueError) as error:
        sys.exit(f"split_squad: {describe_error(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
