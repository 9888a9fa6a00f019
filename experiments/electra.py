r"""ELECTRA against BERT at equal compute: masked LM, replaced tokens, all-tokens MLM.

    python experiments/electra.py --scale=laptop --workdir=runs/studies
    python experiments/electra.py --scale=pod --workdir=/gcs/studies --glue_dir=/gcs/glue_data

Source: Clark et al. (2020), section 3.4 and table 5: models of BERT_BASE's size, GLUE dev average.
"""

import math

import all_tokens_mlm
import study
import study_tasks

from bert_jax.data.masking import Masking
from bert_jax.model.config import BertConfig
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.objectives.replaced_tokens import GeneratorSettings, ReplacedTokens

COLUMN = "GLUE (table 5)"
ALL_TOKENS = "experiments.all_tokens_mlm"
ROWS = (  # Name, objective, the paper's score.
    ("Masked LM (BERT)", "masked_lm", 82.2),
    ("Replaced tokens (ELECTRA)", "replaced_tokens", 85.0),
    ("All-tokens MLM", ALL_TOKENS, 84.3),
)
RATE = 0.15  # Fraction of the tokens that are masked; the default.
BERT_MASKING = {
    "masking.mask_fraction": 0.8,
    "masking.keep_fraction": 0.1,
    "masking.random_fraction": 0.1,
}
# The paper states only ELECTRA's weight; all-tokens MLM has two losses of the same kind.
WEIGHTS = {"replaced_tokens": 50.0, ALL_TOKENS: 1.0}
SIZES = {"laptop": ("tiny", 4096, 1 / 2), "pod": ("base", 30522, 1 / 3)}  # Vocabulary, generator.
STEPS = {  # Of masked LM, on short rows and on long ones.
    "laptop": (study.PRETRAINING["num_steps"], study.PRETRAINING["long_phase.num_steps"]),
    "pod": (900_000, 100_000),
}


def flops_per_row(objective: str, scale: str, length: int) -> float:
    """Returns the FLOPs of a training step for one row."""
    size, vocab_size, fraction = SIZES[scale]
    masking = Masking((), 0, vocab_size, (), math.ceil(RATE * length), RATE)
    generator = GeneratorSettings(hidden_fraction=fraction)
    built = {
        "masked_lm": MaskedLm(masking, next_sentence=False),
        "replaced_tokens": ReplacedTokens(masking, generator),
        ALL_TOKENS: all_tokens_mlm.AllTokensMlm(masking, generator),
    }[objective]
    return built.flops_per_row(BertConfig.named(size, vocab_size=vocab_size), length, 1)


def settings(objective: str, scale: str) -> study.Settings:
    """Returns the fields of a pre-training run with the same compute as masked LM."""
    size, _, fraction = SIZES[scale]
    result = {"objective": objective, "model.size": size}
    names = "num_steps", "long_phase.num_steps"
    for name, length, steps in zip(names, study.ROW_LENGTHS[scale], STEPS[scale], strict=True):
        cost = flops_per_row(objective, scale, length) / flops_per_row("masked_lm", scale, length)
        result[name] = round(steps / cost)
    if scale == "pod":
        result["batch_size"] = 256
    if objective == "masked_lm":
        return result | BERT_MASKING
    weight = {"generator.discriminator_weight": WEIGHTS[objective]}
    return result | {"generator.hidden_fraction": fraction} | weight


def rows(scale: str) -> list[study.Row]:
    return [
        study.Row(name, {COLUMN: score}, settings(objective, scale), pretrain_config="electra_base")
        for name, objective, score in ROWS
    ]


def tasks(scale: str) -> list[study.Task]:
    tasks = study_tasks.sentences(scale, "mnli", "mrpc", "sst2")
    return tasks + ([study_tasks.entities(scale)] if scale == "laptop" else [])


STUDY = study.Study(
    name="electra",
    title="Replaced tokens against masked LM at equal compute",
    about="All rows have the same encoder, text and compute: the number of steps is inversely "
    "proportional to the FLOPs of the objective's step, generator included. All-tokens MLM "
    "predicts the original of every token of ELECTRA's input, and may copy it. Paper: models of "
    "BERT_BASE's size, the average over GLUE.",
    laptop=f"{study_tasks.LAPTOP} The generator has half the hidden size. Without --glue_dir, R8 "
    "classification (its test set as dev) takes the place of GLUE.",
    limits="Each encoder is pre-trained once, and for so few steps that the generator is little "
    "better than word frequencies: the discriminator has to find random words of the language. "
    "Differences beyond the spread of the seeds show what a small model learns first, not what is "
    "better after a million steps.",
    rows=rows,
    tasks=tasks,
)

if __name__ == "__main__":
    study.main(STUDY)
