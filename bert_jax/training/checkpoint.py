"""Self-contained checkpoints: training state, settings and vocabulary in one directory.

`<workdir>/checkpoints/<step>/` holds `params`, `training` (step and optimizer state), `config`
(JSON: the run's settings, with the fields of `BertConfig` under "bert") and `vocabulary` (JSON).
Writing is asynchronous and atomic: a directory under its final name is complete.
`write_checkpoint` writes such a directory without `training`.
"""

import asyncio
import base64
import collections
import contextlib
import json
import math
import pathlib
import shutil
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp

from bert_jax.runtime import distributed
from bert_jax.runtime.command_line import CheckpointError
from bert_jax.tokenization import Tokenizer, tokenizer_from_bytes
from bert_jax.training.state import TrainState


class Checkpointer:
    """Saves and restores the training state of one run in `<workdir>/checkpoints`.

    All methods raise CheckpointError if the disk failed, and LostProcess if another process did.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        settings: dict,
        tokenizer: Tokenizer,
        *,
        keep_last: int,
        keep_every: int = 0,
    ):
        """Creates the directory and removes unfinished checkpoints of earlier runs.

        Args:
          workdir: directory of the run.
          settings: the run's settings, with the fields of `BertConfig` under "bert".
          tokenizer: its vocabulary is stored in every checkpoint.
          keep_last: number of latest checkpoints to keep. While one is written, and until the next
            save, there is one more.
          keep_every: keeps the checkpoints of all multiples of this step as well; 0 keeps none.
        """
        self.directory = workdir.absolute() / "checkpoints"
        self._keep_last, self._keep_every = keep_last, keep_every
        self._metadata_items = {
            "config": ocp.args.JsonSave(settings),
            "vocabulary": ocp.args.JsonSave(_vocabulary_values(tokenizer)),
        }
        # A CheckpointManager would not report a failed write before it has waited ten minutes for
        # the other processes.
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for unfinished in self.directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(unfinished)

    def latest_step(self) -> int | None:
        """Returns the step of the latest complete checkpoint, or None."""
        return max(saved_steps(self.directory), default=None)

    def save(self, state: TrainState) -> None:
        """Starts writing `state` after the previous write has finished."""
        self.wait()
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            training=ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state}),
            **self._metadata_items,
        )
        with self._writing():
            self._checkpointer.save(self.directory / str(state.step), args=items)

    def check(self) -> None:
        """Raises CheckpointError if the current write has failed, without waiting for it."""
        with self._writing():
            self._checkpointer.check_for_errors()

    def wait(self) -> None:
        """Waits for the current write, then removes the checkpoints that are not to be kept."""
        with self._writing():
            self._checkpointer.wait_until_finished()
            if jax.process_index() == 0:
                for step in saved_steps(self.directory)[: -self._keep_last]:
                    if not self._keep_every or step % self._keep_every:
                        self._remove(step)

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Returns the state saved at `step`, with the shapes and shardings of `abstract`."""
        directory = self.directory / str(step)
        training = {"step": abstract.step, "opt_state": abstract.opt_state}
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params),
            training=ocp.args.StandardRestore(training),
        )
        try:
            restored = self._checkpointer.restore(directory, args=items)
        except Exception as error:
            _raise_if_lost_process(error)
            raise CheckpointError(
                f"{directory} could not be restored. If it is damaged, remove it to resume from "
                f"the previous checkpoint. ({str(error)[:500]})"
            ) from error
        return TrainState(params=restored.params, **restored.training)

    def close(self) -> None:
        """Waits for the current write, which would be lost at the end of the process."""
        self.wait()
        self._checkpointer.close()

    def _remove(self, step: int) -> None:
        # An interrupted removal must not leave an incomplete directory under the final name.
        removed = self.directory / f"{step}{ocp.utils.TMP_DIR_SUFFIX}-removed"
        (self.directory / str(step)).rename(removed)
        shutil.rmtree(removed)

    @contextlib.contextmanager
    def _writing(self):
        # Orbax raises whatever its threads raised: OSError, ValueError from TensorStore, ...
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            _raise_if_lost_process(error)
            step = self.latest_step()
            raise CheckpointError(
                f"writing a checkpoint to {self.directory} failed: {error}. The last complete one "
                f"is {'none' if step is None else f'step {step}'}; free the disk or fix the cause, "
                "then run the same command to resume"
            ) from error


def _raise_if_lost_process(error: Exception) -> None:
    if jax.process_count() > 1 and distributed.is_lost_process_error(error):
        raise distributed.LostProcess(str(error)) from error


def write_checkpoint(
    directory: pathlib.Path, params: dict, settings: dict, tokenizer: Tokenizer
) -> None:
    """Writes a checkpoint without training state and waits until it is complete.

    Args:
      directory: directory of the checkpoint; must not exist.
      params: parameters of `BertForPreTraining` or of a task's model.
      settings: the fields of `BertConfig` under "bert"; the parts of `BertForPreTraining` that
        `params` lacks under "absent" ("bert/pooler", "mlm", "nsp"); a task's head under "head".
      tokenizer: its vocabulary is stored.

    Raises:
      CheckpointError: the directory exists or could not be written.
    """
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        config=ocp.args.JsonSave(settings | {"has_training_state": False}),
        vocabulary=ocp.args.JsonSave(_vocabulary_values(tokenizer)),
    )
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(directory.absolute(), args=items)
    except Exception as error:
        raise CheckpointError(f"writing a checkpoint to {directory} failed: {error}") from error


