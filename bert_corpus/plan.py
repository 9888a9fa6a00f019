"""Plans a build: the units of its input and the shards of its output, wherever its steps run."""

import importlib.metadata
import json
import math
import pathlib
from collections.abc import Iterator, Sequence

from bert_corpus import writing
from bert_corpus.config import LABELED_ROWS, CorpusConfig
from bert_corpus.encoding import Encoder
from bert_corpus.inputs import Source, Unit, find_inputs, repeat_inputs, split_into_units
from bert_corpus.manifest import BUILD_VERSION, make_manifest
from bert_corpus.steps import Part, Report, find_heldout_limit, make_rows, tokenize_unit
from bert_jax.data.rows import FORMAT_VERSION, manifest_checksum
from bert_jax.tokenizers.tokenizer import Tokenizer

# A shard holds many parts and is shuffled in memory.
INPUT_BYTES_PER_SHARD = 2 << 20
MAX_SHARDS = 1 << 11
# Libraries that decide what is read of a format.
READERS = {"html": "trafilatura", "markdown": "markdown-it-py", "hub": "datasets"}
SAMPLES = "samples.json"  # some rows, and the beginnings of some of the dropped documents


class Plan:
    """The units of the input and the shards of the output, with the steps between them.

    Attributes:
      sources: the inputs.
      units: parts of the input that one worker reads at a time, in the order of the input.
      heldout_limit: documents with a smaller hash are held out.
      shards: the numbers of the shards, by split.
      files: of each shard, its split, its index in the split, and its file name.
    """

    def __init__(self, inputs: str | Sequence[str], tokenizer: Tokenizer, config: CorpusConfig):
        """Finds the inputs. Raises OSError or ValueError as `find_inputs` does, and ValueError for
        pairs of a tokenizer without segments, or one that adds no special tokens."""
        if tokenizer.layout.is_bare:
            raise ValueError(
                "the tokenizer adds no special tokens around texts, but rows need them: set "
                "`post_processor` in its tokenizer.json, as the warning above says"
            )
        if config.rows in LABELED_ROWS and not tokenizer.layout.has_segments:
            raise ValueError(
                f"--rows={config.rows} makes pairs, whose second text is segment 1, but sequences "
                "of this tokenizer have no segments: RoBERTa is trained without pairs, on "
                "--rows=full_sentences (or document_sentences, single_segments)"
            )
        self.tokenizer, self.encoder, self.config = tokenizer, Encoder(tokenizer), config
        sources = find_inputs(inputs, config.text_field, config.data_dir, config.documents)
        self.sources: list[Source] = repeat_inputs(sources, config.repeat)
        self.units: list[list[Unit]] = split_into_units(self.sources)
        self.heldout_limit = find_heldout_limit(self.units, self.encoder, config)
        num_bytes = sum(source.size for source in self.sources)
        by_size = min(math.ceil(num_bytes / INPUT_BYTES_PER_SHARD), MAX_SHARDS)
        num_train = config.num_shards or by_size
        num_heldout = math.ceil(num_train * config.heldout_fraction)
        self.shards = {"train": range(num_train)}
        if num_heldout:
            self.shards["heldout"] = range(num_train, num_train + num_heldout)
        self.files = [
            (split, index, f"{split}-{index:05d}-of-{len(shards):05d}.array_record")
            for split, shards in self.shards.items()
            for index in range(len(shards))
        ]

    def fingerprint(self) -> list:
        """Returns the values that identify this build."""
        libraries = "mwparserfromhell", "sentencepiece", "sentencex", "tokenizers"
        formats = sorted({source.format for source in self.sources} & READERS.keys())
        libraries += tuple(READERS[name] for name in formats)
        versions = [importlib.metadata.version(name) for name in libraries]
        return [
            FORMAT_VERSION,
            BUILD_VERSION,
            versions,
            repr(self.config),
            self.tokenizer.sha256,
            self.sources,
            self.heldout_limit,
        ]

    def tokenize(self, number: int, report: Report) -> Iterator[tuple[int, Part]]:
        """Yields the parts of a unit, each with the number of its shard."""
        return tokenize_unit(
            number,
            self.units[number],
            encoder=self.encoder,
            config=self.config,
            heldout_limit=self.heldout_limit,
            shards=self.shards,
            report=report,
        )

    def write_shard(
        self,
        directory: pathlib.Path,
        number: int,
        parts: Sequence[Part],
        near_duplicates: Sequence[int],
        report: Report,
    ) -> dict:
        """Writes the rows of a shard, whose parts are in order; returns its entry."""
        split, index, name = self.files[number]
        rows = make_rows(
            parts,
            split,
            index,
            tokenizer=self.tokenizer,
            config=self.config,
            near_duplicates=near_duplicates,
            report=report,
        )
        return writing.write_shard(directory / name, rows, self.config.block_rows)

    def metadata_files(self, report: Report) -> dict[str, bytes]:
        """Returns the other files of a corpus, by name: the tokenizer, and samples."""
        samples = {"rows": report.rows, "dropped": dict(sorted(report.samples.items()))}
        content = json.dumps(samples, indent=2, ensure_ascii=False)
        return {**self.tokenizer.files(), SAMPLES: f"{content}\n".encode()}

    def describe(self) -> str:
        """Returns a description of the build, for a dry run."""
        lines = [f"{source.path}: {source.size:,} bytes" for source in self.sources]
        num_heldout = len(self.shards.get("heldout", ()))
        lines.append(
            f"{len(self.units):,} units of text; {len(self.shards['train']):,} shards of the train "
            f"split and {num_heldout:,} of the heldout split"
        )
        return "\n".join(lines)

    def manifest(self, entries: Sequence[dict], report: Report) -> dict:
        """Returns the manifest of the entries of all shards, in order."""
        shards = {split: entries[s.start : s.stop] for split, s in self.shards.items()}
        manifest = make_manifest(self.sources, self.tokenizer, self.config, shards, report)
        manifest |= {"heldout_share": self.heldout_limit / 2**64}
        return manifest | {"crc32": manifest_checksum(manifest)}
