"""Where a class that a recipe names comes from. Its file is found and parsed, never imported: that is for workers."""

import ast
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from headway.errors import RecipeError, suggest


def find_package(name: str) -> Path | None:
    """The folder of a package, or the file of a module, as workers would find it: not in the current folder."""
    python_path = [os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    current = os.path.realpath(".")
    path = [entry for entry in sys.path if entry and (os.path.realpath(entry) != current or current in python_path)]
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.origin is None:
        return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    origin = Path(spec.origin)
    return origin.parent if spec.submodule_search_locations else origin


def find_module_file(module: str) -> Path | None:
    """The file of a module as workers would find it; None if there is none."""
    top, *inner = module.split(".")
    package = find_package(top)
    if package is None or package.is_file():
        return package if not inner else None
    place = package.joinpath(*inner)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file if file.is_file() else None


def check_class(name: str, key: str) -> None:
    """Raise RecipeError unless workers will find `package.module:Class`; `key` is the recipe's."""
    module, _, class_name = name.partition(":")
    top, *inner = module.split(".")
    package = find_package(top)
    if package is None:
        here = next((file for file in (Path(f"{top}.py"), Path(top)) if file.exists()), None)
        hint = f"install the package that has {top}, or add its folder to PYTHONPATH"
        if here is not None:
            hint = f"{here} is in this folder: put PYTHONPATH=. before the command"
        raise RecipeError(f"{key} = {name!r}: there is no module {top}", hint=hint)
    if package.is_file():
        file = package
        if inner:
            raise RecipeError(f"{key} = {name!r}: {file} is no package", hint=f"for example {top}:{class_name}")
    else:
        place = package.joinpath(*inner)
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        if file.parent.is_dir() and not list(file.parent.glob(f"{file.stem}.*.so")):
            raise RecipeError(f"{key} = {name!r}: there is no {file}", hint="check the name of the module")
        return
    if file.suffix == ".py":
        _check_defines(file, class_name, f"{key} = {name!r}")


def _check_defines(file: Path, name: str, what: str) -> None:
    """Raise RecipeError if a file's own text shows that it does not define a name."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None) or 1
        raise RecipeError(f"{what}: {file}:{line} is no Python", hint=str(error)) from None
    names, coroutines = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef) and not node.decorator_list:  # a decorator may make it plain
            coroutines.add(node.name)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if name in coroutines - names:
        raise RecipeError(
            f"{what}: {name} of {file} is async, and nothing awaits it",
            hint="a reward is a plain function, an environment or a loss a class: write def, not async def",
        )
    if name not in names and "*" not in names and "__getattr__" not in names:
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        hint = suggest(name, defined, f"look into {file}") if defined else f"{file} defines no class and no function"
        raise RecipeError(f"{what}: {file} has no {name}", hint=hint)
