"""How a program starts and ends: huge pages, streams, flags, exit codes, and one-line errors."""

import contextlib
import errno
import importlib.util
import io
import logging as std_logging
import os
import pathlib
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from absl import flags, logging
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from bert_jax.runtime.config_fields import Field, format_fields

# Makes `--help` list the flags defined here as flags of the calling program.
flags.disclaim_key_flags()

TUNABLE = "glibc.malloc.hugetlb=1"


def restart_with_huge_pages() -> None:
    """Restarts this program, once, with glibc's allocator using transparent huge pages.

    XLA's CPU client allocates temporaries anew in every step, and clearing them is slow with
    4 KiB pages (see `benchmarks/train_step.py`). glibc reads the setting only at startup.
    Replaces closed standard streams by /dev/null: a file opened later would otherwise get their
    number, and receive what libraries in C log.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number, which is this one.
            os.set_inheritable(number, True)
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _LogStream(io.FileIO):
    """A file descriptor that discards what cannot be written, instead of raising."""

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        size = len(data)
        with contextlib.suppress(OSError):
            while data and (written := super().write(data)):  # None: a terminal that is busy.
                data = data[written:]
        return size


def keep_running_without_log() -> None:
    """Replaces sys.stdout and sys.stderr by streams that never raise, so no log line ends a run.

    Writing fails if the terminal was closed, the reader of the pipe has exited, the disk of the log
    is full, or the locale lacks a character. The streams have no buffer, so that a signal handler
    may write to them, too.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        previous = getattr(sys, name)
        encoding = getattr(previous, "encoding", "utf-8")
        raw = _LogStream(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw, encoding=encoding, errors="backslashreplace", write_through=True
        )
        setattr(sys, name, stream)
        for handler in std_logging.root.handlers:
            if getattr(handler, "stream", None) is previous:
                handler.setStream(stream)  # absl replaces the handlers of sys.stderr by its own.


KnownFields = Callable[[ConfigDict], Mapping[str, Field]]


class _ConfigParser(ConfigFileFlagParser):
    """Finds `configs/...` in the installed package too, from any directory.

    `known_fields` (configuration -> its fields) is for `--help`.
    """

    def __init__(self, known_fields: KnownFields):
        super().__init__("config")
        self.known_fields = known_fields

    def find_file(self, path: str) -> str:
        """Returns the file of `path`, which is a file and perhaps a colon and an argument."""
        file = path.partition(":")[0]
        if file.startswith("configs/") and not os.path.exists(file):
            (package,) = importlib.util.find_spec("bert_jax.configs").submodule_search_locations
            file = str(pathlib.Path(package).parent / file)
        if not os.path.exists(file):
            beside = sorted(pathlib.Path(file).parent.glob("[!_]*.py"))
            names = ", ".join(each.name for each in beside if b"get_config" in each.read_bytes())
            raise ValueError(
                f"no config file {path} (in its directory: {names or 'none'}): use a path such as "
                "configs/pretrain/bert_base.py"
            )
        return file

    def parse(self, path: str) -> ConfigDict:
        """Returns the configuration. Raises ValueError if there is no such file."""
        _, colon, argument = path.partition(":")
        return super().parse(self.find_file(path) + colon + argument)


def define_config(
    help_text: str, known_fields: KnownFields, values=flags.FLAGS, argv=None
) -> flags.FlagHolder:
    """Defines `--config`, whose fields are flags too; default: FLAGS, parsed from sys.argv.

    `known_fields` returns the fields of a configuration, which `--help` lists.
    """
    holder = config_flags.DEFINE_config_file("config", None, help_text, values, sys_argv=argv)
    values["config"].parser = _ConfigParser(known_fields)
    return holder


