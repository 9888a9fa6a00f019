"""The real main on a small corpus: it trains, resumes bit for bit, and refuses invalid input."""

import functools
import importlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from absl import flags

import bert_jax
from bert_corpus.vocabulary import train_byte_pair, train_sentencepiece
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.enlarge import deepen
from bert_jax.checkpoints.native import find_checkpoint, saved_steps, write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.verify import load_training_state
from bert_jax.configs.finetune import text_classification
from bert_jax.data.batches import pretrain_batches
from bert_jax.data.row_stream import source_names
from bert_jax.model.config import BertConfig
from bert_jax.objectives import mean_metrics
from bert_jax.objectives.masked_lm import (
    MaskedLm,
    PretrainingModel,
    target_sums,
)
from bert_jax.runtime import distributed
from bert_jax.runtime.command_line import define_config, parse_flags
from bert_jax.runtime.errors import PREEMPTED, RunStopped
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sweeps.settings import known_fields
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.moments import read_moments
from bert_jax.training.phases import check_numbers, open_phases
from bert_jax.training.pretrain_setup import make_model_config, setup_pretraining
from bert_jax.training.state import init_state
from bert_jax.training.workdir import claim_workdir
from tests.helpers import commands
from tests.helpers.corpora import build_small_corpus, random_text
from tests.helpers.json_lines import read_lines
from tests.helpers.legacy import make_legacy_checkpoint, make_legacy_corpus
from tests.helpers.models import example_batch, small_model_config
from tests.helpers.runs import saved_params, small_config, stopped_after_save

pytestmark = pytest.mark.usefixtures("two_devices")


def assert_equal_trees(tree, expected):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def finished(corpus, long_corpus, tmp_path_factory):
    """Runs both phases without interruption."""
    workdir = tmp_path_factory.mktemp("finished")
    config = small_config(corpus, long_corpus)
    return workdir, pretrain.train_and_evaluate(config, workdir)


def filled(before: str, piece: str, after: str) -> str:
    return before.rstrip() + piece[2:] + after if piece[:2] == "##" else before + piece + after


def records(workdir) -> list[dict]:
    return read_lines(workdir / "metrics.jsonl")


def test_run_writes_the_documented_files(finished):
    workdir, result = finished
    assert json.loads((workdir / "result.json").read_text()) == result
    assert result["steps"] == 9
    promised = "mlm_loss mlm_accuracy nsp_accuracy unigram_entropy unigram_accuracy seconds"
    assert set(promised.split()) <= result.keys()
    assert json.loads((workdir / "config.json").read_text())["architecture"]["num_layers"] == 1
    assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
    steps = [record["step"] for record in records(workdir)]
    assert steps == sorted(steps) and (steps[0], steps[-1]) == (1, 9)
    assert all(np.isfinite(list(record.values())).all() for record in records(workdir))
    goodput = [record["goodput"] for record in records(workdir) if "goodput" in record]
    assert 0 <= goodput[0] < goodput[-1] < 1  # The first step compiled.


