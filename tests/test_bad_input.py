"""A table of invalid user input, and the error for each, where a program or `load` meets it.

What a smaller function refuses, such as a reader of files, is beside its own tests. After the table
follow the cases that must also leave the workdir intact.
"""

import contextlib
import dataclasses
import importlib
import json
import pathlib
import re
import resource
import shutil
import signal

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

import bert_jax
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax import finetune, pretrain, sweep
from bert_jax.checkpoints.native import Checkpointer, find_checkpoint, saved_steps
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain.fields import make_later_phases
from bert_jax.data.rows import CorpusError
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.runtime.errors import CheckpointError, Diverged
from bert_jax.tasks.text_classification import get_task
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.metrics import MetricsWriter
from bert_jax.training.phases import check_numbers, open_phases
from bert_jax.training.pretrain_setup import setup_pretraining
from bert_jax.training.state import TrainState
from bert_jax.training.workdir import claim_workdir
from tests.helpers.corpora import WORDS, random_text, write_tfds, write_vocabulary
from tests.helpers.models import small_model_config, write_weights
from tests.helpers.runs import saved_params, small_config


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
        fields = {"max_seq_length": 64, "sentences": "lines", "heldout_fraction": 0.2} | settings
        build_corpus(
            str(path),
            load_tokenizer(self.path("vocab.txt")),
            self.path(output),
            CorpusConfig(**fields),
            num_processes=1,
        )

    def train(self, **changes) -> None:
        """Trains on the corpus; `changes` are config fields, nested ones as `model__size`."""
        config = small_config(self.path("corpus")).unlock()
        if any(name.startswith("later_phases") for name in changes):
            config.later_phases = make_later_phases({"num_steps": 2})
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
def missing_input(inputs):
    inputs.path("text.txt").unlink()
    inputs.build()


def vocabulary_without_mask(inputs):
    inputs.edit("vocab.txt", lambda content: content.replace(b"[MASK]", b"mask"))
    inputs.build()


def tfds_that_is_not_prepared(inputs):
    config = CorpusConfig(data_dir=str(inputs.directory))
    build_corpus("tfds:news", load_tokenizer(inputs.path("vocab.txt")), inputs.path("new"), config)


def disk_full_while_building(inputs):
    inputs.path("text.txt").write_text(random_text(2000))
    with full_disk():
        inputs.build()


# Corpus.
def missing_corpus(inputs):
    inputs.train(corpus=str(inputs.path("nowhere")))


def no_corpus(inputs):
    inputs.train(corpus="")


def damaged_shard(inputs):
    # The same size with other bytes in the blocks.
    inputs.edit("corpus/train-*", lambda content: content[:200] + bytes(len(content) - 200))
    inputs.train()


def corpus_vocabulary_without_mask(inputs):
    inputs.edit("corpus/tokenizer.json", lambda content: content.replace(b"[MASK]", b"[MUSK]"))
    inputs.train()


def train_in_two_phases(inputs, **settings):
    """Trains on the corpus, then on another one that is built with other settings."""
    inputs.build(output="other", **settings)
    inputs.train(long_phase__num_steps=2, long_phase__corpus=str(inputs.path("other")))


def two_vocabularies(inputs):
    write_vocabulary(inputs.path("vocab.txt"), [*WORDS, "zebra"])
    train_in_two_phases(inputs)


def later_rows_longer_than_the_model(inputs):
    inputs.build(output="long", max_seq_length=128)
    inputs.train(
        model__max_position_embeddings=64,
        later_phases__phase_3__corpus=str(inputs.path("long")),
    )


def mixture_of_two_vocabularies(inputs):
    write_vocabulary(inputs.path("vocab.txt"), [*WORDS, "zebra"])
    inputs.build(output="other", max_sequences=4)
    inputs.train(corpus=f"{inputs.path('corpus')},{inputs.path('other')}")


def mixture_of_two_lengths(inputs):
    inputs.build(output="other", max_seq_length=32)
    inputs.train(corpus=f"{inputs.path('corpus')},{inputs.path('other')}")


