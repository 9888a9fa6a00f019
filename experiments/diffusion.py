r"""Masked diffusion against left to right at equal compute: the bound, and text of few steps.

    python experiments/toy_language.py runs/studies/data/toy_language.txt
    python experiments/diffusion.py --scale=laptop --workdir=runs/studies \
        --text=runs/studies/data/toy_language.txt
    python experiments/diffusion.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data

Source: Sahoo et al. (2024), who compare both at the size of BERT_BASE, after a million steps.
"""

import functools
import itertools
import pathlib
import statistics
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import study
import study_report
import study_tasks
import toy_language
from matplotlib.figure import Figure

import bert_jax
from bert_jax.data.features import ModelInput
from bert_jax.data.rows import Rows
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.inference.unmasking import unmask
from bert_jax.model.config import BertConfig
from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.objectives.left_to_right import LeftToRight
from bert_jax.objectives.masked_diffusion import MaskedDiffusion

VOCAB_SIZE = 178  # Of the toy language.
CONFIGS = {  # The model, and its configuration in configs/pretrain.
    "laptop": (
        ModernBertConfig(
            vocab_size=VOCAB_SIZE,
            num_layers=2,
            hidden_size=64,
            num_heads=2,
            intermediate_size=128,
            attention_pattern="l",
            attention_window=16,
        ),
        "modernbert_base",
    ),
    "pod": (BertConfig.named("base", vocab_size=30522), ""),
}
ROW_LENGTHS = {"laptop": (130, 130), "pod": study.ROW_LENGTHS["pod"]}  # 130: a text, with its ends.
STEPS = {  # Of masked diffusion, in the two phases.
    "laptop": (0, 1600),
    "pod": (900_000, 100_000),
}
SETTINGS = {  # Of a run at laptop scale.
    "long_phase.max_seq_length": 130,
    "long_phase.batch_size": 16,
    "learning_rate": 6e-3,
    "model.initializer_range": 0.12,
    "warmup_steps": 50,
    "decay_power": 1.0,
    "decay_steps": 800,
    "eval_every": 0,
    "checkpoint_every": 100_000,
    "keep_every": 0,
}
NUM_SEEDS = 2
PERPLEXITY = "held-out perplexity"
DIFFUSION, LEFT_TO_RIGHT = "Masked diffusion", "Left to right"
OBJECTIVES = {
    DIFFUSION: ("masked_diffusion", MaskedDiffusion((), 0)),
    LEFT_TO_RIGHT: ("left_to_right", LeftToRight(next_sentence=False)),
}
NUM_ROWS, NUM_MASKS = 512, 8  # Held-out rows, and how often each is masked for the bound.
ROWS_PER_BATCH = 16  # In BERT_BASE, the logits of 16 x 512 positions take 1 GB.
NUM_TEXTS, TEXT_LENGTH = 64, 128  # Of each seed.
ORDERS, STEPS_OF_TEXTS, HELD_OUT = ("random", "confidence"), (1, 8, 32, 128), ("held out", 0)


def settings(name: str, scale: str, seed: int) -> study.Settings:
    """Returns the fields of a pre-training run with the compute of masked diffusion."""
    config, _ = CONFIGS[scale]
    objective, own = OBJECTIVES[name]
    result = {"objective": objective, "next_sentence": False, "seed": seed}
    if scale == "laptop":
        result |= SETTINGS | study_tasks.SMALL_MODERNBERT
        fields = (*config.size_fields, "attention_pattern", "attention_window")
        result |= {f"model.{field}": getattr(config, field) for field in fields}
    names = "num_steps", "long_phase.num_steps"
    for field, length, steps in zip(names, ROW_LENGTHS[scale], STEPS[scale], strict=True):
        cost = OBJECTIVES[DIFFUSION][1].flops_per_row(config, length, 1)
        result[field] = round(steps * cost / own.flops_per_row(config, length, 1))
    return result


