"""GLUE: `glue.py:TASK` with cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli or ax.

Source: Devlin et al. (2018), section 4.1: batch 32, 3 epochs, the best of the learning rates 5e-5,
4e-5, 3e-5 and 2e-5 on the development set; of several seeds the best for BERT_LARGE.

Expected result: BERT_BASE in table 1, on the test sets as the benchmark's server scores them: MNLI
84.6 and 83.4 (matched, mismatched; accuracy), QQP 71.2 (F1), QNLI 90.5, SST-2 93.5 (accuracy), CoLA
52.1 (Matthews), STS-B 85.8 (Spearman), MRPC 88.9 (F1), RTE 66.4 (accuracy). Not run at full size
here: the data is not to be had from a package index.
Expected time: not measured.

    python -m bert_jax.finetune --config=configs/finetune/glue.py:mrpc --workdir=runs/mrpc \
        --config.init_from=runs/base --config.data.directory=glue_data

`directory` is the GLUE download (with CoLA, SST-2, ... in it), or tfds:glue/mrpc, prepared as
ArrayRecord. What the benchmark's server takes lies in `predictions` of the workdir, as MRPC.tsv and
so on; `python tools/glue_submission.py runs/* --output=submission.zip` collects it.

With `--config.num_epochs=0` and the workdir of such a run as `init_from` nothing is trained:
train.tsv is not read, and dev.tsv scored if it is there. A run of mnli predicts the diagnostic set
too, if the download has it; `:ax` predicts it and trains nothing. The paper leaves WNLI out and
submits its majority class.
"""

from ml_collections import ConfigDict

from configs.finetune import text_classification


def get_config(arg: str = "") -> ConfigDict:
    name, _, arg = arg.partition(",")
    config = text_classification.get_config()
    config.task = "glue"
    config.data = ConfigDict()
    config.data.name = name
    config.data.directory = ""
    config.data.labels = ()  # Of the checkpoint's head in its order, where that is another.
    config.data.metric = ""  # Decides which checkpoint is kept; the one of table 1, if not given.
    config.num_epochs = 0.0 if name == "ax" else 3.0
    config.learning_rate = 2e-5
    epochs = config.num_epochs
    config = text_classification.cut_down(config, arg)
    config.num_epochs = min(config.num_epochs, epochs)
    return config
