"""Activations inside the call: raw queries, keys, gates and strengths, and the gradients of the layer's parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rewy
from recurrence import FUNCTIONS, NAMES, OPS, Case, assert_close, assert_same_bits, offsets, recurrence

CASES = (
    Case(T=0),
    Case(T=1),
    Case(B=2, T=70, HV=4),
    Case(T=90, K=24, V=40, offsets=(0, 10, 10, 80)),
)
GATED = ("gdn", "kda", "gdn2")


def raw(op: str, case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """The tensor arguments of `op` by name as a layer projects them, and A_log and dt_bias."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = (case.B, case.T)
    features = () if op == "gdn" else (case.K,)
    made = {
        "q": 3 * normal(*tokens, case.H, case.K),
        "k": 3 * normal(*tokens, case.H, case.K),
        "v": normal(*tokens, case.HV, case.V),
        "g": normal(*tokens, case.HV, *features),
        "beta": normal(*tokens, case.HV),
        "b": normal(*tokens, case.HV, case.K).sigmoid(),
        "w": normal(*tokens, case.HV, case.V).sigmoid(),
    }
    given = {name: made[name].to(device, dtype) for name in NAMES[op]}
    if op in GATED:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        given["A_log"] = normal(case.HV).to(device, wide)
        given["dt_bias"] = (normal(case.HV * (1 if op == "gdn" else case.K)) - 1).to(device, wide)
    return given


def switches(op: str) -> dict[str, bool]:
    """Every activation of `op` switched on."""
    on = {"use_qk_l2norm_in_kernel": True}
    if op in GATED:
        on["use_gate_in_kernel"] = True
    if op != "gdn2":
        on["use_beta_sigmoid_in_kernel"] = True
    return on


