r"""ALBERT's two ways to save parameters: narrow embeddings and shared layers.

    python experiments/albert.py --scale=laptop --workdir=runs/studies
    python experiments/albert.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data \
        --squad2_dir=/gcs/squad2

Source: Lan et al. (2020), section 3.1 and tables 3 and 4: ALBERT_BASE, dev scores.
"""

import study
import study_tasks

from bert_jax.checkpoints.parameters import parameter_shapes
from bert_jax.model.config import BertConfig

COLUMNS = ("MNLI-m", "SST-2", "SQuAD 2.0 F1")
# Name, whether embeddings are narrow and layers shared; the paper's millions of parameters and
# scores.
ROWS = (
    ("BERT", False, False, 108, (84.5, 92.8, 80.4)),
    ("Narrow embeddings", True, False, 89, (83.7, 91.5, 80.3)),
    ("Shared layers", False, True, 31, (82.0, 90.6, 79.2)),
    ("Both, as ALBERT", True, True, 12, (81.6, 90.3, 80.0)),
)
# The model: layers, hidden size, width of narrow embeddings, and vocabulary.
SIZES = {"laptop": (4, 128, 32, 4096), "pod": (12, 768, 128, 30522)}


def rows(scale: str) -> list[study.Row]:
    num_layers, _, embedding_size, _ = SIZES[scale]
    result = []
    for name, is_narrow, is_shared, millions, scores in ROWS:
        fields: study.Settings = {"num_layers": num_layers} if scale == "laptop" else {}
        if is_narrow:
            fields["embedding_size"] = embedding_size
        if is_shared:
            fields["shares_layers"] = True
        count = num_parameters(scale, fields) / 1e6
        result.append(
            study.Row(
                f"{name}, {count:.1f} M parameters (paper: {millions} M)",
                dict(zip(COLUMNS, scores, strict=True)),
                {f"model.{field}": value for field, value in fields.items()},
            )
        )
    return result


def num_parameters(scale: str, fields: study.Settings) -> int:
    """Returns the number of parameters of a row's model, with the heads of pre-training."""
    num_layers, hidden_size, _, vocab_size = SIZES[scale]
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "vocab_size": vocab_size}
    if scale == "laptop":
        sizes["max_position_embeddings"] = study.PRETRAINING["model.max_position_embeddings"]
    shapes = parameter_shapes(BertConfig.named("base", **(sizes | fields)))
    return sum(leaf.size for leaf in shapes.values())


def tasks(scale: str) -> list[study.Task]:
    squad = study_tasks.squad(scale, "2.0", "f1")
    return squad + study_tasks.sentences(scale, "mnli", "sst2")


STUDY = study.Study(
    name="albert",
    title="Narrow embeddings and shared layers (tables 3 and 4 of ALBERT)",
    about="All rows have the same layers, hidden size and recipe, BERT's; they differ in the "
    "number of parameters. Narrow embeddings are widened by a dense layer; shared layers all use "
    "one set of parameters. A row takes about the same time as the others: sharing saves memory, "
    "not arithmetic. Paper: ALBERT_BASE, trained with ALBERT's recipe (sentence order, masks of "
    "up to three words), so its first row is not BERT_BASE. The perplexity is over masked tokens "
    "of held-out text.",
    laptop=f"Ours: 4 layers, hidden size 128, narrow embeddings of 32, trained on "
    f"{study_tasks.CORPUS}; {study_tasks.LAPTOP_TASKS}. Without --glue_dir, R8 classification (its "
    "test set as dev) takes the place of GLUE; SQuAD 2.0 is scored with --squad2_dir only.",
    limits="Short runs show how fast each model learns at first. In the paper, sharing costs 2.5 "
    "points on average and narrow embeddings 0.6, after 125,000 steps; nothing here says what the "
    "rows reach in the end. With this vocabulary and 4 layers, embeddings and layers have other "
    "fractions of all parameters than in the paper.",
    rows=rows,
    tasks=tasks,
    pretraining_metrics={"held-out perplexity": "perplexity"},
)

if __name__ == "__main__":
    study.main(STUDY)