def mixture_of_one_corpus_twice(inputs):
    corpus = inputs.path("corpus")
    inputs.train(corpus=f"{corpus}:0.5,{corpus}/:0.5")


def mixture_of_next_and_swapped_sentences(inputs):
    inputs.build(output="other", rows="sentence_order", max_sequences=4)
    inputs.train(corpus=f"{inputs.path('corpus')},{inputs.path('other')}")


def phases_with_different_seeds(inputs):
    train_in_two_phases(inputs, seed=1)


def phases_with_different_heldout_fractions(inputs):
    train_in_two_phases(inputs, heldout_fraction=0.1)


# Weights to start from.
def missing_weights(inputs):
    inputs.train(init_from=str(inputs.path("nowhere")))


def weights_of_another_vocabulary(inputs):
    write_vocabulary(inputs.path("vocab.txt"), [*WORDS, "zebra"])
    write_weights(inputs.path("weights"), inputs.path("vocab.txt"))
    inputs.train(init_from=str(inputs.path("weights")))


def weights_of_another_architecture(inputs):
    write_weights(inputs.path("weights"), inputs.path("vocab.txt"), num_layers=2)
    inputs.train(init_from=str(inputs.path("weights")))


def positions_of_another_vocabulary(inputs):
    config = small_config(inputs.path("corpus")).unlock()
    config.model.update({"family": "roberta", "position_offset": 2})
    pretrain.train_and_evaluate(config.lock(), inputs.path("workdir"))


def weights_of_another_objective(inputs):
    write_weights(inputs.path("weights"), inputs.path("vocab.txt"), causal=True)
    inputs.train(init_from=str(inputs.path("weights")))


def weights_without_optimizer_state(inputs):
    write_weights(inputs.path("weights"), inputs.path("vocab.txt"))
    inputs.train(init_from=str(inputs.path("weights")), init_optimizer=True)


def optimizer_state_of_a_fine_tuning_run(inputs):
    write_weights(inputs.path("weights"), inputs.path("vocab.txt"), head=("north", "south"))
    model = read_model(inputs.path("weights"))
    settings = model.settings | {"optimizer": "bert_adam", "has_training_state": True}
    checkpointer = Checkpointer(inputs.path("tuned"), settings, model.tokenizer, keep_last=1)
    moments = {"mu": model.params, "nu": model.params}
    checkpointer.save(TrainState(np.int32(2), model.params, moments))
    checkpointer.close()
    inputs.train(init_from=str(inputs.path("tuned")), init_optimizer=True)


def moments_of_weights_alone(inputs):
    write_weights(inputs.path("weights"), inputs.path("vocab.txt"))
    weights = str(inputs.path("weights"))
    inputs.train(init_from=weights, init_optimizer_from=weights)


def corpus_without_sentence_pairs(inputs):
    inputs.build(rows="full_sentences")
    inputs.train(corpus=str(inputs.path("new")))


def pairs_of_a_model_with_one_segment(inputs):
    config = small_config(inputs.path("corpus")).unlock()
    config.model.update({"type_vocab_size": 1})
    pretrain.train_and_evaluate(config.lock(), inputs.path("workdir"))


def unknown_kind_of_rows(inputs):
    inputs.build(rows="sentences")


# Configuration.
def too_few_predictions_on_long_rows(inputs):
    corpus = str(inputs.path("corpus"))
    fields = {"num_steps": 2, "corpus": corpus, "max_predictions": 1}
    inputs.train(**{f"long_phase__{name}": value for name, value in fields.items()})


def unknown_config_field(inputs):
    config = small_config(inputs.path("corpus"))
    config.learning_rat = 1


def pretraining_configuration_without_a_field(inputs):
    config = small_config(inputs.path("corpus")).unlock()
    del config.tracker
    pretrain.train_and_evaluate(config, inputs.path("workdir"))


def finetuning_configuration_without_a_field(inputs):
    config = text_classification.get_config()
    del config.tracker
    finetune.train_and_evaluate(config, inputs.path("workdir"))


