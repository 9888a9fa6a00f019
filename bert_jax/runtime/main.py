"""The shared entry point of the mains that train: flags, start, and how a run ends."""

import faulthandler
import functools
import json
import logging as std_logging
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from bert_jax.runtime import command_line, distributed, watchdog
from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.command_line import exit_now
from bert_jax.runtime.errors import (
    DIVERGED,
    INTERRUPTED,
    PREEMPTED,
    CheckpointError,
    Diverged,
    RunStopped,
)

flags.disclaim_key_flags()  # `--help` of the main programs lists them.


def define_flags(known_fields: command_line.KnownFields) -> None:
    """Defines the flags of a run."""
    help_text = "Config file, such as configs/pretrain/bert_tiny.py:runlocal; with --help, lists "
    command_line.define_config(help_text + "its fields, their meaning and defaults.", known_fields)
    flags.DEFINE_string(
        "workdir", None, "Directory of the run, or a gs:// address; created if absent."
    )
    define_process_flags()
    help_text = "Seconds without progress, after SIGTERM or Ctrl-C, before exiting without saving."
    flags.DEFINE_integer("stop_timeout", 60, help_text)
    flags.mark_flags_as_required(["config", "workdir"])


def define_process_flags() -> None:
    """Defines the flags of a run of several processes, one per host."""
    flags.DEFINE_bool("multihost", False, "Multi-host run: run this same command on every host.")
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, if JAX detects no cluster.")
    flags.DEFINE_integer("num_processes", None, "Number of processes of the run.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
    flags.DEFINE_integer("initialization_timeout", 300, "Seconds to wait for other processes.")
    help_text = "Seconds without a heartbeat before a process is considered dead."
    flags.DEFINE_integer("heartbeat_timeout", 100, help_text)


def connect_processes() -> None:
    """Connects this process to the others of its run, as its flags say."""
    names = "coordinator num_processes process_id initialization_timeout heartbeat_timeout"
    distributed.initialize(**{name: flags.FLAGS[name].value for name in names.split()})


def start(
    train_and_evaluate: Callable[[ConfigDict, str], dict | None],
    program: str,
    known_fields: command_line.KnownFields,
) -> NoReturn:
    """Parses the flags and runs `train_and_evaluate(config, workdir)` of bert_jax.`program`.

    `known_fields` returns the fields of a configuration, for `--help`.
    Prints the result as JSON. If it is None, `train_and_evaluate` has printed its own.
    """
    command_line.keep_running_without_log()
    define_flags(known_fields)
    app.run(
        lambda argv: _run(argv, train_and_evaluate, program), flags_parser=command_line.parse_flags
    )


def limit_logging() -> None:
    """Limits the logs to what a user needs, unless --verbosity sets another level."""
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(  # Orbax logs every thread and option.
        lambda record: "orbax" not in record.pathname or record.levelno > std_logging.INFO
    )
    std_logging.getLogger("jax._src.xla_bridge").setLevel("WARNING")  # Logs absent backends.


def _run(argv: list[str], train_and_evaluate: Callable, program: str) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    # absl writes the stacks of all threads when a process crashes. Reading the stack of a running
    # thread can crash, too: JAX's abort, when another host is lost, would end as a segmentation
    # fault, which tools/tpu_worker.sh does not restart.
    faulthandler.enable(all_threads=False)
    limit_logging()
    is_distributed = values.multihost or values.coordinator is not None
    if is_distributed:
        _explainer = watchdog.explain_abort(
            f"{command_line.program_name()}: this process was aborted. The likely cause is that "
            f"another one died or sent no heartbeat for {values.heartbeat_timeout} s; the line "
            "above that begins with F, if there is one, says what failed. Run the same command on "
            "all hosts to resume from the last checkpoint"
        )
    # Handled here until the training loop does; destructors would swallow a KeyboardInterrupt.
    for number in distributed.stop_signals(is_distributed):
        exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        signal.signal(number, functools.partial(_stop_outside_a_step, values.workdir, exit_code))
    try:
        expected = values.config.get("program", program)  # Configurations of users may lack it.
        if program != expected:
            raise ValueError(
                f"{values['config'].config_filename} is a configuration for bert_jax.{expected}: "
                f"run python -m bert_jax.{expected} with it, or use one for bert_jax.{program}"
            )
        if is_distributed:
            connect_processes()
        elif (values.num_processes or values.process_id) is not None:
            raise ValueError("--num_processes and --process_id need --coordinator or --multihost")
        watchdog.start_stop_timeout(values.stop_timeout, is_distributed)
        check_devices()
        result = train_and_evaluate(values.config, values.workdir)
    except RunStopped as error:
        print(f"\n{command_line.program_name()}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (ImportError, ValueError, OSError, CheckpointError, Diverged) as error:
        logging.debug("Traceback:", exc_info=True)  # Shown with --verbosity=1.
        code = DIVERGED if isinstance(error, Diverged) else 1
        exit_now(command_line.describe_error(error), code)
    except Exception as error:
        text, code = f"{error!r}\n{traceback.format_exc()}", 1
        if isinstance(error, (jax.errors.JaxRuntimeError, distributed.LostProcess)):
            reason = str(error).partition("\n")[0]
            if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
                fix = "Set a smaller --config.per_device_batch_size, or --config.model.remat=full"
                text = f"out of memory ({reason}). {fix}; tools/tpu_report.py predicts what fits"
            elif is_distributed and distributed.is_lost_process_error(error):
                fix = "Run the same command on all hosts to resume from the last checkpoint"
                text = f"another process died or is not responding ({reason}). {fix}"
                code = PREEMPTED
        exit_now(text, code)  # A normal exit of Python would wait minutes for other processes.
    if result is not None and jax.process_index() == 0:
        print_result(result, values.workdir)


def _stop_outside_a_step(workdir: str, exit_code: int, *_) -> NoReturn:
    """Handles a signal: exits at once, with a message that says what is saved."""
    saved = []
    if not is_bucket(workdir):  # A bucket would take seconds to list.
        paths = [*pathlib.Path(workdir).glob("checkpoints/*")]
        paths += pathlib.Path(workdir).glob("programs/*/checkpoints/*")  # Those of a sweep.
        if steps := [int(path.name) for path in paths if path.name.isdecimal()]:
            saved.append(f"step {max(steps)} is saved")
        if finished := len([*pathlib.Path(workdir).glob("trials/*/result.json")]):
            saved.append(f"{finished} finished trials are kept")
    then = f": {' and '.join(saved) or 'no step was saved'}"
    exit_now(
        f"Stopped while no training step was running{then}. Run the same command again", exit_code
    )


def check_devices() -> None:
    """Raises ValueError if JAX has no device of the platforms in JAX_PLATFORMS."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError):  # The former, without a text, for NVIDIA GPUs.
        fix = "for GPUs pip install 'jax[cuda12]', on a TPU VM 'jax[tpu]', or unset JAX_PLATFORMS"
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(f"JAX finds no device for JAX_PLATFORMS={platforms}: {fix}") from None


def print_result(result: dict, workdir: str) -> None:
    """Prints the result of a run with numbers of six digits; `result.json` has all digits.

    The last lines name the predictions of a fine-tuned model.
    """
    print(json.dumps(_six_digits(result), indent=2))
    for file in result.get("predictions", ()):
        print(f"Predictions: {os.path.join(workdir, file)}")


def _six_digits(value):
    """Returns a JSON value with its numbers rounded to six significant digits."""
    if isinstance(value, dict):
        return {name: _six_digits(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_six_digits(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