def _vocabulary_values(tokenizer: Tokenizer) -> dict:
    return {
        "filename": tokenizer.filename,
        "sha256": tokenizer.sha256,
        "base64": base64.b64encode(tokenizer.content).decode(),
    }


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps with a complete checkpoint in `directory`, in ascending order."""
    if not directory.is_dir():
        return []
    # Unfinished checkpoints have other names.
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())


def find_checkpoint(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the directory of a checkpoint.

    Args:
      path: a checkpoint, a directory of checkpoints, or a workdir: the latest checkpoint of
        pre-training, or the one in `best` of fine-tuning.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
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
        f"{path} holds no complete checkpoint: expected a workdir, its checkpoints directory, or "
        "one checkpoint"
    )


def load_checkpoint(
    path: str | pathlib.Path, abstract_params_of: Callable[[dict], dict]
) -> tuple[dict, dict, Tokenizer]:
    """Loads a checkpoint onto the default device, whatever devices wrote it.

    Args:
      path: a workdir or checkpoint, as for `find_checkpoint`.
      abstract_params_of: function of the settings that returns the expected tree of shapes and
        dtypes of the parameters.

    Returns:
      Parameters, settings and tokenizer.

    Raises:
      FileNotFoundError: there is no checkpoint.
      CheckpointError: the checkpoint is damaged, or its parameters have other shapes.
    """
    directory = find_checkpoint(path)
    settings = load_settings(directory)
    with _reading(directory):
        vocabulary = _read_json(directory / "vocabulary")
        content = base64.b64decode(vocabulary["base64"])
        tokenizer = tokenizer_from_bytes(vocabulary["filename"], content)
        params = _read_arrays(directory / "params", abstract_params_of(settings))
    return params, settings, tokenizer


def load_settings(directory: pathlib.Path) -> dict:
    """Returns the settings of the run that wrote a checkpoint; raises CheckpointError."""
    with _reading(directory):
        return _read_json(directory / "config")


def training_state(directory: pathlib.Path) -> dict:
    """Returns `step` and `opt_state` on the default device; raises CheckpointError."""
    with _reading(directory):
        training = _read_arrays(directory / "training")
        if set(training) != {"step", "opt_state"}:
            raise ValueError("training/ is incomplete, or not a training state")
        return training


def verify_checkpoint(
    directory: pathlib.Path, abstract_params_of: Callable[[dict], dict]
) -> dict[str, int]:
    """Reads an entire checkpoint; the arguments are those of `load_checkpoint`.

    Returns:
      `step` (0 without training state), and the sizes of `params` and `training` in bytes.

    Raises:
      CheckpointError: a part is missing, truncated, not finite, or of another model.
    """
    params, settings, _ = load_checkpoint(directory, abstract_params_of)
    training = {"step": np.int32(0)}
    if settings.get("has_training_state", True):
        training = training_state(directory)
        if "head" not in settings:  # A task's optimizer may leave the encoder out.
            stored = collections.Counter(x.shape for x in jax.tree.leaves(training["opt_state"]))
            # Every optimizer stores two moments of each parameter.
            moments = collections.Counter(2 * [x.shape for x in jax.tree.leaves(params)])
            if not moments <= stored:
                raise CheckpointError(f"{directory}: training/ belongs to other parameters")
    items = {"params": params, "training": training}
    for path, leaf in jax.tree.leaves_with_path(items):
        if not np.isfinite(leaf).all():
            name = jax.tree_util.keystr(path)
            raise CheckpointError(f"{directory}: {name} holds values that are not finite")
    sizes = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for name, tree in items.items()
    }
    return {"step": int(training["step"])} | sizes


def _read_json(item: pathlib.Path) -> dict:
    return json.loads((item / "metadata").read_text())


def _read_arrays(item: pathlib.Path, expected: dict | None = None) -> dict:
    """Reads a tree of arrays onto the default device; ValueError if it is not as `expected`.

    Reading an array takes up to three times its size for a moment. One after the other, the largest
    first, they take little more memory in total than the tree itself.
    """
    # Unlike a Checkpointer, a handler does not wait for the other processes of a run.
    handler = ocp.PyTreeCheckpointHandler()
    stored = handler.metadata(item).tree
    if expected is not None:
        _check_shapes(item.name, stored, expected)
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
    leaves, structure = jax.tree.flatten(stored)
    arrays = list(leaves)
    for index in sorted(range(len(leaves)), key=lambda index: -math.prod(leaves[index].shape)):
        request = [ocp.PLACEHOLDER] * len(leaves)
        request[index] = leaves[index]
        args = ocp.args.PyTreeRestore(structure.unflatten(request), restore_args=restore_args)
        restored = jax.tree.leaves(handler.restore(item, args=args))
        arrays[index] = jax.block_until_ready(jax.device_put(restored.pop(index)))
    return structure.unflatten(arrays)


def _check_shapes(name: str, stored: dict, expected: dict) -> None:
    found, wanted = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): (
                f"{np.dtype(leaf.dtype).name} {list(leaf.shape)}"
            )
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        for tree in (stored, expected)
    )
    for path in sorted(found.keys() | wanted.keys()):
        if found.get(path) != wanted.get(path):
            raise ValueError(
                f"{name} holds {path} of {found.get(path, 'no shape')}, expected "
                f"{wanted.get(path, 'no such parameter')}"
            )


@contextlib.contextmanager
def _reading(directory: pathlib.Path):
    try:
        yield
    except Exception as error:  # Orbax, TensorStore and JSON raise errors of many types.
        raise CheckpointError(
            f"{directory} could not be read as a checkpoint of bert_jax: {error}"
        ) from error
