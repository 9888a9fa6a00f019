r"""DistilBERT: six of BERT_BASE's layers, distilled from it; 66 M parameters.

Source: Sanh et al. (2019), and the code of the authors in huggingface/transformers
(examples/research_projects/distillation). The student has no segments, no pooler and no
sentence-pair loss, and starts from the teacher's layers 1, 3, 5, 8, 10 and 12, embeddings and head.
Losses: 5 x soft targets at temperature 2 + 2 x masked LM + 1 x cosine of the last hidden states.
Adam with beta2 0.98, learning rate 5e-4 after a warm-up of 5 %, no weight decay, gradients clipped
to 5; three passes over Wikipedia and books in batches of about 4,000 rows.

Unlike the released code, positions stay trainable, tokens to mask are drawn uniformly and not more
often if they are rare, and soft targets are only computed at the masked positions. The number of
steps is three passes over 3.3 G words in full rows of 512 tokens: adapt it to your corpus.

Expected time: 90 hours on 8 V100 in the paper. Not run at full size here.
Expected result: MNLI-m 82.1 (teacher: 84.7), SQuAD 1.1 F1 86.9 (teacher: 88.5), the latter with
the soft targets of a fine-tuned teacher (--config.teacher in configs/finetune/squad.py). Not run at
full size.

The teacher is a run of bert_base.py, and the corpus has its vocabulary; a transformers model can
also be the teacher, with --vocab=DIR.

    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=corpus/128 \
        --rows=full_sentences --max_seq_length=512 --output=distilbert/512
    python -m bert_jax.pretrain --config=configs/pretrain/distilbert.py --workdir=runs/distilbert \
        --config.distillation.teacher=runs/base --config.long_phase.corpus=distilbert/512
    python tools/convert_checkpoint.py --to=huggingface runs/distilbert exported

`distilbert.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_base.get_config()
    config.objective = "distillation"
    config.next_sentence = False
    config.distillation.init_layers = (1, 3, 5, 8, 10, 12)
    config.model.num_layers = 6
    config.model.family = "distilbert"  # How other libraries store it.
    config.model.type_vocab_size = 0  # No segments.
    config.model.pooler_activation = "relu"  # Below the classifier of a fine-tuned model.

    config.num_steps = 0  # Skips the phase with rows of 128.
    config.long_phase.num_steps = 6_400
    config.batch_size = config.long_phase.batch_size = 4096
    config.per_device_batch_size = 16
    config.shard_weight_update = True
    config.optimizer = "adamw"
    config.learning_rate = 5e-4
    config.warmup_steps = 320
    config.decay_from = "warmup_end"
    config.beta2 = 0.98
    config.weight_decay = 0.0
    config.clip_norm = 5.0
    return fields.apply_runlocal(config, arg)