def sweep_over_a_configuration_without_fields(inputs):
    config = ConfigDict({"base": text_classification.get_config()})
    config.grid = ConfigDict({"learning_rate": (1e-4, 2e-4)})
    del config.base.num_seeds, config.base.data.text
    sweep.sweep(config, inputs.path("workdir"))


def workdir_of_another_configuration_without_its_config(inputs):
    inputs.train(num_steps=2)
    inputs.path("workdir/config.json").unlink()
    inputs.train(num_steps=2, learning_rate=0.5)


def checkpoint_without_its_config(inputs):
    inputs.train(num_steps=2)
    inputs.path("workdir/checkpoints/2/config/metadata").write_text("{")
    inputs.train(num_steps=2)


def workdir_that_is_a_file(inputs):
    inputs.path("workdir").write_text("")
    inputs.train()


def disk_full_at_the_config(inputs):
    with full_disk(2):
        claim_workdir(inputs.path("workdir"), {})


def disk_full_at_the_token(inputs):
    with full_disk(10):
        claim_workdir(inputs.path("workdir"), {})


def disk_full_at_the_metrics(inputs):
    writer = MetricsWriter(inputs.directory)
    with full_disk(10):
        writer.write(1, {"loss": 1.0})


def disk_full_at_the_tensorboard_files(inputs):
    writer = MetricsWriter(inputs.directory)
    with full_disk(30):
        writer.write(1, {"loss": 1.0})


def rows_longer_than_the_position_table(inputs):
    inputs.train(model__max_position_embeddings=32)


# Trained models.
def number_in_place_of_a_path(inputs):
    bert_jax.load(3)


def number_in_place_of_words(inputs):
    loaded(inputs, "tagging", ["O", "B"]).tag(5)


def text_of_wrong_type_for_attention(inputs):
    loaded(inputs, "embedding", []).attention(["the river", None])


def unknown_pooling(inputs):
    loaded(inputs, "embedding", []).encode("the river", pooling="min")


def left_to_right_model(inputs):
    write_weights(inputs.path("weights"), inputs.path("vocab.txt"), causal=True)
    return bert_jax.load(inputs.path("weights"))


def first_token_of_a_left_to_right_model(inputs):
    left_to_right_model(inputs).encode("the river", pooling="cls")


def mask_for_a_left_to_right_model(inputs):
    left_to_right_model(inputs).fill_mask("the [MASK]")


def loaded(inputs, task, labels):
    """Returns a model that has only the settings of a head, which are checked first."""
    settings = {"head": {"task": task, "labels": labels}}
    tokenizer = load_tokenizer(inputs.path("vocab.txt"))
    return PretrainedModel(small_model_config(), tokenizer, {"encoder": {}}, settings)


def fewer_contexts_than_questions(inputs):
    loaded(inputs, "span", ["start", "end"]).answer(["what", "who", "where"], ["a", "b"])


def words_in_place_of_a_context(inputs):
    loaded(inputs, "span", ["start", "end"]).answer("what", [["the", "river"]])


