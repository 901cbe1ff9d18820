"""What CONTRIBUTING.md points to is there, what it calls writes what it says, and all agree on the version."""

import ast
import re
import tomllib
from pathlib import Path

import yaml

REPO = Path(__file__).parents[1]
PAGE = (REPO / "CONTRIBUTING.md").read_text()


def test_what_the_page_names_is_there():
    named = re.findall(r"`((?:tests|benchmarks|docs|titan_moe|train_configs)/[\w/.]*)(?:::(\w+))?`", PAGE)
    named += re.findall(r"\]\(([\w/.]+)\)()", PAGE)
    assert len(named) > 15
    for path, function in named:
        assert (REPO / path).exists(), path
        tree = ast.parse((REPO / path).read_text()) if function else ast.parse("")
        assert function in {"", *(node.name for node in tree.body if isinstance(node, ast.FunctionDef))}, function


def test_generators_are_there():
    commands = re.search(r"## Generated text.*?```bash\n(.*?)```", PAGE, flags=re.DOTALL)[1].splitlines()
    assert len(commands) > 5
    for command in commands:
        module, pages = re.fullmatch(r"python (?:-m )?([\w./]+) +[#>] (.*)", command).groups()
        path = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
        for named in (path, *pages.split(", ")):
            assert (REPO / named).exists(), named


def test_one_version():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    newest = re.search(r"^## ([\d.]+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert citation["version"] == newest == project["version"]
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
