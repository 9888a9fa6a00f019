"""Masked diffusion from scratch on little text, 1 to 100 MB: a BERT_MINI that generates text.

Source: the objective is that of Sahoo et al. (2024) and Nie et al. (2025), whose models are far
larger; the other settings are those of small_corpus.py.

Expected time: 1.7 times the FLOPs of small_corpus.py, as it predicts at all positions: about 270
minutes on two cores by that file's estimate. Not run to the end; experiments/reports/diffusion.md
has short runs of a smaller model on a toy language.
Expected result: a bound (diffusion_loss, in nats per token) below `unigram_entropy` in result.json.

    python tools/prepare_corpus.py --input='texts/*.txt' --documents=files --vocab=vocab.txt \
        --rows=full_sentences --output=corpus/16 --max_seq_length=16 --heldout_fraction=0.1
    python tools/prepare_corpus.py --input='texts/*.txt' --documents=files --vocab=vocab.txt \
        --rows=full_sentences --output=corpus/64 --max_seq_length=64 --heldout_fraction=0.1
    python -m bert_jax.pretrain --config=configs/pretrain/diffusion_small.py \
        --workdir=runs/diffusion --config.corpus=corpus/16 --config.long_phase.corpus=corpus/64

Then bert_jax.load("runs/diffusion").generate("The river", length=20) samples. To continue from an
encoder instead, whose masked-LM head helps: --config=configs/pretrain/continue.py
--config.init_from=DIR --config.objective=masked_diffusion --config.next_sentence=False.

`diffusion_small.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields, small_corpus


def get_config(arg: str = "") -> ConfigDict:
    config = small_corpus.get_config()
    config.objective = "masked_diffusion"
    config.next_sentence = False
    return fields.apply_runlocal(config, arg)
