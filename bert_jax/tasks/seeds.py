"""Fine-tuning runs with several seeds: their directories, and median, min and max scores."""

import pathlib
import statistics

from bert_jax.training.checkpoint import saved_steps


def seed_directories(workdir: pathlib.Path, first: int, count: int) -> dict[int, pathlib.Path]:
    """Returns the workdir of each seed: `workdir` itself, or `workdir/seed_N` for several seeds.

    Raises ValueError if `workdir` holds runs of other seeds, which `result.json` would omit.
    """
    if count > 1 and _holds_run(workdir):
        raise ValueError(f"{workdir} holds a run of one seed: give another --workdir for several")
    wanted = range(first, first + count)
    runs = filter(_holds_run, workdir.glob("seed_[0-9]*"))
    found = sorted(int(path.name.removeprefix("seed_")) for path in runs)
    if found and (count == 1 or not set(found) <= set(wanted)):
        low, high = min(*found, *wanted), max(*found, *wanted)
        raise ValueError(
            f"{workdir} holds runs of the seeds {', '.join(map(str, found))}: give another "
            f"--workdir, or resume these with --config.seed={low} "
            f"--config.num_seeds={max(high - low + 1, 2)}"
        )
    return {seed: workdir / f"seed_{seed}" if count > 1 else workdir for seed in wanted}


def _holds_run(directory: pathlib.Path) -> bool:
    return bool(saved_steps(directory / "best") or saved_steps(directory / "checkpoints"))


def summarize_seeds(results: list[dict], metric: str) -> dict:
    """Returns the median, minimum and maximum of each metric over seeds.

    A seed has no scores for an entity type that it never predicts and no example has: these count
    as 0, as 0 / 0 does in `entity_scores`.
    """
    combined = {}
    for split in (name for name, value in results[0].items() if isinstance(value, dict)):
        for name in dict.fromkeys(name for result in results for name in result[split]):
            values = [result[split].get(name, 0.0) for result in results]
            functions = (statistics.median, min, max)
            combined[f"{split}/{name}"] = {each.__name__: each(values) for each in functions}
    return {
        "metric": metric,
        "scores": combined,
        "collapsed_seeds": [result["seed"] for result in results if result.get("collapsed")],
        "seeds": results,
        "seconds": sum(result["seconds"] for result in results),
    }


def format_scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
