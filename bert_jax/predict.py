"""Predicts files with a fine-tuned model: `python -m bert_jax.predict --model=DIR --input=FILE
--output=FILE`.

Top to bottom: the model, how its task reads and writes examples, then the loop, in which nothing of
the size of the input is kept, but for the queries of a search: read a block of examples -> features
-> outputs -> predictions, which are appended to the output. It appears when it is complete.
"""

from bert_jax.runtime.command_line import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()  # Before the other imports, which take longer than a second.

import contextlib
import functools
import itertools
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import jax
import numpy as np
from absl import app, flags, logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import bert_jax
from bert_jax.data.features import ModelInput
from bert_jax.inference.ensembles import average_models, make_ensemble, predict_answers
from bert_jax.inference.forward import ROWS_PER_BATCH
from bert_jax.inference.prediction_files import (
    close_shard_folder,
    complete_files,
    describe_model,
    open_shard_folder,
    split_into_shards,
    write_shards,
)
from bert_jax.inference.predictions import predict_blocks
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.heads import Outputs, find_head
from bert_jax.runtime import command_line, distributed
from bert_jax.runtime.config_fields import AT_LEAST_1, Field
from bert_jax.runtime.errors import CheckpointError
from bert_jax.runtime.main import (
    check_devices,
    connect_processes,
    define_process_flags,
    limit_logging,
)
from bert_jax.runtime.named_modules import import_modules, import_part
from bert_jax.tasks import pseudo_likelihood
from bert_jax.tasks.squad import AnswerPredictor
from bert_jax.tasks.tables import content_hash, is_named
from bert_jax.tasks.task import Predictor, TrainedHead
from bert_jax.tasks.vectors import VectorPredictor, check_model

ALL_DEVICES = 0
AS_TRAINED = "; default: as in the run that trained the model."
OPTIONS = {
    "text": Field(None, "Tables: column of the text" + AS_TRAINED, kind=str),
    "title": Field(
        None,
        "Bi-encoders: column of a title, which precedes the text with a space; default: title, if "
        "the model was trained on a corpus of BEIR (data.queries), otherwise none.",
        kind=str,
    ),
    "text_pair": Field(None, "Tables: column of the second text" + AS_TRAINED, kind=str),
    "label": Field(None, "Tables: column of the label, to score" + AS_TRAINED, kind=str),
    "label_columns": Field(
        None,
        "Tables: columns of 0 and 1 for the labels of a text, to score: red,blue" + AS_TRAINED,
        kind=str,
    ),
    "id": Field(None, "Tables: column of the ids; default: numbers from 0.", kind=str),
    "header_lines": Field(
        None, "Tables: lines before the first example; default: 1.", AT_LEAST_1, kind=int
    ),
    "mask_rest_of_word": Field(
        None, "Minimal pairs: whether to mask the rest of a token's word, too.", kind=bool
    ),
    "word_column": Field(None, "Tags: column of the words" + AS_TRAINED, kind=int),
    "tag_column": Field(None, "Tags: column of the tags, to score" + AS_TRAINED, kind=int),
    "tags": Field(None, "Tags: key of the tags in JSONL" + AS_TRAINED, kind=str),
    "shard_size": Field(
        None,
        "Bi-encoders: vectors per file; --output is then a folder of files, its shards, which the "
        "same command completes if it was stopped.",
        AT_LEAST_1,
        kind=int,
    ),
    "dtype": Field(
        None, "Bi-encoders: float32 or float16, of written vectors; default: float32.", kind=str
    ),
    "passages": Field(
        None,
        "Bi-encoders: NAME.npy (of sparse vectors NAME.npz), or a folder of shards, to rank for "
        "the queries in --input.",
        kind=str,
    ),
    "top_k": Field(None, "Bi-encoders: passages to find for a query.", AT_LEAST_1, kind=int),
}
"""Flags that only some tasks take: `PREDICT_OPTIONS` of a task has the names and default values."""
COLUMNS = ("text", "text_pair", "label", "label_columns", "word_column", "tag_column", "tags")
"""Those that say where texts and labels are, which the models of an ensemble must agree on."""


