"""The shared entry point of pre-training and fine-tuning: flags, start, and how a run ends."""

import collections
import contextlib
import json
import logging as std_logging
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from bert_jax.runtime import command_line, distributed
from bert_jax.runtime.command_line import INTERRUPTED, PREEMPTED, NonFiniteLoss, program_name

STEPS_AHEAD = 2
"""Number of steps dispatched to the devices before the first of them has finished."""


def define_flags() -> None:
    """Defines the flags of a run."""
    config_flags.DEFINE_config_file(
        "config", None, "Config file, from configs/pretrain/ or configs/finetune/."
    )
    flags.DEFINE_string("workdir", None, "Directory of the run; created if it does not exist.")
    flags.DEFINE_bool("multihost", False, "Run one process per host of a cluster or TPU pod.")
    flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0, where no cluster manager provides it."
    )
    flags.DEFINE_integer("num_processes", None, "Number of processes of the run.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
    flags.DEFINE_integer(
        "initialization_timeout", 300, "Seconds to wait for the other processes at the start."
    )
    flags.DEFINE_integer(
        "heartbeat_timeout", 100, "Seconds without a heartbeat before a process is considered dead."
    )
    flags.mark_flags_as_required(["config", "workdir"])


def start(train_and_evaluate: Callable[[ConfigDict, str], dict]) -> NoReturn:
    """Parses the flags and runs `train_and_evaluate(config, workdir)`."""
    define_flags()
    app.run(lambda argv: _run(argv, train_and_evaluate), flags_parser=command_line.parse_flags)


def _run(argv: list[str], train_and_evaluate: Callable[[ConfigDict, str], dict]) -> None:
    """Connects the processes, trains, and exits with a code that launchers understand."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(  # Orbax logs every thread and option.
        lambda record: "orbax" not in record.pathname or record.levelno > std_logging.INFO
    )
    values = flags.FLAGS
    is_distributed = values.multihost or values.coordinator is not None
    # Until the training loop handles them. Not as KeyboardInterrupt, which destructors swallow.
    message = "Stopped before the first training step. Run the same command again."
    signal.signal(signal.SIGINT, lambda *_: exit_now(message, INTERRUPTED))
    if not is_distributed:  # Otherwise JAX handles SIGTERM.
        signal.signal(signal.SIGTERM, lambda *_: exit_now(message, PREEMPTED))
    try:
        if is_distributed:
            distributed.initialize(
                coordinator=values.coordinator,
                num_processes=values.num_processes,
                process_id=values.process_id,
                initialization_timeout=values.initialization_timeout,
                heartbeat_timeout=values.heartbeat_timeout,
            )
        elif (values.num_processes or values.process_id) is not None:
            raise ValueError("--num_processes and --process_id need --coordinator or --multihost")
        result = train_and_evaluate(values.config, values.workdir)
    except (ImportError, ValueError, OSError, command_line.CheckpointError, NonFiniteLoss) as error:
        logging.debug("Traceback:", exc_info=True)  # Shown with --verbosity=1.
        exit_now(str(error), 1)
    except command_line.Preempted as error:
        print(f"\n{program_name()}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BaseException as error:
        if isinstance(error, (jax.errors.JaxRuntimeError, distributed.LostProcess)):
            reason = (str(error).splitlines() or [""])[0]
            if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
                exit_now(
                    f"out of memory ({reason}). Set a smaller --config.per_device_batch_size, or "
                    "--config.model.remat=full; tools/tpu_report.py predicts what fits",
                    1,
                )
            if is_distributed and distributed.is_lost_process_error(error):
                exit_now(
                    f"lost another process, or it does not respond ({reason}). Run the same "
                    "command on all hosts to resume from the last checkpoint",
                    PREEMPTED,
                )
        if not is_distributed:
            raise
        # A normal exit of Python would wait minutes for the other processes.
        exit_now("".join(traceback.format_exception(error)), 1)
    if jax.process_index() == 0:
        print(json.dumps(result, indent=2))


def exit_now(message: str, exit_code: int) -> NoReturn:
    """Prints `message` and exits without waiting for other processes or running compilations."""
    with contextlib.suppress(OSError):  # The log may be on a full disk.
        print(f"\n{program_name()}: {message}", file=sys.stderr, flush=True)
    os._exit(exit_code)


def limit_dispatch(step_metrics: list[dict]) -> None:
    """Blocks until at most `STEPS_AHEAD` of the steps with these metrics are running.

    That keeps the devices busy; more would delay the response to a preemption.
    """
    if len(step_metrics) > STEPS_AHEAD:
        jax.block_until_ready(step_metrics[-1 - STEPS_AHEAD])


def check_finite(step_metrics: list[dict], last_step: int) -> dict[str, float]:
    """Returns the metrics of `last_step`, the last of the list; raises NonFiniteLoss for any."""
    for step, values in enumerate(step_metrics, last_step - len(step_metrics) + 1):
        for name in ("loss", "gradient_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                raise NonFiniteLoss(
                    f"the {name} of step {step} is {values[name]}. Lower the learning rate, "
                    "lengthen the warm-up, or inspect the rows of that step, and start in a new "
                    "workdir; the last checkpoint here is finite"
                )
    return step_metrics[-1]


def enable_compilation_cache(workdir: pathlib.Path) -> None:
    """Caches compiled programs in the workdir, unless the environment names another directory."""
    directory = jax.config.jax_compilation_cache_dir or str(workdir / "compiled")
    jax.config.update("jax_compilation_cache_dir", directory)


@contextlib.contextmanager
def count_compilations() -> Iterator[collections.Counter]:
    """Yields a counter of JAX's monitoring events, for `log_first_step`."""
    events = collections.Counter()

    def count(event: str, **_):
        events[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(count)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(count)


def log_first_step(compilations: collections.Counter) -> None:
    """Logs the time from the start of the process to now, and the counts of compiled programs."""
    hits = compilations["cache_hits"]
    logging.info(
        "First step done %.1f s after the process began; %d programs compiled, %d found in the "
        "cache",
        seconds_since_process_start(),
        compilations["compile_requests_use_cache"] - hits,
        hits,
    )


def seconds_since_process_start() -> float:
    """Returns the age of this process in seconds, including the time for imports."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_time = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # Seconds after boot; see proc(5).
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_time
