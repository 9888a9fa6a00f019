"""Checkpoints that explain themselves: state, config and vocabulary in one directory each.

`<workdir>/checkpoints/<step>/` holds `params`, `training` (step and optimizer state), `config`
(JSON: the run's settings, and under "bert" the model's) and `vocabulary` (JSON). Writing is
asynchronous and atomic: a directory under its final name is complete. `write_checkpoint` writes one
such directory without `training`.
"""

import asyncio
import base64
import collections
import contextlib
import json
import math
import pathlib
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from bert_jax.runtime import distributed
from bert_jax.tokenization import Tokenizer, tokenizer_from_bytes
from bert_jax.training.pretrain_step import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class _Manager(ocp.CheckpointManager):
    """Keeps in `failure` why a write failed in this process.

    Orbax itself only tells it after the other processes have waited ten minutes for this one.
    """

    failure: Exception | None = None

    def _wait_for_checkpointers(self):
        try:
            super()._wait_for_checkpointers()
        except Exception as error:
            self.failure = error
            raise


class Checkpointer:
    """Saves and restores the state of one run in `<workdir>/checkpoints`."""

    def __init__(
        self,
        workdir: pathlib.Path,
        settings: dict,
        tokenizer: Tokenizer,
        *,
        keep_last: int,
        keep_every: int = 0,
    ):
        """Keeps the last so many checkpoints, and those of every so many steps (0: none).

        `settings` are the run's, with the fields of `BertConfig` under "bert".
        """
        self.directory = workdir.absolute() / "checkpoints"
        self._settings = settings
        self._failed = False
        self._vocabulary = _vocabulary_values(tokenizer)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last, keep_period=keep_every or None, cleanup_tmp_directories=True
        )
        self._manager = _Manager(self.directory, options=options)

    def latest_step(self) -> int | None:
        """The last step with a complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Begins to write `state`; raises CheckpointError if this or the last write failed.

        LostProcess, here and below, where that was for want of another process.
        """
        step = int(state.step)
        items = ocp.args.Composite(
            params=_in_chunks(state.params),
            training=_in_chunks({"step": state.step, "opt_state": state.opt_state}),
            config=ocp.args.JsonSave(self._settings),
            vocabulary=ocp.args.JsonSave(self._vocabulary),
        )

        def save():
            self._settle()
            self._manager.save(step, args=items)

        self._guard(save, step)

    def check(self) -> None:
        """Raises CheckpointError if the write under way has failed; waits for nothing."""
        self._guard(self._raise_failure, None)

    def wait(self) -> None:
        """Blocks until all is on disk; raises CheckpointError if a write failed."""
        self._guard(self._settle, None)

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state saved at `step`, laid out as the shardings of `abstract` say."""
        training = {"step": abstract.step, "opt_state": abstract.opt_state}
        try:
            items = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(abstract.params),
                    training=ocp.args.StandardRestore(training),
                ),
            )
        except Exception as error:
            raise_if_lost(error)
            raise CheckpointError(
                f"{self.directory / str(step)} could not be restored. If it is damaged, remove it "
                f"to go on from the checkpoint before it. ({str(error)[:500]})"
            ) from error
        return TrainState(params=items.params, **items.training)

    def close(self) -> None:
        """Waits for what is being written; without it the process ends and that write is lost."""
        if self._failed and jax.process_count() > 1:
            return  # It may wait long for processes that have not noticed.
        self._guard(self._manager.close, None)

    def _raise_failure(self):
        if self._manager.failure:
            raise self._manager.failure
        self._manager.check_for_errors()

    def _settle(self):
        """Waits for the write under way, but not for other processes once it has failed in this."""
        while self._manager.is_saving_in_progress():
            self._raise_failure()
            time.sleep(0.02)
        self._manager.wait_until_finished()

    def _guard(self, action, step: int | None):
        # The manager raises whatever its threads met: OSError, tensorstore's ValueError, ...
        try:
            action()
        except (Exception, asyncio.CancelledError) as error:
            self._failed = True
            raise_if_lost(error)
            complete = [found for found in saved_steps(self.directory) if found != step]
            raise CheckpointError(
                f"writing a checkpoint to {self.directory} failed: {error}. The last complete one "
                f"is {f'step {complete[-1]}' if complete else 'none'}; free the disk (or mend the "
                "cause above) and run the same command to go on from there"
            ) from error


def raise_if_lost(error: Exception) -> None:
    """Raises LostProcess where it was not the disk that failed, but another process."""
    if jax.process_count() > 1 and distributed.tells_of_a_lost_process(error):
        raise distributed.LostProcess(str(error)) from error


def write_checkpoint(
    directory: pathlib.Path, params: dict, settings: dict, tokenizer: Tokenizer
) -> None:
    """Writes a checkpoint without training state, as `load_checkpoint` reads it, and waits for it.

    `settings` have the fields of `BertConfig` under "bert"; what `params` lack of
    `BertForPreTraining` is listed under "absent" ("bert/pooler", "mlm", "nsp"), and a task's head
    stands under "head". Raises CheckpointError.
    """
    items = ocp.args.Composite(
        params=_in_chunks(params),
        config=ocp.args.JsonSave(settings | {"has_training_state": False}),
        vocabulary=ocp.args.JsonSave(_vocabulary_values(tokenizer)),
    )
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(directory.absolute(), args=items)
    except Exception as error:
        raise CheckpointError(f"writing a checkpoint to {directory} failed: {error}") from error


def _in_chunks(tree) -> ocp.args.StandardSave:
    """The `tree` is read again a chunk at a time, so that reading takes little memory."""
    chunks = ocp.SaveArgs(chunk_byte_size=4 * 2**20)
    return ocp.args.StandardSave(tree, save_args=jax.tree.map(lambda _: chunks, tree))


def _vocabulary_values(tokenizer: Tokenizer) -> dict:
    return {
        "filename": tokenizer.filename,
        "sha256": tokenizer.sha256,
        "base64": base64.b64encode(tokenizer.content).decode(),
    }


def find_checkpoint(path: str | pathlib.Path) -> pathlib.Path:
    """A workdir, its `checkpoints`, or one checkpoint -> the directory of the (latest) one.

    Of a fine-tuning's workdir it is the checkpoint in `best`.

    Raises FileNotFoundError where there is none.
    """
    path = pathlib.Path(path).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory: expected a workdir or a checkpoint")
    if (path / "params").is_dir():
        return path
    for directory in (path / "best", path / "checkpoints", path):
        if steps := saved_steps(directory):
            return directory / str(steps[-1])
    raise FileNotFoundError(
        f"{path} holds no complete checkpoint: expected a workdir with checkpoints/<step>/, or one "
        "of these directories"
    )


def load_checkpoint(path: str | pathlib.Path, abstract_params_of) -> tuple[dict, dict, Tokenizer]:
    """Parameters, config and tokenizer from a workdir or checkpoint, onto the default device.

    The optimizer's state is not read, and the layout that wrote the checkpoint does not matter.
    `abstract_params_of(config)` gives the tree of shapes that `params` must have; see `inference`.
    Raises FileNotFoundError or CheckpointError.
    """
    directory = find_checkpoint(path)
    settings = load_settings(directory)
    with _reading(directory):
        vocabulary = _read_json(directory / "vocabulary")
        content = base64.b64decode(vocabulary["base64"])
        tokenizer = tokenizer_from_bytes(vocabulary["filename"], content)
        params = _read_arrays(directory, "params", abstract_params_of(settings))
    return params, settings, tokenizer


def load_settings(directory: pathlib.Path) -> dict:
    """The settings that a checkpoint was written with; raises CheckpointError."""
    with _reading(directory):
        return _read_json(directory / "config")


def _read_json(item: pathlib.Path) -> dict:
    # Not by Orbax, which would wait for the other processes of a run.
    return json.loads((item / "metadata").read_text())


def verify_checkpoint(directory: pathlib.Path, abstract_params_of) -> dict[str, int]:
    """Reads all of a checkpoint; its `step` (0 without training state), and both items in bytes.

    Raises CheckpointError where anything is missing, cut off, not finite, or of another model.
    """
    params, settings, _ = load_checkpoint(directory, abstract_params_of)
    # `load_checkpoint` does without the metadata; a run that goes on does not.
    with _reading(directory):
        if _stored_shapes(directory, "params") != _shapes(params):
            raise ValueError("params/ is not what its metadata tells")
    trained = settings.get("has_training_state", True)
    training = training_state(directory) if trained else {"step": np.int32(0)}
    found = {"params": params, "training": training}
    if trained and "head" not in settings:  # A task's optimizer may leave the encoder out.
        # Each parameter has two moments, whatever else the optimizer keeps.
        kept = collections.Counter(leaf.shape for leaf in jax.tree.leaves(training["opt_state"]))
        needed = collections.Counter(leaf.shape for leaf in jax.tree.leaves(params) for _ in "mv")
        if not needed <= kept:
            raise CheckpointError(f"{directory}: training/ is not of these parameters")
    for name, leaf in jax.tree.leaves_with_path(found):
        if not np.isfinite(leaf).all():
            name = jax.tree_util.keystr(name)
            raise CheckpointError(f"{directory}: {name} holds values that are not finite")
    step = int(found["training"]["step"])
    return {"step": step} | {
        item: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for item, tree in found.items()
    }


def training_state(directory: pathlib.Path) -> dict:
    """`step` and `opt_state` as saved, on the default device; raises CheckpointError."""
    with _reading(directory):
        shapes = _stored_shapes(directory, "training")
        if set(shapes) != {"step", "opt_state"}:
            raise ValueError("training/ is not complete, or not of a run")
        return _read_arrays(directory, "training", shapes)


def _stored_shapes(directory: pathlib.Path, item: str) -> dict:
    """The tree of an item's shapes by its own metadata, which Orbax needs to restore it."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(directory / item).item_metadata
    if metadata is None:
        raise ValueError(
            f"{item}/ is not complete: its _METADATA, _sharding or manifest.ocdbt is missing or "
            "damaged"
        )
    for path in directory.glob(f"{item}/array_metadatas/*"):  # Which it reads too.
        json.loads(path.read_text())
    return _shapes(metadata.tree)


