"""Says during pre-training whether a run learns, and what to try if it does not.

At each evaluation: the held-out loss beside that of word frequencies, spikes of the loss, gradient
norms. A run whose loss has risen far above where it began is stopped.
"""

import collections
import statistics
from collections.abc import Mapping, Sequence

from absl import logging
from ml_collections import ConfigDict

from bert_jax.runtime.errors import Diverged

DIVERGED = 2.0  # times the loss of the first report
WINDOW = 100  # Steps that the loss of the next one is compared with.
MIN_WINDOW = 20
# A spike is this many standard deviations above their mean, and this fraction of it.
SPIKE_DEVIATIONS = 6.0
SPIKE_FRACTION = 0.1
QUIET = 0.25  # of the run, in which a loss above word frequencies is usual


def check_diverged(loss: float, first_loss: float, step: int, config: ConfigDict) -> None:
    """Raises Diverged if the mean loss of a report is far above that of the first report."""
    if loss <= DIVERGED * first_loss:
        return
    raise Diverged(
        f"the loss before step {step:,} is {loss:.4g}, more than {DIVERGED:g} times that of the "
        f"first report, {first_loss:.4g}: the run has diverged. Start it in a new workdir with "
        f"config.learning_rate={config.learning_rate / 3:.1g} or a longer warm-up than "
        f"config.warmup_steps={config.warmup_steps}; or from weights saved before the loss rose "
        "(metrics.jsonl has it): config.init_from=WORKDIR/checkpoints/STEP",
        step,
    )


class StepHistory:
    """The spikes and gradient norms of the steps since the last evaluation."""

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
        word_entropy: float,
        config: ConfigDict,
    ) -> None:
        """Logs how the run of `num_steps` learns, and warns with what to try; begins anew.

        `loss` is the held-out one in nats per token, None if the objective has none, and
        `word_entropy` that of a model that knows only the frequencies of tokens.
        """
        parts, rate = [], config.learning_rate
        is_above = loss is not None and loss >= word_entropy
        if loss is not None:
            side = "above" if is_above else "below"
            parts.append(
                f"held-out loss {loss:.3f}, {abs(word_entropy - loss):.3f} nats {side} word "
                f"frequencies ({word_entropy:.3f})"
            )
        if self._norms:
            clipped = statistics.fmean(norm > config.clip_norm for norm in self._norms)
            parts.append(
                f"gradient norm {statistics.median(self._norms):.3g}, at most "
                f"{max(self._norms):.3g}, above clip_norm={config.clip_norm:g} in {clipped:.0%} of "
                f"{len(self._norms):,} steps"
            )
        parts.append(f"spikes of the loss: {len(self._spikes) or 'none'}")
        logging.info("Step %s: %s", f"{step:,}", "; ".join(parts))
        if self._spikes:
            at, spike, mean = self._spikes[-1]
            logging.warning(
                "The loss has spikes, the last at step %s: %.3f after a mean of %.3f. If they "
                "grow, try config.learning_rate=%.1g, a longer warm-up, or a smaller beta2 than %g",
                f"{at:,}",
                spike,
                mean,
                rate / 2,
                config.beta2,
            )
        if is_above and step > max(config.warmup_steps, QUIET * num_steps):
            logging.warning(
                "The model has not learned more than how frequent tokens are. If the loss no "
                "longer falls, try config.learning_rate=%.1g or %.1g, a first phase of shorter "
                "rows, or to continue from existing weights (config.init_from)",
                rate * 3,
                rate / 3,
            )
        self._norms.clear()
        self._spikes.clear()
