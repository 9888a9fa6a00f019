"""Streams datasets of the Hugging Face Hub, or of local folders, with the library `datasets`."""

import functools
import logging
import os

import fsspec

PREFIX = "hf:"
EXPECTED = "hf:NAME[:CONFIG[:SPLIT]], such as hf:wikimedia/wikipedia:20231101.de"
UNKNOWN_BYTES = 1 << 26  # of a file whose size is not known


def is_hub_address(pattern: str) -> bool:
    """Returns whether an input is one of the Hub; "hf://" begins the address of a file."""
    return pattern.startswith(PREFIX) and not pattern.startswith(f"{PREFIX}//")


@functools.lru_cache(8)  # Each worker reads many parts of it.
def open_hub(address: str):
    """Opens "hf:NAME[:CONFIG[:SPLIT]]"; returns its builder and an `IterableDataset` of the split.

    An empty or missing CONFIG is the default one, an empty or missing SPLIT is "train". Raises
    ImportError without `datasets`, OSError if it cannot be reached, and ValueError for an unknown
    configuration or split.
    """
    name, config, split = _parse(address)
    logging.getLogger("datasets").setLevel(logging.WARNING)  # It tells the versions of libraries.
    try:
        import datasets  # here, because the import takes long
    except ImportError as error:
        raise ImportError(
            f"--input={address} needs datasets: pip install 'bert_jax[datasets]'"
        ) from error
    try:
        builder = datasets.load_dataset_builder(name, config or None)
        return builder, builder.as_streaming_dataset(split=split)
    except OSError as error:
        raise OSError(
            f"cannot read --input={address}: {error}; expected {EXPECTED}, or a folder as NAME"
        ) from error
    except ValueError as error:
        message = " ".join(str(error).split())
        raise ValueError(f"--input={address}: {message}; expected {EXPECTED}") from error


def hub_size(address: str) -> tuple[int, str, int]:
    """Returns the size of a dataset in bytes, a hash of its version, and its number of files.

    The size is what its card says, or that of its files, which may be compressed.
    """
    builder, dataset = open_hub(address)
    *_, split = _parse(address)
    stated = (builder.info.splits or {}).get(split)
    size = stated.num_bytes if stated else 0
    for path in () if size else (builder.config.data_files or {}).get(split, ()):
        files, name = fsspec.core.url_to_fs(path)
        size += files.size(name) or UNKNOWN_BYTES
    return size or UNKNOWN_BYTES, builder.hash, dataset.num_shards


def _parse(address: str) -> tuple[str, str, str]:
    """Returns the name, the configuration and the split of an address."""
    parts = address.removeprefix(PREFIX).split(":")
    if not parts[0] or len(parts) > 3:
        raise ValueError(f"--input={address}: expected {EXPECTED}")
    name, config, split = (*parts, "", "")[:3]
    return os.path.expanduser(name), config, split or "train"
