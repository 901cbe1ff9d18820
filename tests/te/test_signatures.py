"""Every call to Transformer Engine (TE) fits the signature in TE's own source, and so does every double of it.

TE and its extension are not imported (see signatures.py), so this holds our calls to the pinned release on any machine.
What is compiled has no signature in the wheel. There the doubles' signatures count, which must take every call of TE's
own Python (and be the compiled ones: test_real.py), and without a double a call must be as TE's own.
"""

import ast
import inspect
from functools import cache
from pathlib import Path

import pytest

from tests.te.signatures import PACKAGES, REPO, Sources, Use, te_sources, uses

DOUBLES = REPO / "tests" / "doubles"
EXTENSION = "transformer_engine_torch"
EP_BUFFER = """class EpBuffer:
    def __init__(self, top_k, max_tokens_per_rank, hidden_dim, num_local_experts, recv_capacity_per_rank=None,
            alignment=0, payload_dtype=torch.bfloat16, device=None, dispatch_fwd_quant_recipe=None,
            combine_bwd_quant_recipe=None):"""


@pytest.fixture(scope="module")
def te() -> Sources:
    return te_sources()


@pytest.fixture(scope="module")
def calls_of_te(te) -> dict[str, list[Use]]:
    """How TE's own Python calls each function of its extension."""
    calls: dict[str, list[Use]] = {}
    for use in te.uses(EXTENSION):
        if use.call and use.name.startswith(f"{EXTENSION}."):
            calls.setdefault(use.name, []).append(use)
    return calls


@cache
def our_files() -> list[Path]:
    """Our files that call TE. Other tests call doubles, some of them wrongly, to see that refused, or replace parts."""
    patterns = ("titan_moe/**/*.py", "scripts/*.py", "benchmarks/*.py", "tests/gpu/*.py", "tests/te/test_*.py")
    files = [path for pattern in patterns for path in sorted(REPO.glob(pattern))]
    return [path for path in files if any(package in path.read_text() for package in PACKAGES)]


def mistakes(found: list[Use], te: Sources, calls_of_te: dict[str, list[Use]]) -> list[str]:
    """What TE would not take."""
    wrong, doubles = [], Sources(DOUBLES)
    for use in found:
        if use.name == EXTENSION:
            continue
        compiled = use.name.startswith(f"{EXTENSION}.")
        try:
            if compiled and use.name not in calls_of_te:
                raise AttributeError(f"Transformer Engine has no {use.name}, or never calls it")
            signature = (doubles if compiled else te).signature(use.name)
        except AttributeError as error:
            shapes = {call.shape() for call in calls_of_te.get(use.name, [])}
            if not shapes:
                wrong.append(f"{use.where}: {error}")
            elif use.call and use.shape() not in shapes:
                wrong.append(f"{use.where}: {use.name}{use.shape()}, but TE calls it with {shapes}")
            continue
        if use.call and (misfit := use.misfit(signature) if signature else f"{use.name} is nothing to call"):
            wrong.append(f"{use.where}: {misfit}")
    return wrong


def test_our_calls_fit(te, calls_of_te):
    found = [use for path in our_files() for use in uses(ast.parse(path.read_text()), str(path.relative_to(REPO)))]
    assert mistakes(found, te, calls_of_te) == []
    assert "transformer_engine._nccl_ep_library_installed" in {use.name for use in found if use.call}  # they are seen


def test_only_the_files_of_te_import_it():
    package = [path for path in our_files() if path.is_relative_to(REPO / "titan_moe")]
    importing = {path for path in package if list(uses(ast.parse(path.read_text()), path.name))}
    assert importing
    for path in importing:
        assert path.parent.name in ("moe", "precision") and path.name.startswith("te"), path
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert list(uses(ast.Module(top, []), path.name)) == [], "only inside functions"


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        ("from transformer_engine.pytorch.ep import EpBuffer as B\nB(8, 128, 64, 4, alignment=16)", None),
        (
            "from transformer_engine.pytorch.ep import EpBuffer as B\nB(8, 128, 64, 4, align=16)",
            "keyword argument 'align'",
        ),
        ("from transformer_engine.pytorch import ep\nep.EpBuffer(8, 128, 64)", "argument: 'num_local_experts'"),
        ("from transformer_engine.pytorch import ep\nep.ep_combine(buffer, x, 128)", "too many positional arguments"),
        ("from transformer_engine.pytorch.ep import ep_scatter", "has no transformer_engine.pytorch.ep.ep_scatter"),
        ("import transformer_engine.pytorch as te\nte.GroupedLinear(4, 8, 8, bais=False)", "keyword argument 'bais'"),
        ("import transformer_engine.pytorch as te\nte.GroupedLinear(4, 8, 8, bias=False)", None),  # through two imports
        ("import transformer_engine.pytorch as te\nte.ops.Sequential(*operations)", "spell them out"),
        (
            "def f():\n    import transformer_engine\n    return transformer_engine.is_ep()",
            "has no transformer_engine.is_ep",
        ),
        ("def f():\n    import transformer_engine as te\ndef g(te):\n    te.is_ep()", None),  # another te
        ("import transformer_engine as te\ndef g():\n    te = 1\n    te.is_ep()", None),
        ("import transformer_engine as te\ndef g():\n    te.is_ep()", "has no transformer_engine.is_ep"),
        ("import transformer_engine_torch as tex\ntex.get_cublasLt_version()", None),
        ("import transformer_engine_torch as tex\ntex.get_cublasLt_version(0)", "too many positional arguments"),
        ("import transformer_engine_torch as tex\ntex.swiglu(x, quantizer)", None),  # no double, but TE does so
        ("import transformer_engine_torch as tex\ntex.swiglu(x)", "but TE calls it with {(2, "),
        (
            "import transformer_engine_torch as tex\ntex.no_such_kernel()",
            "has no transformer_engine_torch.no_",
        ),
    ],
)
def test_a_wrong_call_is_seen(te, calls_of_te, source, mistake):
    """With samples in place of our sources."""
    wrong = mistakes(list(uses(ast.parse(source), "sample.py")), te, calls_of_te)
    assert (wrong == []) if mistake is None else (mistake in "".join(wrong)), wrong


