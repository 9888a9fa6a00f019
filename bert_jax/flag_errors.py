"""Flags that are not as they must be end in a line, those of the configuration included."""

import pathlib
import sys

from absl import app


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(flags_parser=...)`: what is not a flag; exits where one is wrong."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        while isinstance(error, Exception) and error.args:  # One in another.
            error = error.args[0]
        message = str(error).replace("\n", ": ")
        sys.exit(f"{program()}: {message}")


def program() -> str:
    """The name by which messages begin: that of the file which was started."""
    return pathlib.Path(sys.argv[0]).stem