def test_load_needs_only_the_directory(finished, tmp_path):
    workdir, _ = finished
    moved = tmp_path / "elsewhere"
    shutil.copytree(find_checkpoint(workdir), moved)
    model = bert_jax.load(moved)
    assert model.config.vocab_size == model.tokenizer.vocab_size
    fills = model.fill_mask("the [MASK] of the river", top_k=3)
    assert len(fills) == 3 and fills[0].probability >= fills[1].probability
    assert fills[0].text == filled("the ", fills[0].token, " of the river")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_at", "signaled"),
    [
        (3, True),
        pytest.param(3, False, marks=pytest.mark.exhaustive),
        pytest.param(6, True, marks=pytest.mark.exhaustive),
        pytest.param(6, False, marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    finished, corpus, long_corpus, tmp_path, stop_at, signaled, caplog
):
    """Stops at a step that is evaluated: between two reports, and between the phases.

    Killed right after a save, or asked to stop by a signal, which leaves no time to evaluate.
    """
    workdir, result = finished
    config = small_config(
        corpus,
        long_corpus,
        profile_steps=2 * (stop_at == 6),  # 3 are left.
        checkpoint_every=stop_at,
    )
    saves = []

    class Stop(Exception):
        pass

    class StoppingCheckpointer(pretrain.Checkpointer):
        def save(self, state):
            super().save(state)
            with pytest.raises(ValueError, match="is in use by process"):
                claim_workdir(tmp_path, {})
            saves.append(int(state.step))
            if saves[-1] == stop_at and not signaled:
                self.wait()
                raise Stop

    class SignaledStop(distributed.StopRequest):
        steps = itertools.count(1)

        def should_stop(self):
            return next(self.steps) == stop_at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "Checkpointer", StoppingCheckpointer)
        if signaled:
            patch.setattr(distributed, "StopRequest", SignaledStop)
        with pytest.raises(RunStopped if signaled else Stop):
            pretrain.train_and_evaluate(config, tmp_path)
    caplog.set_level("INFO", "absl")
    resumed = pretrain.train_and_evaluate(config, tmp_path)
    lengths = re.findall(r"First step on rows of (\d+) tokens done [\d.]+ s after", caplog.text)
    assert lengths == (["64", "128"] if stop_at == 3 else ["128"])
    assert re.findall(r"Goodput [\d.]+%: [\d.]+ s of training steps in the ", caplog.text)

    assert_equal_trees(saved_params(workdir), saved_params(tmp_path))
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy"):
        assert resumed[name] == result[name]
    expected, found = (
        [
            {
                name: value
                for name, value in record.items()
                if name.startswith(("train/", "heldout/")) or name in ("step", "learning_rate")
            }
            for record in records(directory)
        ]
        for directory in (workdir, tmp_path)
    )
    assert found == expected
    assert (tmp_path / "profile").exists() == (stop_at == 6)


@pytest.mark.slow
def test_run_of_an_earlier_version_is_resumed_bit_for_bit(finished, corpus, long_corpus, tmp_path):
    """Its corpora and its checkpoint store the tokenizer in another form."""
    earlier = [
        make_legacy_corpus(shutil.copytree(each, tmp_path / name))
        for name, each in (("short", corpus), ("long", long_corpus))
    ]
    config = small_config(*earlier, checkpoint_every=3)

    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "run")
    make_legacy_checkpoint(tmp_path / "run/checkpoints/3")
    pretrain.train_and_evaluate(config, tmp_path / "run")
    assert_equal_trees(saved_params(finished[0]), saved_params(tmp_path / "run"))


def initial_state(config, workdir, monkeypatch):
    """Returns the state with which the main calls its first step."""

    class Stop(Exception):
        pass

    def make_step(*args, **kwargs):
        def step(state, rows, frozen):
            raise Stop(jax.device_get(state))

        return step

    with monkeypatch.context() as patched, pytest.raises(Stop) as stopped:
        patched.setattr(pretrain, "make_pretrain_step", make_step)
        pretrain.train_and_evaluate(config, workdir)
    return stopped.value.args[0]


@pytest.mark.parametrize("init_optimizer", [False, True])
def test_long_phase_alone_continues_a_finished_run(
    finished, corpus, long_corpus, tmp_path, monkeypatch, init_optimizer
):
    workdir, _ = finished
    fields = {"num_steps": 0, "init_from": str(workdir), "init_optimizer": init_optimizer}
    config = small_config(corpus, long_corpus, **fields)
    state = initial_state(config, tmp_path, monkeypatch)
    assert_equal_trees(state.params, saved_params(workdir))
    assert state.step == 0 and state.opt_state[-1].count == 0  # The schedule begins anew.
    adam = next(state_part for state_part in state.opt_state if hasattr(state_part, "nu"))
    saved = jax.tree.leaves(load_training_state(find_checkpoint(workdir))["opt_state"])
    moments, expected = (
        sorted(float(np.sum(np.abs(leaf))) for leaf in leaves if leaf.ndim)
        for leaves in (jax.tree.leaves(adam), saved)
    )
    assert moments == (expected if init_optimizer else [0.0] * len(expected))
    assert adam.count == (9 if init_optimizer else 0)


