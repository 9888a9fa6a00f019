"""A changed bit of a checkpoint is an error or has no effect, whoever reads it."""

import json
import logging
import pathlib
import random
import shutil

import flax
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.checksums import CHECKSUMS
from bert_jax.checkpoints.native import Checkpointer, load_checkpoint, write_checkpoint
from bert_jax.checkpoints.parameters import model_settings, parameter_shapes
from bert_jax.checkpoints.read import abstract_params, read_model
from bert_jax.checkpoints.verify import print_summary, verify_checkpoint
from bert_jax.model.architecture import config_from_settings
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.state import TrainState
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import small_model_config

KINDS = ("pre-training", "fine-tuning")


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> tuple:
    """A training state with random numbers, its settings and its tokenizer."""
    vocabulary = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt")
    tokenizer, rng = load_tokenizer(vocabulary), np.random.default_rng(0)
    config = small_model_config(tokenizer.vocab_size, hidden_size=16, intermediate_size=32)
    shapes = flax.traverse_util.unflatten_dict(parameter_shapes(config), sep="/")
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, leaf.dtype), shapes)
    optimizer = make_optimizer("bert_adam", lambda step: 1e-4)
    settings = model_settings(config, params) | {"seed": 3}
    return TrainState(np.int32(7), params, optimizer.init(params)), settings, tokenizer


@pytest.fixture(scope="module")
def checkpoints(state, tmp_path_factory) -> dict[str, pathlib.Path]:
    """A checkpoint of each of `KINDS`."""
    directory = tmp_path_factory.mktemp("checkpoints")
    training, settings, tokenizer = state
    checkpointer = Checkpointer(directory, settings, tokenizer, keep_last=1)
    checkpointer.save(training)
    checkpointer.close()
    head = {"task": "classification", "labels": ["no", "yes"]}
    config = config_from_settings(settings)
    shapes = flax.traverse_util.unflatten_dict(parameter_shapes(config, head), sep="/")
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.1, leaf.dtype), shapes)
    params["encoder"] = training.params["encoder"]
    del params["mlm"], params["nsp"]
    tuned = model_settings(config, params) | {"head": head}
    write_checkpoint(directory / "best" / "7", params, tuned, tokenizer)
    return {"pre-training": directory / "checkpoints" / "7", "fine-tuning": directory / "best/7"}


def load(directory, state):
    model = read_model(directory)
    return model.params, model.settings, model.tokenizer.files()


def check(directory, state):
    return verify_checkpoint(directory)


def resume(directory, state):
    training, settings, tokenizer = state
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding), training
    )
    checkpointer = Checkpointer(directory.parents[1], settings, tokenizer, keep_last=1)
    try:
        return checkpointer.restore(int(directory.name), abstract)
    finally:
        checkpointer.close()


READERS = {"pre-training": (load, check, resume), "fine-tuning": (load, check)}


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# Of Orbax, which writes them after the checksums; no reader takes values from them.
UNCHECKED = {"_CHECKPOINT_METADATA", "commit_success.txt"}


class Damage:
    """Reads a changed checkpoint; fails if a reader gets other values or `check` sees no change."""

    def __init__(self, kind, checkpoint, state, directory):
        self.directory = directory / "checkpoints" / "7"
        shutil.copytree(checkpoint, self.directory)
        self.files = sorted(path for path in self.directory.rglob("*") if path.is_file())
        self._state, self._readers = state, READERS[kind]
        self._intact = [reader(self.directory, state) for reader in self._readers]

    def read(self, what: str, *changed: pathlib.Path) -> None:
        for reader, intact in zip(self._readers, self._intact, strict=True):
            try:
                found = reader(self.directory, self._state)
            except CheckpointError as error:
                assert str(self.directory) in str(error), what
            else:
                assert_equal(found, intact)
                assert reader != check or {path.name for path in changed} <= UNCHECKED, what

    def flip(self, path: pathlib.Path, rng: random.Random) -> None:
        content = path.read_bytes()
        position, changed = rng.randrange(len(content)), bytearray(content)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        self.read(f"{path}, byte {position}", path)
        path.write_bytes(content)


