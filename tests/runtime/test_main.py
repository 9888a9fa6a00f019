"""Mistakes on the command line of a main are errors of one line, before it claims its workdir."""

import jax
import pytest

from bert_jax.runtime import main
from tests import helpers


def check_messages(program: str, messages: dict[str, str], workdir) -> None:
    """Asserts that bert_jax.`program` with each of the arguments prints only its message."""
    cases = [[*arguments.split(), f"--workdir={workdir}"] for arguments in messages]
    results = helpers.run_each(f"bert_jax.{program}", cases)
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


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unknown backend tpu")])
def test_platform_without_devices_is_a_clear_error(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    expected = r"no device for JAX_PLATFORMS=cuda: for GPUs pip install 'jax\[cuda12\]', on a"
    with pytest.raises(ValueError, match=expected):
        main.check_devices()
