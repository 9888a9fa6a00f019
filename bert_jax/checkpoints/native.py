"""Self-contained checkpoints: training state, settings and vocabulary in one directory.

`<workdir>/checkpoints/<step>/` holds `params`, `training` (step and optimizer state), `config`
(JSON: the run's settings) and `vocabulary` (the files of its tokenizer).
Writing is asynchronous and atomic: a directory under its final name is complete. On a bucket, where
renaming a directory copies it, one with `commit_success.txt`, which Orbax writes last, is complete.
Before that, everything written is read back: the shapes of all arrays, and each file's checksum.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import errno
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import flax
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from bert_jax.checkpoints.checksums import check_files, write_checksums
from bert_jax.checkpoints.parameters import aligned_zeros
from bert_jax.runtime import distributed
from bert_jax.runtime.buckets import absolute, as_path, is_bucket
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tokenizers.tokenizer import Tokenizer, read_stored

CHUNKS_PER_READ = 2
COMMIT = "commit_success.txt"
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
# Orbax reads the first three as patterns, TensorStore a backslash as a slash, and etils :/ as a
# URL; TensorStore accepts only valid Unicode.
MISREAD = re.compile(r"[*?[\\]|:(/|$)|[\ud800-\udfff]")


class Checkpointer:
    """Saves and restores the training state of one run in `<workdir>/checkpoints`.

    Keeps the last `keep_last` checkpoints, those at multiples of `keep_every` (0: none), and that
    of the step `keep_step`, if given.
    Reading and writing raise CheckpointError, or LostProcess if another process was lost.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        settings: dict,
        tokenizer: Tokenizer,
        *,
        keep_last: int,
        keep_every: int = 0,
        keep_step: int | None = None,
        checksums: bool = True,
    ):
        """Removes unfinished checkpoints of earlier runs; on a bucket, `save` and `wait` do.

        `checksums` says whether checksums are written and compared, which reads each file twice.
        """
        self.directory = absolute(workdir) / "checkpoints"
        self._keep_last, self._keep_every, self._keep_step = keep_last, keep_every, keep_step
        self._checksums = checksums
        self.settings = settings  # Stored with the next checkpoints.
        # CheckpointManager would wait ten minutes for the other processes to report a failed write.
        self._checkpointer = ocp.AsyncCheckpointer(_Handler(tokenizer, checksums))
        self._exit_stack = contextlib.ExitStack()
        self._plain_directory = self._exit_stack.enter_context(plain_path(self.directory))
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for unfinished in self.directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                _remove_unfinished(unfinished)

    def latest_step(self) -> int | None:
        """Returns the step of the latest complete checkpoint, or None."""
        return max(saved_steps(self.directory), default=None)

    def last_checkpoint(self) -> pathlib.Path | None:
        """Waits for the current write; returns the latest complete checkpoint, or None."""
        self.wait()
        step = self.latest_step()
        return None if step is None else self.directory / str(step)

    def save(self, state) -> None:
        """Starts writing `state` after the previous write has finished."""
        self.wait()
        items = _Items(
            params=_chunked_save_args(state.params),
            training=_chunked_save_args({"step": state.step, "opt_state": state.opt_state}),
            config=ocp.args.JsonSave(self.settings),
        )
        with self._writing():
            _clear(directory := self._plain_directory / str(int(state.step)))
            self._checkpointer.save(directory, args=items)

    def check(self) -> None:
        """Raises CheckpointError if the current write has failed, without waiting for it."""
        with self._writing():
            self._checkpointer.check_for_errors()

    def wait(self) -> None:
        """Waits for the current write, then removes old checkpoints."""
        with self._writing():
            self._checkpointer.wait_until_finished()
            if jax.process_index() == 0:
                steps = saved_steps(self.directory)
                for step in steps[: -self._keep_last]:
                    is_due = self._keep_every and step % self._keep_every == 0
                    if not is_due and step != self._keep_step:
                        remove_checkpoint(self.directory / str(step))
                if is_bucket(self.directory):
                    _remove_unfinished_before(self.directory, steps)

    def restore(self, step: int | pathlib.Path, abstract):
        """Returns the state saved at `step`, or in another checkpoint (a path), like `abstract`."""
        directory = self.directory / str(step) if isinstance(step, int) else step
        training = {"step": abstract.step, "opt_state": abstract.opt_state}
        items = _Items(
            params=ocp.args.StandardRestore(abstract.params),
            training=ocp.args.StandardRestore(training),
        )
        advice = ". If it is damaged, remove it to resume from the previous checkpoint"
        with (
            _checkpoint_errors(f"{directory} could not be restored", lambda: advice),
            plain_path(directory) as plain,
        ):
            if self._checksums:  # Before Orbax's restore, in which processes wait for each other.
                with distributed.raise_on_all_processes():
                    check_files(directory, share=(jax.process_index(), jax.process_count()))
            restored = self._checkpointer.restore(plain, args=items)
        return abstract.replace(params=restored.params, **restored.training)

    def close(self) -> None:
        """Waits for the current write, which would otherwise be lost when the process ends."""
        self.wait()
        self._checkpointer.close()
        self._exit_stack.close()

    def _writing(self) -> contextlib.AbstractContextManager:
        def advice():
            step = self.latest_step()
            last = "none" if step is None else f"step {step}"
            fix = "free disk space or fix the cause, then run the same command to resume"
            return f". The last complete one is {last}; {fix}"

        return _checkpoint_errors(f"writing a checkpoint to {self.directory} failed", advice)


