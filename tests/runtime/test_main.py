"""Mistakes on the command line of a main are errors of one line, before it claims its workdir."""

import json

import jax
import pytest

from bert_jax.runtime import main
from bert_jax.runtime.errors import DIVERGED
from tests.helpers import commands


def check_messages(program: str, messages: dict[str, str], workdir) -> None:
    """Asserts that bert_jax.`program` with each of the arguments prints only its message."""
    cases = [[*arguments.split(), f"--workdir={workdir}"] for arguments in messages]
    results = commands.run_each(f"bert_jax.{program}", cases)
    for message, (code, errors) in zip(messages.values(), results, strict=True):
        assert code == 1 and not workdir.exists()
        assert errors.strip() == f"{program}: {message}"


def belongs_to(config: str, other: str, program: str) -> str:
    return (
        f"{config} is a configuration for bert_jax.{other}: run python -m bert_jax.{other} with "
        f"it, or use one for bert_jax.{program}"
    )


def test_mistake_on_the_command_line_is_an_error_of_one_line(tmp_path):
    pretraining, sweep = "configs/pretrain/bert_tiny.py", "configs/sweeps/paper.py"
    messages = {
        f"--config={pretraining}": belongs_to(pretraining, "pretrain", "finetune"),
        f"--config={sweep}": belongs_to(sweep, "sweep", "finetune"),
        "--config=configs/finetune/squad.py --process_id=2": (
            "--num_processes and --process_id need --coordinator or --multihost"
        ),
        "--nosuchflag=1": "Unknown command line flag 'nosuchflag'",
        "--config.batch_size=8": (
            "Unknown command line flag 'config.batch_size': --config=FILE, whose fields these are, "
            "is missing"
        ),
    }
    check_messages("finetune", messages, tmp_path / "run")


@pytest.mark.slow
def test_configuration_of_fine_tuning_is_an_error_of_pre_training(tmp_path):
    config = "configs/finetune/squad.py"
    messages = {f"--config={config}": belongs_to(config, "finetune", "pretrain")}
    check_messages("pretrain", messages, tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_diverges_has_an_exit_code_of_its_own(corpus, tmp_path):
    fields = ("learning_rate=1e38", "clip_norm=1e30", "num_steps=6", "warmup_steps=1")
    started = commands.start(tmp_path / "run", corpus, *fields)
    with commands.ended(started) as processes:
        assert commands.finish(processes) == [DIVERGED]
    assert "pretrain: the " in commands.log_of(tmp_path / "run").read_text()


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unknown backend tpu")])
def test_platform_without_devices_is_a_clear_error(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    expected = r"no device for JAX_PLATFORMS=cuda: for GPUs pip install 'jax\[cuda12\]', on a"
    with pytest.raises(ValueError, match=expected):
        main.check_devices()


def test_printed_result_has_six_digits(capsys):
    result = {"dev": {"f1": 0.9123456789012345, "count": 12345678}, "seeds": [1.0, 2.0 / 3]}
    main.print_result(result | {"predictions": ["dev.tsv"]}, "run")
    printed, _, last = capsys.readouterr().out.rpartition("Predictions: ")
    assert last.strip() == "run/dev.tsv"
    expected = {"dev": {"f1": 0.912346, "count": 12345678}, "seeds": [1.0, 0.666667]}
    assert json.loads(printed) == expected | {"predictions": ["dev.tsv"]}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "was running: no step was saved. Run"),
        (["checkpoints/20/x", "checkpoints/100/x"], "was running: step 100 is saved. Run"),
        (
            ["programs/1/checkpoints/7/x", "trials/a/result.json", "trials/b/result.json"],
            "was running: step 7 is saved and 2 finished trials are kept. Run",
        ),
    ],
)
def test_run_that_is_stopped_outside_a_step_says_what_is_saved(
    paths, message, tmp_path, monkeypatch
):
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    exits = []
    monkeypatch.setattr(main, "exit_now", lambda *arguments: exits.append(arguments))
    main._stop_outside_a_step(str(tmp_path), 75, 15, None)
    ((text, code),) = exits
    assert message in text and code == 75
