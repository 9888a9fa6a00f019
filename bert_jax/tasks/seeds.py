"""What several runs of one fine-tuning come to: median, spread, and runs that learned nothing."""

import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from bert_jax.data.features import NO_LABEL, Feature
from bert_jax.tasks.task import Outputs
from bert_jax.training.checkpoint import saved_steps


def directories_of_seeds(workdir: pathlib.Path, first: int, count: int) -> dict[int, pathlib.Path]:
    """For each seed that of its run: `workdir`, or if there are several `seed_N` in it.

    Raises ValueError if `workdir` holds runs of others, which `result.json` would leave out.
    """
    if count > 1 and _holds_run(workdir):
        raise ValueError(f"{workdir} holds a run of one seed: give several another --workdir")
    wanted = range(first, first + count)
    found = [
        int(path.name.removeprefix("seed_"))
        for path in workdir.glob("seed_*")
        if path.name.removeprefix("seed_").isdecimal() and _holds_run(path)
    ]
    if found and (count == 1 or not set(found) <= set(wanted)):
        low, high = min(*found, *wanted), max(*found, *wanted)
        raise ValueError(
            f"{workdir} holds runs of the seeds {', '.join(map(str, sorted(found)))}: give another "
            f"--workdir, or go on with these by --config.seed={low} "
            f"--config.num_seeds={max(high - low + 1, 2)}"
        )
    return {seed: workdir / f"seed_{seed}" if count > 1 else workdir for seed in wanted}


def _holds_run(directory: pathlib.Path) -> bool:
    return bool(saved_steps(directory / "best") or saved_steps(directory / "checkpoints"))


def collapsed(kind: str, features: Sequence[Feature], outputs: Outputs) -> bool:
    """Whether all predictions are one class: a run that has learned nothing but the majority.

    Of values, whether they spread less than a thousandth of what the labels do, or without labels
    of the largest value. Of tags those of words count, or where no feature says which these are,
    all between [CLS] and [SEP].
    """
    if kind == "regression":
        labels = [feature.label for feature in features if feature.label is not None]
        scale = (np.ptp(labels) if labels else 0) or np.abs(outputs).max()
        return bool(np.ptp(outputs) <= 1e-3 * scale)
    if kind == "embedding" or outputs[0].size == 1:  # Vectors, or numbers: all alike.
        return float(np.ptp(np.concatenate(outputs), axis=0).max()) < 1e-3
    if kind == "tagging":
        pairs = zip(features, outputs, strict=True)
        tags = [output[_judged(feature)].argmax(-1) for feature, output in pairs]
        return len(np.unique(np.concatenate(tags))) == 1
    if kind == "span":  # All at [CLS]: no answer anywhere.
        return not any(each.argmax(axis=0).any() for each in outputs)
    return len({int(each.argmax()) for each in outputs}) == 1


def _judged(feature: Feature):
    return slice(1, -1) if feature.label is None else feature.label != NO_LABEL


def summary(results: list[dict], metric: str) -> dict:
    """What several seeds come to: of each metric the median, the least and the most.

    A seed lacks the scores of a type of entities that it does not predict, if no example has that
    type: they count as 0, as 0 / 0 does in `entity_scores`.
    """
    splits = [name for name, value in results[0].items() if isinstance(value, dict)]
    combined = {}
    for split in splits:
        for name in dict.fromkeys(name for result in results for name in result[split]):
            values = [result[split].get(name, 0.0) for result in results]
            combined[f"{split}/{name}"] = {
                "median": statistics.median(values),
                "least": min(values),
                "most": max(values),
            }
    return {
        "metric": metric,
        "scores": combined,
        "collapsed_seeds": [result["seed"] for result in results if result.get("collapsed")],
        "seeds": results,
        "seconds": sum(result["seconds"] for result in results),
    }


def table_of_seeds(results: list[dict]) -> str:
    """A line for each seed, and one for their median and spread."""
    lines = []
    for result in results:
        line = f"seed {result['seed']}, step {result['best_step']}"
        for name, value in result.items():
            if isinstance(value, dict):
                line += f"; {name}: {shown(value)}"
        lines.append(line + ("; collapsed to one class" if result.get("collapsed") else ""))
    for name, value in summary(results, "")["scores"].items():
        lines.append(
            f"median of {len(results)}: {name} {value['median']:.4f} "
            f"({value['least']:.4f} to {value['most']:.4f})"
        )
    return "\n".join(lines)


def shown(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
