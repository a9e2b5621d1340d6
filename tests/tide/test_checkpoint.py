import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.conftest import tiny_model
from tide.checkpoint import fingerprint, load_checkpoint, token_counts
from tide.cli import UserError


@pytest.fixture(scope="module")
def original(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("original") / "tide"
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "tide")


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refused(folder, match, **kwargs):
    with pytest.raises(UserError, match=match) as caught:
        load_checkpoint(folder, **kwargs)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(folder.name) in sentence or kwargs
    return sentence


def test_a_checkpoint_loads_as_it_was_saved(folder, capfd):
    model, tokenizer = load_checkpoint(folder)
    ids = torch.tensor([tokenizer("The red fox")["input_ids"]])
    expected = tiny_model(vocab_size=len(tokenizer))(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert not model.training
    assert model.dtype == torch.float32
    assert capfd.readouterr().err == ""


def test_weights_of_another_precision_are_read_in_the_one_asked_for(folder):
    assert load_checkpoint(folder, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "no checkpoint folder")


def test_a_folder_without_config(tmp_path):
    refused(tmp_path, r"holds no config\.json")


def test_an_unfinished_run_names_what_it_kept(folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text("{}")
    refused(run, "unfinished run; give a folder")
    shutil.copytree(folder, run / "step-0000100")
    assert "step-0000100" in refused(run, "unfinished run")


def test_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    refused(folder, r"config\.json is damaged")


def test_another_kind_of_model(folder):
    edit_config(folder, model_type="llama")
    refused(folder, "model type 'llama'")


@pytest.mark.parametrize("kept", [0.9, 0.01, 0.0])
def test_truncated_weights(folder, kept):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    refused(folder, r"model\.safetensors is truncated or damaged")


def test_weights_that_are_something_else(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 5000)
    refused(folder, "truncated or damaged")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"lacks its weights model\.safetensors")


def test_a_lacking_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.memory.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"lacks the weights model\.memory\.weight")


def test_a_tensor_too_many(folder):
    edit_config(folder, num_memory_blocks=0)
    refused(folder, r"against its config\.json")


def test_a_tensor_of_another_shape(folder):
    edit_config(folder, num_memory_blocks=2)
    refused(folder, "cannot be loaded")


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, r"no tokenizer\.json")


def test_a_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "cannot be loaded")


def test_a_tokenizer_too_large(folder, tokenizer):
    tiny_model(vocab_size=len(tokenizer) - 1).save_pretrained(folder)
    refused(folder, "has 320 ids, the model only 319")


def test_a_device_that_is_not_there(folder):
    refused(folder, "no device 'abacus'", device="abacus")
    refused(folder, "no device 'meta'", device="meta")


def test_the_fingerprint_is_the_contents(original, folder):
    assert fingerprint(folder) == fingerprint(original)
    edit_config(folder, transformers_version="9.9")
    assert fingerprint(folder) == fingerprint(original)


def test_the_fingerprint_tells_configurations_apart(original, folder):
    edit_config(folder, rms_norm_eps=0.5)
    assert fingerprint(folder) != fingerprint(original)


def test_the_fingerprint_tells_weights_apart(original, folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v * np.float32(1.001) for k, v in tensors.items()}, folder / "model.safetensors")
    assert fingerprint(folder) != fingerprint(original)


def test_the_fingerprint_leaves_the_optimiser_out(original, folder):
    save_file({"step": np.ones(1)}, folder / "optimizer.safetensors")
    assert fingerprint(folder) == fingerprint(original)


def test_a_fingerprint_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no weights"):
        fingerprint(tmp_path)


def test_token_counts_are_read_with_their_corpus(folder):
    assert token_counts(folder) is None
    save_file({"counts": np.arange(5)}, folder / "token_counts.safetensors", metadata={"corpus": "all of it"})
    counts, corpus = token_counts(folder)
    assert counts.tolist() == [0, 1, 2, 3, 4]
    assert corpus == "all of it"
    (folder / "token_counts.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"token_counts\.safetensors is damaged"):
        token_counts(folder)
