"""The report of a sweep: report.html (one file, no requests), report.md with plots, trials.csv.

It holds neither times nor the path of the sweep, so that a resumed sweep, or one that has grown,
has the same report as an uninterrupted one. The times are in times.csv.
"""

import csv
import io
import math
import pathlib
import statistics
from collections import Counter
from collections.abc import Sequence

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bert_jax.finetuning.trials import Trial, summarize_seeds
from bert_jax.runtime.config_fields import flatten
from bert_jax.sweeps import plots
from bert_jax.sweeps.commands import finetune_command
from bert_jax.sweeps.configurations import Configuration, format_value, plural
from bert_jax.sweeps.findings import at_edges, importances, with_most_examples
from bert_jax.sweeps.page import (
    Beside,
    Block,
    Code,
    Legend,
    Plot,
    Section,
    Table,
    html_page,
    markdown_page,
)
from bert_jax.sweeps.summaries import (
    Summary,
    best_trial,
    fraction_curves,
    has_one_seed,
    name_of_score,
    status,
    summarize,
)
from bert_jax.training.workdir import write_text

ABOUT_RANKING = (
    "Sorted by the median dev score over seeds, and of equal ones by the median loss; a trial's "
    "score is its best checkpoint's. "
    "A diverged seed counts as worse than any score; if half of the seeds or more diverged, there "
    "is no median, and the configuration ranks last. std, the sample standard deviation (n - 1), "
    "min and max are of the seeds with a score. Collapsed trials (constant predictions) are "
    "included."
)
ABOUT_RANKING_OF_ONE_SEED = (
    "Sorted by the dev score of the best checkpoint, and equal scores by its loss; a "
    "configuration that diverged has none, and ranks last. Each has one seed: differences as "
    "small as those between seeds mean nothing (num_seeds adds more). Collapsed trials (constant "
    "predictions) are included."
)
ABOUT_RANKING_OF_FRACTIONS = (
    "Those of the largest train_fraction come first, and the best is one of them: a smaller one "
    "may score higher by chance."
)
ABOUT_PRUNED = (
    "A pruned trial was stopped before its last step, as its best score was below the median of "
    "the others of its program; it counts with this score, which more steps might have improved."
)
ABOUT_CURVES = "The best configurations are colored; all others are gray."
ABOUT_MEDIAN_CURVES = (
    f"Median at each evaluation over the seeds that had it and did not diverge. {ABOUT_CURVES}"
)
ABOUT_FRACTIONS = (
    "Score of the best checkpoint on dev, trained on the first part of the same order of the "
    "training examples. Sorted by the score of the largest fraction, which decides the colors. A "
    "training feature is an example, or a part of a long one."
)
ABOUT_MEDIAN_FRACTIONS = f"{ABOUT_FRACTIONS} Medians over seeds, with the minimum and maximum."
ABOUT_LARGEST_FRACTION = "Only trials with the largest fraction of train are shown."
ABOUT_FIELDS = (
    "A dot is a trial; the line, or the bar of a category, is the median of all trials with that "
    "value. Values for which all trials diverged are not shown."
)
ABOUT_SEARCH = (
    "A dot is a configuration (the median of its seeds); the line is the best so far. A cross at "
    "the bottom is a configuration without a score, as its trials diverged."
)
ABOUT_PARALLEL = (
    "A line is a configuration, in the color of its training curves. A dotted line has no score: "
    "its trials diverged."
)
ABOUT_IMPORTANCE = (
    "Importance by PED-ANOVA, as in Optuna: how much the values of the best tenth of the "
    "configurations differ from those of all. The sum is 1."
)
ABOUT_IMPORTANCE_WITH_HALVING = (
    f"{ABOUT_IMPORTANCE} All configurations count, with the first number of epochs."
)
MAX_CONFUSION = 12
"""Labels of a table by class up to which it has the confusion matrix."""


def write(
    workdir: pathlib.Path, config: ConfigDict, configurations: Sequence[Configuration], metric: str
) -> dict:
    """Writes the files; returns the best configuration, the counts and the page's path.

    The scores of the best configuration are medians over its seeds.
    """
    summaries = [summarize(configuration, metric) for configuration in configurations]
    ranked = sorted(summaries, key=lambda summary: summary.rank, reverse=True)
    best = ranked[0]
    has_best = best.median > -math.inf
    scores = summarize_seeds(best.scored, metric)["scores"] if has_best else {}
    write_text(workdir / "trials.csv", trials_table(summaries))
    write_text(workdir / "times.csv", times_table(summaries))
    sections = [
        Section("What was run", ["All settings are in sweep.json.", run_table(config, summaries)]),
        Section("Best configuration", best_blocks(config, summaries, best, scores)),
        Section("Configurations", ranking_blocks(ranked)),
        *plot_sections(config, summaries, ranked),
        Section("Files", ["trials.csv has the scores of each trial, times.csv its time."]),
    ]
    for plot in (plot for section in sections for plot in section.plots):
        write_text(workdir / plot.file, plot.svg)
    write_text(workdir / "report.md", markdown_page(sections))
    write_text(workdir / "report.html", html_page(sections))
    results = [result for summary in summaries for result in summary.results]
    statuses = [status(result).split()[0] for result in results]
    return {
        "metric": metric,
        "trials": {name: statuses.count(name) for name in dict.fromkeys(statuses)},
        "best_configuration": best.configuration.values if has_best else None,
        "best_trial": str(best_trial(best).workdir) if has_best else None,
        "scores_of_best_configuration": {name: value["median"] for name, value in scores.items()},
        "report": str(workdir / "report.html"),
    }


