"""The fields of sweeps: default, meaning, bounds, and which may change."""

from bert_jax.runtime.config_fields import AT_LEAST_0, AT_LEAST_1, Field

# The fields of every sweep.
FIELDS = {
    "base": Field({}, "The fine-tuning run; all of its fields are set as --config.base.FIELD."),
    "base_config": Field("", "Its config file, for the command of the best trial in the report."),
    "num_seeds": Field(
        1, "Trials per configuration, with seeds starting at `base.seed`.", AT_LEAST_1
    ),
    "max_stacked_trials": Field(
        0,
        "Trials that differ only in seed, learning rate, weight decay, warm-up, epochs, patience "
        "or dropout train as one program, of at most this many, to limit memory; 0: no limit (on "
        "a CPU: mesh.trial).",
        AT_LEAST_0,
    ),
    "prune_from_evaluation": Field(
        0,
        "From this evaluation on (1: the first), stops trials whose best score is below the median "
        "of the others of their program, of which there must be at least 4. 0: never.",
        AT_LEAST_0,
    ),
    "keep_trials": Field(
        0, "Keeps only the weights of the best N trials; 0 keeps all.", AT_LEAST_0
    ),
}

# Those of a grid, such as paper.py.
GRID = {
    "grid": Field(
        {},
        "The values of each field; all combinations are run. A field of `base.model` is nested "
        "here.",
    ),
    "trials": Field(
        (),
        'More configurations, each a dict such as {"learning_rate": 1e-4, '
        '"model.dropout_rate": 0.2}.',
    ),
    "train_fractions": Field(
        (),
        "Fractions of the training data, such as 0.1, 0.3 and 1.0: each configuration is trained "
        "on each of them, as `base.train_fraction`, and the report has learning curves.",
    ),
}

# Those of a search, such as search.py.
SEARCH = {
    "search": Field(
        {},
        'The distribution of each field: ("uniform", LOW, HIGH), ("log_uniform", LOW, HIGH), '
        '("integer", LOW, HIGH) or ("choice", VALUE, ...). A field of `base.model` is nested here.',
    ),
    "num_trials": Field(32, "Number of configurations in total.", AT_LEAST_1),
    "trials_per_round": Field(
        16, "Configurations proposed at once, which train as stacks.", AT_LEAST_1
    ),
    "halving": Field(
        (),
        "Numbers of epochs, such as 1 and 3: all configurations of a round get the first; the best "
        "third of them (3 / 1 = 3) then get the second. Empty: all get `base.num_epochs`.",
    ),
}

# Fields that may differ when a sweep is resumed, beside those of its trials.
MAY_CHANGE = ("base_config", "keep_trials")
