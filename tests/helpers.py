"""Helpers of several test modules: small corpora, models and configs, and real processes."""

import contextlib
import copy
import functools
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import flax
import jax
import numpy as np
import sentencepiece

import bert_jax
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.vocabulary import train_byte_pair
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings, parameter_shapes
from bert_jax.configs.pretrain import bert_tiny
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import CLASSIFICATION, TaskModel
from bert_jax.tokenizers.stored import Layout, store_as_json, template
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes

ROOT = pathlib.Path(__file__).parents[1]
VOCABULARY = (
    "the a of and river mountain village people water stone old new small large north south built "
    "found made grew year city king war road field"
)
WORDS = VOCABULARY.split()


def random_text(num_documents: int, seed: int = 0) -> str:
    """Returns random documents, a sentence per line, with blank lines between documents."""
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


def train_bpe(directory: pathlib.Path, text: str, size: int = 300):
    """Writes the `bpe.json` of a byte-level BPE that is trained on a text; returns it, loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bpe_text.txt").write_text(text)
    content = train_byte_pair(str(directory / "bpe_text.txt"), size)
    (directory / "bpe.json").write_bytes(content)
    return load_tokenizer(directory / "bpe.json")


def without_special_tokens(tokenizer):
    """Returns a tokenizer of the same vocabulary that adds no special tokens around texts."""
    spec = json.loads(tokenizer.stored.backend.to_str())
    special_tokens = tokenizer.stored.special_tokens
    layout = Layout(0, True, is_bare=True)
    spec["post_processor"] = template(layout, spec, special_tokens)
    stored = store_as_json(spec, special_tokens, tokenizer.casing, "test")
    return tokenizer_from_bytes(stored.filename, stored.content)


def write_albert_vocabulary(path: pathlib.Path) -> None:
    """Writes a SentencePiece model of some 40 pieces, with ALBERT's special tokens."""
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(random_text(20).split("\n")),
            model_writer=file,
            vocab_size=40,
            hard_vocab_limit=False,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece="<pad>",
            unk_piece="<unk>",
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            minloglevel=2,
        )


def write_random_encoder(directory: pathlib.Path, tokenizer) -> pathlib.Path:
    """Writes a checkpoint of a very small encoder with random weights, to fine-tune."""

    config = BertConfig(tokenizer.vocab_size, 16, 2, 2, 32, max_position_embeddings=64)
    rng = np.random.default_rng(0)
    params = {
        path: rng.normal(0, 0.1, leaf.shape).astype(np.float32) + path.endswith("scale")
        for path, leaf in parameter_shapes(config).items()
        if path.startswith("encoder")
    }
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    write_checkpoint(directory, params, model_settings(config, params), tokenizer)
    return directory


def build_small_corpus(
    directory: pathlib.Path, vocabulary=None, num_documents: int = 60, **settings
) -> pathlib.Path:
    """Builds a corpus of random documents in `directory`/corpus; WordPiece by default."""

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "text.txt").write_text(random_text(num_documents))
    defaults = {
        "max_seq_length": 64,
        "max_sequences": 4,
        "heldout_fraction": 0.2,
        "sentences": "lines",
        "block_rows": 16,
    }
    build_corpus(
        str(directory / "text.txt"),
        load_tokenizer(vocabulary or write_vocabulary(directory / "vocab.txt")),
        directory / "corpus",
        CorpusConfig(**(defaults | settings)),
        num_processes=1,
    )
    return directory / "corpus"


