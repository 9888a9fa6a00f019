"""Several real processes are one run: the same parameters, every row once, clear errors."""

import json
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import bert_jax
from bert_jax import partitioning
from bert_jax.data.batches import eval_batches
from bert_jax.data.rows import Rows
from bert_jax.runtime import distributed
from bert_jax.runtime.exit_status import PREEMPTED
from bert_jax.training import settings
from bert_jax.training.assembly import assemble
from bert_jax.training.workdir import claim_together
from tests import helpers

STEPS = ("num_steps=4", "log_every=2", "checkpoint_every=2", "eval_every=2")


def saved_params(workdir) -> dict:
    return jax.device_get(bert_jax.load(workdir).params)


def largest_difference(one, two) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


def result_of(workdir) -> dict:
    return json.loads((workdir / "result.json").read_text())


@pytest.fixture(scope="module")
def one_process(corpus, tmp_path_factory):
    """A run of one process with four devices."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    helpers.run(workdir, corpus, *STEPS, devices_each=4)
    return workdir


@pytest.fixture(scope="module")
def eight_devices(corpus, tmp_path_factory):
    """A run of two processes with four devices each, the optimizer's state divided over all."""
    workdir = tmp_path_factory.mktemp("eight") / "run"
    fields = (*STEPS, "shard_weight_update=True")
    helpers.run(workdir, corpus, *fields, num_processes=2, devices_each=4)
    return workdir


ACROSS = ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.mark.parametrize(
    ("num_processes", "devices_each", "mesh"), [(2, 2, ()), (4, 1, ()), (4, 1, ACROSS)]
)
def test_processes_train_to_the_parameters_of_one(
    one_process, corpus, tmp_path, num_processes, devices_each, mesh
):
    """Whatever crosses from one process to another: rows, rows of matrices, or their columns."""
    workdir = tmp_path / "run"
    options = {"num_processes": num_processes, "devices_each": devices_each}
    helpers.run(workdir, corpus, *STEPS, *mesh, **options)
    assert largest_difference(saved_params(one_process), saved_params(workdir)) < 1e-5
    expected, found = result_of(one_process), result_of(workdir)
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "unigram_entropy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps) and len(set(lines)) == len(lines)
    # One process wrote, and one showed.
    assert len(list((workdir / "tensorboard").iterdir())) == 1
    assert "mlm_loss" not in helpers.log_of(workdir, 1).read_text()


@pytest.mark.parametrize(
    ("num_processes", "devices_each"), [(1, 2), (1, 1), (2, 1)], ids=["two", "one", "two hosts"]
)
def test_saved_by_eight_devices_on_two_hosts_goes_on_anywhere(
    eight_devices, corpus, tmp_path, num_processes, devices_each
):
    """From the checkpoint in the middle, with the same rows in the same order."""
    workdir = tmp_path / "run"
    shutil.copytree(eight_devices, workdir, ignore=shutil.ignore_patterns("compiled", "4"))
    (workdir / "result.json").unlink()
    options = {"num_processes": num_processes, "devices_each": devices_each}
    helpers.run(workdir, corpus, *STEPS, **options)
    assert "Going on from the checkpoint of step 2" in helpers.log_of(workdir).read_text()
    assert largest_difference(saved_params(eight_devices), saved_params(workdir)) < 1e-5
    expected, found = result_of(eight_devices), result_of(workdir)
    assert found["mlm_loss"] == pytest.approx(expected["mlm_loss"], abs=1e-5)


def test_evaluation_counts_every_pair_once_whatever_the_remainder(one_process, corpus):
    rows = Rows(corpus, "heldout")
    assert rows.num_rows % 8  # The last batch of eight is filled up.
    num_pairs = np.count_nonzero(rows.stream(0, rows.num_rows)["pairs"][:, :, 2])
    # The run's own evaluation, once more: it tells means alone.
    config = ConfigDict(json.loads((one_process / "config.json").read_text()))
    (phase,) = settings.open_phases(config)
    assembly = assemble(config, [phase], phase.rows.load_tokenizer())
    params = jax.device_put(saved_params(one_process), assembly.layout.params)
    eval_step = assembly.eval_step(phase)
    batches = eval_batches(rows, partitioning.batch_sharding(assembly.mesh), 8)
    sums = [jax.device_get(eval_step(params, batch)) for batch in batches]
    right, count = (sum(each[name] for each in sums) for name in ("nsp_right", "nsp_count"))
    assert count == num_pairs
    assert result_of(one_process)["nsp_accuracy"] == pytest.approx(right / num_pairs, abs=1e-6)


