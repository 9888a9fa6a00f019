"""Vectors of passages in files: predictors that write them, and that search them for queries.

NAME.npy has the vectors, NAME.ids.jsonl the id and text of each; NAME.npz, as SciPy writes it, has
sparse ones. A large corpus is a folder of such files, its shards (`bert_jax.predict --shard_size`),
with shards.json about the model that wrote them, and their number.
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
from scipy.sparse import csr_array, issparse, load_npz, save_npz, vstack

from bert_jax.data.features import ModelInput
from bert_jax.model.heads import find_head
from bert_jax.tasks import tables
from bert_jax.tasks.prompts import find_prompt
from bert_jax.tasks.qrels import join_title
from bert_jax.tasks.queries import ID_NAMES, Query, TokenizedTexts, iterate_queries
from bert_jax.tasks.retrieval_scores import CUTOFFS, TOP, join_vectors, rank_scores, ranks_by_id
from bert_jax.tasks.search import search, search_sparse
from bert_jax.tasks.task import Outputs, TrainedHead, files_with_suffix, write_json_blocks
from bert_jax.tasks.text_classification import text_features

DTYPES = ("float32", "float16")
IDS_SUFFIX = ".ids.jsonl"
"""Suffix of the ids and texts beside vectors; the passages may be in NAME.jsonl."""
SHARDS_FILENAME = "shards.json"
"""Has what shards depend on and, once the input was read to its end, NUM_SHARDS."""
NUM_SHARDS = "num_shards"
"""Key of the number of shards of each output, NAME.npy."""


def embedding_features(
    texts: Sequence[str], trained: TrainedHead, max_length: int, prompt_name: str
) -> tuple[list[ModelInput], int]:
    """Returns a feature for each text, as `encode` builds it, and how many were truncated."""
    prompt = find_prompt(trained.settings, prompt_name)
    pairs = [(prompt + text,) for text in texts]
    return text_features(pairs, [None] * len(pairs), trained.tokenizer, max_length)


class VectorPredictor:
    """Computes the vectors of passages; see `bert_jax.tasks.task.Predictor`.

    Attributes:
      options: those that the outputs depend on, with default values filled in.
      numbers: the ids of passages without any.
    """

    def __init__(self, trained: TrainedHead, options: Mapping):
        if (dtype := options["dtype"]) not in DTYPES:
            raise ValueError(f"dtype={dtype}: expected {' or '.join(DTYPES)}")
        if suffix_of(trained) == ".npz":
            if dtype != "float32":
                raise ValueError(f"dtype={dtype}: expected float32 for sparse vectors")
            self.writers = {".npz": write_sparse_vectors}
        else:
            self.writers = {".npy": functools.partial(write_vectors, dtype=dtype)}
        self.notes: dict[str, int] = collections.Counter()
        names = ("text", "title", "id", "header_lines", "shard_size", "dtype")
        self.options = {name: options[name] for name in names}
        # A model that was trained on a corpus of BEIR has seen the titles.
        if not self.options["title"] and trained.data.get("queries"):
            self.options["title"] = "title"
        self.numbers = itertools.count()
        self._trained = trained

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, tables.SUFFIXES)
        return [(path, f"{path.stem}{next(iter(self.writers))}") for path in paths]

    def read(self, path: str | pathlib.Path) -> Iterator[tables.Record]:
        text, id_column, title = (self.options[name] for name in ("text", "id", "title"))
        columns = tuple(filter(None, (text, id_column)))
        lines = self.options["header_lines"]
        data_dir = self._trained.data.get("data_dir", "")
        id_names = (id_column,) if id_column else ID_NAMES
        has_ids = bool(id_column) or None  # None: the first passage decides.
        for record in tables.iterate_table(path, columns, lines, data_dir):
            values, number = record.columns, next(self.numbers)
            id_ = next(filter(None, map(values.get, id_names)), "")
            if has_ids is None:
                has_ids = bool(id_)
            if has_ids != bool(id_):  # A number could be the id of another passage.
                found = f"an id, {id_!r}, but those before have none" if id_ else "no id"
                raise ValueError(f"{record.location}: {found}: give all passages an id, or none")
            has_unused_title = values.get("title") and title != "title"
            if has_unused_title:
                self.notes["passages with a 'title', not used: set title"] += 1
            if title and not values.get(title):
                self.notes[f"passages without a {title!r}"] += 1
            texts = {text: join_title(values.get(title, "") if title else "", values[text])}
            yield record._replace(id=id_ or str(number), columns=texts)

    def features(self, examples: Sequence[tables.Record]) -> list[ModelInput]:
        texts = [record.columns[self.options["text"]] for record in examples]
        self.notes["passages that are empty"] += sum(not text.strip() for text in texts)
        length = self._trained.max_seq_length
        features, truncated = embedding_features(texts, self._trained, length, "document")
        self.notes[f"passages truncated to {length} tokens"] += truncated
        return features

    def describe(
        self, examples: Sequence[tables.Record], outputs: Outputs
    ) -> list[tuple[dict, np.ndarray | csr_array]]:
        text = self.options["text"]
        return [
            (
                {"id": record.id, "text": record.columns[text]},
                output if issparse(output) else np.ravel(output),
            )
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

    Both are on the disk when it returns. Raises ValueError for values that are not finite, or that
    `dtype` cannot hold.
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
            if not np.isfinite(values).all():
                row = int(np.argmin(np.isfinite(values).all(axis=1)))
                raise ValueError(
                    f"the vector of the passage with the id {block[row][0]['id']!r} has values "
                    "that are not finite: check the model's parameters"
                )
            if not np.isfinite(vectors).all():
                largest = np.abs(values).max()
                raise ValueError(
                    f"dtype={dtype}: vectors have values up to {largest}: write float32, or "
                    "normalize the vectors"
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


def write_sparse_vectors(
    path: pathlib.Path, blocks: Iterable[Sequence[tuple[dict, csr_array]]]
) -> None:
    """Writes sparse vectors, `[passages, vocabulary]` in float32, and beside them NAME.ids.jsonl.

    All are in memory until it returns, when both files are on the disk. Raises ValueError for
    values that are not finite.
    """
    rows = []
    with (
        open(path, "wb") as stream,
        open(path.with_suffix(IDS_SUFFIX), "w", encoding="utf-8") as names,
    ):
        for block in blocks:
            for name, vector in block:
                if not np.isfinite(vector.data).all():
                    raise ValueError(
                        f"the vector of the passage with the id {name['id']!r} has values that are "
                        "not finite: check the model's parameters"
                    )
                rows.append(vector)
            names.writelines(json.dumps(name) + "\n" for name, _ in block)
        save_npz(stream, vstack(rows, format="csr"), compressed=False)
        for file in (stream, names):
            file.flush()
            os.fsync(file.fileno())


def suffix_of(trained: TrainedHead) -> str:
    """Returns the suffix of files of a model's vectors, which need no head if they are dense."""
    settings = trained.settings
    is_sparse = bool(settings) and find_head(settings).predicts == "sparse_vector"
    return ".npz" if is_sparse else ".npy"


