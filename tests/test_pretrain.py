"""The real main on a small corpus: it trains, resumes bit for bit, and refuses what is wrong."""

import hashlib
import json
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import WORDS, build_small_corpus, random_text, write_vocabulary

import bert_jax
from bert_jax import pretrain
from bert_jax.checkpoint import CheckpointError, find_checkpoint
from configs.pretrain import bert_tiny
from tools.train_vocab import train_sentencepiece


def small_config(corpus, long_corpus=None, **changes):
    config = bert_tiny.get_config("runlocal")
    config.corpus = str(corpus)
    config.long_phase.num_steps = 3 if long_corpus else 0
    config.long_phase.corpus = str(long_corpus or "")
    config.num_steps = 6
    config.log_every = 2
    config.eval_every = 3
    config.checkpoint_every = 2
    config.batch_size = config.eval_batch_size = 8
    config.max_predictions = config.long_phase.max_predictions = 10
    config.update(changes)
    return config.lock()


def saved_params(workdir) -> dict:
    return jax.device_get(bert_jax.load(workdir).params)


def assert_equal_trees(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def finished(corpus, long_corpus, tmp_path_factory):
    """Both phases, never stopped."""
    workdir = tmp_path_factory.mktemp("finished")
    result = pretrain.train_and_evaluate(small_config(corpus, long_corpus), workdir)
    return workdir, result


def filled(before: str, piece: str, after: str) -> str:
    return before.rstrip() + piece[2:] + after if piece[:2] == "##" else before + piece + after


def records(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_run_leaves_what_the_readme_promises(finished):
    workdir, result = finished
    assert json.loads((workdir / "result.json").read_text()) == result
    assert result["steps"] == 9
    promised = "mlm_loss mlm_accuracy nsp_accuracy unigram_entropy unigram_accuracy seconds"
    assert set(promised.split()) <= result.keys()
    assert json.loads((workdir / "config.json").read_text())["bert"]["num_layers"] == 2
    assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
    steps = [record["step"] for record in records(workdir)]
    assert steps == sorted(steps) and steps[-1] == 9
    assert all(np.isfinite(list(record.values())).all() for record in records(workdir))


def test_load_needs_the_directory_alone(finished, tmp_path):
    workdir, _ = finished
    moved = tmp_path / "elsewhere"
    shutil.copytree(find_checkpoint(workdir), moved)
    model = bert_jax.load(moved)
    assert model.config.vocab_size == model.tokenizer.vocab_size
    fills = model.fill_mask("the [MASK] of the river", top_k=3)
    assert len(fills) == 3 and fills[0].probability >= fills[1].probability
    assert fills[0].text == filled("the ", fills[0].token, " of the river")


@pytest.mark.parametrize("stop_at", [2, 6])
def test_stopped_and_resumed_equals_never_stopped(finished, corpus, long_corpus, tmp_path, stop_at):
    """Stops right after the save of a step: in either phase, and between them."""
    workdir, result = finished
    config = small_config(corpus, long_corpus)
    saves = []

    class Stop(Exception):
        pass

    class StoppingCheckpointer(pretrain.Checkpointer):
        def save(self, state):
            super().save(state)
            saves.append(int(state.step))
            if saves[-1] == stop_at:
                self.wait()
                raise Stop

    original = pretrain.Checkpointer
    pretrain.Checkpointer = StoppingCheckpointer
    try:
        with pytest.raises(Stop):
            pretrain.train_and_evaluate(config, tmp_path)
    finally:
        pretrain.Checkpointer = original
    resumed = pretrain.train_and_evaluate(config, tmp_path)

    assert_equal_trees(saved_params(workdir), saved_params(tmp_path))
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy"):
        assert resumed[name] == result[name]
    losses = [
        [(r["step"], r["train/loss"]) for r in records(w) if "train/loss" in r]
        for w in (workdir, tmp_path)
    ]
    assert losses[0] == losses[1]


def test_finished_run_started_again_trains_no_further(finished, corpus, long_corpus):
    workdir, result = finished
    before = saved_params(workdir)
    again = pretrain.train_and_evaluate(small_config(corpus, long_corpus), workdir)
    assert again["mlm_loss"] == result["mlm_loss"]
    assert_equal_trees(before, saved_params(workdir))


@pytest.mark.parametrize("unit", ["whole_word", "span"])
def test_other_masking_units_train(corpus, tmp_path, unit):
    config = small_config(corpus, num_steps=2)
    config.masking.unit = unit
    result = pretrain.train_and_evaluate(config, tmp_path)
    assert np.isfinite(result["mlm_loss"])


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
    assert model.tokenizer.filename == "spiece.model"


# Bad input: what is changed about a good run, the error, and what its message must say.
def _no_corpus(config, directory):
    config.corpus = ""


def _missing_corpus(config, directory):
    config.corpus = str(directory / "nowhere")


def _missing_shard(config, directory):
    next((directory / "corpus").glob("train-*")).unlink()


def _truncated_shard(config, directory):
    shard = next((directory / "corpus").glob("train-*"))
    shard.write_bytes(shard.read_bytes()[:-100])


def _other_vocabulary(config, directory):
    write_vocabulary(directory / "corpus" / "vocab.txt", WORDS[::-1])


def _vocabulary_without_mask(config, directory):
    path = directory / "corpus" / "vocab.txt"
    path.write_text(path.read_text().replace("[MASK]", "mask"))


def _token_outside_the_vocabulary(config, directory):
    # A vocabulary that lost its last word, and a manifest that was made to agree.
    path = directory / "corpus" / "vocab.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    manifest_path = directory / "corpus" / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest["vocabulary"]["size"] -= 1
    manifest["vocabulary"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest_path.write_text(json.dumps(manifest))


def _two_vocabularies(config, directory):
    other = directory / "other"
    other.mkdir()
    words = [*WORDS, "zebra"]
    from bert_jax.corpus.build import CorpusSettings, build_corpus
    from bert_jax.tokenization import load_tokenizer

    build_corpus(
        str(directory / "text.txt"),
        load_tokenizer(write_vocabulary(other / "vocab.txt", words)),
        other / "corpus",
        CorpusSettings(max_seq_length=64, heldout_fraction=0.2, sentences="lines"),
        num_processes=1,
    )
    config.long_phase.num_steps = 2
    config.long_phase.corpus = str(other / "corpus")


def _short_position_table(config, directory):
    config.model.max_position_embeddings = 32


def _too_many_predictions(config, directory):
    config.max_predictions = 65


def _nothing_to_do(config, directory):
    config.num_steps = 0


def _odd_batch(config, directory):
    config.batch_size = 12


def _odd_eval_batch(config, directory):
    config.eval_batch_size = 12


def _odd_accumulation(config, directory):
    config.batch_size, config.per_device_batch_size = 16, 3


def _unknown_size(config, directory):
    config.model.size = "huge"


def _unknown_optimizer(config, directory):
    config.optimizer = "adam"


def _unknown_unit(config, directory):
    config.masking.unit = "word"


def _mesh_too_large(config, directory):
    config.mesh.data = 16


BAD_INPUT = {
    _no_corpus: (ValueError, r"--config\.corpus=DIR"),
    _missing_corpus: (FileNotFoundError, r"nowhere.*prepare_corpus"),
    _missing_shard: (ValueError, r"train-00000-of-00001\.array_record is missing; build"),
    _truncated_shard: (ValueError, r"train-00000.*bytes, expected .*cut off"),
    _other_vocabulary: (ValueError, r"vocab\.txt has SHA-256 .* corpus was built"),
    _vocabulary_without_mask: (ValueError, r"vocab\.txt.*\[MASK\]"),
    _token_outside_the_vocabulary: (ValueError, r"token id 33 is outside .* vocabulary of 33"),
    _two_vocabularies: (ValueError, r"built with different vocabularies"),
    _short_position_table: (ValueError, r"rows of 64 tokens.*table ends at 32.*max_position"),
    _too_many_predictions: (ValueError, r"max_predictions is 65, but the rows .* 1 to 64"),
    _nothing_to_do: (ValueError, r"num_steps is 0, and so is long_phase\.num_steps"),
    _odd_batch: (ValueError, r"batch_size 12 is not divisible by 8 devices"),
    _odd_eval_batch: (ValueError, r"batch_size 12 is not divisible by the 8 devices"),
    _odd_accumulation: (ValueError, r"16 is not divisible by 8 devices x per_device_batch_size 3"),
    _unknown_size: (ValueError, r"unknown model size 'huge': expected one of tiny"),
    _unknown_optimizer: (ValueError, r"unknown optimizer 'adam': expected one of bert_adam"),
    _unknown_unit: (ValueError, r"masking unit 'word' is unknown: expected one of token"),
    _mesh_too_large: (ValueError, r"does not divide the 8 devices"),
}


@pytest.mark.parametrize("change", BAD_INPUT, ids=lambda change: change.__name__.strip("_"))
def test_bad_input_is_a_clear_error(change, corpus, tmp_path):
    shutil.copytree(corpus.parent, tmp_path / "input")
    config = small_config(tmp_path / "input" / "corpus")
    change(config, tmp_path / "input")
    kind, message = BAD_INPUT[change]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        pretrain.train_and_evaluate(config, tmp_path / "workdir")


COMMAND_LINES = {
    "--config.learning_rat=1": "learning_rate",
    "--config.corpus=/nowhere": "/nowhere holds no corpus",
    "--config.num_steps=x": "invalid literal for int",
    "--confg=y": "Unknown command line flag 'confg'",
}


@pytest.mark.parametrize("argument", COMMAND_LINES)
def test_wrong_flag_on_the_command_line_says_what_is_meant(tmp_path, argument):
    command = [sys.executable, "-m", "bert_jax.pretrain", f"--workdir={tmp_path}"]
    command += ["--config=configs/pretrain/bert_tiny.py", argument]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0 and COMMAND_LINES[argument] in run.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_being_saved_when_the_run_ends_is_saved(corpus, tmp_path):
    """In a process of its own: an error right after a save, and the interpreter shuts down."""
    script = f"""
import sys
sys.path[:0] = ["tests", "."]
import conftest
from test_pretrain import small_config
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


def test_workdir_of_another_configuration_names_the_fields(finished, corpus, long_corpus):
    workdir, _ = finished
    config = small_config(corpus, long_corpus)
    config.learning_rate = 0.5
    message = r"learning_rate: 0\.0001 in .* 0\.5 now.*another --workdir"
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        pretrain.train_and_evaluate(config, workdir)


def test_workdir_of_a_corpus_since_rebuilt_is_refused(corpus, tmp_path):
    shutil.copytree(corpus.parent, tmp_path / "input")
    config = small_config(tmp_path / "input" / "corpus", num_steps=2)
    pretrain.train_and_evaluate(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "input")
    build_small_corpus(tmp_path / "input", seed=1)
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        pretrain.train_and_evaluate(config, tmp_path / "run")


def test_non_finite_loss_names_the_step_and_keeps_the_last_good_checkpoint(corpus, tmp_path):
    config = small_config(corpus, learning_rate=1e38, clip_norm=1e30, warmup_steps=4)
    config.checkpoint_every = 1
    with pytest.raises(pretrain.NonFiniteLoss, match=r"of step \d+ is (nan|inf)"):
        pretrain.train_and_evaluate(config, tmp_path)
    squares = [np.sum(np.square(leaf)) for leaf in jax.tree.leaves(saved_params(tmp_path))]
    assert np.isfinite(squares).all()


@pytest.fixture
def full_disk():
    """No file may grow beyond 64 KiB: the kernel answers as for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_disk_full_while_saving_is_a_clear_error_and_the_run_goes_on_later(
    corpus, tmp_path, full_disk
):
    config = small_config(corpus)

    class FillingCheckpointer(pretrain.Checkpointer):
        def save(self, state):
            if int(state.step) == 4:
                self.wait()
                full_disk()
            super().save(state)

    original = pretrain.Checkpointer
    pretrain.Checkpointer = FillingCheckpointer
    try:
        with pytest.raises(CheckpointError, match=r"failed: .* is step 2; free the disk"):
            pretrain.train_and_evaluate(config, tmp_path)
    finally:
        pretrain.Checkpointer = original
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert find_checkpoint(tmp_path).name == "2"
    assert pretrain.train_and_evaluate(config, tmp_path)["steps"] == 6


@pytest.mark.parametrize(
    "path", sorted(pathlib.Path("configs/pretrain").glob("*.py")), ids=lambda path: path.stem
)
@pytest.mark.parametrize("argument", ["", "runlocal"])
def test_every_config_resolves_and_its_docstring_says_what_is_needed(path, argument):
    import importlib

    module = importlib.import_module(f"configs.pretrain.{path.stem}")
    config = module.get_config(argument)
    bert_jax.BertConfig.named(
        config.model.size, **{k: v for k, v in config.model.items() if k != "size"}
    )
    for promise in ("Source:", "Expected time:", "Expected result:", "python -m bert_jax.pretrain"):
        assert promise in module.__doc__, f"{path}: its docstring lacks {promise!r}"
    with pytest.raises(ValueError, match="after the colon"):
        module.get_config("runlocl")
