"""docs/faults.md names tests that are there, says which of them are slow, and leaves out no file of tests/faults."""

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
TESTS = Path(__file__).parent


def rows() -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """(fault, its tests as (file, function, said to be slow)) of each row of each fault matrix."""
    found, inside = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[-1] == "test":
            inside = True
        elif inside and not line.startswith("|---"):
            assert len(cells) == 3, f"not three cells: {line}"
            tests = re.findall(r"`([\w/]+\.py)::(\w+)`( \(slow\))?", cells[2])
            found.append((cells[0], [(file, name, bool(slow)) for file, name, slow in tests]))
    return found


def functions(file: str) -> dict[str, bool]:
    """Name -> whether marked as slow, of the tests that pytest would collect in it."""
    tree = ast.parse((TESTS / file).read_text())
    return {
        node.name: any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_row_names_a_test_that_is_there():
    assert len(rows()) > 30
    for fault, tests in rows():
        assert tests, f"{fault}: no test"
        for file, name, slow in tests:
            there = functions(file)
            assert name in there, f"{fault}: {file} has no {name}"
            assert there[name] == slow, f"{fault}: {name} is {'' if there[name] else 'not '}slow"


def test_every_file_of_fault_tests_is_on_the_page():
    named = {file for _, tests in rows() for file, _, _ in tests}
    assert {f"faults/{path.name}" for path in (TESTS / "faults").glob("test_*.py")} <= named
