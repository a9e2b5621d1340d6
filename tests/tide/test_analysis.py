"""What follows from traces, against brute force in float64 and against what the model does when it is changed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import VOCAB_SIZE, tiny_model
from tide import Intervention
from tide.analysis import (
    AFTER,
    BEFORE,
    EMBEDDING,
    bank_entropy,
    compare,
    contributions,
    effective_banks,
    feed_forward_cosine,
    first_difference,
    logit_lens,
    prediction,
    routing_entropy,
    surprisal,
)
from tide.trace import Recorder

INTERVENTIONS = st.sampled_from(
    "|1|0.1_2.0|*|0.1~mean|*~random3|.2~random1!|*~mean@2-4|uniform|null:1|only1|temperature0.5|swap9.17|"
    "1~mean@2-4_0.0~random2_uniform:2_swap33.5".split("|")
).map(Intervention.from_text)
TARGETS = torch.tensor([[9, 17, 9, 33, 60, 5], [41, 42, 40, 8, 8, 12]])


def traced(seed, intervention=None, dtype=torch.float32, **config):
    """A random tiny model's forward of [2, 6] tokens."""
    model = tiny_model(seed, **config).to(dtype)
    ids = torch.tensor([[5, 9, 17, 9, 33, 60], [40, 41, 42, 40, 8, 8]])
    means = torch.randn(3, model.config.num_memory_blocks, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model, model.trace(ids, intervention=intervention, mean_injection=means)


def log_softmax(logits):
    """In numpy and float64."""
    x = logits.double().numpy()
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def close(actual, expected, rtol=1e-4, atol=1e-5):
    expected = torch.as_tensor(expected).double()
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


# Attribution


@given(
    seed=st.integers(0, 2**16),
    tied=st.booleans(),
    bias=st.booleans(),
    eps=st.sampled_from([1e-6, 0.5]),
    interventions=st.tuples(INTERVENTIONS, INTERVENTIONS),
)
@settings(max_examples=40)
def test_contributions_add_up_to_the_logit(seed, tied, bias, eps, interventions):
    config = {"tie_word_embeddings": tied, "attention_bias": bias, "mlp_bias": bias, "rms_norm_eps": eps}
    _, trace = traced(seed, interventions, **config)
    parts = contributions(trace, TARGETS)
    logit = trace.logits.gather(-1, TARGETS[..., None]).squeeze(-1)
    close(parts.total(), logit, atol=1e-4)
    close(parts.logit, logit, atol=1e-4)
    close(parts.rounding(), torch.zeros(2, 6), rtol=0, atol=1e-4)
    of_layers = parts.attention + parts.feed_forward + parts.banks.sum(-1) + parts.replacement
    close(parts.by_layer(), of_layers, atol=1e-4)
    close(parts.by_bank().sum(-1), parts.banks.sum((-2, -1)))


@pytest.mark.parametrize("num_banks", [0, 1, 3])
@pytest.mark.parametrize("intervention", [Intervention(), Intervention.layers_off([1], replacement="random", seed=2)])
def test_every_contribution_is_its_part_read_by_the_unembedding(num_banks, intervention):
    if num_banks == 0:
        intervention = Intervention()
    model, trace = traced(3, intervention, num_memory_blocks=num_banks)
    parts = contributions(trace, TARGETS)
    last, gain = trace.hidden[:, :, -1].double(), model.model.norm.weight.double()
    for b, t in np.ndindex(2, 6):
        rms = math.sqrt(sum(x**2 for x in last[b, t].tolist()) / 32 + model.config.rms_norm_eps)
        row = model.lm_head.weight[TARGETS[b, t]].double()

        def read(part, row=row, rms=rms):
            return (row * gain * part.double() / rms).sum().detach()

        close(parts.embedding[b, t], read(model.model.embed_tokens(trace.input_ids[b, t])))
        for layer in range(3):
            close(parts.attention[b, t, layer], read(trace.attention[b, t, layer]))
            close(parts.feed_forward[b, t, layer], read(trace.feed_forward[b, t, layer]))
            close(parts.injection()[b, t, layer], read(trace.injection()[b, t, layer]))
            for bank in range(num_banks):
                share = trace.routing[b, t, layer, bank] * trace.memory[b, t, bank]
                close(parts.banks[b, t, layer, bank], read(share))
    assert (parts.replacement[:, :, [0, 2]] == 0).all()
    assert (parts.replacement[:, :, 1] != 0).all() == bool(intervention)


def test_switching_the_last_layers_injection_off_takes_its_contribution_when_the_norm_is_held():
    # The last layer has no layers after it: what is direct is all there is, but for the norm.
    model, trace = traced(5)
    off = model.trace(trace.input_ids, intervention=Intervention.layers_off([2]))
    size = [t.hidden[:, :, -1].pow(2).mean(-1).add(model.config.rms_norm_eps).sqrt() for t in (trace, off)]
    logit, without = (t.logits.gather(-1, TARGETS[..., None]).squeeze(-1) for t in (trace, off))
    held = without * size[1] / size[0]
    close(contributions(trace, TARGETS).injection()[..., 2], logit - held, atol=1e-4)


def test_a_model_in_bfloat16_says_what_it_rounded():
    _, trace = traced(0, dtype=torch.bfloat16)
    parts = contributions(trace, TARGETS)
    logit = trace.logits.gather(-1, TARGETS[..., None]).squeeze(-1)
    assert parts.embedding.dtype == parts.banks.dtype == torch.float32
    close(parts.total() + parts.rounding(), parts.logit)
    weights = trace.routing[..., :-1].bfloat16().float()  # what a bfloat16 forward multiplies by
    read = trace.target_direction(TARGETS)
    close(parts.banks, torch.einsum("btlk,btkd,btd->btlk", weights, trace.memory.float(), read))
    close(parts.logit, logit, rtol=0.02, atol=0.1)
    assert 1e-4 < parts.rounding().abs().max() < 0.3


def test_one_positions_contributions_as_a_table():
    _, trace = traced(0, Intervention.layers_off([1], replacement="random"))
    parts, whole = (contributions(trace.at(4), TARGETS[:, 4:5]), contributions(trace, TARGETS))
    close(parts.banks, whole.banks[:, 4:5])
    alone = trace.at(4)
    for name in ("input_ids", "routing", "hidden", "memory", "attention", "feed_forward", "replacement"):
        setattr(alone, name, getattr(alone, name)[:1])
    table = contributions(alone, TARGETS[:1, 4:5]).table()
    assert len(table) == 2 + 3 * 3 + 3 * 3
    assert table.contribution.sum() == pytest.approx(float(whole.logit[0, 4]), rel=1e-4)
    banks = table[table.part == "bank"].set_index(["layer", "bank"]).contribution
    assert banks[2, 1] == pytest.approx(float(whole.banks[0, 4, 2, 1]))
    by_part = table.set_index(["part", "layer"]).contribution
    assert by_part["replacement", 1] == pytest.approx(float(whole.replacement[0, 4, 1]))
    assert by_part["attention", 0] == pytest.approx(float(whole.attention[0, 4, 0]))
    with pytest.raises(ValueError, match=r"of \[2, 6\]: use trace.at"):
        whole.table()


def test_what_needs_parts_says_so(make_model, input_ids):
    model, recorder = make_model(), Recorder(with_parts=False)
    model.model(input_ids, recorder=recorder, use_cache=False)
    lean = recorder.finish(model, input_ids, None)
    for needs_parts in (lambda: contributions(lean, input_ids), lambda: logit_lens(lean, input_ids)):
        with pytest.raises(ValueError, match="trace again with_parts=True"):
            needs_parts()
    with pytest.raises(ValueError, match="trace again with_parts=True"):
        feed_forward_cosine(lean)


# Logit lens


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_lens_is_every_streams_own_norm_and_unembedding(monkeypatch, rows):
    monkeypatch.setattr(prediction, "UNEMBEDDED_ROWS", rows)
    model, trace = traced(1, Intervention.off([(1, 0)], replacement="random"))
    lens = logit_lens(trace, TARGETS, k=4)
    gain, unembedding = model.model.norm.weight.double(), model.lm_head.weight.double()
    streams = [trace.hidden[:, :, 0]]
    for layer in range(3):
        streams += [trace.hidden[:, :, layer + 1] - trace.injection()[:, :, layer], trace.hidden[:, :, layer + 1]]
    for s, stream in enumerate(streams):
        x = stream.double()
        normed = gain * x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        logits = (normed @ unembedding.T).detach()
        log_p = log_softmax(logits)
        of_target = np.take_along_axis(log_p, TARGETS[..., None].numpy(), -1)
        close(lens.target_log_prob[..., s], of_target[..., 0], atol=1e-4)
        close(lens.target_rank[..., s], 1 + (log_p > of_target).sum(-1))
        close(lens.entropy[..., s], -(np.exp(log_p) * log_p).sum(-1), atol=1e-4)
        best = np.argsort(-log_p)[..., :4]
        assert torch.equal(lens.token_ids[:, :, s], torch.from_numpy(best))
        close(lens.log_probs[:, :, s], np.take_along_axis(log_p, best, -1), atol=1e-4)


@given(seed=st.integers(0, 2**16), intervention=INTERVENTIONS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=15)
def test_the_lens_ends_in_the_models_own_prediction(seed, intervention, dtype):
    _, trace = traced(seed, intervention, dtype)
    lens = logit_lens(trace, TARGETS, k=1000)
    assert lens.target_log_prob.shape == (2, 6, 7)
    assert lens.token_ids.shape == (2, 6, 7, VOCAB_SIZE)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    expected = trace.logits.float().log_softmax(-1)
    close(lens.log_probs[:, :, -1], expected.sort(-1, descending=True).values, **tolerance)
    close(lens.target_log_prob[..., AFTER][..., -1], expected.gather(-1, TARGETS[..., None])[..., 0], **tolerance)
    assert lens.target_log_prob.dtype == lens.entropy.dtype == torch.float32
    close(lens.log_probs.exp().sum(-1), torch.ones(2, 6, 7))
    assert ((lens.entropy >= -1e-5) & (lens.entropy <= math.log(VOCAB_SIZE) + 1e-5)).all()


@pytest.mark.parametrize("layer", range(3))
def test_before_and_after_differ_by_the_layers_injection_alone(layer):
    model, trace = traced(2)
    lens = logit_lens(trace, TARGETS)
    off = logit_lens(model.trace(trace.input_ids, intervention=Intervention.layers_off([layer])), TARGETS)
    close(lens.entropy[..., BEFORE][..., layer], off.entropy[..., AFTER][..., layer], atol=1e-6)
    close(lens.entropy[..., EMBEDDING], off.entropy[..., EMBEDDING])
    assert (lens.entropy[..., BEFORE] - lens.entropy[..., AFTER]).abs().min() > 1e-6


def test_the_base_models_lens_is_the_same_before_and_after():
    _, trace = traced(2, num_memory_blocks=0)
    lens = logit_lens(trace, TARGETS)
    close(lens.target_log_prob[..., BEFORE], lens.target_log_prob[..., AFTER])


def test_one_position_of_the_lens_is_that_position():
    _, trace = traced(4)
    whole, one = logit_lens(trace, TARGETS), logit_lens(trace.at(-1), TARGETS[:, -1:])
    close(one.target_log_prob, whole.target_log_prob[:, -1:])
    assert torch.equal(one.token_ids, whole.token_ids[:, -1:])


# Use of the memory


@given(seed=st.integers(0, 2**16), intervention=INTERVENTIONS, num_banks=st.sampled_from([3, 5]))
@settings(max_examples=20)
def test_entropies_and_effective_banks_against_a_loop(seed, intervention, num_banks):
    _, trace = traced(seed, intervention, num_memory_blocks=num_banks)
    whole, given_bank, effective = routing_entropy(trace), bank_entropy(trace), effective_banks(trace)
    for place in np.ndindex(2, 6, 3):
        weights = trace.routing[place].double().numpy()
        close(whole[place], -sum(w * math.log(w) for w in weights if w > 0))
        banks = [w / weights[:-1].sum() for w in weights[:-1] if w > 0]
        entropy = -sum(p * math.log(p) for p in banks) if banks else math.nan
        close(given_bank[place], entropy)
        close(effective[place], math.exp(entropy))
    used = effective[~effective.isnan()]
    assert ((used > 1 - 1e-5) & (used < num_banks + 1e-4)).all()


@pytest.mark.parametrize(
    ("rule", "entropy", "banks"),
    [("uniform", math.log(4), 3.0), ("only2", 0.0, 1.0), ("null", 0.0, math.nan), ("*", 0.0, math.nan)],
)
def test_routing_whose_entropy_is_known(rule, entropy, banks):
    _, trace = traced(0, Intervention.from_text(rule))
    close(routing_entropy(trace), torch.full((2, 6, 3), entropy))
    close(effective_banks(trace), torch.full((2, 6, 3), banks))


def test_what_goes_to_null_does_not_change_the_effective_number_of_banks():
    _, trace = traced(0)
    before = effective_banks(trace)
    trace.routing[..., :-1] *= 0.01
    trace.routing[..., -1] = 1 - trace.routing[..., :-1].sum(-1)
    close(effective_banks(trace), before)


@given(seed=st.integers(0, 2**16), intervention=INTERVENTIONS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=15)
def test_cosine_of_the_injection_with_the_feed_forward_output(seed, intervention, dtype):
    _, trace = traced(seed, intervention, dtype)
    cosine, injection = feed_forward_cosine(trace), trace.injection().double().numpy()
    for place in np.ndindex(2, 6, 3):
        m, f = injection[place], trace.feed_forward[place].double().numpy()
        expected = m @ f / np.linalg.norm(m) / np.linalg.norm(f) if m.any() else math.nan
        close(cosine[place], expected)


def test_the_base_model_uses_no_memory():
    _, trace = traced(0, num_memory_blocks=0)
    assert (routing_entropy(trace) == 0).all()
    assert (trace.injection_ratio() == 0).all()
    for value in (bank_entropy(trace), effective_banks(trace), feed_forward_cosine(trace)):
        assert value.shape == (2, 6, 3)
        assert value.isnan().all()


# Predictions of one forward and of two


@given(seed=st.integers(0, 2**16), intervention=INTERVENTIONS, with_logits=st.booleans(), rows=st.sampled_from([5, 64]))
@settings(max_examples=20)
def test_two_predictions_against_a_loop(seed, intervention, with_logits, rows):
    _, plain = traced(seed)
    _, changed = traced(seed, intervention)
    log_p, log_q = log_softmax(plain.logits), log_softmax(changed.logits)
    if not with_logits:
        plain.logits = changed.logits = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "UNEMBEDDED_ROWS", rows)
        change = compare(plain, changed, TARGETS)
    tolerance = {"rtol": 1e-3, "atol": 1e-4}
    for b, t in np.ndindex(2, 6):
        p, q, target = log_p[b, t], log_q[b, t], int(TARGETS[b, t])
        close(change.kl[b, t], sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True)), **tolerance)
        close(change.plain_log_prob[b, t], p[target], **tolerance)
        close(change.changed_log_prob[b, t], q[target], **tolerance)
        close(change.log_prob_change()[b, t], q[target] - p[target], **tolerance)
        assert change.plain_rank[b, t] == 1 + sum(x > p[target] for x in p)
        assert change.changed_rank[b, t] == 1 + sum(x > q[target] for x in q)
        assert change.rank_change()[b, t] == change.changed_rank[b, t] - change.plain_rank[b, t]
    differ = [np.flatnonzero(p.argmax(-1) != q.argmax(-1)) for p, q in zip(log_p, log_q, strict=True)]
    assert change.first_departure() == [int(d[0]) if len(d) else None for d in differ]


