"""One table of what can be wrong with a user's input, and the error for each.

An error says what was wrong, where, what was expected, and how to fix it. After the table come the
cases that must also leave the workdir intact.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import resource
import shutil
import signal

import jax
import numpy as np
import pytest

from bert_jax import pretrain
from bert_jax.corpus.build import CorpusConfig, build_corpus
from bert_jax.data.rows import CorpusError
from bert_jax.runtime.command_line import CheckpointError, NonFiniteLoss
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.checkpoint import find_checkpoint
from bert_jax.training.metrics import MetricsWriter
from bert_jax.training.workdir import claim_workdir
from tests.helpers import WORDS, random_text, saved_params, small_config, write_vocabulary


@dataclasses.dataclass
class Given:
    """Valid input, `directory`/{text.txt,vocab.txt,corpus}, for a case to damage."""

    directory: pathlib.Path

    def path(self, name: str) -> pathlib.Path:
        return self.directory / name

    def build(self, text: str | bytes | None = None, output: str = "new", **settings) -> None:
        """Builds a corpus of `text` (None: of text.txt)."""
        path = self.path("text.txt")
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        given = {"max_seq_length": 64, "sentences": "lines", "heldout_fraction": 0.2} | settings
        build_corpus(
            str(path),
            load_tokenizer(self.path("vocab.txt")),
            self.path(output),
            CorpusConfig(**given),
            num_processes=1,
        )

    def train(self, **changes) -> None:
        """Trains on the corpus; `changes` are config fields, nested ones as `model__size`."""
        config = small_config(self.path("corpus")).unlock()
        for name, value in changes.items():
            config.update_from_flattened_dict({name.replace("__", "."): value})
        pretrain.train_and_evaluate(config.lock(), self.path("workdir"))

    def edit(self, name: str, change) -> None:
        """Applies `change` to the bytes of the one file that matches `name`."""
        (path,) = self.directory.glob(name)
        path.write_bytes(change(path.read_bytes()))


@contextlib.contextmanager
def full_disk(size: int = 1 << 16):
    """Limits files to `size` bytes, beyond which the kernel reports an error as for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# Text and vocabulary.
def missing_input(given):
    given.path("text.txt").unlink()
    given.build()


def empty_input(given):
    given.build("")


def blank_input(given):
    given.build("\n \n")


def byte_that_is_not_utf8(given):
    given.build(b"good\nb\xffd\n")


def document_of_one_sentence(given):
    given.build("the river\n", heldout_fraction=0)


def vocabulary_without_mask(given):
    given.edit("vocab.txt", lambda content: content.replace(b"[MASK]", b"mask"))
    given.build()


def disk_full_while_building(given):
    given.path("text.txt").write_text(random_text(2000))
    with full_disk():
        given.build()


# Corpus.
def missing_corpus(given):
    given.train(corpus=str(given.path("nowhere")))


def no_corpus(given):
    given.train(corpus="")


def unfinished_corpus(given):
    given.path("corpus/manifest.json").unlink()
    given.train()


def missing_shard(given):
    given.path("corpus/train-00000-of-00001.array_record").unlink()
    given.train()


def truncated_shard(given):
    given.edit("corpus/train-*", lambda content: content[:-100])
    given.train()


def damaged_shard(given):
    # The same size with other bytes in the blocks.
    given.edit("corpus/train-*", lambda content: content[:200] + bytes(len(content) - 200))
    given.train()


def vocabulary_of_another_corpus(given):
    write_vocabulary(given.path("corpus/vocab.txt"), WORDS[::-1])
    given.train()


def corpus_vocabulary_without_mask(given):
    given.edit("corpus/vocab.txt", lambda content: content.replace(b"[MASK]", b"mask"))
    given.train()


def two_vocabularies(given):
    write_vocabulary(given.path("vocab.txt"), [*WORDS, "zebra"])
    given.build(output="other")
    given.train(long_phase__num_steps=2, long_phase__corpus=str(given.path("other")))


def token_id_outside_the_vocabulary(given):
    # A vocabulary without its last piece, and a manifest changed to match.
    given.edit("corpus/vocab.txt", lambda content: content.rstrip().rsplit(b"\n", 1)[0] + b"\n")
    manifest = json.loads(given.path("corpus/manifest.json").read_text())
    manifest["vocabulary"]["size"] -= 1
    content = given.path("corpus/vocab.txt").read_bytes()
    manifest["vocabulary"]["sha256"] = hashlib.sha256(content).hexdigest()
    given.path("corpus/manifest.json").write_text(json.dumps(manifest))
    given.train()


