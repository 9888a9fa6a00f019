"""Tasks and encoders that several studies share, and their descriptions for the reports."""

import study
import study_flags
from absl import flags

_TRAIN, _DEV = (study.FINETUNING[f"max_{split}_examples"] for split in ("train", "eval"))
LAPTOP_TASKS = f"tasks with at most {_TRAIN} examples to train and {_DEV} for dev"
CORPUS = "99 articles of Wikipedia or, if given, --text"
LAPTOP = f"Ours: BERT_TINY (2 layers, hidden size 128), trained on {CORPUS}; {LAPTOP_TASKS}."
"""What the laptop scale is, for `Study.laptop`."""
SMALL_ENCODERS = (
    "The encoders: BERT_TINY (2 layers, hidden size 128) after one step of pre-training and after "
    f"the whole run, on {CORPUS}; and the published weights of MiniLM (6 layers, hidden size 384, "
    "distilled from a large model and then trained on a billion pairs of sentences)."
)


SMALL_MODERNBERT = {
    "model.attention_output_dropout_rate": 0.0,
    **{f"later_phases.phase_{number}.num_steps": 0 for number in range(3, 10)},
}
"""Fields of configs/pretrain/modernbert_base.py at laptop scale, beside its sizes: two phases."""
ONE_STEP = {"num_steps": 1, "long_phase.num_steps": 0, "warmup_steps": 0}


def sentences(scale: str, *names: str) -> list[study.Task]:
    """Returns tasks of GLUE; at laptop scale without --glue_dir R8 classification instead."""
    return glue(*names) if scale == "pod" or flags.FLAGS.glue_dir else [topics()]


def topics() -> study.Task:
    """Returns R8 classification, Reuters news in 8 topics, with its test set as dev."""
    files = study.fetched("reuters-r8")
    settings = {"data.train": f"{files}/reuters-r8-train.tab"}
    settings |= {"data.dev": f"{files}/reuters-r8-test.tab", "data.test": ""}
    return study.Task("R8 accuracy", "reuters_r8", "dev/accuracy", settings)


def entities(scale: str) -> study.Task:
    """Returns CoNLL-2003 NER, from --conll_dir or fetched."""
    files = flags.FLAGS.conll_dir or study.fetched("conll2003")
    settings = {"data.train": f"{files}/train.txt", "data.dev": f"{files}/valid.txt"}
    if scale == "laptop":
        settings |= {"data.test": "", "num_epochs": 4.0, "learning_rate": 1e-3}
    else:
        settings |= {"data.test": f"{files}/test.txt"}
    return study.Task("NER F1", "conll2003", "dev/f1", settings)


def endings(scale: str) -> study.Task:
    """Returns SWAG, from --swag_dir, or at laptop scale a task like it, made from tales."""
    if scale == "laptop" and not flags.FLAGS.swag_dir:
        settings = {"data.directory": study.fetched("story-endings")}
        return study.Task("Story endings accuracy", "swag", "dev/accuracy", settings)
    settings = {"data.directory": study_flags.directory_of("swag_dir")}
    return study.Task("SWAG accuracy", "swag", "dev/accuracy", settings)


def glue(*names: str) -> list[study.Task]:
    """Returns tasks of GLUE, from --glue_dir: "mnli", or "mrpc/f1" for another metric."""
    tasks = []
    for name in names:
        name, _, metric = name.partition("/")
        split, metric = ("dev_matched" if name == "mnli" else "dev"), metric or "accuracy"
        settings = {"data.directory": study_flags.directory_of("glue_dir")}
        task = study.Task(f"{name} {metric}", f"glue:{name}", f"{split}/{metric}", settings)
        tasks.append(task)
    return tasks


def squad(scale: str, version: str, *metrics: str) -> list[study.Task]:
    """Returns SQuAD by its metrics; at laptop scale only from --squad_dir or --squad2_dir."""
    flag, config = {"1.1": ("squad_dir", "v1"), "2.0": ("squad2_dir", "v2")}[version]
    if scale == "laptop" and not flags.FLAGS[flag].value:
        return []
    files = study_flags.directory_of(flag)
    settings = {"data.train": f"{files}/train.json", "data.dev": f"{files}/dev.json"}
    if scale == "laptop":
        settings |= {"max_train_examples": 120, "max_eval_examples": 60, "max_seq_length": 192}
        settings |= {"data.doc_stride": 96, "num_epochs": 2.0, "batch_size": 8}
    names = {"f1": "F1", "exact": "EM"}
    return [
        study.Task(f"SQuAD {version} {names[metric]}", f"squad:{config}", f"dev/{metric}", settings)
        for metric in metrics
    ]


def with_settings(task: study.Task, settings: study.Settings) -> study.Task:
    """Returns the task with `settings` added to its own, which they override."""
    return task._replace(settings=task.settings | settings)


def small_encoders() -> list[study.Row]:
    """Returns the rows at laptop scale of the studies that compare encoders."""
    return [
        study.Row("BERT_TINY after one step", {}, ONE_STEP),
        study.Row("BERT_TINY"),
        study.Row("MiniLM", weights=study.fetched("minilm"), finetuning={"learning_rate": 2e-4}),
    ]


def full_encoders(paper: dict[str, dict[str, float]]) -> list[study.Row]:
    """Returns the rows at pod scale of the paper's two models."""
    sizes = {"BERT_BASE": "base", "BERT_LARGE": "large"}
    return [study.Row(name, paper[name], size=size) for name, size in sizes.items()]


def rows_of_paper(paper: dict[str, dict[str, float]]) -> list[study.Row]:
    """Returns the rows of the paper, which are not run."""
    return [study.Row(f"paper: {name}", scores, None) for name, scores in paper.items()]
