r"""Figure 5: fine-tuned scores of intermediate checkpoints, masked LM against left to right.

    python experiments/training_steps.py --scale=laptop --workdir=runs/studies
    python experiments/training_steps.py --scale=pod --workdir=/gcs/studies \
        --glue_dir=/gcs/glue_data

Source: Devlin et al. (2018), appendix C.1 and figure 5: BERT_BASE, MNLI dev accuracy after 200,000
to 1,000,000 steps.
"""

import statistics
from collections.abc import Sequence

import study
import study_report
import study_tasks
from matplotlib.figure import Figure

COLUMN = "MNLI-m (table 5)"
PAPER = {"Masked LM": 84.4, "Left to right": 82.1}  # After all steps; figure 5 prints no values.
OBJECTIVES = {
    "Masked LM": {},
    "Left to right": {"objective": "left_to_right", "next_sentence": False},
}


def rows(scale: str) -> list[study.Row]:
    ours, last, every = study.PRETRAINING, 1_000_000, 200_000
    if scale == "laptop":
        last, every = ours["num_steps"] + ours["long_phase.num_steps"], ours["keep_every"]
    return [
        study.Row(
            f"{name}, step {step:,}",
            {COLUMN: PAPER[name]} if step == last else {},
            settings,
            step=step % last,
        )
        for name, settings in OBJECTIVES.items()
        for step in range(every, last + 1, every)
    ]


def tasks(scale: str) -> list[study.Task]:
    others = [study_tasks.entities(scale)] if scale == "laptop" else []
    return study_tasks.sentences(scale, "mnli") + others


def draw(title: str, rows: Sequence, columns: Sequence[str], scores: dict) -> Figure:
    """Returns a panel per column with the median over steps, and the seeds as dots."""
    figure = Figure((4.6 * len(columns), 4), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for axis, column in zip(axes, columns, strict=True):
        for name, color in zip(OBJECTIVES, study_report.COLORS, strict=False):
            own = {}
            for row in rows:
                values = study_report.finished(scores[row.name, column])
                if row.name.startswith(name) and values:
                    step = int(row.name.split()[-1].replace(",", ""))
                    own[step] = [100 * value for value in values]
                    axis.plot([step] * len(values), own[step], "o", color=color, alpha=0.4)
            medians = [statistics.median(values) for values in own.values()]
            axis.plot(own.keys(), medians, color=color, label=name)
        axis.set_title(column.rpartition(" ")[0], fontsize=10)
        axis.set_xlabel("pre-training steps")
        axis.set_ylabel(f"{column.rpartition(' ')[2]} on dev (%)")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=2)
    figure.suptitle(f"{title}\ndots: seeds; line: medians", fontsize=11)
    return figure


STUDY = study.Study(
    name="training_steps",
    title="Number of pre-training steps (figure 5)",
    about="Checkpoints of two runs are fine-tuned. Paper: BERT_BASE gains almost 1.0 % accuracy "
    "on MNLI from step 500,000 to 1,000,000, and masked LM, though it learns from 15 % of the "
    "tokens only, is better than left to right almost from the start. The figure has no printed "
    "values: the paper's column has the scores of table 5, after 1,000,000 steps.",
    laptop=f"{study_tasks.LAPTOP} Without --glue_dir, R8 classification (its test set as dev) "
    "takes the place of MNLI.",
    limits="The runs end far before the paper's first checkpoint, at step 200,000: they show which "
    "objective learns faster at first, where left to right has a target at every token. Whether "
    "masked LM is better from then on, and how the curves continue, cannot be seen at this scale.",
    rows=rows,
    tasks=tasks,
    draw=draw,
)

if __name__ == "__main__":
    study.main(STUDY)