# Of each case the type of the error, and what its message names: a file, a place in it, a field.
BAD_INPUT = {
    number_in_place_of_a_path: (TypeError, "got 3"),
    number_in_place_of_words: (TypeError, "words", "got 5"),
    text_of_wrong_type_for_attention: (TypeError, "texts"),
    unknown_pooling: (ValueError, "pooling", "'cls'", "'min'"),
    first_token_of_a_left_to_right_model: (ValueError, "pooling", "'mean'"),
    mask_for_a_left_to_right_model: (ValueError, "left to right", "masks"),
    fewer_contexts_than_questions: (ValueError, "3 questions", "2 contexts"),
    words_in_place_of_a_context: (TypeError, "context"),
    missing_input: (FileNotFoundError, "text.txt"),
    vocabulary_without_mask: (ValueError, "vocab.txt", "[MASK]"),
    tfds_that_is_not_prepared: (FileNotFoundError, "tfds:news", "tfds build news"),
    disk_full_while_building: (OSError, "new/.spill/", "free disk space"),
    missing_corpus: (FileNotFoundError, "nowhere", "prepare_corpus"),
    no_corpus: (ValueError, "config.corpus"),
    damaged_shard: (CorpusError, "train-00000", "damaged"),
    corpus_vocabulary_without_mask: (CorpusError, "tokenizer.json", "SHA-256"),
    two_vocabularies: (ValueError, "vocab"),
    later_rows_longer_than_the_model: (ValueError, "128", "max_position_embeddings is 64"),
    mixture_of_two_vocabularies: (ValueError, "/corpus and ", "/other differ in vocab"),
    mixture_of_two_lengths: (ValueError, "cannot be mixed: max_seq_length is 32 and 64"),
    mixture_of_one_corpus_twice: (ValueError, "/corpus are the same corpus; list it once"),
    mixture_of_next_and_swapped_sentences: (ValueError, "/other has labels of swapped sentences"),
    phases_with_different_seeds: (ValueError, "seed"),
    phases_with_different_heldout_fractions: (ValueError, "heldout_fraction"),
    missing_weights: (FileNotFoundError, "nowhere"),
    weights_of_another_vocabulary: (ValueError, "tokenizer", "/weights"),
    positions_of_another_vocabulary: (ValueError, "position_offset", "roberta"),
    weights_of_another_architecture: (ValueError, "/weights", "config.model.num_layers=2"),
    weights_of_another_objective: (ValueError, "/weights", "config.objective=left_to_right"),
    corpus_without_sentence_pairs: (ValueError, "/new", "config.next_sentence=False"),
    pairs_of_a_model_with_one_segment: (ValueError, "type_vocab_size"),
    unknown_kind_of_rows: (ValueError, "rows='sentences'", "sentence_pairs"),
    weights_without_optimizer_state: (ValueError, "/weights", "init_optimizer"),
    optimizer_state_of_a_fine_tuning_run: (ValueError, "/tuned", "init_optimizer"),
    moments_of_weights_alone: (ValueError, "/weights", "config.init_optimizer_from", "bert_adam"),
    too_few_predictions_on_long_rows: (ValueError, "config.long_phase.max_predictions=1", "10"),
    unknown_config_field: (AttributeError, "learning_rat", '"learning_rate"'),
    pretraining_configuration_without_a_field: (ValueError, "config.tracker", "configs/pretrain"),
    finetuning_configuration_without_a_field: (ValueError, "config.tracker", "configs/finetune"),
    sweep_over_a_configuration_without_fields: (
        ValueError,
        "config.base.data.text",
        "config.base.num_seeds",
    ),
    workdir_of_another_configuration_without_its_config: (ValueError, "learning_rate", "0.5"),
    checkpoint_without_its_config: (CheckpointError, "checkpoints/2"),
    workdir_that_is_a_file: (OSError, "workdir"),
    disk_full_at_the_config: (OSError, "workdir/config.json"),
    disk_full_at_the_token: (OSError, "workdir/.shared"),
    disk_full_at_the_metrics: (OSError, "/metrics.jsonl"),
    disk_full_at_the_tensorboard_files: (OSError, "/tensorboard"),
    rows_longer_than_the_position_table: (ValueError, "64", "max_position_embeddings is 32"),
}


