"""Shipped files keep to what Transformers can copy and load anywhere."""

import ast
import re
import sys

import pytest

from dflash.checkpoint import shipped_files

ALLOWED = {"torch", "transformers"} | set(sys.stdlib_module_names)
FILES = shipped_files()


def test_the_files_are_found():
    assert {"configuration_dflash.py", "modeling_dflash.py", "decoding_dflash.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in ALLOWED for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)
            assert node in tree.body, "a sibling must be imported at top level"
            assert path.with_name(f"{node.module}.py") in FILES, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in ALLOWED, ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_text(path):
    """Transformers finds siblings by a regular expression over lines, docstrings included."""
    text = path.read_text()
    siblings = re.findall(r"^\s*from\s+\.(\S+)\s+import", text, flags=re.MULTILINE)
    siblings += re.findall(r"^\s*import\s+\.(\S+)\s*$", text, flags=re.MULTILINE)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) and node.level]
    assert sorted(siblings) == sorted(node.module for node in nodes)
    assert not re.search(r"\bAuto\w+\.register\(", text), "a registered class would win over the shipped one"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_model_finishes_its_initialisation(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and any("PreTrainedModel" in ast.unparse(base) for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    assert ast.unparse(method.body[-1]) == "self.post_init()"
