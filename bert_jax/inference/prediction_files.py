"""Files that appear when they are complete: the output of `bert_jax.predict`, whole or in shards.

A shard is one output for a fixed number of examples. Which examples it has depends on its number
alone, so that any number of processes, in any number of runs, complete a folder of shards.
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from absl import logging

from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.tasks.vectors import NUM_SHARDS, SHARDS_FILENAME, shard_name
from bert_jax.training.state import parameters_hash


@contextlib.contextmanager
def complete_files(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new folder beside `target`; at the end, its files become `target` and its siblings.

    A target without a suffix becomes the folder itself. After an error, nothing is left.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.incomplete")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        yield temporary
        if (temporary / target.name).exists():
            for path in temporary.iterdir():
                if (beside := target.with_name(path.name)).exists():
                    raise FileExistsError(f"{beside} exists: choose another output, or remove it")
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == target.name):
                path.rename(target.with_name(path.name))  # The predictions themselves are last.
        else:
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def describe_model(model: PretrainedModel) -> dict[str, object]:
    """Returns what a model's outputs depend on: hashes of its parameters and tokenizer, its head.

    As JSON has them.
    """
    head = json.loads(json.dumps(model.head))
    hashes = {"model": parameters_hash(model.params), "tokenizer": model.tokenizer.sha256[:16]}
    return hashes | {"head": head}


def open_shard_folder(directory: pathlib.Path, settings: Mapping[str, object]) -> None:
    """Creates a folder of shards, or checks that an earlier run created it with equal settings.

    Raises FileExistsError for a folder with other contents, ValueError for other settings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path, found = directory / SHARDS_FILENAME, {each.name for each in directory.iterdir()}
    if path.name not in found:
        if others := sorted(name for name in found if not name.startswith(".")):
            raise FileExistsError(
                f"output={directory} has {others[0]} but no {path.name}, so it is no folder of "
                "shards: choose another, or remove it"
            )
        _write_settings(path, settings)
    stored = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted((stored.keys() | settings.keys()) - {NUM_SHARDS}):
        if stored.get(name) != settings.get(name):
            raise ValueError(
                f"output={directory} was begun with {name}={stored.get(name)}, now it is "
                f"{settings.get(name)}: use the same model, input and options, or another output"
            )


def close_shard_folder(
    directory: pathlib.Path, settings: Mapping[str, object], counts: Mapping[str, int]
) -> None:
    """Stores the number of shards of each output, of all processes, when they are known."""
    _write_settings(directory / SHARDS_FILENAME, {**settings, NUM_SHARDS: counts})


def _write_settings(path: pathlib.Path, settings: Mapping[str, object]) -> None:
    # Processes that do so at the same time write the same.
    temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    temporary.rename(path)


def write_shards(
    target: pathlib.Path,
    write: Callable[[pathlib.Path, Iterable[Sequence]], None],
    shards: Iterable[Iterable[Sequence]],
    process_id: int,
    num_processes: int,
) -> int:
    """Writes the shards of one process that are not there yet: NAME-00000.npy, ... for NAME.npy.

    Returns the number of shards of all processes.

    Args:
      write: writes the blocks of one shard into a folder, and files beside them.
      shards: the blocks of predictions of each shard, which are computed when they are read.
    """
    counts: dict[str, int] = collections.Counter()
    for number, blocks in enumerate(shards):
        path = target.with_name(shard_name(target.name, number))
        if number % num_processes != process_id:
            counts["of other processes"] += 1
        elif path.exists():
            counts["of earlier runs"] += 1
        else:
            _remove_incomplete(path)
            with complete_files(path) as folder:
                write(folder / path.name, blocks)
            counts["written now"] += 1
            logging.info("Wrote %s", path)
    described = ", ".join(f"{count} {which}" for which, count in counts.items())
    logging.info("%s: %d shards (%s)", target, counts.total(), described)
    return counts.total()


def _remove_incomplete(path: pathlib.Path) -> None:
    """Removes what a killed process left of a shard."""
    for left in list(path.parent.iterdir()):
        if left.name.startswith(f".{path.name}."):
            shutil.rmtree(left)
        elif left.name.startswith(f"{path.stem}."):  # Renamed before the shard itself.
            left.unlink()


def split_into_shards(examples: Iterable, size: int) -> Iterator[Iterator]:
    """Yields iterators over `size` examples each; what is not taken of one is skipped."""
    examples = iter(examples)
    for first in examples:
        shard = itertools.chain([first], itertools.islice(examples, size - 1))
        yield shard
        collections.deque(shard, maxlen=0)