def write_tfds(directory, name: str, splits: dict[str, list[dict]], features: dict, prepared=True):
    """Prepares the TFDS dataset `name`, such as "glue/mrpc", in `directory`, as ArrayRecord.

    `features` are types of TFDS. Without `prepared` it looks as if prepared as TFRecord, which only
    TensorFlow can do. Returns `directory`.
    """
    import tensorflow_datasets as tfds

    dataset, _, config = name.partition("/")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = None  # There are no downloads.
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, download_manager):
            return {split: enumerate(examples) for split, examples in splits.items()}

        def _generate_examples(self):
            raise NotImplementedError  # `_split_generators` yields the examples.

    Builder.name = dataset
    builder = Builder(data_dir=str(directory), file_format="array_record")
    builder.download_and_prepare()
    if not prepared:
        info = pathlib.Path(builder.data_dir, "dataset_info.json")
        info.write_text(info.read_text().replace("array_record", "tfrecord"))
    return directory


def small_config(corpus, long_corpus=None, **changes):
    config = bert_tiny.get_config("runlocal")
    config.model.num_layers = 1  # Compiles faster; tests of models and steps have two.
    config.corpus = str(corpus)
    config.long_phase.num_steps = 3 if long_corpus else 0
    config.long_phase.corpus = str(long_corpus or "")
    config.num_steps = 6
    config.log_every = 2
    config.eval_every = 3
    config.checkpoint_every = 2
    config.batch_size = config.eval_batch_size = 8
    config.update(changes)
    return config.lock()


RUN_EACH = """
import gc, importlib, json, os, runpy, sys
from absl.flags import FLAGS

program, separator, cases = json.load(sys.stdin)
importlib.import_module(program)
sys.modules.pop(program)  # It runs again, as the main program; what it imports does not.
for flag in list(FLAGS.flags_by_module_dict().get(program, ())):
    delattr(FLAGS, flag.name)
gc.collect()
gc.freeze()  # A fork would copy what it looks through.
for arguments in cases:
    sys.stderr.flush()
    if not (child := os.fork()):
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(separator, code, separator, file=sys.stderr, flush=True)
"""


def run_each(program: str, cases: list[list[str]]) -> list[tuple[int, str]]:
    """Runs `python -m program` with each list of arguments; returns its exit code and stderr.

    The processes are forks of one that has imported what the program imports, to save time.
    """
    separator = "-- end --"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_EACH],
        input=json.dumps([program, separator, cases]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    texts = run.stderr.split(separator)
    assert len(texts) == 2 * len(cases) + 1, run.stderr
    return [(int(code), text) for text, code in zip(texts[:-1:2], texts[1::2], strict=True)]


def saved_params(workdir) -> dict:
    return jax.device_get(bert_jax.load(workdir).params)


def batch_of_row(tokens: np.ndarray, segment_ids: np.ndarray | None = None) -> dict:
    """Returns the model's inputs for int `[1, L]` tokens of one sequence, without padding."""
    return {
        "tokens": tokens,
        "segment_ids": tokens * 0 if segment_ids is None else segment_ids,
        "position_ids": np.arange(tokens.shape[1])[None],
        "sequence_ids": tokens * 0 + 1,
    }


@functools.cache
def random_classifier(config: BertConfig, num_labels: int) -> dict:
    """Returns NumPy arrays of the initial parameters of a classifier."""
    row = {"tokens": np.zeros((1, 4), np.int32), "sequence_bounds": np.zeros((1, 1, 3), np.int32)}
    model = TaskModel(config, CLASSIFICATION, num_labels)
    return jax.device_get(jax.jit(model.init)(jax.random.key(1), row)["params"])


def write_weights(
    directory, vocabulary, head=None, bias=0.0, labels=("north", "south"), causal=False
):
    """Writes a checkpoint of a small untrained encoder; with `head` (labels), also of a head."""
    tokenizer = load_tokenizer(vocabulary)
    config = BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.2,  # With less, [CLS] takes many steps to learn about other tokens.
        causal=causal,
    )
    params = copy.deepcopy(random_classifier(config, len(head or labels)))
    if not head:
        del params["head"]
    settings = model_settings(config, params)
    if head:
        settings["head"] = {"task": "classification", "labels": list(head)}
        params["head"]["bias"] += bias * np.arange(len(head))
    write_checkpoint(directory, params, settings, tokenizer)
    return directory