def doubled(doubles: Sources) -> list[str]:
    """The dotted name of every module-level function and class of TE's doubles, and of the public methods."""
    names = []
    for path in sorted(path for package in PACKAGES for path in Path(str(doubles.root), package).rglob("*.py")):
        parts = path.relative_to(str(doubles.root)).with_suffix("").parts
        if parts[0] not in PACKAGES:
            continue  # of cuDNN; see test_cudnn.py
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(f"{module}.{node.name}")
            if isinstance(node, ast.ClassDef):
                methods = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
                names += [f"{module}.{node.name}.{method}" for method in methods if not method.startswith("_")]
    return names


def differences(doubles: Sources, te: Sources, calls_of_te: dict[str, list[Use]]) -> list[str]:
    """Where a double is not called as TE is. What TE does not have must say so with an underscore."""
    wrong = []
    for name in doubled(doubles):
        own, private = doubles.signature(name), name.rpartition(".")[2].startswith("_")
        if name.startswith(EXTENSION):
            calls = calls_of_te.get(f"{EXTENSION}.{name.rpartition('.')[2]}", [])
            wrong += [f"{name}: {call.misfit(own)}" for call in calls if own and call.misfit(own)]
            continue  # what TE does not call is the double's own: nobody else may call it either
        try:
            theirs = te.signature(name)
        except AttributeError as error:
            wrong += [] if private else [str(error)]
            continue
        if own != theirs:
            wrong.append(f"{name}: {own}, but TE's is {theirs}")
        if isinstance(doubles.find(name), ast.ClassDef) and isinstance(te.find(name), ast.ClassDef):
            more = doubles.attributes(name) - te.attributes(name)
            wrong += [f"{name}.{attribute}: TE's has no such attribute" for attribute in more if attribute[0] != "_"]
    return wrong


def test_doubles_have_the_signatures_of_te(te, calls_of_te):
    assert differences(Sources(DOUBLES), te, calls_of_te) == []


@pytest.mark.parametrize(
    ("path", "source", "difference"),
    [
        ("pytorch/ep.py", "def ep_prepare(buffer, topk_idx): ...", None),
        ("pytorch/ep.py", "def ep_prepare(buffer, ids): ...", "(buffer, ids), but TE's is (buffer, topk_idx)"),
        ("pytorch/ep.py", "def ep_finalize(group=None): ...", "but TE's is ()"),
        ("pytorch/ep.py", "def ep_everything(): ...", "has no transformer_engine.pytorch.ep.ep_everything"),
        ("pytorch/ep.py", "def _own_helper(): ...", None),
        ("pytorch/ep.py", f"{EP_BUFFER}\n        self.top_k = self._calls = 1", None),
        ("pytorch/ep.py", f"{EP_BUFFER}\n        self.rows = 1", "EpBuffer.rows: TE's has no such attribute"),
        ("pytorch/ep.py", EP_BUFFER.replace("alignment=0", "alignment=128") + "pass", "alignment='0'"),
        ("__init__.py", "def _nccl_ep_library_installed(path): ...", "but TE's is ()"),
        ("../transformer_engine_torch/gemm.py", "def get_cublasLt_version(device): ...", "argument: 'device'"),
    ],
)
def test_a_wrong_double_is_seen(te, calls_of_te, tmp_path, path, source, difference):
    file = tmp_path / "transformer_engine" / path
    for folder in (tmp_path / "transformer_engine", file.parent):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    file.write_text(source)
    wrong = differences(Sources(tmp_path), te, calls_of_te)
    assert (wrong == []) if difference is None else (difference in "".join(wrong)), wrong


def test_signatures_are_read_as_python_reads_them(tmp_path):
    """Against `inspect` on code that can be imported: every kind of parameter, methods, constructors."""
    (tmp_path / "sample.py").write_text(
        "class A:\n"
        "    def __init__(self, a, /, b, c=1, *d, e, f=2, **g): ...\n"
        "    def m(self, x, y=3): ...\n"
        "    @classmethod\n"
        "    def c(cls, x): ...\n"
        "    @staticmethod\n"
        "    def s(x, *, y=4): ...\n"
        "if True:\n"
        "    def f(x=5, **y): ...\n"
    )
    namespace: dict = {}
    exec((tmp_path / "sample.py").read_text(), namespace)
    real = namespace["A"]
    expected = {"A": real, "A.m": real(0, 0, e=0).m, "A.c": real.c, "A.s": real.s, "f": namespace["f"]}
    for name, function in expected.items():
        assert str(Sources(tmp_path).signature(f"sample.{name}")).replace("'", "") == str(inspect.signature(function))