@pytest.mark.slow
def test_a_deeper_model_continues_with_the_moments_of_its_first_layers(
    finished, corpus, tmp_path, monkeypatch, caplog
):
    workdir, _ = finished
    model = deepen(read_model(workdir), 2)
    write_checkpoint(tmp_path / "deep", model.params, model.settings, model.tokenizer)
    fields = {"init_from": str(tmp_path / "deep"), "init_optimizer_from": str(workdir)}
    config = small_config(corpus, **fields).unlock()
    config.model.num_layers = 2
    with caplog.at_level("INFO"):
        state = initial_state(config.lock(), tmp_path / "run", monkeypatch)
    assert_equal_trees(state.params, model.params)
    adam = next(state_part for state_part in state.opt_state if hasattr(state_part, "nu"))
    saved = read_moments(find_checkpoint(workdir), saved_params(workdir), read_model(workdir))
    assert adam.count == saved.count == 9
    for moments, expected in ((adam.mu, saved.mu), (adam.nu, saved.nu)):
        layers, old = (each["encoder"].pop("layers") for each in (moments, expected))
        assert_equal_trees(moments, expected)
        assert_equal_trees(jax.tree.map(lambda leaf: leaf[:1], layers), old)
        assert not any(leaf[1:].any() for leaf in jax.tree.leaves(layers))
    assert sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(old)) > 0
    assert "1 of 2 rows, for 16: encoder/layers/" in caplog.text


@pytest.fixture
def continued(corpus, tmp_path):
    """Weights without pooler and next-sentence head, and the configuration to continue them."""
    tokenizer = load_tokenizer(corpus)
    bert = small_model_config(
        tokenizer.vocab_size,
        num_heads=2,
        max_position_embeddings=512,
        dropout_rate=0.0,
        initializer_range=0.3,
    )
    init = functools.partial(
        init_state,
        model=PretrainingModel(bert),
        optimizer=optax.identity(),
        batch=example_batch(),
    )
    params = jax.jit(init)(jax.random.key(1)).params
    del params["nsp"], params["encoder"]["pooler"]
    settings = model_settings(bert, params)
    write_checkpoint(tmp_path / "weights", params, settings, tokenizer)
    config = importlib.import_module("bert_jax.configs.pretrain.continue").get_config("runlocal")
    config.init_from, config.corpus = str(tmp_path / "weights"), str(corpus)
    config.num_steps, config.log_every, config.model.dropout_rate = 2, 1, 0.0
    return config, params, settings


@pytest.mark.slow
def test_run_starts_from_given_weights_and_logs_what_is_newly_initialized(
    continued, tmp_path, monkeypatch, caplog
):
    config, params, settings = continued
    caplog.set_level("INFO", "absl")
    state = initial_state(config, tmp_path / "run", monkeypatch)
    assert "weights; newly initialized: encoder/pooler, nsp, optimizer" in caplog.text
    fresh = state.params["nsp"], state.params["encoder"].pop("pooler")
    assert all(np.any(head["dense"]["kernel"]) for head in fresh)
    assert_equal_trees(state.params, params | {"nsp": state.params["nsp"]})
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())["architecture"]
    assert resolved == settings["architecture"] | {"initializer_range": 0.02}


@pytest.mark.exhaustive
def test_first_loss_is_the_loss_of_the_given_weights(continued, tmp_path):
    config, params, settings = continued
    result = pretrain.train_and_evaluate(config, tmp_path / "run")
    (phase,) = open_phases(config)
    tokenizer = phase.train.tokenizer
    setup = setup_pretraining(config, [phase], tokenizer, source_settings=settings)
    (rows,) = pretrain_batches(phase.train, batch_sharding(setup.mesh), 8, 0, 1)
    key, _ = jax.random.split(jax.random.key(config.seed))  # The step's own.
    batch = setup.phases[0].objective.prepare(rows, key)
    fresh = setup.init(jax.random.key(config.seed)).params
    expected, of_fresh = (
        float(
            mean_metrics(target_sums(setup.model, params_at_start, batch, None, "mlm"))["mlm_loss"]
        )
        for params_at_start in (
            fresh | params | {"encoder": fresh["encoder"] | params["encoder"]},
            fresh,
        )
    )
    first = records(tmp_path / "run")[0]["train/mlm_loss"]
    assert first == pytest.approx(expected, abs=1e-5)
    assert abs(first - of_fresh) > 0.1

    # The workdir belongs to these weights, wherever they are.
    shutil.move(tmp_path / "weights", tmp_path / "moved")
    config.init_from = str(tmp_path / "moved")
    assert pretrain.train_and_evaluate(config, tmp_path / "run") == result
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    write_checkpoint(tmp_path / "other", params, settings, tokenizer)
    config.init_from = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"other settings:\n  contents\.init_from: "):
        pretrain.train_and_evaluate(config, tmp_path / "run")


