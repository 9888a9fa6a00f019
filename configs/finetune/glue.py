"""GLUE: `glue.py:TASK` with cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.

Source: Devlin et al. (2018), section 4.1: batch 32, 3 epochs, the learning rate of 5e-5, 4e-5, 3e-5
and 2e-5 that is best on dev; for BERT_LARGE also the best of several seeds.

Expected time: not measured.
Expected result: table 1 gives for BERT_BASE, on the test sets: MNLI 84.6 and 83.4 (matched and
mismatched accuracy), QQP 71.2 (F1), QNLI 90.5, SST-2 93.5 (accuracy), CoLA 52.1 (Matthews), STS-B
85.8 (Spearman), MRPC 88.9 (F1), RTE 66.4 (accuracy). Not run at full size.

    python -m bert_jax.finetune --config=configs/finetune/glue.py:mrpc --workdir=runs/mrpc \
        --config.init_from=runs/base --config.data.directory=glue_data

`glue.py:mrpc,roberta` has the recipe for a descendant of BERT, from recipes.py: roberta,
distilbert, albert, electra_small, electra_base, electra_large or spanbert.

`directory` is the GLUE download (with the folders CoLA, SST-2, ...), or tfds:glue/mrpc, prepared as
ArrayRecord. A run writes the file for the benchmark's server to `predictions` in its workdir, such
as MRPC.tsv; `python tools/glue_submission.py runs/* --output=submission.zip` collects these files.

A run of mnli also predicts the diagnostic set if the download has it. Without training,
`python -m bert_jax.predict --model=runs/mrpc --input=glue_data --output=DIR` predicts the same
files. The paper omits WNLI and submits its majority class.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import fields, recipes
from bert_jax.runtime.config_fields import Field

DATA_PATHS = {
    "data.directory": Field("", "The GLUE download, the folder of this set, or tfds:glue/NAME."),
    "data.data_dir": Field("", "Directory of prepared TFDS sets; default: TFDS's own."),
}
DATA = {
    "data.name": Field("", "The set: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli."),
    "data.labels": Field((), "Order of the classes in the head; default: that of the set."),
    "data.metric": Field("", "Selects the best checkpoint; default: the one in table 1."),
}


def get_config(arg: str = "") -> ConfigDict:
    name, _, arg = arg.partition(",")
    config = fields.make_task_config("glue", DATA_PATHS | DATA)
    config.data.name = name
    config.num_epochs = 3.0
    config.learning_rate = 2e-5
    recipe, arg = recipes.split_recipe(arg)
    if recipe:
        recipes.apply_recipe(config, recipe, name)
    return fields.apply_runlocal(config, arg)
