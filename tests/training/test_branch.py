"""Which checkpoints of other runs a run may continue from."""

import json

import pytest

from bert_jax.configs.pretrain import bert_tiny
from bert_jax.configs.pretrain.fields import make_later_phases
from bert_jax.training.branch import find_branch

LATER = ({"num_steps": 4, "batch_size": 16}, {"num_steps": 6, "masking.rate": 0.05})


def settings_of(config) -> dict:
    names = {"corpus": config.corpus, **{n: p.corpus for n, p in config.later_phases.items()}}
    return config.to_dict() | {"corpora": [[name] for name in names.values()]}


def make_config(*later, **fields):
    config = bert_tiny.get_config()
    config.long_phase.num_steps = 0
    config.later_phases = make_later_phases(*(later or LATER))
    fields = {"corpus": "a", "num_steps": 3, "warmup_steps": 2, "decay_steps": 2} | fields
    config.update(fields)
    return config


def write_run(workdir, config, step: int) -> str:
    path = workdir / f"checkpoints/{step}"
    (path / "params").mkdir(parents=True)
    (path / "config").mkdir()
    (path / "config/metadata").write_text(json.dumps(settings_of(config)))
    return str(path)


def branch(workdir, config, step: int = 5, **saved):
    config.branch_from = write_run(workdir, make_config(**saved), step)
    return find_branch(config, settings_of(config))


@pytest.mark.parametrize(
    ("later", "fields"),
    [
        (LATER, {}),
        (LATER, {"decay_steps": 6, "decay_shape": "linear", "log_every": 7}),
        # Other steps after the fifth, and as many phases as one likes.
        ((LATER[0] | {"num_steps": 2}, {"num_steps": 9, "corpus": "b"}), {"decay_steps": 9}),
        ((*LATER, {"num_steps": 5, "learning_rate": 1e-5}), {"decay_steps": 5}),
    ],
)
def test_runs_with_the_same_steps_so_far_may_branch_off(later, fields, tmp_path):
    path = branch(tmp_path, make_config(*later, **fields))
    assert path == tmp_path / "checkpoints/5"


@pytest.mark.parametrize(
    ("later", "fields", "saved", "message"),
    [
        (LATER, {"decay_steps": None}, {}, "rate of this run decays from its start"),
        (LATER, {}, {"decay_steps": None}, r"of the run of .*/5 decays from its start"),
        (LATER, {"decay_steps": 9}, {}, "rate of this run decays after step 4"),
        (LATER, {}, {"decay_steps": 9}, r"of the run of .*/5 decays after step 4"),
        (({"num_steps": 2, "batch_size": 16},), {"decay_steps": 0}, {}, "no step after 5"),
        (
            ({"num_steps": 4, "batch_size": 8},),
            {"decay_steps": 0},
            {},
            "up to step 5, .* differ in config.later_phases.phase_3.batch_size: it is 8 here, and "
            "16 there",
        ),
        (LATER, {"num_steps": 5}, {}, r"differ in config\.num_steps: it is 5 here, and 3 there"),
        (LATER, {"warmup_steps": 1}, {}, r"differ in config\.warmup_steps: it is 1 here, and 2"),
        (LATER, {"corpus": "b"}, {}, r"config\.corpus has other rows, or weights"),
        (LATER, {"seed": 1}, {}, r"other settings:\n  seed: 0 in .*, 1 now"),
        (LATER, {"weight_decay": 0.1}, {}, r"weight_decay: 0\.01 in .*, 0\.1 now"),
    ],
)
def test_other_runs_are_refused(later, fields, saved, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        branch(tmp_path, make_config(*later, **fields), **saved)


def test_a_directory_that_is_no_checkpoint_of_a_step_is_refused(tmp_path):
    config = make_config()
    path = write_run(tmp_path, config, 5)
    config.branch_from = str((tmp_path / "checkpoints/5").rename(tmp_path / "copy"))
    with pytest.raises(ValueError, match=r"copy: expected DIR/checkpoints/STEP"):
        find_branch(config, settings_of(config))
    config.branch_from = path
    with pytest.raises(FileNotFoundError):
        find_branch(config, settings_of(config))
