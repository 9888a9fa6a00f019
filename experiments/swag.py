r"""Table 4: SWAG, which of four sentences continues a story.

    python experiments/swag.py --scale=laptop --workdir=runs/studies
    python experiments/swag.py --scale=laptop --workdir=runs/studies --swag_dir=swag
    python experiments/swag.py --scale=pod --workdir=/gcs/studies --swag_dir=/gcs/swag

Source: Devlin et al. (2018), section 4.4 and table 4: accuracy on dev.
"""

import study
import study_tasks

COLUMN = "SWAG accuracy on dev"
PAPER = {
    "ESIM + GloVe": {COLUMN: 51.9},
    "ESIM + ELMo": {COLUMN: 59.1},
    "BERT_BASE": {COLUMN: 81.6},
    "BERT_LARGE": {COLUMN: 86.6},
}
OTHERS = ("ESIM + GloVe", "ESIM + ELMo")


def rows(scale: str) -> list[study.Row]:
    if scale == "laptop":
        return study_tasks.small_encoders() + study_tasks.rows_of_paper(PAPER)
    others = study_tasks.rows_of_paper({name: PAPER[name] for name in OTHERS})
    ours = {name: scores for name, scores in PAPER.items() if name not in OTHERS}
    return others + study_tasks.full_encoders(ours)


def tasks(scale: str) -> list[study.Task]:
    task = study_tasks.endings(scale)
    few = {"max_train_examples": 160, "max_eval_examples": 160, "num_epochs": 2.0, "batch_size": 16}
    return [study_tasks.with_settings(task, few) if scale == "laptop" else task]


STUDY = study.Study(
    name="swag",
    title="Multiple choice (SWAG, table 4)",
    about="Of four sentences, the model picks the one that continues a story.",
    laptop="SWAG cannot be fetched: without --swag_dir the task is made from the tales of Grimm "
    "and Andersen by experiments/story_endings.py: the model picks the true next sentence from "
    "four of the same tale (chance: 25 %). 160 training examples, and 160 dev "
    f"examples from other tales. {study_tasks.SMALL_ENCODERS}",
    limits="160 examples are too few for this task: scores near chance (25 %) show only that the "
    "study works, not a gain from pre-training or the paper's ranking. Story endings are not SWAG "
    "either: the wrong ones are real sentences of the tale, and often fit.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
