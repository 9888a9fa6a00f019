r"""Whatever characters its path has, what is written can be read: `run[1]`, `a\b`, `*`, ..."""

import glob
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import bert_jax
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax import finetune, pretrain, sweep
from bert_jax.checkpoints.native import (
    Checkpointer,
    find_checkpoint,
    remove_checkpoint,
    saved_steps,
)
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.verify import copy_verified, verify_checkpoint
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.sweeps import paper as sweep_configs
from bert_jax.data.rows import CorpusError, Rows
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.tools.convert_checkpoint import convert
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.state import TrainState
from tests.helpers.commands import ROOT
from tests.helpers.corpora import random_text, write_vocabulary
from tests.helpers.models import write_random_encoder
from tests.helpers.runs import small_config

# What glob, TensorStore, etils, shells, URLs or other systems may take for something else.
MISREAD = ("run[1]", "a\\b", "*", "?x", "[!a]*", "{a}[{b}]")
OTHERS = (
    "run[",
    "{a}",
    " a b ",
    "it's",
    'q"q',
    "a%20b%41",
    "a#b?c=d",
    "~",
    "~root",
    "-x",
    "größe-日本",
    "new\nline",
    "tab\t",
    "$HOME",
    "a;b|c&d",
    "a:b",
    "a=b,c@d!e",
    "trailing.",
    "<a>",
    "^a$",
    "x" * 200,
)
MANY = " %20#~'\"{a,b}$HOME;&|größe-日本\n\t<x>:= ."  # Those of OTHERS, in one name.
NESTED = "/".join((*MISREAD[3:], *OTHERS))
# These matter where a path ends: Orbax names temporary directories so, and a bucket has "gs:/".
ENDINGS = ("gs:", "file:", "...", "orbax-checkpoint-tmp", "1.orbax-checkpoint-tmp-2")


def names(tested_always, others):
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in others]
    return pytest.mark.parametrize("name", [*tested_always, *slow])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    return bert_jax.load(write_random_encoder(directory / "encoder", tokenizer))


def entries(directory: pathlib.Path, depth: int = 1) -> list[str]:
    """Returns the paths of all files and directories that are `depth` levels below."""
    return [str(path.relative_to(directory)) for path in directory.glob("/".join("*" * depth))]


def assert_same(params, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(expected))


@names((*MISREAD[:3], MANY), (NESTED, *ENDINGS))
@pytest.mark.slow
def test_training_state_is_saved_and_restored_in_any_directory(name, model, tmp_path):
    workdir = tmp_path / name / "run"
    params = jax.device_get(model.params)
    optimizer = make_optimizer("bert_adam", lambda step: 1e-4)
    state = TrainState(np.int32(3), params, optimizer.init(params))
    settings = dict(model.settings) | {"has_training_state": True}
    checkpointer = Checkpointer(workdir, settings, model.tokenizer, keep_last=2)
    for step in (3, 4):
        checkpointer.save(state.replace(step=np.int32(step)))
    checkpointer.close()
    assert saved_steps(workdir / "checkpoints") == [3, 4]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding), state
    )
    checkpointer = Checkpointer(workdir, settings, model.tokenizer, keep_last=2)
    restored = checkpointer.restore(4, abstract)
    checkpointer.close()
    assert int(restored.step) == 4
    assert_same(restored.params, params)
    assert verify_checkpoint(find_checkpoint(workdir))["step"] == 4
    assert_same(bert_jax.load(workdir).params, params)
    assert entries(tmp_path, depth=1 + name.count("/")) == [name]
    assert entries(tmp_path / name) == ["run"]


@names((*MISREAD[:3], MANY), (NESTED, *ENDINGS))
def test_models_are_written_and_read_under_any_name(name, model, tmp_path):
    parent = tmp_path / name
    if ":/" not in str(parent / name):  # For `save`, that is the address of a bucket.
        model.save(parent / name)
        assert_same(bert_jax.load(parent / name).params, model.params)
        copy_verified(parent / name, parent / "copied" / name)
        assert_same(bert_jax.load(parent / "copied" / name).params, model.params)
    native, exported = parent / "native" / name, parent / "exported" / name
    convert(pathlib.Path(model.source), native, "native")
    assert_same(read_model(native).params, model.params)
    convert(native, exported, "huggingface")
    found = read_model(exported).params
    assert_same(found["encoder"]["layers"], model.params["encoder"]["layers"])
    for written in ("native", "exported"):
        assert entries(parent / written, depth=1 + name.count("/")) == [name]