class Shard(NamedTuple):
    """A file of vectors.

    Attributes:
      vectors: `[passages, size]`, mapped into memory; or sparse, and in memory.
      names: the path of their ids and texts.
    """

    vectors: np.ndarray | csr_array
    names: pathlib.Path


def open_vectors(path: pathlib.Path, suffix: str = ".npy") -> list[Shard]:
    """Opens NAME.npy, or all such files of a folder, in the order of their names.

    With the suffix .npz, they are sparse. Raises ValueError if there is none, if shards or ids are
    missing, or if sizes differ.
    """
    paths = [path]
    if path.is_dir():
        paths = sorted(path.glob(f"*{suffix}"))
        paths = _complete_shards(path, paths) if (path / SHARDS_FILENAME).exists() else paths
    names = [each.with_suffix(IDS_SUFFIX) for each in paths]
    complete = all(
        each.suffix == suffix and each.is_file() and name.is_file()
        for each, name in zip(paths, names, strict=True)
    )
    if not paths or not complete:
        raise ValueError(
            f"passages={path}: expected NAME{suffix} with NAME{IDS_SUFFIX} beside it, or a folder "
            "of them, as bert_jax.predict with this model writes them for passages"
        )
    read = load_npz if suffix == ".npz" else functools.partial(np.load, mmap_mode="r")
    shards = [Shard(read(each), name) for each, name in zip(paths, names, strict=True)]
    first = shards[0]
    for shard in shards:
        if shard.vectors.shape[1:] != first.vectors.shape[1:]:
            sizes = f"{shard.vectors.shape} vectors and {first.names} {first.vectors.shape}"
            raise ValueError(f"passages={path}: {shard.names} has {sizes}: expected equal sizes")
    return shards


