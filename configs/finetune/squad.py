"""SQuAD 1.1, or with `:v2` SQuAD 2.0, in which questions may have no answer.

Source: Devlin et al. (2018), sections 4.2 and 4.3: 3 epochs of batch 32 for 1.1, 2 epochs of batch
48 for 2.0, learning rate 5e-5; windows of 384 tokens with a stride of 128, as in the released code.

Expected time: not measured.
Expected result: exact match and F1 on dev in tables 2 and 3: 80.8 and 88.5 (1.1, BERT_BASE), 84.1
and 90.9 (1.1, BERT_LARGE), 78.7 and 81.9 (2.0, BERT_LARGE). Not run at full size.

    python -m bert_jax.finetune --config=configs/finetune/squad.py --workdir=runs/squad \
        --config.init_from=runs/base \
        --config.data.train=train-v1.1.json --config.data.dev=dev-v1.1.json

    python -m bert_jax.finetune --config=configs/finetune/squad.py:v2 --workdir=runs/squad2 \
        --config.init_from=runs/base \
        --config.data.train=train-v2.0.json --config.data.dev=dev-v2.0.json

A path may be `tfds:squad` or `tfds:squad/v2.0`, prepared as ArrayRecord, or a .jsonl file of your
own: {"id": ..., "question": ..., "context": ..., "answers": [{"text": ..., "answer_start": ...}]}
on each line, with `[]` for no answer (`:v2`). Ids are text or whole numbers, and written as text.
`predictions/dev` in the workdir holds predictions.json, nbest_predictions.json and, for 2.0,
null_odds.json, as the official scripts expect. In 2.0 a question is left unanswered if its null
odds exceed the threshold that is best on dev, which the checkpoint stores. `:runlocal` and
`:v2,runlocal` are smoke runs; `:v1,electra_base` has the recipe for a descendant of BERT, from
configs/finetune/recipes.py.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import fields, recipes
from bert_jax.runtime.config_fields import AT_LEAST_1, Field

DATA_PATHS = {
    "data.train": Field("", "Questions to train on."),
    "data.dev": Field("", "Its F1 selects the best checkpoint."),
    "data.test": Field("", "Only answered by the best checkpoint, and scored if it has answers."),
    "data.hub": fields.HUB,
    "data.data_dir": Field("", "Directory of prepared TFDS sets; default: TFDS's own."),
}
DATA = {
    "data.null_answers": Field(False, "Questions may have no answer."),
    "data.null_threshold": Field(
        None,
        "For 2.0: null odds above which a question is left unanswered. Default: the best on dev; "
        "without dev labels, the threshold stored with the head of `init_from`, or else 0.",
        kind=float,
    ),
    "data.doc_stride": Field(
        128, "Tokens between the starts of the windows of a context.", AT_LEAST_1
    ),
    "data.max_query_length": Field(64, "Tokens; longer questions are truncated."),
    "data.max_answer_length": Field(30, "Tokens; longer spans are never predicted.", AT_LEAST_1),
}


def get_config(arg: str = "v1") -> ConfigDict:
    version, _, rest = arg.partition(",")
    if version == "runlocal":
        version, rest = "v1", version
    if version not in ("v1", "v2"):
        raise ValueError(f"unknown argument {arg!r} after the colon: expected 'v1' or 'v2'")
    config = fields.make_task_config("squad", DATA_PATHS | DATA)
    config.data.null_answers = version == "v2"
    config.max_seq_length = 384
    config.batch_size = 48 if version == "v2" else 32
    config.num_epochs = 2.0 if version == "v2" else 3.0
    config.learning_rate = 5e-5
    recipe, rest = recipes.split_recipe(rest)
    if recipe:
        tasks = ("squad", "squad_v2") if version == "v2" else ("squad",)
        recipes.apply_recipe(config, recipe, *tasks)
    config = fields.apply_runlocal(config, rest)
    if rest:  # With 32 tokens a context takes many windows.
        config.data.doc_stride, config.data.max_query_length = 8, 8
        config.max_train_examples = config.max_eval_examples = 16
    return config