@pytest.mark.slow
def test_longer_run_continues_as_documented_with_other_batches(
    finished, corpus, long_corpus, tmp_path
):
    workdir, _ = finished
    small = {"model.num_layers": 1, "batch_size": 8, "eval_batch_size": 8, "log_every": 1}
    config = small_config(corpus, long_corpus, num_steps=12)
    with pytest.raises(ValueError, match=r"6 in .*, 12 now") as refused:
        pretrain.train_and_evaluate(config, workdir)
    command = re.search(r"python -m bert_jax\.pretrain (.*)\n", str(refused.value))[1].split()
    documented = (commands.ROOT / "docs/pretraining.md").read_text().partition("**A longer run.**")
    documented = re.search(r"```\n(python .*?)```", documented[2], re.DOTALL)[1]
    assert re.findall(r"--[\w.]+", documented) == re.findall(r"--[\w.]+", " ".join(command))

    own = {"--config=FILE": "--config=configs/pretrain/bert_tiny.py:runlocal"}
    own |= {"--config.num_steps=N": "--config.num_steps=12", "--workdir=DIR": ""}
    own |= {"--config.warmup_steps=M": "--config.warmup_steps=2"}
    arguments = [own.get(argument, argument) for argument in command]
    arguments += [f"--config.{name}={value}" for name, value in small.items()]
    values = flags.FlagValues()
    define_config("", known_fields, values, arguments)
    parse_flags(["pretrain", *filter(None, arguments)], values)
    result = pretrain.train_and_evaluate(values.config, tmp_path)
    assert result["steps"] == 12 and np.isfinite(result["mlm_loss"])
    rates = [each["learning_rate"] for each in records(tmp_path) if "learning_rate" in each]
    assert rates[0] == 0 and max(rates) == rates[2] and rates[-1] < rates[2]  # All of its own.
    first_rows = []
    for each in (config, values.config):
        train = open_phases(each)[0].train
        (batch,) = pretrain_batches(train, batch_sharding(make_mesh()), 8, 0, 1)
        first_rows.append(batch["row_ids"].tolist())
    assert first_rows[0] != first_rows[1]


@pytest.mark.slow
def test_evaluation_takes_at_most_max_eval_batches(corpus, tmp_path, monkeypatch):
    config = small_config(corpus, max_eval_batches=1, num_steps=1, warmup_steps=0)
    evaluated_ids = []

    def evaluate(objective, eval_step, params, batches, beat):
        evaluated_ids.extend(rows["row_ids"].tolist() for rows in batches)
        return {}

    monkeypatch.setattr(pretrain, "evaluate", evaluate)
    pretrain.train_and_evaluate(config, tmp_path)
    (heldout,) = open_phases(config)[0].heldout.values()
    assert evaluated_ids == [[*range(8)]] and heldout.num_rows > 8


@pytest.mark.exhaustive
def test_held_out_rows_of_each_corpus_of_a_mixture_are_evaluated(corpus, tmp_path):
    """Each one's scores equal those of a run on it alone; the overall ones are means by weight."""
    other = build_small_corpus(tmp_path, num_documents=30)
    steps = {"num_steps": 1, "warmup_steps": 0, "eval_every": 0, "learning_rate": 1e-9}
    mixed, *alone = (
        pretrain.train_and_evaluate(small_config(each, **steps), tmp_path / str(index))
        for index, each in enumerate((f"{corpus}:3,{other}:1", corpus, other))
    )
    names = source_names([str(corpus), str(other)])
    for score in ("mlm_loss", "nsp_accuracy", "unigram_entropy"):
        first, second = (result[score] for result in alone)
        assert mixed[score] == pytest.approx(0.75 * first + 0.25 * second, rel=1e-5)
    for score in ("mlm_loss", "perplexity", "unigram_entropy"):
        expected = [result[score] for result in alone]
        assert [mixed[f"{score}/{name}"] for name in names] == pytest.approx(expected, rel=1e-5)
    assert mixed["perplexity"] == pytest.approx(math.exp(mixed["mlm_loss"]))


