"""Fine-tunes from Python: weights and examples, in files or in memory, to a loaded model."""

import difflib
import filecmp
import pathlib

from flax.traverse_util import flatten_dict

from bert_jax.finetune import train_and_evaluate
from bert_jax.inference.pretrained_model import PretrainedModel, load
from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.config_fields import flatten
from bert_jax.runtime.named_modules import import_part
from bert_jax.tasks import tables


def fit(
    weights: str | pathlib.Path,
    train: object,
    dev: object = None,
    test: object = None,
    *,
    workdir: str | pathlib.Path,
    task: str = "text_classification",
    **fields,
) -> tuple[PretrainedModel, dict]:
    """Runs or resumes a fine-tuning; returns the model and the contents of its `result.json`.

    The same as `python -m bert_jax.finetune`, with the same files in `workdir`; examples in memory
    are written there first, and give what they would give as a file.

    Args:
      weights: the directory or checkpoint to start from.
      train: a path, "tfds:NAME" or "hub:NAME:CONFIGURATION", or examples in memory, as
        `bert_jax.tasks.records` lists them.
      dev: the same, to select the best checkpoint; None: the last one is kept.
      test: the same, to predict and, with labels, to score; None: none.
      workdir: the directory of the run; a finished run there returns its result at once.
      task: a configuration in `configs/finetune`, and its argument: "retrieval:cross_encoder".
      **fields: other values of its fields, such as `num_epochs=2` and `data={"label": "class"}`.

    Raises:
      ValueError, TypeError, OSError: for invalid fields, examples or weights.
      RunStopped: after Ctrl-C; the same call resumes the run.
      Diverged: if the loss is not finite.
    """
    name, _, argument = task.partition(":")
    module = import_part("bert_jax.configs.finetune", name, "get_config")
    config = module.get_config(argument).lock()
    if "train" not in config.data:
        fix = "use bert_jax.finetune, or a task such as text_classification"
        raise ValueError(f"task={task} reads config.data.directory, not examples: {fix}")
    known, arguments = flatten(config), ("init_from", "data.train", "data.dev", "data.test")
    for field in flatten_dict(fields, sep="."):
        if field in arguments:
            fix = "pass it as weights, train, dev or test"
            raise ValueError(f"{field} is set by the arguments of fit: {fix}")
        if field not in known:
            similar = ", ".join(difflib.get_close_matches(field, known)) or "as in --help"
            raise ValueError(f"the task {task} has no field {field} (similar: {similar})")
    config.update({"init_from": str(weights)} | fields)
    for split, examples in (("train", train), ("dev", dev), ("test", test)):
        config.data[split] = "" if examples is None else _as_path(examples, split, workdir)
    result = train_and_evaluate(config, workdir)
    return load(result["model"]), result


def _as_path(examples: object, split: str, workdir: str | pathlib.Path) -> str:
    """Returns the path of the examples; those in memory are written below `workdir`."""
    if isinstance(examples, str | pathlib.Path):
        return str(examples)
    if is_bucket(workdir):
        fix = "write them to a file, or set a directory of this machine"
        raise ValueError(f"{split} has examples in memory, but {workdir} is a bucket: {fix}")
    path = pathlib.Path(workdir) / f"data/{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    tables.write_json_lines(written, (values for values, _ in tables.check_objects(examples)))
    if path.exists() and not filecmp.cmp(written, path, shallow=False):
        written.unlink()
        raise ValueError(f"{path} has other examples than {split}: use another workdir")
    written.replace(path)
    return str(path)
