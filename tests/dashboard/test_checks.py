"""The trust checks: they hold for a sound model, and each fails when what it watches is broken."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import dashboard.checks as checks
from dashboard.checks import llama_on_the_weights_of, run_checks
from precompute import Artifacts
from precompute.pipeline import Job, run
from precompute.store import MANIFEST_FILE
from tests.conftest import tiny_model, toy_documents
from tide.checkpoint import file_fingerprint, load_checkpoint
from tide.effect import Effect

ROWS, ALL_OFF, NEIGHBORS, ROUTING, BELONGS = (
    "routing rows sum to one",
    "all banks off equals the path without memory",
    "stored neighbours equal live ones",
    "stored routing equals live routing",
    "the artifacts belong to this checkpoint",
)
NAMES = [ROWS, ALL_OFF, NEIGHBORS, ROUTING, BELONGS]
ONCE = "zx q1 J7 %& Wv 90 {} Zü"  # tokens that the toy text does not hold


@pytest.fixture(scope="module")
def root(tmp_path_factory, tokenizer) -> Path:
    """tide, base (K = 0) and their artifacts, of a text that holds some tokens once."""
    root = tmp_path_factory.mktemp("checks")
    (root / "text.txt").write_text("\n\n".join([ONCE, *toy_documents(10)]) + "\n", encoding="utf-8")
    for name, banks in (("tide", 3), ("base", 0)):
        tiny_model(vocab_size=len(tokenizer) + 10, num_memory_blocks=banks).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        job = Job(root / name, root / f"{name}-artifacts", root / "none", (root / "text.txt",), show_progress=False)
        run(job, ["routing", "neighbors"])
    return root


@pytest.fixture
def own(root, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(root, tmp_path / "own"))


@pytest.fixture
def model(root):
    """Loaded for one test, which may spoil it."""
    return load_checkpoint(root / "tide")[0]


@pytest.fixture
def artifacts(root):
    return Artifacts.open(root / "tide-artifacts")


def failed(model, artifacts) -> dict[str, str]:
    """Name and detail of the checks that fail; each says what to do, the others have nothing to do."""
    made = run_checks(model, artifacts)
    assert [check.name for check in made] == NAMES
    assert all(bool(check.remedy) != check.passed for check in made)
    assert not any("\n" in check.detail + check.remedy for check in made)
    return {check.name: check.detail for check in made if not check.passed}


def spoil(folder: Path, stage: str, change, name: str | None = None) -> Artifacts:
    """Artifacts whose tensors were changed, with a manifest that agrees with them; by default of the stage's name."""
    file = folder / stage / f"{name or stage}.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    entry = {"bytes": file.stat().st_size, "fingerprint": file_fingerprint(file)}
    manifest["stages"][stage]["files"][f"{stage}/{file.name}"] = entry
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return Artifacts.open(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_hold_for_a_sound_model(root, artifacts, dtype):
    model = load_checkpoint(root / "tide", dtype=dtype)[0]
    assert failed(model, artifacts) == {}


def test_something_is_compared(model, artifacts):
    details = {check.name: check.detail for check in run_checks(model, artifacts)}
    assert "The cosines of 32 random tokens" in details[NEIGHBORS]
    assert int(details[ROUTING].split(" random")[0].rsplit(" ", 1)[1]) >= 5
    assert "Over 96 rows" in details[ROWS]


def test_a_model_without_banks_passes_and_says_that_there_is_nothing_to_check(root):
    model = load_checkpoint(root / "base")[0]
    made = run_checks(model, Artifacts.open(root / "base-artifacts"))
    assert all(check.passed for check in made)
    assert all("no memory banks" in check.detail for check in made[:2])


@pytest.mark.parametrize("broken", [lambda w: 1.001 * w, lambda w: w * torch.nan, lambda w: w - torch.eye(4)[0]])
def test_a_router_whose_rows_are_no_distribution(model, artifacts, monkeypatch, broken):
    router = model.model.layers[1].router
    forward = router.forward
    monkeypatch.setattr(router, "forward", lambda normed: broken(forward(normed)))
    assert ROWS in failed(model, artifacts)


def test_a_switch_that_does_nothing(model, artifacts, monkeypatch):
    monkeypatch.setattr(Effect, "route", lambda self, layer, routing, memory: (routing, None))
    assert list(failed(model, artifacts)) == [ALL_OFF]


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_a_path_beside_the_switches(model, artifacts, monkeypatch, size):
    norm = model.model.norm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: forward(x) * (1 + size))  # LLaMA shares the weights, not the code
    assert list(failed(model, artifacts)) == [ALL_OFF]


def test_a_row_of_a_table_that_was_changed(model, artifacts):
    token_id = int(checks._probe(artifacts.vocab_size)[3])
    model.model.memory.weight.data[token_id, 2] *= -1
    assert "of 32 random tokens differ" in failed(model, artifacts)[NEIGHBORS]