@pytest.mark.exhaustive
def test_a_resumed_run_is_compared_with_the_lowest_loss_before(corpus, tmp_path, monkeypatch):
    compared = []

    def check_diverged(loss, lowest_loss, step, **schedule):
        compared.append((step, loss, lowest_loss))

    monkeypatch.setattr(pretrain.health, "check_diverged", check_diverged)
    config = small_config(corpus, log_every=2, eval_every=0)
    pretrain.train_and_evaluate(config, tmp_path / "whole")
    whole = compared.copy()
    assert [step for step, *_ in whole] == [2, 4, 6]
    losses = [loss for _, loss, _ in whole]
    assert [low for *_, low in whole] == [min(losses[:n]) for n in (1, 2, 3)]
    compared.clear()
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "stopped")
    pretrain.train_and_evaluate(config, tmp_path / "stopped")
    assert compared == whole
    compared.clear()
    off = small_config(corpus, log_every=2, eval_every=0, stop_diverged=False)
    pretrain.train_and_evaluate(off, tmp_path / "off")
    assert not compared


def test_finished_run_is_not_trained_further(finished, corpus, long_corpus):
    workdir, result = finished
    before = saved_params(workdir)
    repeated = pretrain.train_and_evaluate(small_config(corpus, long_corpus), workdir)
    assert repeated["mlm_loss"] == result["mlm_loss"]
    assert_equal_trees(before, saved_params(workdir))


