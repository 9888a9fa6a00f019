"""The shared entry point of pre-training and fine-tuning: flags, start, and how a run ends."""

import collections
import json
import logging as std_logging
import math
import pathlib
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax
import psutil
import tqdm
from absl import app, flags, logging
from ml_collections import ConfigDict

from bert_jax.errors import INTERRUPTED, PREEMPTED, CheckpointError, NonFiniteLoss, RunStopped
from bert_jax.runtime import command_line, distributed, watchdog
from bert_jax.runtime.command_line import exit_now

flags.disclaim_key_flags()  # `--help` of the main programs lists them.

# Steps dispatched ahead: enough to keep the devices busy; more would delay the response to SIGTERM.
STEPS_AHEAD = 2

_events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: _events.update([event]))
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: _events.update({event: seconds})
)


def define_flags() -> None:
    """Defines the flags of a run."""
    command_line.define_config("Config file, such as configs/pretrain/bert_tiny.py:runlocal.")
    flags.DEFINE_string("workdir", None, "Directory of the run; created if it does not exist.")
    flags.DEFINE_bool("multihost", False, "Multi-host run: run this same command on every host.")
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, if JAX detects no cluster.")
    flags.DEFINE_integer("num_processes", None, "Number of processes of the run.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
    flags.DEFINE_integer("initialization_timeout", 300, "Seconds to wait for other processes.")
    help_text = "Seconds without a heartbeat before a process is considered dead."
    flags.DEFINE_integer("heartbeat_timeout", 100, help_text)
    help_text = "Seconds without progress, after SIGTERM or Ctrl-C, before exiting without saving."
    flags.DEFINE_integer("stop_timeout", 60, help_text)
    flags.mark_flags_as_required(["config", "workdir"])


def start(train_and_evaluate: Callable[[ConfigDict, str], dict], program: str) -> NoReturn:
    """Parses the flags and runs `train_and_evaluate(config, workdir)` of bert_jax.`program`."""
    command_line.restart_with_huge_pages()
    define_flags()
    app.run(
        lambda argv: _run(argv, train_and_evaluate, program), flags_parser=command_line.parse_flags
    )


def _run(argv: list[str], train_and_evaluate: Callable, program: str) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if values["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(  # Orbax logs every thread and option.
        lambda record: "orbax" not in record.pathname or record.levelno > std_logging.INFO
    )
    std_logging.getLogger("jax._src.xla_bridge").setLevel("WARNING")  # Logs absent backends.
    is_distributed = values.multihost or values.coordinator is not None
    # Handled here until the training loop does; destructors would swallow a KeyboardInterrupt.
    message = "Stopped while no training step was running. Run the same command again."
    signal.signal(signal.SIGINT, lambda *_: exit_now(message, INTERRUPTED))
    if not is_distributed:  # Otherwise JAX handles SIGTERM.
        signal.signal(signal.SIGTERM, lambda *_: exit_now(message, PREEMPTED))
    try:
        programs = {"task": "finetune", "base": "sweep"}
        expected = next((programs[key] for key in programs if key in values.config), "pretrain")
        if program != expected:
            directory = program.replace("sweep", "sweeps")
            raise ValueError(
                f"{values['config'].config_filename} is a configuration for bert_jax.{expected}: "
                f"run python -m bert_jax.{expected} with it, or use one of configs/{directory}/"
            )
        if is_distributed:
            names = "coordinator num_processes process_id initialization_timeout heartbeat_timeout"
            distributed.initialize(**{name: values[name].value for name in names.split()})
        elif (values.num_processes or values.process_id) is not None:
            raise ValueError("--num_processes and --process_id need --coordinator or --multihost")
        watchdog.start_stop_timeout(values.stop_timeout, is_distributed)
        result = train_and_evaluate(values.config, values.workdir)
    except RunStopped as error:
        print(f"\n{command_line.program_name()}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (ImportError, ValueError, OSError, CheckpointError, NonFiniteLoss) as error:
        logging.debug("Traceback:", exc_info=True)  # Shown with --verbosity=1.
        exit_now(str(error), 1)
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
    if jax.process_index() == 0:
        print(json.dumps(result, indent=2))
        for file in result.get("predictions", ()):  # Of fine-tuning.
            print(f"Predictions: {pathlib.Path(values.workdir) / file}")


def progress_bar(first_step: int, num_steps: int) -> tqdm.tqdm:
    """Returns the progress bar of a run that continues from `first_step`, shown by process 0."""
    options = {"unit": "step", "mininterval": 1.0, "disable": jax.process_index() > 0}
    return tqdm.tqdm(total=num_steps, initial=first_step, **options)


def limit_dispatch(step_metrics: list[dict]) -> None:
    """Blocks until at most `STEPS_AHEAD` of the steps with these metrics are running."""
    if len(step_metrics) > STEPS_AHEAD:
        jax.block_until_ready(step_metrics[-1 - STEPS_AHEAD])


def profile(directory: pathlib.Path, steps_done: int, num_steps: int, state) -> None:
    """Traces `num_steps` steps into `directory`, from the third of a run: the first compiles."""
    if num_steps and steps_done in (2, 2 + num_steps):
        jax.block_until_ready(state)
        jax.profiler.start_trace(directory) if steps_done == 2 else jax.profiler.stop_trace()


def check_finite(step_metrics: list[dict], last_step: int) -> dict:
    """Returns the mean of each metric over the steps up to `last_step`; raises NonFiniteLoss."""
    for step, values in enumerate(step_metrics, last_step - len(step_metrics) + 1):
        for name in ("loss", "gradient_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                raise NonFiniteLoss(
                    f"the {name} of step {step} is {values[name]}; earlier checkpoints are intact. "
                    "Start in a new workdir with a lower learning rate or a longer warm-up",
                    step,
                )
    return jax.tree.map(lambda *values: statistics.fmean(values), *step_metrics)


def enable_compilation_cache(workdir: pathlib.Path) -> None:
    """Caches compiled programs, in the workdir unless the environment names a directory."""
    directory = jax.config.jax_compilation_cache_dir or str(workdir / "compiled")
    jax.config.update("jax_compilation_cache_dir", directory)


def log_first_step(suffix: str = "") -> None:
    """Logs when the first step (" on rows of ...") ended, and how long all compilations took."""
    seconds = time.time() - psutil.Process().create_time()
    hits = _events["/jax/compilation_cache/cache_hits"]
    compiled = _events["/jax/compilation_cache/compile_requests_use_cache"] - hits
    compiling = sum(_events[event] for event in _events if event.startswith("/jax/core/compile/"))
    text = "First step%s done %.1f s after the start, %.1f s of it compiling %d programs"
    logging.info(text + "; %d found in the cache", suffix, seconds, compiling, compiled, hits)
