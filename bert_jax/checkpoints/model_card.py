"""Writes the model card of an exported model, the README.md that a hub shows."""

import pathlib
import re
from collections.abc import Mapping

from huggingface_hub import EvalResult, ModelCardData

from bert_jax.checkpoints.parameters import row_length, trained_length
from bert_jax.configs.pretrain.fields import phases_of
from bert_jax.data.row_stream import parse_mixture
from bert_jax.model.heads import find_head

# Kind of a model without a task's head -> (the hub's name of the task, what loads the model).
_PIPELINES = {
    "causal": ("text-generation", "AutoModelForCausalLM.from_pretrained"),
    "mlm": ("fill-mask", "pipeline"),
    "discriminator": (None, "AutoModelForPreTraining.from_pretrained"),  # No pipeline has it.
    "encoder": ("feature-extraction", "pipeline"),
}
# Settings of a run that the card lists, where the run has them.
_LISTED = (
    "init_from",
    "corpus",
    "max_seq_length",
    "batch_size",
    "num_epochs",
    "num_steps",
    "optimizer",
    "learning_rate",
    "weight_decay",
    "seed",
)
_TO_FILL_IN = """\
# Fill in before you publish: https://huggingface.co/docs/hub/model-cards
# license: of these weights; check the licenses of the data and of the base model
"""


def model_card(name: str, params: Mapping, settings: Mapping, result: Mapping) -> str:
    """Returns the card of the model `name`: YAML with what is known, then Markdown.

    `settings` are the checkpoint's; `result`, the contents of the `result.json` of the run that
    trained these `params`, gives the metrics, or is empty.
    """
    architecture = settings["architecture"]
    family = architecture.get("family") or architecture["name"]
    pipeline_tag, loader = _pipeline(params, settings)
    embedding_classes = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder")
    is_embedding = loader in (*embedding_classes, "CrossEncoder")
    base = settings.get("init_from") or ""
    on_hub = re.search(r"models--([\w.-]+?)--([\w.-]+)", base)
    results = _eval_results(pipeline_tag, settings, result, "discriminator" in params)
    languages = settings.get("languages", ())
    # English is also the default of a corpus whose language was not given.
    is_known = languages and not {None, "en"} & {*languages}
    data = ModelCardData(
        license="unknown",
        language=sorted({*languages}) if is_known else None,
        base_model="/".join(on_hub.groups()) if on_hub else None,
        library_name="sentence-transformers" if is_embedding else "transformers",
        pipeline_tag=pipeline_tag,
        tags=[family, "bert_jax"],
        model_name=name if results else None,
        eval_results=results or None,
    )
    to_fill_in = _TO_FILL_IN + "# language: en\n" * (not is_known)
    to_fill_in += "# base_model: OWNER/NAME\n" * bool(base and not on_hub)
    library = "sentence_transformers" if is_embedding else "transformers"
    task = f'"{pipeline_tag}", ' if loader == "pipeline" else ""
    lines = [
        "---",
        to_fill_in + data.to_yaml(),
        "---",
        "",
        f"# {name}",
        "",
        f"A `{family}` model trained with bert_jax. To fill in: its intended use, what it must not",
        "be used for, and its training data.",
        "",
        "```python",
        f"from {library} import {loader.partition('.')[0]}",
        "",
        f'model = {loader}({task}"OWNER/{name}")',
        "```",
        "",
    ]
    lines += _section("Labels", (settings.get("head") or {}).get("labels", ()))
    lines += _section("Training", _training(settings))
    return "\n".join(lines).rstrip() + "\n"


def _pipeline(params: Mapping, settings: Mapping) -> tuple[str | None, str]:
    """Returns the hub's name of the model's task, and what loads the model."""
    if settings.get("head"):
        form = find_head(settings["head"]).transformers
        return form.pipeline, form.loader
    if "discriminator" in params:
        return _PIPELINES["discriminator"]
    if "mlm" not in params:
        return _PIPELINES["encoder"]
    return _PIPELINES["causal" if settings["architecture"].get("causal") else "mlm"]