# Fields of pre-training on rows of 64 tokens and 8 devices that do not fit together or are unknown,
# and what the error names. `test_every_number_is_checked_and_named` has the numbers.
BAD_FIELDS = [
    ({"objective": "distillation", "next_sentence": False}, "config.distillation.teacher"),
    ({"objective": "distillation"}, "next_sentence"),
    ({"distillation__teacher": "x"}, "distillation.teacher=x"),
    ({"max_predictions": 65}, "config.max_predictions=65"),
    ({"max_predictions": 20, "masking__rate": 0.4}, "config.max_predictions=20: expected 26"),
    ({"decay_from": "start"}, "decay_from"),
    ({"long_phase__warmup_steps": 7}, "long_phase.warmup_steps=7"),
    ({"later_phases__phase_3__batch_size": 0}, "config.later_phases.phase_3.batch_size=0"),
    (
        {"later_phases__phase_3__warmup_steps": 3},
        "config.later_phases.phase_3.warmup_steps=3: expected at least 0 and at most 2",
    ),
    ({"later_phases__phase_3__max_predictions": 5}, "phase_3.max_predictions=5: expected 10"),
    ({"later_phases__phase_3__max_seq_length": 128}, "phase_3.max_seq_length=128: set config.la"),
    ({"max_seq_length": 65}, "rows of 64 tokens, but config.max_seq_length=65: set config.corpus"),
    ({"later_phases__phase_3__num_stepz": 1}, "config.later_phases.phase_3.num_stepz: a phase has"),
    (
        {"later_phases__phase_4": {"num_steps": 1}},
        "config.later_phases.phase_4.batch_size: it is miss",
    ),
    ({"later_phases__decay": {"num_steps": 1}}, "config.later_phases.decay: not phase_3"),
    ({"later_phases__phase_2": {"num_steps": 1}}, "config.later_phases.phase_2: not phase_3"),
    ({"later_phases__phase_3__batch_size": 12}, "config.later_phases.phase_3.batch_size 12 is not"),
    (
        {"num_steps": 5, "warmup_steps": 2, "decay_steps": 4},
        "config.decay_steps=4: expected at least 0 and at most 3, which is the steps after the",
    ),
    ({"decay_steps": 2, "decay_shape": "cosine"}, "decay_shape 'cosine'"),
    ({"decay_shape": "linear"}, "set decay_steps"),
    (
        {"decay_steps": 2, "decay_power": 0.5},
        "config.decay_power=0.5 has no effect with decay_steps",
    ),
    ({"decay_steps": 2, "decay_from": "warmup_end"}, "set config.decay_from=step_0"),
    ({"later_phases__phase_3__model__global_rope_base": 1e5}, "bert has no such field"),
    (
        {"later_phases__phase_3__model__max_position_embeddings": 600},
        "config.later_phases.phase_3.model changes encoder/embeddings/position_embedding",
    ),
    (
        {"corpus": "a:0.5,books:0"},
        "config.corpus=a:0.5,books:0: the weight of books is 0; expected",
    ),
    ({"corpus": "a:0.5,books:nan"}, "the weight of books is nan; expected a number above 0"),
    ({"corpus": "a:0.5,gs://books"}, "gs://books has no weight; give one to each directory, or"),
    ({"corpus": "a,b,a"}, "a is listed twice: list it once, with the sum of the weights"),
    ({"corpus": "a,b,"}, "expected DIR, DIR:WEIGHT,DIR:WEIGHT or DIR,DIR, got ''"),
    ({"corpus_temperature": 3.0}, "corpus_temperature=3.0 has no effect: no phase has a mixture"),
    ({"corpus": "a,b", "corpus_temperature": 0.0}, "corpus_temperature=0.0"),
    ({"model__hidden_size": 100}, "hidden_size"),
    ({"init_optimizer": True}, "init_from"),
    ({"init_optimizer_from": "runs/base"}, "set config.init_from"),
    ({"model__size": None}, "config.model.size"),
    ({"num_steps": 0, "warmup_steps": 0}, "num_steps and long_phase.num_steps"),
    ({"profile_steps": 7}, "config.profile_steps=7"),
    ({"model__kernels": "flash"}, "kernels"),
    ({"model__architecture": "brt"}, "architecture=brt"),
    ({"masking__rate": 15.0}, "config.masking.rate=15.0"),
    ({"warmup_steps": 1000}, "config.warmup_steps=1000"),
    (
        {"num_steps": 3, "long_phase__num_steps": 3, "warmup_steps": 4}
        | {"long_phase__learning_rate": 1e-4},  # The first phase has a schedule of its own.
        "config.warmup_steps=4: expected at least 0 and at most 3",
    ),
    ({"beta1": 1.0}, "config.beta1=1.0"),
    ({"batch_size": 12}, "batch_size 12"),
    ({"eval_batch_size": 12}, "eval_batch_size=12"),
    ({"batch_size": 16, "per_device_batch_size": 3}, "per_device_batch_size 3"),
    ({"model__size": "huge"}, "model size 'huge'"),
    ({"optimizer": "adam"}, "optimizer 'adam'"),
    ({"masking__unit": "word"}, "masking.unit"),
    ({"masking__mask_fraction": 1.0}, "keep_fraction and random_fraction are 1.0, 0.1, 0.1"),
    ({"masking__keep_fraction": -0.1, "masking__random_fraction": 0.3}, "0.8, -0.1, 0.3"),
    ({"objective": "causal"}, "config.objective=causal"),
    ({"objective": "span_boundary"}, "config.next_sentence=False"),
    ({"objective": "span_boundary", "next_sentence": False}, "config.masking.unit"),
    ({"objective": "masked_diffusion"}, "config.next_sentence=False"),
    (
        {"objective": "left_to_right", "model": {"architecture": "xlnet", "size": "base"}},
        "model.architecture=xlnet has no next-sentence loss: set config.next_sentence=False",
    ),
    ({"objective": "replaced_tokens"}, "config.generator"),
    ({"mesh__data": 16}, "8 devices"),
]