@pytest.fixture(params=KINDS)
def damage(request, checkpoints, state, tmp_path) -> Damage:
    return Damage(request.param, checkpoints[request.param], state, tmp_path)


def test_one_changed_bit_of_each_file_is_an_error_or_has_no_effect(damage):
    rng = random.Random(0)
    for path in damage.files:
        damage.flip(path, rng)


@pytest.mark.exhaustive
def test_200_changed_bits_are_errors_or_have_no_effect(damage):
    """Over all bytes, and as often over all files: most are small."""
    rng = random.Random(1)
    sizes = [path.stat().st_size for path in damage.files]
    by_size = rng.choices(damage.files, sizes, k=100)
    for path in by_size + rng.choices(damage.files, k=100):
        damage.flip(path, rng)


@pytest.mark.slow
def test_files_that_are_exchanged_or_absent_are_errors_or_have_no_effect(damage):
    for path, other in zip(damage.files, damage.files[1:], strict=False):
        contents = path.read_bytes(), other.read_bytes()
        path.write_bytes(contents[1])
        other.write_bytes(contents[0])
        changed = (path, other) if contents[0] != contents[1] else ()
        damage.read(f"{path} and {other} exchanged", *changed)
        path.write_bytes(contents[0])
        other.unlink()
        # Without its checksums a checkpoint is read as one of an old version.
        damage.read(f"{other} absent", *(() if other.name == CHECKSUMS else (other,)))
        other.write_bytes(contents[1])