def _eval_results(
    pipeline_tag: str | None, settings: Mapping, result: Mapping, is_discriminator: bool
) -> list[EvalResult]:
    """Returns an entry for each score, but none for the scores of single labels, such as f1/PER."""
    splits = {name: scores for name, scores in result.items() if isinstance(scores, dict)}
    if not splits:  # Pre-training: held-out rows of the corpus.
        names = ("perplexity", "mlm_accuracy", "nsp_accuracy", "next_token_accuracy")
        if is_discriminator:  # The others are the generator's.
            names = ("replaced_accuracy", "replaced_recall", "replaced_precision")
        splits = {"heldout": {name: result[name] for name in names if name in result}}
    return [
        EvalResult(
            task_type=pipeline_tag or "other",
            dataset_type=_dataset(split, settings),
            dataset_name=_dataset(split, settings),
            dataset_split=split,
            metric_type=metric,
            metric_value=round(float(score), 6),
        )
        for split, scores in splits.items()
        for metric, score in scores.items()
        if "/" not in metric
    ]


def _dataset(split: str, settings: Mapping) -> str:
    """Returns a name of the data: of its file without the folders, which are a machine's own."""
    data = settings.get("data") or {}
    source = data.get(split) or data.get("name") or data.get("directory")
    last = [settings, *_pretraining_phases(settings)][-1]  # Whose scores they are.
    if not source and last.get("corpus"):
        return _corpus_name(last)
    return pathlib.Path(source or settings.get("task") or split).name


def _training(settings: Mapping) -> list[str]:
    """Returns the lines that list the phases of pre-training and the settings of the run."""
    phases = _phases(settings)
    replaced = ("corpus", "max_seq_length", "batch_size", "num_steps") if phases else ()
    values = {
        name: settings[name]
        for name in _LISTED
        if name not in replaced and settings.get(name) not in (None, "")
    }
    if "init_from" in values:
        values["init_from"] = pathlib.Path(values["init_from"]).name
    if "corpus" in values:
        values["corpus"] = _corpus_name(values)
    if length := trained_length(settings):
        values["trained on inputs of at most"] = f"{length} tokens"
    return [*phases, *(f"{name}: {value}" for name, value in values.items())]


def _phases(settings: Mapping) -> list[str]:
    """Returns a line for each phase of pre-training: its corpora, rows, length and steps."""
    lines = []
    for part, corpus in zip(
        _pretraining_phases(settings), settings.get("corpora", ()), strict=False
    ):
        length = row_length(corpus["splits"]["train"])
        others, weights = corpus.get("mixture", ()), corpus.get("weights", (1.0,))
        rows = " + ".join(
            f"{pathlib.Path(directory).name}: {each['splits']['train']['rows']:,} rows of {length} "
            f"tokens{f' ({weight / sum(weights):.3g} of all)' if others else ''}"
            for directory, each, weight in zip(
                _directories(part), (corpus, *others), weights, strict=True
            )
        )
        lines.append(f"{rows}, {part['num_steps']:,} steps of {part['batch_size']:,} rows")
    return lines


def _directories(phase: Mapping) -> list[str]:
    """Returns the directories of the corpora of a phase.

    In earlier versions `corpus` was one directory, and `mixture` had pairs of others and weights.
    """
    return [*parse_mixture(phase["corpus"]), *(other for other, _ in phase.get("mixture") or ())]


def _corpus_name(phase: Mapping) -> str:
    """Returns the names of the corpora of a phase, without the folders that they are in."""
    return " + ".join(pathlib.Path(directory).name for directory in _directories(phase))


def _pretraining_phases(settings: Mapping) -> list[dict]:
    """Returns the corpora, steps and batch size of each phase of pre-training with steps."""
    phases, values = [], {}
    for group in phases_of(settings).values():
        if group.get("num_steps") and (group.get("corpus") or phases):
            # What a later phase does not set is as in the phase before.
            names = ("corpus", "num_steps", "batch_size")
            values = values | {name: group[name] for name in names if group.get(name)}
            if group.get("corpus") or group.get("mixture") is not None:
                values["mixture"] = group.get("mixture") or ()
            phases.append(values)
    return phases


def _section(title: str, items) -> list[str]:
    return [f"## {title}", "", *(f"- {item}" for item in items), ""] if items else []