# The same of fine-tuning, on two labels, with an encoder of one layer.
BAD_FINETUNING = [
    ({"distillation__alpha": 1.5}, "distillation.alpha=1.5"),
    ({"teacher": "x", "data__label_separator": "|"}, "teacher=x"),
    ({"decay_from": "end"}, "decay_from"),
    ({"num_epochs": float("inf")}, "num_epochs=inf"),
    ({"layer_decay": 1.1}, "config.layer_decay=1.1"),
    ({"freeze_layers": 2}, "config.freeze_layers=2: expected at least 0 and at most 1"),
    ({"lora__rank": -1}, "config.lora.rank=-1"),
    ({"lora__alpha": 8.0}, "config.lora.alpha=8.0: expected 0 without LoRA"),
    ({"lora__rank": 2, "layer_decay": 0.9}, "config.layer_decay=0.9: expected 1 with config.lora"),
    ({"lora__rank": 2, "freeze_layers": 1}, "config.freeze_layers=1: expected 0 with config.lora"),
    ({"lora__rank": 2, "lora__targets": "quary"}, "config.lora.targets='quary'"),
    ({"lora__rank": 2, "model__kernels": "tpu"}, "config.model.kernels=tpu"),
    ({"class_weights": (1.0,)}, "class_weights=1.0"),
    ({"class_weights": ("even",)}, "class_weights=even"),
    ({"class_weights": (1, -1)}, "class_weights=1,-1"),
    ({"class_weights": (1, 2), "data__regression": True}, "class_weights=1,2"),
    ({"data__label_separator": "|", "data__regression": True}, "data.regression"),
    ({"data__label_separator": "|", "data__labels": ("king", "city")}, "data.csv, line 3"),
]