def activated(op: str, case: Case, given: dict[str, Tensor], options: dict) -> list[Tensor]:
    """What the operator takes, in plain PyTorch."""
    made = dict(given)
    if options.get("use_qk_l2norm_in_kernel"):
        for name in ("q", "k"):
            made[name] = given[name] / (given[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if options.get("use_gate_in_kernel"):
        x = given["g"]
        if "dt_bias" in given:
            x = x + given["dt_bias"].reshape(x.shape[2:])
        a = given["A_log"].exp().reshape(-1, *[1] * (x.dim() - 3)) if "A_log" in given else 1
        bound = options.get("lower_bound")
        made["g"] = -a * F.softplus(x, threshold=1e9) if bound is None else bound * (a * x).sigmoid()
    if options.get("use_beta_sigmoid_in_kernel"):
        made["beta"] = given["beta"].sigmoid() * (2 if options.get("allow_neg_eigval") else 1)
    return [made[name] for name in NAMES[op]]


def call(op: str, case: Case, given: dict[str, Tensor], **options):
    inputs = [given[name] for name in NAMES[op]]
    parameters = {name: given[name] for name in ("A_log", "dt_bias") if name in given}
    return FUNCTIONS[op](*inputs, cu_seqlens=offsets(case, inputs[0].device.type), **parameters, **options)


def outcome(op: str, case: Case, given: dict[str, Tensor], **options) -> list[Tensor]:
    """(o, gradients of all that is given) of the loss sum(o^2) / 2."""
    o, _ = call(op, case, given, **options)
    return [o, *torch.autograd.grad(o, list(given.values()), o.detach())]


def variables(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in given.items()}


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_matches_plain_pytorch_in_fp64(op, case, bound, device, dtype):
    options = switches(op)
    if op in GATED:
        options["lower_bound"] = bound
    if op in ("kda", "gdn") and bound is not None:
        options["allow_neg_eigval"] = True
    given = variables(raw(op, case, device, dtype))
    o, *gradients = outcome(op, case, given, **options)

    exact = {name: t.detach().double().cpu().requires_grad_() for name, t in given.items()}
    exact_o, _ = recurrence(op, case, activated(op, case, exact, options))
    loss = (exact_o * o.detach().double().cpu()).sum() + 0 * sum(t.sum() for t in exact.values())  # T may be 0
    expected = torch.autograd.grad(loss, list(exact.values()))
    # As without activations; the sums over all tokens for A_log and dt_bias add rounding errors as random numbers add.
    tolerance, loose = (1e-5, 5e-5) if dtype == torch.float32 else (1.5e-2, 4e-2)
    assert_close(o, exact_o, tolerance, "o")
    for name, actual, e in zip(given, gradients, expected, strict=True):
        assert actual.dtype == given[name].dtype and actual.shape == given[name].shape
        assert_close(actual, e, tolerance if name in ("q", "k", "v") else loose, f"gradient of {name}")


@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op):
    case = Case(T=7, HV=4, K=3, V=2, offsets=(0, 3, 3, 7))
    given = variables(raw(op, case, "cpu", torch.float64))
    names = list(given)

    def function(*tensors):
        return call(op, case, dict(zip(names, tensors, strict=True)), **switches(op))[0]

    assert torch.autograd.gradcheck(function, tuple(given.values()))


@pytest.mark.parametrize("op", OPS)
def test_each_activation_alone(op, device, dtype):
    case = Case(T=70)
    given = raw(op, case, device, dtype)
    for switch in switches(op):
        # What is not switched on goes in as PyTorch makes it.
        others = {name: True for name in switches(op) if name != switch}
        mixed = dict(given)
        made = activated(op, case, given, others)
        mixed.update(zip(NAMES[op], made, strict=True))
        if switch != "use_gate_in_kernel" and op in GATED:
            mixed["g"] = mixed["g"].float()
        mixed = variables({name: t for name, t in mixed.items() if name not in ("A_log", "dt_bias")})
        parameters = {name: given[name] for name in ("A_log", "dt_bias") if name in given}
        o, _ = call(op, case, mixed | parameters, **{switch: True})
        exact = {name: t.detach().double().cpu() for name, t in (mixed | parameters).items()}
        exact_o, _ = recurrence(op, case, activated(op, case, exact, {switch: True}))
        assert_close(o, exact_o, 1e-5 if dtype == torch.float32 else 8e-3, f"o with {switch}")


@pytest.mark.parametrize("op", OPS)
def test_disable_recompute_changes_no_bit(op, device, dtype):
    case = Case(B=2, T=150, HV=4)
    given = variables(raw(op, case, device, dtype))
    results = [outcome(op, case, given, **switches(op), disable_recompute=keep) for keep in (False, True)]
    assert_same_bits(*results)
    assert_same_bits(results[0], outcome(op, case, given, **switches(op)))


def test_gradients_only_where_needed(device, dtype):
    case = Case(T=70)
    everything = outcome("kda", case, variables(raw("kda", case, device, dtype)), **switches("kda"))
    for chosen, name in enumerate(raw("kda", case, device, dtype)):
        given = raw("kda", case, device, dtype)
        given[name].requires_grad_()
        o, _ = call("kda", case, given, **switches("kda"))
        o.backward(o.detach())
        assert [t.grad is not None for t in given.values()] == [n == name for n in given]
        expected = everything[1 + chosen].double().cpu()
        assert_close(given[name].grad, expected, 1e-5 if device == "cpu" else 1e-2, name)


def test_parameters_of_any_shape_and_type(device, dtype):
    """A_log as [1, 1, HV, 1] and dt_bias as [HV, K], in the layer's 16-bit type."""
    case = Case(T=40)
    given = raw("kda", case, device, dtype)
    for name in ("A_log", "dt_bias"):
        given[name] = given[name].bfloat16()
    shaped = dict(given, A_log=given["A_log"].view(1, 1, -1, 1), dt_bias=given["dt_bias"].view(case.HV, case.K))
    flat = outcome("kda", case, variables({n: t.float() if n in ("A_log", "dt_bias") else t for n, t in given.items()}),
                   **switches("kda"))  # fmt: skip
    o, *gradients = outcome("kda", case, variables(shaped), **switches("kda"))
    assert torch.equal(o, flat[0])
    for name, actual, expected in zip(shaped, gradients, flat[1:], strict=True):
        assert (actual.shape, actual.dtype) == (shaped[name].shape, shaped[name].dtype)
        assert torch.equal(actual.flatten(), expected.to(actual.dtype).flatten()), name


def test_parameters_that_may_be_left_out(device, dtype):
    case = Case(T=40)
    given = raw("kda", case, device, dtype)
    zero = dict(given, A_log=torch.zeros_like(given["A_log"]), dt_bias=torch.zeros_like(given["dt_bias"]))
    for name in ("A_log", "dt_bias"):
        del given[name]
    bounded = dict(switches("kda"), lower_bound=-5.0)
    without = outcome("kda", case, variables(given), **bounded)
    assert_same_bits(without, outcome("kda", case, variables(zero), **bounded)[: len(without)])
    with pytest.raises(TypeError, match=r"argument 'A_log': expected a tensor of shape \[2\], got none"):
        call("kda", case, given, **switches("kda"))


def test_parameters_are_ignored_without_the_gate(device, dtype):
    case = Case(T=40)
    given = raw("kda", case, device, dtype)
    given["g"] = -given["g"].float().abs()
    alone, _ = call("kda", case, {name: given[name] for name in NAMES["kda"]}, use_qk_l2norm_in_kernel=True)
    with_them, _ = call("kda", case, given, use_qk_l2norm_in_kernel=True, lower_bound=-5.0)
    assert torch.equal(alone, with_them)


def test_raw_tensors_of_any_strides(device, dtype):
    """Slices of one projection that no 16-byte access could read: activations read them in place."""
    case = Case(T=70)
    given = raw("kda", case, device, dtype)
    strided = dict(given)
    for name in ("q", "k", "g", "beta"):
        wide = torch.stack([given[name], given[name]], -1)
        strided[name] = wide[..., 0]
        assert not strided[name].is_contiguous()
    expected = outcome("kda", case, variables(given), **switches("kda"))
    strided = {name: t.requires_grad_() for name, t in strided.items()}
    assert_same_bits(outcome("kda", case, strided, **switches("kda")), expected)


@pytest.mark.parametrize("gate", [0.0, 300.0, -300.0, float("-inf"), float("inf")])
def test_extreme_raw_gates(gate, device, dtype):
    """No activation overflows, and a raw gate that resets the state has finite gradients."""
    case = Case(T=70)
    given = variables(raw("kda", case, device, dtype))
    with torch.no_grad():
        given["g"][:, 20:40] = gate
    o, *gradients = outcome("kda", case, given, **switches("kda"))
    for name, t in zip(("o", *given), (o, *gradients), strict=True):
        assert torch.isfinite(t).all(), name


@pytest.mark.parametrize("bound", [None, -5.0])
def test_rates_beyond_fp32(bound, device, dtype):
    """exp(A_log) is infinite in FP32; gates are open or closed, and never 0 times infinity."""
    case = Case(T=70)
    given = variables(raw("kda", case, device, dtype))
    with torch.no_grad():
        given["A_log"].fill_(100)
        given["dt_bias"].zero_()
        for i, gate in enumerate((float("-inf"), -200.0, -50.0, 50.0, 200.0)):
            given["g"][:, i::5] = gate
    o, *gradients = outcome("kda", case, given, **switches("kda"), lower_bound=bound)
    for name, t in zip(("o", *given), (o, *gradients), strict=True):
        assert torch.isfinite(t).all(), name
    with torch.no_grad():
        given["g"][:, 7] = 0
        assert torch.isfinite(call("kda", case, given, **switches("kda"), lower_bound=bound)[0]).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bound", [None, -5.0])
def test_rows_after_the_last_sequence_may_hold_anything(bound, op, device, dtype):
    """Memory that nobody wrote, say: their gradients are 0, and the parameters get none from them."""
    case = Case(T=90, HV=4, offsets=(0, 30, 67))
    options = dict(switches(op), **({"lower_bound": bound} if op in GATED else {}))
    given = variables(raw(op, case, device, dtype))
    expected = outcome(op, case, given, **options)
    with torch.no_grad():
        for name in NAMES[op]:
            given[name][:, 67::2] = float("nan")
            given[name][:, 68::2] = float("inf")
    assert_same_bits(outcome(op, case, given, **options), expected)
    for t in expected[: 1 + len(NAMES[op])]:
        assert not t[:, 67:].any()


def test_zero_queries_and_keys(device, dtype):
    case = Case(T=70)
    given = variables(raw("kda", case, device, dtype))
    with torch.no_grad():
        given["q"][:, 3], given["k"][:, 5] = 0, 0
    o, *gradients = outcome("kda", case, given, **switches("kda"))
    assert not o[:, 3].any()
    assert all(torch.isfinite(t).all() for t in gradients)


@pytest.mark.parametrize("op", OPS)
def test_compile_whole_graph(op, device, dtype):
    case = Case(B=2, T=70, HV=4)
    given = variables(raw(op, case, device, dtype))
    names = list(given)

    def layer(*tensors):
        return call(op, case, dict(zip(names, tensors, strict=True)), **switches(op))[0]

    def gradients(function):
        o = function(*given.values())
        return [o, *torch.autograd.grad(o, list(given.values()), o.detach())]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients(compiled), gradients(layer))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("policy", ["none", "recompute", "save"])
