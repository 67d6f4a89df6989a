"""Results and gradients against the recurrence, and what they promise to the bit."""

from __future__ import annotations

import pytest
import torch

from recurrence import (
    FUNCTIONS,
    NAMES,
    OPS,
    Case,
    assert_close,
    assert_same_bits,
    in_fp64,
    leaves,
    offsets,
    recurrence,
    tensors,
)

CASES = (
    Case(T=0),
    Case(T=1),
    Case(B=2, T=65, HV=4),
    Case(T=130, K=24, V=40),
    Case(T=100, offsets=(0, 0, 33, 33, 97, 98, 98)),
    Case(T=70, HV=6, offsets=(0, 64, 70)),
)
# FP32 on a CPU: a few roundings of 6e-8 a token. 16-bit types: the contract of docs/numerics.md.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (8e-3, 2e-2),
    torch.bfloat16: (8e-3, 2e-2),
}
LOOSER = {"g", "beta", "b", "w"}


def run(op, case, inputs, state=None, d_o=None, d_final=None, **options):
    """(o, final_state, gradients of the inputs and the initial state)."""
    variables = inputs if state is None else [*inputs, state]
    o, final = FUNCTIONS[op](*inputs, initial_state=state, cu_seqlens=offsets(case, inputs[0].device.type), **options)
    outputs = [(o, d_o), (final, d_final)]
    outputs = [(out, gradient) for out, gradient in outputs if out is not None and gradient is not None]
    gradients = torch.autograd.grad([out for out, _ in outputs], variables, [gradient for _, gradient in outputs])
    return o, final, list(gradients)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["f64", "f32", "f16", "bf16"])
def test_matches_the_recurrence(op, case, dtype, device):
    if device == "cuda" and dtype not in (torch.float16, torch.bfloat16):
        pytest.skip("16-bit types on a GPU")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = leaves(tensors(op, case, device, dtype))
    state_shape = (case.sequences, case.HV, case.K, case.V)
    state, d_final = (torch.randn(state_shape, dtype=torch.float64).to(device, wide) for _ in range(2))
    state.requires_grad_()
    d_o = torch.randn(case.B, case.T, case.HV, case.V, dtype=torch.float64).to(device, dtype)

    o, final, gradients = run(op, case, inputs, state, d_o, d_final, output_final_state=True)

    *exact_inputs, exact_state = exact = in_fp64([*inputs, state])
    exact_o, exact_final = recurrence(op, case, exact_inputs, exact_state)
    loss = (exact_o * d_o.double().cpu()).sum() + (exact_final * d_final.double().cpu()).sum()
    exact_gradients = torch.autograd.grad(loss, exact, materialize_grads=True)
    tight, loose = TOLERANCES[dtype]
    assert (o.dtype, final.dtype) == (dtype, wide)
    assert_close(o, exact_o, tight, "o")
    assert_close(final, exact_final, tight, "final_state")
    for name, t, actual, expected in zip(
        (*NAMES[op], "initial_state"), [*inputs, state], gradients, exact_gradients, strict=True
    ):
        assert actual.dtype == t.dtype
        assert_close(actual, expected, loose if name in LOOSER else tight, f"gradient of {name}")


@pytest.mark.parametrize("op", OPS)
def test_reference_backend_through_the_operator(op):
    case = Case(T=80, HV=4)
    named = dict(zip(NAMES[op], tensors(op, case), strict=True))
    arguments = [named.get(name) for name in ("q", "k", "v", "g", "beta", "b", "w")]
    o, _, saved, _ = torch.ops.rewy.forward(op, *arguments, options="backend=reference")
    assert saved.numel() == 0
    exact, _ = recurrence(op, case, in_fp64(list(named.values())))
    assert_close(o, exact, 1e-7, "o")  # one rounding


