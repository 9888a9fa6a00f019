"""Builds a corpus on one machine: shuffled shards of packed rows, and a manifest.

Worker processes tokenize units of the input, each into a file that is ordered by shard; then they
read the parts of each shard from all of these files, and write its rows. A unit or shard is
finished once its .json exists: the same command resumes an interrupted build. Randomness depends on
the seed, the text and the number of the shard, not on the number of processes.
"""

import collections
import functools
import json
import os
import pathlib
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import tqdm

from bert_corpus import writing
from bert_corpus.cleaning import near_duplicates
from bert_corpus.config import CorpusConfig
from bert_corpus.manifest import check_skipped
from bert_corpus.parallel import usable_cores, worker_processes
from bert_corpus.plan import SAMPLES, Plan
from bert_corpus.steps import Part, Report
from bert_jax.tokenizers.tokenizer import Tokenizer

SPILL_BYTES = 1 << 24  # of tokens, which a worker buffers before it writes them


def build_corpus(
    inputs: str | Sequence[str],
    tokenizer: Tokenizer,
    output: str | os.PathLike,
    config: CorpusConfig,
    overwrite: bool = False,
    num_processes: int = 0,
) -> dict:
    """Builds a corpus of `inputs`, as in `find_inputs`; see `run_processes`."""
    return run_processes(Plan(inputs, tokenizer, config), output, overwrite, num_processes)


def run_processes(
    plan: Plan,
    output: str | os.PathLike,
    overwrite: bool = False,
    num_processes: int = 0,
    extra_files: Callable[[dict, dict], dict[str, bytes]] | None = None,
) -> dict:
    """Builds a corpus in the directory `output` and returns its manifest.

    `output`, here or on a bucket, is new, empty, left by an interrupted build, which is resumed, or
    a corpus to `overwrite`, which stays until the new one is finished. The output is the same for
    any `num_processes`; 0 means one per core. `extra_files` returns additional files, by name, from
    the manifest and the samples.

    Raises OSError or ValueError for an invalid input, or an output that is not writable.
    """
    units = [f"unit-{number:06d}" for number in range(len(plan.units))]
    names = [name for *_, name in plan.files]
    # Starting a process takes as long as building a few shards.
    num_processes = min(num_processes or usable_cores(), len(units))
    with writing.open_scratch(output, plan.fingerprint(), overwrite) as scratch:
        with worker_processes(functools.partial(_run, plan, scratch), num_processes) as ordered_map:
            report, _ = _run_all(ordered_map, scratch, _spill_unit, units, "text")
            check_skipped(report.skipped, plan.config.text_field)
            if plan.config.near_duplicates:
                _find_near_duplicates(scratch, units)
            shard_report, entries = _run_all(ordered_map, scratch, _build_shard, names, "rows")
        report.add(shard_report)
        manifest, files = plan.manifest(entries, report), plan.metadata_files(report)
        if extra_files:
            files |= extra_files(manifest, json.loads(files[SAMPLES]))
        for name, content in files.items():
            with writing.replace_file(scratch / name) as stream:
                stream.write(content)
        writing.publish(scratch, output, [*names, *files], manifest)
    return manifest


def _run_all(
    ordered_map: Callable, scratch: pathlib.Path, job: Callable, names: list[str], description: str
) -> tuple[Report, list]:
    """Runs `job` for each name that has no result yet; returns the sum of reports, and results."""
    paths = [scratch / f"{name}.json" for name in names]
    remaining = [(job, n, names[n]) for n, path in enumerate(paths) if not path.exists()]
    first = len(names) - len(remaining)
    results = ordered_map(remaining)
    for _ in tqdm.tqdm(results, description, len(names), initial=first, unit=" parts"):
        pass
    report, results = Report(), []
    for path in paths:
        fields, result = json.loads(path.read_bytes())
        report.add(Report(**fields))
        results.append(result)
    return report, results


def _run(plan: Plan, scratch: pathlib.Path, item: tuple[Callable, int, str]) -> None:
    """Runs a job, whose result is a file that is written last."""
    job, number, name = item
    report = Report()
    result = job(plan, scratch / name, number, report)
    with writing.replace_file(scratch / f"{name}.json") as stream:
        stream.write(json.dumps((vars(report), result)).encode())


def _spill_unit(plan, path, number, report) -> None:
    """Writes the parts of a unit, ordered by shard, and their offsets.

    Uses one file, because each file costs an fsync. After the parts come int64 `[writes, shards +
    1]`, the offsets at which the parts of each shard begin and end, and the offset of this array.
    """
    parts, num_bytes, offsets = collections.defaultdict(list), 0, []
    with writing.replace_file(path) as stream:

        def write():
            start = stream.tell()
            blobs = [pickle.dumps(parts.pop(n, [])) for n in range(len(plan.files))]
            stream.write(b"".join(blobs))
            offsets.append(np.cumsum([start, *map(len, blobs)], dtype=np.int64))

        for shard, part in plan.tokenize(number, report):
            parts[shard].append(part)
            num_bytes += sum(map(len, part.sentences))
            if num_bytes > SPILL_BYTES:
                write()
                num_bytes = 0
        write()
        stream.write(np.array([*np.concatenate(offsets), stream.tell()], np.int64).tobytes())
    if plan.config.near_duplicates:
        with writing.replace_file(path.with_suffix(".keys")) as stream:
            np.save(stream, np.array(report.keys, np.uint64))
    report.keys = []


def _find_near_duplicates(scratch: pathlib.Path, units: list[str]) -> None:
    keys = [np.load(scratch / f"{unit}.keys", mmap_mode="r") for unit in units]
    num_columns = max(array.shape[-1] for array in keys)  # Units without documents have none.
    keys = [array.reshape(len(array), num_columns) for array in keys]
    columns = (np.concatenate([array[:, n] for array in keys]) for n in range(num_columns))
    with writing.replace_file(scratch / "near_duplicates") as stream:
        np.save(stream, near_duplicates(next(columns, np.zeros(0)), columns))


def _build_shard(plan, path, number, report) -> dict:
    """Writes the rows of a shard; returns its entry for the manifest."""
    parts, dropped = _read_parts(plan, path.parent, number), ()
    if plan.config.near_duplicates:
        dropped = np.load(path.with_name("near_duplicates"), mmap_mode="r")
    return plan.write_shard(path.parent, number, parts, dropped, report)


def _read_parts(plan: Plan, scratch: pathlib.Path, shard: int) -> list[Part]:
    parts = []
    for unit in range(len(plan.units)):
        with open(scratch / f"unit-{unit:06d}", "rb") as stream:
            end = stream.seek(-8, os.SEEK_END)
            (start,) = np.frombuffer(stream.read(), np.int64).tolist()
            for offset in range(start + 8 * shard, end, 8 * (len(plan.files) + 1)):
                stream.seek(offset)
                stream.seek(*np.frombuffer(stream.read(8), np.int64).tolist())
                parts += pickle.load(stream)
    return parts
