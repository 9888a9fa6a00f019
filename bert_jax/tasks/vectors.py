"""Vectors of passages in files: predictors that write them, and that search them for queries.

NAME.npy has the vectors, NAME.ids.jsonl the id and text of each. A large corpus is a folder of such
files, its shards (`bert_jax.predict --shard_size`).
"""

import collections
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import ModelInput
from bert_jax.tasks import tables
from bert_jax.tasks.prompts import find_prompt
from bert_jax.tasks.qrels import join_title
from bert_jax.tasks.queries import ID_NAMES, Query, iterate_queries
from bert_jax.tasks.retrieval_scores import TOP, rank_scores
from bert_jax.tasks.search import search
from bert_jax.tasks.task import Outputs, TrainedHead, files_with_suffix, write_json_blocks
from bert_jax.tasks.text_classification import text_features

DTYPES = ("float32", "float16")
IDS_SUFFIX = ".ids.jsonl"
"""Suffix of the ids and texts beside vectors; the passages may be in NAME.jsonl."""


def embedding_features(
    texts: Sequence[str], trained: TrainedHead, max_length: int, prompt_name: str
) -> tuple[list[ModelInput], int]:
    """Returns a feature for each text, as `encode` builds it, and how many were truncated."""
    prompt = find_prompt(trained.settings, prompt_name)
    pairs = [(prompt + text,) for text in texts]
    return text_features(pairs, [None] * len(pairs), trained.tokenizer, max_length)


class VectorPredictor:
    """Computes the vectors of passages; see `bert_jax.tasks.task.Predictor`."""

    def __init__(self, trained: TrainedHead, options: Mapping):
        if (dtype := options["dtype"]) not in DTYPES:
            raise ValueError(f"dtype={dtype}: expected {' or '.join(DTYPES)}")
        self.writers = {".npy": functools.partial(write_vectors, dtype=dtype)}
        self.notes: dict[str, int] = collections.Counter()
        self._trained, self._options = trained, options

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, tables.SUFFIXES)
        return [(path, f"{path.stem}.npy") for path in paths]

    def read(self, path: str | pathlib.Path) -> Iterator[tables.Record]:
        text, id_column, title = (self._options[name] for name in ("text", "id", "title"))
        columns = tuple(filter(None, (text, id_column)))
        lines = self._options["header_lines"]
        data_dir = self._trained.data.get("data_dir", "")
        # A model that was trained on a corpus of BEIR has seen the titles.
        title = title or ("title" if self._trained.data.get("queries") else "")
        for number, record in enumerate(tables.iterate_table(path, columns, lines, data_dir)):
            values = record.columns
            names = (id_column,) if id_column else ID_NAMES
            id_ = next(filter(None, map(values.get, names)), "" if id_column else str(number))
            self.notes["passages with a 'title', not used: set title"] += bool(
                values.get("title") and title != "title"
            )
            self.notes[f"passages without a {title!r}"] += bool(title) and not values.get(title)
            texts = {text: join_title(values.get(title, ""), values[text])}
            yield record._replace(id=id_, columns=texts)

    def features(self, examples: Sequence[tables.Record]) -> list[ModelInput]:
        texts = [record.columns[self._options["text"]] for record in examples]
        self.notes["passages that are empty"] += sum(not text.strip() for text in texts)
        length = self._trained.max_seq_length
        features, truncated = embedding_features(texts, self._trained, length, "document")
        self.notes[f"passages truncated to {length} tokens"] += truncated
        return features

    def describe(
        self, examples: Sequence[tables.Record], outputs: Outputs
    ) -> list[tuple[dict, np.ndarray]]:
        text = self._options["text"]
        return [
            ({"id": record.id, "text": record.columns[text]}, np.ravel(output))
            for record, output in zip(examples, outputs, strict=True)
        ]

    def scores(self) -> dict[str, float]:
        return {}


