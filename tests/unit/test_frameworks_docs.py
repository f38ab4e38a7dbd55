"""The page on frameworks names what is there: its code parses, and its imports and calls resolve."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra torch")

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def test_names_and_keywords_of_the_recipes_exist() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    trees = [ast.parse(block) for block in blocks]
    names: dict[str, object] = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        assert node.module is not None
        module = importlib.import_module(node.module)
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")
            names[alias.name] = getattr(module, alias.name)
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner = names.get(function.value.id)
            if owner is not None:
                assert callable(getattr(owner, function.attr)), ast.unparse(call)
