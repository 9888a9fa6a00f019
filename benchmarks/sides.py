"""The other libraries that benchmarks compare with, and their Python environments.

KerasHub and the ONNX backend of sentence-transformers need packages that the others do not, or
other versions of the same. All other sides run with the interpreter of the benchmark itself.
"""

import importlib.util
import pathlib
import sys

from absl import flags

ENVIRONMENTS = {"keras_hub": ".venv-keras", "onnx": ".venv-onnx"}
TORCH_SIDES = "transformers", "transformers_sparse", "torch"
ROOT = pathlib.Path(__file__).parents[1]


def define_peers(*known: str) -> flags.FlagHolder[list[str]]:
    """Defines `--peers`, which peers of `known` to compare with; default: all."""
    holder = flags.DEFINE_list("peers", list(known), "Libraries to compare with.")
    message = f"expected some of {', '.join(known)}"
    flags.register_validator("peers", lambda peers: set(peers) <= set(known), message)
    return holder


def python_of(side: str) -> str:
    """Returns the interpreter to run a side with; raises FileNotFoundError without it."""
    if side in TORCH_SIDES and importlib.util.find_spec("torch") is None:
        raise FileNotFoundError(
            f"{side} needs torch, which {sys.executable} lacks: run `make .venv-parity/installed` "
            f"and this script with .venv-parity/bin/python, or leave {side} out with --peers"
        )
    if side not in ENVIRONMENTS:
        return sys.executable
    environment = ROOT / ENVIRONMENTS[side]
    python = environment / "bin/python"
    if not python.exists():
        raise FileNotFoundError(
            f"{side} has no {python}: run `make {environment.name}/installed`, or leave {side} out "
            "with --peers"
        )
    return str(python)
