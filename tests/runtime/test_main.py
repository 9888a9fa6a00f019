"""Each main rejects the configurations of the others."""

import pytest

from tests import helpers


@pytest.mark.parametrize(
    ("program", "configs"),
    [
        ("pretrain", {"configs/finetune/squad.py": "finetune"}),
        (
            "finetune",
            {"configs/pretrain/bert_tiny.py": "pretrain", "configs/sweeps/paper.py": "sweep"},
        ),
    ],
)
def test_configuration_of_the_other_program_is_an_error(program, configs, tmp_path):
    cases = [[f"--config={config}", f"--workdir={tmp_path / 'run'}"] for config in configs]
    results = helpers.run_each(f"bert_jax.{program}", cases)
    for (config, other), (code, errors) in zip(configs.items(), results, strict=True):
        assert code == 1 and not (tmp_path / "run").exists()
        assert errors.strip() == (
            f"{program}: {config} is a configuration for bert_jax.{other}: run python -m "
            f"bert_jax.{other} with it, or use one for bert_jax.{program}"
        )
