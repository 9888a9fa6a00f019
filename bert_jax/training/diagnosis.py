"""Says during pre-training whether a run learns, and what to change if it does not.

At each evaluation: the held-out loss beside the unigram entropy, spikes of the loss, gradient
norms. A run whose loss has risen far above the lowest of its phase is stopped.
"""

import collections
import statistics
from collections.abc import Mapping, Sequence

from absl import logging
from ml_collections import ConfigDict

from bert_jax.runtime.errors import Diverged
from bert_jax.training.phases import ScheduledSteps

# A run has diverged if the loss is this many times the lowest, and by as much above it.
DIVERGED, DIVERGED_BY = 2.0, 1.0
WINDOW = 100  # Steps that the loss of the next one is compared with.
MIN_WINDOW = 20
# A spike is this many standard deviations above their mean, and this fraction of it.
SPIKE_DEVIATIONS = 6.0
SPIKE_FRACTION = 0.1
QUIET = 0.25  # of the run, in which a loss above the unigram entropy is usual


def check_diverged(loss: float, lowest_loss: float, step: int, schedule: ScheduledSteps) -> None:
    """Raises Diverged if the mean loss of a report is far above the lowest one of the phase."""
    if loss <= max(DIVERGED * lowest_loss, lowest_loss + DIVERGED_BY):
        return
    raise Diverged(
        f"the mean loss before step {step:,} is {loss:.4g}, more than {DIVERGED:g} times the "
        f"lowest of this phase, {lowest_loss:.4g}: the run has diverged. Start it in a new workdir "
        f"with a lower learning rate than {schedule.peak:g}, such as {schedule.peak / 3:.1g}, or a "
        f"longer warm-up than {schedule.warmup_steps:,} steps; or from weights saved before the "
        "loss rose (metrics.jsonl has it): config.init_from=WORKDIR/checkpoints/STEP. "
        "config.stop_diverged=False continues",
        step,
    )


class StepHistory:
    """The spikes and gradient norms of the steps since the last evaluation, or since a resume."""

    def __init__(self):
        self._losses = collections.deque(maxlen=WINDOW)
        self._norms: list[float] = []
        self._spikes: list[tuple[int, float, float]] = []

    def add(self, step_metrics: Sequence[Mapping[str, float]], last_step: int) -> None:
        """Adds the steps up to `last_step`, with their `loss` and `gradient_norm`."""
        for step, values in enumerate(step_metrics, last_step - len(step_metrics) + 1):
            loss = float(values["loss"])
            if len(self._losses) >= MIN_WINDOW:
                mean, deviation = statistics.fmean(self._losses), statistics.stdev(self._losses)
                if loss - mean > max(SPIKE_DEVIATIONS * deviation, SPIKE_FRACTION * mean):
                    self._spikes.append((step, loss, mean))
            self._losses.append(loss)
            self._norms.append(float(values["gradient_norm"]))

    def log(
        self,
        step: int,
        num_steps: int,
        loss: float | None,
        unigram_entropy: float,
        schedule: ScheduledSteps,
        config: ConfigDict,
    ) -> None:
        """Logs how the run of `num_steps` learns, warns with suggested changes, and begins anew.

        `loss` is the held-out one in nats per token, None if the objective has none; a model that
        knows only the frequencies of tokens has the `unigram_entropy`. `schedule` is the phase's.
        """
        parts, rate = [], schedule.peak
        is_above = loss is not None and loss >= unigram_entropy
        if loss is not None:
            parts.append(
                f"held-out loss {loss:.3f}, {abs(unigram_entropy - loss):.3f} nats "
                f"{'above' if is_above else 'below'} the unigram entropy ({unigram_entropy:.3f})"
            )
        if self._norms:
            norms = f"gradient norm: median {statistics.median(self._norms):.3g}, max "
            norms += f"{max(self._norms):.3g}"
            if config.optimizer != "stable_adamw":  # It clips updates instead.
                clipped = statistics.fmean(norm > config.clip_norm for norm in self._norms)
                norms += f", above clip_norm={config.clip_norm:g} in {clipped:.0%}"
            parts += [f"{norms} of {len(self._norms):,} steps"]
            parts.append(f"loss spikes: {len(self._spikes) or 'none'}")
        if parts:
            logging.info("Step %s: %s", f"{step:,}", "; ".join(parts))
        if self._spikes:
            at, spike, mean = self._spikes[-1]
            logging.warning(
                "The loss has spikes, the last at step %s: %.3f after a mean of %.3f. If they "
                "grow, try a learning rate of %.1g, a longer warm-up, or a smaller beta2 than %g",
                f"{at:,}",
                spike,
                mean,
                rate / 2,
                config.beta2,
            )
        if is_above and step > max(schedule.warmup_steps, QUIET * num_steps):
            logging.warning(
                "The model predicts no better than token frequencies. If the loss no longer falls, "
                "try a learning rate of %.1g or %.1g, a first phase of shorter rows, or to "
                "continue from existing weights (config.init_from)",
                rate * 3,
                rate / 3,
            )
        self._norms.clear()
        self._spikes.clear()
