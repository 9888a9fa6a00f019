"""Runs the pipeline of Apache Beam on real engines (`make beam-test`; needs the extra "beam")."""

import json
import random
import types

import pytest

from bert_corpus import inputs
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.plan import Plan
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, random_text, write_vocabulary

beam = pytest.importorskip("bert_corpus.beam")
SETTINGS = {"sentences": "lines", "heldout_fraction": 0.2, "max_seq_length": 64}
DASK = "--runner=apache_beam.runners.dask.dask_runner.DaskRunner"


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Documents in several units, with copies and near copies."""
    rng = random.Random(0)
    long = [" ".join(rng.choices(WORDS, k=300)) for _ in range(10)]
    documents = [*random_text(100).split("\n\n"), *long, *(f"{t} stone" for t in long[:5]), long[7]]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents))
    monkeypatch.setattr(inputs, "UNIT_BYTES", path.stat().st_size // 9)
    return str(path)


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def dask_cluster():
    distributed = pytest.importorskip("distributed")
    return distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)


@pytest.mark.parametrize("runner", ["in_memory", "multi_processing", "dask"])
def test_every_runner_writes_the_files_of_the_local_build(tmp_path, text, tokenizer, runner):
    config = CorpusConfig(**SETTINGS, num_shards=3, dupe_factor=2, near_duplicates=0.8)
    manifest = build_corpus(text, tokenizer, tmp_path / "local", config, num_processes=2)
    dropped = [split["dropped"] for split in manifest["splits"].values()]
    assert sum(count.get("near_duplicates", 0) for count in dropped) == 5
    assert sum(count.get("duplicates", 0) for count in dropped) == 1
    flags = ["--runner=DirectRunner", f"--direct_running_mode={runner}", "--direct_num_workers=2"]
    if runner == "dask":
        cluster = dask_cluster()
        flags = [DASK, f"--dask_client_address={cluster.scheduler_address}", "--dask_npartitions=4"]
    output = str(tmp_path / "beam")
    plan = Plan(text, tokenizer, config)
    options = beam.parse_options(flags, plan, output)
    returned = beam.run_pipeline(plan, output, options, overwrite=False)
    if runner == "dask":
        cluster.close()
    assert returned == manifest
    assert files_of(tmp_path / "beam") == files_of(tmp_path / "local")
    with pytest.raises(FileExistsError, match="holds a complete corpus"):
        beam.run_pipeline(plan, output, options, overwrite=False)


def test_corpus_is_written_to_a_bucket(tmp_path, text, tokenizer):
    """One process, because the bucket is in its memory."""
    config = CorpusConfig(**SETTINGS)
    output = "memory://corpus"
    plan = Plan(text, tokenizer, config)
    options = beam.parse_options(["--runner=BundleBasedDirectRunner"], plan, output)
    beam.run_pipeline(plan, output, options, overwrite=False)
    build_corpus(text, tokenizer, tmp_path / "local", config, num_processes=1)
    bucket, directory = beam.fsspec.core.url_to_fs(output)
    written = {path.rsplit("/")[-1]: bucket.cat_file(path) for path in bucket.ls(directory, False)}
    assert written == files_of(tmp_path / "local")
    assert json.loads(written["manifest.json"])["splits"]["train"]["rows"] > 0


DATAFLOW = ["--runner=DataflowRunner", "--project=p", "--region=r", "--temp_location=gs://b/temp"]
IMAGE = "--sdk_container_image=image"


def planned(*paths):
    return types.SimpleNamespace(sources=[types.SimpleNamespace(path=path) for path in paths])


@pytest.mark.parametrize(
    ("flags", "output", "message"),
    [
        (["--runner=FlameRunner"], "out", "FlameRunner"),
        (["--runner=DirectRunner", "--direct_workers=2"], "out", "Beam: --direct_workers=2"),
        (DATAFLOW[:2], "gs://b/out", "--region=... --temp_location=... --sdk_container_image=..."),
        (["--runner=FlinkRunner"], "out", "needs --flink_master=... --environment_type=..."),
        ([*DATAFLOW, IMAGE], "out", "cannot reach out"),
        ([*DATAFLOW, IMAGE], "gs://b/out", "cannot reach texts/a.txt"),
    ],
)
def test_options_that_cannot_work_are_clear_errors(flags, output, message):
    with pytest.raises(ValueError) as error:
        beam.parse_options(flags, planned("gs://b/a.txt", "texts/a.txt"), output)
    assert message in str(error.value)


def test_options_of_dataflow_are_accepted():
    flags = [*DATAFLOW, IMAGE, "--max_num_workers=50"]
    options = beam.parse_options(flags, planned("gs://b/a.txt"), "gs://b/out")
    assert options.get_all_options()["max_num_workers"] == 50