def define_flags() -> None:
    """Defines the flags of the program, which have the names of the arguments of `predict`."""
    flags.DEFINE_multi_string(
        "model",
        None,
        "Fine-tuned model: a workdir, a checkpoint, or an import. Several: an ensemble, "
        "which averages the outputs of models with the same head, or their lists of answers.",
    )
    flags.DEFINE_string("input", None, "File to predict, or a folder of files.")
    flags.DEFINE_string("output", None, "File for the predictions, or a folder; must not exist.")
    flags.DEFINE_integer(
        "batch_size",
        ROWS_PER_BATCH,
        "Packed rows of 64 tokens per forward pass; proportionally fewer longer ones.",
        lower_bound=1,
    )
    help_text = "Local devices over which rows are spread, each with a batch; 0: all."
    flags.DEFINE_integer("num_devices", ALL_DEVICES, help_text, lower_bound=0)
    flags.DEFINE_enum("device", None, ["cpu", "gpu", "tpu"], "Where to compute; default: JAX's.")
    help_text = "Modules on the Python path to import first, such as that of a head of your own."
    flags.DEFINE_list("import", [], help_text)
    for name, option in OPTIONS.items():
        if option.kind is int:
            minimum = option.bounds and option.bounds.minimum
            flags.DEFINE_integer(name, option.default, option.meaning, minimum)
        elif option.kind is bool:
            flags.DEFINE_bool(name, option.default, option.meaning)
        else:
            flags.DEFINE_string(name, option.default, option.meaning)
    define_process_flags()
    flags.mark_flags_as_required(["model", "input", "output"])