def _shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _read_arrays(directory: pathlib.Path, item: str, shapes):
    """The tree `item` on the default device, in little more memory than it takes itself.

    Reading an array takes several times its size for a while. So they are read one by one, the
    largest first, when little else is there yet; and by TensorStore itself, since Orbax has it keep
    100 MB of what was read.
    """
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "file_io_concurrency": {"limit": 1},
            "data_copy_concurrency": {"limit": 1},
        }
    )
    leaves, structure = jax.tree.flatten_with_path(shapes)
    read = {}
    for path, leaf in sorted(leaves, key=lambda each: -math.prod(each[1].shape)):
        name = ".".join(str(key.key if hasattr(key, "key") else key.idx) for key in path)
        base = {"driver": "file", "path": f"{directory / item}/"}  # An URL would want escapes.
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        stored = tensorstore.open(
            {"driver": "zarr", "kvstore": kvstore}, context=context, open=True, read=True
        ).result()
        if stored.shape != leaf.shape or stored.dtype.numpy_dtype != leaf.dtype:
            raise ValueError(
                f"{item} holds {name} of {stored.dtype.name} {list(stored.shape)}, expected "
                f"{leaf.dtype} {list(leaf.shape)}"
            )
        values = _aligned(leaf)
        tensorstore.array(values, copy=False).write(stored).result()
        read[path] = jax.block_until_ready(jax.device_put(values))
    return structure.unflatten([read[path] for path, _ in leaves])


def _aligned(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """A new array whose memory JAX can take over on a CPU, where it must begin at 64 bytes."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(leaf.dtype).reshape(leaf.shape)


@contextlib.contextmanager
def _reading(directory: pathlib.Path):
    try:
        yield
    except Exception as error:  # Of Orbax, tensorstore, JSON, ...: all mean the same to a user.
        raise CheckpointError(
            f"{directory} could not be read as a checkpoint of bert_jax: {error}"
        ) from error


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Steps with a complete checkpoint, ascending; unfinished ones have other names."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())
