"""Fields of a configuration, described by the comments in the files that set them.

A comment belongs to a field if it is at the end of the line that sets it, or alone on the lines
directly above. A file may start from another one's `get_config()`: the comments of all of them
count, first the comments of the first file, which explain the field, last the ones that explain a
value.
"""

import functools
import sys
import tokenize
from collections.abc import Callable, Iterator
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict


class ConfigField(NamedTuple):
    """A field: its dotted name, its value (a ConfigDict for a group of fields), and comment."""

    name: str
    value: object
    type: type
    comment: str

    @property
    def is_group(self) -> bool:
        return isinstance(self.value, ConfigDict)


# (id of a ConfigDict, key) -> the lines that set it, as (file, number), in order.
Places = dict[tuple[int, str], list[tuple[str, int]]]


def describe_fields(get_config: Callable[[], ConfigDict]) -> list[ConfigField]:
    """Returns the fields of the configuration that `get_config` builds, in the order of the files.

    While it runs, every assignment to a field is recorded with its line.
    """
    places: Places = {}
    owners, set_item = [], ConfigDict.__setitem__

    def record(self: ConfigDict, key: str, value: object) -> None:
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("ml_collections"):
            frame = frame.f_back
        owners.append(self)  # Keeps it alive, so that its id stays its own.
        place = frame.f_code.co_filename, frame.f_lineno
        places.setdefault((id(self), key), []).append(place)
        set_item(self, key, value)

    ConfigDict.__setitem__ = record
    try:
        config = get_config()
    finally:
        ConfigDict.__setitem__ = set_item
    return list(_fields_of(config, "", places))


def _fields_of(config: ConfigDict, prefix: str, places: Places) -> Iterator[ConfigField]:
    in_order = [key for owner, key in places if owner == id(config) and key in config]
    for key in dict.fromkeys([*in_order, *config]):  # Those of a deep copy have no places.
        comments = [_comment_at(*place) for place in places.get((id(config), key), ())]
        comment = " ".join(dict.fromkeys(filter(None, comments)))
        field = ConfigField(prefix + key, config[key], config.get_type(key), comment)
        yield field
        if field.is_group:
            yield from _fields_of(field.value, f"{field.name}.", places)


def _comment_at(file: str, line: int) -> str:
    """Returns the comment of the statement that begins in a line; "" if it has none."""
    comments = _comments(file)
    above = []
    while comments.get(line - len(above) - 1, ("", False))[1]:  # Alone on its line.
        above.insert(0, comments[line - len(above) - 1][0])
    return " ".join([*above, comments.get(line, ("", False))[0]]).strip()


@functools.cache
def _comments(file: str) -> dict[int, tuple[str, bool]]:
    """Returns the comments in a file by line, and whether each is alone on its line."""
    with tokenize.open(file) as stream:
        tokens = list(tokenize.generate_tokens(stream.readline))
    return {
        token.start[0]: (token.string.lstrip("#").strip(), token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def check_fields(
    config: ConfigDict, expected: ConfigDict, file: str, prefix: str = "config."
) -> None:
    """Raises ValueError if `config` lacks fields of `expected`, the configuration of `file`.

    `prefix` begins the names of fields of `config`.
    """
    missing = list(_missing_fields(config, expected, prefix))
    if not missing:
        return
    others = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
    verb = "is" if len(missing) == 1 else "are"
    raise ValueError(
        f"{', '.join(missing[:3])}{others} {verb} missing: start from get_config() of {file}, "
        "and change what differs"
    )


def _missing_fields(config: ConfigDict, expected: ConfigDict, prefix: str) -> Iterator[str]:
    for name, value in expected.items():
        if name not in config:
            yield prefix + name
        elif isinstance(value, ConfigDict) and isinstance(config[name], ConfigDict):
            yield from _missing_fields(config[name], value, f"{prefix}{name}.")


def format_fields(fields: list[ConfigField]) -> str:
    """Formats fields for `--help`, as absl formats flags; a group's comment is not repeated."""
    texts, group_comments = [], set()
    for field in fields:
        if field.is_group:
            group_comments.add(field.comment)
            text = f"  config.{field.name}: {field.comment}"
        else:
            comment = "" if field.comment in group_comments else field.comment
            text = f"  --config.{field.name}: {comment}"
        texts.append(flags.text_wrap(text.rstrip(": "), indent="    ", firstline_indent="  "))
        if not field.is_group:
            kind = f"; {field.type.__name__}" if field.value is None else ""
            texts.append(flags.text_wrap(f"(default: {field.value!r}{kind})", indent="    "))
    return "\n".join(texts)
