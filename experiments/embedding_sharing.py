r"""How a generator and a DeBERTa that finds its replacements share embeddings; beside ELECTRA.

    python experiments/embedding_sharing.py --scale=laptop --workdir=runs/studies
    python experiments/embedding_sharing.py --scale=pod --workdir=/gcs/studies \
        --glue_dir=/gcs/glue_data

Source: He et al. (2021, "DeBERTaV3"), section 3.2 and 3.3: tables of their own, shared ones, and
gradient-disentangled embedding sharing (GDES).
"""

import pathlib

import family
import numpy as np
import study
import study_tasks

LOSS = "replaced_loss"
# The generator is as wide as the discriminator, whose embeddings it reads, and weak at laptop
# scale, where its replacements must be found in a few thousand steps.
GENERATOR_LAYERS = {"laptop": 1, "pod": 6}
NUM_STEPS = 1200  # At laptop scale.
ELECTRA = "ELECTRA, shared"
MODELS = {
    ELECTRA: ("electra_base", {}),
    "DeBERTa, not shared": (
        "deberta_v3_base",
        {"generator.disentangles_embeddings": False, "generator.ties_embeddings": False},
    ),
    "DeBERTa, shared": ("deberta_v3_base", {"generator.disentangles_embeddings": False}),
    "DeBERTa, disentangled (GDES)": ("deberta_v3_base", {}),
}


def row(name: str, scale: str) -> study.Row:
    config, own = MODELS[name]
    fields = {
        "generator.hidden_fraction": 1.0,
        "generator.num_layers": GENERATOR_LAYERS[scale],
        "generator.discriminator_weight": 50.0,
    }
    if scale == "laptop":
        # The generator samples the pieces of a word one by one: its spelling betrays it soon.
        fields |= {"num_steps": NUM_STEPS, "masking.unit": "whole_word"}
    settings = family.settings(family.Model(config, fields=fields | own, loss=LOSS), scale)
    return study.Row(
        name,
        pretraining={"seed": 0} | settings,
        row_format="full_sentences",
        pretrain_config=config,
        num_pretraining_seeds=3,
    )


def rows(scale: str) -> list[study.Row]:
    return [row(name, scale) for name in MODELS]


def preparations(scale: str) -> list[study.Command]:
    return family.text_corpora(scale, ("cls_first",))


def entropy(result: dict[str, float]) -> float:
    """Returns the loss, in nats, of what knows only how many tokens are replaced."""
    shares = np.array([result["replaced_fraction"], 1 - result["replaced_fraction"]])
    return family.entropy(shares, shares)


def appendix(scale: str, directory: pathlib.Path) -> str:
    """Returns the discriminators' losses, beside those of knowing only how many are replaced."""
    del directory
    lines = []
    for each_row in rows(scale):
        seeds = [study.pretraining_result(seed, scale) for seed in study.with_seeds(each_row)]
        gains = [each[LOSS] - entropy(each) for each in seeds]
        lines.append(
            [
                each_row.name,
                family.spread([each[LOSS] for each in seeds]),
                family.spread([*map(entropy, seeds)]),
                family.spread(gains, "+.4f"),
                family.spread([100 * each["replaced_recall"] for each in seeds], ".1f"),
                family.spread([100 * each["replaced_precision"] for each in seeds], ".0f"),
                family.spread([each["mlm_loss"] for each in seeds]),
            ]
        )
    header = [
        "",
        "discriminator's loss",
        "their share alone",
        "difference",
        "found, %",
        "of these right, %",
        "generator's loss",
    ]
    about = (
        "In nats per token, and per masked token for the generators, on held-out rows: the median "
        "of three seeds, and their range. Their share alone: the loss of what knows only how many "
        "tokens are replaced. Found: replaced tokens with a probability above 1/2."
    )
    return "\n\n".join(["## Losses", about, family.table(header, lines)])


STUDY = study.Study(
    name="embedding_sharing",
    title="How generator and discriminator share embeddings",
    about="A DeBERTa finds the tokens that a generator replaced. The two have tables of tokens of "
    "their own, or the discriminator reads and trains the generator's, or it reads the sum of the "
    "generator's, which it does not train, and of a difference of its own (disentangled, GDES). "
    "ELECTRA, with shared embeddings and a table of positions, is the baseline of the same size.",
    laptop="Ours: 2 layers, hidden size 64, a generator of one layer as wide, "
    f"{NUM_STEPS:,} steps of 32 rows of 32 tokens, learning rate {family.LAPTOP['learning_rate']}. "
    "The text is 106 articles of Wikipedia in 300 byte-level pieces, hardly more than letters. "
    "Whole words are masked: the generator samples their pieces one by one, so that wrong spelling "
    "betrays them. Of single masked pieces the discriminators find none in twice as many steps.",
    limits="The paper compares fine-tuning after a long training, where shared tables are pulled "
    "in two directions. A few thousand steps show whether a discriminator of each kind learns, "
    "and which does first; not which is better in the end.",
    rows=rows,
    tasks=lambda scale: study_tasks.sentences(scale, "mnli") if scale == "pod" else [],
    pretraining_metrics={"discriminator's loss": LOSS, "generator's perplexity": "perplexity"},
    num_seeds=1,
    preparations=preparations,
    appendix=appendix,
)

if __name__ == "__main__":
    study.main(STUDY)
