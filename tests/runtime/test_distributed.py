"""A run of several real processes: same parameters, every row once, clear errors."""

import contextlib
import json
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import bert_jax
from bert_jax.checkpoints.native import saved_steps
from bert_jax.data.batches import heldout_batches
from bert_jax.data.rows import Rows
from bert_jax.runtime import distributed
from bert_jax.runtime.errors import PREEMPTED
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain_setup import setup_pretraining
from bert_jax.training.pretrain_step import make_eval_step
from bert_jax.training.workdir import claim_workdir
from tests.helpers import commands
from tests.helpers.corpora import build_small_corpus
from tests.helpers.runs import saved_params

STEPS = ("num_steps=4", "log_every=2", "checkpoint_every=2", "eval_every=2")


def largest_difference(tree, expected) -> float:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


def read_result(workdir) -> dict:
    return json.loads((workdir / "result.json").read_text())


@pytest.fixture(scope="module")
def one_process(corpus, tmp_path_factory):
    """A run of one process with four devices."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    commands.run(workdir, corpus, *STEPS, devices_per_process=4)
    return workdir


@pytest.fixture(scope="module")
def eight_devices(corpus, tmp_path_factory):
    """A run of two processes with four devices each, and sharded weight updates."""
    workdir = tmp_path_factory.mktemp("eight") / "run"
    fields = (*STEPS, "shard_weight_update=True")
    commands.run(workdir, corpus, *fields, num_processes=2, devices_per_process=4)
    return workdir


ACROSS_PROCESSES = ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_processes", "devices_per_process", "mesh"),
    [
        (2, 2, ()),
        (4, 1, ()),
        (4, 1, ACROSS_PROCESSES),
    ],
)
def test_several_processes_train_the_same_parameters_as_one(
    one_process, corpus, tmp_path, num_processes, devices_per_process, mesh
):
    """With the data, fsdp or tensor axis of the mesh across processes."""
    workdir = tmp_path / "run"
    options = {"num_processes": num_processes, "devices_per_process": devices_per_process}
    commands.run(workdir, corpus, *STEPS, *mesh, **options)
    assert largest_difference(saved_params(one_process), saved_params(workdir)) < 1e-5
    expected, result = read_result(one_process), read_result(workdir)
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "unigram_entropy"):
        assert result[name] == pytest.approx(expected[name], abs=1e-5), name
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps) and len(set(lines)) == len(lines)
    # Only process 0 writes and prints.
    assert len(list((workdir / "tensorboard").iterdir())) == 1
    assert "mlm_loss" not in commands.log_of(workdir, 1).read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_processes", "devices_per_process"),
    [
        (1, 2),
        (1, 1),
        (2, 1),
    ],
    ids=["two", "one", "two hosts"],
)
def test_checkpoint_of_eight_devices_on_two_hosts_resumes_on_other_devices(
    eight_devices, corpus, tmp_path, num_processes, devices_per_process
):
    """From step 2 of 4, with the same rows in the same order."""
    workdir = tmp_path / "run"
    shutil.copytree(eight_devices, workdir, ignore=shutil.ignore_patterns("compiled", "4"))
    (workdir / "result.json").unlink()
    options = {"num_processes": num_processes, "devices_per_process": devices_per_process}
    commands.run(workdir, corpus, *STEPS, **options)
    assert "Resuming from step 2 in" in commands.log_of(workdir).read_text()
    assert largest_difference(saved_params(eight_devices), saved_params(workdir)) < 1e-5
    expected, result = read_result(eight_devices), read_result(workdir)
    assert result["mlm_loss"] == pytest.approx(expected["mlm_loss"], abs=1e-5)


@pytest.mark.slow
def test_evaluation_counts_every_pair_once_with_an_incomplete_last_batch(one_process, corpus):
    rows = Rows(corpus, "heldout")
    assert rows.num_rows % 8  # The last batch of eight is padded.
    num_pairs = np.count_nonzero(rows.read(0, rows.num_rows)["sequence_bounds"][:, :, 2])
    # Repeats the evaluation of the run, which reports only means.
    config = ConfigDict(json.loads((one_process / "config.json").read_text()))
    (phase,) = open_phases(config)
    setup = setup_pretraining(config, [phase], phase.train.tokenizer)
    params = jax.device_put(saved_params(one_process), setup.shardings.params)
    objective = setup.phases[0].objective
    eval_step = make_eval_step(setup.model, setup.mesh, objective, seed=config.seed)
    batches = heldout_batches(rows, batch_sharding(setup.mesh), 8)
    sums = [jax.device_get(eval_step(params, batch)) for batch in batches]
    correct, count = np.sum([batch_sums["nsp_accuracy"] for batch_sums in sums], axis=0)
    assert count == num_pairs
    assert read_result(one_process)["nsp_accuracy"] == pytest.approx(correct / num_pairs, abs=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_two_processes_stopped_by_a_signal_and_resumed_equal_one_process(corpus, tmp_path, number):
    """The signal reaches one process, and both save the same step; SIGHUP becomes SIGTERM there."""
    workdir, fields = tmp_path / "run", ("num_steps=60", "log_every=1", "checkpoint_every=1000")
    options = {"num_processes": 2, "devices_per_process": 2}
    with commands.ended(commands.start(workdir, corpus, *fields, **options)) as processes:
        commands.wait_for(workdir / "metrics.jsonl", '"step": 2,', processes)
        processes[1].send_signal(number)
        assert commands.finish(processes) == [PREEMPTED] * 2
    step = int(re.search(r"saved at step (\d+)", commands.log_of(workdir).read_text())[1])
    assert step < 60 and saved_steps(workdir / "checkpoints") == [step]
    (*_, last) = (workdir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["step"] == step  # No step was trained after the saved one.

    commands.run(workdir, corpus, *fields, **options)
    assert f"Resuming from step {step} in" in commands.log_of(workdir).read_text()
    commands.run(tmp_path / "one", corpus, *fields, devices_per_process=4)
    assert largest_difference(saved_params(tmp_path / "one"), saved_params(workdir)) < 1e-5
    steps = [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").open()]
    assert steps == sorted(steps) and set(steps) == set(range(1, 61))


@pytest.fixture(scope="module")
def many_heldout_rows(tmp_path_factory):
    """A corpus with over 100 held-out batches of four rows."""
    directory = tmp_path_factory.mktemp("many")
    sizes = {"max_seq_length": 16, "max_sequences": 1}
    corpus = build_small_corpus(directory, num_documents=130, heldout_fraction=0.5, **sizes)
    assert Rows(corpus, "heldout").num_rows > 400
    return corpus


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(("mesh.fsdp=2",), marks=pytest.mark.exhaustive),
        ("mesh.fsdp=2", "shard_weight_update=True"),
        pytest.param(("mesh.data=4",), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_two_processes_evaluate_many_batches_without_a_deadlock(many_heldout_rows, tmp_path, mesh):
    fields = ("num_steps=2", "warmup_steps=0", "eval_batch_size=4", *mesh)
    options = {"num_processes": 2, "devices_per_process": 2}
    commands.run(tmp_path / "run", many_heldout_rows, *fields, **options)


@pytest.mark.exhaustive
def test_process_that_waits_for_another_exits_when_asked_to_stop(corpus, tmp_path):
    fields = ("num_steps=1000", "warmup_steps=0", "log_every=1")
    # It would wait for a save for any time, and another activity would be named.
    fields += ("checkpoint_every=1000", "eval_every=1000")
    workdir = tmp_path / "run"
    started = commands.start(workdir, corpus, *fields, num_processes=2, stop_timeout=2)
    with commands.ended(started) as processes:
        commands.wait_for(workdir / "metrics.jsonl", '"step": 2,', processes)
        processes[1].send_signal(signal.SIGSTOP)
        processes[0].send_signal(signal.SIGTERM)
        assert commands.finish(processes[:1]) == [PREEMPTED]
    log = commands.log_of(workdir).read_text()
    assert re.search(r"asked to stop, but no progress for \d+ s while running step", log)


@pytest.mark.slow
def test_different_settings_are_reported_before_the_first_step(corpus, tmp_path):
    workdir, flags = tmp_path / "run", ("--config.learning_rate=0.5",)
    started = commands.start(workdir, corpus, num_processes=2, last_flags=flags)
    with commands.ended(started) as processes:
        assert commands.finish(processes) == [1, 1]
    message = "process 1 has learning_rate=0.5, but process 0 has 0.0001"
    for process in range(2):
        assert message in commands.log_of(workdir, process).read_text()
    assert not workdir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
def test_message_about_a_missing_process_says_what_to_run(corpus, tmp_path, missing):
    """Without process 0 there is no coordinator to connect to."""
    started = commands.start(tmp_path / "run", corpus, num_processes=2, initialization_timeout=5)
    with commands.ended(started) as processes:
        processes[missing].kill()
        assert commands.finish([processes[1 - missing]]) == [1]
    message = commands.log_of(tmp_path / "run", 1 - missing).read_text()
    assert f"process {1 - missing}: not all of 2 processes connected to localhost" in message
    assert "the logs of the missing processes" in message and "firewall" in message


def test_unexpected_number_of_processes_is_an_error(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)  # Finds one.
    preemption = jax.config.jax_enable_preemption_service
    try:
        with pytest.raises(ValueError, match="found 1 processes, but --num_processes=4"):
            distributed.initialize(num_processes=4)
    finally:
        jax.config.update("jax_enable_preemption_service", preemption)


@pytest.mark.parametrize(
    ("coordinator", "num_processes", "process_id"),
    [("localhost:1", 2, 2), ("localhost:1", None, None), ("localhost", 2, 0)],
)
def test_coordinator_without_number_of_processes_or_port_is_an_error(
    coordinator, num_processes, process_id
):
    message = (
        f"--coordinator={coordinator} --num_processes={num_processes} --process_id={process_id}: "
        "expected HOST:PORT of process 0, the number of processes, and the index"
    )
    with pytest.raises(ValueError, match=message):
        distributed.initialize(
            coordinator=coordinator, num_processes=num_processes, process_id=process_id
        )


@pytest.mark.slow
def test_error_in_one_process_ends_all_with_exit_code_1(corpus, tmp_path):
    workdir, flags = tmp_path / "run", ("--config.corpus=/nowhere",)
    started = commands.start(workdir, corpus, num_processes=2, last_flags=flags)
    with commands.ended(started) as processes:
        assert commands.finish(processes) == [1, 1]
    assert "process 1: /nowhere" in commands.log_of(workdir, 0).read_text()
    assert "pretrain: /nowhere" in commands.log_of(workdir, 1).read_text()


@pytest.mark.slow
def test_hosts_whose_devices_alternate_in_the_mesh_get_their_own_rows(corpus, tmp_path):
    command = ["tests.helpers.scattered_hosts", str(corpus)]
    workdir = tmp_path / "run"
    started = commands.launch(command, workdir, num_processes=2, devices_per_process=2)
    with commands.ended(started) as processes:
        assert commands.finish(processes) == [0, 0], commands.log_of(workdir).read_text()
    assert "arrays are as expected" in commands.log_of(workdir, 1).read_text()


@pytest.mark.parametrize("text", ["UNAVAILABLE: x", "Gloo all-reduce failed", "heartbeat timeout"])
def test_lost_process_is_distinguished_from_other_errors(text):
    assert distributed.is_lost_process_error(RuntimeError(text))
    assert not distributed.is_lost_process_error(RuntimeError("INTERNAL: Out of memory"))


def test_single_process_agrees_with_itself():
    assert distributed.allgather_texts("a") == ["a"]
    distributed.check_equal_on_all_processes({"seed": 0})
    with pytest.raises(OSError, match="full"), distributed.raise_on_all_processes():
        raise OSError("full")


def test_error_without_a_message_is_raised_on_all_processes(monkeypatch):
    sent = []
    monkeypatch.setattr(distributed, "allgather_texts", lambda text: [sent.append(text) or text])
    with pytest.raises(AssertionError), distributed.raise_on_all_processes():
        raise AssertionError
    with distributed.raise_on_all_processes():
        pass
    assert sent == ["AssertionError()", ""]


@pytest.mark.parametrize("differs", ["version of jax", "hash of bert_jax/*.py"])
def test_hosts_that_run_different_programs_are_refused(monkeypatch, tmp_path, differs):
    def texts_of_both(text):
        return [text, json.dumps(json.loads(text) | {differs: "another"})]

    monkeypatch.setattr(distributed, "allgather_texts", texts_of_both)
    with pytest.raises(ValueError, match=f"process 1 has {re.escape(differs)}='another', but"):
        claim_workdir(tmp_path / "run", {"seed": 0})
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    claim_workdir(tmp_path / "run", {"seed": 0})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"seed": 0}


def test_comparison_of_programs_covers_every_folder_of_the_package(monkeypatch, tmp_path):
    compared = []
    monkeypatch.setattr(bert_jax, "__file__", str(tmp_path / "bert_jax" / "__init__.py"))
    monkeypatch.setattr(distributed, "check_equal_on_all_processes", compared.append)
    (tmp_path / "bert_jax" / "model").mkdir(parents=True)
    for code in ("x = 1", "x = 2"):
        (tmp_path / "bert_jax" / "model" / "bert.py").write_text(code)
        claim_workdir(tmp_path / "run", {"seed": 0})
    first_hash, second_hash = (program["hash of bert_jax/*.py"] for program in compared)
    assert first_hash != second_hash


@pytest.fixture
def heeded_sighup():
    """Sets the default handler, also where nohup runs the tests."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_stops_the_run_after_its_step(heeded_sighup, number):
    handlers = {each: signal.getsignal(each) for each in (number, signal.SIGHUP)}
    with contextlib.closing(distributed.StopRequest()) as stop_request:
        assert not stop_request.should_stop()
        signal.raise_signal(number)
        assert stop_request.should_stop() and stop_request.interrupted == (number == signal.SIGINT)
    assert {each: signal.getsignal(each) for each in handlers} == handlers


def test_ignored_sighup_stays_ignored():
    """As nohup sets it."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with contextlib.closing(distributed.StopRequest()) as stop_request:
            signal.raise_signal(signal.SIGHUP)
            assert not stop_request.should_stop()
    finally:
        signal.signal(signal.SIGHUP, previous)