def run_table(config: ConfigDict, summaries: Sequence[Summary]) -> Table:
    """Returns what was run: the names and values of the main settings."""
    base, fields = config.base, summaries[0].configuration.values
    rows = [["setting", "value"], ["task", base.task], ["init_from", base.init_from]]
    for name in ("name", "directory", "hub", "train", "dev", "test", "passages"):
        if base.data.get(name) and f"data.{name}" not in fields:
            rows.append([f"data.{name}", base.data[name]])
    varied = flatten(config.get("grid", ConfigDict()))
    if fractions := config.get("train_fractions", ()):
        varied["train_fraction"] = fractions
    for name, values in varied.items():
        if name not in fields:
            rows.append([name, format_value(values[0])])
    search = flatten(config.get("search", ConfigDict()))
    for name, (kind, *limits) in search.items():
        values = list(map(format_value, limits))
        text = f"one of {'; '.join(values)}"
        if kind != "choice":
            text = f"{kind.replace('_', '-')} from {values[0]} to {values[1]}"
        rows.append([f"distribution of {name}", text])
    for name in fields.keys() - search.keys() if search else fields:
        values = list(dict.fromkeys(summary.configuration.values[name] for summary in summaries))
        text = "; ".join(map(format_value, values))
        if len(values) > 12 and all(isinstance(value, int | float) for value in values):
            low, high = format_value(min(values)), format_value(max(values))
            text = f"{len(values)} values from {low} to {high}"
        rows.append([f"values of {name}", text])
    count = sum(result is not None for summary in summaries for result in summary.results)
    rows.append(["trials", f"{count_trials(config, summaries)}, of which {count} have ended"])
    if first := config.get("prune_from_evaluation", 0):
        rows.append(["pruning", f"by the median, from evaluation {first} on"])
    if keep := config.get("keep_trials", 0):
        rows.append(["weights kept", f"of the best {plural(keep, 'trial')}"])
    return Table([*rows, ["metric (higher is better)", summaries[0].metric]])


def count_trials(config: ConfigDict, summaries: Sequence[Summary]) -> str:
    """Returns the number of trials as text: configurations x seeds.

    For a search, also says how many configurations it proposed, and how often each was trained.
    """
    seeds = [str(trial.config.seed) for trial in summaries[0].configuration.trials]
    total = plural(len(summaries) * len(seeds), "trial")
    times_seeds = f"x {plural(len(seeds), 'seed')} ({', '.join(seeds)}) = {total}"
    if "search" not in config:
        return f"{plural(len(summaries), 'configuration')} {times_seeds}"
    values = [summary.configuration.values for summary in summaries]
    stages = Counter(each["num_epochs"] for each in values)
    own = flatten(config.search)
    proposed = len({repr([each[name] for name in own]) for each in values})
    text = (
        f"{plural(proposed, 'different configuration')} proposed (num_trials={config.num_trials})"
    )
    if len(stages) > 1 and "num_epochs" not in own:  # Halving.
        with_epochs = (
            f"{number} with num_epochs={format_value(epochs)}" for epochs, number in stages.items()
        )
        text += f", the best of them trained again with more epochs: {', '.join(with_epochs)}"
    return f"{text} {times_seeds}"