def test_a_changed_bit_of_the_values_is_named_with_its_file(checkpoints, tmp_path):
    copied = tmp_path / "7"
    shutil.copytree(checkpoints["pre-training"], copied)
    largest = max(copied.rglob("params/*/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[2000] ^= 0x40
    largest.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{largest} is damaged"):
        bert_jax.load(copied)


def test_loading_without_verification_ignores_the_checksums(checkpoints, state, tmp_path):
    copied = tmp_path / "7"
    shutil.copytree(checkpoints["pre-training"], copied)
    checksums = json.loads((copied / CHECKSUMS).read_text())
    checksums["crc32"]["params/_METADATA"] = "00000000"
    (copied / CHECKSUMS).write_text(json.dumps(checksums))
    with pytest.raises(CheckpointError, match="its CRC-32 is "):
        bert_jax.load(copied)
    loaded = bert_jax.load(copied, verify_checksums=False)
    assert_equal(loaded.params, state[0].params)


def test_a_checkpoint_without_checksums_is_read_as_before(checkpoints, state, tmp_path, capsys):
    copied = tmp_path / "7"
    shutil.copytree(checkpoints["pre-training"], copied)
    print_summary(copied)
    count = len(json.loads((copied / CHECKSUMS).read_text())["crc32"])
    assert f"the checksums of {count} files match" in capsys.readouterr().out
    (copied / CHECKSUMS).unlink()
    assert_equal(load(copied, state), load(checkpoints["pre-training"], state))
    print_summary(copied)
    assert "written without checksums" in capsys.readouterr().out


def test_checksums_can_be_left_out(state, tmp_path):
    training, settings, tokenizer = state
    checkpointer = Checkpointer(tmp_path, settings, tokenizer, keep_last=1, checksums=False)
    checkpointer.save(training)
    checkpointer.close()
    assert not (tmp_path / "checkpoints/7" / CHECKSUMS).exists()
    assert verify_checkpoint(tmp_path / "checkpoints/7")["step"] == 7


def test_checksums_are_crc_32(checkpoints):
    """Of the settings, with the value of a bit-by-bit computation."""
    checksums = json.loads((checkpoints["fine-tuning"] / CHECKSUMS).read_text())["crc32"]
    value = 0xFFFFFFFF
    for byte in (checkpoints["fine-tuning"] / "config/metadata").read_bytes():
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0xEDB88320 * (value & 1))
    assert checksums["config/metadata"] == f"{value ^ 0xFFFFFFFF:08x}"
    assert set(checksums) >= {"params/_METADATA", "params/manifest.ocdbt"}
    assert set(checksums) >= {"vocabulary/tokenizer.json", "vocabulary/layout.json"}


def test_a_vocabulary_that_is_not_the_stored_one_is_an_error(checkpoints, tmp_path):
    copied = tmp_path / "7"
    shutil.copytree(checkpoints["fine-tuning"], copied)
    (copied / CHECKSUMS).unlink()
    path = copied / "vocabulary/tokenizer.json"
    path.write_text(path.read_text().replace("river", "rover"))
    with pytest.raises(CheckpointError, match=r"vocabulary/tokenizer\.json is damaged, or was ch"):
        bert_jax.load(copied)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(value, state, tmp_path, caplog):
    training, settings, tokenizer = state
    params = jax.tree.map(np.array, training.params)
    params["encoder"]["embeddings"]["token_embedding"]["embedding"][3, 1] = value
    params["encoder"]["embeddings"]["token_embedding"]["embedding"][4] = 3e17
    write_checkpoint(tmp_path / "7", params, settings, tokenizer)
    named = (
        r"encoder/embeddings/token_embedding/embedding has 1 value that is NaN, infinite or above"
    )
    with pytest.raises(CheckpointError, match=named):
        bert_jax.load(tmp_path / "7")
    with caplog.at_level(logging.WARNING):
        loaded = bert_jax.load(tmp_path / "7", allow_non_finite=True)
    assert "has 1 value that is NaN" in caplog.text
    assert_equal(loaded.params, params)


@pytest.mark.parametrize(("value", "is_refused"), [(9e17, False), (-2e18, True), (3e38, True)])
def test_weights_that_no_model_has_are_refused_as_damage(value, is_refused, state, tmp_path):
    training, settings, tokenizer = state
    params = jax.tree.map(lambda leaf: np.full_like(leaf, value), training.params)
    write_checkpoint(tmp_path / "7", params, settings, tokenizer)
    (tmp_path / "7" / CHECKSUMS).unlink()
    if is_refused:
        with pytest.raises(CheckpointError, match="NaN, infinite or above"):
            bert_jax.load(tmp_path / "7")
    else:
        assert_equal(bert_jax.load(tmp_path / "7").params, params)


def test_checkpoint_that_cannot_be_read_back_is_not_complete(state, tmp_path, monkeypatch):
    """As if Orbax had not merged what each process wrote, which it only logs."""
    training, settings, tokenizer = state
    written = []

    def lose_the_index(directory):
        (directory / "params/manifest.ocdbt").unlink()
        written.append(directory)

    from bert_jax.checkpoints import native

    check_written = native._check_written
    monkeypatch.setattr(
        native, "_check_written", lambda item: [lose_the_index(item.parent), check_written(item)]
    )
    with pytest.raises(CheckpointError, match=r"writing a checkpoint to .* failed"):
        write_checkpoint(tmp_path / "7", training.params, settings, tokenizer)
    assert written and not (tmp_path / "7").exists()


def test_load_checkpoint_reads_as_read_model(checkpoints):
    params, settings, _ = load_checkpoint(checkpoints["fine-tuning"], abstract_params)
    model = read_model(checkpoints["fine-tuning"])
    assert_equal(params, model.params)
    assert settings == model.settings


def test_saving_a_model_never_replaces_what_a_run_resumes_from(checkpoints, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(checkpoints["pre-training"].parent, workdir / "checkpoints")
    (workdir / "config.json").write_text("{}")
    model = bert_jax.load(workdir)
    shutil.copytree(workdir / "checkpoints/7", tmp_path / "copied")
    for directory in (workdir / "checkpoints/7", workdir / "checkpoints/8", tmp_path / "copied"):
        with pytest.raises(
            ValueError, match=f"{directory} is a checkpoint from which a run resumes"
        ):
            model.save(directory, overwrite=True)
    assert verify_checkpoint(workdir / "checkpoints/7")["training"] > 0
    assert not (workdir / "checkpoints/8").exists()
    model.save(tmp_path / "checkpoints/8")
    model.save(tmp_path / "checkpoints/8", overwrite=True)
