"""Adds hard negatives to queries: passages that a bi-encoder ranks high, but that do not answer.

python tools/mine_negatives.py --model=runs/bi_encoder --queries=train.jsonl \
    --passages=corpus.jsonl --output=mined.jsonl --num_negatives=5 --relative_margin=0.05

--queries has the form to train on, each with its positives; negatives in it are replaced. The
output has the same form, with the scores of positive and negatives. --passages is a table of texts,
with titles (--title) if the positives have them, or vectors that bert_jax.predict wrote with the
same model; without it, passages are the positives of all queries. With --cross_encoder, its scores
replace the bi-encoder's, in ranks and thresholds.

Prints how many passages each rule dropped, and how many queries have too few negatives; these are
left out.
"""

import pathlib
import sys

from absl import app, flags

import bert_jax
from bert_jax.inference.mining import SAMPLINGS, MiningRules, load_corpus, mine
from bert_jax.inference.prediction_files import complete_files
from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.runtime.errors import CheckpointError
from bert_jax.runtime.main import limit_logging
from bert_jax.tasks.queries import read_queries
from bert_jax.tasks.tables import write_json_lines

flags.DEFINE_string("model", None, "Bi-encoder: a workdir, a checkpoint, or an import.")
flags.DEFINE_string("queries", None, "Queries with positives, as to train on.")
flags.DEFINE_string("passages", None, "Table of texts, or vectors: NAME.npy or a folder of shards.")
flags.DEFINE_string("title", "", "Column of a title, as for bert_jax.predict.")
flags.DEFINE_string("output", None, "JSONL file to write; must not exist.")
flags.DEFINE_string("cross_encoder", None, "Cross-encoder whose scores the rules use.")
flags.DEFINE_integer("num_negatives", 3, "Negatives of each query.", lower_bound=1)
flags.DEFINE_integer("range_min", 0, "Rank, from 0, of the first passage to choose from.", 0)
help_text = "Rank at which the passages to choose from end; default: as many as are needed."
flags.DEFINE_integer("range_max", None, help_text, lower_bound=1)
help_text = "By how much the score of a negative must be below the positive's."
flags.DEFINE_float("absolute_margin", None, help_text)
help_text = "The same, as a fraction of the positive's absolute score."
flags.DEFINE_float("relative_margin", None, help_text)
flags.DEFINE_float("max_score", None, "Highest score of a negative.")
flags.DEFINE_float("min_score", None, "Lowest score of a negative.")
help_text = "Whether to choose those with the highest scores, or to draw from the range."
flags.DEFINE_enum("sampling", "top", SAMPLINGS, help_text)
flags.DEFINE_integer("seed", 0, "Seed to draw with.")
flags.mark_flags_as_required(["model", "queries", "output"])


def describe(lines: list[dict], counts: dict[str, int]) -> str:
    """Returns the counts and the mean scores as text."""
    text = "".join(f"{count:>12,}  {what}\n" for what, count in counts.items())
    if not lines:
        return text
    positive = sum(line["positive_score"] for line in lines) / len(lines)
    scores = [score for line in lines for score in line["scores"]]
    return f"{text}mean score: positives {positive:.4f}, negatives {sum(scores) / len(scores):.4f}"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    limit_logging()
    values = flags.FLAGS
    output = pathlib.Path(values.output)
    names = MiningRules.__dataclass_fields__
    try:
        if output.exists():
            raise FileExistsError(f"--output={output} exists: choose another, or remove it")
        rules = MiningRules(**{name: values[name].value for name in names})
        unused: dict[str, int] = {}
        queries = read_queries(values.queries, is_training=True, unused=unused)
        model = bert_jax.load(values.model)
        cross_encoder = bert_jax.load(values.cross_encoder) if values.cross_encoder else None
        notes: dict[str, int] = {}
        corpus = None
        if values.passages:
            corpus = load_corpus(values.passages, model, values.title, notes)
        lines, counts = mine(queries, corpus, model, rules, cross_encoder)
        counts |= {what: count for what, count in notes.items() if count}
        counts |= {f"lines with {key!r}, which is not used": n for key, n in unused.items()}
        counts["negatives in --queries, replaced"] = sum(len(line.negatives) for line in queries)
        with complete_files(output) as folder:
            write_json_lines(folder / output.name, lines)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"mine_negatives: {describe_error(error)}")
    print(describe(lines, counts))
    print(f"Wrote {output}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
