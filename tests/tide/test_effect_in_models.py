"""What interventions do to whole models: in decoding, batches and padding, and against models made by hand."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_model
from tests.tide.test_effect import CONFIG, MEAN, drawn
from tests.tide.test_intervention import ANYTHING, LAYERS
from tide import Intervention
from tide.effect import Effect
from tide.intervention import Swap

IDS = torch.tensor([[5, 3, 7, 3, 8, 2, 5], [4, 4, 6, 8, 8, 7, 2]])
MIXED = [  # of every kind, some with positions before and after the end of a prompt of 7 tokens
    Intervention.off([(0, 1), (2, 0)], positions=[2, 7, 9]) | Intervention.route("uniform", layers=[1]),
    Intervention.from_text("1~mean@1,8_0.2~random4!_temperature0.3:2@0-5_swap3.8_swap7.2@8"),
    Intervention.all_off(replacement="random", seed=1, positions=[6, 8]) | Intervention.swap(5, 4),
    Intervention.route("only", 2, positions=range(4, 10)) | Intervention.banks_off([0], renormalize=True),
]


def hidden_of(model, ids, intervention=None):
    return model.trace(ids, intervention=intervention, mean_injection=MEAN).hidden


def greedy(model, ids, **how):
    how = {"mean_injection": MEAN, "max_new_tokens": 6, "do_sample": False, **how}
    output = model.generate(ids, output_logits=True, return_dict_in_generate=True, **how)
    return output.sequences, torch.stack(output.logits, dim=1)


@given(intervention=ANYTHING, layer=st.integers(0, LAYERS), seed=st.integers(0, 20))
@settings(max_examples=40)
def test_a_forward_that_starts_at_the_first_changed_layer_is_the_same_bit_for_bit(intervention, layer, seed):
    model, first = tiny_model(seed), intervention.first_layer(LAYERS)
    plain, full = hidden_of(model, IDS), hidden_of(model, IDS, intervention)
    assert torch.equal(full[:, :, : first + 1], plain[:, :, : first + 1]) or first == 0
    # `layer` from the stream of this very intervention, `first` from that of the model as trained.
    for start, stream in ((layer, full), (first, plain)):
        with torch.no_grad():
            last = model.model(
                IDS,
                inputs_embeds=stream[:, :, start],
                first_layer=start,
                intervention=intervention,
                mean_injection=MEAN,
                use_cache=False,
            ).last_hidden_state
        assert torch.equal(last, model.model.norm(full[:, :, -1]))


@given(a=ANYTHING, b=ANYTHING)
@settings(max_examples=25)
def test_a_batch_with_an_intervention_a_row_equals_its_rows_one_by_one(a, b):
    model = tiny_model()
    together = hidden_of(model, IDS, (a, b))
    for row, intervention in enumerate((a, b)):
        alone = hidden_of(model, IDS[row : row + 1], intervention)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("intervention", [*MIXED, MIXED[:2], MIXED[2:]], ids=str)
def test_decoding_with_a_cache_equals_full_forwards_at_the_same_positions(make_model, intervention):
    model, ids = make_model(), IDS
    tokens, logits = greedy(model, IDS, intervention=intervention)
    for step in range(6):
        with torch.no_grad():
            full = model(ids, intervention=intervention, mean_injection=MEAN).logits[:, -1]
        torch.testing.assert_close(logits[:, step], full, rtol=1e-4, atol=1e-4)
        ids = torch.cat([ids, full.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(tokens, ids)
    assert torch.equal(tokens, greedy(model, IDS, intervention=intervention, use_cache=False)[0])
    assert not torch.allclose(logits, greedy(model, IDS)[1], atol=1e-2)


@pytest.mark.parametrize("intervention", MIXED, ids=str)
def test_positions_are_of_the_text_whatever_the_padding(make_model, intervention):
    model = make_model()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    ids = IDS.masked_fill(mask == 0, 1)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    how = {"intervention": intervention, "mean_injection": MEAN}
    with torch.no_grad():
        together = model(ids, attention_mask=mask, position_ids=position_ids, **how).logits
        for row, start in ((0, 3), (1, 0)):
            alone = model(IDS[row : row + 1, start:], **how).logits
            torch.testing.assert_close(together[row : row + 1, start:], alone, rtol=1e-4, atol=1e-4)
    tokens, logits = greedy(model, ids, attention_mask=mask, intervention=intervention)
    for row, start in ((0, 3), (1, 0)):
        alone_tokens, alone_logits = greedy(model, IDS[row : row + 1, start:], intervention=intervention)
        assert torch.equal(tokens[row, 7:], alone_tokens[0, 7 - start :])
        torch.testing.assert_close(logits[row], alone_logits[0], rtol=1e-4, atol=1e-4)


def test_a_swap_equals_a_model_whose_table_holds_the_other_row(make_model):
    model = make_model()
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        by_hand.model.memory.weight[3] = model.model.memory.weight[40]
    swap = Intervention.swap(3, 40)
    assert torch.equal(hidden_of(model, IDS, swap), hidden_of(by_hand, IDS))
    assert not torch.allclose(hidden_of(model, IDS, swap), hidden_of(model, IDS), atol=1e-2)
    here = model.trace(IDS, intervention=Intervention.swap(3, 40, positions=[3])).memory
    assert torch.equal(here[0, 3], by_hand.trace(IDS).memory[0, 3])
    assert torch.equal(here[:, :3], model.trace(IDS).memory[:, :3])
    # Also where the swapped token is generated: all of them read the row of 40.
    everything = Intervention(tuple(Swap(token, 40) for token in range(61)))
    with torch.no_grad():
        by_hand.model.memory.weight[:] = model.model.memory.weight[40].clone()
    tokens, logits = greedy(model, IDS, intervention=everything)
    assert torch.equal(tokens, greedy(by_hand, IDS)[0])
    torch.testing.assert_close(logits, greedy(by_hand, IDS)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("replacement", ["mean", "random"])
def test_what_stands_in_is_added_to_the_stream(make_model, layer, replacement):
    model = make_model()
    zero, other = (Intervention.off([(layer, 1)], replacement=each) for each in ("zero", replacement))
    plain = model.trace(IDS)
    added = hidden_of(model, IDS, other)[:, :, layer + 1] - hidden_of(model, IDS, zero)[:, :, layer + 1]
    if replacement == "mean":
        torch.testing.assert_close(added, MEAN[layer, 1].expand_as(added), rtol=1e-4, atol=1e-4)
    else:
        injected = plain.routing[:, :, layer, 1, None] * plain.memory[:, :, 1]
        torch.testing.assert_close(added.norm(dim=-1), injected.norm(dim=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.2, 1.0, 7.0])
@pytest.mark.parametrize("null_bias", [False, True])
def test_a_temperature_divides_the_routers_logits(make_model, value, null_bias):
    model = make_model(router_null_bias=null_bias)
    router, seen = model.model.layers[1].router, []
    hook = router.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    routing = model.trace(IDS, intervention=Intervention.route("temperature", value, layers=[1])).routing
    hook.remove()
    with torch.no_grad():
        logits = router.proj(seen[0])
        if null_bias:
            logits[..., -1] += router.null_bias
    torch.testing.assert_close(routing[:, :, 1], (logits / value).softmax(-1), rtol=1e-4, atol=1e-6)
    plain = model.trace(IDS).routing
    assert torch.equal(routing[:, :, 0], plain[:, :, 0])
    if value == 1:
        torch.testing.assert_close(routing, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "off", [Intervention.all_off(), Intervention.route("null"), Intervention.all_off(renormalize=True)], ids=str
)
def test_all_off_in_any_words_is_the_same_bit_for_bit(make_model, off):
    model = make_model()
    assert torch.equal(hidden_of(model, IDS, off), hidden_of(model, IDS, Intervention.layers_off(range(LAYERS))))


def test_the_base_model_takes_what_names_no_bank_and_does_nothing(make_model):
    base = make_model(num_memory_blocks=0)
    with torch.no_grad():
        plain = base(IDS).logits
        for text in ("*", "0_2", "1~mean", "*~random3!@1-4", "uniform", "null:1", "temperature3", "swap5.7"):
            assert torch.equal(base(IDS, intervention=Intervention.from_text(text)).logits, plain)
    for text in ("0.0", ".0", "only0"):
        with pytest.raises(ValueError, match=r"bank 0.* but the model has no memory banks"):
            base(IDS, intervention=Intervention.from_text(text))


@pytest.mark.parametrize("intervention", MIXED, ids=str)
def test_bfloat16_does_what_float32_does(make_model, intervention):
    model = make_model()
    routing, memory, _, _ = drawn(9, 2, 7)
    for layer in range(LAYERS):
        effect = Effect.of(intervention, CONFIG, torch.arange(7)[None], 2, MEAN)
        weights, replaced = effect.route(layer, routing, memory.bfloat16())
        exact_weights, exact = effect.route(layer, routing, memory)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights, exact_weights)
        if exact is not None:
            assert replaced.dtype == torch.bfloat16
            torch.testing.assert_close(replaced.float(), exact, rtol=2e-2, atol=1e-3)
    trace = model.bfloat16().trace(IDS, intervention=intervention, mean_injection=MEAN)
    assert trace.hidden.dtype == torch.bfloat16
    assert trace.hidden.isfinite().all()


def test_gradients_pass(make_model):
    model = make_model()
    with torch.inference_mode():
        hidden_of(model, IDS, MIXED[2])
    model(IDS, labels=IDS, intervention=MIXED[1] | MIXED[2], mean_injection=MEAN).loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "router" in name or "memory" in name]
    assert all(g is not None and g.isfinite().all() for g in gradients)
