"""The training loss: cross entropy of the next token and the z-loss (Table 7)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.loss.loss_utils import ForCausalLMLoss

from tide.model import causal_lm_loss

VOCAB = 13


def random_batch(seed, ignored=0.3, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, 6, VOCAB, generator=generator)
    labels = torch.randint(VOCAB, (3, 6), generator=generator)
    labels[torch.rand(3, 6, generator=generator) < ignored] = -100
    labels[0, 3] = 5  # at least one position counts
    return logits, labels


def z_term(logits, labels, ignore_index=-100):
    """mean(logsumexp(logits)^2) over the positions that predict something."""
    counted = labels[:, 1:] != ignore_index
    return logits[:, :-1].logsumexp(-1)[counted].square().mean()


@given(seed=st.integers(0, 2**16), coefficient=st.sampled_from([0.0, 1e-6, 0.5]))
@settings(max_examples=30)
def test_loss_is_transformers_cross_entropy_plus_the_z_term(seed, coefficient):
    logits, labels = random_batch(seed)
    expected = ForCausalLMLoss(logits, labels, VOCAB) + coefficient * z_term(logits, labels)
    torch.testing.assert_close(causal_lm_loss(logits, labels, coefficient), expected)


@pytest.mark.parametrize("count", [7, torch.tensor(7)])
def test_num_items_in_batch_replaces_the_mean_of_both_terms(count):
    logits, labels = random_batch(0)
    counted = (labels[:, 1:] != -100).sum()
    expected = ForCausalLMLoss(logits, labels, VOCAB, num_items_in_batch=7) + 0.5 * z_term(logits, labels) * counted / 7
    torch.testing.assert_close(causal_lm_loss(logits, labels, 0.5, num_items_in_batch=count), expected)


@pytest.mark.parametrize("ignore_index", [-100, -1, 2])
def test_ignored_labels_weigh_nothing(ignore_index):
    logits, labels = random_batch(1, ignored=0)
    labels[:, 2] = ignore_index
    expected = ForCausalLMLoss(logits, labels, VOCAB, ignore_index=ignore_index)
    loss = causal_lm_loss(logits, labels, 0.0, ignore_index=ignore_index)
    torch.testing.assert_close(loss, expected)
    moved = logits.clone()
    moved[:, 1] += 5 * torch.randn(3, VOCAB)  # position 1 would predict label 2
    torch.testing.assert_close(causal_lm_loss(moved, labels, 0.5, ignore_index=ignore_index),
                               causal_lm_loss(logits, labels, 0.5, ignore_index=ignore_index))  # fmt: skip


def test_a_shift_of_all_logits_is_paid_for_by_the_z_term_alone():
    logits, labels = random_batch(2)
    torch.testing.assert_close(causal_lm_loss(logits + 3, labels, 0.0), causal_lm_loss(logits, labels, 0.0))
    assert causal_lm_loss(logits + 3, labels, 0.1) > causal_lm_loss(logits, labels, 0.1) + 0.1


def test_loss_of_bfloat16_logits_is_computed_in_float32():
    logits, labels = random_batch(3)
    logits = logits.to(torch.bfloat16)
    loss = causal_lm_loss(logits, labels, 1e-6)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, causal_lm_loss(logits.float(), labels, 1e-6))


def test_the_gradient_is_that_of_the_written_out_loss():
    logits, labels = random_batch(4)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    causal_lm_loss(a, labels, 0.3).backward()
    (ForCausalLMLoss(b, labels, VOCAB) + 0.3 * z_term(b, labels)).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("coefficient", [0.0, 1e-6, 0.25])
def test_the_model_uses_the_coefficient_of_its_config(make_model, input_ids, coefficient):
    model = make_model(z_loss_coefficient=coefficient)
    with torch.no_grad():
        output = model(input_ids, labels=input_ids)
    expected = ForCausalLMLoss(output.logits, input_ids, model.config.vocab_size)
    torch.testing.assert_close(output.loss, expected + coefficient * z_term(output.logits, input_ids))


def test_the_model_passes_num_items_in_batch_on(make_model, input_ids):
    model = make_model()
    with torch.no_grad():
        whole = model(input_ids, labels=input_ids).loss
        parts = [model(row[None], labels=row[None], num_items_in_batch=16).loss for row in input_ids]
    torch.testing.assert_close(sum(parts), whole)
