"""Pre-trains a BERT: `python -m bert_jax.pretrain --config=FILE --workdir=DIR`.

Top to bottom: what to train, on which devices and rows, from which state; then the loop
evaluate -> save -> next batch -> step, so that a run started again repeats and skips nothing.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import logging as std_logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import jax
import jax.numpy as jnp
import tqdm
from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from bert_jax import distributed, metrics, partitioning, settings, train
from bert_jax.assembly import assemble
from bert_jax.checkpoint import Checkpointer, CheckpointError
from bert_jax.data.batches import eval_batches, local_rows, train_batches
from bert_jax.exit_status import INTERRUPTED, PREEMPTED
from bert_jax.huge_pages import restart_with_huge_pages
from bert_jax.watchdog import Watchdog
from bert_jax.workdir import check_shared, claim_workdir, flatten, make_token, write_json

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


# So many steps are handed to the devices before the first of them is done.
STEPS_AHEAD = 2
# What the progress bar shows: label, metric, digits.
PROGRESS = (
    ("loss", "train/loss", 3),
    ("mlm_accuracy", "train/mlm_accuracy", 3),
    ("sequences/s", "sequences_per_second", 1),
    ("mfu", "mfu", 3),
)


class NonFiniteLoss(RuntimeError):
    """The loss of a step is not a number, or infinite."""


class Preempted(Exception):
    """The run was told to stop, and has saved its last step; `status` is to exit with."""

    def __init__(self, step: int, interrupted: bool):
        self.status = INTERRUPTED if interrupted else PREEMPTED
        super().__init__(f"stopped; step {step} is saved. The same command goes on from there")


def train_and_evaluate(config: config_dict.ConfigDict, workdir: str) -> dict[str, float]:
    """Runs, or goes on with, the pre-training in `workdir`; returns what `result.json` holds.

    Every process of a run of several calls it, after `distributed.join`.
    """
    with contextlib.ExitStack() as cleanup:  # Whatever ends the run, what is being saved is saved.
        return _train_and_evaluate(config, workdir, cleanup)


def _train_and_evaluate(
    config: config_dict.ConfigDict, workdir: str, cleanup: contextlib.ExitStack
) -> dict[str, float]:
    started = time.monotonic()
    workdir = pathlib.Path(workdir)

    # Rows, and what the settings come to on these devices.
    with distributed.errors_shared():
        settings.check_numbers(config)
        watchdog = cleanup.enter_context(contextlib.closing(Watchdog(config.stall_seconds)))
        watchdog.beat("opening the corpus on all processes")
        phases = settings.open_phases(config)
        num_steps = phases[-1].stop
        tokenizer = phases[0].rows.load_tokenizer()
        assembly = assemble(config, phases, tokenizer)
        batch_sharding = partitioning.batch_sharding(assembly.mesh)
        local_rows(batch_sharding, config.eval_batch_size)  # Raises now, not at an evaluation.

    # All that can be wrong with the settings has been found by now: take the workdir.
    watchdog.beat("taking the workdir, with all processes")
    resolved = config.to_dict() | {"bert": dataclasses.asdict(assembly.bert)}
    resolved["rows"] = [
        {name: phase.rows.manifest[name] for name in ("splits", "vocabulary")} for phase in phases
    ]
    distributed.check_same_everywhere(flatten(resolved) | {"workdir": str(workdir)})
    token = ""
    with distributed.errors_shared():
        if jax.process_index() == 0:
            claim_workdir(workdir, resolved)
            token = make_token(workdir)
    token = distributed.gather_texts(token)[0]
    with distributed.errors_shared():
        check_shared(workdir, token)
    is_first = jax.process_index() == 0  # The one that writes and shows what all share.
    keep_compiled(workdir)
    programs = cleanup.enter_context(compilations())
    checkpointer = cleanup.enter_context(
        contextlib.closing(
            Checkpointer(
                workdir,
                resolved,
                tokenizer,
                keep_last=config.keep_checkpoints,
                keep_every=config.keep_every,
            )
        )
    )
    first_step = checkpointer.latest_step() or 0
    result_path = workdir / "result.json"
    if first_step == num_steps and result_path.exists():
        logging.info("%s is finished; there is nothing left to do", workdir)
        return json.loads(result_path.read_text())
    if first_step:
        logging.info("Going on from the checkpoint of step %d in %s", first_step, workdir)
        watchdog.beat(f"restoring step {first_step}")
        state = checkpointer.restore(first_step, assembly.state)
    else:
        watchdog.beat("making the first parameters")
        init = jax.jit(assembly.init, out_shardings=assembly.layout)
        state = init(jax.random.key(config.seed))

    writer = metrics.MetricsWriter(workdir, first_step, writes=is_first)
    progress = tqdm.tqdm(
        total=num_steps, initial=first_step, unit="step", mininterval=1.0, disable=not is_first
    )
    preemption = cleanup.enter_context(contextlib.closing(distributed.Preemption()))
    began = started - writer.seconds  # As if all processes of this run had run without a gap.

    for phase in phases:
        if first_step >= phase.stop and phase.stop != num_steps:
            continue
        update_step, eval_step = assembly.update_step(phase), assembly.eval_step(phase)
        row_flops = metrics.flops_per_row(
            assembly.bert, phase.rows.max_seq_length, phase.max_predictions, phase.rows.max_pairs
        )
        start = max(first_step, phase.start)
        batches = train_batches(
            phase.rows,
            batch_sharding,
            phase.batch_size,
            start - phase.start,
            phase.stop - phase.start,
        )
        unreported, last_report, timed_from = [], time.monotonic(), start
        for step, rows in enumerate(batches, start + 1):
            watchdog.beat(f"{'compiling and ' if step == start + 1 else ''}running step {step}")
            state, step_metrics = update_step(state, rows)
            unreported.append(step_metrics)
            # Enough to keep the devices busy; more would delay the answer to a notice to stop.
            if len(unreported) > STEPS_AHEAD:
                jax.block_until_ready(unreported[-1 - STEPS_AHEAD])
            progress.update()
            if step == start + 1:
                jax.block_until_ready(state)
                now = time.monotonic()
                logging.info(
                    "First step done %.1f s after the process began; %d programs compiled, "
                    "%d found compiled before",
                    process_seconds(),
                    programs["compile_requests_use_cache"] - programs["cache_hits"],
                    programs["cache_hits"],
                )
                last_report, timed_from = now, step

            reports = step % config.log_every == 0 or step == phase.stop
            evaluates = step % config.eval_every == 0 and step != num_steps
            stops = preemption.stops_after(step)
            saves = step % config.checkpoint_every == 0 or step == phase.stop or stops
            if reports or saves:  # Whatever is saved has been looked at.
                values = check_finite(jax.device_get(unreported), step)
            if reports:
                now = time.monotonic()
                values = {f"train/{name}": float(value) for name, value in values.items()}
                values["learning_rate"] = float(assembly.schedule(step - 1))
                values["seconds"] = now - began
                if step > timed_from:
                    rate = (step - timed_from) * phase.batch_size / (now - last_report)
                    values["sequences_per_second"] = rate
                    utilization = metrics.model_flops_utilization(row_flops * rate)
                    if utilization is not None:
                        values["mfu"] = utilization
                writer.write(step, values)
                progress.set_postfix_str(
                    " ".join(
                        f"{label}={values[name]:.{digits}f}"
                        for label, name, digits in PROGRESS
                        if name in values
                    )
                )
                unreported = []
                checkpointer.check()
            if evaluates and not stops:
                watchdog.beat(f"evaluating after step {step}")
                scores = evaluate(eval_step, state.params, phase, batch_sharding, config)
                writer.write(step, {f"heldout/{name}": value for name, value in scores.items()})
            if saves:
                watchdog.beat(f"saving step {step}")
                checkpointer.save(state)
            if stops:
                checkpointer.wait()
                raise Preempted(step, preemption.interrupted)
            if reports or evaluates:
                last_report, timed_from = time.monotonic(), step

    # The last phase's evaluation is the run's result.
    watchdog.beat("waiting for the last save")
    checkpointer.wait()
    progress.close()
    watchdog.beat("evaluating at the end")
    scores = evaluate(eval_step, state.params, phase, batch_sharding, config)
    writer.write(num_steps, {f"heldout/{name}": value for name, value in scores.items()})
    writer.close()
    result = scores | metrics.unigram_baseline(
        phase.heldout.count_tokens(), tuple(tokenizer.special_ids)
    )
    result |= {"steps": num_steps, "seconds": time.monotonic() - began}
    if is_first:
        write_json(result_path, result)
    return result


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


def evaluate(eval_step, params, phase, batch_sharding, config) -> dict[str, float]:
    """Losses (nats), perplexity and accuracies over every held-out row of the phase, once."""
    batches = eval_batches(phase.heldout, batch_sharding, config.eval_batch_size)
    total = functools.reduce(
        lambda total, sums: jax.tree.map(jnp.add, total, sums),
        (eval_step(params, rows) for rows in batches),
    )
    scores = {name: float(value) for name, value in train.means(total).items()}
    return scores | {"perplexity": metrics.perplexity(scores["mlm_loss"])}


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


def run(argv: list[str], train_and_evaluate: Callable[[config_dict.ConfigDict, str], dict]) -> None:
    """What both entry points do: join, train, and end with a status that launchers understand."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(  # Orbax tells of each thread and option.
        lambda record: "orbax" not in record.pathname or record.levelno > std_logging.INFO
    )
    values = flags.FLAGS
    several = values.multihost or values.coordinator is not None
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
    except (ValueError, OSError, CheckpointError, NonFiniteLoss) as error:
        logging.debug("Where it came from:", exc_info=True)  # Shown with --verbosity=1.
        leave(str(error), 1)
    except Preempted as error:
        print(f"\npretrain: {error}", file=sys.stderr)
        sys.exit(error.status)
    except (jax.errors.JaxRuntimeError, distributed.LostProcess) as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            leave(
                f"out of memory ({str(error).splitlines()[0]}). Set a smaller "
                "--config.per_device_batch_size, or --config.model.remat=full; "
                "tools/tpu_report.py says beforehand what fits",
                1,
            )
        if not (several and distributed.tells_of_a_lost_process(error)):
            raise
        leave(
            f"another process is lost, or does not answer ({str(error).splitlines()[0]}). Start "
            "the same command again on all hosts; it goes on from the last checkpoint",
            PREEMPTED,
        )
    except KeyboardInterrupt:  # Before the first step.
        leave(f"interrupted; {values.workdir} is as it was", INTERRUPTED)
    if jax.process_index() == 0:
        print(json.dumps(result, indent=2))


def leave(message: str, status: int) -> NoReturn:
    """Ends at once: in order would wait for the other processes, or for XLA to compile."""
    print(f"\npretrain: {message}", file=sys.stderr, flush=True)
    os._exit(status)


def parse_flags(argv: list[str]) -> list[str]:
    """Flags that are not as they must be end in a line too, those of the configuration included."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        while isinstance(error, Exception) and error.args:  # One in another.
            error = error.args[0]
        message = str(error).replace("\n", ": ")
        sys.exit(f"pretrain: {message}")


if __name__ == "__main__":
    restart_with_huge_pages()
    app.run(functools.partial(run, train_and_evaluate=train_and_evaluate), flags_parser=parse_flags)