@pytest.mark.parametrize("op", ["gdn", "kda", "gdn2"])
def test_a_decay_below_fp32_has_no_gradient(op, device, dtype):
    """exp(g) is 0 there, and dg not what is left of sums that cancel."""
    inputs = tensors(op, Case(T=70), device, dtype)
    gate = NAMES[op].index("g")
    inputs[gate][:, 20:40:2] = -88
    inputs = leaves(inputs)
    o, _ = FUNCTIONS[op](*inputs)
    (dg,) = torch.autograd.grad(o, inputs[gate], o.detach())
    assert not dg[:, 20:40:2].any()
    assert dg[:, 21:40:2].any()


@pytest.mark.parametrize("op", OPS)
def test_scale(op, device, dtype):
    case = Case(T=20)
    inputs = leaves(tensors(op, case, device, dtype))
    d_o = torch.randn(1, 20, case.HV, case.V).to(device, dtype)
    default, _, gradients = run(op, case, inputs, d_o=d_o)
    same, _, same_gradients = run(op, case, inputs, d_o=d_o, scale=case.K**-0.5)
    assert_same_bits([default, *gradients], [same, *same_gradients])
    o, _, gradients = run(op, case, inputs, d_o=d_o, scale=0.7)
    exact = in_fp64(inputs)
    exact_o, _ = recurrence(op, case, exact, scale=0.7)
    tight, loose = TOLERANCES[dtype]
    assert_close(o, exact_o, tight, "o")
    for name, actual, expected in zip(
        NAMES[op], gradients, torch.autograd.grad(exact_o, exact, d_o.double().cpu()), strict=True
    ):
        assert_close(actual, expected, loose if name in LOOSER else tight, f"gradient of {name}")


@pytest.mark.parametrize("op", OPS)
def test_disable_recompute_changes_no_bit(op, device, dtype):
    case = Case(B=2, T=150)
    inputs = leaves(tensors(op, case, device, dtype))
    d_o = torch.randn(case.B, case.T, case.HV, case.V).to(device, dtype)
    outcomes, kept = [], []
    for disable_recompute in (False, True):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
            o, _, gradients = run(op, case, inputs, d_o=d_o, disable_recompute=disable_recompute)
        outcomes.append([o, *gradients])
        kept.append(sum(sizes))
    assert_same_bits(*outcomes)
    assert kept[0] < kept[1]


@pytest.mark.parametrize("op", OPS)
def test_state_v_first(op, device, dtype):
    case = Case(T=40)
    inputs = leaves(tensors(op, case, device, dtype))
    state, d_final = (torch.randn(1, case.HV, case.K, case.V, device=device) for _ in range(2))
    _, final, gradients = run(op, case, inputs, state.requires_grad_(), None, d_final, output_final_state=True)
    turned_state = state.detach().mT.contiguous().requires_grad_()
    _, turned_final, turned_gradients = run(
        op, case, inputs, turned_state, None, d_final.mT, output_final_state=True, state_v_first=True
    )
    assert_same_bits([final.mT, *gradients[:-1]], [turned_final, *turned_gradients[:-1]])
    assert torch.equal(gradients[-1].mT, turned_gradients[-1])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_packed_is_each_sequence_alone(op, integer, device, dtype):
    case = Case(T=150, offsets=(0, 10, 10, 140))
    inputs = leaves(tensors(op, case, device, dtype))
    packed, final = FUNCTIONS[op](*inputs, cu_seqlens=offsets(case, device, integer), output_final_state=True)
    gradients = torch.autograd.grad(packed, inputs, torch.ones_like(packed))
    for n in range(case.sequences):
        first, last = case.offsets[n : n + 2]
        part = leaves([t[:, first:last] for t in inputs])
        o, state = FUNCTIONS[op](*part, output_final_state=True)
        alone = torch.autograd.grad(o, part, torch.ones_like(o))
        assert_same_bits([packed[:, first:last], final[n : n + 1]], [o, state])
        assert_same_bits([t[:, first:last] for t in gradients], list(alone))
    assert all(not t[:, 140:].any() for t in (packed, *gradients))


