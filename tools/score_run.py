"""Scores ranked results (a run of TREC) by judgments (qrels), with intervals.

python tools/score_run.py --qrels=qrels/test.tsv --run=run.txt

Prints MRR, nDCG, MAP, accuracy, recall and precision as trec_eval defines them, except that of
equal scores the passage with the lower grade comes first, and 95 % intervals by the bootstrap over
queries. Qrels are those of BEIR or TREC, a run is what bert_jax.predict writes. Queries without
results score 0.
"""

import pathlib
import sys

from absl import app, flags

from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.tasks.qrels import read_qrels, read_run, score_run
from bert_jax.tasks.retrieval_scores import CUTOFFS, describe_scores, write_query_scores

flags.DEFINE_string("qrels", None, "Judgments: TREC's lines, or a table as in BEIR.")
flags.DEFINE_string("run", None, "Results: query, Q0, passage, rank, score, name of the run.")
flags.DEFINE_list(
    "cutoffs", [str(k) for k in CUTOFFS], "Numbers of passages at which results are scored."
)
flags.DEFINE_string("output", None, "Also write the scores of each query to this .tsv file.")
flags.mark_flags_as_required(["qrels", "run"])


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not all(str(k).isdecimal() and int(k) for k in values.cutoffs):
        raise app.UsageError(f"--cutoffs={','.join(values.cutoffs)}: expected such as 1,10,100")
    try:
        qrels, run = read_qrels(values.qrels), read_run(values.run)
        ids, scores = score_run(qrels, run, [int(k) for k in values.cutoffs])
        if values.output:
            write_query_scores(pathlib.Path(values.output), ids, scores)
    except (OSError, ValueError) as error:
        sys.exit(f"score_run: {describe_error(error)}")
    print("\n".join(describe_scores(scores)))
    print(f"queries: {len(ids):,}, without results: {len({*ids} - run.keys()):,}")
    print(
        f"queries of the run without a relevant passage, not scored: {len(run.keys() - {*ids}):,}"
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
