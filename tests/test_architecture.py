"""Imports run one way: a folder imports only what is below it in the flow, never back."""

import ast
import functools
import re
import subprocess
import sys
import tomllib

import pytest

from tests.helpers.commands import ROOT

# From the bottom up: each may import what is on the lines above its own, and its own folder.
LEVELS = (
    ("runtime",),
    ("sharding", "tokenizers", "losses"),
    ("data",),
    ("model",),
    ("objectives",),
    ("checkpoints",),
    ("training",),
    ("tasks",),
    ("finetuning", "inference"),
    ("sweeps", "pods"),
    ("pretrain", "finetune"),
    ("sweep", "predict", "fitting"),
)
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}
PACKAGE = ROOT / "bert_jax"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


@functools.cache
def imported_modules(name: str) -> set[str]:
    """Returns the modules of the package that module `name` imports, wherever in the file."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        package_names = (name for name in names if name.startswith("bert_jax."))
        imported |= {name.removeprefix("bert_jax.") for name in package_names}
    return imported & MODULES.keys()


def test_every_module_has_a_level():
    assert {name.partition(".")[0] for name in MODULES} == LEVEL.keys()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_import_runs_back_between_folders(name):
    folder = name.partition(".")[0]
    for module in imported_modules(name):
        below = module.partition(".")[0]
        assert below == folder or LEVEL[below] < LEVEL[folder], f"{name} imports {module}"


def test_no_cycle_within_a_folder():
    remaining = {name: imported_modules(name) for name in MODULES}
    while remaining:
        free = {name for name, imports in remaining.items() if not imports & remaining.keys()}
        assert free, f"these import each other: {sorted(remaining)}"
        remaining = {name: imports for name, imports in remaining.items() if name not in free}


ENCODED = re.compile(r"open|.*\.(open|read_text|write_text|TextIOWrapper)", re.DOTALL)
# Functions of these names with an encoding of their own, or none.
OTHERS = (
    "os.open",
    "tensorstore.KvStore.open",
    "tensorstore.open",
    "tokenize.open",
    "tables.read_text",
)


def calls_in_the_encoding_of_the_locale(code: str) -> list[str]:
    """Returns the calls that read or write text, of a file or a program, without an encoding."""
    found = []
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        text, name = ast.unparse(call), ast.unparse(call.func)
        is_text = ENCODED.fullmatch(name) and name not in OTHERS
        is_text = is_text and not re.search(r"['\"][rwax]\+?b['\"]", text)
        is_text = is_text or any(
            each.arg in ("text", "universal_newlines") for each in call.keywords
        )
        has_encoding = any(each.arg == "encoding" for each in call.keywords)
        if is_text and not has_encoding:
            found.append(text)
    return found


@pytest.mark.parametrize(
    "folder", ["bert_jax", "bert_corpus", "benchmarks", "configs", "experiments", "tools"]
)
def test_text_is_read_and_written_in_utf8_whatever_the_locale(folder):
    for path in (ROOT / folder).rglob("*.py"):
        calls = calls_in_the_encoding_of_the_locale(path.read_text(encoding="utf-8"))
        assert not calls, f"{path}: {calls}"


def test_every_folder_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        path.parent.relative_to(ROOT)
        for package in ("bert_jax", "bert_corpus", "configs", "tools")
        for path in (ROOT / package).rglob("*.py")
    }
    names = {".".join(folder.parts) for folder in folders}
    installed = {
        f"bert_jax.{name}" if name.startswith(("configs", "tools")) else name for name in names
    }
    assert set(project["packages"]) == installed


def test_no_file_is_a_symbolic_link():
    names = "bert_corpus bert_jax benchmarks configs docs experiments tests tools"
    folders = [ROOT / name for name in names.split()]
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(paths) > len(folders) and not [path for path in paths if path.is_symlink()]


def test_corpora_are_built_without_jax():
    program = "import bert_corpus.build, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_no_run_needs_what_builds_corpora():
    # But a pod's report assumes the rows that bert_corpus builds by default.
    runs = {name: path for name, path in MODULES.items() if not name.startswith("pods.")}
    assert not [name for name, path in runs.items() if "bert_corpus" in path.read_text()]


def test_only_the_estimates_of_cycles_import_the_kernels():
    # The plan, model/execution.py, imports the module that the architecture's file names.
    kernels = "model.tpu_kernels."
    importing = {
        name
        for name in MODULES
        if not name.startswith((kernels, "pods.estimate."))
        and any(module.startswith(kernels) for module in imported_modules(name))
    }
    assert not importing
    # Lowering, not a setting, chooses what model/cpu.py has: see there.
    users = {name for name in MODULES if "model.cpu" in imported_modules(name)}
    assert users == {"model.attention", "model.blocked_attention", "model.layers"}


def test_versions_in_the_readme_are_those_of_the_lock():
    lock = (ROOT / "requirements.lock").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    names = {"JAX": "jax", "Flax": "flax", "Orbax": "orbax-checkpoint", "Optax": "optax"}
    for name, package in (names | {"tokenizers": "tokenizers", "NumPy": "numpy"}).items():
        locked = re.findall(rf"^{package}==([\d.]+)", lock, re.MULTILINE)
        assert locked and f"{name} {locked[0]}" in readme
        assert all(version in readme for version in locked)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/tpu.md"]
)
def test_files_that_a_page_names_exist(page):
    names = re.findall(r"`([\w./]+/[\w.]+\.py)`", (ROOT / page).read_text(encoding="utf-8"))
    names = [name for name in names if not name.endswith("/NAME.py")]
    folders = ROOT, PACKAGE
    missing = [name for name in names if not any((each / name).exists() for each in folders)]
    assert names and not missing


def test_test_modules_do_not_import_each_other():
    for path in (ROOT / "tests").rglob("test_*.py"):
        for module in re.findall(r"^ *from (\S+) import", path.read_text(), re.MULTILINE):
            assert "test_" not in module, f"{path} imports {module}"