def predict(
    model: str | pathlib.Path | Sequence[str | pathlib.Path],
    input: str,
    output: str,
    options: Mapping[str, object] | None = None,
    batch_size: int = ROWS_PER_BATCH,
    device: str | None = None,
    num_devices: int = ALL_DEVICES,
    process_id: int = 0,
    num_processes: int = 1,
) -> dict[str, dict[str, float]]:
    """Predicts a file or a folder of files; returns the scores of each file with known labels.

    Args:
      model: directory as for `bert_jax.load`, with a fine-tuned head, or with a masked-LM head: it
        then scores minimal pairs (`bert_jax.tasks.pseudo_likelihood`). Several: an ensemble
        (`bert_jax.inference.ensembles`).
      input, output: two files, or two folders. The output must not exist, and appears when it is
        complete. With the option `shard_size` it is a folder in which shards appear one by one; it
        may have some of an earlier call with the same arguments.
      options: those of the task that are set, such as columns: values of `OPTIONS`.
      batch_size, device: as for `encode`, on each device, and `bert_jax.load`.
      num_devices: over how many local devices the rows are spread; 0: all.
      process_id, num_processes: of the processes that write shards into one folder, or each into
        its own; this one writes every `num_processes`-th shard, from number `process_id`.

    Raises ValueError, OSError or CheckpointError, which name arguments and options.
    """
    source, target = pathlib.Path(input), pathlib.Path(output)
    if not source.exists() and not is_named(source):
        raise FileNotFoundError(f"input={source} does not exist: expected a file or a folder")
    if "://" in str(output):
        raise ValueError(f"output={output}: expected a local path; copy the predictions later")
    options = options or {}
    shard_size = options.get("shard_size")
    if not shard_size and target.exists():
        raise FileExistsError(f"output={target} exists: choose another, or remove it")
    if not shard_size and num_processes > 1:
        raise ValueError(f"num_processes={num_processes}: several need --shard_size")
    if process_id not in range(num_processes):
        raise ValueError(f"process_id={process_id}: expected 0 to {num_processes - 1}")
    models = [model] if isinstance(model, str | pathlib.Path) else model
    members = [bert_jax.load(each, device=device) for each in models]
    loaded = members[0]
    if len(members) > 1:
        loaded = make_ensemble(members, unset_columns(loaded, options))
    predictor = make_predictor(loaded, options)
    if passages := options.get("passages"):
        check_model(pathlib.Path(passages), describe_model(loaded))
    files = choose_files(predictor, source, target, bool(shard_size))
    applies = [spread(each, batch_size, device, num_devices) for each in members]
    averages_answers = len(members) > 1 and isinstance(predictor, AnswerPredictor)
    apply = applies[0]
    if len(members) > 1 and not averages_answers:
        apply = average_models(find_head(loaded.head).predicts, applies)
    folder = contextlib.nullcontext(target) if shard_size else complete_files(target)
    if shard_size:
        data_dir = loaded.settings.get("data", {}).get("data_dir", "")
        contents = {name: content_hash(str(path), data_dir) for path, name in files}
        settings = describe_model(loaded) | {"input": contents} | predictor.options
        open_shard_folder(target, settings)
    scores, num_shards, numbers = {}, {}, itertools.count()
    with folder as directory:
        for path, name in files:
            predictor = make_predictor(loaded, options)  # With notes and scores of its own.
            if isinstance(predictor, VectorPredictor):
                predictor.numbers = numbers  # The ids of a folder are those of one index.
            write, examples = predictor.writers[pathlib.Path(name).suffix], predictor.read(path)
            compute = functools.partial(predict_blocks, apply, predictor)
            if averages_answers:
                others = [make_predictor(each, options) for each in members[1:]]
                compute = functools.partial(predict_answers, applies, [predictor, *others])
            if shard_size:
                shards = map(compute, split_into_shards(examples, shard_size))
                num_shards[name] = write_shards(
                    directory / name, write, shards, process_id, num_processes
                )
            else:
                write(directory / name, compute(examples))
            if found := predictor.scores():
                scores[name] = found
            for what, count in sorted(predictor.notes.items()):
                if count:
                    logging.info("%s: %d %s", path, count, what)
    if shard_size:
        close_shard_folder(target, settings, num_shards)
    return scores


def spread(
    model: PretrainedModel, batch_size: int, device: str | None, num_devices: int
) -> Callable[[Sequence[ModelInput]], Outputs]:
    """Returns features -> outputs of the head, over several devices. Raises ValueError."""
    devices = jax.local_devices(backend=device)
    if num_devices > len(devices):
        raise ValueError(f"num_devices={num_devices}: there are {len(devices)}")
    devices = devices[: num_devices or len(devices)]
    outputs = model.head_outputs if model.head else model.log_probabilities
    if len(devices) == 1:
        return functools.partial(outputs, batch_size=batch_size)
    mesh = Mesh(np.array(devices), ("data",))
    model.params = jax.device_put(model.params, NamedSharding(mesh, PartitionSpec()))
    batch_size *= len(devices)
    return functools.partial(outputs, batch_size=batch_size, mesh=mesh)


def make_predictor(model: PretrainedModel, options: Mapping[str, object]) -> Predictor:
    """Returns the predictor of the model's task; `options` are those that are set.

    Raises ValueError for a model without a head, or for an option that its task does not have.
    """
    data, limit = {}, model.config.max_position_embeddings
    if model.head:
        task, name = find_task(model)
        head, data = model.head["task"], model.settings.get("data", {})
    elif "mlm" in model.params:
        model.check_fills_masks("score minimal pairs")
        task, name, head = pseudo_likelihood, "pseudo_likelihood", "masked_lm"
    else:
        fix = (
            "give the workdir of a run of bert_jax.finetune, or a masked LM to score minimal pairs"
        )
        raise ValueError(f"model={model.source} has no fine-tuned head: {fix}")
    for option, value in options.items():
        if option not in task.PREDICT_OPTIONS:
            expected = ", ".join(task.PREDICT_OPTIONS) or "none"
            raise ValueError(
                f"{option}={value} is for other models: this one has a head for {head}, of the "
                f"task {name}, whose options are {expected}"
            )
    trained = TrainedHead(model.head or {}, data, model.tokenizer, limit)
    defaults = {each: data.get(each, value) for each, value in task.PREDICT_OPTIONS.items()}
    if "header_lines" in defaults:  # Those of another file would be examples of this one.
        defaults["header_lines"] = 1
    return task.get_predictor(trained, defaults | dict(options), options.keys())


