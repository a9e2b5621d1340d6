"""The direction of imports, which docs/architecture.md promises."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def imported(package: str) -> set[tuple[str, str]]:
    """(file, module) for every import in a package."""
    found = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {(str(file.relative_to(ROOT)), alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {(str(file.relative_to(ROOT)), f"{node.module}.{alias.name}") for alias in node.names}
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("tide", ("precompute", "dashboard", "benchmarks", "streamlit", "plotly")),
        ("precompute", ("dashboard", "benchmarks", "streamlit", "plotly")),
        ("dashboard", ("benchmarks", "faiss")),
        ("dashboard/figures", ("streamlit", "torch")),
    ],
)
def test_imports_run_one_way(package, forbidden):
    wrong = {(file, module) for file, module in imported(package) if module.split(".")[0] in forbidden}
    assert not wrong


def test_the_dashboard_uses_only_the_reader_of_precompute():
    used = {module for _, module in imported("dashboard") if module.split(".")[0] == "precompute"}
    assert used <= {"precompute.Artifacts", "precompute.ArtifactError", "precompute.OVERLAP_K"}


def test_the_engine_knows_no_streamlit():
    assert imported("dashboard/engine")
    assert not {module for _, module in imported("dashboard/engine") if module.startswith("streamlit")}
