r"""Tables 2 and 3: SQuAD 1.1 and 2.0.

    python tools/split_squad.py xquad.en.json runs/xquad
    python experiments/squad.py --scale=laptop --workdir=runs/studies --squad_dir=runs/xquad
    python experiments/squad.py --scale=pod --workdir=/gcs/studies --squad_dir=/gcs/squad \
        --squad2_dir=/gcs/squad2

Source: Devlin et al. (2018), sections 4.2 and 4.3, tables 2 and 3: exact match and F1 on dev of
single models, without TriviaQA. The paper gives SQuAD 2.0 for BERT_LARGE only.
"""

import study
import study_tasks
from absl import flags

COLUMNS = ("1.1 exact match", "1.1 F1", "2.0 exact match", "2.0 F1")
PAPER = {
    "BERT_BASE": dict(zip(COLUMNS[:2], (80.8, 88.5), strict=True)),
    "BERT_LARGE": dict(zip(COLUMNS, (84.1, 90.9, 78.7, 81.9), strict=True)),
}


def rows(scale: str) -> list[study.Row]:
    if scale == "laptop":
        return study_tasks.small_encoders() + study_tasks.rows_of_paper(PAPER)
    return study_tasks.full_encoders(PAPER)


def tasks(scale: str) -> list[study.Task]:
    versions = ["1.1", "2.0"] if scale == "pod" or flags.FLAGS.squad2_dir else ["1.1"]
    result = [
        study_tasks.squad(version, metric) for version in versions for metric in ("exact", "f1")
    ]
    if scale == "pod":
        return result
    if not flags.FLAGS.squad_dir:
        raise ValueError(
            "questions cannot be fetched: give --squad_dir, a directory with train.json and "
            "dev.json; tools/split_squad.py splits a small set such as XQuAD"
        )
    few = {"max_train_examples": 120, "max_eval_examples": 60, "max_seq_length": 192}
    few |= {"data.doc_stride": 96, "num_epochs": 2.0, "batch_size": 8}
    return [study_tasks.with_settings(task, few) for task in result]


STUDY = study.Study(
    name="squad",
    title="Answers as spans of a paragraph (tables 2 and 3)",
    about="At laptop scale, a small set in SQuAD's format, split by article: the committed "
    "report is of the English part of XQuAD, 120 questions to train and 60 of other "
    "articles for dev, in windows of 192 tokens. Without --squad2_dir there are no "
    f"questions without an answer. The encoders: {study_tasks.SMALL_ENCODERS}",
    limits="With two epochs of one seven-hundredth of SQuAD's questions no encoder learns to "
    "answer: MiniLM is a few points ahead of BERT_TINY, whose own short pre-training does not "
    "help. The paper's scores are far higher, and no figure here predicts them.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