def parse_flags(argv: list[str], values=flags.FLAGS, **options) -> list[str]:
    """Returns the positional arguments; exits with a one-line message for an invalid flag.

    With --help and a --config, also prints the fields of that configuration. From then on, stdout
    shows characters that the locale lacks as escapes, as stderr does, instead of raising.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return values(argv, **options)
        except SystemExit:  # absl's exit code for --help is 1.
            if "config" in values:
                print_config_fields(argv, values["config"].parser)
            sys.exit(0)
    except SyntaxError as error:  # In a config file.
        sys.exit(f"{program_name()}: {error.filename}, line {error.lineno}: {error.msg}")
    except (flags.Error, AttributeError, KeyError, OSError, TypeError, ValueError) as raised:
        message = raised
        while isinstance(message, Exception) and message.args:  # Unwrap nested exceptions.
            message = message.args[0]
        # In a config file, a ValueError rejects its argument; of another error we tell the place.
        traced = r"Error whilst parsing config file:\n.*\nValueError: "
        message = re.sub(traced, "", str(message), flags=re.DOTALL)
        traced = r'Error whilst .*File "(.*?)", (line \d+), in get_config\n.*\n(\w+: )'
        message = re.sub(traced, r"\1, \2: \3", message, flags=re.DOTALL)
        *_, (frame, _) = traceback.walk_tb(raised.__traceback__)
        config = frame.f_locals.get("self")
        # ConfigDict names only the missing key, and one that is spelled like it.
        if re.fullmatch("Unknown command line flag 'config[.].*'", message):
            message += ": --config=FILE, whose fields these are, is missing"
        missing = re.match(r"'(\w+)'(?:\nDid you mean (\"\w+\"))?", message)
        if missing and hasattr(config, "keys"):
            name, nearest = missing.groups()
            flag = re.search(rf"--?config[\w.]*\.{name}\b[\w.]*", " ".join(argv))
            fix = f"did you mean {nearest}?" if nearest else f"the fields are {', '.join(config)}"
            message = f"{flag[0] if flag else '--config'}: there is no field {name!r}; {fix}"
        sys.exit(f"{program_name()}: {' '.join(message.split())}")


def print_config_fields(argv: Sequence[str], parser: _ConfigParser) -> None:
    """Prints the fields of the configuration that --config names in `argv`, if it does.

    Further fields of a configuration of your own are in `FIELDS` of its file.
    """
    found = re.search(r"(?:^|\0)--?config[=\0]([^\0]+)", "\0".join(argv))
    if not found:
        return
    config = parser.parse(found[1])
    own = runpy.run_path(parser.find_file(found[1])).get("FIELDS", {})
    fields = format_fields(config, parser.known_fields(config) | own)
    print(f"\nFields of {found[1]}, set as --config.FIELD=VALUE:\n\n{fields}")


def describe_error(error: Exception) -> str:
    """Returns the message of an error; adds a path and a fix to an OSError that has no path.

    Such errors are raised by writing to an open file or starting a process, for example. The path
    is that of the last open file among the local variables of the traceback; if there is none, the
    last function of this project is named instead.
    """
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return str(error)
    files, functions = [], []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in [*frame.f_locals.values()]:
            name = getattr(value, "name", None) if hasattr(value, "fileno") else None
            if isinstance(name, str) and os.path.isabs(name):
                files.append(f": {name}")
        if frame.f_globals.get("__name__", "").startswith(("bert_", "__main__")):
            functions.append(f" in {frame.f_code.co_name} of {frame.f_code.co_filename}")
    where = "".join(files[-1:] or functions[-1:])
    fixes = {
        errno.EMFILE: "raise the limit on open files with ulimit -n",
        errno.ENFILE: "the whole system has too many open files: stop other programs",
        errno.ENOSPC: f"free disk space, also in {tempfile.gettempdir()} (TMPDIR)",
        errno.EROFS: "use a writable directory",
    }
    fix = f"; {fixes[error.errno]}" if error.errno in fixes else ""
    return f"{error}{where}{fix}"


def log_warnings_only() -> None:
    """Logs nothing below a warning, unless --verbosity is given: libraries log a lot."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)


def exit_now(message: str, exit_code: int) -> NoReturn:
    """Prints `message` and exits without waiting for other processes or pending compilations."""
    with contextlib.suppress(OSError):  # The log of a tool may be on a full disk.
        print(f"\n{program_name()}: {message}", file=sys.stderr, flush=True)
    os._exit(exit_code)


def program_name() -> str:
    """Returns the name of the started script, which begins every message."""
    return pathlib.Path(sys.argv[0]).stem