# Files of examples to fine-tune on: the configuration, the file's name and content, and the error.
QUESTION = '{"question": "the king", "context": "the old king", '
BAD_EXAMPLES = [
    (
        "text_classification",
        "train.jsonl",
        '{"text": "the", "label": NaN}\n',
        r"train\.jsonl, line 1: not JSON \(NaN is not valid JSON: write null for a missing value\)",
    ),
    (
        "text_classification",
        "train.jsonl",
        '{"text": "the", "label": -Infinity}\n',
        r"line 1: not JSON \(-Infinity is not valid JSON",
    ),
    (
        "text_classification",
        "train.tsv",
        'text\tlabel\n"old\nroad"\ta\n"never ends\tb\n',
        r"train\.tsv, line 2: expected 2 fields, .*, found 1: line 4 has a quotation mark in its",
    ),
    (
        "text_classification",
        "train.tsv",
        'text\tlabel\n"old\ta\nroad"\tb\n',
        r"train\.tsv, line 2: the quotation mark may quote a field or be part of .*: quote all",
    ),
    (
        "tagging",
        "train.jsonl",
        '{"tokens": ["a"], "tags": ["O", "O"]}\n',
        "line 1: the lengths of 'tokens' and 'tags' are 1 and 2: give each word one tag",
    ),
    (
        "tagging",
        "train.jsonl",
        '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["a"]}\n',
        "line 2: give all lines 'tags', or none: only some have them",
    ),
    (
        "tagging",
        "train.txt",
        "a B-X\nb L-X\nc S-X\n",
        r"1 of 3 tags are not BIOES \(line 2: .L-X.\), .* 1 not BILOU: use one",
    ),
    (
        "squad",
        "train.jsonl",
        '{"question": "the king", "text": "the old king"}\n',
        r"train\.jsonl, line 1: 'context' is missing; found question, text",
    ),
    (
        "squad",
        "train.jsonl",
        QUESTION + '"answers": "king"}\n',
        "'answers' must be of type list, found str",
    ),
    (
        "squad",
        "train.jsonl",
        QUESTION + '"answers": {"text": ["king"], "answer_start": [8, 9]}}\n',
        r"train\.jsonl, line 1: 'text' must be of type str, found none",
    ),
    (
        "squad",
        "train.json",
        QUESTION + "}\n" + QUESTION + "}\n",
        r"not JSON: .* JSON lines to \.jsonl",
    ),
]


@pytest.fixture
def inputs(corpus, tmp_path):
    shutil.copytree(corpus.parent, tmp_path / "input")
    return Given(tmp_path / "input")


# These resume a run of training, which takes seconds.
RESUMING = (
    workdir_of_another_configuration_without_its_config,
    checkpoint_without_its_config,
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case in RESUMING else case
        for case in BAD_INPUT
    ],
    ids=lambda case: case.__name__,
)
def test_bad_input_is_a_clear_error(case, inputs):
    error, *names = BAD_INPUT[case]
    with pytest.raises(error) as raised:
        case(inputs)
    for name in names:
        assert name in str(raised.value)


@pytest.mark.parametrize(("fields", "name"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_bad_field_is_a_clear_error(fields, name, inputs):
    with pytest.raises(ValueError, match=re.escape(name)):
        inputs.train(**fields)
    assert not inputs.path("workdir").exists()


def numbers_of(config) -> dict[str, int | float]:
    """Returns the numeric fields of a configuration, with the paths of nested ones."""
    flat = flatten_dict(config.to_dict(), sep=".")
    return {name: value for name, value in flat.items() if type(value) in (int, float)}


def test_every_number_is_checked_and_named(corpus):
    """Neither a negative number nor NaN is accepted anywhere, and the error says where it is."""
    numbers = numbers_of(small_config(corpus))
    assert len(numbers) > 35
    for name, value in numbers.items():
        for bad in (-7,) if isinstance(value, int) else (-7.0, float("nan")):
            config = small_config(corpus).unlock()
            config.update_from_flattened_dict({name: bad})
            with pytest.raises(ValueError, match=name.rpartition(".")[2]):
                check_numbers(config)
                phases = open_phases(config)
                setup_pretraining(config, phases, phases[0].train.tokenizer)
                pytest.fail(f"{name}={bad} is accepted")


def test_every_number_of_fine_tuning_is_checked_and_named(inputs):
    inputs.path("data.csv").write_text("text,label\nking,king\nwar,war\n")
    weights = str(write_weights(inputs.path("weights"), inputs.path("vocab.txt")))
    for name, value in numbers_of(text_classification.get_config()).items():
        for bad in (-7,) if isinstance(value, int) else (-7.0, float("nan")):
            config = text_classification.get_config()
            config.init_from, config.data.train = weights, str(inputs.path("data.csv"))
            config.max_seq_length = 16
            config.update_from_flattened_dict({name: bad})
            with pytest.raises(ValueError, match=name.rpartition(".")[2]):
                finetune.prepare(config)
                pytest.fail(f"{name}={bad} is accepted")


@pytest.mark.parametrize(("fields", "message"), BAD_FINETUNING, ids=lambda value: str(value)[:40])
def test_bad_field_of_fine_tuning_is_a_clear_error(fields, message, inputs):
    is_number = fields.get("data__regression")
    text = "text,label\nking,1\nwar,2\n" if is_number else "text,label\nking,king\nwar,war\n"
    inputs.path("data.csv").write_text(text)
    config = text_classification.get_config()
    config.init_from = str(write_weights(inputs.path("weights"), inputs.path("vocab.txt")))
    config.max_seq_length, config.data.train = 16, str(inputs.path("data.csv"))
    for name, value in fields.items():
        config.update_from_flattened_dict({name.replace("__", "."): value})
    with pytest.raises(ValueError, match=re.escape(message)):
        finetune.prepare(config)


@pytest.mark.parametrize(("name", "file", "content", "message"), BAD_EXAMPLES)
def test_bad_examples_are_a_clear_error(name, file, content, message, inputs):
    config = importlib.import_module(f"configs.finetune.{name}").get_config()
    config.data.train = str(inputs.path(file))
    inputs.path(file).write_text(content)
    task = importlib.import_module(f"bert_jax.tasks.{config.task}")
    with pytest.raises(ValueError, match=message):
        task.get_task(config, load_tokenizer(inputs.path("vocab.txt")))


def test_tfds_set_prepared_as_tfrecord_is_an_error(inputs):
    features = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=2)}
    write_tfds(inputs.directory, "mine", {"train": [{"text": "a", "label": 1}]}, features, False)
    config = text_classification.get_config()
    config.data.train, config.data.data_dir = "tfds:mine", str(inputs.directory)
    with pytest.raises(ValueError, match=r"tfds:mine .*array_record"):
        get_task(config, load_tokenizer(inputs.path("vocab.txt")))


