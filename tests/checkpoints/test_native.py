"""Checkpoints: retention, detection of damage, and memory for loading."""

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys

import flax
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.native import Checkpointer, find_checkpoint, saved_steps, write_checkpoint
from bert_jax.checkpoints.parameters import model_settings, parameter_shapes
from bert_jax.checkpoints.read import abstract_params, read_model
from bert_jax.checkpoints.verify import print_summary, verify_checkpoint
from bert_jax.model.config import BertConfig
from bert_jax.runtime.errors import CheckpointError
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain_setup import setup_pretraining
from bert_jax.training.state import TrainState
from tests.helpers.runs import small_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(corpus):
    """Nine steps on eight devices, with the optimizer state sharded over them."""
    config = small_config(corpus, num_steps=9, checkpoint_every=1, shard_weight_update=True)
    config.unlock()
    config.update(keep_checkpoints=2, keep_every=4)
    return config


@pytest.fixture(scope="module")
def workdir(config, tmp_path_factory):
    """Checkpoints of a run of `config`, with random numbers instead of trained values."""
    workdir = tmp_path_factory.mktemp("checkpoints")
    phases = open_phases(config)
    tokenizer = phases[0].train.tokenizer
    setup = setup_pretraining(config, phases, tokenizer)
    settings = pretrain.run_settings(setup, phases, weights={})
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: jax.device_put(rng.random(leaf.shape).astype(leaf.dtype), leaf.sharding),
        setup.abstract_state,
    )
    checkpointer = Checkpointer(workdir, settings, tokenizer, keep_last=2, keep_every=4)
    for step in (3, 4, 5, 8, 9):
        checkpointer.save(state.replace(step=np.int32(step)))
    checkpointer.close()
    return workdir


def read(directory) -> dict:
    return jax.device_get(bert_jax.load(directory).params)


@pytest.mark.slow
def test_keeps_the_last_checkpoints_and_every_nth(workdir):
    assert saved_steps(workdir / "checkpoints") == [4, 8, 9]


def test_run_keeps_the_configured_number_of_checkpoints(config, tmp_path, monkeypatch):
    class Opened(Exception):
        pass

    def open_checkpointer(*_, **kept):
        raise Opened(kept)

    monkeypatch.setattr(pretrain, "Checkpointer", open_checkpointer)
    with pytest.raises(Opened) as opened:
        pretrain.train_and_evaluate(config, tmp_path)
    expected = {"keep_last": 2, "keep_every": 4, "keep_step": None, "checksums": True}
    assert opened.value.args == (expected,)


@pytest.mark.slow
def test_damage_is_detected_or_harmless(config, workdir, tmp_path):
    """Removes and truncates each file in turn: what passes the check can be loaded and resumed."""
    copied = tmp_path / "checkpoints" / "9"
    shutil.copytree(find_checkpoint(workdir), copied)
    phases = open_phases(config)
    tokenizer = phases[0].train.tokenizer
    abstract = setup_pretraining(config, phases, tokenizer, jax.devices()[:1]).abstract_state
    checkpointer = Checkpointer(tmp_path, {}, tokenizer, keep_last=1)
    expected, detected = read(copied), 0
    for path in sorted(path for path in copied.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for kept_bytes in (None, len(content) // 2):
            path.unlink() if kept_bytes is None else path.write_bytes(content[:kept_bytes])
            try:
                assert verify_checkpoint(copied)["step"] == 9
            except CheckpointError as error:
                assert str(copied) in str(error)
                detected += 1
            else:
                restored = jax.device_get(checkpointer.restore(9, abstract).params)
                for params in (read(copied), restored):
                    jax.tree.map(np.testing.assert_array_equal, params, expected)
            path.write_bytes(content)
    checkpointer.close()
    assert detected > 10


def test_summary_of_a_checkpoint_without_training_state_names_no_step(workdir, tmp_path, capsys):
    print_summary(find_checkpoint(workdir))
    assert ": complete, step 9, parameters " in capsys.readouterr().out
    model = read_model(workdir)
    write_checkpoint(tmp_path / "a", model.params, model.settings, model.tokenizer)
    print_summary(tmp_path / "a")
    text = capsys.readouterr().out
    assert ": complete, parameters " in text and ", without training state; " in text


def test_one_non_finite_value_is_detected(workdir, tmp_path):
    model = read_model(workdir)
    params = jax.tree.map(np.array, model.params)
    params["mlm"]["bias"][3] = np.nan
    write_checkpoint(tmp_path / "written", params, model.settings, model.tokenizer)
    with pytest.raises(CheckpointError, match=r"'bias'.* holds values that are not finite"):
        verify_checkpoint(tmp_path / "written")


def copy_as_of_an_older_version(workdir, copied):
    """Copies the last checkpoint of `workdir` to `copied`, without its checksums."""
    shutil.copytree(find_checkpoint(workdir), copied)
    (copied / "checksums.json").unlink()


def check(*arguments):
    command = [sys.executable, ROOT / "tools" / "check_checkpoint.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_tool_checks_and_copies(workdir, tmp_path):
    copied = check(workdir, f"--copy_to={tmp_path / 'copy'}")
    assert copied.returncode == 0 and "complete, step 9" in copied.stdout
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "copy"), read(workdir))
    existing = check(workdir, f"--copy_to={tmp_path / 'copy'}")
    assert existing.returncode == 1 and "exists already" in existing.stderr
    inside = check(tmp_path / "copy", f"--copy_to={tmp_path / 'copy' / 'params' / 'again'}")
    assert inside.returncode == 1 and "is within the checkpoint" in inside.stderr
    shutil.rmtree(next((tmp_path / "copy" / "params").glob("ocdbt.process_0")))
    damaged = check(tmp_path / "copy")
    assert damaged.returncode == 1 and "params/ocdbt.process_0/" in damaged.stderr
    model = read_model(workdir)
    save_huggingface(tmp_path / "other", model.params, model.settings, model.tokenizer)
    other = check(tmp_path / "other")
    assert other.returncode == 1 and "a model of another library, without checksums" in other.stderr
    absent = check(tmp_path / "nowhere")
    assert absent.stderr.startswith("check_checkpoint: ") and "Traceback" not in absent.stderr


def test_parameters_of_another_model_are_detected(workdir, tmp_path):
    copied = tmp_path / "9"
    copy_as_of_an_older_version(workdir, copied)
    settings = json.loads((copied / "config" / "metadata").read_text())
    settings["architecture"]["intermediate_size"] *= 2
    (copied / "config" / "metadata").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r": encoder\.layers.* is float32"):
        bert_jax.load(copied)


