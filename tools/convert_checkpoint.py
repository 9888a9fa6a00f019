"""Converts checkpoints: native, Hugging Face's or Google's to native or Hugging Face's.

python tools/convert_checkpoint.py --to=native uncased_L-12_H-768_A-12 checkpoints/bert_base
python tools/convert_checkpoint.py --to=huggingface runs/base exported
python tools/convert_checkpoint.py --to=huggingface --generator runs/electra electra_generator

SRC is a workdir (its best checkpoint is converted, or else its last) or a single checkpoint, a
directory that transformers' `save_pretrained` wrote, or a directory of Google's release (which
needs `pip install tensorflow-cpu`). DST must not exist; it appears only once it is complete. A
converted bi-encoder or cross-encoder can also be read by sentence-transformers, and with
`--to=pylate` a multi-vector model by PyLate. For a hub, Hugging Face's DST has a README.md, a model
card with the run's scores; fill in the marked fields.
"""

import json
import os
import pathlib
import shutil
import sys

from absl import app, flags

# A conversion needs no accelerator, which may be busy training.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.native import find_checkpoint, write_checkpoint
from bert_jax.checkpoints.parameters import format_report
from bert_jax.checkpoints.read import generator_of, read_model
from bert_jax.runtime.command_line import describe_error, log_warnings_only, parse_flags
from bert_jax.runtime.errors import CheckpointError
from bert_jax.runtime.named_modules import import_modules

TO = flags.DEFINE_enum(
    "to", None, ["native", "huggingface", "pylate"], "Format of DST.", required=True
)
GENERATOR = flags.DEFINE_bool(
    "generator", False, "For an ELECTRA run, write the generator instead of the discriminator."
)

ALLOW_NON_FINITE = flags.DEFINE_bool(
    "allow_non_finite", False, "Warn about weights that are NaN or infinite instead of failing."
)
IMPORT = flags.DEFINE_list(
    "import", [], "Modules on the Python path to import first, such as that of a head of your own."
)


def convert(
    source: pathlib.Path,
    destination: pathlib.Path,
    target_format: str,
    generator: bool = False,
    allow_non_finite: bool = False,
) -> None:
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: choose another DST")
    model = read_model(source, allow_non_finite=allow_non_finite)
    print(format_report(model.report))
    if generator:
        model = generator_of(model)
    elif "generator" in model.params and target_format != "native":
        print("Writing the discriminator; --generator writes the generator")
    unfinished = destination.with_name(f"{destination.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    written = unfinished / destination.name  # The name of the model in its card.
    try:
        if target_format == "native":
            write_checkpoint(written, model.params, model.settings, model.tokenizer)
        else:
            result = read_result(source)
            for_pylate = target_format == "pylate"
            save_huggingface(
                written, model.params, model.settings, model.tokenizer, result, for_pylate
            )
        written.rename(destination)
    finally:
        shutil.rmtree(unfinished)
    print(f"{destination}: complete, {target_format}")
    if target_format != "native":
        print(f"{destination}/README.md: fill in the license before you publish the model")


def read_result(source: pathlib.Path) -> dict:
    """Returns the `result.json` of the run that ended with, or chose, this checkpoint; else {}."""
    try:
        checkpoint = find_checkpoint(source)
    except FileNotFoundError:
        return {}  # A directory of another library.
    path = checkpoint.parent.parent / "result.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    step = result.get("best_step", result.get("steps"))
    return result if str(step) == checkpoint.name else {}


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise app.UsageError("expected SRC and DST")
    log_warnings_only()
    source, destination = (pathlib.Path(argument).absolute() for argument in argv[1:])
    try:
        import_modules(IMPORT.value)
        convert(source, destination, TO.value, GENERATOR.value, ALLOW_NON_FINITE.value)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"convert_checkpoint: {describe_error(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
