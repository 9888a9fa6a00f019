r"""TinyBERT's general distillation from BERT_BASE: 4 layers, hidden 312; 14 M parameters.

Source: Jiao et al. (2020), sections 3.1 and 4.2, and the released code (huawei-noah): the sum of
the mean squared errors of attention scores before the softmax, of the outputs of layers and of the
embeddings, the latter two through one learned dense layer; layer m of the student is compared with
layer 3 m of the teacher. Three passes over Wikipedia in rows of 128 tokens, batches of 256, the
rest as BERT's pre-training; learning rate 5e-5 after a warm-up of 10 % in the code. There is no
masked-LM loss: the student has no masked-LM head, and no perplexity.

TinyBERT6 is --config.model.num_layers=6 --config.model.hidden_size=768
--config.model.intermediate_size=3072 (67 M parameters). The number of steps is three passes over
2.5 G words: adapt it to your corpus.

Expected time: not run at full size.
Expected result: on the test set of GLUE, MNLI-m 82.5, and with 6 layers 84.6 (BERT_BASE: 83.9);
SQuAD 1.1 F1 on dev 82.1, with 6 layers 87.5: after distilling in fine-tuning, too, on augmented
data. Not run at full size. Fine-tuning here has soft targets (--config.teacher), but neither
layer losses nor augmented data.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=corpus/128 \
        --rows=full_sentences --max_seq_length=128 --output=tinybert/128
    python -m bert_jax.pretrain --config=configs/pretrain/tinybert.py --workdir=runs/tinybert \
        --config.distillation.teacher=runs/base --config.corpus=tinybert/128

`tinybert.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_base.get_config()
    config.objective = "distillation"
    config.next_sentence = False
    config.distillation.weights.soft = 0.0
    config.distillation.weights.mlm = 0.0
    config.distillation.weights.cosine = 0.0
    config.distillation.weights.attention = 1.0
    config.distillation.weights.hidden = 1.0
    config.distillation.weights.embeddings = 1.0
    config.model.num_layers = 4
    config.model.hidden_size = 312
    config.model.num_heads = 12
    config.model.intermediate_size = 1200

    config.num_steps = 310_000
    config.long_phase.num_steps = 0  # There are no longer rows.
    config.shard_weight_update = True
    config.learning_rate = 5e-5
    config.warmup_steps = 31_000
    return fields.apply_runlocal(config, arg)
