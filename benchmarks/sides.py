"""The Python environments of the libraries that benchmarks compare with.

KerasHub and the ONNX backend of sentence-transformers need packages that the others do not, or
other versions of the same. All other sides run with the interpreter of the benchmark itself.
"""

import pathlib
import sys

ENVIRONMENTS = {"keras_hub": ".venv-keras", "onnx": ".venv-onnx"}
ROOT = pathlib.Path(__file__).parents[1]


def python_of(side: str) -> str:
    """Returns the interpreter to run a side with; raises FileNotFoundError without it."""
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