@given(seed=st.integers(0, 2**16), intervention=INTERVENTIONS)
@settings(max_examples=10)
def test_a_forward_does_not_differ_from_itself(seed, intervention):
    _, trace = traced(seed, intervention)
    change = compare(trace, trace, TARGETS)
    for nothing in (change.kl, change.log_prob_change(), change.rank_change()):
        assert (nothing == 0).all()
    assert change.first_departure() == [None, None]


def test_rows_of_a_batch_are_compared_one_by_one():
    model, plain = traced(0)
    changed = model.trace(plain.input_ids, intervention=(Intervention(), Intervention.all_off()))
    change = compare(plain, changed, TARGETS)
    assert change.kl[0].max() < 1e-6
    assert change.kl[1].min() > 1e-3
    assert change.first_departure()[0] is None


def test_a_model_with_memory_is_compared_with_one_without():
    _, base = traced(0, num_memory_blocks=0)
    _, tide = traced(1)
    expected = tide.logits.log_softmax(-1) - base.logits.log_softmax(-1)
    close(compare(base, tide, TARGETS).log_prob_change(), expected.gather(-1, TARGETS[..., None])[..., 0])


def test_traces_of_two_texts_are_not_compared():
    _, trace = traced(0)
    with pytest.raises(ValueError, match=r"of \[2, 6\] and \[2, 1\] tokens"):
        compare(trace, trace.at(2), TARGETS)
    with pytest.raises(ValueError, match="id 61 is outside the vocabulary"):
        compare(trace, trace, torch.tensor(61))


