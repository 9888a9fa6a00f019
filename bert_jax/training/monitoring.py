"""Helpers of the training loops around a step: progress, dispatch, profile, checks and logs."""

import collections
import contextlib
import math
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable

import filelock
import jax
import psutil
import tqdm
from absl import logging

from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.cache import cache_directory
from bert_jax.runtime.errors import CheckpointError, Diverged

# Steps dispatched ahead: enough to keep the devices busy; more would delay the response to SIGTERM.
STEPS_AHEAD = 2
MAX_CACHE_BYTES = 2 * 2**30  # A program takes about 1 MB on a CPU, and up to 100 MB on a TPU.

_events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: _events.update([event]))
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: _events.update({event: seconds})
)


def progress_bar(first_step: int, num_steps: int) -> tqdm.tqdm:
    """Returns the progress bar of a run that continues from `first_step`, shown by process 0."""
    options = {"unit": "step", "mininterval": 1.0}
    if jax.process_index():  # Given as False, it would override TQDM_DISABLE.
        options["disable"] = True
    return tqdm.tqdm(total=num_steps, initial=first_step, **options)


def show(progress: tqdm.tqdm, values: dict[str, float], main_accuracy: str) -> None:
    """Shows the most important of a step's metrics beside the progress bar."""
    names = ("train/loss", f"train/{main_accuracy}", "rows_per_second", "mfu", "estimated_mfu")
    shown = {name.removeprefix("train/"): values[name] for name in names if name in values}
    progress.set_postfix(shown)


def limit_dispatch(step_metrics: list[dict]) -> None:
    """Blocks until at most `STEPS_AHEAD` of the steps with these metrics are running."""
    if len(step_metrics) > STEPS_AHEAD:
        jax.block_until_ready(step_metrics[-1 - STEPS_AHEAD])


def check_profile(workdir: pathlib.Path, num_steps: int) -> None:
    """Raises ValueError for a profile in a workdir on a bucket, which JAX cannot write."""
    if num_steps and is_bucket(workdir):
        raise ValueError(
            f"config.profile_steps={num_steps}: a profile is written to a local directory or a "
            f"mounted bucket, and workdir {workdir} is neither"
        )


def profile(directory: pathlib.Path, steps_done: int, num_steps: int, state) -> None:
    """Traces `num_steps` steps into `directory`, from the third of a run: the first compiles."""
    if num_steps and steps_done in (2, 2 + num_steps):
        jax.block_until_ready(state)
        if steps_done == 2:
            jax.profiler.start_trace(directory)
        else:
            jax.profiler.stop_trace()


def check_finite(
    step_metrics: list[dict],
    last_step: int,
    find_checkpoint: Callable[[], pathlib.Path | None],
    kind: str = "last",
) -> None:
    """Raises Diverged if a loss or norm of the steps up to `last_step` is not finite.

    `find_checkpoint` returns one from before such a step, the `kind` ("last" or "best") of which
    the message names. If it raises CheckpointError, the message has that error, too.
    """
    for step, values in enumerate(step_metrics, last_step - len(step_metrics) + 1):
        for name in ("loss", "gradient_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                fix = "Start in a new workdir with a lower learning rate or a longer warm-up"
                try:
                    checkpoint, saved = find_checkpoint(), "there is no checkpoint"
                except CheckpointError as error:
                    checkpoint, saved = None, f"the save before it has failed ({error})"
                if checkpoint:
                    saved = f"the {kind} checkpoint before it is {checkpoint}"
                    fix += f", from the start or from its weights: config.init_from={checkpoint}"
                raise Diverged(f"the {name} of step {step} is {values[name]}; {saved}. {fix}", step)


def mean_over_steps(step_metrics: list[dict]) -> dict:
    """Returns the mean of each metric over steps."""
    return jax.tree.map(lambda *values: statistics.fmean(values), *step_metrics)


def enable_compilation_cache(workdir: pathlib.Path) -> None:
    """Caches compiled programs, for all runs of this user on this host.

    JAX removes the least recently used ones. JAX_COMPILATION_CACHE_DIR sets another directory, and
    JAX_COMPILATION_CACHE_MAX_SIZE another limit. A multi-process run has its own cache in the
    workdir, which its hosts share: only process 0 writes the programs, for all processes.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    if jax.process_count() > 1:
        jax.config.update("jax_compilation_cache_dir", str(workdir / "compiled"))
        return
    # A program for the CPU may have instructions that another host with the same home lacks.
    directory = cache_directory("compiled", platform.machine(), _cpu_features())
    try:
        _remove_incomplete_programs(directory)
    except OSError as error:
        fix = "set JAX_COMPILATION_CACHE_DIR to a writable directory"
        logging.warning("Compiled programs are not cached: %s. To cache them, %s", error, fix)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if jax.config.jax_compilation_cache_max_size < 0:
        jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)


def _cpu_features() -> str:
    """Returns the model and the instruction sets of the CPU; "" where Linux does not say."""
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return "\n".join(sorted(set(re.findall(r"(?:model name|flags|Features)\s*: .*", text))))
    return ""


def _remove_incomplete_programs(directory: pathlib.Path) -> None:
    """Creates a cache if necessary; removes programs that a kill or a full disk left incomplete.

    JAX writes the time of last use after a program. If that is missing, JAX neither reads the
    program nor writes any other. Waits for the lock that JAX takes. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(directory / ".lockfile", timeout=10):
        for program in directory.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
                program.unlink()


def log_first_step(state, suffix: str = "") -> None:
    """Waits for `state`, of the first step (" on rows of ..."), and logs how long it took."""
    jax.block_until_ready(state)
    seconds = time.time() - psutil.Process().create_time()
    hits = _events["/jax/compilation_cache/cache_hits"]
    compiled = _events["/jax/compilation_cache/compile_requests_use_cache"] - hits
    compiling = sum(_events[event] for event in _events if event.startswith("/jax/core/compile/"))
    text = "First step%s done %.1f s after the start, %.1f s of it compiling %d programs"
    logging.info(text + "; %d found in the cache", suffix, seconds, compiling, compiled, hits)