def best_blocks(
    config: ConfigDict, summaries: Sequence[Summary], best: Summary, scores: dict
) -> list[Block]:
    """Returns the best configuration: its scores, and how to use and to repeat its best trial."""
    if not scores:
        return [f"No configuration has a score: {name_of_score([best])}."]
    trial = best_trial(best)
    about = (
        f"{best.configuration}: {name_of_score([best])} {best.median:.4f}. The configuration was "
        "chosen by this score, which is therefore optimistic; those on other splits are not."
    )
    if len(best.results) > 1:
        about += f" The table is over the {len(best.scores)} of {len(best.results)} seeds with a "
        about += "score."
    notes = [" ".join(edges)] if (edges := at_edges(config, summaries, best)) else []
    load = [
        f"The best trial is trials/{trial.workdir.name}. In the directory of this report, load it:",
        Code(f'import bert_jax\n\nmodel = bert_jax.load("trials/{trial.workdir.name}")', "python"),
    ]
    if (trial.result or {}).get("weights_removed"):
        load = [
            f"The best trial, trials/{trial.workdir.name}, has no weights any more, because "
            "keep_trials is set. To train it again, remove its result.json, and run the sweep."
        ]
    command = finetune_command(config.get("base_config", ""), trial.config, "runs/best")
    repeat = ["This command trains it alone:", Code(command, "sh")]
    if not command:
        file = 'the file that base is from, such as "configs/finetune/glue.py:mrpc"'
        repeat = [f"For the command that trains it alone, set config.base_config to {file}."]
    blocks = [about, *notes, scores_table(scores, len(best.scores)), *load, *repeat]
    split = best.metric.rpartition("/")[0]
    return [*blocks, *class_blocks(trial, split)]


def class_blocks(trial: Trial, split: str) -> list[Block]:
    """Returns the scores of a trial by class, if its task has classes."""
    path = trial.workdir / "predictions" / f"{split}_classes.tsv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file, delimiter="\t")
    labels = header[5:]
    text = f"Its scores on {split} by class"
    if labels != [row[0] for row in rows]:  # No confusion matrix: multi-label, or many labels.
        return [f"{text}:", Table([header, *rows])]
    if len(labels) <= MAX_CONFUSION:
        header = [*header[:5], *(f"predicted {label}" for label in labels)]
        text += ", and how often each label was predicted for examples of the class"
    else:
        header, rows = header[:5], [row[:5] for row in rows]
    return [f"{text}:", Table([header, *rows])]


def ranking_blocks(ranked: Sequence[Summary]) -> list[Block]:
    """Returns a table with a row per configuration, and what its columns mean."""
    is_single = has_one_seed(ranked)
    columns = ["score"] if is_single else ["median", "std", "min", "max", "scores by seed"]
    rows = [[*ranked[0].configuration.values, *columns, "notes"]]
    for summary in ranked:
        numbers, scores = [summary.median, math.nan, math.nan, math.nan], summary.scores
        if scores:
            deviation = statistics.stdev(scores) if len(scores) > 1 else math.nan
            numbers[1:] = deviation, min(scores), max(scores)
        cells = [f"{x:.4f}" if math.isfinite(x) else "" for x in numbers]
        cells.append(", ".join(f"{x:.4f}" for x in scores))
        values = map(format_value, summary.configuration.values.values())
        rows.append([*values, *cells[: len(columns)], summary.notes()])
    about = ABOUT_RANKING_OF_ONE_SEED if is_single else ABOUT_RANKING
    if "train_fraction" in ranked[0].configuration.values:
        about += f" {ABOUT_RANKING_OF_FRACTIONS}"
    if any((result or {}).get("pruned") for summary in ranked for result in summary.results):
        about += f" {ABOUT_PRUNED}"
    return [about, Table(rows)]


def scores_table(scores: dict[str, dict[str, float]], num_seeds: int) -> Table:
    """Returns a row per split and score, from the result of `summarize_seeds`."""
    names = ("median", "min", "max") if num_seeds > 1 else ("median",)
    rows = [[key, *(f"{value[name]:.4f}" for name in names)] for key, value in scores.items()]
    return Table([["metric", *(names if num_seeds > 1 else ("score",))], *rows])


def plot_sections(
    config: ConfigDict, summaries: Sequence[Summary], ranked: Sequence[Summary]
) -> list[Section]:
    """Returns the training and learning curves, the course of a search, and the score by field."""
    best = [summary for summary in ranked[: len(plots.COLORS)] if summary.scores]
    colors = [(code, name) for name, code in plots.COLORS.items()]
    named = [(color, str(each.configuration)) for color, each in zip(colors, best, strict=False)]
    curves = "Score during training"
    curves = Plot(curves, plots.draw(6.4, 4, curves, lambda axis: plots.draw_curves(axis, ranked)))
    about = ABOUT_CURVES if has_one_seed(summaries) else ABOUT_MEDIAN_CURVES
    sections = [Section("Training curves", [about, Beside(curves, Legend(named))])]
    sections += fraction_sections(config, summaries)
    epochs: list[Block] = []
    fields = [*summaries[0].configuration.values]
    if "search" in config:
        names = {code: name for name, code in plots.COLORS.items()}
        stages = plots.color_of_epochs(summaries).items()
        if len(stages) > 1:
            entries = [
                ((c, names[c]), f"num_epochs={format_value(number)}") for number, c in stages
            ]
            epochs = [Legend(entries)]
        name = "Score by configuration"
        svg = plots.draw(10, 4, name, lambda axis: plots.draw_progress(axis, summaries))
        search = [ABOUT_SEARCH, *epochs, [Plot(name, svg, is_wide=True)]]
        sections.append(Section("Course of the search", search))
        name, width = "All configurations", max(10, 1.7 * (len(fields) + 1))
        svg = plots.draw(width, 4.6, name, lambda axis: plots.draw_parallel(axis, ranked))
        parallel = [ABOUT_PARALLEL, Legend(named), [Plot(name, svg, is_wide=True)]]
        sections.append(Section("Parallel coordinates", parallel))
    panels, about, compared = [], ABOUT_FIELDS, with_most_examples(config, summaries)
    if len(compared) < len(summaries):
        fields.remove("train_fraction")
        about = f"{ABOUT_FIELDS} {ABOUT_LARGEST_FRACTION}"
    for field in fields:
        svg = plots.draw(
            4.4,
            3.3,
            f"Score by {field}",
            lambda axis, field=field: plots.draw_field(axis, compared, field),
        )
        panels.append(Plot(f"Score by {field}", svg))
    by_field = [about, *epochs, panels] if panels else ["No field varies."]
    by_field += importance_blocks(config, summaries)
    return [*sections, Section("Score by hyperparameter", by_field)]


