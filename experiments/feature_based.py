r"""Table 7: NER with features of a frozen encoder, against fine-tuning it.

    python experiments/feature_based.py --scale=laptop --workdir=runs/studies

Source: Devlin et al. (2018), section 5.3 and table 7. At laptop scale the encoder is MiniLM, whose
weights can be fetched; at pod scale it is BERT_BASE, pre-trained as in the paper.
"""

import study
import study_tasks

PAPER = {  # Our name of the features -> the paper's name, and its F1 on dev.
    "embeddings": ("Embeddings", 91.0),
    "second_to_last": ("Second-to-last hidden layer", 95.6),
    "last": ("Last hidden layer", 94.9),
    "sum_last_four": ("Sum of the last four layers", 95.9),
    "concat_last_four": ("Concatenation of the last four layers", 96.1),
    "weighted_sum": ("Weighted sum of all layers", 95.5),
}
COLUMN = "NER F1 (BERT_BASE)"


def rows(scale: str) -> list[study.Row]:
    weights = study.fetched("minilm") if scale == "laptop" else ""
    bilstm = {"learning_rate": 1e-3, "num_epochs": 10.0}
    if scale == "laptop":
        bilstm = {"learning_rate": 3e-3, "num_epochs": 4.0, "lstm_size": 64}
    rows = [study.Row("Fine-tuning all layers", {COLUMN: 96.4}, weights=weights)]
    for features, (name, score) in PAPER.items():
        settings = {"features": features} | bilstm
        rows.append(
            study.Row(
                name,
                {COLUMN: score},
                weights=weights,
                finetuning=settings,
                finetune_config="feature_based",
            )
        )
    return rows


def tasks(scale: str) -> list[study.Task]:
    if scale == "pod":
        return [study_tasks.entities(scale)]
    task = study_tasks.entities(scale)
    fields = {"max_train_examples": 300, "max_eval_examples": 300, "learning_rate": 3e-4}
    return [study_tasks.with_settings(task, fields)]


STUDY = study.Study(
    name="feature_based",
    title="Features of a frozen encoder against fine-tuning (table 7)",
    about="CoNLL-2003 NER. The first row trains all layers; in the others the encoder is frozen, "
    "and a BiLSTM of two layers reads its hidden states. Paper: BERT_BASE (12 layers, hidden size "
    "768, cased), all of train, 768 units per direction. The paper weights the sum of the last "
    "four layers; ours is the plain sum.",
    laptop="Ours: MiniLM (6 layers, hidden size 384, uncased), 300 sentences of train and 300 of "
    "dev, a BiLSTM of 64 units per direction.",
    limits="It shows from which features a new BiLSTM learns fastest, with a fiftieth of the "
    "training set. Which features are best after full training, and whether a frozen encoder "
    "comes within 0.3 F1 of fine-tuning with all data, cannot be seen at this scale.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
