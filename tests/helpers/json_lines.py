"""Files with a JSON object on each line."""

import json
import pathlib
from collections.abc import Iterable


def write_lines(path: pathlib.Path, objects: Iterable) -> pathlib.Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in objects))
    return path


def read_lines(path: pathlib.Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]
