"""Makes the compiled tables of docs/tpu.md and docs/log again.

python tools/tpu_tables.py
python tools/tpu_tables.py --tables=notebooks,bi_encoder

Takes hours, and the TPU compiler, but no TPU: `pip install 'jax[tpu]'` installs libtpu. Each report
is kept when it is made; after a stop, run the same command to continue.
"""

import pathlib
import sys

from absl import app, flags

from bert_jax.pods.estimate import doc_tables
from bert_jax.runtime.command_line import describe_error, log_warnings_only, parse_flags

TABLES = flags.DEFINE_list("tables", list(doc_tables.TABLES), "Names of the tables to make.")
DOCS = flags.DEFINE_string("docs", "docs", "Folder of the pages that the tables are written to.")
REPORTS = flags.DEFINE_string(
    "reports",
    "runs/tpu_tables",
    "Directory that keeps the reports. Those of other code or another compiler are made again.",
)


def run() -> list[str]:
    """Writes the tables. Returns what is wrong with them, such as a step that does not fit."""
    docs = pathlib.Path(DOCS.value)
    for name in TABLES.value:
        if name not in doc_tables.TABLES:
            known = ", ".join(doc_tables.TABLES)
            raise ValueError(f"--tables={name}: expected some of {known}")
        doc_tables.check_page(docs, name)
    reports = doc_tables.Reports(pathlib.Path(REPORTS.value))
    problems = []
    for name in TABLES.value:
        problems += doc_tables.write_table(docs, name, reports)
        print(f"{name}: written to {docs / doc_tables.TABLES[name].page}", flush=True)
    return problems


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    log_warnings_only()
    try:
        problems = run()
    except (OSError, ValueError) as error:
        sys.exit(f"tpu_tables: {' '.join(describe_error(error).split())}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