def test_opcheck(op, policy, device, dtype, deterministic):
    case = Case(B=2, T=70, HV=4)
    given = raw(op, case, device, dtype)
    if policy != "none":
        given = variables(given)
    operands = [given.get(name) for name in ("q", "k", "v", "g", "beta", "b", "w")]
    parameters = [given.get(name) for name in ("A_log", "dt_bias")]
    words = f"policy={policy} normalise"
    words += " activate_gate" * (op in GATED) + " activate_beta" * (op != "gdn2")
    arguments = (op, *operands, None, *parameters, None, None, None, words)
    torch.library.opcheck(torch.ops.rewy.forward.default, arguments)
    if policy == "none":
        return
    o, _, *kept = torch.ops.rewy.forward(*arguments)
    needed = sum(1 << i for i, t in enumerate([*operands, None, *parameters]) if t is not None)
    plain = [t if t is None else t.detach() for t in (*operands, None, *parameters)]
    torch.library.opcheck(
        torch.ops.rewy.backward.default,
        (op, o.detach(), None, *plain, None, *kept, needed, None, None, words),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_autocast(device):
    """A layer in FP32 under autocast: q, k and v are cast, the raw gate and strength stay as they are."""
    case = Case(T=70)
    given = variables(raw("kda", case, device, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        o, _ = call("kda", case, given, **switches("kda"))
    assert o.dtype == torch.bfloat16
    cast = variables({name: t.bfloat16() if name in ("q", "k", "v") else t for name, t in given.items()})
    expected = outcome("kda", case, cast, **switches("kda"))
    gradients = torch.autograd.grad(o, list(given.values()), o.detach())
    assert_same_bits([o, *gradients], [expected[0], *(t.float() for t in expected[1:])])


def test_refusals(device, dtype):
    case = Case(T=40)
    given = raw("kda", case, device, dtype)
    with pytest.raises(ValueError, match=r"^kda forward: argument 'allow_neg_eigval': expected False without use_beta"):
        call("kda", case, given, allow_neg_eigval=True)
    with pytest.raises(ValueError, match=r"^kda forward: argument 'lower_bound': expected a finite number below"):
        call("kda", case, given, **switches("kda"), lower_bound=1.0)
    with pytest.raises(ValueError, match=r"argument 'dt_bias': expected shape \[64\], got \[2\]"):
        call("kda", case, dict(given, dt_bias=given["A_log"]), **switches("kda"))
    with pytest.raises(TypeError, match="argument 'A_log': expected a tensor, got float"):
        call("kda", case, dict(given, A_log=1.0), **switches("kda"))
    with pytest.raises(ValueError, match=r"^kda forward: argument 'v': expected shape \[1, 40, 2, 24\], got"):
        call("kda", case, dict(given, v=given["v"][:, :5]), **switches("kda"))
    with pytest.raises(ValueError, match=r"^kda forward: argument 'g': expected shape \[1, 40, 2, 32\], got"):
        call("kda", case, dict(given, g=given["g"][:, :5]), **switches("kda"))
    with pytest.raises(TypeError, match="use_beta_sigmoid_in_kernel"):
        rewy.chunk_gdn2(*(raw("gdn2", case, device, dtype)[n] for n in NAMES["gdn2"]), use_beta_sigmoid_in_kernel=True)


def test_rows_that_a_gpu_cannot_read_are_refused(cuda):
    given = raw("kda", Case(), cuda, torch.bfloat16)
    given["v"] = torch.stack([given["v"]] * 2, -1).flatten(-2)[..., ::2]
    with pytest.raises(ValueError, match=r"^kda (forward|backward): argument 'v': expected last axis contiguous"):
        call("kda", Case(), given, **switches("kda"))


def test_explain(device, dtype):
    given = raw("kda", Case(), device, dtype)
    text = rewy.explain(rewy.chunk_kda, *(given[n] for n in NAMES["kda"]), A_log=given["A_log"], **switches("kda"))
    for line in ("activation forward", "kda forward", "activation backward", "kda backward"):
        assert f"{line}: {device} serves it" in text


def test_cuda_graph(cuda):
    case = Case(T=150)
    given = variables(raw("kda", case, cuda, torch.bfloat16))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            outcome("kda", case, given, **switches("kda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = outcome("kda", case, given, **switches("kda"))
    with torch.no_grad():
        for name, other in raw("kda", case, cuda, torch.bfloat16, seed=1).items():
            given[name].copy_(other)
    graph.replay()
    assert_same_bits(captured, outcome("kda", case, given, **switches("kda")))
