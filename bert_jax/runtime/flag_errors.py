"""Flags that are not as they must be end in a line, those of the configuration included."""

import pathlib
import re
import sys
import traceback

from absl import flags


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(flags_parser=...)`: what is not a flag; exits where one is wrong."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as raised:
        error = raised
        while isinstance(error, Exception) and error.args:  # One in another.
            error = error.args[0]
        # A configuration refuses its argument with a ValueError: the traceback tells no more.
        message = re.sub(
            r"Error whilst parsing config file:\n.*\nValueError: ", "", str(error), flags=re.DOTALL
        )
        *_, (frame, _) = traceback.walk_tb(raised.__traceback__)
        part = frame.f_locals.get("self")
        if re.fullmatch(r"'\w+'", message) and hasattr(part, "keys"):
            # Of a ConfigDict, which names the key and no more.
            message = f"there is no field {message}; there are {', '.join(map(str, part.keys()))}"
        if "Traceback" not in message:
            message = message.replace("\n", ": ")
        sys.exit(f"{program()}: {message}")


def program() -> str:
    """The name by which messages begin: that of the file which was started."""
    return pathlib.Path(sys.argv[0]).stem