CONFIG = BertConfig(
    vocab_size=131,
    hidden_size=12,
    num_layers=2,
    num_heads=3,
    intermediate_size=20,
    max_position_embeddings=9,
)
CONFIG_JSON = {
    "model_type": "bert",
    "vocab_size": 131,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 9,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(126))]


def linear(rng, name: str, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    return {
        f"{name}.weight": rng.standard_normal((outputs, inputs)),
        f"{name}.bias": rng.standard_normal(outputs),
    }


def norm(rng, name: str, size: int = 12) -> dict[str, np.ndarray]:
    return {f"{name}.weight": rng.standard_normal(size), f"{name}.bias": rng.standard_normal(size)}


def state_dict(num_layers: int = 2) -> dict[str, np.ndarray]:
    """Returns random tensors in float64 under the names of transformers' BertForPreTraining."""
    rng = np.random.default_rng(0)
    tensors = {
        "bert.embeddings.word_embeddings.weight": rng.standard_normal((131, 12)),
        "bert.embeddings.position_embeddings.weight": rng.standard_normal((9, 12)),
        "bert.embeddings.token_type_embeddings.weight": rng.standard_normal((2, 12)),
        **norm(rng, "bert.embeddings.LayerNorm"),
        **linear(rng, "bert.pooler.dense", 12, 12),
        "cls.predictions.bias": rng.standard_normal(131),
        **linear(rng, "cls.predictions.transform.dense", 12, 12),
        **norm(rng, "cls.predictions.transform.LayerNorm"),
        **linear(rng, "cls.seq_relationship", 12, 2),
    }
    for layer in range(num_layers):
        prefix = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            tensors |= linear(rng, f"{prefix}.attention.self.{part}", 12, 12)
        tensors |= linear(rng, f"{prefix}.attention.output.dense", 12, 12)
        tensors |= norm(rng, f"{prefix}.attention.output.LayerNorm")
        tensors |= linear(rng, f"{prefix}.intermediate.dense", 12, 20)
        tensors |= linear(rng, f"{prefix}.output.dense", 20, 12)
        tensors |= norm(rng, f"{prefix}.output.LayerNorm")
    return tensors


def flat(params: dict) -> dict[str, np.ndarray]:
    return flax.traverse_util.flatten_dict(params, sep="/")


def assert_trees_equal(params: dict, expected: dict) -> None:
    assert flat(params).keys() == flat(expected).keys()
    for path, value in flat(params).items():
        np.testing.assert_array_equal(value, flat(expected)[path], err_msg=path)


TORCH_SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}
TORCH_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(35))]


