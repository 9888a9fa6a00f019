"""Fine-tuning recipes for BERT's descendants: `glue.py:mnli,roberta`, `squad.py:v1,electra_base`.

A recipe sets fields of a fine-tuning configuration to the values that the models' authors
published; flags override them. `dev_scores` are the published scores of the released weights, for
comparison: no recipe was run here at full size.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

# Training examples of the GLUE sets, for recipes that count steps.
TRAIN_EXAMPLES = {
    "cola": 8_551,
    "sst2": 67_349,
    "mrpc": 3_668,
    "stsb": 5_749,
    "qqp": 363_849,
    "mnli": 392_702,
    "qnli": 104_743,
    "rte": 2_490,
}


class Recipe(NamedTuple):
    """A published fine-tuning recipe.

    Attributes:
      source: paper and code.
      dev_scores: published scores of the released weights, by model.
      fields: fields of the configuration, for all tasks.
      by_task: further fields by task: a GLUE set as in `glue.py:SET`, "squad", or "squad_v2" in
        addition.
    """

    source: str
    dev_scores: str
    fields: dict[str, object]
    by_task: dict[str, dict[str, object]]


def apply_recipe(config: ConfigDict, name: str, *tasks: str) -> None:
    """Sets the fields of a recipe for a task in `config`. Raises ValueError for an unknown recipe.

    Later `tasks` (names in `Recipe.by_task`) override earlier ones.
    """
    if name not in RECIPES:
        expected = f"a recipe ({', '.join(RECIPES)}) or 'runlocal'"
        raise ValueError(f"unknown argument {name!r} after the colon: expected {expected}")
    recipe = RECIPES[name]
    for fields in (recipe.fields, *(recipe.by_task.get(task, {}) for task in tasks)):
        config.update(fields)


def split_recipe(arg: str) -> tuple[str, str]:
    """Splits "roberta,runlocal" into the name of the recipe and the rest; both may be empty."""
    name, _, rest = arg.partition(",")
    return ("", arg) if name == "runlocal" else (name, rest)


def steps(task: str, batch_size: int, num_steps: int, warmup_steps: int) -> dict[str, object]:
    """Returns the fields for a number of updates on a whole training set."""
    steps_per_epoch = -(-TRAIN_EXAMPLES[task] // batch_size)
    return {
        "batch_size": batch_size,
        "num_epochs": num_steps / steps_per_epoch,
        "warmup_fraction": warmup_steps / num_steps,
    }


ROBERTA = Recipe(
    source="Liu et al. (2019), table 10, and for each set fairseq's examples/roberta/README.glue.md"
    " (Adam's beta2 of 0.98 there is 0.999 here)",
    dev_scores="base MNLI-m 87.6, QNLI 92.8, QQP 91.9, RTE 78.7, SST-2 94.8, MRPC 90.2, "
    "CoLA 63.6, STS-B 91.2; large MNLI-m 90.2, SQuAD 1.1 F1 94.6, 2.0 F1 89.4",
    fields={
        "learning_rate": 1e-5,
        "batch_size": 32,
        "num_epochs": 10.0,
        "warmup_fraction": 0.06,
        "weight_decay": 0.1,
        "clip_norm": 1e9,  # No clipping.
        "decay_from": "warmup_end",
        "max_seq_length": 512,
    },
    by_task={
        "cola": {"batch_size": 16},
        "mrpc": {"batch_size": 16},
        "qqp": {"warmup_fraction": 0.25},
        "rte": {"learning_rate": 2e-5, "batch_size": 16},
        "stsb": {"learning_rate": 2e-5, "batch_size": 16},
        "squad": {
            "learning_rate": 1.5e-5,
            "batch_size": 48,
            "num_epochs": 2.0,
            "weight_decay": 0.01,
        },
    },
)

DISTILBERT = Recipe(
    source="Sanh et al. (2019) fine-tune as BERT: the values are from transformers' scripts",
    dev_scores="uncased: MNLI-m 82.1, QNLI 89.2, QQP 88.5, RTE 59.9, SST-2 91.3, MRPC 87.5, "
    "CoLA 51.3, STS-B 86.9; SQuAD 1.1 F1 86.9, distilled once more from a fine-tuned BERT",
    fields={
        "learning_rate": 2e-5,
        "batch_size": 32,
        "num_epochs": 3.0,
        "warmup_fraction": 0.0,
        "decay_from": "warmup_end",
        "weight_decay": 0.0,
        "model": {"classifier_dropout_rate": 0.2},  # seq_classif_dropout of its config.json.
    },
    by_task={"squad": {"learning_rate": 3e-5, "batch_size": 12, "num_epochs": 2.0}},
)

ALBERT = Recipe(
    source="Lan et al. (2020), table 14, and run_glue.sh of google-research/albert: steps, not "
    "epochs; for SQuAD, its README",
    dev_scores="version 2: base MNLI-m 84.6, SST-2 92.9, SQuAD 1.1 F1 90.2, 2.0 F1 82.1; large "
    "86.5, 94.9, 91.8, 84.9; xlarge 87.9, 95.4, 92.9, 87.9; xxlarge 90.6, 96.8, 94.6, 89.8",
    fields={
        "optimizer": "bert_adam",  # Without bias correction, as released.
        "learning_rate": 2e-5,
        "batch_size": 32,
        "num_epochs": 3.0,
        "max_seq_length": 512,
        # Version 2 has dropout only before the head, for some tasks everywhere.
        "model": {"dropout_rate": 0.0, "classifier_dropout_rate": 0.1},
    },
    by_task={
        "cola": {"learning_rate": 1e-5} | steps("cola", 16, 5_336, 320),
        "sst2": {"learning_rate": 1e-5} | steps("sst2", 32, 20_935, 1_256),
        "mrpc": {"learning_rate": 2e-5} | steps("mrpc", 32, 800, 200),
        "stsb": {"learning_rate": 2e-5} | steps("stsb", 16, 3_598, 214),
        "qqp": {"learning_rate": 5e-5, "model": {"dropout_rate": 0.1}}
        | steps("qqp", 128, 14_000, 1_000),
        "mnli": {"learning_rate": 3e-5} | steps("mnli", 128, 10_000, 1_000),
        "qnli": {"learning_rate": 1e-5} | steps("qnli", 32, 33_112, 1_986),
        "rte": {"learning_rate": 3e-5, "model": {"dropout_rate": 0.1}} | steps("rte", 32, 800, 200),
        "squad_v2": {"learning_rate": 3e-5, "num_epochs": 3.0, "max_seq_length": 512},
        "squad": {
            "learning_rate": 5e-5,
            "batch_size": 48,
            "num_epochs": 2.0,
            "max_seq_length": 384,
        },
    },
)

ELECTRA_BASE = Recipe(
    source="Clark et al. (2020), and configure_finetuning.py of google-research/electra (where all "
    "layers have one factor of layer_decay more)",
    dev_scores="medians: small MNLI-m 81.3, QNLI 88.4, SST-2 91.2, CoLA 57.0, SQuAD 1.1 EM 75.8; "
    "base 88.8, 93.2, 95.1, 67.7, 86.8; large 90.9, 95.0, 96.9, 69.1, 89.7",
    fields={
        "optimizer": "bert_adam",  # Without bias correction, as released.
        "learning_rate": 1e-4,
        "layer_decay": 0.8,
        "batch_size": 32,
        "num_epochs": 3.0,
        "warmup_fraction": 0.1,
    },
    by_task={
        "rte": {"num_epochs": 10.0},
        "stsb": {"num_epochs": 10.0},
        "squad": {"num_epochs": 2.0, "max_seq_length": 512},
    },
)

SPANBERT = Recipe(
    source="Joshi et al. (2019), appendix B: the best of a grid for each task; these are for SQuAD",
    dev_scores="base: SQuAD 1.1 F1 92.4",
    fields={"learning_rate": 2e-5, "batch_size": 32, "num_epochs": 4.0, "warmup_fraction": 0.1},
    by_task={"squad": {"max_seq_length": 512}},
)

RECIPES = {
    "roberta": ROBERTA,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "electra_small": ELECTRA_BASE,
    "electra_base": ELECTRA_BASE,
    "electra_large": ELECTRA_BASE._replace(
        fields=ELECTRA_BASE.fields | {"learning_rate": 5e-5, "layer_decay": 0.9}
    ),
    "spanbert": SPANBERT,
}
