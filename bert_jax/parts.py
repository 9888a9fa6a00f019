"""Finds the parts of a run that a configuration names: an architecture, an objective, a task."""

import importlib
import pathlib
import sys
from types import ModuleType


def import_part(package: str, name: str, only_imported: bool = False) -> ModuleType:
    """Returns the file `name` of `package`, or a module elsewhere by its dotted name.

    `only_imported` is for names that come with a checkpoint, which must not run code of its choice:
    a module elsewhere must then have been imported before. Raises ValueError.
    """
    module = name if "." in name else f"{package}.{name}"
    if only_imported and "." in name and name not in sys.modules:
        raise ValueError(f"the checkpoint needs the module {name!r}: import it before")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # Something that the part imports.
            raise
    folder = pathlib.Path(importlib.import_module(package).__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    expected = f"expected {', '.join(names)}, or the dotted name of a module of your own"
    raise ValueError(f"{package} has no file {name!r}: {expected}")
