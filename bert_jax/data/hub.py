"""Opens data sets of the Hugging Face Hub, and folders of `save_to_disk`, with `datasets`."""

import functools
import pathlib

PREFIX = "hub:"
EXPECTED = (
    "the name of a data set of the Hub and, if it has several, its configuration, such as "
    "hub:nyu-mll/glue:mrpc, or a folder of datasets.save_to_disk"
)


def split_source(source: str) -> tuple[str, str]:
    """Returns NAME:CONFIGURATION, or the folder, and the split, "" if none is named."""
    address, _, split = source.removeprefix(PREFIX).partition("#")
    return address, split


def has_splits(source: str) -> bool:
    """Returns whether "hub:..." has splits, as all have but the folder of a single `Dataset`."""
    return not (_folder(split_source(source)[0]) / "state.json").exists()


def open_hub_splits(source: str):
    """Opens "hub:NAME:CONFIGURATION" or "hub:FOLDER": a dict of a `Dataset` for each split.

    Of the folder of a single `Dataset`, this one. The library downloads a data set of the Hub when
    it is first opened, and keeps it in its cache. Raises ImportError without `datasets`, OSError if
    there is no such data set or it cannot be reached, and ValueError for an unknown configuration
    or a damaged folder.
    """
    try:
        import datasets  # Here, because it is optional, and its import takes long.
    except ImportError as error:
        fix = "pip install 'bert_jax[datasets]'"
        raise ImportError(f"{source} needs the library datasets: {fix}") from error
    address, _ = split_source(source)
    folder = _folder(address)
    try:
        if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
            return datasets.load_from_disk(str(folder))
        if address.startswith(("/", ".", "~")) and not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}")
        return _download(str(folder) if folder.is_dir() else address)
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        problem = f"cannot read {PREFIX}{address}: {' '.join(str(error).split())}"
        raise kind(f"{problem}: expected {EXPECTED}") from error
    # The last two are of a data set that consists of code, and of files that cannot be read.
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{PREFIX}{address}: {problem}: expected {EXPECTED}") from error


def open_hub(source: str):
    """Opens "hub:NAME:CONFIGURATION#SPLIT" or "hub:FOLDER#SPLIT", as a `Dataset`.

    SPLIT may be a part of a split, or several: `train[90%:]`, `train+validation`. The folder of a
    single `Dataset` has none. Raises as `open_hub_splits`, and ValueError for an unknown split, or
    an empty one.
    """
    splits, (address, split) = open_hub_splits(source), split_source(source)
    import datasets

    if isinstance(splits, datasets.Dataset):
        if split:
            raise ValueError(f"{source}: the folder has a single Dataset: leave out #{split}")
        return splits
    sizes = {name: each.num_rows for name, each in splits.items()}
    expected = f"expected {PREFIX}{address}#SPLIT, with SPLIT one of {', '.join(sizes)}"
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (AssertionError, ValueError) as error:
        problem = " ".join(str(error).split()) if split else "no split is named"
        raise ValueError(
            f"{source}: {problem}: {expected}, or a part such as train[90%:]"
        ) from None
    parts = [part for part in parts if part.from_ < part.to]
    if not parts:
        raise ValueError(f"{source} holds no examples: {expected}")
    return datasets.concatenate_datasets(
        [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    )


def _folder(address: str) -> pathlib.Path:
    return pathlib.Path(address).expanduser()


@functools.lru_cache(8)  # Several splits are read; each time, the library would ask the Hub.
def _download(address: str):
    """Returns the splits of a data set of the Hub, or of a folder of files such as Parquet."""
    import datasets

    is_folder = pathlib.Path(address).is_dir()
    name, _, configuration = (address, "", "") if is_folder else address.partition(":")
    return datasets.load_dataset(name, configuration or None)
