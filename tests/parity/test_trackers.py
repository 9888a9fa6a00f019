"""What W&B, MLflow and Trackio store of a run without a network, read back (`make parity`)."""

import json
import random
import struct
from typing import NamedTuple

import pytest
from flax.traverse_util import flatten_dict

from bert_jax import finetune, pretrain
from bert_jax.configs.finetune import text_classification
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines
from tests.helpers.models import write_weights
from tests.helpers.runs import small_config

pytestmark = pytest.mark.usefixtures("two_devices")


class Stored(NamedTuple):
    """What a tracker stored of a run: its settings, and (step, name, value) of each metric."""

    settings: dict
    metrics: list[tuple[int, str, float]]


def wandb_records(path):
    """Yields the records of a .wandb file: a header of 7 bytes, then blocks as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, content = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32_768 - position % 32_768
        if left < 7:  # The padding of a block.
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        content += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # A whole record, or the end of one.
            yield Record.FromString(content)
            content = b""


def read_wandb(directory) -> dict[str, Stored]:
    """Returns the runs by name; a resumed one has a file for each start, with the same id."""
    runs, ids = {}, {}
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                name, items = record.run.display_name, record.run.config.update
                settings = {item.key: json.loads(item.value_json) for item in items}
                del settings["_wandb"]
                run = runs.setdefault(name, Stored(settings, []))
                assert ids.setdefault(name, record.run.run_id) == record.run.run_id
                assert run.settings == settings
            elif record.HasField("history"):
                values = {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                step = values.pop("step")
                own = {name: value for name, value in values.items() if name[0] != "_"}
                run.metrics.extend((step, name, value) for name, value in own.items())
    return runs


def read_mlflow(directory) -> dict[str, Stored]:
    from mlflow import MlflowClient

    client, runs = MlflowClient(), {}
    experiment = client.get_experiment_by_name("bert_jax")
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status == "FINISHED"
        metrics = [
            (metric.step, name, metric.value)
            for name in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
        runs[run.info.run_name] = Stored(run.data.params, metrics)
    return runs


def read_trackio(directory) -> dict[str, Stored]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = {}
    for run in trackio.Api().runs("bert_jax"):
        if not run.name.startswith(str(directory)):  # Of another test.
            continue
        settings = {name: value for name, value in run.config.items() if name[0] != "_"}
        metrics = []
        for values in SQLiteStorage.get_logs("bert_jax", run.name, run_id=run.id):
            step = values.pop("step")
            del values["timestamp"]
            metrics += [(step, name, value) for name, value in values.items()]
        runs[run.name.rpartition("-")[0]] = Stored(settings, metrics)
    return runs


READ = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.fixture(params=READ)
def tracker(request, tmp_path, monkeypatch):
    """The name of a tracker that stores what it gets below `tmp_path`."""
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),  # Read when it is imported.
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    library = pytest.importorskip(request.param)
    yield request.param
    if request.param == "wandb":
        library.teardown()


def write_examples(path, count):
    """Texts of words that only one label has."""
    rng = random.Random(count)
    lines = ["text,label"]
    for number in range(count):
        words = rng.choices(WORDS[number % 2 :: 2], k=5)
        lines.append(f"{' '.join(words)},{('north', 'south')[number % 2]}")
    path.write_text("\n".join(lines) + "\n")


def records(workdir) -> list[dict]:
    return read_lines(workdir / "metrics.jsonl")


def metrics_of(lines: list[dict]) -> list[tuple[int, str, float]]:
    return [
        (line["step"], name, value)
        for line in lines
        for name, value in line.items()
        if name != "step"
    ]


def assert_stored(stored: Stored, tracker: str, settings: dict, lines: list[dict]):
    """Checks that a tracker stored the settings and `lines` of metrics.jsonl, and nothing else."""
    if tracker == "mlflow":  # Its parameters are flat, and texts.
        expected = {name: str(value) for name, value in flatten_dict(settings, sep=".").items()}
    else:
        expected = json.loads(json.dumps(settings))
    assert stored.settings == expected
    assert sorted(stored.metrics) == sorted(metrics_of(lines))


def test_stacked_trials_that_resume_are_stored_as_in_metrics_jsonl(tracker, tmp_path, monkeypatch):
    """The run is killed at step 12 and resumes from step 8: these steps are stored twice."""

    class Killed(Exception):
        pass

    class KilledCheckpointer(finetune.Checkpointer):
        def save(self, state):
            if int(state.step) == 12:
                raise Killed
            super().save(state)
            self.wait()

    write_weights(tmp_path / "weights", write_vocabulary(tmp_path / "vocab.txt"))
    write_examples(tmp_path / "train.csv", 64)
    write_examples(tmp_path / "dev.csv", 16)
    config = text_classification.get_config().lock()
    config.init_from = str(tmp_path / "weights")
    config.data.train, config.data.dev = str(tmp_path / "train.csv"), str(tmp_path / "dev.csv")
    config.update({"max_seq_length": 16, "batch_size": 8, "num_epochs": 2.0, "num_seeds": 2})
    config.update({"log_every": 2, "eval_every": 4, "tracker": tracker})
    workdirs = [tmp_path / f"run/seed_{seed}" for seed in (0, 1)]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(finetune, "Checkpointer", KilledCheckpointer)
        finetune.train_and_evaluate(config, tmp_path / "run")
    killed = [records(workdir) for workdir in workdirs]
    assert [lines[-1]["step"] for lines in killed] == [12, 12]
    finetune.train_and_evaluate(config, tmp_path / "run")
    finetune.train_and_evaluate(config, tmp_path / "run")  # A finished run sends nothing.
    runs = READ[tracker](tmp_path)
    assert runs.keys() == {str(workdir) for workdir in workdirs}
    for seed, (workdir, before) in enumerate(zip(workdirs, killed, strict=True)):
        repeated = [line for line in before if line["step"] > 8]
        assert repeated
        settings = config.to_dict() | {"seed": seed}
        assert_stored(runs[str(workdir)], tracker, settings, records(workdir) + repeated)


def test_pre_training_stores_its_configuration_and_metrics(tracker, corpus, tmp_path):
    """Not the tables of its corpora and modules, which checkpoints have."""
    config = small_config(corpus, tracker=tracker)
    pretrain.train_and_evaluate(config, tmp_path / "run")
    runs = READ[tracker](tmp_path)
    assert list(runs) == [str(tmp_path / "run")]
    lines = records(tmp_path / "run")
    assert_stored(runs[str(tmp_path / "run")], tracker, config.to_dict(), lines)