class _Handler(ocp.CompositeCheckpointHandler):
    """Adds the tokenizer, and reads back what was written, before Orbax marks the checkpoint as
    complete."""

    def __init__(
        self, tokenizer: Tokenizer, checksums: bool = True, files: Mapping[str, bytes] = NO_FILES
    ):
        super().__init__()
        self._files = {f"vocabulary/{name}": each for name, each in tokenizer.files().items()}
        self._files |= files
        self._checksums = checksums

    def finalize(self, directory: pathlib.Path) -> None:
        super().finalize(directory)
        directory = as_path(os.fspath(directory))
        for name, content in self._files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        for item in ("params", "training"):
            if (directory / item).exists():
                _check_written(directory / item)
        if self._checksums:
            write_checksums(directory)


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """The items of a checkpoint, for the handler above."""


@contextlib.contextmanager
def plain_path(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to `directory` without the characters of MISREAD, which libraries misread.

    This is a temporary symbolic link if its own path has any. `directory` need not exist yet.
    """
    if is_bucket(directory) or not MISREAD.search(str(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as links:
        link = pathlib.Path(links) / "link"
        link.symlink_to(directory)
        yield link


@contextlib.contextmanager
def checking_files(directory: pathlib.Path, items: Collection[str]) -> Iterator[None]:
    """Compares files with their checksums in another thread, while the caller reads them."""
    with concurrent.futures.ThreadPoolExecutor(1, "checksums") as executor:
        check = executor.submit(check_files, directory, items)
        try:
            yield
        finally:
            check.result()  # Its error replaces that of the reader, which says less.


def remove_checkpoint(directory: pathlib.Path) -> None:
    """Removes a checkpoint, which is never seen as complete while some of its files are removed."""
    if is_bucket(directory):
        (directory / COMMIT).unlink(missing_ok=True)
        directory.rmtree(missing_ok=True)
        return
    removed = directory.with_name(f"{directory.name}{ocp.utils.TMP_DIR_SUFFIX}-removed")
    directory.rename(removed)
    shutil.rmtree(removed)


def _clear(directory: pathlib.Path) -> None:
    """Removes what is left on a bucket of an earlier save of the same step; all processes call it.

    Not when a run starts: one that it takes over may still be completing its last checkpoint.
    """
    if is_bucket(directory):
        with distributed.raise_on_all_processes():  # Each would refuse what is still there.
            if jax.process_index() == 0:
                remove_checkpoint(directory)


def _remove_unfinished_before(parent: pathlib.Path, steps: list[int]) -> None:
    """Removes the unfinished checkpoints on a bucket that are older than the last of `steps`."""
    unfinished = {int(entry.name) for entry in _entries(parent) if entry.name.isdecimal()}
    for step in unfinished - set(steps):
        if step < max(steps, default=0):
            (parent / str(step)).rmtree()


def _remove_unfinished(directory: pathlib.Path) -> None:
    """Removes an unfinished checkpoint; waits up to 5 s for threads that still write to it."""
    for remaining in reversed(range(50)):
        try:
            return shutil.rmtree(directory)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not remaining:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def _checkpoint_errors(message: str, advice: Callable[[], str] = str) -> Iterator[None]:
    """Raises CheckpointError for any error: Orbax, TensorStore and JSON raise many types."""
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if jax.process_count() > 1 and distributed.is_lost_process_error(error):
            raise distributed.LostProcess(str(error)) from error
        raise CheckpointError(f"{message}: {str(error)[:500]}{advice()}") from error


def write_checkpoint(
    directory: pathlib.Path,
    params: dict,
    settings: dict,
    tokenizer: Tokenizer,
    checksums: bool = True,
    files: Mapping[str, bytes] = NO_FILES,
) -> None:
    """Writes a checkpoint without training state; waits until it is complete.

    `files` are further ones, by their paths in it.

    `settings` holds the model config and the name of its architecture under "architecture", the
    modules of `params` under "modules" ("encoder/pooler", "mlm", ...), and a task's head as "head".
    Raises CheckpointError, also if `directory` exists; on a bucket, it is replaced.
    """
    settings = settings | {"has_training_state": False}
    items = _Items(params=_chunked_save_args(params), config=ocp.args.JsonSave(settings))
    directory = absolute(directory)
    with (
        _checkpoint_errors(f"writing a checkpoint to {directory} failed"),
        ocp.Checkpointer(_Handler(tokenizer, checksums, files)) as checkpointer,
        contextlib.ExitStack() as stack,
    ):
        _clear(directory)
        if is_bucket(directory) or not MISREAD.search(str(directory)):
            checkpointer.save(directory, args=items)
            return
        directory.parent.mkdir(parents=True, exist_ok=True)
        if not MISREAD.search(directory.name):
            parent = stack.enter_context(plain_path(directory.parent))
            checkpointer.save(parent / directory.name, args=items)
            return
        if directory.exists():
            raise FileExistsError("it already exists")
        # Written under another name first, because Orbax would read this one as a pattern.
        unfinished = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=".bert_jax-", dir=directory.parent)
        )
        parent = stack.enter_context(plain_path(pathlib.Path(unfinished)))
        checkpointer.save(parent / "written", args=items)
        (parent / "written").rename(directory)


def _chunked_save_args(tree: dict) -> ocp.args.StandardSave:
    options = ocp.SaveArgs(chunk_byte_size=4 * 2**20)  # Reading small chunks takes little memory.
    return ocp.args.StandardSave(tree, save_args=jax.tree.map(lambda _: options, tree))


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps with a complete checkpoint in `directory`, in ascending order."""
    if is_bucket(directory):
        entries = [entry for entry in _entries(directory) if (entry / COMMIT).exists()]
    else:
        entries = directory.glob("*")  # Unfinished checkpoints have other names.
    return sorted(int(entry.name) for entry in entries if entry.name.isdecimal())


def _entries(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns what is in a directory of a bucket; `glob` would list all objects below it."""
    return list(directory.iterdir()) if directory.exists() else []


def find_checkpoint(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the directory of the latest checkpoint, or in fine-tuning of the best one.

    `path` is a workdir, its `checkpoints`, or a checkpoint. Raises FileNotFoundError.
    """
    path = absolute(as_path(path))
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory: expected a workdir or a checkpoint")
    if (path / COMMIT).exists() if is_bucket(path) else (path / "params").is_dir():
        return path
    for directory in (path / "best", path / "checkpoints", path):
        if steps := saved_steps(directory):
            return directory / str(steps[-1])
    result = path / "result.json"
    if result.exists() and "weights_removed" in json.loads(result.read_text(encoding="utf-8")):
        fix = f"remove {result}, and run the sweep to train the trial again"
        raise FileNotFoundError(f"the weights in {path} were removed, as keep_trials says: {fix}")
    expected = "expected a workdir, its checkpoints, or one of them"
    for kind, runs in (("seeds", path.glob("seed_*")), ("trials", path.glob("trials/*"))):
        if first := min(runs, default=None):
            expected = f"it holds the runs of several {kind}: choose one of them, such as {first}"
    raise FileNotFoundError(f"{path} holds no complete checkpoint: {expected}")


def load_checkpoint(
    path: str | pathlib.Path,
    get_abstract_params: Callable[[dict], dict],
    verify_checksums: bool = True,
) -> tuple[dict, dict, Tokenizer]:
    """Loads parameters, settings and tokenizer, the parameters onto the default device.

    `path` is as in `find_checkpoint`; `get_abstract_params(settings)` returns the expected tree of
    shapes and dtypes of the parameters. Without `verify_checksums`, the files of the parameters are
    not compared with their checksums. Raises FileNotFoundError or CheckpointError.
    """
    directory = find_checkpoint(path)
    settings = load_settings(directory)
    if "stacked_trials" in settings:
        raise CheckpointError(
            f"{directory} holds the training state of fine-tuning, before a first evaluation: run "
            "the same command again to resume it, and load its workdir then"
        )
    with (
        reading(directory),
        checking_files(directory, ("params",)) if verify_checksums else contextlib.nullcontext(),
    ):
        check_files(directory, ("vocabulary",))
        tokenizer = read_stored(directory / "vocabulary")
        params = read_arrays(
            directory / "params", get_abstract_params(settings), settings["modules"]
        )
    return params, settings, tokenizer


def load_settings(directory: pathlib.Path) -> dict:
    """Returns the settings of the run that wrote a checkpoint; raises CheckpointError."""
    with reading(directory):
        check_files(directory, ("config",))
        return json.loads((directory / "config/metadata").read_text(encoding="utf-8"))


def read_arrays(
    item: pathlib.Path, expected: dict | None = None, modules: Sequence[str] = ()
) -> dict:
    """Reads a tree of arrays onto the default device; ValueError unless it is as `expected`.

    Of `modules` that `expected` does not have, such as an objective's own head, any shape is right.
    Uses TensorStore, largest array first: restoring BERT_BASE with Orbax alone takes 1.4 to 1.6
    times the memory of the parameters instead of 1.2, due to its cache and a copy of each array.
    """
    with plain_path(item) as plain:
        leaves, structure = _array_metadata(plain)
        _check_shapes(item, {leaf.name: leaf for leaf in leaves}, expected, modules)
        limits = {key: {"limit": 2} for key in ("file_io_concurrency", "data_copy_concurrency")}
        stores, arrays = _open_arrays(plain, leaves, tensorstore.Context(limits)), {}
        for leaf in sorted(leaves, key=lambda leaf: -math.prod(leaf.shape)):
            store = stores.pop(leaf.name)
            values = aligned_zeros(leaf.shape, store.dtype.numpy_dtype)
            if leaf.shape:
                _read_in_parts(store, values)
            else:
                values[...] = store.read().result()
            arrays[leaf.name] = jax.block_until_ready(jax.device_put(values))
    return structure.unflatten([arrays[leaf.name] for leaf in leaves])


def _array_metadata(item: pathlib.Path) -> tuple[list, jax.tree_util.PyTreeDef]:
    """Returns the name, shape and dtype of each array of an item, as declared in its metadata."""
    # A Checkpointer would wait for the other processes of a run.
    return jax.tree.flatten(ocp.PyTreeCheckpointHandler().metadata(item).tree)


def _check_shapes(
    item: pathlib.Path, stored: dict, expected: dict | None, modules: Sequence[str]
) -> None:
    """Raises ValueError unless the stored arrays are those that `read_arrays` expects."""
    expected = stored if expected is None else flax.traverse_util.flatten_dict(expected, sep=".")
    unknown = [module.replace("/", ".") + "." for module in modules]
    unknown = tuple(m for m in unknown if not any(name.startswith(m) for name in expected))
    for module in unknown:
        if not any(name.startswith(module) for name in stored):
            raise ValueError(f"{item.name}: {module.rstrip('.')} is absent")
    expected |= {name: leaf for name, leaf in stored.items() if name.startswith(unknown)}
    for name in sorted(stored.keys() | expected.keys()):
        both = stored.get(name), expected.get(name)
        array, other = (f"{np.dtype(x.dtype)} {list(x.shape)}" if x else "absent" for x in both)
        if array != other:
            raise ValueError(f"{item.name}: {name} is {array}, expected {other}")


def _open_arrays(
    item: pathlib.Path, leaves: list, context: tensorstore.Context
) -> dict[str, tensorstore.TensorStore]:
    """Opens the arrays of an item, by name. Raises ValueError for one that is absent."""
    opening = {}
    for leaf in leaves:
        kvstore = {"driver": "ocdbt", "base": _kvstore(item), "path": f"{leaf.name}/"}
        spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
        opening[leaf.name] = tensorstore.open(spec, context=context, open=True, read=True)
    return {name: store.result() for name, store in opening.items()}


def _check_written(item: pathlib.Path) -> None:
    """Raises ValueError unless each array of an item has its declared shape, dtype and chunks."""
    leaves, _ = _array_metadata(item)
    database = {"driver": "ocdbt", "base": _kvstore(item)}
    keys = tensorstore.KvStore.open(database).result().list().result()
    parts = collections.Counter(key.decode().rpartition("/")[0] for key in keys)
    stores = _open_arrays(item, leaves, tensorstore.Context())
    for leaf in leaves:
        store = stores[leaf.name]
        chunks = zip(store.shape, store.chunk_layout.read_chunk.shape or (), strict=True)
        expected = 1 + math.prod(-(-size // chunk) for size, chunk in chunks)  # With .zarray.
        found = store.dtype.numpy_dtype, store.shape, parts[leaf.name]
        if found != (np.dtype(leaf.dtype), tuple(leaf.shape), expected):
            raise ValueError(f"{item.name}: {leaf.name} was not completely written")


def _kvstore(item: pathlib.Path) -> dict[str, str]:
    """Returns TensorStore's specification of a directory; in a URL, names would need escaping."""
    if not is_bucket(item):
        return {"driver": "file", "path": f"{item}/"}
    bucket, _, path = str(item).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}


def _read_in_parts(store: tensorstore.TensorStore, values: np.ndarray) -> None:
    """Reads an array into `values`, a few chunks at a time.

    Chunks are read faster than they are decompressed: if a large array were read at once, up to all
    of its chunks would wait in memory.
    """
    chunk_shape = store.chunk_layout.read_chunk.shape
    counts = [-(-size // chunk) for size, chunk in zip(store.shape, chunk_shape, strict=True)]
    axis = int(np.argmax(counts))
    step = CHUNKS_PER_READ * chunk_shape[axis]
    for first in range(0, store.shape[axis], step):
        part = (slice(None),) * axis + (slice(first, min(first + step, store.shape[axis])),)
        tensorstore.array(values[part], copy=False).write(store[part]).result()


def reading(directory: pathlib.Path) -> contextlib.AbstractContextManager:
    """Turns errors while reading a checkpoint into CheckpointErrors."""
    return _checkpoint_errors(f"{directory} could not be read as a checkpoint of bert_jax")
