"""What a PyTorch operator owes its users: autograd, tracing, export, hooks, modes."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import rewy
from recurrence import FUNCTIONS, NAMES, OPS, Case, assert_close, assert_same_bits, leaves, offsets, tensors


def operator_arguments(op: str, case: Case, **made) -> tuple:
    """Arguments of torch.ops.rewy.forward up to cu_seqlens."""
    named = dict(zip(NAMES[op], tensors(op, case, **made), strict=True))
    device = made.get("device", "cpu")
    operands = (named.get(name) for name in ("q", "k", "v", "g", "beta", "b", "w"))
    return (op, *operands, None, None, None, offsets(case, device))


def step(function, inputs, **options):
    """(o, gradients of the inputs) of one call and the loss sum(o^2) / 2."""
    o, _ = function(*inputs, **options)
    return [o, *torch.autograd.grad(o, inputs, o.detach())]


# ---- autograd ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_gradients_only_where_needed(op, device, dtype):
    case = Case(T=70)
    everything = step(FUNCTIONS[op], leaves(tensors(op, case, device, dtype)))
    for chosen, name in enumerate(NAMES[op]):
        inputs = tensors(op, case, device, dtype)
        inputs[chosen].requires_grad_()
        o, _ = FUNCTIONS[op](*inputs)
        o.backward(o.detach())
        for i, t in enumerate(inputs):
            assert (t.grad is not None) == (i == chosen), name
        assert_close(
            inputs[chosen].grad, everything[1 + chosen].double().cpu(), 1e-6 if device == "cpu" else 1e-2, name
        )


def test_nothing_is_kept_without_gradients(device, dtype):
    arguments = operator_arguments("kda", Case(), device=device, dtype=dtype)
    assert torch.ops.rewy.forward(*arguments, options="policy=none")[2].numel() == 0
    recompute = torch.ops.rewy.forward(*arguments, options="policy=recompute")[2].numel()
    assert 0 < recompute < torch.ops.rewy.forward(*arguments, options="policy=save")[2].numel()
    inputs = leaves(tensors("kda", Case(), device, dtype))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, _ = rewy.chunk_kda(*inputs)
        assert not o.requires_grad
    assert rewy.chunk_kda(*inputs)[0].requires_grad


def test_unused_outputs(device, dtype, monkeypatch):
    """An output that no loss uses costs no zeros: the operator is given no gradient of it."""
    given = []
    backward = rewy._ops.backward
    monkeypatch.setattr(rewy._ops, "backward", lambda *a: given.append([t is not None for t in a[1:3]]) or backward(*a))
    inputs = leaves(tensors("kda", Case(), device, dtype))
    o, final = rewy.chunk_kda(*inputs, output_final_state=True)
    torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    final.sum().backward()
    assert given == [[True, False], [False, True]]
    assert not inputs[0].grad.any() and inputs[1].grad.any()  # queries do not reach the state


@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op):
    case = Case(T=7, HV=4, K=3, V=2, offsets=(0, 3, 3, 7))
    inputs = leaves(tensors(op, case, dtype=torch.float64))
    state = torch.randn(3, 4, 3, 2, dtype=torch.float64, requires_grad=True)

    def call(*variables):
        return FUNCTIONS[op](
            *variables[:-1], initial_state=variables[-1], output_final_state=True, cu_seqlens=offsets(case)
        )

    assert torch.autograd.gradcheck(call, (*inputs, state))


def test_double_backward_is_refused(device, dtype):
    inputs = leaves(tensors("kda", Case(), device, dtype))
    for call in (rewy.chunk_kda, lambda q, k, v, g, beta: torch.ops.rewy.forward(
        "kda", q, k, v, g, beta, None, None
    )[:2]):  # fmt: skip
        o, _ = call(*inputs)
        (d_q,) = torch.autograd.grad(o.square().sum(), inputs[0], create_graph=True)
        with pytest.raises(NotImplementedError, match=r"double backward .* is not supported"):
            d_q.sum().backward()


def test_function_transforms_are_refused(device, dtype):
    q, *rest = tensors("kda", Case(), device, dtype)
    with pytest.raises(NotImplementedError, match=r"^rewy: torch\.func\.grad and vjp are not supported"):
        torch.func.grad(lambda q: rewy.chunk_kda(q, *rest)[0].float().sum())(q)
    with pytest.raises(NotImplementedError, match=r"^rewy: torch\.func\.grad and vjp are not supported"):
        torch.func.grad(lambda q: torch.func.vmap(lambda q: rewy.chunk_kda(q, *rest)[0])(q).float().sum())(q[None])


@pytest.mark.parametrize("function", [rewy.chunk_kda, rewy.fused_recurrent_kda])
def test_forward_mode_is_refused(function, device, dtype):
    q, *rest = tensors("kda", Case(), device, dtype)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: function(q, *rest)[0], (q,), (torch.ones_like(q),))
    compiled = torch.compile(lambda q: torch.func.jvp(lambda q: function(q, *rest)[0], (q,), (q,)), backend="eager")
    with pytest.raises(NotImplementedError, match="forward-mode"):
        compiled(q)
    with forward_ad.dual_level():
        assert not function(q, *rest)[0].isnan().any()  # a tangent of another tensor is no reason
        with pytest.raises(NotImplementedError, match="forward-mode"):
            function(forward_ad.make_dual(q, torch.ones_like(q)), *rest)
        o, _ = function(q.requires_grad_(), *rest)
        weight = forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.autograd.grad((o * weight).sum(), q)


def test_compiled_autograd(device, dtype):
    """PyTorch's compilation of a backward alone: it traces ours whole."""
    inputs = [t.requires_grad_() for t in tensors("kda", Case(), device, dtype)]
    loss = rewy.chunk_kda(*inputs)[0].float().square().sum()
    expected = torch.autograd.grad(loss, inputs)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        rewy.chunk_kda(*inputs)[0].float().square().sum().backward()
    for t, gradient in zip(inputs, expected, strict=True):
        assert t.grad.equal(gradient)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(device, dtype):
    q, *rest = tensors("kda", Case(), device, dtype)
    batch = torch.stack([q, -q, 2 * q])
    o = torch.func.vmap(lambda q: rewy.chunk_kda(q, *rest)[0])(batch)
    assert_same_bits([*o], [rewy.chunk_kda(q, *rest)[0] for q in batch])


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_many_losses(op, device, dtype):
    inputs = leaves(tensors(op, Case(T=70), device, dtype))
    o, final = FUNCTIONS[op](*inputs, output_final_state=True)
    losses = torch.stack([o.detach(), 2 - o.detach(), torch.zeros_like(o)])
    with_states = torch.stack([final.detach(), 0 * final.detach(), -final.detach()])

    def gradients(*of_results, **options):
        return torch.autograd.grad((o, final), inputs, of_results, retain_graph=True, **options)

    found = torch.func.vmap(gradients)(losses, with_states)
    for i in range(3):
        assert_same_bits([t[i] for t in found], list(gradients(losses[i], with_states[i])))
    with pytest.raises(ValueError, match=f"^{op} backward: expected at least one loss under vmap, got 0$"):
        torch.func.vmap(gradients)(losses[:0], with_states[:0])
    with pytest.raises(NotImplementedError, match=r"^rewy: is_grads_batched=True is not supported, torch\.func"):
        gradients(losses, with_states, is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_behind_vmap(device, dtype):
    """Inside, the tensors that the function is given require no gradient."""
    q, *rest = tensors("kda", Case(), device, dtype)

    def call(q):
        return rewy.chunk_kda(q, *rest)[0]

    batch = torch.stack([q, -q, 2 * q]).requires_grad_()
    (found,) = torch.autograd.grad(torch.func.vmap(call)(batch).float().sum(), batch)
    given = [q.detach().requires_grad_() for q in batch]
    assert_same_bits([*found], [torch.autograd.grad(call(q).float().sum(), q)[0] for q in given])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_what_vmap_does_not_batch(device, dtype):
    """A layer's parameter, say."""
    q, *rest = tensors("kda", Case(), device, dtype)
    batch, A_log = torch.stack([q, -q]), torch.zeros(2, device=device, requires_grad=True)

    def call(q):
        return rewy.chunk_kda(q, *rest, use_gate_in_kernel=True, A_log=A_log)[0]

    found, expected = (
        torch.autograd.grad(o.float().sum(), A_log)[0]
        for o in (torch.func.vmap(call)(batch), torch.stack([call(q) for q in batch]))
    )
    torch.testing.assert_close(found, expected)


def test_gradients_behind_functionalize(device, dtype):
    inputs = leaves(tensors("kda", Case(), device, dtype))

    def call(*inputs):
        return rewy.chunk_kda(*inputs)[0]

    found, expected = (
        torch.autograd.grad(function(*inputs).float().sum(), inputs)
        for function in (torch.func.functionalize(call), call)
    )
    assert_same_bits(list(found), list(expected))


def test_what_runs_around_a_call_keeps_its_gradients(device, dtype):
    """Nothing in the call needs any, what a mode makes of its results does."""
    inputs = tensors("deltanet", Case(), device, dtype)
    factor = torch.ones((), device=device, requires_grad=True)

    class Scaled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return (result[0] * factor, *result[1:]) if "rewy.forward" in str(function) else result

    with Scaled():
        o, _ = rewy.chunk_delta_rule(*inputs)
    assert o.requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("needed", [False, True])
def test_jit_trace_reads_its_arguments(needed, device, dtype):
    one, other = (tensors("kda", Case(), device, dtype, seed=seed) for seed in (1, 2))
    for t in (*one, *other):
        t.requires_grad_(needed)
    traced = torch.jit.trace(lambda *inputs: rewy.chunk_kda(*inputs)[0], one, check_trace=False)
    assert_same_bits([traced(*other)], [rewy.chunk_kda(*other)[0]])


def test_backward_twice_needs_retain_graph(device, dtype):
    inputs = leaves(tensors("gdn", Case(), device, dtype))
    o, _ = rewy.chunk_gated_delta_rule(*inputs)
    first = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    assert_same_bits(list(first), list(torch.autograd.grad(o.sum(), inputs)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), inputs)


def test_an_input_changed_in_place_is_noticed(device, dtype):
    inputs = leaves(tensors("gdn", Case(), device, dtype))
    k = inputs[1] * 1
    o, _ = rewy.chunk_gated_delta_rule(inputs[0], k, *inputs[2:])
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_inputs_are_not_written(device, dtype):
    inputs = leaves(tensors("gdn2", Case(T=130), device, dtype))
    before = [t.detach().clone() for t in inputs]
    step(rewy.chunk_gdn2, inputs)
    assert_same_bits([t.detach() for t in inputs], before)


# ---- strides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_slices_of_one_projection(op, device, dtype):
    """q, k and v as slices of one [B, T, ...] buffer, and in [B, H, T, ...] order: the same bits as contiguous ones."""
    case = Case(B=2, T=70, HV=4)
    q, k, v, *rest = leaves(tensors(op, case, device, dtype))
    expected = step(FUNCTIONS[op], [q, k, v, *rest])
    widths = [2 * 32, 2 * 32, 4 * 24]
    packed = torch.cat([t.detach().flatten(2) for t in (q, k, v)], -1)
    slices = [t.unflatten(-1, (h, -1)) for t, h in zip(packed.split(widths, -1), (2, 2, 4), strict=True)]
    heads_first = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for strided in (slices, heads_first):
        assert not any(t.is_contiguous() for t in strided)
        assert_same_bits(step(FUNCTIONS[op], [*(t.requires_grad_() for t in strided), *rest]), expected)


@pytest.mark.parametrize("op", OPS)
def test_expanded_output_gradient(op, device, dtype):
    inputs = leaves(tensors(op, Case(T=70), device, dtype))
    o, _ = FUNCTIONS[op](*inputs)
    expanded = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    assert_same_bits(list(expanded), list(torch.autograd.grad(o, inputs, torch.ones_like(o))))


def test_strides_no_memory_order_has():
    """CPU: any strides, here broadcast gates and every other feature of a wider tensor."""
    q, k, v, g, beta = tensors("kda", Case())
    wide = torch.stack([q, q], -1).flatten(-2)[..., ::2]
    broadcast = g[:, :, :, :1].expand_as(g)
    o, _ = rewy.chunk_kda(wide, k, v, broadcast, beta)
    assert torch.equal(o, rewy.chunk_kda(q, k, v, broadcast.contiguous(), beta)[0])


# ---- modes and hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_autocast(op, device):
    inputs = leaves(tensors(op, Case(T=70), device, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        o, final = FUNCTIONS[op](*inputs, output_final_state=True)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    halves = [
        t.detach().bfloat16() if n in ("q", "k", "v", "b", "w") else t.detach()
        for n, t in zip(NAMES[op], inputs, strict=True)
    ]
    expected = step(FUNCTIONS[op], leaves(halves))
    gradients = torch.autograd.grad(o, inputs, o.detach())
    assert all(t.dtype == torch.float32 for t in gradients)
    assert_same_bits([o, *(t.to(e.dtype) for t, e in zip(gradients, expected[1:], strict=True))], expected)


def test_autocast_brings_types_together_and_leaves_fp64(device):
    q, k, v, g, beta = tensors("kda", Case(), device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        mixed, _ = rewy.chunk_kda(q.bfloat16(), k, v.half(), g, beta)
        assert mixed.dtype == torch.bfloat16
        if device == "cpu":
            exact, _ = rewy.chunk_kda(*tensors("kda", Case(), dtype=torch.float64))
            assert exact.dtype == torch.float64


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("disable_recompute", [False, True])
def test_activation_checkpointing(reentrant, disable_recompute, device, dtype):
    inputs = leaves(tensors("kda", Case(T=130), device, dtype))
    expected = step(rewy.chunk_kda, inputs)

    def layer(*tensors):
        return rewy.chunk_kda(*tensors, disable_recompute=disable_recompute)

    o, _ = checkpoint(layer, *inputs, use_reentrant=reentrant)
    o.backward(o.detach())
    assert_same_bits([o, *(t.grad for t in inputs)], expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_block_that_ends_in_the_operator(reentrant, op, device, dtype):
    """What the operator reads is computed again when it asks for it: nothing after it asks first."""
    inputs = leaves(tensors(op, Case(T=130), device, dtype))

    def block(*tensors):
        return FUNCTIONS[op](*(t * 1 for t in tensors))[0].flatten(2)

    o = block(*inputs)
    expected = [o, *torch.autograd.grad(o, inputs, o.detach())]
    o = checkpoint(block, *inputs, use_reentrant=reentrant)
    o.backward(o.detach())
    assert_same_bits([o, *(t.grad for t in inputs)], expected)


@pytest.mark.parametrize("shift", [1, 16, 32])
@pytest.mark.parametrize("disable_recompute", [False, True])
def test_hooks_may_put_saved_bytes_anywhere(disable_recompute, shift, device, dtype):
    """Those that a forward keeps for its backward are of no type that says where they may lie."""
    inputs = leaves(tensors("kda", Case(T=130), device, dtype))
    options = {"disable_recompute": disable_recompute, "use_qk_l2norm_in_kernel": True}
    expected = step(rewy.chunk_kda, inputs, **options)

    def unpack(t):
        if t.dtype != torch.uint8:
            return t
        room = t.new_empty(shift + t.numel())[shift:].view(t.shape)
        return room.copy_(t)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        assert_same_bits(step(rewy.chunk_kda, inputs, **options), expected)


def test_saved_tensor_hooks(device, dtype):
    inputs = leaves(tensors("kda", Case(T=130), device, dtype))
    expected = step(rewy.chunk_kda, inputs)
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t.cpu().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
        assert_same_bits(step(rewy.chunk_kda, inputs), expected)
    assert len(packed) == len(inputs) + 2  # and what the forward keeps
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(step(rewy.chunk_kda, inputs), expected)


@pytest.mark.parametrize("op", OPS)
def test_deterministic_mode(op, device, dtype, deterministic):
    """Nothing refuses, and what the forward keeps is the same bytes too."""
    case = Case(B=2, T=130, HV=4)
    inputs = leaves(tensors(op, case, device, dtype))
    assert_same_bits(step(FUNCTIONS[op], inputs), step(FUNCTIONS[op], inputs))
    arguments = operator_arguments(op, case, device=device, dtype=dtype)
    for policy in ("recompute", "save"):
        assert_same_bits(*(list(torch.ops.rewy.forward(*arguments, options="policy=" + policy)) for _ in range(2)))


def test_threads_change_no_bit():
    inputs = leaves(tensors("kda", Case(B=2, T=130, HV=4)))
    threads = torch.get_num_threads()
    expected = step(rewy.chunk_kda, inputs)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_same_bits(step(rewy.chunk_kda, inputs), expected)
    finally:
        torch.set_num_threads(threads)


def test_python_threads_do_not_disturb_each_other():
    inputs = [leaves(tensors(op, Case(T=130), seed=seed)) for seed in range(4) for op in OPS]
    functions = [FUNCTIONS[op] for _ in range(4) for op in OPS]
    expected = [step(f, x) for f, x in zip(functions, inputs, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for actual, e in zip(pool.map(step, functions, inputs), expected, strict=True):
            assert_same_bits(actual, e)


def test_memory_is_given_back():
    """Of calls that end well and of calls that are refused: 200 times some megabytes would be seen."""
    inputs = leaves(tensors("kda", Case(T=512, K=64, V=64)))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def calls(count: int) -> None:
        for _ in range(count):
            step(rewy.chunk_kda, inputs)
            with pytest.raises(ValueError):
                rewy.chunk_kda(*inputs, initial_state=torch.zeros(1, 2, 64, 63))

    calls(20)
    before = resident()
    calls(200)
    assert resident() - before < 40 << 20


def test_in_a_layer():
    """A projection, the operator and a second projection learn: the loss falls."""
    torch.manual_seed(0)
    H, K = 2, 8
    into, out_of = torch.nn.Linear(16, 4 * H * K + H), torch.nn.Linear(H * K, 16)
    optimizer = torch.optim.Adam([*into.parameters(), *out_of.parameters()], 1e-2)
    x = torch.randn(2, 40, 16)
    losses = []
    for _ in range(30):
        q, k, v, g, beta = into(x).split([H * K] * 4 + [H], -1)
        q, k, v, g = (t.unflatten(-1, (H, K)) for t in (q, k, v, g))
        o, _ = rewy.chunk_kda(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, F.logsigmoid(g), beta.sigmoid())
        loss = (out_of(o.flatten(-2)) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# ---- tracing -------------------------------------------------------------------------------------------------------


TRACED = (
    Case(B=2, T=70, HV=4),
    Case(T=70, offsets=(0, 10, 10, 65)),
    Case(T=3, offsets=(0, 0, 0, 1, 1, 2, 3, 3)),  # more sequences than tokens
    Case(T=0),
)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", TRACED, ids=str)
@pytest.mark.parametrize("policy", ["none", "recompute", "save"])
def test_opcheck_forward(op, case, policy, device, dtype, deterministic):
    arguments = list(operator_arguments(op, case, device=device, dtype=dtype))
    state = torch.randn(case.sequences, case.HV, case.V, case.K, device=device)
    differentiated = policy != "none"
    if differentiated:
        arguments = [
            t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments
        ]
    arguments[8] = state.requires_grad_(differentiated)
    torch.library.opcheck(
        torch.ops.rewy.forward.default, (*arguments, None, None, f"output_final_state state_v_first policy={policy}")
    )
    arguments[8] = None
    torch.library.opcheck(torch.ops.rewy.forward.default, (*arguments, 0.5, None, "policy=" + policy))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_opcheck_backward(op, case, device, dtype):
    arguments = operator_arguments(op, case, device=device, dtype=dtype)
    o, final, *kept = torch.ops.rewy.forward(*arguments, options="output_final_state")
    for needed in (sum(1 << i for i in range(7) if arguments[1 + i] is not None), 1 << 1):
        torch.library.opcheck(
            torch.ops.rewy.backward.default,
            (op, o, final, *arguments[1:], *kept, needed, None, None, "output_final_state"),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_whole_graph(op, backend, device, dtype):
    case = Case(B=2, T=70, HV=4)
    inputs = leaves(tensors(op, case, device, dtype))
    state = torch.randn(2, 4, 32, 24, device=device).requires_grad_()

    def layer(*variables):
        o, final = FUNCTIONS[op](*variables[:-1], initial_state=variables[-1], output_final_state=True)
        return o * 2, final

    def outcome(function):
        o, final = function(*inputs, state)
        return [o, final, *torch.autograd.grad([o, final], [*inputs, state], [o.detach(), final.detach()])]

    assert_same_bits(outcome(torch.compile(layer, fullgraph=True, backend=backend)), outcome(layer))


def test_no_compilation_for_each_packing(device, dtype):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(q, k, v, g, beta, cu_seqlens):
        return rewy.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0]

    compilations = []
    packings = ((0, 30, 70), (0, 10, 20, 90), (0, 64, 100, 101, 130), (0, 5, 6, 7, 8, 9, 140), (0, 50, 50, 75))
    for packing in packings:
        case = Case(T=packing[-1] + 2, offsets=packing)
        inputs = leaves(tensors("kda", case, device, dtype))
        o = layer(*inputs, offsets(case, device))
        gradients = torch.autograd.grad(o, inputs, o.detach())
        expected = step(rewy.chunk_kda, inputs, cu_seqlens=offsets(case, device))
        assert_same_bits([o, *gradients], expected)
        compilations.append(counter.frame_count)
    assert compilations == [1, 2, 2, 2, 2]  # the second finds that lengths vary


def test_no_compilation_for_one_chunk(device, dtype):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = torch.compile(lambda *inputs: rewy.chunk_kda(*inputs)[0], fullgraph=True, backend=counter)
    compilations = []
    for T in (100, 200, 64, 2, 300):
        inputs = leaves(tensors("kda", Case(T=T), device, dtype))
        o = layer(*inputs)
        assert_same_bits([o, *torch.autograd.grad(o, inputs, o.detach())], step(rewy.chunk_kda, inputs))
        compilations.append(counter.frame_count)
    assert compilations == [1, 2, 2, 2, 2]  # the second finds that lengths vary


def test_no_compilation_for_each_number_of_heads(device, dtype):
    """Nothing is kept without gradients, and nothing else depends on widths."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = torch.compile(rewy.chunk_kda, fullgraph=True, dynamic=True, backend=counter)
    for heads in (2, 3, 4, 5):
        inputs = tensors("kda", Case(H=heads, HV=2 * heads), device, dtype)
        assert_same_bits([layer(*inputs)[0]], [rewy.chunk_kda(*inputs)[0]])
    assert counter.frame_count == 1


def test_offsets_made_inside_a_program(device, dtype):
    """As many sequences as the data say: a size that tracing does not know, empty for all it can tell."""

    class Packed(torch.nn.Module):
        def forward(self, positions, *inputs):
            return rewy.chunk_kda(*inputs, cu_seqlens=torch.nonzero(positions).flatten().int())[0]

    inputs = tensors("kda", Case(T=70), device, dtype)
    positions = torch.zeros(71, device=device)
    positions[[0, 20, 41, 70]] = 1
    program = torch.export.export(Packed(), (positions, *inputs)).module()
    positions[[5, 60]] = 1
    assert_same_bits([program(positions, *inputs)], [Packed()(positions, *inputs)])


def test_compile_with_autocast_and_checkpointing(device):
    inputs = leaves(tensors("kda", Case(T=70), device, torch.float32))

    def layer(*variables):
        with torch.autocast(device, torch.bfloat16):
            return checkpoint(rewy.chunk_kda, *variables, use_reentrant=False)[0]

    def outcome(function):
        o = function(*inputs)
        return [o, *torch.autograd.grad(o, inputs, o.detach())]

    assert_same_bits(outcome(torch.compile(layer, fullgraph=True, backend="aot_eager")), outcome(layer))


def test_compiled_errors_have_the_same_text(device, dtype):
    q, k, v, g, beta = tensors("kda", Case(), device, dtype)
    compiled = torch.compile(rewy.chunk_kda, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"kda forward: argument 'k': expected shape \[1, 64, 2, 32\], got"):
        compiled(q, k[:, :5], v, g, beta)
    for policy in ("recompute", "save"):
        inputs = [t.requires_grad_() for t in (q, k, v, g)]
        raw = {"use_beta_sigmoid_in_kernel": True, "disable_recompute": policy == "save"}
        with pytest.raises(
            Exception, match=r"kda forward: argument 'beta': expected dtype f64, f32, bf16 or f16, got i"
        ):
            compiled(*inputs, beta.long(), **raw)


class Layer(torch.nn.Module):
    def forward(self, q, k, v, g, beta, cu_seqlens):
        return rewy.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, output_final_state=True)


def test_export(device, dtype):
    case = Case(T=70, offsets=(0, 30, 70))
    tokens, entries = torch.export.Dim("tokens", min=2), torch.export.Dim("entries", min=3)
    rows = {1: tokens}
    program = torch.export.export(
        Layer(),
        (*tensors("kda", case, device, dtype), offsets(case, device)),
        dynamic_shapes={"q": rows, "k": rows, "v": rows, "g": rows, "beta": rows, "cu_seqlens": {0: entries}},
    )
    assert "rewy.forward" in program.graph_module.code
    other = Case(T=90, offsets=(0, 1, 2, 3, 80))
    inputs = (*tensors("kda", other, device, dtype, seed=1), offsets(other, device))
    assert_same_bits(list(program.module()(*inputs)), list(Layer()(*inputs)))


class Projected(torch.nn.Module):
    """A layer with weights: a program that keeps what a backward needs."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 32)

    def forward(self, q, k, v, g, beta, cu_seqlens=None):
        projected = self.project(q)
        return rewy.chunk_kda(projected, k, v, g, beta, cu_seqlens=cu_seqlens, disable_recompute=True)[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_any_length_where_weights_have_gradients(strict, packed, device, dtype):
    """Also of one chunk, which sizes of what is kept must not tell from more."""

    def inputs_of(case, seed=0):
        return (*tensors("kda", case, device, dtype, seed=seed), *([offsets(case, device)] if packed else []))

    layer = Projected().to(device, dtype)
    rows = {1: torch.export.Dim("tokens", min=2)}
    dynamic = {name: rows for name in NAMES["kda"]}
    if packed:
        dynamic["cu_seqlens"] = {0: torch.export.Dim("entries", min=3)}
    program = torch.export.export(
        layer, inputs_of(Case(T=70, offsets=(0, 30, 70))), dynamic_shapes=dynamic, strict=strict
    )
    for case in (Case(T=130, offsets=(0, 1, 2, 80)), Case(T=64, offsets=(0, 5, 64)), Case(T=10, offsets=(0, 10, 10))):
        inputs = inputs_of(case, seed=1)
        assert_same_bits([program.module()(*inputs)], [layer(*inputs)])


@pytest.mark.parametrize("op", OPS)
def test_shapes_alone(op):
    """Tensors on the meta device: the shapes of a call and its backward, without a computation."""
    inputs = [t.to("meta").requires_grad_() for t in tensors(op, Case(B=2, T=70, HV=4))]
    o, final = FUNCTIONS[op](*inputs, output_final_state=True)
    assert (o.shape, final.shape) == ((2, 70, 4, 24), (2, 4, 32, 24))
    o.sum().backward()
    assert all(t.grad.shape == t.shape for t in inputs)


# ---- GPUs ----------------------------------------------------------------------------------------------------------


def test_cuda_graph_with_other_contents(cuda):
    case = Case(T=150, offsets=(0, 10, 140))
    inputs = leaves(tensors("kda", case, cuda, torch.bfloat16))
    packed = offsets(case, cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(rewy.chunk_kda, inputs, cu_seqlens=packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(rewy.chunk_kda, inputs, cu_seqlens=packed)
    with torch.no_grad():
        for t, other in zip(inputs, tensors("kda", case, cuda, torch.bfloat16, seed=1), strict=True):
            t.copy_(other)
        packed.copy_(torch.tensor([0, 77, 150]))
    graph.replay()
    assert_same_bits(captured, step(rewy.chunk_kda, inputs, cu_seqlens=packed))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors(cuda):
    inputs = leaves(tensors("kda", Case(T=70), "cuda:0", torch.bfloat16))
    expected = [t.cpu() for t in step(rewy.chunk_kda, inputs)]
    others = leaves([t.to("cuda:1") for t in inputs])
    with torch.cuda.device(0):
        assert_same_bits([t.cpu() for t in step(rewy.chunk_kda, others)], expected)
        assert torch.cuda.current_device() == 0


def test_rows_that_a_gpu_cannot_read_are_refused(cuda):
    q, k, v, g, beta = tensors("kda", Case(), cuda, torch.bfloat16)
    spread = torch.stack([q, q], -1).flatten(-2)[..., ::2]
    with pytest.raises(ValueError, match="argument 'q': expected last axis contiguous, rows 16-byte aligned"):
        rewy.chunk_kda(spread, k, v, g, beta)