@pytest.mark.slow
@pytest.mark.parametrize("unit", [pytest.param("whole_word", marks=pytest.mark.exhaustive), "span"])
def test_other_masking_units_train(corpus, tmp_path, unit):
    config = small_config(corpus, num_steps=2)
    config.masking.unit = unit
    result = pretrain.train_and_evaluate(config, tmp_path)
    assert np.isfinite(result["mlm_loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["sentence_order", pytest.param("released_pairs", marks=pytest.mark.exhaustive)]
)
def test_labels_of_other_rows_train_the_next_sentence_head(tmp_path, kind):
    corpus = build_small_corpus(tmp_path, rows=kind)
    result = pretrain.train_and_evaluate(small_config(corpus, num_steps=2), tmp_path / "run")
    assert np.isfinite(result["nsp_loss"]) and 0 < result["nsp_accuracy"] <= 1


@pytest.mark.exhaustive
def test_left_to_right_model_is_trained_on_full_sentences_and_fine_tuned(tmp_path):
    corpus = build_small_corpus(tmp_path, rows="full_sentences")
    fields = {"objective": "left_to_right", "next_sentence": False}
    result = pretrain.train_and_evaluate(small_config(corpus, **fields), tmp_path / "run")
    assert result["perplexity"] == pytest.approx(np.exp(result["next_token_loss"]))
    assert not {name for name in result if name.startswith(("mlm", "nsp"))}
    model = bert_jax.load(tmp_path / "run")
    assert model.config.causal and set(model.params) == {"encoder", "mlm"}
    again = small_config(corpus, init_from=str(tmp_path / "run"), **fields)
    resumed = pretrain.train_and_evaluate(again, tmp_path / "again")
    assert resumed["next_token_loss"] < result["next_token_loss"]

    (tmp_path / "data.csv").write_text("text,label\n" + "the king,north\nthe war,south\n" * 8)
    config = text_classification.get_config()
    config.init_from, config.model.lstm_size = str(tmp_path / "run"), 8
    config.data.train = config.data.dev = str(tmp_path / "data.csv")
    config.max_seq_length, config.batch_size, config.num_epochs = 16, 8, 20.0
    config.learning_rate = 1e-3
    assert finetune.train_and_evaluate(config, tmp_path / "tuned")["dev"]["accuracy"] == 1
    tuned = bert_jax.load(tmp_path / "tuned")
    assert tuned.config.causal and tuned.head["lstm_size"] == 8
    assert [label.label for label in tuned.classify(["the king", "the war"])] == ["north", "south"]


@pytest.mark.exhaustive
def test_sentencepiece_works_wherever_wordpiece_does(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(random_text(60).replace("\n\n", "\n"))
    (tmp_path / "spiece.model").write_bytes(train_sentencepiece(str(text), 60, lower_case=True))
    corpus = build_small_corpus(tmp_path / "input", vocabulary=tmp_path / "spiece.model")
    config = small_config(corpus, num_steps=2)
    config.masking.unit = "whole_word"
    pretrain.train_and_evaluate(config, tmp_path / "run")
    model = bert_jax.load(tmp_path / "run")
    fill = model.fill_mask("the [MASK] of the river", top_k=1)[0]
    assert fill.text.endswith(" of the river") and fill.token.removeprefix("▁") in fill.text
    assert "spiece.model" in model.tokenizer.files()


DESCENDANTS = {
    "roberta_base": ("bpe.json", "full_sentences", {"position_offset": 2, "type_vocab_size": 1}),
    "albert_base": ("spiece.model", "sentence_order", {"embedding_size": 128}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DESCENDANTS)
def test_descendants_are_trained_by_their_recipes_and_loaded(name, tmp_path):
    filename, rows, fields = DESCENDANTS[name]
    text, vocabulary = tmp_path / "text.txt", tmp_path / filename
    text.write_text(random_text(60).replace("\n\n", "\n"))
    if filename == "bpe.json":
        vocabulary.write_bytes(train_byte_pair(str(text), 320))
    else:
        vocabulary.write_bytes(train_sentencepiece(str(text), 60, lower_case=True))
    config = importlib.import_module(f"configs.pretrain.{name}").get_config("runlocal")
    corpus = build_small_corpus(tmp_path / "input", vocabulary=vocabulary, rows=rows)
    config.long_phase.corpus = str(corpus)
    config.model.update({"size": "tiny", "max_position_embeddings": 64})
    result = pretrain.train_and_evaluate(config, tmp_path / "run")
    assert result["steps"] == 4 and np.isfinite(result["mlm_loss"])
    model = bert_jax.load(tmp_path / "run")
    assert {field: getattr(model.config, field) for field in fields} == fields
    layers = jax.tree.leaves(model.params["encoder"]["layers"])
    assert {len(leaf) for leaf in layers} == {1 if name == "albert_base" else 2}
    assert ("nsp" in model.params) == (name == "albert_base")
    mask = model.tokenizer.id_to_token(model.tokenizer.mask_id)
    assert len(model.fill_mask(f"the {mask} of the river", top_k=3)) == 3
    config.model.activation = "relu"
    config.init_from = str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"model\.activation is relu, but gelu.* in .*run"):
        pretrain.train_and_evaluate(config, tmp_path / "other")


COMMAND_LINES = {
    "--config.learning_rat=1": (
        "pretrain: --config.learning_rat: there is no field 'learning_rat'; did you mean "
        '"learning_rate"?'
    ),
    "--config.corpus=/nowhere": "/nowhere does not exist; run tools/prepare_corpus.py",
    "--config.num_steps=x": "invalid literal for int",
    "--confg=y": "Unknown command line flag 'confg'",
    "--config=configs/pretrain/bert_tyni.py": "configs/pretrain/bert_tyni.py",
}


@pytest.mark.slow
def test_wrong_flag_on_the_command_line_is_a_clear_error(tmp_path):
    command = [f"--workdir={tmp_path}", "--config=configs/pretrain/bert_tiny.py"]
    results = commands.run_each("bert_jax.pretrain", [[*command, each] for each in COMMAND_LINES])
    for (code, errors), message in zip(results, COMMAND_LINES.values(), strict=True):
        assert code == 1 and message in errors and "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_saves_the_step_and_the_same_command_resumes(corpus, tmp_path):
    workdir = tmp_path / "run"
    fields = ("num_steps=1000", "warmup_steps=4", "log_every=1", "checkpoint_every=1000")
    with commands.ended(commands.start(workdir, corpus, *fields)) as started:
        commands.wait_for(workdir / "metrics.jsonl", '"step": 2,', started)
        started[0].send_signal(signal.SIGINT)
        assert commands.finish(started) == [130]
    log = commands.log_of(workdir).read_text()
    (step,) = saved_steps(workdir / "checkpoints")
    assert f"pretrain: Stopped and saved at step {step}" in log and "Traceback" not in log
    with commands.ended(commands.start(workdir, corpus, *fields)) as started:
        commands.wait_for(workdir / "metrics.jsonl", f'"step": {step + 1},', started)
    log = commands.log_of(workdir).read_text()
    assert f"Resuming from step {step} in" in log
    pattern = r"rows of 64 tokens done ([\d.]+) s after the start, .*; (\d+) found in the cache"
    first = re.search(pattern, log)
    assert float(first[1]) > 0 and int(first[2]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive)]
)
def test_run_that_is_asked_to_stop_saves_the_step_and_exits_as_preempted(corpus, tmp_path, number):
    workdir = tmp_path / "run"
    fields = ("num_steps=1000", "warmup_steps=4", "log_every=1", "checkpoint_every=1000")
    with commands.ended(commands.start(workdir, corpus, *fields)) as started:
        commands.wait_for(workdir / "metrics.jsonl", '"step": 2,', started)
        started[0].send_signal(number)
        assert commands.finish(started) == [PREEMPTED]
    (step,) = saved_steps(workdir / "checkpoints")
    assert f"Stopped and saved at step {step}" in commands.log_of(workdir).read_text()
    assert records(workdir)[-1]["step"] == step  # No trained step is lost.


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", ["reader", "disk"])
def test_run_whose_log_cannot_be_written_trains_to_its_end(corpus, tmp_path, lost):
    workdir, fields = tmp_path / "run", ("num_steps=4", "log_every=1", "checkpoint_every=2")
    if lost == "disk":
        commands.log_of(workdir).symlink_to("/dev/full")
        commands.run(workdir, corpus, *fields)
    else:
        os.mkfifo(commands.log_of(workdir))
        reader = os.open(commands.log_of(workdir), os.O_RDONLY | os.O_NONBLOCK)
        with commands.ended(commands.start(workdir, corpus, *fields)) as started:
            os.close(reader)
            assert commands.finish(started) == [0]
    assert [record["step"] for record in records(workdir)][-1] == 4
    assert saved_steps(workdir / "checkpoints")[-1] == 4 and (workdir / "result.json").exists()


