r"""A small student that learns from a fine-tuned teacher, compared with the same student alone.

    python experiments/distillation.py --scale=laptop --workdir=runs/studies
    python experiments/distillation.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data

Source: Hinton et al. (2015), section 2; for the paper's scores, Sanh et al. (2019) and the authors'
README (MNLI-m on dev), whose student was distilled in pre-training.
"""

import study
import study_tasks

STUDENTS = {"laptop": ("BERT_TINY", {}), "pod": ("6 layers", {"model.num_layers": 6})}
# At pod scale one configuration, so that the teacher is known before it is trained.
POD = {"batch_size": 32, "num_epochs": 3.0, "learning_rate": 5e-5}


def teacher_row(scale: str) -> study.Row:
    if scale == "pod":
        return study.Row("BERT_BASE, the teacher", {"MNLI-m": 84.7})
    weights, finetuning = study.fetched("minilm"), {"learning_rate": 2e-4}
    return study.Row("MiniLM, the teacher", weights=weights, finetuning=finetuning)


def rows(scale: str) -> list[study.Row]:
    teacher, (name, pretraining) = teacher_row(scale), STUDENTS[scale]
    (task,) = tasks(scale)
    weights = f"{study.sweep_workdir(teacher, task, scale)}/trials/seed=0"

    def student(how: str, **finetuning) -> study.Row:
        settings = {field.replace("__", "."): value for field, value in finetuning.items()}
        return study.Row(f"{name}, {how}", pretraining=pretraining, finetuning=settings)

    result = [
        teacher,
        student("alone"),
        student("labels and teacher's outputs", teacher=weights, distillation__alpha=0.5),
    ]
    if scale == "pod":
        return [*result, *study_tasks.rows_of_paper({"DistilBERT": {"MNLI-m": 82.1}})]
    return [
        *result,
        student("alone, as many steps as the last row", num_epochs=33.0),
        student(
            "teacher's outputs for all texts, no labels",
            teacher=weights,
            distillation__alpha=0.0,
            max_train_examples=0,
        ),
    ]


def tasks(scale: str) -> list[study.Task]:
    (task,) = study_tasks.sentences(scale, "mnli")
    return [task if scale == "laptop" else study_tasks.with_settings(task, POD)]


STUDY = study.Study(
    name="distillation",
    title="Distillation in fine-tuning",
    about="A small student, alone or with the outputs of a fine-tuned teacher: half of its loss "
    "is on the labels, half is the divergence from the teacher at temperature 2. At pod "
    "scale, the paper's scores are of DistilBERT, also distilled in pre-training, and its teacher.",
    laptop=f"{study_tasks.LAPTOP} The teacher is MiniLM (6 layers, hidden size 384), fine-tuned on "
    "the same labels. In the last row the student sees all 5,485 texts of R8 with the outputs of "
    "the teacher, and no label. Without --glue_dir, R8 classification (its test set as dev).",
    limits="Teacher and student see the same few labels: the teacher only adds knowledge from its "
    "own pre-training. One teacher is used for all seeds, which vary only the student.",
    rows=rows,
    tasks=tasks,
    num_seeds=3,
)

if __name__ == "__main__":
    study.main(STUDY)
