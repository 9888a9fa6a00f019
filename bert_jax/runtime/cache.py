"""Where this host keeps copies and results that can be made again."""

import hashlib
import os
import pathlib


def cache_directory(kind: str, *key: str) -> pathlib.Path:
    """Returns the directory on this host for local copies of a `kind`, identified by `key`.

    It is in ~/.cache/bert_jax, or in $XDG_CACHE_HOME.
    """
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    return pathlib.Path(root).expanduser().absolute() / "bert_jax" / kind / name