@pytest.mark.parametrize("with_logits", [True, False])
def test_surprisal_is_the_loss_of_every_next_token(with_logits):
    model, trace = traced(0)
    if not with_logits:
        trace.logits = None
    found = surprisal(trace)
    with torch.no_grad():
        logits = model(trace.input_ids).logits
    log_p = log_softmax(logits)
    for b, t in np.ndindex(2, 5):
        close(found[b, t], -log_p[b, t, trace.input_ids[b, t + 1]], atol=1e-4)
    assert surprisal(trace.at(0)).shape == (2, 0)


def test_greedy_text_parts_where_the_predictions_do():
    parted = 0
    for seed in range(6):
        model, prompt, off = tiny_model(seed), torch.tensor([[5, 9, 17]]), Intervention.layers_off([2])
        how = {"max_new_tokens": 8, "do_sample": False}
        text, other = model.generate(prompt, **how), model.generate(prompt, intervention=off, **how)
        plain, changed = model.trace(text), model.trace(text, intervention=off)
        answers = slice(2, -1)  # the positions that predict what was generated
        [departure] = compare(plain.at(answers), changed.at(answers), text[:, 3:]).first_departure()
        assert first_difference(text[0, 3:].tolist(), other[0, 3:].tolist()) == departure
        parted += departure is not None
    assert parted > 0


@given(common=st.lists(st.integers(0, 3)), rest=st.lists(st.integers(0, 3)), other=st.lists(st.integers(0, 3)))
def test_texts_differ_first_where_their_common_start_ends(common, rest, other):
    a, b = common + rest, common + other
    index = first_difference(a, b)
    assert index == first_difference(b, a)
    if index is None:
        assert a == b
    else:
        assert a[:index] == b[:index]
        assert a[index : index + 1] != b[index : index + 1]


def test_nothing_that_follows_needs_gradients(make_model, input_ids):
    trace = make_model().trace(input_ids)
    lens, change = logit_lens(trace, input_ids), compare(trace, trace, input_ids)
    found = [contributions(trace, input_ids).total(), lens.entropy, lens.log_probs, change.kl, surprisal(trace)]
    assert not any(value.requires_grad for value in found)
