"""Nothing that is loaded can run something: of checkpoints that is shown in tests/faults, here that there is no other
way in."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "train.py", *sorted((ROOT / "titan_moe").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
LOADERS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "eval", "exec", "yaml.load", "joblib.load"}


def risks(code: str) -> list[str]:
    """Calls that can run what they read, but for torch.load with weights_only=True; and options that allow it."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        options = {word.arg: ast.unparse(word.value) for word in node.keywords}
        name = ast.unparse(node.func)
        if name in LOADERS and not (name == "torch.load" and options.get("weights_only") == "True"):
            found.append(name)
        found += [option for option in ("trust_remote_code", "allow_pickle") if options.get(option, "False") != "False"]
    return found


def test_no_source_loads_what_could_run():
    found = {path.name: risks(path.read_text()) for path in SOURCES}
    assert len(found) > 50 and not any(found.values()), {name: calls for name, calls in found.items() if calls}


def test_what_would_be_found():
    code = "torch.load(f)\npickle.load(f)\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=True)\nm.eval()"
    assert risks(code) == ["torch.load", "pickle.load", "allow_pickle"]
