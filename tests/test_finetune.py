"""The loop of fine-tuning: it resumes bit for bit, keeps the best checkpoint, and names errors."""

import csv
import dataclasses
import itertools
import json
import math
import random
import shutil
import statistics

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune
from bert_jax.checkpoints.checksums import write_checksums
from bert_jax.checkpoints.native import (
    find_checkpoint,
    read_arrays,
    saved_steps,
    write_checkpoint,
)
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import text_classification
from bert_jax.finetuning.trials import Trial, summarize_seeds
from bert_jax.runtime import distributed
from bert_jax.runtime.errors import Diverged, RunStopped
from bert_jax.training.workdir import claim_workdir
from tests.helpers import commands
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines
from tests.helpers.legacy import make_legacy_checkpoint
from tests.helpers.models import write_weights
from tests.helpers.predict_equals_load import predict
from tests.helpers.runs import stopped_after_save

pytestmark = pytest.mark.usefixtures("two_devices")

CLASSES = ("north", "south")


def write_examples(path, count, seed, labels=CLASSES):
    """Texts of words that only one label has."""
    rng = random.Random(seed)
    lines = ["text,label"]
    for _ in range(count):
        label = rng.randrange(len(labels))
        words = rng.choices(WORDS[label :: len(labels)], k=rng.randint(2, 9))
        lines.append(f"{' '.join(words)},{labels[label]}")
    path.write_text("\n".join(lines) + "\n")


