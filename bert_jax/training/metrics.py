"""Writes metrics (metrics.jsonl, TensorBoard, a tracker); computes throughput, MFU and baseline."""

import json
import math
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from bert_jax.runtime import distributed
from bert_jax.runtime.buckets import is_bucket
from bert_jax.training.health import MAX_LINES
from bert_jax.training.trackers import start_tracker
from bert_jax.training.workdir import add_path_to_errors, check_claim, read_claim, write_text

# Dense bf16 peak of one JAX device in FLOP/s, from the vendors' data sheets. TPU v3 and TPU7x have
# two devices per chip, the others one.
PEAK_FLOPS = {
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


METRICS = "metrics.jsonl"


class MetricsWriter:
    """Writes metrics to `metrics.jsonl` (one object per line, with `step`) and TensorBoard files.

    Removes the records that an interrupted run wrote after `first_step`. Pass `writes=True` in one
    process only. `tracker` is a name in `trackers.TRACKERS`, or "" for none; it also gets
    `settings`, the configuration. Raises OSError, and what the start of the tracker raises.

    Attributes:
      seconds: the run time up to `first_step`.
      productive_seconds: those of them that `goodput.StepTimer` counted as productive.
      lines: the last records, up to `MAX_LINES`, if it writes.
      directory: where the files are written: the workdir, or a local directory if that is on a
        bucket, whose files cannot be appended to. `sync` copies all files in it to the bucket,
        those of other writers included.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        first_step: int = 0,
        *,
        writes: bool = True,
        tracker: str = "",
        settings: Mapping | None = None,
    ):
        path = workdir / METRICS
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        # The last line of a killed run may be incomplete.
        records = [json.loads(line) for line in lines if line.endswith("}\n")]
        kept = [record for record in records if record["step"] <= first_step]
        self.seconds = max((record.get("seconds", 0.0) for record in kept), default=0.0)
        productive = (record.get("productive_seconds", 0.0) for record in kept)
        self.productive_seconds = max(productive, default=0.0)
        self._writes, self._tracker = writes, None
        if tracker:
            with distributed.raise_on_all_processes():
                if writes:
                    self._tracker = start_tracker(tracker, workdir, settings or {})
        self._workdir = self.directory = workdir
        if is_bucket(workdir):
            self._claim, self._local = read_claim(workdir), tempfile.TemporaryDirectory()
            self.directory = pathlib.Path(self._local.name)
        if not writes:
            return
        self._path, self._tensorboard = self.directory / METRICS, self.directory / "tensorboard"
        self._written = {(record["step"], *record.keys()) for record in kept}
        self.lines = kept[-MAX_LINES:]
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        with add_path_to_errors(self._tensorboard):
            self._tensorboard.mkdir(exist_ok=True)
            # The public writers around this one block forever once their thread has failed.
            self._events = EventsWriter(str(self._tensorboard / "events"))
            # Makes TensorBoard discard the later steps of earlier files.
            self._write_event(first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes `metrics`, unless they were written before the run was resumed."""
        if not self._writes or (step, "step", *metrics) in self._written:
            return
        self.lines = [*self.lines[1 - MAX_LINES :], {"step": step} | metrics]
        with add_path_to_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")
        with add_path_to_errors(self._tensorboard):
            for name, value in metrics.items():
                self._write_event(step, summary=scalar(name, value))
            self._events.flush()
        if self._tracker:
            self._tracker.log(step, metrics)

    def sync(self) -> None:
        """Copies the files to a workdir on a bucket; must be called before each save.

        Raises ValueError if another run has started in the workdir.
        """
        if self._writes:
            self._copy_to_bucket()

    def _copy_to_bucket(self) -> None:
        if not is_bucket(self._workdir):
            return
        check_claim(self._workdir, self._claim)
        for path in self.directory.rglob("*"):
            copy = self._workdir / path.relative_to(self.directory)
            if path.is_file():
                with add_path_to_errors(copy):
                    copy.write_bytes(path.read_bytes())

    def close(self) -> None:
        """Closes the files and ends the tracker's run; does nothing the second time."""
        if self._writes:
            self._writes = False
            with add_path_to_errors(self._tensorboard):
                self._events.close()
            self._copy_to_bucket()
            if self._tracker:
                self._tracker.close()
        if is_bucket(self._workdir):
            self._local.cleanup()

    def _write_event(self, step: int, **content):
        self._events.write_event(Event(wall_time=time.time(), step=step, **content))


def unigram_baseline(counts: np.ndarray, special_ids: tuple[int, ...]) -> dict[str, float]:
    """Returns the entropy (nats) and accuracy of a unigram model, the baseline of a masked LM.

    It is fitted to `counts`, int64 [vocab_size], of the tokens of a split, without `special_ids`.
    """
    counts = np.array(counts)
    counts[list(special_ids)] = 0
    shares = counts[counts > 0] / counts.sum()
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "unigram_accuracy": float(shares.max()),
    }


def mean_over_sources(
    by_source: Mapping[str, Mapping[str, float]], weights: Sequence[float]
) -> dict[str, float]:
    """Returns the mean of each score over the corpora of a mixture, by their `weights`.

    With several corpora, each one's own scores follow, such as "mlm_loss/books".
    """
    if len(by_source) == 1:
        return dict(*by_source.values())
    means, own = {}, {}
    for (source, scores), weight in zip(by_source.items(), weights, strict=True):
        for name, score in scores.items():
            means[name] = means.get(name, 0.0) + score * weight / sum(weights)
            own[f"{name}/{source}"] = score
    return means | own


def over_processes(values: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a report with the times of all processes, if there are several.

    `data_wait_seconds` becomes the longest; `slowest_process` is the index of the one with the
    longest `host_seconds`, which are `slowest_host_seconds`; `host_seconds` becomes the median of
    the others. Every process must call it.
    """
    names = ["data_wait_seconds", "host_seconds"]
    if jax.process_count() == 1 or "host_seconds" not in values:
        return values
    times = multihost_utils.process_allgather(np.array([values[name] for name in names]))
    waits, own = np.asarray(times, np.float64).T
    return values | {
        "data_wait_seconds": float(waits.max()),
        "host_seconds": float(np.median(np.delete(own, own.argmax()))),
        "slowest_host_seconds": float(own.max()),
        "slowest_process": int(own.argmax()),
    }


def perplexity(loss: float) -> float:
    """Returns exp of a mean loss in nats, or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def throughput(num_rows: int, seconds: float, row_flops: float) -> dict[str, float]:
    """Returns rows per second and, where the peak is known, the MFU (PaLM, appendix B).

    `row_flops` are of whole rows. Of packed long rows the attention kernel skips what no document
    needs, so that their MFU is overstated.
    """
    rate = num_rows / seconds
    values = {"rows_per_second": rate}
    if peak := PEAK_FLOPS.get(jax.devices()[0].device_kind):
        values["mfu"] = rate * row_flops / (peak * jax.device_count())
    return values
