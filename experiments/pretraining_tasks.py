r"""Table 5: pre-training without next-sentence prediction, or left to right.

    python experiments/pretraining_tasks.py --scale=laptop --workdir=runs/studies
    python experiments/pretraining_tasks.py --scale=pod --workdir=/gcs/studies \
        --glue_dir=/gcs/glue_data --squad_dir=/gcs/squad

Source: Devlin et al. (2018), section 5.1 and table 5: BERT_BASE, dev sets.
"""

import study
import study_tasks

COLUMNS = ("MNLI-m", "QNLI", "MRPC", "SST-2", "SQuAD F1")
LEFT_TO_RIGHT = {"objective": "left_to_right", "next_sentence": False}
ROWS = (  # Name, pre-training, whether a BiLSTM is on top, the paper's scores.
    ("Masked LM + NSP", {}, False, (84.4, 88.4, 86.7, 92.7, 88.5)),
    ("Masked LM, no NSP", {"next_sentence": False}, False, (83.9, 84.9, 86.5, 92.6, 87.9)),
    ("Left to right, no NSP", LEFT_TO_RIGHT, False, (82.1, 84.3, 77.5, 92.1, 77.8)),
    ("Left to right, no NSP, + BiLSTM", LEFT_TO_RIGHT, True, (82.1, 84.1, 75.7, 91.6, 84.9)),
)


def rows(scale: str) -> list[study.Row]:
    size = 128 if scale == "laptop" else 768
    return [
        study.Row(
            name,
            dict(zip(COLUMNS, scores, strict=True)),
            pretraining,
            finetuning={"model.lstm_size": size} if has_lstm else {},
        )
        for name, pretraining, has_lstm, scores in ROWS
    ]


def tasks(scale: str) -> list[study.Task]:
    tasks = study_tasks.sentences(scale, "mnli", "qnli", "mrpc", "sst2")
    if scale == "laptop":
        tasks += [study_tasks.entities(scale), study_tasks.endings(scale)]
    return tasks + study_tasks.squad(scale, "1.1", "f1")


STUDY = study.Study(
    name="pretraining_tasks",
    title="Pre-training tasks (table 5)",
    about="Each row is pre-trained with other tasks on the same text; the last one adds a randomly "
    "initialized BiLSTM in fine-tuning. Paper: BERT_BASE.",
    laptop=f"{study_tasks.LAPTOP} Without --glue_dir, R8 classification (its test set as dev) "
    "takes the place of GLUE. Story endings: the model picks the true next sentence from four of "
    "the same tale (chance: 25 %).",
    limits="Each encoder is pre-trained once, on two million tokens: differences beyond the "
    "spread of the seeds show what a small model learns faster, whether or not in the paper's "
    "order, but not what is better after a million steps. They also show whether a new BiLSTM can "
    "be trained on so few labels.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