def test_sigterm_in_one_process_saves_that_step_in_all_and_the_run_goes_on(
    one_process, corpus, tmp_path
):
    workdir = tmp_path / "run"
    options = {"num_processes": 2, "devices_each": 2}
    long = ("num_steps=1000", "warmup_steps=4", "log_every=1", "checkpoint_every=1000")
    with helpers.ended(helpers.start(workdir, corpus, *long, **options)) as started:
        helpers.wait_for(workdir / "metrics.jsonl", '"step": 2,', started)
        started[1].send_signal(signal.SIGTERM)
        assert helpers.finish(started) == [PREEMPTED] * 2
    said = re.search(r"step (\d+) is saved", helpers.log_of(workdir).read_text())
    assert [entry.name for entry in (workdir / "checkpoints").iterdir()] == [said[1]]
    (*_, last) = (workdir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["step"] == int(said[1])  # Nothing was trained that is not saved.
    with helpers.ended(helpers.start(workdir, corpus, *long, **options)) as started:
        after = f'"step": {int(said[1]) + 1},'
        helpers.wait_for(workdir / "metrics.jsonl", after, started)
    assert f"Going on from the checkpoint of step {said[1]}" in (
        helpers.log_of(workdir).read_text()
    )


def test_different_settings_are_found_before_the_first_step(corpus, tmp_path):
    workdir, other = tmp_path / "run", ("--config.learning_rate=0.5",)
    with helpers.ended(helpers.start(workdir, corpus, num_processes=2, last=other)) as started:
        assert helpers.finish(started) == [1, 1]
    message = "process 1 has learning_rate=0.5, but process 0 has 0.0001"
    for process in range(2):
        assert message in helpers.log_of(workdir, process).read_text()
    assert not workdir.exists()


@pytest.mark.parametrize("missing", [0, 1])
def test_process_missing_says_what_to_run(corpus, tmp_path, missing):
    """Without process 0 there is no coordinator to reach."""
    started = helpers.start(tmp_path / "run", corpus, num_processes=2, join_seconds=5)
    with helpers.ended(started):
        started[missing].kill()
        assert started[1 - missing].wait(60) == 1
    message = helpers.log_of(tmp_path / "run", 1 - missing).read_text()
    assert f"process {1 - missing}: not all of 2 processes met at localhost" in message
    assert "the logs of those that are missing" in message and "no firewall" in message


def test_other_count_of_processes_than_expected_says_so(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)  # Finds one.
    preemption = jax.config.jax_enable_preemption_service
    try:
        with pytest.raises(ValueError, match="1 processes take part, but --num_processes=4: run"):
            distributed.join(num_processes=4)
    finally:
        jax.config.update("jax_enable_preemption_service", preemption)


def test_coordinator_without_a_count_or_port_says_what_is_missing():
    with pytest.raises(ValueError, match="--process_id=2, but --num_processes=2"):
        distributed.join(coordinator="localhost:1", num_processes=2, process_id=2)
    with pytest.raises(ValueError, match="needs --num_processes and --process_id"):
        distributed.join(coordinator="localhost:1")
    with pytest.raises(ValueError, match="--coordinator=localhost: expected HOST:PORT"):
        distributed.join(coordinator="localhost", num_processes=2, process_id=0)


def test_mistake_in_one_process_ends_all_with_status_1(corpus, tmp_path):
    workdir, other = tmp_path / "run", ("--config.corpus=/nowhere",)
    with helpers.ended(helpers.start(workdir, corpus, num_processes=2, last=other)) as started:
        assert helpers.finish(started) == [1, 1]
    assert "process 1: /nowhere" in helpers.log_of(workdir, 0).read_text()
    assert "pretrain: /nowhere" in helpers.log_of(workdir, 1).read_text()


def test_hosts_whose_devices_take_turns_in_the_mesh_are_given_their_rows(corpus, tmp_path):
    command = ["tests.scattered_hosts", str(corpus)]
    workdir = tmp_path / "run"
    started = helpers.launch(command, workdir, num_processes=2, devices_each=2)
    with helpers.ended(started):
        assert helpers.finish(started) == [0, 0], helpers.log_of(workdir).read_text()
    assert "arrays are as expected" in helpers.log_of(workdir, 1).read_text()


def test_several_without_a_way_to_meet_are_refused(corpus, tmp_path):
    started = helpers.start(tmp_path / "run", corpus, num_processes=1, process_id=2)
    assert helpers.finish(started) == [1]
    assert "need --coordinator or --multihost" in helpers.log_of(tmp_path / "run").read_text()


@pytest.mark.parametrize("text", ["UNAVAILABLE: x", "Gloo all-reduce failed", "heartbeat timeout"])
def test_lost_process_is_told_from_other_errors(text):
    assert distributed.tells_of_a_lost_process(RuntimeError(text))
    assert not distributed.tells_of_a_lost_process(RuntimeError("INTERNAL: Out of memory"))


def test_one_process_agrees_with_itself():
    assert distributed.gather_texts("a") == ["a"]
    distributed.check_same_everywhere({"seed": 0})
    with pytest.raises(OSError, match="full"), distributed.errors_shared():
        raise OSError("full")


def test_an_error_without_text_is_shared_as_well(monkeypatch):
    told = []
    monkeypatch.setattr(distributed, "gather_texts", lambda text: [told.append(text) or text, ""])
    with pytest.raises(AssertionError), distributed.errors_shared():
        raise AssertionError
    with distributed.errors_shared():
        pass
    assert told == ["AssertionError()", ""]


@pytest.mark.parametrize("differs", ["version of jax", "hash of bert_jax/*.py"])
def test_hosts_that_run_other_programs_are_refused(monkeypatch, tmp_path, differs):
    def of_both(text):
        return [text, json.dumps(json.loads(text) | {differs: "another"})]

    monkeypatch.setattr(distributed, "gather_texts", of_both)
    with pytest.raises(ValueError, match=f"process 1 has {re.escape(differs)}='another', but"):
        claim_together(tmp_path / "run", {"seed": 0})
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    claim_together(tmp_path / "run", {"seed": 0})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"seed": 0}
