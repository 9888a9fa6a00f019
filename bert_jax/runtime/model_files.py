"""Reads the files of published models as a download leaves them: Git LFS pointers, hub caches."""

import json
import pathlib
import re


def check_not_pointer(path: pathlib.Path) -> None:
    """Raises ValueError for a pointer of Git LFS, which a clone without LFS has instead of a file.

    Raises FileNotFoundError without a file.
    """
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            fix = "run `git lfs pull`, or download the file itself"
            raise ValueError(f"{path} is a Git LFS pointer, not the file: {fix}")


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON object. Raises FileNotFoundError or ValueError, naming the file."""
    check_not_pointer(path)
    return parse_json(path.read_bytes(), path)


def read_list(path: pathlib.Path) -> list:
    """Reads a JSON array. Raises as `read_json`."""
    check_not_pointer(path)
    return _parse(path.read_bytes(), path, list, "array")


def read_optional(path: pathlib.Path) -> dict:
    """Reads a JSON object, empty if there is no such file. Raises ValueError as `read_json`."""
    return read_json(path) if path.exists() else {}


def parse_json(content: bytes, source: str | pathlib.Path) -> dict:
    """Returns a JSON object. Raises ValueError, naming the source."""
    return _parse(content, source, dict, "object")


def _parse(
    content: bytes, source: str | pathlib.Path, expected_type: type, name: str
) -> dict | list:
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(values, expected_type):
        raise ValueError(f"{source}: expected a JSON {name}, found {type(values).__name__}")
    return values


def hub_hint(name: str) -> str:
    """Returns how to download the model `name` from a hub; "" if that cannot be its name."""
    path = pathlib.Path(name)
    is_file = path.suffix in (".txt", ".json", ".model")
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not is_file
    if not is_name or ("/" in name and path.parent.exists()):
        return ""
    return f"for a model on a hub, first run: hf download {name} --local-dir DIR"


def find_snapshot(directory: pathlib.Path) -> pathlib.Path:
    """Returns the snapshot of a folder `models--OWNER--NAME` of the cache of Hugging Face's hub.

    It is the one of the branch main, or the only one. `directory` may also be the folder
    `snapshots` in it; any other directory is returned as it is. Raises ValueError if several
    snapshots are left to choose from, and FileNotFoundError if there is none, or for a cache of
    several models.
    """
    if directory.name == "snapshots" and directory.parent.name.startswith("models--"):
        directory = directory.parent
    snapshots = sorted(each for each in directory.glob("snapshots/*") if each.is_dir())
    if not snapshots:
        if models := sorted(directory.glob("models--*")):
            choice = f"choose one of them, such as {models[0]}"
            raise FileNotFoundError(f"{directory} is a cache of several models: {choice}")
        if directory.name.startswith("models--") and (directory / "refs").exists():
            raise FileNotFoundError(f"{directory} holds no snapshot: download the model again")
        return directory
    main = directory / "refs/main"
    if (
        main.exists()
        and directory / "snapshots" / main.read_text(encoding="utf-8").strip() in snapshots
    ):
        return directory / "snapshots" / main.read_text(encoding="utf-8").strip()
    if len(snapshots) > 1:
        raise ValueError(
            f"{directory} holds {len(snapshots)} snapshots: choose {snapshots[0]}, ..."
        )
    return snapshots[0]
