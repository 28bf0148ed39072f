"""Parts of the user's own: MODULE:ATTRIBUTE where a config takes the name of a part.

A part is a function or a class. It gets those of the arguments of its kind (`Key.own`), and of
`config`, that it has parameters for, by their names. docs/extending.md has an example of each kind.
"""

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from typing import Any

from vit_jax.config.defaults import find as find_key
from vit_jax.config.defaults import flatten
from vit_jax.config.key import is_own
from vit_jax.errors import UserError, one_line

LONGEST = 160  # letters of an error of the user's code
TRUSTED = "VIT_JAX_OWN_MODELS"
# The parts that configs and code of this process have named, with their modules.
named: dict[str, Any] = {}
beside: set[pathlib.Path] = set()  # folders of config files, at the end of sys.path


@dataclasses.dataclass(frozen=True)
class OwnPart:
    """A part, to be called with all arguments of its kind."""

    where: str  # what names it, for messages, such as "config key loss"
    name: str
    function: Callable
    wanted: frozenset[str]  # the arguments that it has parameters for
    config: Any

    def __call__(self, **arguments):
        """What the part returns; see `guard`."""
        arguments |= dict(config=self.config)
        chosen = {name: value for name, value in arguments.items() if name in self.wanted}
        return self.guard(self.function)(**chosen)

    def guard(self, function: Callable) -> Callable:
        """`function`, which is the part or comes from it; if it fails, a UserError has the line."""

        def guarded(*arguments, **more):
            try:
                return function(*arguments, **more)
            except Exception as error:
                if type(error).__module__.split(".")[0] == "vit_jax":
                    raise
                file = getattr(named.get(self.name), "__file__", None)
                raise self.error(f"fails, {line_of(error, file)}") from error

        return guarded

    def error(self, problem: str) -> UserError:
        """That the part does not fit: `problem` follows its name."""
        return UserError(f"{self.where}={self.name} {problem}: see docs/extending.md")