# Configuration.
def unknown_config_field(given):
    config = small_config(given.path("corpus"))
    config.learning_rat = 1


def workdir_of_another_configuration(given):
    given.train(num_steps=2)
    given.train(num_steps=2, learning_rate=0.5)


def workdir_of_another_configuration_without_its_config(given):
    given.train(num_steps=2)
    given.path("workdir/config.json").unlink()
    given.train(num_steps=2, learning_rate=0.5)


def checkpoint_without_its_config(given):
    given.train(num_steps=2)
    given.path("workdir/checkpoints/2/config/metadata").write_text("{")
    given.train(num_steps=2)


def checkpoint_without_its_last_file(given):
    given.train(num_steps=2)
    files = given.path("workdir/checkpoints/2/training").rglob("d/*")
    max(files, key=lambda path: path.stat().st_size).unlink()
    given.path("workdir/result.json").unlink()
    given.train(num_steps=2)


def workdir_that_is_a_file(given):
    given.path("workdir").write_text("")
    given.train()


def disk_full_at_the_config(given):
    with full_disk(2):
        claim_workdir(given.path("workdir"), {})


def disk_full_at_the_token(given):
    with full_disk(10):
        claim_workdir(given.path("workdir"), {})


def disk_full_at_the_metrics(given):
    writer = MetricsWriter(given.directory)
    with full_disk(10):
        writer.write(1, {"loss": 1.0})


def disk_full_at_the_tensorboard_files(given):
    writer = MetricsWriter(given.directory)
    with full_disk(30):
        writer.write(1, {"loss": 1.0})


def rows_longer_than_the_position_table(given):
    given.train(model__max_position_embeddings=32)


BAD_INPUT = {
    missing_input: (FileNotFoundError, r"text\.txt.* matches no file"),
    empty_input: (ValueError, r"text\.txt is empty"),
    blank_input: (ValueError, "the input holds no document: it is blank"),
    byte_that_is_not_utf8: (ValueError, r"text\.txt.*line 2, byte 6: 0xff is not UTF-8"),
    document_of_one_sentence: (ValueError, "1 of 1 documents .* no sentence pair.*give more text"),
    vocabulary_without_mask: (ValueError, r"vocab\.txt lacks \[MASK\]"),
    disk_full_while_building: (OSError, r"cannot write .*new/\.spill/.*; free the disk"),
    missing_corpus: (FileNotFoundError, r"nowhere.*prepare_corpus"),
    no_corpus: (ValueError, r"--config\.corpus=DIR"),
    unfinished_corpus: (FileNotFoundError, r"manifest\.json is missing.*interrupted.*build it"),
    missing_shard: (CorpusError, r"train-00000-of-00001\.array_record is missing; build"),
    truncated_shard: (CorpusError, r"train-00000.*bytes, expected .*cut off"),
    damaged_shard: (CorpusError, r"train-00000.*has 0 blocks, expected 8; build"),
    vocabulary_of_another_corpus: (CorpusError, r"vocab\.txt has SHA-256 .* corpus was built"),
    corpus_vocabulary_without_mask: (CorpusError, r"vocab\.txt.*\[MASK\]"),
    two_vocabularies: (ValueError, "built with different vocabularies"),
    token_id_outside_the_vocabulary: (CorpusError, "token id 33 is outside .* vocabulary of 33"),
    unknown_config_field: (AttributeError, 'learning_rat.*Did you mean "learning_rate"'),
    workdir_of_another_configuration: (
        ValueError,
        r"learning_rate: 0\.0001 in .*checkpoints/2, 0\.5 now.*another --workdir",
    ),
    workdir_of_another_configuration_without_its_config: (ValueError, "learning_rate: .*0.5 now"),
    checkpoint_without_its_config: (CheckpointError, "2 could not be read.*Remove it to resume"),
    checkpoint_without_its_last_file: (CheckpointError, "2 could not be restored.*remove it"),
    workdir_that_is_a_file: (OSError, r"--workdir=.*exists.*Expected a writable directory"),
    disk_full_at_the_config: (
        OSError,
        r"workdir/config\.json could not be written: .*Free",
    ),
    disk_full_at_the_token: (OSError, r"workdir/\.shared could not be written: .*Free"),
    disk_full_at_the_metrics: (
        OSError,
        r"/metrics\.jsonl could not be written: .*Free",
    ),
    disk_full_at_the_tensorboard_files: (OSError, r"/tensorboard could not be written"),
    rows_longer_than_the_position_table: (
        ValueError,
        "rows of 64 tokens.*table ends at 32.*max_position",
    ),
}
# Single fields and their errors.
BAD_FIELDS = [
    ({"max_predictions": 65}, "max_predictions is 65, but the rows .* 1 to 64"),
    ({"num_steps": 0, "warmup_steps": 0}, "num_steps and long_phase.num_steps are both 0"),
    ({"num_steps": -5}, r"--config\.num_steps=-5: expected at least 0"),
    ({"batch_size": 0}, r"--config\.batch_size=0: expected at least 1"),
    ({"eval_batch_size": -8}, r"--config\.eval_batch_size=-8: expected at least 1"),
    ({"per_device_batch_size": -4}, r"per_device_batch_size=-4: expected at least 0"),
    ({"checkpoint_every": 0}, r"--config\.checkpoint_every=0: expected at least 1"),
    ({"masking__rate": 15.0}, r"--config\.masking\.rate=15\.0: expected .* at most 0\.999"),
    ({"learning_rate": -1.0}, r"--config\.learning_rate=-1\.0: expected at least"),
    ({"clip_norm": 0.0}, r"--config\.clip_norm=0\.0: expected at least"),
    ({"warmup_steps": 1000}, r"--config\.warmup_steps=1000: expected .* at most 6"),
    ({"batch_size": 12}, "batch_size 12 is not divisible by 8 devices"),
    ({"eval_batch_size": 12}, "batch_size 12 is not divisible by the 8 devices"),
    (
        {"batch_size": 16, "per_device_batch_size": 3},
        "16 is not divisible by 8 devices x per_device_batch_size 3",
    ),
    ({"model__size": "huge"}, "unknown model size 'huge': expected one of tiny"),
    ({"optimizer": "adam"}, "unknown optimizer 'adam': expected one of bert_adam"),
    ({"masking__unit": "word"}, r"masking\.unit is 'word': expected one of token"),
    ({"mesh__data": 16}, "does not divide the 8 devices"),
]


