"""Examples in memory as dicts: of lists, DataFrames (pandas, polars), Arrow, and `datasets`."""

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np


def iterate_records(data: object) -> Iterator[dict]:
    """Yields each example of `data` as a dict, with values of Python in place of NumPy's.

    `data` is an iterable of dicts, a DataFrame of pandas or polars, a table of pyarrow, or a
    `datasets.Dataset`, whose classes are given by name. What marks a missing value in a DataFrame
    (NaN, NA, NaT) or in a Dataset (the class -1) is None. Raises TypeError for anything else.
    """
    if isinstance(data, Mapping | str | bytes):
        expected = "a list of dicts, a DataFrame or a Dataset: of several splits, one of them"
        raise TypeError(f"the examples are a {type(data).__name__}: expected {expected}")
    # By name of the class: none of these libraries is a dependency.
    library, classes = type(data).__module__.partition(".")[0], {}
    if library == "datasets":
        features = {name: _of_items(feature) for name, feature in (data.features or {}).items()}
        classes = {name: each.names for name, each in features.items() if _is_class(each)}
    for number, values in enumerate(_rows(data, library)):
        if not isinstance(values, Mapping):
            expected = "a dict of its columns"
            raise TypeError(f"example {number} is a {type(values).__name__}: expected {expected}")
        record = {name: _plain(value) for name, value in values.items()}
        if library == "pandas":
            record = {name: None if _is_missing(value) else value for name, value in record.items()}
        for name, names in classes.items():
            label = record[name]
            is_list = isinstance(label, list)
            record[name] = (
                [_name_of(each, names) for each in label] if is_list else _name_of(label, names)
            )
        yield record


def _rows(data: object, library: str) -> Iterable:
    if library == "pandas":
        return data.to_dict("records")
    if library == "polars":
        return data.iter_rows(named=True)
    if library == "pyarrow":
        return data.to_pylist()
    return data


def _of_items(feature: object) -> object:
    """Returns the feature of the items of a list, or the feature itself."""
    return getattr(feature, "feature", feature)


def _name_of(label: int | None, names: list[str]) -> str | None:
    return names[label] if label is not None and label >= 0 else None


def _is_class(feature: object) -> bool:
    """Returns whether a feature of a Dataset is a `ClassLabel`."""
    return type(feature).__name__ == "ClassLabel"


def _plain(value: object) -> object:
    """Returns a NumPy value as Python's, and any other unchanged."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _is_missing(value: object) -> bool:
    """Returns whether a value of pandas is NaN, NA or NaT."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan or type(value).__name__ in ("NAType", "NaTType")