def find_task(model: PretrainedModel) -> tuple[ModuleType, str]:
    """Returns the file of the task that trained the head, and its name."""
    name = model.settings.get("task") or find_head(model.head).task  # An import stores no task.
    return import_part("bert_jax.tasks", name, "get_predictor", only_imported=True), name


def unset_columns(model: PretrainedModel, options: Mapping[str, object]) -> list[str]:
    """Returns the `COLUMNS` that the model's task reads and `options` do not set."""
    read, given = find_task(model)[0].PREDICT_OPTIONS if model.head else (), {*options}
    if given & {"label", "label_columns"}:
        given |= {"label", "label_columns"}  # Either replaces both.
    return [name for name in COLUMNS if name in read and name not in given]


def choose_files(
    predictor: Predictor, source: pathlib.Path, target: pathlib.Path, in_shards: bool
) -> list[tuple[pathlib.Path, str]]:
    """Returns each file to read, and the name of that to write.

    Raises ValueError if the suffix of a file to write is unknown.
    """
    if in_shards and target.suffix in predictor.writers:
        raise ValueError(f"output={target}: expected a folder, for shards")
    if in_shards and not source.is_dir():
        return [(source, source.stem + next(iter(predictor.writers)))]
    if not source.is_dir():
        if target.suffix not in predictor.writers:
            expected = " or ".join(predictor.writers)
            raise ValueError(f"output={target}: expected a file with the suffix {expected}")
        return [(source, target.name)]
    if target.suffix in predictor.writers:
        raise ValueError(f"output={target}: expected a folder, as input={source} is one")
    files = predictor.find_inputs(source)
    names = [name for _, name in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        paths = " and ".join(str(path) for path, name in files if name == twice)
        raise ValueError(f"{paths} would both be predicted into {twice}: rename one of them")
    return files


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    limit_logging()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Cleans up.
    options = {name: values[name].value for name in OPTIONS if values[name].value is not None}
    try:
        import_modules(values["import"].value)
        is_distributed = values.multihost or values.coordinator is not None
        if is_distributed:
            connect_processes()
        check_devices()
        # An error of one process ends all, which do not wait for each other until they are done.
        with distributed.raise_on_all_processes() if is_distributed else contextlib.nullcontext():
            scores = predict(
                values.model,
                values.input,
                values.output,
                options,
                batch_size=values.batch_size,
                device=values.device,
                num_devices=values.num_devices,
                process_id=jax.process_index() if is_distributed else values.process_id or 0,
                num_processes=jax.process_count() if is_distributed else values.num_processes or 1,
            )
    except (ImportError, ValueError, OSError, CheckpointError) as error:
        logging.debug("Traceback:", exc_info=True)  # Shown with --verbosity=1.
        message = command_line.describe_error(error)
        argument = message.partition("=")[0]  # It has the name of its flag.
        dashes = "--" if argument in values else ""
        sys.exit(f"{command_line.program_name()}: {dashes}{message}")
    except KeyboardInterrupt:
        kept = "complete shards are kept" if "shard_size" in options else "nothing is written"
        sys.exit(f"\n{command_line.program_name()}: interrupted; {kept}")
    if scores:
        print(json.dumps(scores, indent=2))
    print(f"Predictions: {values.output}")


if __name__ == "__main__":
    command_line.keep_running_without_log()
    define_flags()
    app.run(main, flags_parser=command_line.parse_flags)