@pytest.mark.slow
def test_sighup_before_the_first_step_exits_as_preempted(corpus, tmp_path):
    """As SIGTERM, which tests/runtime/test_main.py raises."""
    workdir = tmp_path / "run"
    with commands.ended(commands.start(workdir, corpus, "num_steps=1000")) as started:
        commands.wait_for(commands.log_of(workdir), "Devices: ", started)
        started[0].send_signal(signal.SIGHUP)
        assert commands.finish(started) == [PREEMPTED]
    log = commands.log_of(workdir).read_text()
    assert "no training step was running: no step was saved. Run the same command again" in log


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_exits_with_one_line(corpus, tmp_path):
    workdir = tmp_path / "run"
    with commands.ended(commands.start(workdir, corpus, "num_steps=1000")) as started:
        commands.wait_for(commands.log_of(workdir), "Devices: ", started)
        started[0].send_signal(signal.SIGINT)
        assert commands.finish(started) == [130]
    log = commands.log_of(workdir).read_text()
    assert "Traceback" not in log and "Fatal" not in log


@pytest.mark.slow
def test_two_steps_are_dispatched_ahead_and_the_watchdog_knows_the_stage(
    corpus, tmp_path, monkeypatch
):
    dispatched, steps_ahead, activities = [], [], []
    make, block = pretrain.make_pretrain_step, jax.block_until_ready

    def make_recording_step(*args, **kwargs):
        step = make(*args, **kwargs)

        def run(state, rows, frozen):
            state, metrics = step(state, rows, frozen)
            dispatched.append(metrics)
            return state, metrics

        return run

    def block_until_ready(value):
        steps_ahead.extend(
            len(dispatched) - 1 - n for n, metrics in enumerate(dispatched) if metrics is value
        )
        return block(value)

    class RecordingWatchdog(pretrain.Watchdog):
        def beat(self, activity, limited=True):
            if activity not in activities:
                activities.append(activity)
            super().beat(activity, limited)  # `close` waits for it.

    monkeypatch.setattr(pretrain, "make_pretrain_step", make_recording_step)
    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    monkeypatch.setattr(pretrain, "Watchdog", RecordingWatchdog)
    changes = dict.fromkeys(("num_steps", "log_every", "checkpoint_every"), 9)
    changes["eval_every"] = 0  # At the end alone.
    pretrain.train_and_evaluate(small_config(corpus, **changes), tmp_path)
    # Steps 5, 8 and 9 wait for the step two before each. Reports of 1, 2 and 5 wait for all.
    assert steps_ahead == [2] * 3
    assert activities[:7] == [
        "starting",
        "opening the corpus on all processes",
        "claiming the workdir with all processes",
        "initializing the parameters",
        "running step 1",
        "waiting for the batch after step 1",
        "running step 2",
    ]
    last = ["waiting for the last save", "evaluating after step 9", "ending"]
    assert activities[-5:] == ["saving step 9", "waiting for the batch after step 9", *last]


