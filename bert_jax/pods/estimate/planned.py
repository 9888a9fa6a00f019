"""The phases and the tokenizer of a run that is estimated, also without its corpora."""

import types
from collections.abc import Mapping

from ml_collections import ConfigDict

from bert_corpus.config import default_max_sequences
from bert_jax.configs.pretrain.fields import phases_of
from bert_jax.model.config import BertConfig
from bert_jax.objectives import find_objective
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.phases import (
    Phase,
    check_numbers,
    open_phases,
    phase_configs,
    plan_phase,
)

# The released English vocabularies that differ from BERT's: the size, and how texts are joined.
RELEASED = {
    "roberta": (50265, Layout(2, has_segments=False)),
    "longformer": (50265, Layout(2, has_segments=False)),
    "albert": (30000, Layout()),
    "modernbert": (50368, Layout(1, has_segments=False)),
    "mpnet": (30527, Layout(2, has_segments=False)),
    "deberta": (128100, Layout()),
    "xlnet": (32000, Layout(cls_last=True)),
}


def released_tokenizer(model: Mapping) -> types.SimpleNamespace:
    """Returns what a step reads from a tokenizer with the released English vocabulary of a model.

    `model` is that of a configuration. All but the size and the layout is BERT's, as it changes no
    shape; so are the ids, but for the separator of RoBERTa, which Longformers look for.
    """
    family = model.get("family") or model.get("architecture")
    vocab_size, layout = RELEASED.get(family, (BertConfig().vocab_size, Layout()))
    return types.SimpleNamespace(
        vocab_size=vocab_size,
        special_ids=(0, 100, 101, 102, 103),
        sep_id=2 if layout.num_separators == 2 else 102,
        mask_id=103,
        layout=layout,
        word_start=(True,) * vocab_size,
    )


UNCASED_ENGLISH = released_tokenizer({"family": "bert"})


def has_corpus(config: ConfigDict) -> bool:
    """Returns whether any phase of a pre-training configuration names a corpus."""
    return any(phase.corpus for phase in phase_configs(config).values())


def plan_run(
    config: ConfigDict, lengths: tuple[int | None, int | None] = (None, None)
) -> tuple[list[Phase], Tokenizer | types.SimpleNamespace]:
    """Returns the phases of a run and its tokenizer, from its corpora if it has any.

    `lengths` are those of `planned_phases`. Raises ValueError for an invalid configuration, and for
    lengths beside a corpus.
    """
    check_numbers(config)
    if has_corpus(config):
        for name, length in zip(("max_seq_length", "long_max_seq_length"), lengths, strict=True):
            if length:
                raise ValueError(f"--{name} has no effect with a corpus: remove it")
        phases = open_phases(config)
        return phases, phases[0].train.tokenizer
    return planned_phases(config, lengths), released_tokenizer(config.model)


def planned_phases(
    config: ConfigDict, lengths: tuple[int | None, int | None] = (None, None)
) -> list[Phase]:
    """Returns the phases of a run, without reading corpora.

    `lengths` are those of the rows of the first phase, and of others. None: what the configuration
    says, or else 128 tokens, and 512 of a later phase with a corpus of its own.
    """
    groups = phases_of(config)
    phases, objective_class = [], find_objective(config.objective)
    for name, phase_config in phase_configs(config).items():
        is_later = bool(name)
        length = lengths[is_later] or phase_config.max_seq_length or (128, 512)[is_later]
        own = groups[name]
        if phases and not lengths[True] and own.corpus is None and not own.max_seq_length:
            length = phases[-1].train.max_seq_length  # It reads the corpus of the phase before.
        rows = types.SimpleNamespace(
            max_seq_length=length, max_sequences=default_max_sequences(length)
        )
        start = phases[-1].stop if phases else 0
        phases.append(plan_phase(phase_config, objective_class, name, rows, None, start))
    return phases
