"""What both entry points share: their flags, and how a run begins and ends."""

import collections
import contextlib
import functools
import json
import logging as std_logging
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from bert_jax.runtime import distributed
from bert_jax.runtime.exit_status import INTERRUPTED, PREEMPTED
from bert_jax.runtime.flag_errors import parse_flags, program
from bert_jax.training.checkpoint import CheckpointError

config_flags.DEFINE_config_file(
    "config", None, "One of configs/pretrain/ or configs/finetune/.", lock_config=True
)
flags.DEFINE_string("workdir", None, "Where the run keeps everything; created if it is not there.")
flags.DEFINE_bool("multihost", False, "Run as one of several processes that the cluster tells of.")
flags.DEFINE_string("coordinator", None, "host:port of process 0, where no cluster tells of it.")
flags.DEFINE_integer("num_processes", None, "How many processes there must be.", lower_bound=1)
flags.DEFINE_integer("process_id", None, "Of this process, from 0.", lower_bound=0)
flags.DEFINE_integer("join_seconds", 300, "How long to wait for the other processes.")
flags.DEFINE_integer("heartbeat_seconds", 100, "Silence after which a process is taken for lost.")
flags.mark_flags_as_required(["config", "workdir"])


STEPS_AHEAD = 2
"""So many steps are handed to the devices before the first of them is done."""


class NonFiniteLoss(RuntimeError):
    """The loss of a step is not a number, or infinite."""


class Preempted(Exception):
    """The run was told to stop, and has saved its last step; `status` is to exit with."""

    def __init__(self, step: int, interrupted: bool):
        self.status = INTERRUPTED if interrupted else PREEMPTED
        super().__init__(f"stopped; step {step} is saved. The same command goes on from there")


def start(train_and_evaluate: Callable[[ConfigDict, str], dict]) -> NoReturn:
    """The program: reads the flags, and runs `train_and_evaluate(config, workdir)`."""
    app.run(functools.partial(run, train_and_evaluate=train_and_evaluate), flags_parser=parse_flags)


def run(argv: list[str], train_and_evaluate: Callable[[ConfigDict, str], dict]) -> None:
    """Joins, trains, and ends with a status that launchers understand."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(  # Orbax tells of each thread and option.
        lambda record: "orbax" not in record.pathname or record.levelno > std_logging.INFO
    )
    values = flags.FLAGS
    several = values.multihost or values.coordinator is not None
    # Until the loop traps them. A KeyboardInterrupt is lost where a destructor runs.
    interrupted = f"interrupted; {values.workdir} is as it was"
    signal.signal(signal.SIGINT, lambda *_: leave(interrupted, INTERRUPTED))
    if not several:  # Several processes are told by JAX.
        signal.signal(signal.SIGTERM, lambda *_: leave("stopped before the first step", PREEMPTED))
    try:
        if not several and (values.num_processes or values.process_id) is not None:
            raise ValueError("--num_processes and --process_id need --coordinator or --multihost")
        if several:
            distributed.join(
                coordinator=values.coordinator,
                num_processes=values.num_processes,
                process_id=values.process_id,
                timeout_seconds=values.join_seconds,
                heartbeat_seconds=values.heartbeat_seconds,
            )
        result = train_and_evaluate(values.config, values.workdir)
    except (ImportError, ValueError, OSError, CheckpointError, NonFiniteLoss) as error:
        logging.debug("Where it came from:", exc_info=True)  # Shown with --verbosity=1.
        leave(str(error), 1)
    except Preempted as error:
        print(f"\n{program()}: {error}", file=sys.stderr)
        sys.exit(error.status)
    except BaseException as error:
        runtime = isinstance(error, (jax.errors.JaxRuntimeError, distributed.LostProcess))
        if runtime and ("RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)):
            leave(
                f"out of memory ({str(error).splitlines()[0]}). Set a smaller "
                "--config.per_device_batch_size, or --config.model.remat=full; "
                "tools/tpu_report.py says beforehand what fits",
                1,
            )
        if runtime and several and distributed.tells_of_a_lost_process(error):
            leave(
                f"another process is lost, or does not answer ({str(error).splitlines()[0]}). "
                "Start the same command again on all hosts; it goes on from the last checkpoint",
                PREEMPTED,
            )
        if not several:
            raise
        # To end in order, Python would wait minutes for the other processes.
        leave("".join(traceback.format_exception(error)), 1)
    if jax.process_index() == 0:
        print(json.dumps(result, indent=2))


def leave(message: str, status: int) -> NoReturn:
    """Ends at once: in order would wait for the other processes, or for XLA to compile."""
    with contextlib.suppress(OSError):  # A log on a full disk.
        print(f"\n{program()}: {message}", file=sys.stderr, flush=True)
    os._exit(status)


def wait_for_step(step_metrics: list[dict]) -> None:
    """Until no more than `STEPS_AHEAD` steps are under way, of which these are the metrics.

    That keeps the devices busy; more would delay the answer to a notice to stop.
    """
    if len(step_metrics) > STEPS_AHEAD:
        jax.block_until_ready(step_metrics[-1 - STEPS_AHEAD])


def check_finite(step_metrics: list[dict], last_step: int) -> dict[str, float]:
    """The metrics of `last_step`, the last of the list; NonFiniteLoss if any is not a number."""
    for step, values in enumerate(step_metrics, last_step - len(step_metrics) + 1):
        for name in ("loss", "gradient_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                raise NonFiniteLoss(
                    f"the {name} of step {step} is {values[name]}. Nothing was saved since the "
                    "last finite checkpoint; lower the learning rate, lengthen the warm-up, or "
                    "look at the rows of that step, and start in a new workdir"
                )
    return step_metrics[-1]


def keep_compiled(workdir: pathlib.Path) -> None:
    """Has what is compiled kept in the workdir, unless the environment names another place."""
    directory = jax.config.jax_compilation_cache_dir or str(workdir / "compiled")
    jax.config.update("jax_compilation_cache_dir", directory)


@contextlib.contextmanager
def compilations():
    """Counts JAX's events, among them `compile_requests_use_cache`: the programs asked for.

    Of these, `cache_hits` had been compiled before.
    """
    events = collections.Counter()

    def count(event: str, **_):
        events[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(count)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(count)


def process_seconds() -> float:
    """Since this process began, its imports included."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # After the machine did; see proc(5).
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
