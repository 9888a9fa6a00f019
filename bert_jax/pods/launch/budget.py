"""What a job may cost: the launchers' flags, and how long its slices may be billed."""

import dataclasses
import math

from absl import flags

from bert_jax.pods.launch.job import LaunchError

LIMIT_REACHED = 124
"""The exit code of the `timeout` of GNU coreutils, which stops a job at its limit."""
SAVE_SECONDS = 1800
"""How long a job may take to save at its limit, from SIGTERM to SIGKILL."""

flags.disclaim_key_flags()  # `--help` of the launchers lists them.


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a job may cost.

    Attributes:
      price_per_hour: price of the whole job per hour, in any currency; None: unknown.
      limit_seconds: how long its slices may be billed; math.inf: without limit.
    """

    price_per_hour: float | None
    limit_seconds: float

    def describe(self, seconds: float) -> str:
        """Returns the cost of `seconds`, such as "3.2 hours, at 16.00 per hour: 51.20"."""
        text = f"{seconds / 3600:.1f} hours"
        if self.price_per_hour is not None:
            price = seconds / 3600 * self.price_per_hour
            text += f", at {self.price_per_hour:.2f} per hour: {price:.2f}"
        return text


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of `read_budget`."""
    help_texts = {
        "price_per_chip_hour": "Price of one chip for an hour, in any currency.",
        "max_hours": "Maximum billed hours: the job is then saved and stopped, and the slices "
        "deleted, which is billed, too.",
        "max_price": "Maximum total price before saving and deletion, in the currency of "
        "--price_per_chip_hour; works as --max_hours.",
    }
    for name, help_text in help_texts.items():
        flags.DEFINE_float(name, None, help_text, flag_values=values)


def read_budget(num_chips: int, values: flags.FlagValues = flags.FLAGS) -> Budget:
    """Returns the budget that the flags describe, of a job on `num_chips`. Raises LaunchError."""
    names = ("price_per_chip_hour", "max_hours", "max_price")
    given = {name: value for name in names if (value := values[name].value) is not None}
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise LaunchError(f"--{name}={value}: expected a positive number")
    if "max_price" in given and "price_per_chip_hour" not in given:
        raise LaunchError("--max_price needs --price_per_chip_hour, the price of one chip")
    price = given["price_per_chip_hour"] * num_chips if "price_per_chip_hour" in given else None
    hours = given.get("max_hours", math.inf)
    if "max_price" in given:
        hours = min(hours, given["max_price"] / price)
    return Budget(price, hours * 3600)
