"""The memory table's gradient, gathered row by row: what autograd's dense one is, bit for bit."""

import pytest
import torch

from tests.training.tiny_run import tiny_run
from tide.training.module import RowGradients, TrainingModule

STEPS = 3


def trained(data_folder, out, gathered, **recipe):
    """Weights, losses and norms after some steps, with gathered or with autograd's gradients."""
    run = tiny_run(data_folder, out, **recipe)
    run.prepare()
    assert run.row_gradients
    if not gathered:
        run.row_gradients = None
    told = [torch.stack(run.step(step)[:2]) for step in range(STEPS)]
    return run.plain.model.state_dict(), torch.stack(told), run.gradients.sums


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="tied"),
        pytest.param({"shape": {"tie_word_embeddings": False}}, id="untied"),
        pytest.param({"freeze_backbone": True}, id="frozen"),
        pytest.param({"autocast": "bfloat16", "gradient_checkpointing": True}, id="autocast-checkpointed"),
    ],
)
def test_gathered_gradients_train_as_autograds_dense_ones_do(data_folder, tmp_path, settings, micro_batch_size):
    settings = {"micro_batch_size": micro_batch_size, "grad_clip": 1e-2, **settings}
    weights, told, sums = trained(data_folder, tmp_path, gathered=True, **settings)
    dense_weights, dense_told, dense_sums = trained(data_folder, tmp_path, gathered=False, **settings)
    assert torch.equal(told, dense_told)
    assert torch.equal(sums, dense_sums)
    assert all(torch.equal(weight, dense_weights[name]) for name, weight in weights.items())


def test_the_gradient_is_one_tensor_that_holds_the_rows_of_the_step_alone(data_folder, tmp_path):
    run = tiny_run(data_folder, tmp_path)
    run.prepare()
    table = run.plain.model.model.memory.weight
    addresses = set()
    for step in range(STEPS):
        _, _, batch = run.step(step)
        addresses.add(table.grad.data_ptr())
        predicting = batch[:, :-1]  # a sequence's last token predicts nothing
        assert table.grad.flatten(1).any(1).nonzero().flatten().tolist() == predicting.unique().tolist()
    assert len(addresses) == 1


def test_a_row_whose_token_does_not_occur_decays_all_the_same(data_folder, tmp_path):
    run = tiny_run(data_folder, tmp_path)
    run.prepare()
    table = run.plain.model.model.memory.weight
    before = table.detach().clone()
    _, _, batch = run.step(0)
    absent = torch.ones(len(table), dtype=torch.bool)
    absent[batch.unique()] = False
    assert absent.any()
    expected = before * (1 - run.recipe.learning_rate(0) * run.recipe.weight_decay)
    torch.testing.assert_close(table.detach()[absent], expected[absent])
    assert not torch.equal(table.detach()[absent], before[absent])


@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_as_many_rows_are_read_as_there_are_tokens_or_ids_whatever_they_are(make_model, tokens):
    """Compiled code is made for one shape: the number of distinct ids must not show in it."""
    table = make_model().model.memory.weight
    for ids in (torch.randint(2, len(table), (1, tokens)), torch.full((1, tokens), 5)):
        rows = RowGradients(table).read(ids)
        assert len(rows.table) == len(rows.ids) == min(tokens, len(table))
        assert torch.equal(rows.table[rows.positions], table[ids])
        assert rows.table.is_leaf
        assert rows.table.requires_grad


def test_a_recorder_sees_the_rows_that_were_read(make_model, input_ids):
    module = TrainingModule(make_model()).eval()
    rows = RowGradients(module.model.model.memory.weight).read(input_ids)
    seen = []

    class Recorder:
        def start(self, embedding, memory):
            seen.append(memory)

        def add_layer(self, hidden, routing, *parts):
            seen.append(routing)

    with torch.no_grad():
        own, loss = (module(input_ids, memory_rows=r, recorder=Recorder()) for r in (None, rows))
    assert torch.equal(own, loss)
    half = len(seen) // 2
    assert half == 1 + 3
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))
