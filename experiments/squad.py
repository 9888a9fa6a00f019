r"""Tables 2 and 3: SQuAD 1.1 and 2.0.

    python tools/split_squad.py xquad.en.json runs/xquad
    python tools/split_squad.py --unanswerable xquad.en.json runs/xquad2
    python experiments/squad.py --scale=laptop --workdir=runs/studies --squad_dir=runs/xquad \
        --squad2_dir=runs/xquad2
    python experiments/squad.py --scale=pod --workdir=/gcs/studies --squad_dir=/gcs/squad \
        --squad2_dir=/gcs/squad2

Source: Devlin et al. (2018), sections 4.2 and 4.3, tables 2 and 3: exact match (EM) and F1 on dev
of single models, without TriviaQA. The paper gives SQuAD 2.0 for BERT_LARGE only.
"""

import study
import study_tasks

COLUMNS = ("1.1 EM", "1.1 F1", "2.0 EM", "2.0 F1")
PAPER = {
    "BERT_BASE": dict(zip(COLUMNS[:2], (80.8, 88.5), strict=True)),
    "BERT_LARGE": dict(zip(COLUMNS, (84.1, 90.9, 78.7, 81.9), strict=True)),
}


def rows(scale: str) -> list[study.Row]:
    if scale == "laptop":
        return study_tasks.small_encoders() + study_tasks.rows_of_paper(PAPER)
    return study_tasks.full_encoders(PAPER)


def tasks(scale: str) -> list[study.Task]:
    tasks = study_tasks.squad(scale, "1.1", "exact", "f1")
    tasks += study_tasks.squad(scale, "2.0", "exact", "f1")
    if not tasks:
        raise ValueError(
            "questions cannot be fetched: give --squad_dir or --squad2_dir, a directory with "
            "train.json and dev.json; tools/split_squad.py splits a small set such as XQuAD"
        )
    return tasks


STUDY = study.Study(
    name="squad",
    title="Extractive question answering (SQuAD, tables 2 and 3)",
    about="Exact match (EM) and F1 on dev. Paper: single models, without TriviaQA.",
    laptop="Sets in SQuAD's format, from --squad_dir and --squad2_dir, such as the English part of "
    "XQuAD split by article, for 2.0 with each question also asked of a paragraph that does not "
    "answer it: at most 120 questions to train and 60 for dev, in windows of 192 "
    f"tokens. {study_tasks.SMALL_ENCODERS}",
    limits="Two epochs on 120 questions, one seven-hundredth of SQuAD, are too few to learn the "
    "task: they show that the study works, and whether pre-trained weights start with an "
    "advantage. No score here predicts the paper's.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
