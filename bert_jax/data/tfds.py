"""Opens TFDS datasets that were prepared as ArrayRecord, without TensorFlow."""

import os
from collections.abc import Sequence


def tfds_source(name: str, split: str, data_dir: str = "") -> Sequence[dict]:
    """Opens a split of a dataset that was prepared as ArrayRecord; never downloads anything.

    `name` is the TFDS name, such as "wiki40b/en", with or without the prefix "tfds:"; `data_dir` ""
    means TFDS's default. Examples hold numpy values, and bytes for text. Raises FileNotFoundError
    for a missing dataset, and ValueError for an unknown split or another file format.
    """
    # Imported here because the import takes half a second.
    from tensorflow_datasets.core import read_only_builder, registered

    name = name.removeprefix("tfds:")
    prepare = f"`tfds build {name} --file_format=array_record --overwrite`"
    try:
        builder = read_only_builder.builder_from_files(
            name, data_dir=os.path.expanduser(data_dir) or None
        )
    except registered.DatasetNotFoundError:
        raise FileNotFoundError(
            f"no prepared dataset tfds:{name} in {data_dir or 'the default data_dir of TFDS'}; "
            f"prepare it where TensorFlow is installed with {prepare}, or set another data_dir"
        ) from None
    try:
        return builder.as_data_source(split)
    except NotImplementedError:
        raise ValueError(
            f"tfds:{name} is prepared as {builder.info.file_format.value} in {builder.data_dir}; "
            f"expected array_record: prepare it again with {prepare}"
        ) from None
    except ValueError as error:
        raise ValueError(f"tfds:{name} in {builder.data_dir}: {error}") from None