def write_vectors(
    path: pathlib.Path,
    blocks: Iterable[Sequence[tuple[dict, np.ndarray]]],
    dtype: str = "float32",
) -> None:
    """Writes the vectors, `[passages, size]` of `dtype`, and beside them NAME.ids.jsonl.

    Both are on the disk when it returns. Raises ValueError for values that `dtype` cannot hold.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    count, header = 0, {"descr": stored.str, "fortran_order": False, "shape": (0, 0)}
    with (
        open(path, "wb") as stream,
        open(path.with_suffix(IDS_SUFFIX), "w", encoding="utf-8") as names,
    ):
        for block in blocks:
            values = np.stack([vector for _, vector in block])
            with np.errstate(over="ignore"):
                vectors = values.astype(stored)
            if not np.isfinite(vectors).all():
                largest = np.abs(values).max()
                raise ValueError(
                    f"dtype={dtype}: the vectors of block {count // len(block)} have values up to "
                    f"{largest}: write float32, or normalize the vectors"
                )
            if not count:  # Has room for a larger number of rows.
                header["shape"] = (0, vectors.shape[1])
                np.lib.format.write_array_header_1_0(stream, header)
                start = stream.tell()
            stream.write(vectors.tobytes())
            names.writelines(json.dumps(name) + "\n" for name, _ in block)
            count += len(vectors)
        stream.seek(0)
        header["shape"] = (count, header["shape"][1])
        np.lib.format.write_array_header_1_0(stream, header)
        if stream.tell() != start:
            raise ValueError(f"{path}: NumPy's header has grown")
        for file in (stream, names):
            file.flush()
            os.fsync(file.fileno())


class Shard(NamedTuple):
    """A file of vectors.

    Attributes:
      vectors: `[passages, size]`, mapped into memory.
      names: the path of their ids and texts.
    """

    vectors: np.ndarray
    names: pathlib.Path


def open_vectors(path: pathlib.Path) -> list[Shard]:
    """Opens NAME.npy, or all such files of a folder, in the order of their names.

    Raises ValueError if there is none, if ids are missing, or if sizes differ.
    """
    paths = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    names = [each.with_suffix(IDS_SUFFIX) for each in paths]
    complete = all(
        each.suffix == ".npy" and each.is_file() and name.is_file()
        for each, name in zip(paths, names, strict=True)
    )
    if not paths or not complete:
        raise ValueError(
            f"passages={path}: expected NAME.npy with NAME{IDS_SUFFIX} beside it, or a folder of "
            "them, as bert_jax.predict with this model writes them for passages"
        )
    shards = [
        Shard(np.load(each, mmap_mode="r"), name) for each, name in zip(paths, names, strict=True)
    ]
    first = shards[0]
    for shard in shards:
        if shard.vectors.shape[1:] != first.vectors.shape[1:]:
            sizes = f"{shard.vectors.shape} vectors and {first.names} {first.vectors.shape}"
            raise ValueError(f"passages={path}: {shard.names} has {sizes}: expected equal sizes")
    return shards


def read_texts(shard: Shard) -> Iterator[str]:
    """Yields the text of each vector."""
    return (values["text"] for values, _ in tables.iterate_objects(shard.names))


class SearchPredictor:
    """Ranks the vectors of passages for queries; see `bert_jax.tasks.task.Predictor`."""

    def __init__(self, trained: TrainedHead, options: Mapping):
        self._shards = open_vectors(pathlib.Path(options["passages"]))
        if options["top_k"] < TOP:
            raise ValueError(f"top_k={options['top_k']}: expected at least {TOP}")
        self.writers = {".txt": write_run, ".run": write_run, ".jsonl": write_json_blocks}
        self.notes: dict[str, int] = collections.Counter()
        self._trained, self._top_k = trained, options["top_k"]
        self._ranks: dict[str, list[float]] = collections.defaultdict(list)
        self._grades: dict[str, list[float]] = collections.defaultdict(list)
        self._last_id = ""

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, (".jsonl",))
        return [(path, f"{path.stem}.txt") for path in paths]

    def read(self, path: str | pathlib.Path) -> Iterator[Query]:
        unused: dict[str, int] = {}
        yield from iterate_queries(path, unused)
        for key, count in unused.items():
            self.notes[f"lines with {key!r}, which is not used"] += count

    def features(self, examples: Sequence[Query]) -> list[ModelInput]:
        length = self._trained.settings.get("max_query_length", self._trained.max_seq_length)
        texts = [query.text for query in examples]
        self.notes["queries that are empty"] += sum(not text.strip() for text in texts)
        features, truncated = embedding_features(texts, self._trained, length, "query")
        self.notes[f"queries truncated to {length} tokens"] += truncated
        return features

    def describe(self, examples: Sequence[Query], outputs: Outputs) -> list[dict]:
        queries = np.stack([np.ravel(output) for output in outputs])
        found = search(queries, [shard.vectors for shard in self._shards], self._top_k)
        wanted = set(np.unique(found.indices).tolist())
        positives = {query.positive for query in examples if query.positive is not None}
        ids: dict[int, str] = {}
        index_of: dict[str, int] = {}  # Text of a positive -> its index.
        names = (tables.iterate_objects(shard.names) for shard in self._shards)
        for index, (values, _) in enumerate(itertools.chain.from_iterable(names)):
            if index in wanted:
                ids[index] = values["id"]
            if values["text"] in positives:
                index_of.setdefault(values["text"], index)
        lines = []
        for query, scores, indices in zip(examples, *found, strict=True):
            named = (ids[index] for index in indices.tolist())
            passages = [
                {"id": name, "score": score}
                for name, score in zip(named, scores.tolist(), strict=True)
            ]
            if query.id != self._last_id:  # Of a list of positives, each is a query of this id.
                lines.append({"id": query.id, "query": query.text, "passages": passages})
            self._last_id = query.id
            if query.positive is None:
                continue
            if query.positive not in index_of:
                self.notes["queries whose positive is not among the passages, not scored"] += 1
                continue
            own = np.flatnonzero(indices == index_of[query.positive])
            # Among equal scores, other passages rank before the positive.
            rank = float(np.sum(scores >= scores[own[0]])) if len(own) else np.inf
            self._ranks[query.text].append(rank)
            self._grades[query.text].append(query.grade)
        return lines

    def scores(self) -> dict[str, float]:
        if not self._ranks:
            return {}
        scores = rank_scores(list(self._ranks.values()), list(self._grades.values()))
        return scores | {"queries": len(self._ranks)}


def write_run(path: pathlib.Path, blocks: Iterable[Sequence[dict]]) -> None:
    """Writes a run as trec_eval reads it: query Q0 passage rank score tag. Raises ValueError.

    That is for an id with white space, which separates the columns.
    """
    with open(path, "w", encoding="utf-8") as stream:
        for line in itertools.chain.from_iterable(blocks):
            for rank, passage in enumerate(line["passages"], start=1):
                for name in (line["id"], passage["id"]):
                    if not name or name.split() != [name]:
                        fix = "write a .jsonl file, or change the id"
                        raise ValueError(f"the id {name!r} is empty or has white space: {fix}")
                score = passage["score"]
                stream.write(f"{line['id']} Q0 {passage['id']} {rank} {score!r} bert_jax\n")
