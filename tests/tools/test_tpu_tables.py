"""The messages of tools/tpu_tables.py; tests/pods/estimate/test_doc_tables.py has its tables."""

from tests.helpers.commands import run_each


def test_invalid_flags_end_in_one_line_not_a_traceback():
    cases = {
        "--tables=pots": "tpu_tables: --tables=pots: expected some of pods, stacks, notebooks, bi_",
        "--docs=/nowhere": "tpu_tables: /nowhere/log/2026-11-tpu-configurations.md has no place",
    }
    for (code, errors), message in zip(
        run_each("tools.tpu_tables", [[flags] for flags in cases]), cases.values(), strict=True
    ):
        (line,) = errors.strip().splitlines()
        assert code == 1 and line.startswith(message)
