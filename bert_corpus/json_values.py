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
    while True:
        position = separators.match(buffer, position).end()
        try:
            value, position = decoder.raw_decode(buffer, position)
        except json.JSONDecodeError:
            added = stream.read(size)
            if not added and position == len(buffer):
                return
            if not added:
                raise
            buffer, position = buffer[position:] + added, 0
            size = max(size, len(buffer))  # So that a long value takes linear time.
            continue
        separators, size = SEPARATORS, BUFFER_CHARACTERS
        yield value
