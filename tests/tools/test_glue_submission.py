"""The tool that collects the files for the benchmark's server, run as a user does."""

import pathlib
import subprocess
import sys
import zipfile

from tests.helpers import commands

ROOT = commands.ROOT


def collect(*arguments, cwd):
    command = [sys.executable, ROOT / "tools" / "glue_submission.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def predict(run: pathlib.Path, *names: str, count: int = 146) -> None:
    (run / "predictions").mkdir(parents=True)
    for name in names:
        lines = ["index\tprediction", *(f"{index}\t0" for index in range(count))]
        (run / "predictions" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (run / "predictions" / "dev.jsonl").write_text("{}\n")


def test_predictions_are_collected_and_missing_files_are_reported(tmp_path):
    predict(tmp_path / "mnli", "MNLI-m", "MNLI-mm", "AX")
    predict(tmp_path / "wnli", "WNLI")
    done = collect("mnli", "wnli", "--output=out.zip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WNLI.tsv: 146 predictions\n" in done.stdout
    assert "AX.tsv: 146 predictions: expected 1,104" in done.stdout
    assert done.stdout.endswith("Missing, but the server expects all: CoLA, SST-2, MRPC, STS-B, "
                                "QQP, QNLI, RTE\n")  # fmt: skip
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.namelist() == ["MNLI-m.tsv", "MNLI-mm.tsv", "WNLI.tsv", "AX.tsv"]
        assert archive.read("WNLI.tsv").startswith(b"index\tprediction\n0\t0\n")


def test_folders_written_by_predict_are_collected(tmp_path):
    predict(tmp_path / "wnli", "WNLI")
    (tmp_path / "wnli" / "predictions").rename(tmp_path / "written")
    done = collect("written", "--output=out.zip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.namelist() == ["WNLI.tsv"]


def test_bad_runs_are_an_error_of_one_line(tmp_path):
    predict(tmp_path / "one", "RTE")
    predict(tmp_path / "two", "RTE")
    predict(tmp_path / "seeds" / "seed_0", "RTE")
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.zip").write_text("")
    messages = {
        "nowhere": "nowhere",
        "empty": "empty",
        "seeds": "seeds/seed_0",
        "one two": "two/predictions/RTE.tsv and",
        "one --output=there.zip": "there.zip",
    }
    cases = [arguments.split() for arguments in messages]
    results = commands.run_each("tools.glue_submission", cases, cwd=tmp_path)
    for (code, errors), message in zip(results, messages.values(), strict=True):
        assert code == 1 and message in errors and errors.strip().count("\n") == 0
