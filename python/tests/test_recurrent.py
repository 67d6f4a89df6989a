"""Token by token, for decoding: the same results as by chunks, within rounding."""

from __future__ import annotations

import pytest
import torch

import rewy
from recurrence import (
    FUNCTIONS,
    NAMES,
    OPS,
    RECURRENT,
    Case,
    assert_close,
    assert_same_bits,
    in_fp64,
    leaves,
    offsets,
    recurrence,
    tensors,
)
from test_activation import raw, switches

CASES = (
    Case(T=0),
    Case(B=3, T=1, H=1, HV=4),
    Case(B=2, T=17, HV=4, K=24, V=40),
    Case(T=64, K=128, V=128),
    Case(T=100, offsets=(0, 0, 33, 33, 97, 98, 98)),
)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def decode(op, inputs, state=None, **options):
    return RECURRENT[op](*inputs, initial_state=state, output_final_state=True, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_matches_the_recurrence(op, case, device, dtype):
    inputs = tensors(op, case, device, dtype)
    state = torch.randn(case.sequences, case.HV, case.K, case.V, device=device)
    for initial in (None, state):
        o, final = decode(op, inputs, initial, cu_seqlens=offsets(case, device))
        exact_state = None if initial is None else initial.double().cpu()
        exact, exact_final = recurrence(op, case, [t.double().cpu() for t in inputs], exact_state)
        assert (o.dtype, final.dtype) == (dtype, torch.float32)
        assert_close(o, exact, TOLERANCES[dtype], "o")
        assert_close(final, exact_final, 1e-5, "final_state")  # FP32 throughout


@pytest.mark.parametrize("op", OPS)
def test_one_token_at_a_time_is_all_at_once(op, device, dtype):
    """To the bit: the state that comes out holds everything."""
    case = Case(B=2, T=9, HV=4)
    inputs = tensors(op, case, device, dtype)
    whole, final = decode(op, inputs)
    rows, state = [], None
    for i in range(case.T):
        o, state = decode(op, [t[:, i : i + 1] for t in inputs], state)
        rows.append(o)
    assert_same_bits([torch.cat(rows, 1), state], [whole, final])


@pytest.mark.parametrize("op", OPS)
def test_raw_projections(op, device, dtype):
    case = Case(B=2, T=20, HV=4)
    given = raw(op, case, device, dtype)
    inputs = [given[name] for name in NAMES[op]]
    parameters = {name: given[name] for name in ("A_log", "dt_bias") if name in given}
    o, final = decode(op, inputs, **parameters, **switches(op))
    chunked, chunked_final = FUNCTIONS[op](*inputs, output_final_state=True, **parameters, **switches(op))
    # Both round the output once; by chunks other values are rounded on the way.
    tolerance = 1e-5 if dtype == torch.float32 else 1.2e-2
    assert_close(o, chunked.double().cpu(), tolerance, "o")
    assert_close(final, chunked_final.double().cpu(), tolerance, "final_state")


@pytest.mark.parametrize("op", OPS)
def test_state_v_first(op, device, dtype):
    case = Case(T=8)
    inputs = tensors(op, case, device, dtype)
    state = torch.randn(1, case.HV, case.K, case.V, device=device)
    o, final = decode(op, inputs, state)
    other, turned = decode(op, inputs, state.mT.contiguous(), state_v_first=True)
    assert_same_bits([o, final], [other, turned.mT])


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_by_chunks(op, device, dtype):
    case = Case(T=30)
    inputs = leaves(tensors(op, case, device, dtype))
    state = torch.randn(1, case.HV, case.K, case.V, device=device).requires_grad_()
    d_o = torch.randn(1, case.T, case.HV, case.V).to(device, dtype)
    gradients = []
    for function in (RECURRENT[op], FUNCTIONS[op]):
        o, final = function(*inputs, initial_state=state, output_final_state=True)
        gradients.append(list(torch.autograd.grad([o, final], [*inputs, state], [d_o, torch.ones_like(final)])))
    assert_same_bits(*gradients)


@pytest.mark.parametrize("op", OPS)
def test_opcheck_and_compile(op, device, dtype):
    inputs = tensors(op, Case(T=8), device, dtype)
    named = dict(zip(NAMES[op], inputs, strict=True))
    operands = [named.get(name) for name in ("q", "k", "v", "g", "beta", "b", "w")]
    options = {"options": "output_final_state policy=none schedule=tokens"}
    torch.library.opcheck(torch.ops.rewy.forward.default, (op, *operands), options)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    assert_same_bits(list(compiled(op, inputs)), list(decode(op, inputs)))


def test_fp32_on_a_gpu(cuda):
    """Decoding in FP32, which the chunked kernels do not have; its gradients are refused before anything runs."""
    case = Case(B=2, T=5, HV=4)
    inputs = tensors("kda", case, cuda, torch.float32)
    o, final = decode("kda", inputs)
    exact, exact_final = recurrence("kda", case, in_fp64(inputs))
    assert_close(o, exact, 1e-5, "o")
    assert_close(final, exact_final, 1e-5, "final_state")
    with pytest.raises(ValueError, match="dtype f32 is neither bf16 nor f16"):
        decode("kda", leaves(inputs))


def test_rows_that_the_backward_cannot_read(cuda):
    """By tokens any rows are read; the backward goes by chunks, and refuses before the forward has run."""
    q, k, v, g, beta = tensors("kda", Case(T=5), cuda, torch.bfloat16)
    spread = torch.stack([v, v], -1).flatten(-2)[..., ::2]
    assert torch.equal(decode("kda", [q, k, spread, g, beta])[0], decode("kda", [q, k, v, g, beta])[0])
    with pytest.raises(ValueError, match="kda backward: argument 'v': expected last axis contiguous, rows 16-byte"):
        decode("kda", [q, k, spread.requires_grad_(), g, beta])


def test_explain_and_refusals(device, dtype):
    inputs = tensors("kda", Case(T=4), device, dtype)
    text = rewy.explain(rewy.fused_recurrent_kda, *inputs)
    assert f"kda forward: {device} serves it" in text and f"kda backward: {device} serves it" in text
    with pytest.raises(ValueError, match=r"^kda forward: argument 'k': expected shape"):
        decode("kda", [inputs[0], inputs[1][:, :2], *inputs[2:]])
    with pytest.raises(TypeError, match="disable_recompute"):
        decode("kda", inputs, disable_recompute=True)


def test_cuda_graph(cuda):
    case = Case(B=4, T=1)
    inputs = tensors("kda", case, cuda, torch.bfloat16)
    state = torch.randn(4, case.HV, case.K, case.V, device=cuda)
    decode("kda", inputs, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = list(decode("kda", inputs, state))
    for t, other in zip(inputs, tensors("kda", case, cuda, torch.bfloat16, seed=1), strict=True):
        t.copy_(other)
    graph.replay()
    assert_same_bits(captured, list(decode("kda", inputs, state)))