def write_label_sets(path, count=60) -> list[str]:
    """Texts with words of each of their labels, and other words: none, one or both labels."""
    rng = random.Random(0)
    lines = []
    for number in range(count):
        labels = [label for bit, label in enumerate(CLASSES) if number >> bit & 1]
        words = [rng.choice(WORDS[CLASSES.index(label) :: 4]) for label in labels for _ in "123"]
        words += rng.choices(WORDS[2::4], k=2)
        rng.shuffle(words)
        lines.append(json.dumps({"text": " ".join(words), "label": labels}))
    path.write_text("\n".join(lines) + "\n")
    return lines


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A directory with weights/, train.csv, dev.csv and test.csv, which has no labels."""
    directory = tmp_path_factory.mktemp("given")
    write_weights(directory / "weights", write_vocabulary(directory / "vocab.txt"), num_layers=2)
    write_examples(directory / "train.csv", 61, seed=0)
    write_examples(directory / "dev.csv", 30, seed=1)
    (directory / "test.csv").write_text("text\nold river\nking\n")
    return directory


FIELDS = {
    "max_seq_length": 16,
    "batch_size": 8,
    "num_epochs": 2.0,
    "learning_rate": 3e-3,
    "eval_every": 4,
    "log_every": 2,
}


def small_config(given, **changes):
    config = text_classification.get_config()
    config.init_from = str(given / "weights")
    for name in ("train", "dev", "test"):
        config.data[name] = str(given / f"{name}.csv")
    for name, value in (FIELDS | changes).items():
        config.update_from_flattened_dict({name.replace("__", "."): value})
    return config.lock()


@pytest.fixture(scope="module")
def setup(given):
    """Keeps its compiled functions for the runs that share it."""
    return finetune.prepare(small_config(given))


@pytest.fixture(scope="module")
def predicted():
    """The number of features of each split that `finished` predicted."""
    return []


@pytest.fixture(scope="module")
def finished(given, setup, predicted, tmp_path_factory):
    """Runs sixteen steps without interruption, with an evaluation after every fourth."""
    workdir, predict = tmp_path_factory.mktemp("finished"), finetune.predict

    def count_and_predict(*args, **options):
        predicted.append(len(args[3]))
        return predict(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "prepare", lambda config, labels: setup)
        patch.setattr(finetune, "predict", count_and_predict)
        return workdir, finetune.train_and_evaluate(small_config(given), workdir)


def saved_params(workdir) -> dict:
    return jax.device_get(bert_jax.load(workdir).params)


def records(workdir) -> list[dict]:
    lines = read_lines(workdir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def without_seconds(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "seconds"}


def assert_equal_runs(one, two):
    for a, b in zip(*(jax.tree.leaves(saved_params(w)) for w in (one, two)), strict=True):
        np.testing.assert_array_equal(a, b)
    results = [json.loads((workdir / "result.json").read_text()) for workdir in (one, two)]
    assert without_seconds(results[0]) == without_seconds(results[1])
    assert records(one) == records(two)
    assert saved_steps(one / "best") == saved_steps(two / "best")


def test_run_learns_and_writes_the_documented_files(finished):
    workdir, result = finished
    assert json.loads((workdir / "result.json").read_text()) | {"model": str(workdir)} == result
    assert result["dev"]["accuracy"] > 0.8 and not result["collapsed"]
    assert (workdir / "config.json").exists() and list((workdir / "tensorboard").iterdir())
    text = (workdir / "predictions" / "dev.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["id"] for line in lines] == [str(n) for n in range(30)]
    (interval,) = result["intervals"]  # test.csv has no labels.
    assert interval.items() >= {"split": "dev", "metric": "accuracy", "examples": 30}.items()
    assert 0 < interval["low"] <= result["dev"]["accuracy"] <= interval["high"] <= 1
    majority = {"split": "dev", "baseline": "majority", "metric": "accuracy"}
    assert result["baselines"][0] == majority | {"score": pytest.approx(0.5, abs=0.2)}
    splits = [(each["split"], each["inputs"]) for each in result["duplicates"]]
    assert splits == [("dev", 30), ("test", 2)]
    # The loss of training, without dropout, over all examples.
    losses = [-np.log(line["probabilities"][line["label"]]) for line in lines]
    assert result["dev"]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert not (workdir / "checkpoints").exists()  # What only resuming needs.


@pytest.mark.slow
def test_fit_of_examples_in_memory_is_the_run_of_their_file(given, finished, tmp_path):
    train, dev = (
        list(csv.DictReader((given / f"{name}.csv").read_text().splitlines()))
        for name in ("train", "dev")
    )

    def fit(train):
        weights, test = given / "weights", given / "test.csv"
        return bert_jax.fit(weights, train, dev, test, workdir=tmp_path / "run", **FIELDS)

    model, result = fit(train)
    assert result["model"] == str(tmp_path / "run")
    expected = json.loads((finished[0] / "result.json").read_text())
    assert without_seconds(expected).items() <= without_seconds(result).items()
    jax.tree.map(np.testing.assert_array_equal, model.params, saved_params(finished[0]))
    assert fit(train)[1] == result
    with pytest.raises(ValueError, match=r"/train\.jsonl"):
        fit(train[1:])
    with pytest.raises(ValueError, match=r"learning_rat .*learning_rate"):
        bert_jax.fit(given / "weights", train, workdir=tmp_path / "other", learning_rat=1e-3)


def test_checkpoint_that_load_reads_is_the_best_on_dev(finished):
    workdir, result = finished
    scores = {r["step"]: r["dev/accuracy"] for r in records(workdir) if "dev/accuracy" in r}
    assert list(scores) == [4, 8, 12, 16]
    best = max(scores, key=scores.get)
    assert find_checkpoint(workdir).name == str(best) == str(result["best_step"])
    assert result["dev"]["accuracy"] == scores[best]


@pytest.mark.parametrize(
    ("stop_at", "saved"),
    [
        pytest.param(4, True, marks=pytest.mark.slow),
        pytest.param(8, True, marks=pytest.mark.exhaustive),
        pytest.param(8, False, marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    finished, given, setup, tmp_path, monkeypatch, stop_at, saved
):
    """Includes a run that ended between writing its best checkpoint and saving its state."""

    class Stop(Exception):
        pass

    class StoppingCheckpointer(finetune.Checkpointer):
        def save(self, state):
            with pytest.raises(ValueError, match="is in use by process"):
                claim_workdir(tmp_path, {})
            if saved or int(state.step) != stop_at:
                super().save(state)
                self.wait()
            if int(state.step) == stop_at:
                raise Stop

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(finetune, "Checkpointer", StoppingCheckpointer)
        finetune.run_trials(setup, [Trial(setup.config, tmp_path)], tmp_path)
    finetune.train_and_evaluate(small_config(given), tmp_path)
    assert_equal_runs(finished[0], tmp_path)


@pytest.mark.slow
def test_run_stopped_by_a_signal_between_two_reports_writes_the_same_metrics(
    finished, given, setup, tmp_path, monkeypatch
):
    class SignaledStop(distributed.StopRequest):
        steps = itertools.count(1)

        def should_stop(self):
            return next(self.steps) == 7

    with monkeypatch.context() as patched, pytest.raises(RunStopped):
        patched.setattr(distributed, "StopRequest", SignaledStop)
        finetune.run_trials(setup, [Trial(setup.config, tmp_path)], tmp_path)
    assert records(tmp_path)[-1]["step"] == 6
    finetune.train_and_evaluate(small_config(given), tmp_path)
    assert_equal_runs(finished[0], tmp_path)


@pytest.mark.slow
def test_run_stopped_after_its_last_step_has_ended_and_leaves_no_training_state(
    finished, given, setup, tmp_path, monkeypatch
):
    class SignaledStop(distributed.StopRequest):
        requested_at_end = True

    with monkeypatch.context() as patched, pytest.raises(RunStopped, match="at step 16"):
        patched.setattr(distributed, "StopRequest", SignaledStop)
        finetune.run_trials(setup, [Trial(setup.config, tmp_path)], tmp_path)
    assert_equal_runs(finished[0], tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    monkeypatch.setattr(finetune, "finetune_batches", None)  # Nothing is left to train.
    assert without_seconds(finetune.train_and_evaluate(small_config(given), tmp_path)) == (
        without_seconds(finished[1]) | {"model": str(tmp_path)}
    )


@pytest.mark.slow
def test_run_of_an_earlier_version_is_resumed_bit_for_bit(finished, given, tmp_path):
    """Its weights and its checkpoint store the tokenizer in another form."""
    shutil.copytree(given, tmp_path / "given")
    make_legacy_checkpoint(tmp_path / "given/weights")
    config = small_config(tmp_path / "given")

    with stopped_after_save(finetune):
        finetune.train_and_evaluate(config, tmp_path / "run")
    (step,) = saved_steps(tmp_path / "run/checkpoints")
    make_legacy_checkpoint(tmp_path / f"run/checkpoints/{step}")
    finetune.train_and_evaluate(small_config(given), tmp_path / "run")
    assert_equal_runs(finished[0], tmp_path / "run")


@pytest.mark.slow
def test_run_that_ended_before_writing_its_result_gives_the_same_result(finished, tmp_path, given):
    """Starts from the beginning, since no state to resume is left."""
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    (workdir / "result.json").unlink()
    finetune.train_and_evaluate(small_config(given), workdir)
    assert_equal_runs(finished[0], workdir)


@pytest.mark.slow
def test_resumed_run_keeps_a_best_checkpoint_of_the_same_step(finished, tmp_path, given):
    """On other devices, rounding can give a step that was saved before a slightly higher score."""
    workdir = tmp_path / "run"
    shutil.copytree(finished[0], workdir)
    (workdir / "result.json").unlink()
    (path,) = (workdir / "best").glob("*/config/metadata")
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"score": settings["score"] - 1e-4}))
    write_checksums(path.parents[1])
    assert finetune.train_and_evaluate(small_config(given), workdir)["dev"] == finished[1]["dev"]


def test_finished_run_is_not_run_again(finished, given, monkeypatch):
    workdir, result = finished
    monkeypatch.setattr(finetune, "finetune_batches", None)
    assert finetune.train_and_evaluate(small_config(given), workdir) == result


def test_workdir_of_other_settings_is_an_error(finished, given):
    with pytest.raises(ValueError, match=r"learning_rate: 0.003 in .*, 0.001 now"):
        finetune.train_and_evaluate(small_config(given, learning_rate=1e-3), finished[0])


def test_finished_run_is_found_again_by_the_contents_of_its_files(finished, given, tmp_path):
    shutil.copytree(given, tmp_path / "given")
    config = small_config(tmp_path / "given")
    assert finetune.train_and_evaluate(config, finished[0]) == finished[1]

    text = (given / "dev.csv").read_text()
    (tmp_path / "given" / "dev.csv").write_text(text.replace("river", "road"))
    with pytest.raises(ValueError, match=r"other settings:\n  contents\.dev: .* now\nUse the same"):
        finetune.train_and_evaluate(config, finished[0])
    (tmp_path / "given" / "dev.csv").write_text(text)

    source = read_model(given / "weights")
    source.params["encoder"]["pooler"]["dense"]["bias"] += 1e-6
    shutil.rmtree(tmp_path / "given" / "weights")
    write_checkpoint(
        tmp_path / "given" / "weights", source.params, source.settings, source.tokenizer
    )
    with pytest.raises(ValueError, match=r"settings:\n  contents\.init_from: .* now\nUse the same"):
        finetune.train_and_evaluate(config, finished[0])


@pytest.mark.slow
def test_several_seeds_give_median_min_and_max_and_more_can_be_added(finished, given, tmp_path):
    two = finetune.train_and_evaluate(small_config(given, num_seeds=2), tmp_path)
    config = small_config(given, num_seeds=3)
    result = finetune.train_and_evaluate(config, tmp_path)
    assert result["seeds"][:2] == two["seeds"]  # Not run again: even the seconds are equal.
    scores = sorted(seed["dev"]["accuracy"] for seed in result["seeds"])
    assert result["scores"]["dev/accuracy"] == {
        "min": scores[0],
        "median": scores[1],
        "max": scores[2],
    }
    assert [seed["seed"] for seed in result["seeds"]] == [0, 1, 2]
    best = max(result["seeds"], key=lambda seed: seed["dev"]["accuracy"])
    assert result["model"] == str(tmp_path / f"seed_{best['seed']}")
    # The rounding of stacked products differs.
    assert result["seeds"][0]["dev"] == pytest.approx(finished[1]["dev"], abs=1e-5)
    # The second call computes nothing.
    again = finetune.train_and_evaluate(config, tmp_path)
    assert without_seconds(again) == without_seconds(result)


def run_trials(given, directory, *changes, **common) -> list[dict]:
    """Runs trials that differ in `changes` as one program, each in a directory of its own."""
    configs = [small_config(given, **common, **fields) for fields in changes]
    trials = [Trial(config, directory / f"trial_{i}") for i, config in enumerate(configs)]
    return finetune.run_trials(finetune.prepare(configs[0]), trials, directory)


@pytest.mark.slow
def test_stacked_trials_equal_the_same_trials_alone(given, tmp_path):
    changes = (
        {"seed": 0, "model__dropout_rate": 0.0, "num_epochs": 1.0},
        {"seed": 1, "model__dropout_rate": 0.2, "weight_decay": 0.1},
        {"seed": 0, "learning_rate": 1e-3, "warmup_fraction": 0.5, "num_epochs": 1.5},
    )
    stacked = run_trials(given, tmp_path / "stack", *changes, mesh__trial=2)
    assert not (tmp_path / "stack/checkpoints").exists()
    for index, (result, fields) in enumerate(zip(stacked, changes, strict=True)):
        alone = run_trials(given, tmp_path / f"alone_{index}", fields)[0]
        assert result["dev"] == pytest.approx(alone["dev"], abs=1e-5)
        assert result["best_step"] == alone["best_step"] and result["steps"] == alone["steps"]
        workdirs = tmp_path / f"stack/trial_{index}", tmp_path / f"alone_{index}/trial_0"
        for one, two in zip(*map(jax.tree.leaves, map(saved_params, workdirs)), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
        steps = [[record["step"] for record in records(workdir)] for workdir in workdirs]
        assert steps[0] == steps[1]


@pytest.mark.slow
def test_stacked_adapters_share_an_encoder_and_resume(given, tmp_path):
    """Each trial ends as it does alone, as a plain model that has changed by A B alone."""
    changes = {"seed": 0}, {"seed": 1, "learning_rate": 1e-3}
    lora = {"lora__rank": 2, "lora__targets": "query|output", "num_epochs": 1.0}
    with stopped_after_save(finetune):
        run_trials(given, tmp_path / "stack", *changes, **lora)
    checkpoint = tmp_path / "stack/checkpoints/4"
    saved = read_arrays(checkpoint / "params")
    assert saved.keys() == {"head", "lora"}
    stacked = run_trials(given, tmp_path / "stack", *changes, **lora)
    before = bert_jax.load(given / "weights").params["encoder"]
    for index, (result, fields) in enumerate(zip(stacked, changes, strict=True)):
        (alone,) = run_trials(given, tmp_path / f"alone_{index}", fields, **lora)
        assert result["dev"] == pytest.approx(alone["dev"], abs=1e-5)
        workdirs = tmp_path / f"stack/trial_{index}", tmp_path / f"alone_{index}/trial_0"
        encoder, other = (saved_params(workdir)["encoder"] for workdir in workdirs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), encoder, other)
        adapter = read_model(find_checkpoint(workdirs[0]) / "adapter")
        assert adapter.settings["head"] == bert_jax.load(workdirs[0]).settings["head"]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
            adapter.params["encoder"]["layers"],
            encoder["layers"],
        )
        moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), encoder, before)
        adapted = {"query", "attention_output", "output"}
        for path, has_moved in jax.tree.leaves_with_path(moved):
            names = [entry.key for entry in path]
            assert has_moved == (names[-1] == "kernel" and names[-2] in adapted)
        products = encoder["layers"]["query"]["kernel"] - before["layers"]["query"]["kernel"]
        singular_values = np.linalg.svd(products, compute_uv=False)
        assert np.all(singular_values[:, 2] < 1e-3 * singular_values[:, 0])  # Of rank 2.


@pytest.mark.slow
def test_diverged_trial_is_named_and_does_not_touch_the_others(given, tmp_path):
    finite, diverging = {"num_epochs": 1.0}, {"num_epochs": 1.0, "learning_rate": 1e30}
    result, diverged = run_trials(given, tmp_path / "stack", finite, diverging)
    assert diverged["diverged"] == 2 and "of step 2 is" in diverged["message"]
    alone = run_trials(given, tmp_path / "alone", finite)[0]
    assert result["dev"] == pytest.approx(alone["dev"], abs=1e-5)
    assert run_trials(given, tmp_path / "stack", finite, diverging) == [result, diverged]
    for directory in ("all", "all"):  # None is left; the second call only reads the results.
        results = run_trials(given, tmp_path / directory, diverging, diverging)
        assert [result["diverged"] for result in results] == [2, 2]
    for _ in range(2):
        with pytest.raises(Diverged, match="of step 2 is"):
            finetune.train_and_evaluate(small_config(given, learning_rate=1e30), tmp_path / "one")
    with pytest.raises(ValueError, match=r"settings:\n  learning_rate: 1e\+30 in .*, 0.003 now"):
        finetune.train_and_evaluate(small_config(given), tmp_path / "one")


@pytest.mark.exhaustive
@pytest.mark.parametrize("last_saved", [4, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_stack_resumed_after_one_of_its_trials_ended_gives_the_same_bits(
    given, tmp_path, monkeypatch, last_saved
):
    """One trial diverges and one ends after the last checkpoint; the third is compared."""
    changes = {"learning_rate": 1e30}, {"num_epochs": 1.0}, {"seed": 1}
    whole = run_trials(given, tmp_path / "whole", *changes)

    class StoppingCheckpointer(finetune.Checkpointer):
        def save(self, state):
            if int(state.step) == 12:
                raise KeyboardInterrupt
            if int(state.step) <= last_saved:
                super().save(state)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(finetune, "Checkpointer", StoppingCheckpointer)
        run_trials(given, tmp_path / "resumed", *changes)
    paths = [tmp_path / f"resumed/trial_{index}/result.json" for index in range(3)]
    assert [path.exists() for path in paths] == [True, True, False]
    ended = [path.read_text() for path in paths[:2]]
    if last_saved:
        with pytest.raises(ValueError, match="trial=2: expected a size that divides the 3 saved"):
            run_trials(given, tmp_path / "resumed", *changes, mesh__trial=2)
    resumed = run_trials(given, tmp_path / "resumed", *changes)
    assert list(map(without_seconds, resumed)) == list(map(without_seconds, whole))
    assert [path.read_text() for path in paths[:2]] == ended
    assert_equal_runs(tmp_path / "whole/trial_2", tmp_path / "resumed/trial_2")


@pytest.mark.slow
def test_trial_of_a_stack_stops_by_its_patience_and_at_the_same_step_if_it_was_killed(
    given, tmp_path, monkeypatch
):
    """It does not learn at all, so that the first of its evaluations is the best."""
    constant = {"learning_rate": 1e-30, "num_epochs": 3.0, "patience": 2}
    common = {"decay_power": 0.0, "warmup_steps": 2}
    configs = [small_config(given, **common, **fields) for fields in (constant, {"seed": 1})]
    setup = finetune.prepare(configs[0])

    def run(directory):
        trials = [Trial(config, directory / f"trial_{i}") for i, config in enumerate(configs)]
        return finetune.run_trials(setup, trials, directory)

    whole = run(tmp_path / "whole")
    assert [result["steps"] for result in whole] == [12, 16]
    assert [result.get("stopped_early") for result in whole] == [True, None]
    assert whole[0]["best_step"] == 4
    assert records(tmp_path / "whole/trial_0")[-1]["step"] == 12

    for killed_at, saved in ((4, False), (8, True), (12, True)):

        class StoppingCheckpointer(finetune.Checkpointer):
            def save(self, state, killed_at=killed_at, saved=saved):
                if saved or int(state.step) < killed_at:
                    super().save(state)
                    self.wait()
                if int(state.step) == killed_at:
                    raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(finetune, "Checkpointer", StoppingCheckpointer)
            run(tmp_path / "resumed")
    resumed = run(tmp_path / "resumed")
    assert list(map(without_seconds, resumed)) == list(map(without_seconds, whole))
    for index in range(2):
        assert_equal_runs(tmp_path / f"whole/trial_{index}", tmp_path / f"resumed/trial_{index}")


@pytest.mark.exhaustive
def test_trials_of_a_stack_are_pruned_by_the_median_also_if_it_was_killed(
    given, tmp_path, monkeypatch
):
    """None learns: the first scores, of random heads, are compared, and one trial diverges."""
    common = {"num_epochs": 0.5, "eval_every": 2, "data__test": "", "learning_rate": 1e-30}
    changes = [{"seed": seed} for seed in (1, 0, 2, 3)]
    changes += [{"seed": 0, "weight_decay": 0.1}, {"learning_rate": 1e30}]
    configs = [small_config(given, **(common | fields)) for fields in changes]
    setup = finetune.prepare(configs[0])

    def run(directory):
        trials = [Trial(config, directory / f"trial_{i}") for i, config in enumerate(configs)]
        return finetune.run_trials(setup, trials, directory, prune_from=1)

    *whole, diverged = run(tmp_path / "whole")
    scores = [result["dev"]["accuracy"] for result in whole]
    expected = []
    for number, score in enumerate(scores):
        others = [*scores[:number], *scores[number + 1 :], -math.inf]
        expected.append(score < statistics.median(others))
    assert [result.get("pruned", False) for result in whole] == expected and any(expected)
    assert [result["steps"] for result in whole] == [2 if each else 4 for each in expected]
    assert diverged["diverged"] <= 2

    class StoppingCheckpointer(finetune.Checkpointer):
        def save(self, state):
            super().save(state)
            self.wait()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(finetune, "Checkpointer", StoppingCheckpointer)
        run(tmp_path / "resumed")
    *resumed, _ = run(tmp_path / "resumed")
    assert list(map(without_seconds, resumed)) == list(map(without_seconds, whole))
    for index in range(5):
        assert_equal_runs(tmp_path / f"whole/trial_{index}", tmp_path / f"resumed/trial_{index}")


@pytest.mark.exhaustive
def test_trials_are_added_to_a_stack_that_left_its_training_state(given, tmp_path, monkeypatch):
    first, second = {"num_epochs": 1.0}, {"num_epochs": 1.0, "seed": 1}
    with monkeypatch.context() as patched:
        patched.setattr(finetune, "remove_tree", lambda path: None)
        (result,) = run_trials(given, tmp_path, first)
    assert saved_steps(tmp_path / "checkpoints")
    assert [run["seed"] for run in run_trials(given, tmp_path, first, second)] == [0, 1]
    assert json.loads((tmp_path / "trial_0/result.json").read_text()) == result


@pytest.mark.exhaustive
def test_several_labels_per_text_are_learned_and_classified(given, tmp_path):
    lines = [json.loads(line) for line in write_label_sets(tmp_path / "train.jsonl")]
    weights = write_weights(tmp_path / "weights", given / "vocab.txt", num_layers=2)
    config = small_config(
        given,
        init_from=str(weights),
        data__train=str(tmp_path / "train.jsonl"),
        data__dev=str(tmp_path / "train.jsonl"),
        data__label_separator="|",
        num_epochs=6.0,
        eval_every=0,
        layer_decay=0.9,
        freeze_layers=1,
        max_eval_examples=20,
    )
    result = finetune.train_and_evaluate(config, tmp_path / "run")
    assert result["dev"].keys() == {"micro_f1", "macro_f1", "loss"}
    assert result["dev"]["micro_f1"] > 0.8
    model = bert_jax.load(tmp_path / "run")
    assert model.head["labels"] == list(CLASSES)
    found = [sorted(each.label for each in own) for own in model.classify([lines[0]["text"]])]
    text = (tmp_path / "run/predictions/dev.jsonl").read_text()
    written = [json.loads(line) for line in text.splitlines()]
    assert len(written) == 20 and found == [sorted(written[0]["prediction"])]
    assert written[0]["label"] == lines[0]["label"]
    before, after = bert_jax.load(weights).params["encoder"], model.params["encoder"]
    frozen = jax.tree.map(
        lambda a, b: np.array_equal(a, b), before["embeddings"], after["embeddings"]
    )
    assert all(jax.tree.leaves(frozen))
    kernels = [each["layers"]["query"]["kernel"] for each in (before, after)]
    assert np.array_equal(kernels[0][0], kernels[1][0])
    assert not np.array_equal(kernels[0][1], kernels[1][1])


@pytest.mark.exhaustive
def test_values_of_any_scale_are_learned_and_keep_their_scale(given, tmp_path):
    """Labels around 1,000, and a learning rate that would not reach their mean."""
    rng, lines = random.Random(0), ["text,label"]
    for _ in range(40):
        words = rng.choices(WORDS[:8], k=4)
        lines.append(f"{' '.join(words)},{1000 + 3 * words.count(WORDS[0]) + rng.random()}")
    (tmp_path / "values.csv").write_text("\n".join(lines) + "\n")
    files = {f"data__{name}": str(tmp_path / "values.csv") for name in ("train", "dev", "test")}
    config = small_config(given, **files, data__regression=True, eval_every=10)
    result = finetune.train_and_evaluate(config, tmp_path / "run")
    labels = np.array([float(line.rpartition(",")[2]) for line in lines[1:]])
    lines = (tmp_path / "run/predictions/dev.jsonl").read_text().splitlines()
    predicted = np.array([json.loads(line)["prediction"] for line in lines])
    assert abs(predicted.mean() - labels.mean()) < labels.std()
    mse, mae = np.mean((predicted - labels) ** 2), np.mean(np.abs(predicted - labels))
    assert result["dev"]["mean_squared_error"] == pytest.approx(mse, rel=1e-4)
    assert result["dev"]["mean_absolute_error"] == pytest.approx(mae, rel=1e-4)
    assert result["dev"]["r2"] == pytest.approx(1 - mse / labels.var(), abs=1e-3)
    # The loss is of standardized values.
    assert result["dev"]["loss"] == pytest.approx(mse / labels.var(), rel=1e-3)
    model = bert_jax.load(tmp_path / "run")
    assert model.head["target_mean"] == pytest.approx(labels.mean())
    assert model.head["target_std"] == pytest.approx(labels.std())
    texts = [json.loads(line)["text"] for line in lines]
    assert model.classify(texts) == pytest.approx(predicted, abs=1e-3)
    # A run that continues from this head keeps its scale, and one that predicts gives its values.
    other = (tmp_path / "values.csv").read_text().replace(",100", ",900")
    (tmp_path / "other.csv").write_text(other)
    start = {"init_from": str(tmp_path / "run"), "data__regression": True}
    changed = small_config(given, **files | start | {"data__train": str(tmp_path / "other.csv")})
    assert finetune.prepare(changed).data.head_settings["target_mean"] == model.head["target_mean"]
    found = predict(tmp_path / "run", files["data__test"], tmp_path / "found.jsonl")["found.jsonl"]
    expected = {name: score for name, score in result["test"].items() if name != "loss"}
    assert found == pytest.approx(expected | {"examples": 40}, rel=1e-5)


@pytest.mark.slow
def test_collapsed_run_is_reported(given, tmp_path):
    write_weights(tmp_path / "biased", given / "vocab.txt", CLASSES, bias=50.0, num_layers=2)
    config = small_config(given, init_from=str(tmp_path / "biased"), learning_rate=1e-9)
    result = finetune.train_and_evaluate(config, tmp_path / "run")
    assert result["collapsed"]
    assert summarize_seeds([result], result["metric"])["collapsed_seeds"] == [0]


@pytest.mark.parametrize("changes", [{"num_epochs": 0.0}, {"data__train": ""}])
def test_without_training_the_error_names_the_program_that_predicts(changes, given):
    with pytest.raises(ValueError, match=r"run python -m bert_jax\.predict --model=DIR --input"):
        finetune.prepare(small_config(given, **changes))


NUMBERS = ("1", "10", "2")  # In the order of versions that sorted numbers as texts.


def as_of_an_old_version(config):
    """Returns the configuration, in which these labels were found."""
    config = config.copy_and_resolve_references()
    config.data.labels = NUMBERS
    return config


@pytest.fixture
def numbered(given, tmp_path):
    write_examples(tmp_path / "numbers.csv", 24, seed=3, labels=("1", "2", "10"))
    files = {f"data__{name}": str(tmp_path / "numbers.csv") for name in ("train", "dev", "test")}
    return small_config(given, **files, num_epochs=1.0, eval_every=2)


@pytest.mark.slow
def test_a_head_of_an_old_version_keeps_its_order_of_labels(given, numbered, tmp_path):
    write_weights(tmp_path / "old", given / "vocab.txt", NUMBERS, bias=5.0, num_layers=2)
    old = {"init_from": str(tmp_path / "old")}
    files = {f"data__{name}": numbered.data[name] for name in ("train", "dev", "test")}
    further = finetune.prepare(small_config(given, **old, **files))
    assert further.data.task.labels == NUMBERS
    new = finetune.prepare(small_config(given, **old, **files, new_head=True))
    assert new.data.task.labels == ("1", "2", "10")
    result = predict(tmp_path / "old", files["data__test"], tmp_path / "found.jsonl")
    model = bert_jax.load(tmp_path / "old")
    rows, scores = model.predict(files["data__test"])
    lines = [json.loads(x) for x in (tmp_path / "found.jsonl").open()]
    assert [row["prediction"] for row in rows] == [line["prediction"] for line in lines]
    assert scores["accuracy"] == pytest.approx(result["found.jsonl"]["accuracy"])
    assert [best.label for best in model.classify([row["text"] for row in rows])] == [
        row["prediction"] for row in rows
    ]


@pytest.mark.exhaustive
def test_a_run_of_an_old_version_is_resumed_with_its_order_of_labels(numbered, tmp_path):
    setup = finetune.prepare(as_of_an_old_version(numbered))
    fields = dataclasses.replace(setup.data, fields=numbered.data.to_dict())
    setup = dataclasses.replace(setup, config=numbered, data=fields)
    with stopped_after_save(finetune):
        finetune.run_trials(setup, [Trial(numbered, tmp_path / "run")], tmp_path / "run")
    assert saved_steps(tmp_path / "run/checkpoints") == [2]
    result = finetune.train_and_evaluate(numbered, tmp_path / "run")
    model = bert_jax.load(tmp_path / "run")
    assert model.head["labels"] == list(NUMBERS)
    found = model.predict(numbered.data.dev).scores
    assert found["accuracy"] == pytest.approx(result["dev"]["accuracy"])


@pytest.mark.slow
def test_without_dev_the_last_checkpoint_is_kept(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_config(given, data__dev="", data__test=str(given / "dev.csv"), num_epochs=1.0)
    result = finetune.train_and_evaluate(config, "relative/run")
    assert result["best_step"] == result["steps"] == 8 and "dev" not in result


@pytest.mark.slow
def test_a_run_whose_scores_cannot_be_compared_has_its_result(given, tmp_path, monkeypatch):
    def fail(*_):
        raise TypeError("a form of predictions that nobody knows")

    monkeypatch.setattr("bert_jax.finetuning.trials.find_intervals", fail)
    config = small_config(given, num_epochs=0.5)
    result = finetune.train_and_evaluate(config, tmp_path / "run")
    assert "accuracy" in result["dev"] and "intervals" not in result


def test_predictions_of_dev_by_the_best_parameters_are_not_repeated(finished, predicted):
    assert predicted == [30] * 4 + [2]  # Dev after steps 4, 8, 12 and 16, and then only test.


def test_split_without_labels_is_predicted_but_not_scored(finished):
    workdir, result = finished
    assert "test" not in result
    assert len((workdir / "predictions/test.jsonl").read_text().splitlines()) == 2


@pytest.mark.exhaustive
def test_head_with_the_same_labels_is_reused_and_other_labels_need_new_head(
    finished, given, tmp_path
):
    start = {"init_from": str(finished[0]), "num_epochs": 1.0}
    again = finetune.prepare(small_config(given, **start))
    np.testing.assert_array_equal(
        again.data.pretrained["head"]["kernel"], bert_jax.load(finished[0]).params["head"]["kernel"]
    )
    write_examples(tmp_path / "train.csv", 20, seed=2, labels=("east", "north", "west"))
    other = start | {"data__train": str(tmp_path / "train.csv"), "data__dev": ""}
    with pytest.raises(ValueError, match=r"labels=north,south, .* east,north,west"):
        finetune.train_and_evaluate(small_config(given, **other), tmp_path / "other")
    assert not (tmp_path / "other" / "config.json").exists()
    other |= {"new_head": True}
    finetune.train_and_evaluate(small_config(given, **other), tmp_path / "other")
    assert bert_jax.load(tmp_path / "other").params["head"]["bias"].shape == (3,)


def test_tensors_read_from_the_weights_are_logged(given, caplog):
    with caplog.at_level("DEBUG", logger="absl"):
        finetune.prepare(small_config(given))
    shown = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert f"Read 23 tensors from {given / 'weights'}; --verbosity=1 lists them" in shown
    assert not [text for text in shown if "\n" in text]  # No tables unless asked.
    lines = [line.split() for line in caplog.text.splitlines()]
    assert ["loaded", "1", "encoder/pooler/dense/kernel"] in lines
    assert ["missing", "0"] in lines and ["unused", "0"] in lines


WRONG = {
    "no weights": ({"init_from": ""}, "no weights to start from: set config.init_from=DIR"),
    "weights nowhere": ({"init_from": "/nowhere"}, "/nowhere does not exist; expected a workdir"),
    "too long": ({"max_seq_length": 64}, "max_seq_length=64: expected at least 8 and at most 32"),
    "learning rate": ({"learning_rate": -1.0}, "learning_rate=-1"),
    "no seeds": ({"num_seeds": 0}, "num_seeds=0: expected at least 1"),
    "train nowhere": ({"data__train": "/nowhere.csv"}, "no file /nowhere.csv"),
    "metric": ({"data__metric": "acuracy"}, "acuracy: expected one of accuracy, macro_f1"),
    "unknown task": (
        {"task": "tekst"},
        r"config.task=tekst: .*expected glue, .*, text_class",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_found_before_the_first_step(case, given, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "finetune_batches", None)
    changes, message = WRONG[case]
    with pytest.raises((ValueError, OSError), match=message):
        finetune.train_and_evaluate(small_config(given, **changes), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_empty_directory_is_not_a_checkpoint(given, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint.*bert_config.json"):
        finetune.train_and_evaluate(small_config(given, init_from=str(tmp_path)), tmp_path / "run")


def finetune_in_processes(given, workdir, num_processes, devices_per_process, **changes):
    config = small_config(given)
    command = ["bert_jax.finetune", "--config=configs/finetune/text_classification.py"]
    command += [f"--config.{name}={value}" for name, value in (FIELDS | changes).items()]
    command += [f"--config.init_from={config.init_from}"]
    command += [f"--config.data.{name}={config.data[name]}" for name in ("train", "dev")]
    with commands.ended(
        commands.launch(
            command,
            workdir,
            num_processes=num_processes,
            devices_per_process=devices_per_process,
        )
    ) as started:
        statuses = commands.finish(started)
    assert not any(statuses), commands.log_of(workdir).read_text()[-3000:]


@pytest.mark.exhaustive
def test_two_processes_stop_early_together(given, tmp_path):
    """Nothing is learned, so that the second evaluation is not better than the first."""
    endless = {"patience": 1, "decay_power": 0.0, "warmup_steps": 2, "num_seeds": 2}
    finetune_in_processes(given, tmp_path, 2, 1, learning_rate=1e-30, **endless)
    result = json.loads((tmp_path / "result.json").read_text())
    ended = [(seed["best_step"], seed["steps"], seed["stopped_early"]) for seed in result["seeds"]]
    assert ended == [(4, 8, True)] * 2


@pytest.mark.slow
def test_two_processes_train_and_score_as_one(given, tmp_path):
    for name, count, devices in (("one", 1, 4), ("two", 2, 2)):
        finetune_in_processes(given, tmp_path / name, count, devices)
    one, two = (saved_params(tmp_path / name) for name in ("one", "two"))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "two")]
    assert results[0]["dev"] == pytest.approx(results[1]["dev"], rel=1e-4)
    steps = [record["step"] for record in records(tmp_path / "two")]
    assert steps == sorted(steps) and len(steps) == len(records(tmp_path / "one"))