def write_torch_model(directory: pathlib.Path, architecture: str, std: float = 0.3, **settings):
    """Writes and returns a transformers model with all parameters random, biases included.

    `architecture` is of BERT or of a descendant with its vocabulary.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    family = re.match("(.+?)(Model|For)", architecture)[1]
    config = getattr(transformers, f"{family}Config")(**TORCH_SIZES | settings)
    model = getattr(transformers, architecture)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(TORCH_PIECES) + "\n")
    return model


_reserved: list[socket.socket] = []


def free_port() -> int:
    """Returns a TCP port for a server to be started, reserved among tests.

    The UDP port of the same number, kept until this process ends, reserves it among all test
    processes. The kernel assigns ports from 32768 on to programs that ask for an arbitrary port,
    so such a port could be taken before the server starts.
    """
    for port in range(20_000, 32_768):
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), socket.socket() as listener:
            reservation.bind(("localhost", port))
            listener.bind(("localhost", port))
            _reserved.append(reservation)
            return port
        reservation.close()
    raise OSError("all ports from 20000 to 32767 are in use")


def start(
    workdir,
    corpus,
    *fields: str,
    num_processes: int = 1,
    devices_per_process: int = 1,
    last_flags: tuple[str, ...] = (),
    logs=None,
    **flags,
) -> list[subprocess.Popen]:
    """Starts the pre-training of a tiny model in `num_processes` processes; see `launch`.

    `fields` are set in the config, and `flags` on the command line.
    """
    command = [
        "bert_jax.pretrain",
        "--config=configs/pretrain/bert_tiny.py:runlocal",
        f"--config.corpus={corpus}",
        "--config.long_phase.num_steps=0",
        "--config.model.max_position_embeddings=64",
        "--config.stall_seconds=100",  # The watchdog reports before `finish` times out.
        *[f"--config.{field}" for field in fields],
        *[f"--{name}={value}" for name, value in flags.items()],
    ]
    return launch(
        command,
        workdir,
        num_processes=num_processes,
        devices_per_process=devices_per_process,
        last_flags=last_flags,
        logs=logs,
    )


def launch(
    command: list[str],
    workdir,
    *,
    num_processes: int = 1,
    devices_per_process: int = 1,
    last_flags: tuple[str, ...] = (),
    logs=None,
) -> list[subprocess.Popen]:
    """Starts `python -m COMMAND --workdir=WORKDIR` in processes that form one run.

    Their output goes to `log_of(logs, process)`, where `logs` is WORKDIR unless given; only the
    last process gets `last_flags`.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process} "
        "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", *command, f"--workdir={workdir}"]
    if num_processes > 1:
        command += [f"--coordinator=localhost:{free_port()}", f"--num_processes={num_processes}"]
    processes = []
    for process in range(num_processes):
        process_flags = [f"--process_id={process}"] if num_processes > 1 else []
        process_flags += last_flags if process == num_processes - 1 else ()
        with log_of(logs or workdir, process).open("w") as log:
            processes.append(
                subprocess.Popen(
                    [*command, *process_flags], stdout=log, stderr=log, env=environment, cwd=ROOT
                )
            )
            processes[-1].log = log.name
    return processes


def log_of(workdir, process: int = 0) -> pathlib.Path:
    return pathlib.Path(f"{workdir}.{process}.log")


def finish(processes: list[subprocess.Popen], seconds: float = 600) -> list[int]:
    """Waits for all processes and returns their exit codes; shows all logs on a timeout."""
    try:
        return [process.wait(seconds) for process in processes]
    except subprocess.TimeoutExpired as error:
        logs = [pathlib.Path(process.log).read_text()[-8000:] for process in processes]
        raise AssertionError("\n\n".join([str(error), *logs])) from error


def run(workdir, corpus, *fields: str, **options) -> None:
    """Runs a pre-training as `start` does, and asserts that it succeeds."""
    exit_codes = finish(start(workdir, corpus, *fields, **options))
    assert not any(exit_codes), log_of(options.get("logs") or workdir).read_text()[-3000:]


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen]):
    """Kills the processes that still run at the end of the block."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def wait_for(path: pathlib.Path, text: str, processes, seconds: float = 600) -> None:
    """Waits until the file at `path` contains `text`; all processes must be alive until then."""
    wait_until(lambda: contains(path, text), f"{text!r} is not in {path}", processes, seconds)


def wait_until(condition, otherwise: str, processes=(), seconds: float = 600) -> None:
    """Waits until `condition()` holds; all processes must be alive until then.

    Raises AssertionError if one ends before, or TimeoutError; both messages say `otherwise`.
    """
    deadline = time.monotonic() + seconds
    while True:
        # Before the condition, which a process may fulfill last of all.
        ended = [process.args for process in processes if process.poll() is not None]
        if condition():
            return
        assert not ended, f"{otherwise}; ended early: {ended}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} after {seconds} s")
        time.sleep(0.01)


def contains(path: pathlib.Path, text: str) -> bool:
    """Returns whether the file exists and contains `text`; a process may still be writing it."""
    try:
        return text.encode() in path.read_bytes()
    except FileNotFoundError:
        return False
