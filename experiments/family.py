r"""The architectures beside BERT, each against its baseline at equal steps and size.

    python experiments/family.py --scale=laptop --workdir=runs/studies
    python experiments/family.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data

MPNet, DeBERTa with its enhanced mask decoder, Longformer and XLNet against RoBERTa; ESM-2 on
proteins against BERT. It is no table of a paper: theirs compare models of different recipes.
"""

import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import study
import study_report
import study_tasks
from matplotlib.figure import Figure

from bert_jax.data.rows import Rows

PERPLEXITY, PERMUTED = "held-out perplexity", "permutation_loss"
LENGTHS = {"laptop": 32, "pod": 512}  # Tokens of a row.
VOCAB_SIZES = {"laptop": 300, "pod": 30522}
BERT_MASKING = {
    "masking.mask_fraction": 0.8,
    "masking.keep_fraction": 0.1,
    "masking.random_fraction": 0.1,
}
ENHANCED = {"objective": "enhanced_masked_lm"} | BERT_MASKING
NO_FIELDS: study.Settings = {}


class Model(NamedTuple):
    """An architecture with its objective: a configuration, and the fields that it sets anew.

    `baseline` is the model that it is compared with, `corpus` the name of the corpora that it
    reads, `loss` the key in result.json, and `num_seeds` the runs.
    """

    config: str
    baseline: str = ""
    fields: study.Settings = NO_FIELDS
    corpus: str = "cls_first"
    loss: str = "mlm_loss"
    num_seeds: int = 3
    laptop_only: bool = False


ROBERTA, BERT = "RoBERTa", "BERT on proteins"
MODELS = {
    ROBERTA: Model("roberta_base"),
    "RoBERTa, half the learning rate": Model(
        "roberta_base", ROBERTA, {"learning_rate": 2e-3}, num_seeds=1, laptop_only=True
    ),
    "MPNet": Model("mpnet_base", ROBERTA),
    "DeBERTa, enhanced mask decoder": Model("deberta_v3_base", ROBERTA, ENHANCED),
    "Longformer, window of a quarter of a row": Model("longformer_base", ROBERTA),
    "XLNet": Model("xlnet_base", "", {"masking.rate": 0.15}, "cls_last", PERMUTED),
    BERT: Model("bert_base", "", corpus="proteins", laptop_only=True),
    "ESM-2 on proteins": Model("esm2_8m", BERT, corpus="proteins", laptop_only=True),
}
# What all rows of the laptop scale have in common, beyond study.PRETRAINING.
LAPTOP = {
    "learning_rate": 4e-3,
    "num_steps": 800,
    "batch_size": 32,
    "long_phase.num_steps": 0,
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "model.intermediate_size": 256,
    "eval_every": 100_000,  # At the end alone.
    "checkpoint_every": 100_000,
    "keep_every": 0,
    "max_eval_batches": 32,
    "beta2": 0.999,
    "epsilon": 1e-6,
    "clip_norm": 1.0,
    "decay_from": "step_0",
    "masking.unit": "token",
}
POD = {
    "num_steps": 125_000,
    "batch_size": 256,
    "long_phase.num_steps": 0,
    "model.max_position_embeddings": LENGTHS["pod"],
}


def corpus(name: str, length: int, scale: str) -> str:
    """Returns the directory of the rows of `length` tokens of one of the texts and tokenizers."""
    return f"{study.runs(scale)}/corpus/{length}-{name}"


def settings(model: Model, scale: str) -> study.Settings:
    """Returns the fields of a pre-training run."""
    length = LENGTHS[scale]
    fields = {"corpus": corpus(model.corpus, length, scale), "max_seq_length": length}
    fields |= {"next_sentence": False, "per_device_batch_size": 0, "shard_weight_update": False}
    if model.config == "longformer_base":
        fields["model.attention_window"] = length // 4
    fields = (LAPTOP if scale == "laptop" else POD) | fields
    return fields | model.fields


def row(name: str, scale: str) -> study.Row:
    model = MODELS[name]
    return study.Row(
        name,
        pretraining={"seed": 0} | settings(model, scale),
        row_format="single_segments" if model.corpus == "proteins" else "full_sentences",
        pretrain_config=model.config,
        num_pretraining_seeds=model.num_seeds,
    )


def rows(scale: str) -> list[study.Row]:
    """Returns a row for each model of the scale."""
    return [
        row(name, scale) for name in MODELS if scale == "laptop" or not MODELS[name].laptop_only
    ]


