"""The notebook of three questions: no cell fails, and its answers hold the numbers of the artifacts it is given."""

import ast
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from precompute import Artifacts

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "three_questions.ipynb"


@pytest.fixture(scope="module")
def answers(artifact_folder):
    """What the cells printed when the notebook ran on the tiny model's artifacts, by the cell's id."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIDE_ARTIFACTS", str(artifact_folder))
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    printed = {
        cell.id: "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    return {name: " ".join(text.split()) for name, text in printed.items()}


def numbers(pattern, text):
    """The groups of the one place where a pattern is found, as numbers."""
    (found,) = re.findall(pattern, text)
    return [float(number) for number in ([found] if isinstance(found, str) else found)]


def test_no_model_is_loaded_but_the_artifacts_alone():
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    imports = [node for cell in cells for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Import)]
    parts = [node for cell in cells for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} == {"os", "warnings", "numpy", "pandas"}
    assert {(node.module, alias.name) for node in parts for alias in node.names} == {
        ("pathlib", "Path"),
        ("precompute", "Artifacts"),
    }


def test_the_first_answer_is_the_null_weight_of_rare_and_common_tokens(answers, artifacts: Artifacts):
    mean, _, n = artifacts.routing_by_decile()
    rare, common = np.flatnonzero(n)[[0, -1]]
    for layer in (0, artifacts.num_layers - 1):
        pattern = rf"In layer {layer} the null weight is ([\d.]+) for rare and ([\d.]+) for common tokens"
        null = [mean[rare, layer, -1], mean[common, layer, -1]]
        assert numbers(pattern, answers["a1"]) == pytest.approx(null, abs=6e-4)
    more, less, unclear = numbers(r"in (\d+) of \d+ layers .* less in (\d+) .* in (\d+) the intervals", answers["a1"])
    assert more + less + unclear == artifacts.num_layers
    rows = artifacts.routing_groups("decile").query("bank == @artifacts.num_banks").set_index(["group", "layer"])
    assert more == (rows.loc[rare, "high"] < rows.loc[common, "low"]).sum()
    assert less == (rows.loc[rare, "low"] > rows.loc[common, "high"]).sum()


def shared_neighbours(artifacts, token_id):
    """How many of a token's 10 nearest in the embedding each bank has among its own 10."""
    near = set(artifacts.neighbors(token_id)[0].tolist())
    return [len(near & set(artifacts.neighbors(token_id, k)[0].tolist())) for k in range(artifacts.num_banks)]


def test_the_second_answer_counts_shared_neighbours(answers, artifacts: Artifacts):
    known = np.flatnonzero(artifacts.bins >= 0)
    shared = np.array([shared_neighbours(artifacts, token_id) for token_id in known.tolist()])
    assert numbers(r"a bank shares ([\d.]+) on average", answers["a2"]) == pytest.approx([shared.mean()], abs=6e-3)
    for decile in (artifacts.bins[known].min(), artifacts.bins[known].max()):
        mean = shared[artifacts.bins[known] == decile].mean()
        assert numbers(rf"([\d.]+) (?:shared )?in decile {decile}\b", answers["a2"]) == pytest.approx([mean], abs=6e-3)
    examples = [int(token_id) for token_id in re.findall(r"\(id (\d+), count", answers["q2-lists"])]
    assert len(examples) == 2
    for example in examples:
        least, most = numbers(rf"\(id {example}\) shares (\d+) to (\d+) of its 10", answers["a2"])
        own = shared_neighbours(artifacts, example)
        assert (least, most) == (min(own), max(own))
    assert max(shared.mean(axis=1)) == pytest.approx(np.mean(shared_neighbours(artifacts, examples[1])))


def test_the_third_answer_compares_tide_with_base_pair_by_pair(answers, artifacts: Artifacts):
    rows = artifacts.frame("collapse")
    per_pair = rows.groupby(["model", "category", "pair", "layer"])[["l2", "normalized_l2"]].mean()
    difference = per_pair.loc["tide"] - per_pair.loc["base"]
    further = closer = 0
    for _, of_layer in difference.groupby(["category", "layer"]):
        if of_layer.index[0][2] == 0:  # the embedding
            continue
        half = 1.96 * of_layer.std() / len(of_layer) ** 0.5
        further += int((of_layer.mean() - half > 0).sum())
        closer += int((of_layer.mean() + half < 0).sum())
    assert numbers(r"further apart in (\d+), closer in (\d+) of", answers["a3"]) == [further, closer]
    ends = artifacts.collapse().query("model == 'tide' and metric == 'normalized_l2'")["mean"]
    embedding, last = numbers(r"words are ([\d.]+) apart in the embedding .*?, ([\d.]+) in layer", answers["a3"])
    assert [embedding, last] == pytest.approx([ends.iloc[0], ends.iloc[-1]], abs=6e-4)
    gap = difference["normalized_l2"].groupby("layer").mean()
    layer, added = numbers(r"Decoder layer (\d+) adds most .*? \(([+-][\d.]+)\)", answers["a3"])
    assert (layer, added) == (gap.diff().idxmax() - 1, pytest.approx(gap.diff().max(), abs=6e-4))
    categories = artifacts.collapse_pairs().groupby("category")["pair"].count()
    for category, n in categories.items():
        assert answers["a3"].count(f"{category}, ") == 2
        assert f"(n = {n} pairs)" in answers["a3"]


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
