"""Reads a JSON array, or JSON values that follow each other, in memory for one value."""

import json
import re
from collections.abc import Iterator
from typing import TextIO

BUFFER_CHARACTERS = 1 << 20
START = re.compile(r"\s*\[?\s*")
SEPARATORS = re.compile(r"[\s,\]]*")


def json_values(stream: TextIO) -> Iterator[object]:
    """Yields the elements of an array, or values between white space, in linear time.

    Raises json.JSONDecodeError, RecursionError or UnicodeDecodeError for what is not JSON.
    """
    decoder, separators = json.JSONDecoder(), START
    buffer, position, size = "", 0, BUFFER_CHARACTERS
    is_open = False  # whether the end of the array is still to come
    while True:
        between = separators.match(buffer, position)
        is_open = "[" in between[0] if separators is START else is_open and "]" not in between[0]
        position = between.end()
        try:
            value, position = decoder.raw_decode(buffer, position)
        except json.JSONDecodeError:
            added = stream.read(size)
            if not added and position == len(buffer):
                if is_open:
                    raise json.JSONDecodeError("the array is cut off", buffer, position) from None
                return
            if not added:
                raise
            buffer, position = buffer[position:] + added, 0
            size = max(size, len(buffer))  # So that a long value takes linear time.
            continue
        separators, size = SEPARATORS, BUFFER_CHARACTERS
        yield value
