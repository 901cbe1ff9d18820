"""Reads the signatures of Transformer Engine (TE), and the calls that others make to it, out of source text with `ast`.

TE itself is not imported: that takes its compiled extension and the libraries of a GPU. Its Python sources are those of
the installed package, or of the wheel that `scripts/setup_env.py --dev` leaves in .venv/wheels.

A name is followed as an import would follow it: `transformer_engine.pytorch.GroupedLinear` through every `from ...
import` to the class itself. The functions of `transformer_engine_torch` are compiled, so the wheel does not say how
they are declared; it does say how TE's own Python calls them.
"""

import ast
import inspect
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from inspect import Parameter
from pathlib import Path

from titan_moe.moe.te import PINNED

REPO = Path(__file__).parents[2]
WHEEL = REPO / ".venv" / "wheels" / f"transformer_engine-{PINNED}-py3-none-any.whl"
PACKAGES = ("transformer_engine", "transformer_engine_torch")

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def te_sources() -> "Sources":
    """TE's Python, installed or as a wheel. Raises FileNotFoundError with the way out when there is neither."""
    try:
        return Sources(Path(str(metadata.distribution("transformer-engine").locate_file(""))))
    except metadata.PackageNotFoundError:
        pass
    if not WHEEL.exists():
        raise FileNotFoundError(f"{WHEEL} is missing: run `python3 scripts/setup_env.py --dev`, which downloads it")
    return Sources(zipfile.Path(WHEEL))


class Sources:
    """Packages below a folder, or in a zip file."""

    def __init__(self, root: Path | zipfile.Path) -> None:
        self.root = root
        self.module = cache(self._module)

    def _file(self, name: str) -> tuple[Path | zipfile.Path, bool] | None:
        """(the file of a module, whether it is a package)."""
        path = self.root
        for part in name.split("."):
            module, path = path / f"{part}.py", path / part
        if (path / "__init__.py").is_file():
            return path / "__init__.py", True
        return (module, False) if module.is_file() else None

    def _module(self, name: str) -> ast.Module | None:
        file = self._file(name)
        return file and ast.parse(file[0].read_text(encoding="utf-8"))

    def find(self, name: str) -> Definition | ast.Module:
        """What a dotted name stands for; AttributeError when TE has no such thing."""
        parts = name.split(".")
        length = next((n for n in range(len(parts), 0, -1) if self._file(".".join(parts[:n]))), 0)
        found = self.module(".".join(parts[:length])) if length else None
        for at in range(length, len(parts)):
            found = found and self._member(found, ".".join(parts[:at]), parts[at])
        if found is None:
            raise AttributeError(f"Transformer Engine has no {name}")
        return found

    def _member(self, owner, owner_name: str, name: str) -> Definition | ast.Module | None:
        stars = []
        for node in _statements(owner.body if isinstance(owner, ast.Module | ast.ClassDef) else []):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(node, owner_name)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{origin}.{alias.name}")
                    if alias.name == "*" and self._file(origin):
                        stars.append(origin)
        for origin in stars:
            try:
                return self.find(f"{origin}.{name}")
            except AttributeError:
                continue
        return None

    def _origin(self, node: ast.ImportFrom, module: str) -> str:
        """The absolute name of the module that a relative import is from."""
        if not node.level:
            return node.module or ""
        file = self._file(module)
        parts = module.split(".") + ["__init__"] * bool(file and file[1])
        return ".".join([*parts[: -node.level], *([node.module] if node.module else [])])

    def signature(self, name: str) -> inspect.Signature | None:
        """Of a function, a method as it is called, or a class's constructor, with defaults as source text; None of what
        is no such thing."""
        found = self.find(name)
        if isinstance(found, ast.FunctionDef):
            bound = isinstance(self.find(name.rpartition(".")[0]), ast.ClassDef)
            static = any(ast.unparse(decorator) == "staticmethod" for decorator in found.decorator_list)
            return function_signature(found, skip_first=bound and not static)
        return self._constructor(found) if isinstance(found, ast.ClassDef) else None

    def _constructor(self, node: ast.ClassDef) -> inspect.Signature | None:
        methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
        for method in ("__init__", "__new__"):
            if method in methods:
                return function_signature(methods[method], skip_first=True)
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
            return inspect.Signature(
                [_parameter(field.target.id, Parameter.POSITIONAL_OR_KEYWORD, field.value) for field in fields]
            )
        return None

    def attributes(self, name: str) -> set[str]:
        """Names that a class defines or that its methods set on an object, `__slots__` included."""
        found = self.find(name)
        assert isinstance(found, ast.ClassDef), name
        nodes = [node for node in ast.walk(found) if isinstance(node, ast.Attribute)]
        names = {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}
        for node in found.body:
            target = node.target if isinstance(node, ast.AnnAssign) else None
            names |= {target.id} if isinstance(target, ast.Name) else set()
            names |= {node.name} if isinstance(node, ast.FunctionDef) else set()
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
                names |= set(ast.literal_eval(node.value))
        return names

    def uses(self, package: str) -> "Iterator[Use]":
        """What TE's own modules do with a package of TE."""
        for path in sorted(_python_files(self.root / PACKAGES[0]), key=str):
            text = path.read_text(encoding="utf-8")
            if package in text:
                yield from uses(ast.parse(text), path.name)


