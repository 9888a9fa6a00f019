"""A job that could not run on its slice is found out before the slice is asked for."""

import subprocess
import sys

import pytest

from configs.pretrain import pod_base
from tests import helpers

TOOLS = helpers.ROOT / "tools"
sys.path.insert(0, str(TOOLS))
from launch_check import check  # noqa: E402


def pod_config(**changes):
    config = pod_base.get_config("v6e")
    config.corpus = config.long_phase.corpus = "/gcs/corpus"
    config.topology = "v6e:2x4"
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


def test_a_job_that_suits_its_slice_is_let_through():
    check(pod_config(), "v6e-8", 1)  # As many devices as the tests have.
    check(pod_config(topology="v6e:2x2:2"), "v6e-4", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "v5e:2x4"}, "for v5e:2x4 .8 chips of v5e in each of 1 slices., but --acc"),
        ({"topology": "v6e:2x2:2"}, "has 8 chips of v6e and --num_slices=1"),
        ({"mesh__fsdp": 3}, "does not divide the 8 devices"),
        ({"batch_size": 12}, "batch_size 12 is not divisible by 8 devices"),
        ({"eval_batch_size": 12}, "batch_size 12 is not divisible by the 8 devices"),
        ({"learning_rate": 0.0}, "--config.learning_rate=0.0: expected at least"),
        ({"corpus": "/home/me/corpus"}, "--config.corpus=/home/me/corpus: expected a directory"),
        ({"long_phase__corpus": "corpus"}, "--config.long_phase.corpus=corpus: expected a direct"),
    ],
)
def test_a_job_that_does_not_suit_its_slice_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(pod_config(**changes), "v6e-8", 1)


def test_flags_of_the_job_are_tried_on_the_devices_of_its_slice():
    command = [sys.executable, str(TOOLS / "launch_check.py"), "v3-16", "2", "--workdir=/gcs/a"]
    config = f"--config={TOOLS.parent}/configs/pretrain/bert_tiny.py"
    given = [config, "--config.corpus=/gcs/c", "--config.long_phase.corpus=/gcs/c"]
    run = subprocess.run([*command, *given, "--config.mesh.fsdp=5"], capture_output=True, text=True)
    assert run.returncode == 1 and "does not divide the 32 devices" in run.stderr
    run = subprocess.run([*command, *given, "--config.mesh.fdsp=4"], capture_output=True, text=True)
    assert run.returncode == 1 and "fdsp" in run.stderr and "Traceback" not in run.stderr
    run = subprocess.run([*command, *given, "--process_id=0"], capture_output=True, text=True)
    assert run.returncode == 1 and "--process_id is the same on all hosts" in run.stderr