def row(name: str, scale: str, seed: int) -> study.Row:
    return study.Row(
        f"{name}, seed {seed}",
        {},
        settings(name, scale, seed),
        row_format="full_sentences",
        row_lengths=ROW_LENGTHS[scale],
        pretrain_config=CONFIGS[scale][1],
    )


def rows(scale: str) -> list[study.Row]:
    return [row(name, scale, seed) for seed in range(NUM_SEEDS) for name in OBJECTIVES]


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_sums(objective, module, params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of a batch, in nats, and the number of its tokens."""
    return objective.sums(module, params, batch)[objective.main_loss]


def nats_per_token(model: PretrainedModel, rows: dict, num_masks: int = 1) -> float:
    """Returns the mean loss, or its bound, of all tokens of packed rows that are not special.

    `num_masks` is how often the rows are masked for the bound.
    """
    special_ids, module = tuple(model.tokenizer.special_ids), model.module
    objective = MaskedDiffusion(special_ids, model.tokenizer.mask_id)
    if model.config.causal:
        objective, num_masks = LeftToRight(next_sentence=False), 1
    total = count = 0.0
    for seed in range(num_masks):
        batch = objective.prepare(rows, jax.random.key(seed))
        if model.config.causal:  # Diffusion predicts no special tokens.
            is_special = jnp.isin(batch["targets"], jnp.array(special_ids))
            batch["target_weights"] = jnp.where(is_special, 0.0, batch["target_weights"])
        for start in range(0, len(rows["tokens"]), ROWS_PER_BATCH):
            part = {name: each[start : start + ROWS_PER_BATCH] for name, each in batch.items()}
            sums = loss_sums(objective, module, model.params, part)
            total, count = total + float(sums[0]), count + float(sums[1])
    return total / count


def rows_of_texts(ids: np.ndarray, tokenizer) -> dict:
    """Returns rows of `[CLS] text [SEP]`, of int32 ids `[texts, tokens]`."""
    sides = [np.full((len(ids), 1), index) for index in (tokenizer.cls_id, tokenizer.sep_id)]
    tokens = np.concatenate([sides[0], ids, sides[1]], axis=1)
    bounds = np.tile([0, tokens.shape[1], tokens.shape[1]], (len(ids), 1, 1))
    return {"tokens": tokens, "sequence_bounds": bounds}


def generate_texts(
    model: PretrainedModel, order: str, steps: int, length: int, seed: int
) -> np.ndarray:
    """Returns texts of `length` tokens, int32 `[NUM_TEXTS, length]`, generated unconditionally."""
    masks = np.full((NUM_TEXTS, length), model.tokenizer.mask_id)
    tokens = rows_of_texts(masks, model.tokenizer)["tokens"]
    features = [ModelInput((each,), (len(each),)) for each in tokens]
    generated = unmask(
        model.module, model.params, features, length, model.tokenizer, steps, 1.0, order, seed
    )
    return np.stack(generated)


def sentences_of(ids: np.ndarray, tokenizer) -> list[list[str]]:
    """Returns the words of each sentence of texts, int32 `[texts, tokens]`."""
    texts = [
        tokenizer.decode(i for i in text if i not in tokenizer.special_ids) for text in ids.tolist()
    ]
    return [
        sentence
        for text in texts
        for sentence in toy_language.sentences_of(text.replace(".", " .").split())
    ]


def fraction_grammatical(ids: np.ndarray, tokenizer) -> float:
    """Returns the fraction of sentences that the toy language has."""
    found = map(toy_language.log_probability, sentences_of(ids, tokenizer))
    return float(np.mean(np.isfinite([*found])))


def fraction_distinct(ids: np.ndarray) -> float:
    """Returns how many different tokens a text has, by token: the mean over texts."""
    return float(np.mean([len(set(text)) / len(text) for text in ids.tolist()]))


def table(header: str, lines: list[tuple]) -> str:
    """Returns a Markdown table of names and numbers."""
    marks = " | ".join(["---", *["---:"] * header.count("|")])
    return "\n".join(f"| {' | '.join(each)} |" for each in [(header,), (marks,), *lines])


def spread(values: Sequence[float], form: str) -> str:
    """Returns the median, and the range if it differs, of values in the format `form`."""
    middle, low, high = (format(f(values), form) for f in (statistics.median, min, max))
    return middle if low == high else f"{middle} ({low} to {high})"


def bounds(models: dict[str, list[PretrainedModel]], real: dict) -> str:
    """Returns the table of the losses of held-out rows, over the seeds of each objective."""
    lines = []
    for name, seeds in models.items():
        nats = [nats_per_token(model, real, NUM_MASKS) for model in seeds]
        lines.append((name, spread(nats, ".3f"), spread(np.exp(nats), ".2f")))
    tokenizer = models[DIFFUSION][0].tokenizer
    exact = sum(map(toy_language.log_probability, sentences_of(real["tokens"], tokenizer)))
    if np.isfinite(exact):
        nats = -exact / np.sum(~np.isin(real["tokens"], tokenizer.special_ids))
        lines.append(("The language itself", f"{nats:.3f}", f"{np.exp(nats):.2f}"))
    return table("held-out rows | nats per token | perplexity", lines)


def texts(
    generator: PretrainedModel, judge: PretrainedModel, real: dict, seed: int
) -> dict[tuple, dict]:
    """Returns the scores and the first of the texts of `generator`, by order and steps.

    Those at ("held out", 0) are held-out texts.
    """
    tokenizer, length = generator.tokenizer, min(TEXT_LENGTH, real["tokens"].shape[1] - 2)
    is_full = np.all(~np.isin(real["tokens"][:, 1:-1], tokenizer.special_ids), axis=1)
    samples = {HELD_OUT: real["tokens"][is_full][:NUM_TEXTS, 1 : 1 + length].astype(np.int32)}
    for order, steps in itertools.product(ORDERS, STEPS_OF_TEXTS):
        ids = generate_texts(generator, order, steps, length, seed)
        samples[order, min(steps, length)] = ids
    return {
        way: {
            "nats": nats_per_token(judge, rows_of_texts(ids, tokenizer)),
            "grammatical": fraction_grammatical(ids, tokenizer),
            "distinct": fraction_distinct(ids),
            "first": tokenizer.decode(ids[0].tolist()),
        }
        for way, ids in samples.items()
    }


def draw_texts(scored: list[dict[tuple, dict]]) -> Figure:
    """Returns a panel of the fraction of grammatical sentences of each seed, over the steps."""
    figure = Figure((5.6, 3.4), layout="constrained")
    axis = figure.subplots()
    for order, color in zip(ORDERS, study_report.COLORS, strict=False):
        steps = [each for name, each in scored[0] if name == order]
        values = [[100 * each[order, n]["grammatical"] for n in steps] for each in scored]
        axis.plot(steps, np.transpose(values), "o", color=color, alpha=0.45)
        axis.plot(steps, np.median(values, axis=0), color=color, label=f"order: {order}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(steps, steps)
    axis.set_ylim(0, 100)
    axis.set_xlabel("steps")
    axis.set_ylabel("grammatical sentences (%)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.suptitle("Texts of masked diffusion\ndots: seeds; line: median", fontsize=11)
    return figure


def appendix(scale: str, directory: pathlib.Path) -> str:
    """Returns the bounds of the runs, and their texts; draws the latter for the toy language."""
    models = {
        name: [
            bert_jax.load(study.encoder(row(name, scale, seed), scale)) for seed in range(NUM_SEEDS)
        ]
        for name in OBJECTIVES
    }
    _, fields = study.pretraining(rows(scale)[0], scale)
    heldout = Rows(fields["long_phase.corpus"], split="heldout")
    real = heldout.read(0, min(NUM_ROWS, heldout.num_rows))
    real["stream_positions"] = np.arange(len(real["tokens"]), dtype=np.uint32)
    scored = [
        texts(generator, judge, real, seed)
        for seed, (generator, judge) in enumerate(zip(*models.values(), strict=True))
    ]
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        (order, steps): f"{order}, {steps} step{'s' * (steps > 1)}" if steps else order
        for order, steps in scored[0]
    }
    columns, figures = {"nats": ("nats per token, left to right", ".2f")}, []
    if fraction_grammatical(real["tokens"], heldout.tokenizer) == 1:  # It is the toy language.
        columns["grammatical"] = "grammatical sentences", ".0%"
        draw_texts(scored).savefig(directory / "diffusion_texts.png", dpi=130)
        figures.append("![Grammatical sentences of masked diffusion](diffusion_texts.png)")
    columns["distinct"] = "distinct tokens", ".0%"
    lines = [
        (
            name,
            *(
                spread([each[way][key] for each in scored], form)
                for key, (_, form) in columns.items()
            ),
        )
        for way, name in names.items()
    ]
    length = min(TEXT_LENGTH, real["tokens"].shape[1] - 2)
    return "\n\n".join(
        [
            "## The bound",
            f"The first {len(real['tokens'])} held-out rows. Both objectives are scored on the "
            "same tokens, without [SEP], which left to right also predicts. Of masked diffusion it "
            f"is the bound, a mean over {NUM_MASKS} sets of masks. All tables have the median over "
            f"{NUM_SEEDS} seeds, and their range.",
            bounds(models, real),
            "## Texts",
            f"Held-out texts, and {NUM_TEXTS} of masked diffusion from each seed that are "
            f"generated unconditionally, all of {length} tokens: {length} steps reveal one token "
            "at a time. The left-to-right model of the same seed scores them. A text can be "
            "probable because it repeats a few words: so there is the fraction of distinct tokens "
            "in a text. The last sentence of a text may be cut.",
            table(" | ".join(["texts", *(name for name, _ in columns.values())]), lines),
            *figures,
            "The first text of each, of the first seed:",
            "\n".join(f"- {name}: {scored[0][way]['first']}" for way, name in names.items()),
        ]
    )


def draw(title: str, rows: Sequence, columns: Sequence[str], scores: dict) -> Figure:
    """Returns a panel of the held-out perplexities, a dot for each seed."""
    figure = Figure((5.2, 2.6), layout="constrained")
    axis = figure.subplots()
    for place, (name, color) in enumerate(zip(OBJECTIVES, study_report.COLORS, strict=False)):
        own = [scores.get((row.name, PERPLEXITY), []) for row in rows if row.name.startswith(name)]
        values = [value for each in own for value in study_report.finished(each)]
        axis.plot(values, [place] * len(values), "o", color=color, alpha=0.6)
    axis.set_yticks(range(len(OBJECTIVES)), OBJECTIVES)
    axis.set_ylim(len(OBJECTIVES) - 0.5, -0.5)
    axis.set_xlabel("held-out perplexity (of masked diffusion, its bound)")
    axis.grid(alpha=0.3)
    figure.suptitle(f"{title}\ndots: runs with different seeds", fontsize=11)
    return figure


STUDY = study.Study(
    name="diffusion",
    title="Masked diffusion against left to right at equal compute",
    about="Both train the same encoder on the same text, in steps whose number is inversely "
    "proportional to the FLOPs of a step; attention counts as full for both. Perplexities are exp "
    "of nats per token: of masked diffusion an upper bound, of left to right exact, with [SEP] "
    "among its tokens.",
    laptop="Ours: a ModernBERT of 2 layers of hidden size 64, with windows of 16 tokens, on a toy "
    "language of which the probability of every sentence is known (`toy_language.py`), in rows of "
    "some dozen sentences, up to 130 tokens.",
    limits="The language has 62 words, and needs no memory beyond a sentence: the tables show "
    "whether both objectives learn it, and how the number of steps affects the texts. They do not "
    "show which of the two learns English faster, or how many steps a good model needs for that. "
    f"There are {NUM_SEEDS} seeds, as the two runs of each take three minutes of CPU time.",
    rows=rows,
    tasks=lambda scale: study_tasks.sentences(scale, "mnli") if scale == "pod" else [],
    pretraining_metrics={PERPLEXITY: "perplexity"},
    draw=draw,
    appendix=appendix,
)

if __name__ == "__main__":
    study.main(STUDY)
