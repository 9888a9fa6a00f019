"""Generates squad_scores.npz with SQuAD's official scripts, evaluate-v1.1.py and evaluate-v2.0.py.

python tests/golden/make_squad_scores.py DIRECTORY_OF_THE_SCRIPTS

The file holds only the scores, in percent and NaN where a script returns none, a row per case; the
cases are regenerated from seeds. tests/parity/test_squad.py takes cases and scripts from here too.
"""

import importlib.util
import pathlib
import random
import sys
from collections.abc import Iterator

import numpy as np

PATH = pathlib.Path(__file__).with_name("squad_scores.npz")
NUM_CASES = 1000
V1 = ("exact", "f1")
V2 = (
    *(f"{kind}{name}" for kind in ("", "HasAns_", "NoAns_") for name in ("exact", "f1")),
    *(f"best_{name}{end}" for name in ("exact", "f1") for end in ("", "_thresh")),
)
WORDS = [
    "a",
    "an",
    "the",
    "The",
    "cat",
    "Cat's",
    "dog",
    "50%",
    "½",
    "—",
    "...",
    "İ",
    "a.m.",
    "\u00a0",
]
WORDS += ["", "北京", "naïve", "nai\u0308ve", "\u200bx", "theatre", "-", "1,000", "AN,", "\n"]


def random_text(rng: random.Random) -> str:
    return rng.choice([" ", " ", "  ", "-", ""]).join(rng.choices(WORDS, k=rng.randint(0, 4)))


def random_case(rng: random.Random, null_answers: bool) -> tuple[dict, dict, dict]:
    """Returns answers, predictions and null odds for up to 12 questions; odds have ties."""
    ids = [f"q{number}" for number in range(rng.randint(1, 12))]
    fewest = 0 if null_answers else 1
    gold = {id_: [random_text(rng) for _ in range(rng.randint(fewest, 3))] for id_ in ids}
    predictions = {
        id_: rng.choice(gold[id_]) if gold[id_] and rng.random() < 0.4 else random_text(rng)
        for id_ in ids
    }
    odds = {id_: rng.choice([rng.gauss(0, 3), float(rng.randint(-2, 2))]) for id_ in ids}
    return gold, predictions, odds


def cases_v1() -> Iterator[tuple[dict, dict]]:
    rng = random.Random(1)
    for _ in range(NUM_CASES):
        yield random_case(rng, null_answers=False)[:2]


def cases_v2(seed: int) -> Iterator[tuple[dict, dict, dict, float]]:
    """Yields cases with the threshold above which a question is taken to have no answer."""
    rng = random.Random(seed)
    for _ in range(NUM_CASES):
        yield *random_case(rng, null_answers=True), rng.choice([1.0, rng.gauss(0, 3), 1e9])


def load_script(directory: str, version: str):
    spec = importlib.util.spec_from_file_location(
        f"evaluate_{version}", pathlib.Path(directory) / f"evaluate-{version}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _data(gold: dict) -> list[dict]:
    entries = [
        {"id": id_, "answers": [{"text": text} for text in texts]} for id_, texts in gold.items()
    ]
    return [{"paragraphs": [{"qas": entries}]}]


def official_v1(script, gold: dict, predictions: dict) -> dict[str, float]:
    scores = script.evaluate(_data(gold), predictions)
    return {"exact": scores["exact_match"], "f1": scores["f1"]}


def official_v2(
    script, gold: dict, predictions: dict, odds: dict, threshold: float
) -> dict[str, float]:
    """Calls the functions of the script as its `main` does."""
    answered = script.make_qid_to_has_ans(_data(gold))
    raw = script.get_raw_scores(_data(gold), predictions)
    applied = [script.apply_no_ans_threshold(each, odds, answered, threshold) for each in raw]
    scores = script.make_eval_dict(*applied)
    for kind, wanted in (("HasAns", True), ("NoAns", False)):
        if chosen := [id_ for id_, value in answered.items() if value == wanted]:
            script.merge_eval(scores, script.make_eval_dict(*applied, chosen), kind)
    script.find_all_best_thresh(scores, predictions, *raw, odds, answered)
    return scores


def main() -> None:
    v1, v2 = (load_script(sys.argv[1], version) for version in ("v1.1", "v2.0"))
    scores = {
        "v1": [[official_v1(v1, *case)[name] for name in V1] for case in cases_v1()],
        "v2": [
            [found.get(name, np.nan) for name in V2]
            for found in (official_v2(v2, *case) for case in cases_v2(seed=3))
        ],
    }
    np.savez_compressed(PATH, **scores)
    print(f"{PATH}: {2 * NUM_CASES:,} cases, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
