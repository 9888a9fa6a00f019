"""A job that cannot run on its slice is refused before the slice is requested."""

import subprocess
import sys

import pytest

from bert_jax.configs.pretrain import pod_base
from tests.helpers import commands

sys.path.insert(0, str(commands.ROOT / "tools"))
from launch_check import check_pretraining


def pod_config(**changes):
    config = pod_base.get_config("v6e")
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


def test_job_that_suits_its_slices_is_accepted():
    check_pretraining(pod_config(), 1)
    check_pretraining(pod_config(mesh__fsdp=4), 2)


@pytest.mark.parametrize(
    ("changes", "num_slices", "message"),
    [
        ({"mesh__fsdp": 3}, 1, "does not divide the 8 devices"),
        ({"batch_size": 12}, 1, "batch_size 12 is not divisible by 8 data shards"),
        ({"eval_batch_size": 12}, 1, "eval_batch_size=12"),
        ({"learning_rate": 0.0}, 1, "config.learning_rate=0.0"),
        ({"mesh__fsdp": 8}, 2, "data=1, but it must be a multiple of the 2"),
    ],
)
def test_job_that_does_not_suit_its_slices_is_refused(changes, num_slices, message):
    with pytest.raises(ValueError, match=message):
        check_pretraining(pod_config(**changes), num_slices)


def check_flags(base: dict, cases: list[tuple[dict, str]]) -> None:
    """Asserts that each case, changes of `base`, is refused with its message; accepted with ""."""
    arguments = []
    for changes, _ in cases:
        flags = {"num_slices": "1"} | base | changes
        words = [flags.pop("num_slices"), flags.pop("program")]
        arguments.append([*words, *(f"--{n}={flags[n]}" for n in flags)])
    results = commands.run_each("tools.launch_check", arguments)
    for (code, errors), (_, message) in zip(results, cases, strict=True):
        assert code == bool(message) and message in errors and "Traceback" not in errors, errors


@pytest.mark.slow
def test_flags_of_the_job_are_checked():
    base = {"program": "pretrain", "config": "configs/pretrain/bert_tiny.py", "workdir": "/gcs/a"}
    check_flags(
        base | {"config.corpus": "/gcs/c", "config.long_phase.corpus": "/gcs/c"},
        [
            ({"workdir": "runs/a"}, "--workdir=runs/a: expected a path below /gcs"),
            (
                {"config.distillation.teacher": "runs/b"},
                "teacher=runs/b: expected a path below",
            ),
            ({"config.estimate": "a.json"}, "--config.estimate=a.json: expected a path below /gcs"),
            ({"config.corpus": "/home/me/corpus"}, "--config.corpus=/home/me/corpus: expected"),
            ({"config.init_from": "runs/b"}, "--config.init_from=runs/b: expected a path"),
            (
                {"config.init_optimizer_from": "runs/b"},
                "--config.init_optimizer_from=runs/b: expec",
            ),
            (
                {"config.corpus": "/gcs/d:0.5,runs/b:0.5"},
                "--config.corpus=runs/b: expected a path below /gcs",
            ),
            ({"config.corpus": "/gcs/d:0.5,/gcs/b"}, "/gcs/b has no weight; give one to each"),
            ({"workdir": "gs://b/a"}, "--workdir=gs://b/a: expected a path below /gcs, where"),
            ({"config.corpus": ""}, "steps on short rows: set config.corpus=DIR, or"),
            ({"config.long_phase.corpus": ""}, "on long rows: set config.long_phase.corpus=DIR"),
            ({"config.mesh.fdsp": "4"}, "fdsp"),
            (
                {"config": f"{commands.ROOT}/configs/pretrain/bert_tiny.py"},
                "relative to the repository",
            ),
            ({"spot": "1"}, "flag 'spot'"),
            ({"process_id": "0"}, "remove --process_id: it would be the same on all hosts"),
            (
                {"program": "sweep"},
                "the configuration is for bert_jax.pretrain: set --program=pretrain",
            ),
        ],
    )


SWEEP = {
    "program": "sweep",
    "config": "configs/sweeps/paper.py:glue:mrpc",
    "workdir": "/gcs/runs/sweep",
    "config.base.init_from": "/gcs/base",
    "config.base.data.directory": "/gcs/glue",
    "config.base.mesh.trial": "8",
}


@pytest.mark.slow
def test_sweep_is_checked_before_its_slice_is_requested():
    check_flags(
        SWEEP,
        [
            ({}, ""),
            ({"workdir": "runs/a"}, "--workdir=runs/a: expected a path below /gcs"),
            ({"config.base.init_from": "runs/base"}, "--config.base.init_from=runs/base: expected"),
            ({"config.base.data.directory": "glue"}, "--config.base.data.directory=glue: expected"),
            ({"config.base.mesh.trial": "3"}, "does not divide the 8 devices"),
            ({"num_slices": "2"}, "data=1, but it must be a multiple of the 2 slices: choose a"),
            ({"config.grid.batch_size": "()"}, "config.grid.batch_size=(): expected one or more"),
            (
                {"program": "pretrain"},
                "the configuration is for bert_jax.sweep: set --program=sweep",
            ),
            ({"config": "configs/sweeps/search.py:glue:mrpc"}, ""),
        ],
    )


@pytest.mark.slow
def test_search_needs_optuna():
    flags = SWEEP | {"config": "configs/sweeps/search.py:glue:mrpc"}
    hide = "import runpy, sys; sys.modules['optuna'] = None; sys.argv = sys.argv[1:]"
    run_check = "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [
        sys.executable,
        "-c",
        f"{hide}; {run_check}",
        "tools/launch_check.py",
        "1",
    ]
    command += [flags.pop("program"), *(f"--{name}={value}" for name, value in flags.items())]
    run = subprocess.run(command, cwd=commands.ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 1 and "needs Optuna: pip" in run.stderr
    assert "Traceback" not in run.stderr