def test_evaluation_waits_for_each_batch():
    """Collectives of evaluations that run at once may wait for each other forever."""
    running, counts = [], iter([30, 10, 2])

    class Running:
        def __init__(self, value):
            self.value = value
            running.append(self)

        def __float__(self):
            running.remove(self)
            return float(self.value)

    def eval_step(params, rows):
        assert not running
        count = next(counts)
        sums = {"loss": count * count, "accuracy": count / 2}
        return {
            f"{task}_{name}": (Running(total), Running(count))
            for task in ("mlm", "nsp")
            for name, total in sums.items()
        }

    beats = []

    def beat(limited):
        beats.append(limited)

    scores = pretrain.evaluate(MaskedLm, eval_step, {}, range(3), beat)
    assert beats == [False, True, True] and scores["nsp_accuracy"] == 0.5
    assert scores["mlm_loss"] == (30 * 30 + 10 * 10 + 2 * 2) / 42  # Not a mean of means.


@pytest.mark.slow
def test_save_in_progress_is_completed_when_the_run_ends(corpus, tmp_path):
    """Runs a process in which an error right after a save shuts the interpreter down."""
    script = f"""
import sys
sys.path.insert(0, ".")
from tests import conftest
from tests.helpers.runs import small_config
from bert_jax import pretrain
class Failing(pretrain.Checkpointer):
    def save(self, state):
        super().save(state)
        raise RuntimeError("as in the middle of a step")
pretrain.Checkpointer = Failing
pretrain.train_and_evaluate(small_config({str(corpus)!r}), {str(tmp_path)!r})
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "as in the middle of a step" in run.stderr
    assert find_checkpoint(tmp_path).name == "2"


@pytest.mark.slow
def test_workdir_of_a_rebuilt_corpus_is_an_error(corpus, tmp_path):
    shutil.copytree(corpus.parent, tmp_path / "input")
    config = small_config(tmp_path / "input" / "corpus", num_steps=2)
    pretrain.train_and_evaluate(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "input")
    build_small_corpus(tmp_path / "input", seed=1)
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        pretrain.train_and_evaluate(config, tmp_path / "run")


CONFIGS = {path.stem for path in pathlib.Path("configs/pretrain").glob("[!_]*.py")} - {"fields"}


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("argument", ["", "runlocal"])
def test_every_config_resolves_and_its_docstring_is_complete(name, argument):
    module = importlib.import_module(f"configs.pretrain.{name}")
    config = module.get_config(argument)
    weights = None if config.model.size else BertConfig()
    make_model_config(config, vocab_size=30522, source=weights)
    check_numbers(config)
    assert not argument or config.log_every == 1  # Ten steps give a curve, not two points.
    for promise in ("Source:", "Expected time:", "Expected result:", "python -m bert_jax.pretrain"):
        assert promise in module.__doc__, f"{name}: its docstring lacks {promise!r}"
    with pytest.raises(ValueError, match="after the colon"):
        module.get_config("runlocl")
