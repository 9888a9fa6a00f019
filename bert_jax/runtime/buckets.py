"""Addresses of buckets (gs://) in place of local directories: paths, checks, and local copies.

A bucket is read and written through etils.epath and gcsfs, and the arrays of checkpoints through
TensorStore. docs/cloud_tpu.md says what differs from a local directory.
"""

import concurrent.futures
import importlib.util
import logging as std_logging
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence

import fsspec
from absl import logging
from etils import epath

from bert_jax.runtime.cache import cache_directory

# Without this, etils would prefer TensorFlow where that is installed.
os.environ.setdefault("EPATH_USE_TF", "false")
# Other processes, and TensorStore in this one, change directories without gcsfs's knowing.
fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False

std_logging.getLogger("gcsfs").setLevel("CRITICAL")  # It logs each error that it raises.
std_logging.getLogger("fsspec").setLevel("WARNING")  # Logs every file.

COPIES_IN_FLIGHT = 16

_reached: set[str] = set()


def is_bucket(path: str | os.PathLike) -> bool:
    """Returns whether a path is the address of a bucket."""
    return str(path).startswith("gs://")


def as_path(address: str | os.PathLike) -> pathlib.Path | epath.Path:
    """Returns a local path, or for gs:// a path with the same methods, whose bucket was reached.

    Raises ValueError for other addresses, ImportError without gcsfs, FileNotFoundError for a
    missing bucket, and OSError if it cannot be reached, also for lack of credentials.
    """
    text = os.fspath(address)
    if not re.match(r"\w+:/", text):
        return pathlib.Path(text)
    if not re.match(r"gs://[^/]", text):
        raise ValueError(
            f"{text}: expected a local directory, or gs://BUCKET/... as a string, because "
            "pathlib.Path would remove a slash; mount other kinds of buckets"
        )
    if not importlib.util.find_spec("gcsfs"):
        raise ImportError(f"{text}: buckets need gcsfs: pip install 'bert_jax[buckets]'")
    _check_reachable(text.split("/")[2])
    return epath.Path(text)


def _check_reachable(bucket: str) -> None:
    """Raises OSError unless the objects of a bucket can be listed; asks once per process."""
    if bucket in _reached:
        return
    try:
        # Needs no permission but that of listing objects.
        fsspec.filesystem("gcs").ls(bucket, max_results=1)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the bucket gs://{bucket} does not exist: check its name, or create it with gcloud "
            f"storage buckets create gs://{bucket} --location=REGION"
        ) from error
    except Exception as error:  # gcsfs, aiohttp and google.auth raise their own.
        reason = " ".join(str(error).split())
        if getattr(error, "code", None) in (401, "401") or "Invalid Credentials" in reason:
            fix = (
                "credentials are missing or have expired: run gcloud auth application-default "
                "login, or on a virtual machine attach a service account"
            )
        elif reason.startswith("Forbidden"):
            fix = "the account needs roles/storage.objectUser on the bucket"
        else:
            fix = "check the network, and that storage.googleapis.com can be reached from here"
        raise OSError(f"cannot read gs://{bucket} ({reason[:300]}): {fix}") from error
    _reached.add(bucket)


def absolute(path: pathlib.Path | epath.Path) -> pathlib.Path | epath.Path:
    """Returns an absolute path; etils would prefix gs:// with the current directory."""
    return path if is_bucket(path) else path.absolute()


def remove_tree(path: pathlib.Path | epath.Path) -> None:
    """Removes a directory if it exists; ignores errors if it is local."""
    if is_bucket(path):
        path.rmtree(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def copy_to_cache(directory: epath.Path, newest: str, names: Sequence[str]) -> pathlib.Path:
    """Copies files of a directory on a bucket to this host, except those copied before.

    Files that are written again are copied again if the file `newest` was written again after
    them. Returns the local directory. Raises FileNotFoundError for a missing file, and OSError.
    """
    files = fsspec.filesystem("gcs")
    generation = files.info(str(directory / newest))["generation"]
    copy = cache_directory("corpora", str(directory), generation)
    missing = [name for name in names if not (copy / name).exists()]

    def copy_file(name: str) -> None:
        # Complete once it has its name: other processes may copy it at the same time.
        partial = copy / f"{name}.{os.getpid()}"
        files.get_file(str(directory / name), str(partial))
        partial.replace(copy / name)

    if missing:
        logging.info("Copying %d files of %s to %s", len(missing), directory, copy)
    try:
        copy.mkdir(parents=True, exist_ok=True)
        _for_each(missing, copy_file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(
            f"cannot copy {directory} to {copy}: {error}. Free disk space, or set XDG_CACHE_HOME "
            "to a directory of a larger disk"
        ) from error
    return copy


def copy_to_bucket(source: pathlib.Path, directory: epath.Path, names: Sequence[str]) -> None:
    """Copies files of a local directory to a directory on a bucket."""
    files = fsspec.filesystem("gcs")
    _for_each(names, lambda name: files.put_file(str(source / name), str(directory / name)))


def _for_each(names: Sequence[str], function: Callable[[str], None]) -> None:
    """Calls `function` with each name, in threads: each request to a bucket takes long."""
    with concurrent.futures.ThreadPoolExecutor(COPIES_IN_FLIGHT) as executor:
        list(executor.map(function, names))
