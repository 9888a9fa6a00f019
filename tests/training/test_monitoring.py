"""Reports of the steps in both mains."""

import pathlib

import jax
import pytest

from bert_jax.objectives import mean_metrics
from bert_jax.runtime.errors import CheckpointError, Diverged
from bert_jax.training import monitoring


def step_metrics(loss: float, mlm_count: float = 1.0) -> dict:
    sums = {"mlm_loss": (loss * mlm_count, mlm_count), "mlm_accuracy": (1.0, mlm_count)}
    sums |= {"nsp_loss": (1.0, 2.0), "nsp_accuracy": (1.0, 2.0)}
    return {"loss": loss + 0.5, "gradient_norm": 1.0, "parameter_norm": 2.0, "sums": sums}


def test_report_is_the_mean_over_all_predictions_of_the_steps():
    values = monitoring.mean_over_steps(
        [step_metrics(4.0, mlm_count=30), step_metrics(2.0, mlm_count=10)]
    )
    assert values["loss"] == 3.5 and values["gradient_norm"] == 1.0
    scores = mean_metrics(values["sums"])
    assert scores["mlm_loss"] == (4.0 * 30 + 2.0 * 10) / 40  # Not a mean of means.
    assert scores["mlm_accuracy"] == 2 / 40
    assert scores["nsp_loss"] == scores["nsp_accuracy"] == 0.5


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (pathlib.Path("runs/a/checkpoints/6"), r"before it is (\S+)\. .*: config\.init_from=\1$"),
        (None, "there is no checkpoint"),
    ],
)
def test_loss_of_any_step_that_is_not_finite_is_an_error_with_its_number(checkpoint, message):
    steps = [step_metrics(loss) for loss in (1.0, float("nan"), 1.0)]
    with pytest.raises(Diverged, match=f"the loss of step 8 is nan; .*{message}"):
        monitoring.check_finite(steps, 9, lambda: checkpoint)
    monitoring.check_finite([step_metrics(1.0)], 9, pytest.fail)


def test_best_checkpoint_is_called_that():
    steps = [step_metrics(float("inf"))]
    with pytest.raises(Diverged, match=r"; the best checkpoint before it is run/best/4\. "):
        monitoring.check_finite(steps, 9, lambda: pathlib.Path("run/best/4"), kind="best")


def test_failed_save_does_not_hide_a_loss_that_is_not_finite():
    def fail():
        raise CheckpointError("disk is full")

    with pytest.raises(Diverged, match=r"step 9 is nan; .*disk is full") as found:
        monitoring.check_finite([step_metrics(float("nan"))], 9, fail)
    assert found.value.step == 9


def test_first_step_is_logged_with_the_rows_of_its_phase(caplog):
    caplog.set_level("INFO", "absl")
    monitoring.log_first_step(None)
    monitoring.log_first_step(None, " on rows of 512 tokens")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("First step ") and " s after the start, " in first
    assert second.startswith("First step on rows of 512 tokens ")


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """A process without a cache of compiled programs; yields XDG_CACHE_HOME."""
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    previous = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for name, value in previous.items():
        jax.config.update(name, value)


def test_all_workdirs_share_a_bounded_cache_of_compiled_programs(no_cache, tmp_path):
    monitoring.enable_compilation_cache(tmp_path / "one")
    directory = jax.config.jax_compilation_cache_dir
    assert pathlib.Path(directory).is_relative_to(no_cache / "bert_jax/compiled")
    assert 0 < jax.config.jax_compilation_cache_max_size < 4e9
    jax.config.update("jax_compilation_cache_dir", None)  # Another process.
    monitoring.enable_compilation_cache(tmp_path / "two")
    assert jax.config.jax_compilation_cache_dir == directory
    assert not (tmp_path / "one").exists()


def test_program_that_was_not_written_to_its_end_is_removed_from_the_cache(no_cache, tmp_path):
    monitoring.enable_compilation_cache(tmp_path)
    directory = pathlib.Path(jax.config.jax_compilation_cache_dir)
    for name in ("whole-1-cache", "whole-1-atime", "part-2-cache"):
        (directory / name).write_bytes(b"8 bytes ")
    jax.config.update("jax_compilation_cache_dir", None)
    monitoring.enable_compilation_cache(tmp_path)
    assert {path.name for path in directory.glob("*-*")} == {"whole-1-cache", "whole-1-atime"}


def test_home_that_cannot_be_written_is_a_warning(no_cache, tmp_path, caplog):
    no_cache.write_text("a file")
    monitoring.enable_compilation_cache(tmp_path)
    assert jax.config.jax_compilation_cache_dir is None
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "not cached" in warning and str(no_cache) in warning


def test_given_cache_is_kept_and_several_processes_share_that_of_the_workdir(
    no_cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monitoring.enable_compilation_cache(tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    monitoring.enable_compilation_cache(tmp_path / "other")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    assert not no_cache.exists()


def test_steps_from_the_third_are_profiled(tmp_path):
    def profiles():
        return list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))

    for steps_done in range(4):
        monitoring.profile(tmp_path, steps_done, num_steps=2, state=jax.numpy.ones(1))
        assert not profiles()
    monitoring.profile(tmp_path, 4, num_steps=2, state=jax.numpy.ones(1))
    assert len(profiles()) == 1
    monitoring.profile(tmp_path / "none", 2, num_steps=0, state=jax.numpy.ones(1))
    assert not (tmp_path / "none").exists()