def test_document_of_one_sentence_among_others_is_counted(inputs):
    inputs.build("the river .\n\n" + random_text(20))
    manifest = json.loads(inputs.path("new/manifest.json").read_text())
    splits = manifest["splits"].values()
    assert sum(split["documents"] for split in splits) == 21
    assert sum(split["dropped"].get("parts_without_pairs", 0) for split in splits) <= 1


def test_corpus_can_be_built_after_the_disk_was_full(inputs):
    with pytest.raises(OSError):
        disk_full_while_building(inputs)
    assert not inputs.path("new/manifest.json").exists()
    inputs.build()


@pytest.mark.slow
def test_non_finite_loss_names_the_step_and_keeps_the_last_good_checkpoint(inputs):
    with pytest.raises(Diverged, match=r"of step \d+ is (nan|inf)") as error:
        inputs.train(learning_rate=1e38, clip_norm=1e30, warmup_steps=4, checkpoint_every=1)
    checkpoints = inputs.path("workdir/checkpoints")
    last = saved_steps(checkpoints)[-1]
    assert str(error.value).endswith(f": config.init_from={checkpoints / str(last)}")
    assert last == error.value.step - 1
    squares = [
        np.sum(np.square(leaf)) for leaf in jax.tree.leaves(saved_params(inputs.path("workdir")))
    ]
    assert np.isfinite(squares).all()


@pytest.mark.slow
def test_full_disk_in_a_save_keeps_the_last_checkpoint_and_the_run_can_be_resumed(
    inputs, monkeypatch
):
    with contextlib.ExitStack() as disk, monkeypatch.context() as patched:

        class FillingCheckpointer(pretrain.Checkpointer):
            def save(self, state):
                if int(state.step) == 4:
                    self.wait()
                    disk.enter_context(full_disk())
                super().save(state)

        patched.setattr(pretrain, "Checkpointer", FillingCheckpointer)
        with pytest.raises(CheckpointError, match=r"failed: .* is step 2; free disk space"):
            inputs.train()
    workdir = inputs.path("workdir")
    assert find_checkpoint(workdir).name == "2"
    inputs.train()
    assert json.loads((workdir / "result.json").read_text())["steps"] == 6