@pytest.fixture
def given(corpus, tmp_path):
    shutil.copytree(corpus.parent, tmp_path / "input")
    return Given(tmp_path / "input")


@pytest.mark.parametrize("case", BAD_INPUT, ids=lambda case: case.__name__)
def test_bad_input_is_a_clear_error(case, given):
    error, message = BAD_INPUT[case]
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        case(given)


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_bad_field_is_a_clear_error(fields, message, given):
    with pytest.raises(ValueError, match=message):
        given.train(**fields)
    assert not given.path("workdir").exists()


def test_document_of_one_sentence_among_others_is_counted(given):
    given.build("the river .\n\n" + random_text(20))
    manifest = json.loads(given.path("new/manifest.json").read_text())
    splits = manifest["splits"].values()
    assert sum(split["documents"] for split in splits) == 21
    assert sum(split["dropped"].get("documents_without_pairs", 0) for split in splits) <= 1


def test_corpus_can_be_built_after_the_disk_was_full(given):
    with pytest.raises(OSError):
        disk_full_while_building(given)
    assert not given.path("new/manifest.json").exists()
    given.build()


def test_non_finite_loss_names_the_step_and_keeps_the_last_good_checkpoint(given):
    with pytest.raises(NonFiniteLoss, match=r"of step \d+ is (nan|inf)"):
        given.train(learning_rate=1e38, clip_norm=1e30, warmup_steps=4, checkpoint_every=1)
    squares = [
        np.sum(np.square(leaf)) for leaf in jax.tree.leaves(saved_params(given.path("workdir")))
    ]
    assert np.isfinite(squares).all()


def test_full_disk_in_a_save_keeps_the_last_checkpoint_and_the_run_can_be_resumed(
    given, monkeypatch
):
    with contextlib.ExitStack() as disk, monkeypatch.context() as patched:

        class FillingCheckpointer(pretrain.Checkpointer):
            def save(self, state):
                if int(state.step) == 4:
                    self.wait()
                    disk.enter_context(full_disk())
                super().save(state)

        patched.setattr(pretrain, "Checkpointer", FillingCheckpointer)
        with pytest.raises(CheckpointError, match=r"failed: .* is step 2; free the disk"):
            given.train()
    workdir = given.path("workdir")
    assert find_checkpoint(workdir).name == "2"
    given.train()
    assert json.loads((workdir / "result.json").read_text())["steps"] == 6
