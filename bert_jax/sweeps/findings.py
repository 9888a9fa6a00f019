"""What the scores of a sweep say of its fields: values at the edge of a range, and importance."""

import importlib.util
import math
from collections.abc import Sequence

from ml_collections import ConfigDict

from bert_jax.runtime.config_fields import flatten
from bert_jax.sweeps.configurations import format_value
from bert_jax.sweeps.plots import is_numeric
from bert_jax.sweeps.summaries import Summary

MIN_CONFIGURATIONS = 20
"""With fewer, the best tenth, which PED-ANOVA compares with all, would be a single one."""

EDGE = 0.05
"""Part of a range, of `log_uniform` on a logarithmic scale, that counts as its edge."""


def at_edges(config: ConfigDict, summaries: Sequence[Summary], best: Summary) -> list[str]:
    """Returns a sentence for each field whose best value is at the edge of what was tried.

    In a grid that is the smallest or largest of at least three numbers; in a search, the lowest or
    highest 5 % of a range. There is nothing below an edge at 0.
    """
    search, sentences = flatten(config.get("search", ConfigDict())), []
    for name in compared_fields(config, summaries):
        value, tried = best.configuration.values[name], values_of(summaries, name)
        kind, *limits = search.get(name, ("grid", *tried))
        if kind == "choice" or not is_numeric(limits):
            continue
        if kind == "grid" and len(tried) < 3:
            continue
        low, high = min(limits), max(limits)
        scale = math.log if kind == "log_uniform" else float
        width = EDGE * (scale(high) - scale(low)) if kind.endswith("uniform") else 0.0
        is_low = scale(value) <= scale(low) + width
        is_high = scale(value) >= scale(high) - width
        if is_high or (is_low and low != 0):
            edge, others = (high, "larger") if is_high else (low, "smaller")
            sentences.append(
                f"{name}={format_value(value)} is at the edge of its range, "
                f"{format_value(edge)}: {others} values may be better."
            )
    return sentences


def importances(config: ConfigDict, summaries: Sequence[Summary]) -> dict[str, float]:
    """Returns the importance of each field that varies, largest first; their sum is 1.

    By Optuna's PED-ANOVA (Watanabe et al., 2023): how much the values of the best tenth of the
    configurations differ from those of all. Returns {} without Optuna, if only one field varies, or
    for fewer than `MIN_CONFIGURATIONS` with a score. Of a search with `halving`, those of its first
    number of epochs count, which all configurations have; of `train_fractions`, the largest.
    """
    fields = compared_fields(config, summaries)
    scored = [each for each in with_most_examples(config, summaries) if each.median > -math.inf]
    if halving := config.get("halving", ()):
        scored = [each for each in scored if each.configuration.values["num_epochs"] == halving[0]]
    if (
        len(scored) < MIN_CONFIGURATIONS
        or len(fields) < 2
        or not importlib.util.find_spec("optuna")
    ):
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = flatten(config.get("search", ConfigDict()))
    distributions = {}
    for name in fields:
        kind, *limits = search.get(name, ("choice", *values_of(scored, name)))
        if kind == "choice":  # Also of tuples, which Optuna does not store.
            choices = list(dict.fromkeys(map(format_value, limits)))
            distributions[name] = optuna.distributions.CategoricalDistribution(choices)
        elif kind == "integer":
            distributions[name] = optuna.distributions.IntDistribution(*limits)
        else:
            is_log = kind == "log_uniform"
            distributions[name] = optuna.distributions.FloatDistribution(*limits, log=is_log)
    study = optuna.create_study(direction="maximize")
    for summary in scored:
        params = {}
        for name, distribution in distributions.items():
            value = summary.configuration.values[name]
            if isinstance(distribution, optuna.distributions.CategoricalDistribution):
                params[name] = format_value(value)
            else:  # Rounded to three digits, a value may be slightly outside.
                params[name] = min(max(value, distribution.low), distribution.high)
        study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=distributions, value=summary.median
            )
        )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def compared_fields(config: ConfigDict, summaries: Sequence[Summary]) -> list[str]:
    """Returns the fields that vary, without those that `halving` or `train_fractions` set."""
    names = [*summaries[0].configuration.values]
    if len(config.get("train_fractions", ())) > 1:
        names.remove("train_fraction")
    if "search" in config and "num_epochs" not in config.search:
        names.remove("num_epochs")
    return names


def with_most_examples(config: ConfigDict, summaries: Sequence[Summary]) -> list[Summary]:
    """Returns the summaries of the largest of `train_fractions`; without them, all."""
    if len(fractions := config.get("train_fractions", ())) < 2:
        return [*summaries]
    return [s for s in summaries if s.configuration.values["train_fraction"] == max(fractions)]


def values_of(summaries: Sequence[Summary], name: str) -> list:
    """Returns the different values of a field."""
    return list(dict.fromkeys(summary.configuration.values[name] for summary in summaries))