def _python_files(folder: Path | zipfile.Path) -> Iterator[Path | zipfile.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _python_files(path)
        elif path.name.endswith(".py"):
            yield path


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under `if` and `try` included."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            yield from _statements(getattr(node, block, []))


def function_signature(node: ast.FunctionDef, skip_first: bool = False) -> inspect.Signature:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    kinds = [Parameter.POSITIONAL_ONLY] * len(args.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(args.args)
    parameters = [_parameter(arg.arg, kind, value) for arg, kind, value in zip(positional, kinds, defaults)]
    parameters = parameters[1:] if skip_first else parameters
    if args.vararg:
        parameters.append(_parameter(args.vararg.arg, Parameter.VAR_POSITIONAL, None))
    for arg, value in zip(args.kwonlyargs, args.kw_defaults):
        parameters.append(_parameter(arg.arg, Parameter.KEYWORD_ONLY, value))
    if args.kwarg:
        parameters.append(_parameter(args.kwarg.arg, Parameter.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


def _parameter(name: str, kind, default: ast.expr | None) -> Parameter:
    return Parameter(name, kind, default=Parameter.empty if default is None else ast.unparse(default))


@dataclass(frozen=True)
class Use:
    """One place where a name of TE is used, and how it is called there."""

    name: str  # dotted and absolute
    where: str
    call: ast.Call | None

    def misfit(self, signature: inspect.Signature) -> str | None:
        """Why this call does not fit the signature, or None."""
        assert self.call is not None
        keywords = {keyword.arg: keyword.value for keyword in self.call.keywords}
        if None in keywords or any(isinstance(argument, ast.Starred) for argument in self.call.args):
            return "* and ** hide the arguments: spell them out"
        try:
            signature.bind(*self.call.args, **keywords)
        except TypeError as error:
            return f"{error} in {self.name}{signature}"
        return None

    def shape(self) -> tuple[int, frozenset[str | None]]:
        """(number of positional arguments, names of the others)."""
        assert self.call is not None
        return len(self.call.args), frozenset(keyword.arg for keyword in self.call.keywords)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def uses(tree: ast.AST, where: str, outside: Mapping[str, str] | None = None) -> Iterator[Use]:
    """Every use, in a module or function and in the functions inside it, of a name that it imports from TE or that is
    one of TE's `outside`."""
    names = dict(outside or {})
    for node in _own(tree):  # a parameter or variable hides what the name stands for outside
        if isinstance(node, ast.arg):
            names.pop(node.arg, None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.pop(node.id, None)
    for node in _own(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                if package in PACKAGES:
                    names[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(f"{node.module}.{alias.name}", f"{where}:{node.lineno}", None)
    for child in ast.iter_child_nodes(tree):
        yield from _uses(child, names, where)


def _own(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are not inside a function in `tree`."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from _own(node)


def _uses(node: ast.AST, names: Mapping[str, str], where: str) -> Iterator[Use]:
    if isinstance(node, FUNCTIONS):
        yield from uses(node, where, names)
        return
    call = node if isinstance(node, ast.Call) else None
    name = _dotted(call.func if call else node, names)
    if name is not None:
        yield Use(name, f"{where}:{node.lineno}", call)
    inside = [*call.args, *call.keywords] if call and name else [] if name else ast.iter_child_nodes(node)
    for child in inside:
        yield from _uses(child, names, where)


def _dotted(node: ast.AST, names: Mapping[str, str]) -> str | None:
    """`ep.ep_dispatch` as an absolute name, when `ep` is TE's."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    owner = _dotted(node.value, names) if isinstance(node, ast.Attribute) else None
    return owner and f"{owner}.{node.attr}"
