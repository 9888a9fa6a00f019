"""ModernBERT-base: 22 layers, hidden 768, 12 heads, rows of 1,024 tokens; 149 M parameters.

Source: Warner et al. (2024), and the open recipe of Ettin (Weller et al., 2025): masked LM alone,
masks of 30 %, batches of 4,608 rows of 1,024 tokens, learning rate 8e-4, Adam with beta2 0.98 and
epsilon 1e-6, weight decay 1e-5.

Not yet as in these recipes: AdamW with clipping in place of StableAdamW; one linear warm-up and
decay in place of warm-up, constant and decay; one phase of 1,024 tokens, with 30 % masks to its
end; batches of one size; no dropout, which they have (0.1) at attention's output alone. `num_steps`
is that of 100 G tokens.

Expected time: not run at full size, and there is no TPU kernel for its layers yet.
Expected result: MNLI-m 89.1 in the paper, on 2 T tokens. Not run at full size.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=MODEL --rows=full_sentences \
        --max_seq_length=1024 --output=corpus/1024
    python -m bert_jax.pretrain --config=configs/pretrain/modernbert_base.py --workdir=runs/modern \
        --config.corpus=corpus/1024

MODEL is a directory with a tokenizer, such as one of ModernBERT. `modernbert_base.py:runlocal` runs
a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields
from bert_jax.runtime.config_fields import make_config


def get_config(arg: str = "") -> ConfigDict:
    of_bert = {name for name in fields.TRAINING if name.startswith("model.")}
    others = {name: field for name, field in fields.FIELDS.items() if name not in of_bert}
    config = make_config(others | fields.MODERNBERT)
    config.program = "pretrain"
    config.next_sentence = False
    config.masking.rate = 0.3
    config.num_steps = 21_000
    config.long_phase.num_steps = 0
    config.batch_size = 4608
    config.optimizer = "adamw"
    config.learning_rate = 8e-4
    config.warmup_steps = 1000
    config.decay_from = "warmup_end"
    config.weight_decay = 1e-5
    config.beta2 = 0.98
    return fields.apply_runlocal(config, arg)
