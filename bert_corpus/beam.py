"""Builds a corpus with Apache Beam: the same steps and files as `build`, on many machines."""

import argparse
import importlib
import json
import pathlib
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import fsspec
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners import create_runner

from bert_corpus.manifest import check_skipped
from bert_corpus.plan import Plan
from bert_corpus.steps import Report
from bert_corpus.writing import encode_manifest
from bert_jax.data.rows import MANIFEST

NEEDED_OPTIONS = {
    "DataflowRunner": ("project", "region", "temp_location", "sdk_container_image"),
    "FlinkRunner": ("flink_master", "environment_type"),
    "SparkRunner": ("spark_master_url", "environment_type"),
}


def parse_options(flags: Sequence[str], plan: Plan, output: str) -> PipelineOptions:
    """Returns Beam's options. Raises ValueError for an unknown one, or one that cannot work."""
    options = PipelineOptions(list(flags))
    runner = options.view_as(StandardOptions).runner
    create_runner(runner)  # Raises ValueError, or defines the options of the runner.
    parser = argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False)
    for group in PipelineOptions.__subclasses__():
        group._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(list(flags))
    if unknown:
        raise ValueError(f"neither a flag of this tool nor an option of Beam: {' '.join(unknown)}")
    given = {flag.lstrip("-").partition("=")[0] for flag in flags}
    if missing := [name for name in NEEDED_OPTIONS.get(runner, ()) if name not in given]:
        missing = " ".join(f"--{name}=..." for name in missing)
        raise ValueError(f"--runner={runner} needs {missing}; see docs/corpora.md")
    if runner == "DataflowRunner":
        temp_location = options.get_all_options()["temp_location"]
        paths = output, temp_location, *(source.path for source in plan.sources)
        if local := [path for path in paths if "://" not in path]:
            raise ValueError(
                f"workers on Dataflow cannot reach {local[0]}; expected gs://BUCKET/..."
            )
        try:
            importlib.import_module("apache_beam.runners.dataflow.internal.apiclient")
        except ImportError as error:
            raise ImportError(f"{error}: pip install 'bert_jax[dataflow]'") from error
    return options


def run_pipeline(plan: Plan, output: str, options: PipelineOptions, overwrite: bool) -> dict:
    """Runs the pipeline until it is finished; returns the manifest.

    All workers must reach the inputs and `output`, a directory here or on a bucket. The engine
    retries failed work. Raises FileExistsError for a complete corpus unless `overwrite`, which
    removes it first.
    """
    files, directory = fsspec.core.url_to_fs(output)
    if files.exists(f"{directory}/{MANIFEST}"):
        if not overwrite:
            raise FileExistsError(f"{output} holds a complete corpus; replace it with --overwrite")
        files.rm(f"{directory}/{MANIFEST}")
        for split in ("train", "heldout"):
            if shards := files.glob(f"{directory}/{split}-*.array_record"):
                files.rm(shards)
    files.makedirs(directory, exist_ok=True)
    with beam.Pipeline(options=options) as pipeline:
        _build(pipeline, plan, output)
    return json.loads(files.cat_file(f"{directory}/{MANIFEST}"))


def _build(pipeline: beam.Pipeline, plan: Plan, output: str) -> None:
    tokenized = (
        pipeline
        | "units" >> beam.Create(range(len(plan.units)))
        | beam.Reshuffle()
        | "tokenize" >> beam.FlatMap(_tokenize, plan)
    )
    shards = pipeline | "shards" >> beam.Create([(n, b"") for n in range(len(plan.files))])
    parts = tokenized | "parts" >> beam.FlatMap(_select, "part")
    near_duplicates = (
        tokenized
        | "keys" >> beam.FlatMap(_select, "key")
        | "group by key" >> beam.GroupByKey()
        | "near duplicates" >> beam.FlatMap(lambda item: sorted(item[1])[1:])
    )
    rows = (
        (parts, shards)
        | "parts and shards" >> beam.Flatten()
        | "group by shard" >> beam.GroupByKey()
        | "rows" >> beam.Map(_write_shard, plan, output, beam.pvalue.AsList(near_duplicates))
    )
    reports = tokenized | "reports" >> beam.FlatMap(_select, "report")
    (
        (reports, rows)
        | "all reports" >> beam.Flatten()
        | "add no key" >> beam.Map(lambda report: (None, report))
        | "group all reports" >> beam.GroupByKey()
        | "manifest" >> beam.Map(_write_manifest, plan, output)
    )


def _tokenize(unit: int, plan: Plan) -> Iterator[tuple]:
    """Yields ("part", shard, part), ("key", (band, key), document) and ("report", ...)."""
    report = Report()
    for shard, part in plan.tokenize(unit, report):
        yield "part", shard, pickle.dumps(part)
    for document, *keys in report.keys:
        for band, key in enumerate(keys):
            yield "key", (band, key), document
    report.keys = []
    yield "report", "unit", pickle.dumps((unit, report, None))


def _select(item: tuple, kind: str) -> Iterator[tuple[Any, Any]]:
    if item[0] == kind:
        yield item[1:]


def _write_shard(
    item: tuple[int, Iterable[bytes]], plan: Plan, output: str, near_duplicates: list[int]
) -> tuple[Any, Any]:
    number, report = item[0], Report()
    parts = sorted(pickle.loads(part) for part in item[1] if part)
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        entry = plan.write_shard(directory, number, parts, near_duplicates, report)
        _write(output, entry["file"], (directory / entry["file"]).read_bytes())
    return "shard", pickle.dumps((number, report, entry))


def _write_manifest(item: tuple[None, Iterable[tuple]], plan: Plan, output: str) -> None:
    results = sorted(
        ((kind, *pickle.loads(result)) for kind, result in item[1]),
        key=lambda result: (result[0] == "shard", result[1]),
    )
    report = Report()
    for _, _, part, _ in results:
        report.add(part)
    check_skipped(report.skipped, plan.config.text_field)
    manifest = plan.manifest([entry for *_, entry in results if entry], report)
    for name, content in plan.metadata_files(report).items():
        _write(output, name, content)
    _write(output, MANIFEST, encode_manifest(manifest))  # Last: it says that all is complete.


def _write(output: str, name: str, content: bytes) -> None:
    files, directory = fsspec.core.url_to_fs(output)
    files.pipe_file(f"{directory}/{name}", content)