def line_of(error: BaseException, file: str | None) -> str:
    """ "FILE:LINE: ERROR: MESSAGE" of an error in the user's code; `file` is preferred."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or file, error.lineno))
    inside = [frame for frame in frames if frame[0] == file] or frames
    path, line = inside[-1]
    text = one_line(getattr(error, "msg", None) or error)
    if os.path.basename(frames[-1][0]) == "config_dict.py":  # its text is the quoted name of a key
        key = re.search(r"\w+", text)[0]
        text = f"the config has no {key}"
    if len(text) > LONGEST:
        text = f"{text[:LONGEST].rsplit(' ', 1)[0]} ..."
    return f"{os.path.basename(path or '?')}:{line}: {type(error).__name__}: {text}"


def shown(result) -> str:
    """What a part returned, by its shape and dtype if it has them."""
    if hasattr(result, "shape") and hasattr(result, "dtype"):
        return f"{result.dtype} {list(result.shape)}"
    return f"a {type(result).__name__}"


def search_here() -> None:
    """Puts the current folder on the path, as `python -m` does, but not the command `vit_jax`."""
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    importlib.invalidate_caches()


def place(spec) -> pathlib.Path | None:
    """The file of a module or the folder of a package; None if it is built in or not found."""
    if spec is None:
        return None
    path = [*(spec.submodule_search_locations or []), spec.origin or ""][0]
    return pathlib.Path(path).resolve() if os.path.isabs(path) else None


def look_beside(config_file: str, config) -> None:
    """Finds modules in the folder of a config file, too, if the config names any of them; those of
    the current folder and installed ones come before them.

    Raises:
      UserError: one has the name of a module beside a config file that was loaded earlier.
    """
    mixed = [name.partition("@")[0] for name, _ in config.data.get("mixture", ())]
    names = [name for _, name in parts_of(config)] + list(filter(is_own, mixed))
    folder = pathlib.Path(config_file).resolve().parent
    search_here()
    for root in sorted({name.partition(":")[0].split(".")[0] for name in names}):
        ours = place(PathFinder.find_spec(root, [str(folder)]))
        found = place(PathFinder.find_spec(root))
        if ours and not found:
            sys.path.append(str(folder))
            beside.add(folder)
        elif ours and found != ours and found.parent in beside:
            raise two_modules(f"config file {config_file}", root, found, ours)


def two_modules(where: str, name: str, first: pathlib.Path, second: pathlib.Path) -> UserError:
    return UserError(
        f"{where}: the module {name} is {second}, but in this process it is {first}: rename one of "
        "them, or use another process"
    )


def import_module(module: str, where: str):
    """The module of a part; `where`: what names it, for messages."""
    search_here()
    root = module.split(".")[0]
    loaded = place(getattr(sys.modules.get(root), "__spec__", None))
    found = place(PathFinder.find_spec(root))
    if loaded and found and loaded != found:
        raise two_modules(where, root, loaded, found)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise UserError(
                f"{where}: there is no module {missing!r} in {os.getcwd()}, in the folder of the "
                "config file, or installed: correct the name, or run the command where the file is"
            ) from None
        spec = importlib.util.find_spec(root)
        file = spec.origin if spec and "." not in module else None
        raise UserError(
            f"{where}: the module can't be imported, {line_of(error, file)}: correct it"
        ) from error


def find(where: str, name: str) -> Callable:
    """What `name` stands for; `where`: what names it, for messages.

    Raises:
      UserError: there is no such module or attribute, the module fails, or it can't be called.
    """
    where = f"{where}={name}"
    module_name, _, attribute = name.partition(":")
    module = import_module(module_name, where)
    known = vars(module)
    if attribute not in known and not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, known, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise UserError(f"{where}: {module_name} has no {attribute!r}{hint}: correct it")
    part = getattr(module, attribute)
    if not callable(part):
        raise UserError(
            f"{where}: {attribute} is a {type(part).__name__}: name a function or a class"
        )
    named[name] = module
    return part


def wanted_by(part: Callable, where: str, known: tuple[str, ...]) -> frozenset[str]:
    """Those of the arguments `known` that a part has parameters for.

    Raises:
      UserError: it has other parameters, without a default.
    """
    try:
        parameters = inspect.signature(part).parameters
    except (TypeError, ValueError):
        raise UserError(f"{where} does not show its parameters: wrap it in a function") from None
    kinds = [parameter.kind for parameter in parameters.values()]
    for name, parameter in parameters.items():
        is_by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_open or parameter.default is not parameter.empty:
            continue
        if name not in known or not is_by_name:
            raise UserError(
                f"{where} has the parameter {name!r}, but it can have {', '.join(known)} alone, by "
                "name: give it a default, or read it from config.user"
            )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return frozenset(known)
    return frozenset(known) & parameters.keys()


def part(key: str, name: str, config) -> OwnPart:
    """A part that a config names, ready to be called.

    Args:
      key: of the config, such as "loss".
      name: MODULE:ATTRIBUTE.
      config: that the part gets if it has a parameter of this name.

    Raises:
      UserError: it can't be found or called with the arguments of its kind.
    """
    where = f"config key {key}"
    function = find(where, name)
    wanted = wanted_by(function, f"{where}={name}", (*find_key(key).own, "config"))
    return OwnPart(where, name, function, wanted, config)


def parts_of(config) -> Iterator[tuple[str, str]]:
    """(key, name) of every part of the user's own that a config names, but for those in a
    mixture.
    """
    for key, value in flatten(config):
        if find_key(key).own:
            names = value if isinstance(value, tuple) else (value,)
            yield from ((key, name) for name in names if is_own(name))


def check(config) -> None:
    """Imports every part of the user's own, and raises a UserError for the first that can't be
    found, or has parameters that it can't get.
    """
    for key, name in parts_of(config):
        part(key, name, config)


def code() -> dict[str, str]:
    """Digests of the code of all parts so far, by name: all processes must have the same."""
    files = {name: files_of(module) for name, module in sorted(named.items())}
    return {f"code of {name}": digest(found) for name, found in files.items() if found}


def files_of(module) -> list[pathlib.Path]:
    """The file of a module, or all Python files of the package that it is in."""
    package = sys.modules.get(module.__name__.split(".")[0])
    found = []
    for folder in getattr(package, "__path__", []):
        found += sorted(pathlib.Path(folder).rglob("*.py"))
    return found or [pathlib.Path(file) for file in [getattr(module, "__file__", None)] if file]


def digest(files: list[pathlib.Path]) -> str:
    result = hashlib.sha256()
    for file in files:
        result.update(hashlib.sha256(file.read_bytes()).digest())
    return result.hexdigest()[:16]


def check_trusted(name: str) -> None:
    """Raises UserError if a checkpoint names a model whose code the user may not have meant to run.

    To import a module and to call what is in it is to run code that a file from anywhere names. So
    the module must be a file in the current folder, named by the config or the code of this
    process, or listed in the variable VIT_JAX_OWN_MODELS. A package in the current folder does not
    suffice: the folder of the weights themselves may be one.
    """
    module = name.partition(":")[0]
    allowed = os.environ.get(TRUSTED, "").split(",")
    if name in named or module in allowed or module.split(".")[0] in allowed or is_here(module):
        return
    raise UserError(
        f"the weights are of the model {name}, and {module} is not in the current folder as a "
        "single file: run the command where it is, or, if you trust these weights to run its code, "
        f"set {TRUSTED}={module}"
    )


def is_here(module: str) -> bool:
    """Whether a module is a file of the current folder, not one of a package."""
    if "." in module:
        return False
    search_here()
    loaded = sys.modules.get(module)
    spec = loaded.__spec__ if loaded else PathFinder.find_spec(module)
    if spec is None or spec.submodule_search_locations is not None or not spec.has_location:
        return False
    return pathlib.Path(spec.origin).parent.resolve() == pathlib.Path.cwd().resolve()
