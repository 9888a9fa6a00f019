r"""RoBERTa's changes one by one: dynamic masking, the row format, and the batch size.

    python experiments/roberta.py --scale=laptop --workdir=runs/studies
    python experiments/roberta.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data \
        --squad2_dir=/gcs/squad2

Source: Liu et al. (2019), sections 4.1 to 4.3 and tables 1 to 3: BERT_BASE, dev scores.
"""

import study
import study_tasks

COLUMNS = ("SQuAD 2.0 F1", "MNLI-m", "SST-2", "held-out perplexity")
NO_NSP = {"next_sentence": False}
ROWS = (  # Name, row format, pre-training, the paper's scores in the order of COLUMNS.
    ("Segment pairs + NSP, dynamic masking", "sentence_pairs", {}, (78.7, 84.0, 92.9)),
    ("Segment pairs + NSP, static masking", "sentence_pairs", "static", (78.3, 84.3, 92.5)),
    ("Segment pairs, no NSP", "sentence_pairs", NO_NSP, ()),
    ("Full sentences, no NSP", "full_sentences", NO_NSP, (79.1, 84.7, 92.5)),
    ("Document sentences, no NSP", "document_sentences", NO_NSP, (79.7, 84.7, 92.7)),
)
# Factor of the batch size at equal epochs; at pod scale batch, steps and learning rate of table 3.
BATCHES = (
    (2, (2048, 125_000, 7e-4), ("", 85.2, 92.9, 3.68)),
    (4, (8192, 31_000, 1e-3), ("", 84.6, 92.8, 3.77)),
)


def rows(scale: str) -> list[study.Row]:
    # In the released data a row has 10 masks in 40 epochs; at laptop scale one in eight.
    static = {"masking.repeat_after": 1 if scale == "laptop" else 10}
    result = []
    for name, row_format, settings, scores in ROWS:
        paper = dict(zip(COLUMNS, scores, strict=False))
        settings = static if settings == "static" else settings
        result.append(study.Row(name, paper, settings, row_format))
    for factor, large, scores in BATCHES:
        paper = dict(zip(COLUMNS, scores, strict=True))
        settings = batch_at_equal_epochs(factor) if scale == "laptop" else large_batch(*large)
        name = f"Batch size {settings['batch_size']:,}, peak rate {settings['learning_rate']:g}"
        name += f" (paper: {large[0]:,})" if scale == "laptop" else ""
        result.append(study.Row(name, paper, settings))
    return result


def batch_at_equal_epochs(factor: int) -> study.Settings:
    """Returns larger batches, fewer steps, and a learning rate scaled by the factor's root."""
    base, steps = study.PRETRAINING, ("num_steps", "long_phase.num_steps", "warmup_steps")
    settings = {name: base[name] // factor for name in steps}
    settings |= {name: base[name] * factor for name in ("batch_size", "long_phase.batch_size")}
    return settings | {"learning_rate": round(base["learning_rate"] * factor**0.5, 4)}


def large_batch(batch_size: int, num_steps: int, learning_rate: float) -> study.Settings:
    """Returns table 3's settings; as in BERT, nine tenths of the steps are on short rows."""
    long_steps = num_steps // 10
    settings = {"batch_size": batch_size, "num_steps": num_steps - long_steps}
    settings |= {"long_phase.batch_size": batch_size, "long_phase.num_steps": long_steps}
    settings |= {"per_device_batch_size": 128, "long_phase.per_device_batch_size": 32}
    return settings | {"learning_rate": learning_rate, "beta2": 0.98}


def tasks(scale: str) -> list[study.Task]:
    squad = study_tasks.squad(scale, "2.0", "f1")
    return squad + study_tasks.sentences(scale, "mnli", "sst2")


STUDY = study.Study(
    name="roberta",
    title="RoBERTa's changes to the recipe, one by one",
    about="The first row is BERT's recipe (pairs of segments, next-sentence prediction) with "
    "dynamic masking; the second has BERT's static masks. Rows of full sentences have no "
    "next-sentence prediction: compare them with row 3. The batch sizes have equal epochs. "
    "Paper: BERT_BASE, tables 1 to 3 of Liu et al. Table 3 compares batches of 2,048 and 8,192 "
    "with 256 (MNLI-m 84.7, SST-2 92.7, perplexity 3.99), a run that is not the first row. "
    "Perplexities are not comparable across row formats.",
    laptop=f"{study_tasks.LAPTOP} The batch size of the other rows is "
    f"{study.PRETRAINING['batch_size']}. Without --glue_dir, R8 classification (its test set as "
    "dev) takes the place of GLUE; SQuAD 2.0 is scored with --squad2_dir only.",
    limits="In so few epochs larger batches run out of steps, and static masks repeat only eight "
    "times: the scores show what both cost at the start of pre-training. Whether RoBERTa's gains, "
    "of about one point after a million steps, are real cannot be seen at this scale.",
    rows=rows,
    tasks=tasks,
    pretraining_metrics={"held-out perplexity": "perplexity"},
)

if __name__ == "__main__":
    study.main(STUDY)
