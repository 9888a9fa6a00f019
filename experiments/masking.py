r"""Table 8: what replaces the masked tokens: [MASK], the same token, or a random one.

    python experiments/masking.py --scale=laptop --workdir=runs/studies
    python experiments/masking.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data

Source: Devlin et al. (2018), appendix C.2 and table 8: BERT_BASE, dev scores.
"""

import study
import study_tasks

COLUMNS = ("MNLI-m, fine-tuned", "NER F1, fine-tuned", "NER F1, frozen encoder")
ROWS = (  # Percentages of [MASK], same and random; the paper's scores.
    ((80, 10, 10), (84.2, 95.4, 94.9)),
    ((100, 0, 0), (84.3, 94.9, 94.0)),
    ((80, 0, 20), (84.1, 95.2, 94.6)),
    ((80, 20, 0), (84.4, 95.2, 94.7)),
    ((0, 20, 80), (83.7, 94.8, 94.6)),
    ((0, 0, 100), (83.6, 94.9, 94.6)),
)
FIELDS = ("masking.mask_fraction", "masking.keep_fraction", "masking.random_fraction")


def rows(scale: str) -> list[study.Row]:
    result = []
    for percentages, scores in ROWS:
        settings = {}
        if percentages != (80, 10, 10):  # The default.
            fractions = (each / 100 for each in percentages)
            settings = dict(zip(FIELDS, fractions, strict=True))
        name = "{} % [MASK], {} % same, {} % random".format(*percentages)
        result.append(study.Row(name, dict(zip(COLUMNS, scores, strict=True)), settings))
    return result


def tasks(scale: str) -> list[study.Task]:
    entities = study_tasks.entities(scale)
    frozen = {"features": "concat_last_four", "learning_rate": 1e-3, "num_epochs": 10.0}
    if scale == "laptop":  # The encoder has two layers.
        frozen = {"features": "weighted_sum", "learning_rate": 5e-3, "num_epochs": 6.0}
        frozen |= {"lstm_size": 64}
    feature_based = entities._replace(
        name="frozen-encoder NER F1",
        config="feature_based",
        settings=entities.settings | frozen,
    )
    return [*study_tasks.sentences(scale, "mnli"), entities, feature_based]


STUDY = study.Study(
    name="masking",
    title="What replaces a masked token (table 8)",
    about="15 % of the tokens are predicted in all rows; the rows differ in what replaces these "
    "tokens in the input. The frozen encoder is read by a BiLSTM. Paper: BERT_BASE; the BiLSTM "
    "reads its last four layers.",
    laptop=f"{study_tasks.LAPTOP} The BiLSTM reads the weighted sum of both layers. Without "
    "--glue_dir, R8 classification (its test set as dev) takes the place of MNLI.",
    limits="The paper's rows differ by one point at most, which cannot be seen at this scale: "
    "each row is pre-trained only once and for few steps, and with few labels it is partly by "
    "chance whether a seed beats the majority class. Differences beyond the spread of the seeds "
    "show only what masking changes early in pre-training.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