def text_corpora(scale: str, names: Sequence[str]) -> list[study.Command]:
    """Returns the commands that build the vocabulary of the text, and corpora of its rows.

    `names` are of tokenizers: "cls_first" is that of the vocabulary, "cls_last" has XLNet's layout.
    """
    directory, length = study.runs(scale), LENGTHS[scale]
    text, commands = study.TEXT.value or "enwiki-latest-pages-articles.xml.bz2", []
    if scale == "laptop" and not study.TEXT.value:
        text = f"{study.fetched('wikipedia-sample')}/*.bz2"
        commands.append(study.fetch_command("wikipedia-sample"))
    vocabulary = f"{directory}/bpe.json"
    arguments = ["tools/train_vocab.py", "--kind=bpe", f"--input={text}", f"--output={vocabulary}"]
    commands.append(study.Command([*arguments, f"--size={VOCAB_SIZES[scale]}"], vocabulary))
    tokenizers = {"cls_first": vocabulary, "cls_last": f"{directory}/cls_last"}
    if "cls_last" in names:
        own = tokenizers["cls_last"]
        arguments = ["experiments/family_data.py", "cls_last", vocabulary, own]
        commands.append(study.Command(arguments, own))
    options = ["--rows=full_sentences"]
    options += ["--heldout_fraction=0.1"] if scale == "laptop" else []
    for name in names:
        output = corpus(name, length, scale)
        commands.append(corpus_command(text, tokenizers[name], output, length, options))
    return commands


def preparations(scale: str) -> list[study.Command]:
    """Returns the commands that build the corpora, at laptop scale those of proteins, too."""
    commands = text_corpora(scale, ("cls_first", "cls_last"))
    if scale == "laptop":
        own = study.fetched("protein-text")
        arguments = ["experiments/family_data.py", "proteins", study.fetched("proteins"), own]
        commands += [study.fetch_command("proteins"), study.Command(arguments, own)]
        options = ["--documents=lines", "--sentences=lines", "--rows=single_segments"]
        options += ["--heldout_fraction=0.1"]
        text, length = f"{own}/proteins.txt", LENGTHS[scale]
        output = corpus("proteins", length, scale)
        commands.append(corpus_command(text, own, output, length, options))
    return commands


def corpus_command(
    text: str, tokenizer: str, output: str, length: int, options: list[str]
) -> study.Command:
    """Returns the command that builds a corpus."""
    arguments = ["tools/prepare_corpus.py", f"--input={text}", f"--vocab={tokenizer}"]
    arguments += [f"--output={output}", f"--max_seq_length={length}", *options]
    return study.Command(arguments, f"{output}/manifest.json")


def floor(model: Model, scale: str) -> float:
    """Returns the held-out loss, in nats, of what knows the frequencies of tokens alone."""
    rows = Rows(corpus(model.corpus, LENGTHS[scale], scale), split="heldout")
    counts = rows.count_tokens()
    counts[list(rows.tokenizer.special_ids)] = 0
    shares = counts / counts.sum()
    # XLNet predicts no token that it sees.
    return frequency_loss(shares, 0.0 if model.loss == PERMUTED else 0.2)


def frequency_loss(shares: np.ndarray, visible: float) -> float:
    """Returns the least loss, in nats, from the token at the place to predict and frequencies.

    A `visible` fraction of these places has no mask but, as often, the token itself or one that is
    drawn uniformly from all. `shares` `[vocab_size]` are the frequencies, as fractions.
    """
    joint = 0.5 * np.diag(shares) + 0.5 * shares[:, None] / len(shares)  # Original, and visible.
    given = joint / joint.sum(axis=0)
    return (1 - visible) * entropy(shares, shares) + visible * entropy(joint, given)


def entropy(weights: np.ndarray, shares: np.ndarray) -> float:
    """Returns the mean of -log(shares), where `weights` are not 0."""
    return -float(np.sum(weights[weights > 0] * np.log(shares[weights > 0])))


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Formats the median and, of values that differ, the range."""
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})" if low != high else middle


def table(header: list[str], lines: list[list[str]]) -> str:
    """Returns a Markdown table of names and numbers."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(each)} |" for each in [header, marks, *lines])