def shard_name(name: str, number: int) -> str:
    """Returns the name of a shard of an output, NAME-00000.npy for NAME.npy and 0."""
    path = pathlib.Path(name)
    return f"{path.stem}-{number:05d}{path.suffix}"


def _complete_shards(folder: pathlib.Path, found: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the paths of the shards in their order. Raises ValueError unless all are `found`."""
    counts = _read_shard_settings(folder).get(NUM_SHARDS)
    if counts is None:
        fix = "repeat the command of bert_jax.predict that writes it, until it ends"
        raise ValueError(f"passages={folder} is unfinished: {fix}")
    names = [shard_name(name, n) for name, count in counts.items() for n in range(count)]
    found_names = {path.name for path in found}
    if missing := {*names} - found_names:
        fix = "let the processes that write them end, or copy those of all hosts into it"
        raise ValueError(
            f"passages={folder}: {len(missing)} of {len(names)} shards are missing, such as "
            f"{min(missing)}: {fix}"
        )
    if others := found_names - {*names}:
        raise ValueError(f"passages={folder}: {min(others)} is none of its shards: remove it")
    return [folder / name for name in names]


def _read_shard_settings(folder: pathlib.Path) -> dict:
    return json.loads((folder / SHARDS_FILENAME).read_text(encoding="utf-8"))


def check_model(path: pathlib.Path, described: Mapping[str, object]) -> None:
    """Raises ValueError if another model wrote a folder of shards; a single NAME.npy names none.

    `described` has what identifies the model, as SHARDS_FILENAME stores it.
    """
    if not (path / SHARDS_FILENAME).exists():
        return
    stored = _read_shard_settings(path)
    for name, value in described.items():
        if stored.get(name) != value:
            raise ValueError(
                f"passages={path}: another model wrote these vectors: its {name} is "
                f"{stored.get(name)}, that of this model {value}"
            )


def read_texts(shard: Shard) -> Iterator[str]:
    """Yields the text of each vector."""
    return (values["text"] for values, _ in tables.iterate_objects(shard.names))


class SearchPredictor:
    """Ranks the vectors of passages for queries; see `bert_jax.tasks.task.Predictor`.

    An example is a query: all lines of a file with one text. Each of their ids gets its results.
    Scores are those of dev: passages are equal if their token ids are, and a positive that is not
    among the `top_k` counts as not found.
    """

    def __init__(self, trained: TrainedHead, options: Mapping):
        self._shards = open_vectors(pathlib.Path(options["passages"]), suffix_of(trained))
        _check_ids(self._shards)
        if options["top_k"] < TOP:
            raise ValueError(f"top_k={options['top_k']}: expected at least {TOP}")
        self.writers = {".txt": write_run, ".run": write_run, ".jsonl": write_json_blocks}
        self.notes: dict[str, int] = collections.Counter()
        self._trained, self._top_k = trained, options["top_k"]
        self._ranks: list[np.ndarray] = []
        self._grades: list[list[float]] = []

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, (".jsonl",))
        return [(path, f"{path.stem}.txt") for path in paths]

    def read(self, path: str | pathlib.Path) -> Iterator[list[Query]]:
        unused: dict[str, int] = {}
        groups: dict[str, list[Query]] = {}
        first: dict[str, Query] = {}
        for line in iterate_queries(path, unused):
            if (other := first.setdefault(line.id, line)).text != line.text:
                problem = f"id {line.id!r} is already used for another query in {other.location}"
                raise ValueError(f"{line.location}: {problem}")
            groups.setdefault(line.text, []).append(line)
        yield from groups.values()
        for key, count in unused.items():
            self.notes[f"lines with {key!r}, which is not used"] += count

    def features(self, examples: Sequence[list[Query]]) -> list[ModelInput]:
        length = self._trained.settings.get("max_query_length", self._trained.max_seq_length)
        texts = [group[0].text for group in examples]
        self.notes["queries that are empty"] += sum(not text.strip() for text in texts)
        features, truncated = embedding_features(texts, self._trained, length, "query")
        self.notes[f"queries truncated to {length} tokens"] += truncated
        return features

    def describe(self, examples: Sequence[list[Query]], outputs: Outputs) -> list[dict]:
        queries, vectors = join_vectors(outputs), [shard.vectors for shard in self._shards]
        find = search_sparse if issparse(queries) else search
        found = find(queries, vectors, self._top_k)
        wanted = set(np.unique(found.indices).tolist())
        positives = {line.positive for group in examples for line in group}
        passages: dict[int, dict] = {}
        known: set[str] = set()  # Positives that are among the passages.
        for index, values in enumerate(_iterate_names(self._shards)):
            if index in wanted:
                passages[index] = values
            if values["text"] in positives:
                known.add(values["text"])
        texts = TokenizedTexts(self._trained.tokenizer, self._trained.max_seq_length)
        lines = []
        for group, scores, indices in zip(examples, *found, strict=True):
            own = [passages[index] for index in indices.tolist()]
            results = [
                {"id": values["id"], "score": score}
                for values, score in zip(own, scores.tolist(), strict=True)
            ]
            for id_ in dict.fromkeys(line.id for line in group):
                lines.append({"id": id_, "query": group[0].text, "passages": results})
            labeled = [line for line in group if line.positive is not None]
            if labeled:
                ranks, grades = rank_positives(
                    labeled, [values["text"] for values in own], scores, texts
                )
                self._ranks.append(ranks)
                self._grades.append(grades)
            unknown = {line.positive for line in labeled} - known
            self.notes["positives whose text is not among the passages"] += len(unknown)
        return lines

    def scores(self) -> dict[str, float]:
        if not self._ranks:
            return {}
        cutoffs = [k for k in CUTOFFS if k <= self._top_k]
        return rank_scores(self._ranks, self._grades, cutoffs) | {"queries": len(self._ranks)}


def rank_positives(
    lines: Sequence[Query], found: Sequence[str], scores: np.ndarray, texts: TokenizedTexts
) -> tuple[np.ndarray, list[float]]:
    """Returns the rank and the grade of each distinct positive of a query.

    Of equal passages, the best one is ranked, and the best grade counts.

    Args:
      lines: those of the query, each with a positive.
      found: texts of passages, best first.
      scores: float32 `[found]`.
      texts: says which are equal.
    """
    texts.add([*found, *(line.positive for line in lines)])
    grades: dict[bytes | str, float] = {}
    for line in lines:
        name = texts.identity[line.positive]
        grades[name] = max(line.grade, grades.get(name, 0))
    best: dict[bytes | str, float] = {}  # Of equal texts, the first has the highest score.
    for text, score in zip(found, scores, strict=True):
        best.setdefault(texts.identity[text], score)
    places = {name: place for place, name in enumerate(best)}
    return ranks_by_id(np.array([*best.values()]), places, grades), [*grades.values()]


def _iterate_names(shards: Sequence[Shard]) -> Iterator[dict]:
    """Yields the "id" and "text" of each vector."""
    for shard in shards:
        for values, _ in tables.iterate_objects(shard.names):
            yield values


def _check_ids(shards: Sequence[Shard]) -> None:
    """Raises ValueError if two passages have one id, which a run could not tell apart."""
    # Of millions of ids, eight bytes each.
    hashes = np.sort(np.fromiter((hash(each["id"]) for each in _iterate_names(shards)), np.int64))
    repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    locations: dict[str, str] = {}
    for shard in shards if repeated else ():
        for values, location in tables.iterate_objects(shard.names):
            id_ = values["id"]
            if hash(id_) in repeated and (first := locations.setdefault(id_, location)) != location:
                fix = "write vectors of passages with other ids"
                raise ValueError(f"{location}: id {id_!r} is already used in {first}: {fix}")


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
