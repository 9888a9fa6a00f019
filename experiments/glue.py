r"""Table 1: GLUE.

    python experiments/glue.py --scale=laptop --workdir=runs/studies
    python experiments/glue.py --scale=laptop --workdir=runs/studies --glue_dir=glue_data
    python experiments/glue.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data

Source: Devlin et al. (2018), section 4.1 and table 1: scores on the hidden test sets (matched half
of MNLI; F1 for QQP and MRPC, Matthews correlation for CoLA, Spearman for STS-B, else accuracy).
"""

import study
import study_tasks

COLUMNS = ("MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
TASKS = ("mnli", "qqp/f1", "qnli", "sst2", "cola/matthews", "stsb/spearman", "mrpc/f1", "rte")
PAPER = {
    "OpenAI GPT": (82.1, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0),
    "BERT_BASE": (84.6, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4),
    "BERT_LARGE": (86.7, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1),
}


def rows(scale: str) -> list[study.Row]:
    paper = {name: dict(zip(COLUMNS, scores, strict=True)) for name, scores in PAPER.items()}
    if scale == "laptop":
        return study_tasks.small_encoders() + study_tasks.rows_of_paper(paper)
    return study_tasks.rows_of_paper(
        {"OpenAI GPT": paper.pop("OpenAI GPT")}
    ) + study_tasks.full_encoders(paper)


def tasks(scale: str) -> list[study.Task]:
    few = {"max_train_examples": 400, "max_eval_examples": 400} if scale == "laptop" else {}
    tasks = study_tasks.sentences(scale, *TASKS)
    return [study_tasks.with_settings(task, few) for task in tasks]


STUDY = study.Study(
    name="glue",
    title="Sentence classification (table 1)",
    about="Our scores are on dev, the paper's on GLUE's hidden test sets: F1 for QQP and MRPC, "
    "Matthews correlation for CoLA, Spearman correlation for STS-B, else accuracy.",
    laptop="GLUE cannot be fetched: without --glue_dir, R8 classification (its test set as "
    "dev) takes its place, Reuters news in 8 topics, about half of it in the most frequent one. At "
    f"most 400 training texts and 400 dev texts. {study_tasks.SMALL_ENCODERS}",
    limits="It shows how much pre-training helps when labels are few: it compares a model with "
    "itself after one step, and pre-training on little text with pre-training on much. R8 says "
    "nothing about GLUE, and small models say nothing about the gain from BERT_BASE to BERT_LARGE: "
    "the paper's rows are there for orientation only.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