def loss_table(results: dict[str, list[dict]], scale: str) -> str:
    """Returns the table of the models' losses, from the results of their seeds."""
    lines = []
    for name, own in results.items():
        model, difference = MODELS[name], ""
        values, alone = [result[model.loss] for result in own], floor(model, scale)
        if model.baseline:
            theirs = [result[MODELS[model.baseline].loss] for result in results[model.baseline]]
            pairs = zip(values, theirs, strict=False)  # A row may have fewer seeds.
            difference = spread([one - other for one, other in pairs], "+.3f")
        gain = spread([value - alone for value in values], "+.3f")
        lines.append([name, str(len(values)), spread(values), f"{alone:.3f}", gain, difference])
    header = [
        "",
        "seeds",
        "loss",
        "frequencies alone",
        "difference to these",
        "difference to the baseline",
    ]
    return table(header, lines)


def appendix(scale: str, directory: pathlib.Path) -> str:
    """Returns the losses beside those of frequencies and of the baselines."""
    del directory
    results = {
        each.name: [study.pretraining_result(seed, scale) for seed in study.with_seeds(each)]
        for each in rows(scale)
    }
    about = (
        "In nats per predicted token of held-out rows: the median of the seeds, and their range. "
        "The baseline is RoBERTa or, on proteins, BERT; the same seed draws the same targets for "
        "both. Frequencies alone: what knows how frequent tokens are, and reads the place to "
        "predict, as a tenth of the targets of masked LM are not replaced, and another tenth are, "
        "by a random token. XLNet sees none of its targets: compare its difference to these."
    )
    return "\n\n".join(["## Losses", about, loss_table(results, scale)])


def draw(title: str, rows: Sequence, columns: Sequence[str], scores: dict) -> Figure:
    """Returns a panel of perplexities for each corpus or, if there are tasks, one for each."""
    if columns:
        return study_report.draw_scores(title, rows, columns, scores)
    panels = {"Text": [], "Proteins": []}
    for each in rows:
        kind = "Proteins" if MODELS[each.name].corpus == "proteins" else "Text"
        panels[kind].append(each.name)
    panels = {kind: names for kind, names in panels.items() if names}
    figure = Figure((7.2, 1.4 + 0.42 * len(rows)), layout="constrained")
    heights = [len(names) + 1 for names in panels.values()]
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False).flat
    found = {
        row.name: study_report.finished(scores.get((row.name, PERPLEXITY), [])) for row in rows
    }
    for axis, (kind, names), color in zip(axes, panels.items(), study_report.COLORS, strict=False):
        for place, name in enumerate(names):
            axis.plot(found[name], [place] * len(found[name]), "o", color=color, alpha=0.45)
            if found[name]:
                axis.plot(statistics.median(found[name]), place, "|", color=color, ms=16, mew=2.5)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)  # The first row on top, as in the table.
        axis.set_title(kind, fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_xlim(0, 1.1 * max([value for name in names for value in found[name]], default=1))
    axes[len(panels) - 1].set_xlabel(PERPLEXITY)
    figure.suptitle(f"{title}\ndots: seeds; bar: median", fontsize=11)
    return figure


STUDY = study.Study(
    name="family",
    title="The architectures beside BERT, each against its baseline",
    about="All rows have as many layers, hidden units and steps, and read the same text. MPNet, "
    "DeBERTa through its enhanced mask decoder, and Longformer with a window of a quarter of a "
    "row, predict the masked tokens that RoBERTa predicts. XLNet predicts as many, each from all "
    "that are no targets and the targets before it in a random order.",
    laptop="Ours: 2 layers, hidden size 64, 800 steps of 32 rows of 32 tokens, learning rate "
    f"{LAPTOP['learning_rate']}. The text is 106 articles of Wikipedia in 300 byte-level pieces, "
    "hardly more than letters: of a larger vocabulary a model of this size learns little but the "
    "frequencies in as many steps. ESM-2, with rotary positions, and BERT, with a table of "
    "positions, read 2,095 proteins of a bacterium, a token for each amino acid.",
    limits="The losses on text show what finds soonest that the neighbors of a token predict it: a "
    "model that is given distances or windows, before one that has to learn them from a table of "
    "positions. They do not show which is better after a long training. Neighbors tell little "
    "about an amino acid, so that the proteins cannot tell the two models apart; they show that "
    "both learn as much. Rows of 32 pieces hold too few words to fine-tune a task such as R8.",
    rows=rows,
    tasks=lambda scale: study_tasks.sentences(scale, "mnli", "sst2") if scale == "pod" else [],
    pretraining_metrics={PERPLEXITY: "perplexity"},
    num_seeds=1,
    preparations=preparations,
    draw=draw,
    appendix=appendix,
)

if __name__ == "__main__":
    study.main(STUDY)
