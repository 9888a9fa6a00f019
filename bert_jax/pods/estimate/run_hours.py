"""Adds to the hours of the steps of a run what else a slice is paid for.

That is evaluation, checkpoints, start-up and compilation and, on spot capacity, the work that
preemptions lose. Arguments are in seconds, `RunHours` in hours.
"""

import dataclasses
import math
from typing import NamedTuple

# With more preemptions expected during a start, or an interval between checkpoints, no run ends.
MAX_PREEMPTIONS = 10


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What no report knows; nothing of it was measured.

    Attributes:
      startup_minutes: from the creation of a slice to the start of the program, at each start.
      compile_minutes: until the first step, at each start.
      host_bytes_per_second: at which a host copies its part of a checkpoint, while the run waits.
      preemptions_per_day: of the whole slice; 0: on demand.
    """

    startup_minutes: float = 8.0
    compile_minutes: float = 2.0
    host_bytes_per_second: float = 1e9
    preemptions_per_day: float = 0.0

    @property
    def restart(self) -> float:
        return 60 * (self.startup_minutes + self.compile_minutes)


class RunHours(NamedTuple):
    """The hours that a slice is paid for, by what takes them; they add up to `total`."""

    steps: float
    evaluation: float
    checkpoints: float
    startup: float
    preemptions: float
    checkpoint_every: int  # Steps.

    @property
    def total(self) -> float:
        return sum(self[:-1])


def best_interval(pause: float, between: float) -> float:
    """Returns the time between checkpoints at which a run that is preempted ends soonest.

    Args:
      pause: of the run for a checkpoint.
      between: the mean time between two preemptions, which come at random.

    Equation 37 of Daly, A higher order estimate of the optimum checkpoint interval for restart
    dumps (Future Generation Computer Systems 22, 2006). Its first term, sqrt(2 * pause * between),
    is that of Young, A first order approximation to the optimum checkpoint interval (CACM 17,
    1974).
    """
    if pause >= 2 * between:
        return between
    ratio = math.sqrt(pause / (2 * between))
    return math.sqrt(2 * pause * between) * (1 + ratio / 3 + ratio**2 / 9) - pause


def time_with_preemptions(
    work: float, interval: float, pause: float, restart: float, between: float
) -> float:
    """Returns the mean time of a run that saves after each `interval` of work, from 0 to its end.

    A preemption costs the work since the last save and a `restart`, which may be preempted too. The
    time between two is exponential with the mean `between` (Daly's complete model).
    """
    per_interval = between * math.exp(restart / between) * math.expm1((interval + pause) / between)
    return work / interval * per_interval


def hours_of_run(
    step: float,
    num_steps: int,
    evaluation: float,
    num_evaluations: int,
    checkpoint_every: int,
    checkpoint_bytes: float,
    num_hosts: int,
    assumptions: Assumptions,
) -> RunHours:
    """Returns the hours of a run.

    Args:
      step: seconds of a step, the mean of all.
      num_steps: of the run.
      evaluation: seconds of one.
      num_evaluations: of the run.
      checkpoint_every: steps between checkpoints; on spot capacity, the best interval replaces it.
      checkpoint_bytes: of one, over all hosts.
      num_hosts: of the slice.
      assumptions: the rest.

    Raises ValueError if preemptions are so frequent that the run would never end.
    """
    pause = checkpoint_bytes / (num_hosts * assumptions.host_bytes_per_second)
    work = num_steps * step + num_evaluations * evaluation
    preemptions = 0.0
    if assumptions.preemptions_per_day:
        between = 86400 / assumptions.preemptions_per_day
        interval = best_interval(pause, between)
        # At least a step, and at most the run.
        checkpoint_every = min(max(round(interval / step), 1), num_steps)
        interval = checkpoint_every * step
        if max(assumptions.restart, interval + pause) > MAX_PREEMPTIONS * between:
            raise ValueError(
                f"preemptions_per_day={assumptions.preemptions_per_day:g}: one every {between:.3g} "
                f"s, but a start takes {assumptions.restart:.3g} s, and a step with a checkpoint "
                f"{step + pause:.3g}: the run would not end; expected fewer"
            )
        expected = time_with_preemptions(work, interval, pause, assumptions.restart, between)
        preemptions = expected - work * (1 + pause / interval)
    checkpoints = math.ceil(num_steps / checkpoint_every) * pause
    seconds = num_steps * step, num_evaluations * evaluation, checkpoints, assumptions.restart
    return RunHours(*(each / 3600 for each in (*seconds, preemptions)), checkpoint_every)
