r"""Table 6: larger models have a lower perplexity and better scores, on small tasks too.

    python experiments/model_size.py --scale=laptop --workdir=runs/studies
    python experiments/model_size.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data

Source: Devlin et al. (2018), section 5.2 and table 6: masked-LM perplexity on held-out text, and
dev accuracy.
"""

import study
import study_tasks

COLUMNS = ("LM perplexity", "MNLI-m", "MRPC", "SST-2")
# Layers, hidden size, heads: the paper's, ours at laptop scale; the paper's scores.
ROWS = (
    ((3, 768, 12), (1, 64, 4), (5.84, 77.9, 79.8, 88.4)),
    ((6, 768, 3), (2, 64, 1), (5.24, 80.6, 82.2, 90.7)),
    ((6, 768, 12), (2, 64, 4), (4.68, 81.9, 84.8, 91.3)),
    ((12, 768, 12), (4, 64, 4), (3.99, 84.4, 86.7, 92.9)),
    ((12, 1024, 16), (4, 96, 6), (3.54, 85.7, 86.9, 93.3)),
    ((24, 1024, 16), (8, 96, 6), (3.23, 86.6, 87.8, 93.7)),
)


def rows(scale: str) -> list[study.Row]:
    result = []
    for paper, ours, scores in ROWS:
        shape = ours if scale == "laptop" else paper
        fields = ("model.num_layers", "model.hidden_size", "model.num_heads")
        large = scale == "pod" and paper[1] > 768
        layers, width, heads = shape
        name = f"{layers} layer{'s' * (layers > 1)}, hidden size {width}, "
        name += f"{heads} head{'s' * (heads > 1)}"
        if scale == "laptop":
            name += " (paper: {}, {}, {})".format(*paper)
        result.append(
            study.Row(
                name,
                dict(zip(COLUMNS, scores, strict=True)),
                dict(zip(fields, shape, strict=True)),
                size="large" if large else "base",
            )
        )
    return result


def tasks(scale: str) -> list[study.Task]:
    return study_tasks.sentences(scale, "mnli", "mrpc", "sst2")


STUDY = study.Study(
    name="model_size",
    title="Model size (table 6)",
    about="Six model sizes with the same hyperparameters. The perplexity is over masked tokens of "
    "held-out text; the paper's is for another text and another vocabulary.",
    laptop="Ours: about a third of the paper's layers and a twelfth of its hidden size, trained on "
    f"{study_tasks.CORPUS}; {study_tasks.LAPTOP_TASKS}. Without --glue_dir, R8 classification "
    "(its test set as dev) takes the place of GLUE.",
    limits="Short runs show how fast a size learns at first, not what it reaches in the end: a "
    "row whose perplexity is near that of word frequencies has not learned from context yet. "
    "Gains of very large models on very small tasks, the claim of the paper's table, cannot be "
    "seen at this scale.",
    rows=rows,
    tasks=tasks,
    pretraining_metrics={"held-out perplexity": "perplexity"},
)

if __name__ == "__main__":
    study.main(STUDY)
