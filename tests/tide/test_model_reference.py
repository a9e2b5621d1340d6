"""The whole forward against a reference written from the paper's equations, in float64 throughout."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_model

# transformers computes the statistics of RMSNorm and the rotary angles in float32, whatever the model's dtype.
TOLERANCE = 5e-6  # transformers computes the rotary angles in float32, also in a float64 model


def rms_norm(x, gain, eps):
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotate(x, theta):
    """RoPE on [B, heads, T, D]: the pair (i, i + D/2) turns by position * theta^(-2i/D)."""
    half, time = x.shape[-1] // 2, torch.arange(x.shape[-2], dtype=torch.float64)
    angle = time[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def attention(h, w, config):
    batch, length, _ = h.shape
    groups = config.num_attention_heads // config.num_key_value_heads

    def heads(name):
        return (h @ w[f"self_attn.{name}.weight"].T).view(batch, length, -1, config.head_dim).transpose(1, 2)

    theta = config.rope_parameters["rope_theta"]
    q, k, v = rotate(heads("q_proj"), theta), rotate(heads("k_proj"), theta), heads("v_proj")
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    future = torch.ones(length, length).triu(1).bool()
    scores = (q @ k.mT / config.head_dim**0.5).masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1) @ w["self_attn.o_proj.weight"].T


def reference_logits(model, ids):
    """Equations 3.3 to 3.6."""
    config, eps, num_banks = model.config, model.config.rms_norm_eps, model.config.num_memory_blocks
    w = {name.removeprefix("model."): p.detach().double() for name, p in model.state_dict().items()}
    h = w["embed_tokens.weight"][ids]
    if num_banks:
        memory = rms_norm(w["memory.weight"][ids], w["memory.norm.weight"], eps)  # 3.3, 3.4: [B, T, K, d]
    for i in range(config.num_hidden_layers):
        layer = {n.removeprefix(f"layers.{i}."): p for n, p in w.items() if n.startswith(f"layers.{i}.")}
        h = h + attention(rms_norm(h, layer["input_layernorm.weight"], eps), layer, config)
        n = rms_norm(h, layer["post_attention_layernorm.weight"], eps)
        gate, up = n @ layer["mlp.gate_proj.weight"].T, n @ layer["mlp.up_proj.weight"].T
        h = h + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
        if num_banks:
            scores = n @ layer["router.proj.weight"].T
            if config.router_null_bias:
                scores[..., -1] += layer["router.null_bias"]
            alpha = scores.softmax(-1)  # 3.5; the null bank is the last slot and adds nothing
            h = h + sum(alpha[..., k : k + 1] * memory[..., k, :] for k in range(num_banks))  # 3.6
    unembedding = w["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return rms_norm(h, w["norm.weight"], eps) @ unembedding.T


@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([4, 8]),
    layers=st.integers(1, 3),
    num_banks=st.integers(0, 4),
    null_bias=st.booleans(),
    tied=st.booleans(),
    theta=st.sampled_from([100.0, 10_000.0]),
    length=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_the_forward_is_the_papers_equations(heads, head_dim, layers, num_banks, null_bias, tied, theta, length, seed):
    model = tiny_model(
        seed,
        hidden_size=heads[0] * head_dim,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        num_hidden_layers=layers,
        num_memory_blocks=num_banks,
        router_null_bias=null_bias,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    ).double()
    ids = torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits, expected = model(ids).logits, reference_logits(model, ids)
    assert logits.dtype == torch.float64
    assert (logits - expected).abs().max() / expected.abs().max() < TOLERANCE


def test_the_reference_notices_a_wrong_null_bank(make_model, input_ids):
    """The comparison has teeth: dropping the null slot from the softmax moves the logits far beyond the tolerance."""
    model = make_model().double()
    expected = reference_logits(model, input_ids)
    for layer in model.model.layers:
        layer.router.proj.weight.data[-1] = -1e3 * layer.router.proj.weight.data[-1]
    assert (model(input_ids).logits - expected).abs().max() / expected.abs().max() > 1e-2
