"""Eight simulated devices for every test, and one small corpus."""

import os

# Before JAX is first imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling takes longer than running what tests run: leave the CPU code unoptimised, but where
# `make parity` measures what users run.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *([] if "BERT_JAX_MINILM" in os.environ else ["--xla_backend_optimization_level=0"]),
    ]
)

import pathlib
import random
import signal
import tempfile

import pytest

# Tests and the processes that they start compile the same small programs again and again: all that
# one call of pytest compiles is kept for it, whichever worker compiled it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# What a shell starts in the background ignores Ctrl-C, and hands that on to what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

VOCABULARY = (
    "the a of and river mountain village people water stone old new small large north south built "
    "found made grew year city king war road field"
)
WORDS = VOCABULARY.split()


LONGEST = (
    *("test_train.py", "test_faults.py", "test_pretrain.py", "test_finetune.py"),
    *("test_bad_input.py", "test_task_step.py", "test_distributed.py", "test_checkpoint.py"),
)


def pytest_collection_modifyitems(items):
    """The longest files first, so that none runs alone at the end."""
    names = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: names.get(item.path.name, len(names)))


def random_text(num_documents: int, seed: int = 0) -> str:
    """Documents of sentences of words; blank lines between documents, a sentence a line."""
    rng = random.Random(seed)
    documents = []
    for _ in range(num_documents):
        sentences = [
            " ".join(rng.choices(WORDS, k=rng.randint(4, 12))) + " ."
            for _ in range(rng.randint(6, 14))
        ]
        documents.append("\n".join(sentences))
    return "\n\n".join(documents) + "\n"


def write_vocabulary(path: pathlib.Path, words=WORDS) -> pathlib.Path:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "##s", "##ing", *words]
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    return path


def write_random_encoder(directory: pathlib.Path, tokenizer) -> pathlib.Path:
    """A checkpoint of a very small encoder with random weights, to fine-tune."""
    import dataclasses

    import flax
    import numpy as np

    from bert_jax.checkpoint import write_checkpoint
    from bert_jax.config import BertConfig
    from bert_jax.interop.parameters import parameter_shapes

    config = BertConfig(tokenizer.vocab_size, 16, 2, 2, 32, max_position_embeddings=64)
    rng = np.random.default_rng(0)
    params = {
        path: rng.normal(0, 0.1, shape).astype(np.float32) + path.endswith("scale")
        for path, shape in parameter_shapes(config).items()
        if path.startswith("bert")
    }
    settings = {"bert": dataclasses.asdict(config), "absent": ["mlm", "nsp"]}
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    write_checkpoint(directory, params, settings, tokenizer)
    return directory


def build_small_corpus(directory: pathlib.Path, vocabulary=None, **settings) -> pathlib.Path:
    """A corpus of 60 random documents in `directory`/corpus; WordPiece unless one is given."""
    from bert_jax.corpus.build import CorpusSettings, build_corpus
    from bert_jax.tokenization import load_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "text.txt").write_text(random_text(60))
    defaults = {
        "max_seq_length": 64,
        "max_pairs_per_row": 4,
        "heldout_fraction": 0.2,
        "sentences": "lines",
        "block_rows": 16,
    }
    build_corpus(
        str(directory / "text.txt"),
        load_tokenizer(vocabulary or write_vocabulary(directory / "vocab.txt")),
        directory / "corpus",
        CorpusSettings(**(defaults | settings)),
        num_processes=1,
    )
    return directory / "corpus"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> pathlib.Path:
    return build_small_corpus(tmp_path_factory.mktemp("corpus64"))


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory) -> pathlib.Path:
    return build_small_corpus(tmp_path_factory.mktemp("corpus128"), max_seq_length=128)