@names(("run[1]", "a\\b", MANY), ("*", NESTED, *ENDINGS))
def test_corpora_are_built_and_read_in_any_directory(name, tmp_path):
    directory = tmp_path / name
    directory.mkdir(parents=True)
    text = directory / "text.txt"
    text.write_text(random_text(20))
    config = CorpusConfig(
        max_seq_length=64, max_sequences=4, heldout_fraction=0.2, sentences="lines", block_rows=16
    )
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    inputs = glob.escape(str(text)).replace(",", "?")  # Patterns, between commas.
    build_corpus(inputs, tokenizer, directory / "corpus", config, num_processes=1)
    for split in ("train", "heldout"):
        rows = Rows(directory / "corpus", split)
        assert len(rows.read(0, rows.num_rows)["tokens"]) == rows.num_rows > 0


def test_a_corpus_in_a_directory_that_is_not_unicode_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    (tmp_path / "text.txt").write_text(random_text(20))
    output = tmp_path / "\udcff"
    with pytest.raises(ValueError, match="is not UTF-8, which ArrayRecord needs"):
        build_corpus(str(tmp_path / "text.txt"), tokenizer, output, CorpusConfig())
    with pytest.raises((FileNotFoundError, CorpusError)):
        Rows(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("run[1]", "a\\b")), MANY]
)
def test_runs_train_resume_and_export_in_any_directory(name, corpus, tmp_path):
    directory = tmp_path / name
    config = small_config(corpus, num_steps=3, checkpoint_every=1)
    finished = pretrain.train_and_evaluate(config, directory / "pre")
    last = read_model(directory / "pre").params
    (directory / "pre/result.json").unlink()
    remove_checkpoint(directory / "pre/checkpoints/3")
    assert pretrain.train_and_evaluate(config, directory / "pre")["steps"] == finished["steps"]
    assert_same(read_model(directory / "pre").params, last)

    tuning = tuning_config(directory, directory / "pre")
    finetune.train_and_evaluate(tuning, directory / "tuned")
    assert bert_jax.load(directory / "tuned").classify("the river")
    convert(directory / "tuned", directory / "exported", "huggingface")
    assert bert_jax.load(directory / "exported").classify("the river")


def tuning_config(directory: pathlib.Path, init_from: pathlib.Path):
    """Writes data files into `directory`; returns the configuration to fine-tune on them."""
    lines = ["text,label", *("the river,wet", "the mountain,dry") * 8]
    for split in ("train", "dev"):
        (directory / f"{split}.csv").write_text("\n".join(lines))
    config = text_classification.get_config()
    config.init_from = str(init_from)
    config.update(max_seq_length=16, batch_size=8, num_epochs=2.0)
    config.data.update(train=str(directory / "train.csv"), dev=str(directory / "dev.csv"), test="")
    return config.lock()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("run[1]", "a\\b")), MANY]
)
def test_seeds_and_sweeps_run_in_any_directory(name, model, tmp_path):
    directory = tmp_path / name
    model.save(directory / "encoder")
    config = tuning_config(directory, directory / "encoder")
    with config.unlocked():
        config.num_seeds = 2
    finetune.train_and_evaluate(config, directory / "tuned")
    for seed in (0, 1):
        assert bert_jax.load(directory / f"tuned/seed_{seed}").classify("the river")
    settings = sweep_configs.get_config("text_classification").unlock()
    data = {f"data.{split}": str(directory / f"{split}.csv") for split in ("train", "dev")}
    fields = {"max_seq_length": 16, "batch_size": 8, "num_epochs": 2.0, "data.test": ""}
    settings.base.update_from_flattened_dict(
        fields | data | {"init_from": str(directory / "encoder")}
    )
    del settings.grid
    settings.grid, settings.trials, settings.num_seeds = {"learning_rate": (1e-3, 2e-3)}, (), 1
    best = sweep.sweep(settings.lock(), directory / "sweep")
    trials = sorted(directory.glob("sweep/trials/*"))
    assert len(trials) == 2
    assert all(bert_jax.load(trial).classify("the river") for trial in trials)
    assert sweep.sweep(settings, directory / "sweep") == best  # Resumed: all are finished.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run[1]", "a\\b", "a,b*", MANY])
@pytest.mark.parametrize(("kind", "suffix"), [("wordpiece", "txt"), ("sentencepiece", "model")])
def test_vocabularies_are_trained_into_any_file(name, kind, suffix, tmp_path):
    directory = tmp_path / name
    directory.mkdir()
    (tmp_path / "text.txt").write_text(random_text(20))
    output = directory / f"{name}.{suffix}"
    flags = [f"--input={tmp_path}/text.txt", f"--output={output}", "--size=90", f"--kind={kind}"]
    command = [sys.executable, str(ROOT / "tools/train_vocab.py"), *flags]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert load_tokenizer(output).encode("the river")
    written = sorted(path.name for path in directory.iterdir())
    assert written == [output.name, f"{output.name}.sha256"]