def test_weights_of_a_layer_that_were_changed(model, artifacts):
    model.model.layers[2].router.proj.weight.data[1] += 0.05
    assert list(failed(model, artifacts)) == [ROUTING]


def test_stored_cosines_of_other_tables(model, own):
    other = load_file(own / "tide-artifacts" / "neighbors" / "bank_2.safetensors")
    artifacts = spoil(own / "tide-artifacts", "neighbors", lambda tensors: tensors.update(other), "bank_1")
    assert list(failed(model, artifacts)) == [NEIGHBORS]


def test_a_row_of_the_unembedding_that_was_changed(model, artifacts):
    model.lm_head.weight.data[int(checks._probe(artifacts.vocab_size)[3])] *= -1
    assert list(failed(model, artifacts)) == [NEIGHBORS]


@pytest.mark.parametrize("kind", ["fp16", "sq8"])
def test_cosines_of_rounded_rows_pass(model, own, kind):
    folder = own / kind
    run(Job(own / "tide", folder, own / "none", index=kind, show_progress=False), ["neighbors"])
    assert failed(model, Artifacts.open(folder)) == {}


def test_stored_routing_of_other_tokens(model, own):
    def shift(tensors):
        tensors["mean"] = np.roll(tensors["mean"], 1, axis=0)

    assert list(failed(model, spoil(own / "tide-artifacts", "routing", shift))) == [ROUTING]


def test_the_remedy_makes_the_check_pass(model, own):
    folder = own / "tide-artifacts"
    artifacts = spoil(folder, "neighbors", lambda tensors: tensors["cosines"].fill(0), "embedding")
    check = run_checks(model, artifacts)[2]
    assert not check.passed
    assert check.remedy.startswith(f"Delete {folder / 'neighbors'}, run `tide-precompute {own / 'tide'} --out {folder}")
    shutil.rmtree(folder / "neighbors")
    run(Job(own / "tide", folder, own / "none", (own / "text.txt",), show_progress=False), ["neighbors"])
    assert failed(model, Artifacts.open(folder)) == {}


def test_a_checkpoint_that_was_trained_on_since(model, own):
    artifacts = Artifacts.open(own / "tide-artifacts")
    tiny_model(seed=1, vocab_size=330).save_pretrained(own / "tide")
    assert list(failed(model, artifacts)) == [BELONGS]
    assert set(failed(load_checkpoint(own / "tide")[0], artifacts)) == {NEIGHBORS, ROUTING, BELONGS}


def test_a_checkpoint_that_is_gone(model, own):
    artifacts = Artifacts.open(own / "tide-artifacts")
    shutil.rmtree(own / "tide")
    assert list(failed(model, artifacts)) == [BELONGS]


@pytest.mark.parametrize(
    ("field", "size", "said"),
    [
        ("num_memory_blocks", 2, "num_banks 2"),
        ("vocab_size", 61, "vocab_size 61"),
        ("hidden_size", 64, "hidden_size 64"),
    ],
)
def test_a_model_of_another_size(artifacts, field, size, said):
    details = failed(tiny_model(**{"vocab_size": 330, field: size}), artifacts)
    assert details[BELONGS].startswith(f"The model has {said}, the artifacts were made from one with ")


def test_stages_that_were_not_run_leave_nothing_to_compare(model, own):
    folder = own / "tide-artifacts"
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    del manifest["stages"]["routing"], manifest["stages"]["neighbors"]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    made = run_checks(model, Artifacts.open(folder))
    assert all(check.passed for check in made)
    assert all("nothing to compare" in check.detail for check in made[2:4])


def test_what_a_check_raises_is_a_finding(model, artifacts, monkeypatch):
    monkeypatch.setattr(model, "trace", lambda *_, **__: 1 / 0)
    details = failed(model, artifacts)
    assert set(details) == {ROWS, ROUTING}
    assert details[ROWS] == "The check could not be made: ZeroDivisionError, division by zero."


@pytest.mark.parametrize("tied", [True, False])
def test_the_llama_shares_every_tensor_and_leaves_the_model_alone(tied, input_ids):
    model = tiny_model(tie_word_embeddings=tied)
    before = model(input_ids).logits
    llama = llama_on_the_weights_of(model)
    own_tensors = {x.data_ptr() for x in model.state_dict().values()}
    assert {x.data_ptr() for x in llama.state_dict().values()} <= own_tensors
    assert torch.equal(model(input_ids).logits, before)
    assert not torch.equal(llama(input_ids).logits, before)


def test_the_checks_do_not_draw_from_the_global_random_state(model, artifacts):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    run_checks(model, artifacts)
    assert torch.equal(torch.rand(2), expected)
