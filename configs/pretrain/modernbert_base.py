"""ModernBERT-base: 22 layers, hidden 768, 12 heads; 149 M parameters, 2 T tokens in eight phases.

Source: Warner et al. (2024), section 2.3, and the released configurations of ModernBERT and of
Ettin (Weller et al., 2025), which agree in what follows: masked LM alone, masks of 30 %;
StableAdamW, beta2 0.98, epsilon 1e-6; dropout of 0.1, of attention's output alone. Their weight
decay shrinks weights by 1e-5 per step at the peak of the learning rate. Here it is multiplied by
the rate: 1e-5 / 8e-4 = 0.0125, the same up to phase 7.

    phase        tokens     rows                   learning rate
    first, 3-6   10 G each  768, 1,536 .. 3,840    warm-up over 3 G tokens, then 8e-4
    7            1,669 G    4,608 of 1,024 tokens  8e-4
    8            250 G      576 of 8,192 tokens    3e-4; RoPE base 160,000 in global layers
    9            50 G       576 of 8,192 tokens    3e-4, falling to 0 as 1 - sqrt

Differences from the paper: the batch size grows in steps rather than row by row, over 50 G tokens;
the tokens of an update stay the same on rows of 8,192, which the paper does not say. Rows are
packed with sequences that end with their document and attend only to themselves. Steps count full
rows. There is no `long_phase`: phase 3 follows the first. The sizes of Ettin
(--config.model.size=ettin-150m) have the same RoPE bases and maximum length in training.

Ettin instead lets the rate fall to half in phase 8 (1 - sqrt), and has masks of 15 % in phase 9
(--config.later_phases.phase_9.masking.rate=0.15) and one RoPE base in all layers
(--config.later_phases.phase_8.model.local_rope_base=160000).

Expected time: not run at full size. By the compiler's estimates of 2026-11-28, without dropout, an
update takes 6,500 cycles per token on v4 (MFU 47 %), 10,700 on v5e (58 %) and 5,900 on v6e (26 %),
on rows of 1,024 tokens: docs/log/2026-11-modernbert.md.
Expected result: MNLI-m 89.1 in the paper, on 2 T tokens. Not run at full size.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=MODEL --rows=document_sentences \
        --max_seq_length=1024 --output=corpus/1024
    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=MODEL --rows=document_sentences \
        --max_seq_length=8192 --output=corpus/8192
    python -m bert_jax.pretrain --config=configs/pretrain/modernbert_base.py --workdir=runs/modern \
        --config.corpus=corpus/1024 --config.later_phases.phase_8.corpus=corpus/8192

MODEL is a directory with a tokenizer, such as one of ModernBERT. Rows of 1,024 tokens alone, with
the decay in their last steps: --config.later_phases.phase_8.num_steps=0
--config.later_phases.phase_9.num_steps=0. `modernbert_base.py:runlocal` runs a few steps of eight
rows in each phase instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields
from bert_jax.runtime.config_fields import make_config


def get_config(arg: str = "") -> ConfigDict:
    of_bert = {name for name in fields.TRAINING if name.startswith("model.")}
    others = {name: field for name, field in fields.FIELDS.items() if name not in of_bert}
    config = make_config(others | fields.MODERNBERT | fields.GENERATOR)
    config.generator.ties_embeddings = False  # There is no projection of them to another width.
    config.program = "pretrain"
    config.next_sentence = False
    config.masking.rate = 0.3
    # Stated, as Ettin's sizes set others, those of their last phases.
    config.model.global_rope_base = config.model.local_rope_base = 10_000.0
    config.model.max_position_embeddings = 8192
    config.model.attention_output_dropout_rate = 0.1

    config.max_seq_length = 1024
    config.batch_size = 768
    config.num_steps = 12_720
    config.long_phase.num_steps = 0
    longer = {"max_seq_length": 8192, "learning_rate": 3e-4, "model.global_rope_base": 160_000.0}
    config.later_phases = fields.make_later_phases(
        {"batch_size": 1536, "num_steps": 6_360},
        {"batch_size": 2304, "num_steps": 4_240},
        {"batch_size": 3072, "num_steps": 3_180},
        {"batch_size": 3840, "num_steps": 2_540},
        {"batch_size": 4608, "num_steps": 353_710},
        longer | {"batch_size": 576, "num_steps": 52_980},
        {"num_steps": 10_600},
    )

    config.optimizer = "stable_adamw"
    config.learning_rate = 8e-4
    config.warmup_steps = 3_815
    config.decay_steps = 10_600
    config.weight_decay = 0.0125
    config.beta2 = 0.98
    return fields.apply_runlocal(config, arg)