@pytest.mark.parametrize("op", OPS)
def test_states_and_their_gradients_in_all_combinations(op, device, dtype):
    case = Case(T=70)
    inputs = leaves(tensors(op, case, device, dtype))
    shape = (1, case.HV, case.K, case.V)
    d_o = torch.randn(1, case.T, case.HV, case.V).to(device, dtype)
    d_final = torch.randn(shape, device=device)
    for given in (False, True):
        state = torch.randn(shape, device=device).requires_grad_() if given else None
        exact = in_fp64(inputs if state is None else [*inputs, state])
        exact_o, exact_final = recurrence(op, case, exact[: len(inputs)], exact[-1] if given else None)
        for with_o, with_final in ((True, False), (False, True), (True, True)):
            _, _, gradients = run(
                op, case, inputs, state, d_o if with_o else None, d_final if with_final else None,
                output_final_state=with_final,
            )  # fmt: skip
            loss = (exact_o * d_o.double().cpu()).sum() * with_o + (
                exact_final * d_final.double().cpu()
            ).sum() * with_final
            expected = torch.autograd.grad(loss, exact, retain_graph=True)
            names = (*NAMES[op], "initial_state")
            for name, a, e in zip(names[: len(expected)], gradients, expected, strict=True):
                tight, loose = TOLERANCES[dtype]
                assert_close(a, e, loose if name in LOOSER else tight, f"gradient of {name}")


def test_no_final_state_unless_asked_for(device, dtype):
    inputs = tensors("kda", Case(), device, dtype)
    assert FUNCTIONS["kda"](*inputs)[1] is None
    assert FUNCTIONS["kda"](*inputs, output_final_state=True)[1].shape == (1, 2, 32, 24)


def test_gate_and_state_of_other_types_are_converted(device, dtype):
    q, k, v, g, beta = tensors("kda", Case(), device, dtype)
    state = torch.randn(1, 2, 32, 24, device=device)
    half_g, half_state = (t.bfloat16().requires_grad_() for t in (g, state))
    o, final = FUNCTIONS["kda"](q, k, v, half_g, beta, initial_state=half_state, output_final_state=True)
    exact, exact_final = FUNCTIONS["kda"](
        q, k, v, half_g.detach().float(), beta, initial_state=half_state.detach().float(), output_final_state=True
    )
    assert_same_bits([o.detach(), final.detach()], [exact, exact_final])
    final.sum().backward()
    assert half_g.grad.dtype == half_state.grad.dtype == torch.bfloat16


def test_options_that_change_nothing(device, dtype):
    case = Case(T=60, offsets=(0, 20, 60))
    inputs = tensors("kda", case, device, dtype)
    packed = offsets(case, device)
    o, _ = FUNCTIONS["kda"](*inputs, cu_seqlens=packed)
    other, _ = FUNCTIONS["kda"](*inputs, cu_seqlens=packed, cu_seqlens_cpu=packed.cpu(), safe_gate=True)
    assert torch.equal(o, other)


def test_reset_and_zero_gates(device, dtype):
    q, k, v, g, beta = leaves(tensors("kda", Case(T=40), device, dtype))
    ungated, _ = FUNCTIONS["deltanet"](q, k, v, beta)
    gated, _ = FUNCTIONS["kda"](q, k, v, torch.zeros_like(g), beta)
    assert_close(gated, ungated.double().cpu(), TOLERANCES[dtype][0], "o")
    resets = g.detach().clone()
    resets[:, 20] = -torch.inf
    resets.requires_grad_()
    o, _ = FUNCTIONS["kda"](q, k, v, resets, beta)
    alone, _ = FUNCTIONS["kda"](*(t[:, 20:] for t in (q, k, v, g, beta)))
    assert_close(o[:, 20:], alone.double().cpu(), TOLERANCES[dtype][0], "o after a reset")
    o.sum().backward()
    assert torch.isfinite(resets.grad).all() and not resets.grad[:, 20].any()