def fraction_sections(config: ConfigDict, summaries: Sequence[Summary]) -> list[Section]:
    """Returns the score of each configuration over `train_fractions`, if there are several."""
    if len(config.get("train_fractions", ())) < 2:
        return []
    curves, is_single = fraction_curves(summaries), has_one_seed(summaries)
    named = [(name, code) for name, code in plots.COLORS.items()]
    legend = Legend(
        [((code, name), each.label) for (name, code), each in zip(named, curves, strict=False)]
    )
    title = "Score by fraction of train"
    svg = plots.draw(6.4, 4, title, lambda axis: plots.draw_fractions(axis, curves))
    header = ["configuration"]
    for fraction in curves[0].by_fraction:
        counts = {each.by_fraction[fraction].train_features for each in curves} - {None}
        shown = f" ({counts.pop():,} training features)" if len(counts) == 1 else ""
        header.append(f"train_fraction={format_value(fraction)}{shown}")
    rows = [header]
    for curve in curves:
        cells = []
        for summary in curve.by_fraction.values():
            cell = f"{summary.median:.4f}" if math.isfinite(summary.median) else ""
            if not is_single and summary.scores:
                cell += f" ({min(summary.scores):.4f} to {max(summary.scores):.4f})"
            cells.append(cell.strip())
        rows.append([curve.label, *cells])
    about = ABOUT_FRACTIONS if is_single else ABOUT_MEDIAN_FRACTIONS
    return [Section("Learning curves", [about, Beside(Plot(title, svg), legend), Table(rows)])]


def importance_blocks(config: ConfigDict, summaries: Sequence[Summary]) -> list[Block]:
    """Returns a table of the importance of each field, if `importances` has it."""
    values = importances(config, summaries)
    if not values:
        return []
    rows = [["field", "importance"], *([name, f"{value:.2f}"] for name, value in values.items())]
    about = ABOUT_IMPORTANCE_WITH_HALVING if config.get("halving", ()) else ABOUT_IMPORTANCE
    return [about, Table(rows)]


def trials_table(summaries: Sequence[Summary]) -> str:
    """Returns a row per trial as CSV, with unrounded scores."""
    rows = []
    for summary in summaries:
        for trial, result in zip(summary.configuration.trials, summary.results, strict=True):
            row = {"trial": trial.workdir.name}
            row |= {
                name: format_value(value) for name, value in summary.configuration.values.items()
            }
            row |= {"seed": trial.config.seed, "status": status(result)}
            median = summary.median if math.isfinite(summary.median) else None
            row["median_with_diverged_as_worst"] = median  # Ranks the configuration.
            result = {key: value for key, value in (result or {}).items() if key not in row}
            row |= {name: result.get(name) for name in ("train_features", "steps", "best_step")}
            splits = {key: value for key, value in result.items() if isinstance(value, dict)}
            rows.append(row | flatten_dict(splits, sep="/"))
    return as_csv(rows)


def times_table(summaries: Sequence[Summary]) -> str:
    """Returns the time of each trial as CSV; a stacked trial has the time of its stack."""
    rows = []
    for summary in summaries:
        for trial, result in zip(summary.configuration.trials, summary.results, strict=True):
            result = result or {}
            times = {"steps": result.get("steps"), "seconds": result.get("seconds")}
            rows.append({"trial": trial.workdir.name, "status": status(result or None)} | times)
    return as_csv(rows)


def as_csv(rows: Sequence[dict[str, object]]) -> str:
    """Returns rows as CSV, with the columns of all of them."""
    file = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
