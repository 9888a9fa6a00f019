"""Finds the parts of a run that a configuration names: an architecture, an objective, a task."""

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType


def import_modules(names: Iterable[str]) -> None:
    """Imports the modules of the flag --import. Raises ValueError for one that is not found."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # Something that the module imports.
                raise
            raise ValueError(
                f"--import={name}: not found: expected it on the Python path"
            ) from None


def import_part(package: str, name: str, offers: str, only_imported: bool = False) -> ModuleType:
    """Returns the file `name` of `package`, or a module elsewhere by its dotted name.

    `offers` is a name that the file must define. `only_imported` is for names that come with a
    checkpoint, which must not run code of its choice: a module elsewhere must then have been
    imported before. Raises ValueError.
    """
    module = name if "." in name else f"{package}.{name}"
    if only_imported and "." in name and name not in sys.modules:
        fix = f"import it before; with a program, --import={name}"
        raise ValueError(f"the checkpoint needs the module {name!r}: {fix}")
    problem = f"does not define {offers}"
    try:
        part = importlib.import_module(module)
        if hasattr(part, offers):
            return part
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # Something that the part imports.
            raise
        problem = "is not found: expected it on the Python path"
    if "." in name:
        raise ValueError(f"the module {name!r} {problem}")
    folder = importlib.import_module(package)
    files = {file.name: f"{package}.{file.name}" for file in pkgutil.iter_modules(folder.__path__)}
    names = [each for each in files if hasattr(importlib.import_module(files[each]), offers)]
    own = "the dotted name of a module of your own, as in my_package.my_file"
    expected = f"expected {', '.join(sorted(names))}, or {own}"
    raise ValueError(f"{package} has no file {name!r} with {offers}: {expected}")
