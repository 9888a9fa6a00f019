"""What a run reports: metrics.jsonl, TensorBoard files, the FLOPs behind MFU, the baseline."""

import contextlib
import json
import math
import pathlib
import time

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from bert_jax.model.config import BertConfig

# Dense bf16 peak of one JAX device in FLOP/s, from the vendors' data sheets. TPU v4 and v5p show
# one device a chip, v2 and v3 one a core.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


class MetricsWriter:
    """Appends to `metrics.jsonl` (one object a line, with `step`) and to TensorBoard files.

    OSError names the file that could not be written to.
    """

    def __init__(self, workdir: pathlib.Path, first_step: int = 0, writes: bool = True):
        """Drops what an interrupted run wrote beyond `first_step`, where this one goes on.

        One process of a run `writes`; what the others are given is dropped.
        """
        path = workdir / "metrics.jsonl"
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:  # The last line of a killed run.
                    continue
                if record["step"] <= first_step:
                    kept.append(record)
        self.seconds = max((record.get("seconds", 0.0) for record in kept), default=0.0)
        """Run time up to `first_step`, of this run's earlier processes."""
        self._writes = writes
        if not writes:
            return
        self._written = {(record["step"], *record.keys()) for record in kept}
        self._path, self._tensorboard = path, workdir / "tensorboard"
        with _writing(path):
            unfinished = path.with_name("metrics.jsonl.tmp")
            unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept))
            unfinished.replace(path)
            self._file = path.open("a")
        with _writing(self._tensorboard):
            self._tensorboard.mkdir(exist_ok=True)
            # Not tensorboardX's SummaryWriter: after an error in its thread it waits for ever.
            self._events = EventsWriter(str(self._tensorboard / "events"))
            begun = SessionLog(status=SessionLog.START)  # Purges what is shown of later steps.
            self._events.write_event(
                Event(wall_time=time.time(), step=first_step + 1, session_log=begun)
            )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if not self._writes or (step, "step", *metrics) in self._written:
            return
        with _writing(self._path):
            self._file.write(json.dumps({"step": step} | metrics) + "\n")
            self._file.flush()
        with _writing(self._tensorboard):
            for name, value in metrics.items():
                self._events.write_event(
                    Event(wall_time=time.time(), step=step, summary=scalar(name, value))
                )
            self._events.flush()

    def close(self) -> None:
        if not self._writes:
            return
        self._file.close()
        self._events.close()


@contextlib.contextmanager
def _writing(path: pathlib.Path):
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} could not be written to: {error}. Free the disk (or mend the cause) and run "
            "the same command: it goes on from the last checkpoint"
        ) from error


def flops_per_row(config: BertConfig, length: int, num_predictions: int, num_pairs: int) -> float:
    """FLOPs of the matrix products of one training step for one row, forward and backward.

    Two for each multiply-add, three passes (forward, and the gradients of inputs and of weights);
    attention over the whole row; embeddings' gathers, LayerNorm and softmax not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = length * (4 * hidden**2 + 2 * hidden * inner) + 2 * length**2 * hidden
    mlm = num_predictions * (hidden**2 + hidden * config.padded_vocab_size)
    nsp = num_pairs * (hidden**2 + 2 * hidden)
    return 2 * 3 * (config.num_layers * layer + mlm + nsp)


def model_flops_utilization(flops_per_second: float) -> float | None:
    """Share of all devices' peak (PaLM, appendix B), or None where the peak is not known."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return flops_per_second / (peak * jax.device_count()) if peak else None


def unigram_baseline(counts: np.ndarray, special_ids: tuple[int, ...]) -> dict[str, float]:
    """What a model that knows nothing but the word frequencies of this very split would score.

    From `counts`, int64 `[vocab_size]`, of the tokens of the evaluated split, to
    `unigram_entropy`, in nats, without the special ones, and `unigram_accuracy`, the share of the
    most frequent one. No unigram model does better: the frequencies are the split's own.
    """
    counts = np.array(counts)
    counts[list(special_ids)] = 0
    shares = counts[counts > 0] / counts.sum()
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "unigram_accuracy": float(shares.max()),
    }


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