def copy_with_settings(workdir, copied, **settings):
    """Copies the last checkpoint of `workdir` to `copied`, with other `settings`."""
    copy_as_of_an_older_version(workdir, copied)
    path = copied / "config" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_training_state_of_several_trials_is_not_a_model(workdir, tmp_path):
    copy_with_settings(workdir, tmp_path / "9", stacked_trials=["seed_0", "seed_1"])
    with pytest.raises(CheckpointError, match="holds the training state of fine-tuning, before"):
        bert_jax.load(tmp_path / "9")


def test_own_module_without_parameters_is_detected(workdir, tmp_path):
    copy_with_settings(workdir, tmp_path / "9", modules=["encoder", "mlm", "nsp", "own_head"])
    with pytest.raises(CheckpointError, match="own_head is absent"):
        bert_jax.load(tmp_path / "9")


def test_parameters_in_place_of_training_state_are_detected(workdir, tmp_path):
    copied = tmp_path / "9"
    copy_as_of_an_older_version(workdir, copied)
    shutil.rmtree(copied / "training")
    shutil.copytree(copied / "params", copied / "training")
    with pytest.raises(CheckpointError, match="training/ is incomplete, or not a training state"):
        verify_checkpoint(copied)


@pytest.mark.slow
def test_training_state_of_another_model_is_detected(workdir, tmp_path):
    """Both have the shapes of their optimizer's moments, but one has more layers."""
    copied, model = tmp_path / "9", read_model(workdir)
    copy_as_of_an_older_version(workdir, copied)
    assert verify_checkpoint(copied)["step"] == 9
    deeper = copy.deepcopy(model.settings)
    deeper["architecture"]["num_layers"] = 4
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(deeper))
    checkpointer = Checkpointer(tmp_path / "deeper", deeper, model.tokenizer, keep_last=1)
    optimizer = make_optimizer("bert_adam", lambda step: 1e-4)
    checkpointer.save(TrainState(np.int32(9), params, optimizer.init(params)))
    checkpointer.close()
    assert verify_checkpoint(find_checkpoint(tmp_path / "deeper"))["step"] == 9
    shutil.rmtree(copied / "training")
    shutil.copytree(find_checkpoint(tmp_path / "deeper") / "training", copied / "training")
    message = r"/9: training/ belongs to other parameters: no parameter .*'mu'.*layers.*, \[4, "
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(copied)


def test_workdir_of_several_seeds_names_one_of_them(workdir, tmp_path):
    shutil.copytree(workdir / "checkpoints", tmp_path / "run" / "seed_0" / "checkpoints")
    with pytest.raises(FileNotFoundError, match=r"several seeds: .*/run/seed_0$"):
        find_checkpoint(tmp_path / "run")
    assert find_checkpoint(tmp_path / "run" / "seed_0").name == "9"


def test_checkpoint_without_training_state_is_complete(workdir, tmp_path):
    model = read_model(workdir)
    assert model.report.unused == ("training",)
    write_checkpoint(tmp_path / "written", model.params, model.settings, model.tokenizer)
    sizes = verify_checkpoint(tmp_path / "written")
    assert sizes["step"] == 0 and sizes["params"] > 0
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "written"), read(workdir))
    assert read_model(tmp_path / "written").report.unused == ()
    with pytest.raises(CheckpointError, match=r"writing a checkpoint to .*written failed"):
        write_checkpoint(tmp_path / "written", model.params, model.settings, model.tokenizer)


MEASURE = """
import sys, jax, bert_jax
def memory_kib(name):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(name)).split()[1])
bert_jax.load(sys.argv[1])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # Resets the peak; see proc(5).
before = memory_kib("VmRSS")
params = bert_jax.load(sys.argv[2]).params
growth = memory_kib("VmHWM") - before
print(growth * 1024 / sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "sizes"),
    [
        (write_checkpoint, BertConfig(30_592, 768, 4, 12, 3072)),
        # Reads the largest tensor as a whole.
        (save_huggingface, BertConfig(2_048, 768, 8, 12, 3072)),
    ],
)
def test_loading_takes_little_more_memory_than_the_parameters(writer, sizes, workdir, tmp_path):
    """Loads 200 MB in a new process, after a small checkpoint so that imports do not count.

    The buffers of the reading threads take about 30 MB for any model.
    """
    tokenizer = read_model(workdir).tokenizer
    shapes = flax.traverse_util.unflatten_dict(parameter_shapes(sizes), sep="/")
    rng = np.random.default_rng(0)  # Constant values would compress too well.
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, leaf.dtype), shapes)
    writer(tmp_path / "large", params, model_settings(sizes, params), tokenizer)
    command = [sys.executable, "-c", MEASURE, workdir, tmp_path / "large"]
    environment = os.environ | {"XLA_FLAGS": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert 0.8 < float(run.stdout) < 1.35
