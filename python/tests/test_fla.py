"""FLA itself, where it is installed: its names everywhere, its results on a GPU, patched and unpatched."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import rewy
import rewy.patch
import test_patch
from recurrence import NAMES, Case, assert_close, assert_same_bits, tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # there is no GPU
    ops = pytest.importorskip("fla.ops", exc_type=ImportError)
    layers = pytest.importorskip("fla.layers", exc_type=ImportError)

SERVED = {name: where for name, (where, _) in rewy.patch._FLA_FUNCTIONS.items()}


def original(name):
    return getattr(importlib.import_module(rewy.patch._FLA_FUNCTIONS[name][0]), name)


@contextlib.contextmanager
def served():
    """Patched, and every call must be served."""
    with rewy.patch_fla(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="rewy does not serve")
        yield


# ---- names ---------------------------------------------------------------------------------------------------------


def test_readme_names_every_argument():
    table = (Path(__file__).parents[2] / "README.md").read_text().split("argument of FLA 0.6")[1].split("\n\n")[0]
    named = set(re.findall(r"\w+", " ".join(line.split("|")[1] for line in table.splitlines()[2:])))
    for name in SERVED:
        parameters = inspect.signature(original(name)).parameters.values()
        assert {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} <= named, name


def test_every_binding_is_replaced_and_restored():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in (layers, importlib.import_module("fla.models")):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                with contextlib.suppress(ImportError):  # of what some models need besides
                    importlib.import_module(module.name)
    before = test_patch.bindings()
    originals = {original(name) for name in SERVED}
    with rewy.patch_fla():
        during = test_patch.bindings()
    replaced = {place for place in before if during[place] is not before[place]}
    assert replaced == {place for place, value in before.items() if value in originals}
    users = {module for module, _ in replaced}
    assert {"fla.layers.kda", "fla.layers.gated_deltanet", "fla.layers.delta_net", "fla.layers.gdn2"} <= users
    assert test_patch.bindings() == before


@pytest.mark.parametrize("package", test_patch.SIGNATURES)
def test_the_stand_in_has_the_signatures(package):
    name, arguments, options = test_patch.SIGNATURES[package]
    stand_in: dict = {}
    exec(test_patch.DEFINITION.format(name=name, tensors=arguments, options=options), stand_in)
    actual = inspect.signature(original(name)).parameters.values()
    assert [(p.name, p.default) for p in actual] == [
        (p.name, p.default) for p in inspect.signature(stand_in[name]).parameters.values()
    ]


def test_a_layer_s_operator_on_cpu_tensors():
    inputs = tensors("kda", Case())
    expected = rewy.chunk_kda(*inputs, output_final_state=True)
    with served():
        actual = sys.modules["fla.layers.kda"].chunk_kda(*inputs, output_final_state=True)
    assert_same_bits(list(actual), list(expected))


# ---- results -------------------------------------------------------------------------------------------------------

CASE = Case(B=2, T=130, H=2, HV=2, K=128, V=128)
# Twice what either may be off by: docs/numerics.md.
TIGHT, LOOSE = 1.6e-2, 4e-2
L2NORM = {"use_qk_l2norm_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
GATE = {"use_gate_in_kernel": True, "A_log": True, "dt_bias": True}
STATES = {"initial_state": True, "output_final_state": True}
BOUND = {"lower_bound": -5.0}
COMMON = {
    "plain": {},
    "states": STATES,
    "normalised": {**L2NORM, "scale": 0.5},
    "packed": {**STATES, "cu_seqlens": True},
}
GATED = {
    "V first": {**STATES, "state_v_first": True},
    "strength": {**L2NORM, **SIGMOID},
    "negative": {**L2NORM, **SIGMOID, "allow_neg_eigval": True},
    "gate": {**L2NORM, **GATE},
    "everything": {**L2NORM, **GATE, **SIGMOID, **STATES, "state_v_first": True, "cu_seqlens": True},
}
VECTOR = {
    "saved": {**STATES, "disable_recompute": True},
    "gate without bias": {**L2NORM, "use_gate_in_kernel": True, "A_log": True},
    "bounded": {**L2NORM, **GATE, **BOUND},
    "bounded and safe": {**L2NORM, **GATE, **BOUND, "safe_gate": True},
    "bounded without A_log": {**L2NORM, "use_gate_in_kernel": True, "dt_bias": True, **BOUND},
}
OPTIONS = {
    "chunk_delta_rule": COMMON,
    "chunk_gated_delta_rule": {**COMMON, **GATED},
    "chunk_kda": {**COMMON, **GATED, **VECTOR},
    "chunk_gdn2": {**COMMON, "V first": GATED["V first"], "gate": GATED["gate"], **VECTOR},
}
# FLA's own gradients: only those of the ungated rule.
RECURRENT = {
    "fused_recurrent_delta_rule": COMMON,
    "fused_recurrent_gated_delta_rule": {**COMMON, **GATED},
    "fused_recurrent_kda": {**COMMON, **GATED, "bounded": VECTOR["bounded"]},
    "fused_recurrent_gdn2": {**COMMON, "V first": GATED["V first"], "gate": GATED["gate"]},
}
CALLS = [
    (name, options) for table in (OPTIONS, RECURRENT) for name in table if name in SERVED for options in table[name]
]


def arguments(name, chosen):
    """(tensors that can have a gradient by name, other options) of a call."""
    case = Case(T=CASE.T, K=CASE.K, V=CASE.V, offsets=(0, 1, 65, 130)) if "cu_seqlens" in chosen else CASE
    op = name.replace("chunk_", "").replace("fused_recurrent_", "")
    op = {"delta_rule": "deltanet", "gated_delta_rule": "gdn"}.get(op, op)
    given = dict(zip(NAMES[op], tensors(op, case, "cuda", torch.bfloat16), strict=True))
    torch.manual_seed(1)
    if "use_qk_l2norm_in_kernel" in chosen:
        given["q"], given["k"] = 3 * given["q"], 3 * given["k"]
    if "use_beta_sigmoid_in_kernel" in chosen:
        given["beta"] = torch.randn_like(given["beta"])
    if "use_gate_in_kernel" in chosen:
        given["g"] = torch.randn_like(given["g"], dtype=torch.bfloat16)
    options = {key: value for key, value in chosen.items() if key not in ("initial_state", "A_log", "dt_bias")}
    if "A_log" in chosen:
        given["A_log"] = torch.rand(case.HV, device="cuda")
    if "dt_bias" in chosen:
        given["dt_bias"] = torch.randn(case.HV * (1 if op == "gdn" else case.K), device="cuda")
    if "initial_state" in chosen:
        state = (case.V, case.K) if "state_v_first" in chosen else (case.K, case.V)
        given["initial_state"] = torch.randn(case.sequences, case.HV, *state, device="cuda")
    if "cu_seqlens" in chosen:
        options["cu_seqlens"] = torch.tensor(case.offsets, device="cuda")
    return given, options


def results(name, chosen):
    """Outputs and gradients by name."""
    given, options = arguments(name, chosen)
    differentiable = name in (*OPTIONS, "fused_recurrent_delta_rule")
    if differentiable:
        given = {key: t.requires_grad_() for key, t in given.items()}
    with torch.set_grad_enabled(differentiable):
        o, final = original(name)(**given, **options)
    found = {"o": o, **({} if final is None else {"final_state": final})}
    if differentiable:
        torch.manual_seed(2)
        loss = sum((out.float() * torch.randn(out.shape, device="cuda")).sum() for out in found.values())
        gradients = torch.autograd.grad(loss, list(given.values()))
        found |= {f"gradient of {key}": t for key, t in zip(given, gradients, strict=True)}
    return found


@pytest.mark.parametrize("name, options", CALLS)
def test_operators(name, options, cuda):
    chosen = {**OPTIONS, **RECURRENT}[name][options]
    expected = results(name, chosen)
    with served():
        actual = results(name, chosen)
    assert actual.keys() == expected.keys()
    for key, t in actual.items():
        assert t.dtype == expected[key].dtype, key
        loose = key.startswith("gradient") and key[12:] not in ("q", "k", "v", "initial_state")
        assert_close(t, expected[key].double().cpu(), LOOSE if loose else TIGHT, key)


# ---- layers --------------------------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 256, "num_heads": 2, "layer_idx": 0}
LAYERS = {
    "kda": ("KimiDeltaAttention", {"head_dim": 128}),
    "kda of more value heads": ("KimiDeltaAttention", {"head_dim": 128, "num_v_heads": 4}),
    "kda with safe gates": ("KimiDeltaAttention", {"head_dim": 128, "safe_gate": True, "lower_bound": -5.0}),
    "gdn": ("GatedDeltaNet", {"head_dim": 128, "expand_v": 1}),
    "gdn of wide values": ("GatedDeltaNet", {"head_dim": 128, "expand_v": 2}),
    "deltanet": ("DeltaNet", {}),
    "gdn2": ("GatedDeltaNet2", {"head_dim": 128}),
}


def layer_of(kind, **others):
    name, options = LAYERS[kind]
    torch.manual_seed(0)
    made = getattr(layers, name, None) or getattr(importlib.import_module("fla.layers.gdn2"), name)
    return made(**SHAPE, **options, **others)


class Gate(torch.nn.Module):
    """In place of a norm that FLA has for GPUs only."""

    def forward(self, o, g=None):
        return o if g is None else o * torch.sigmoid(g)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_on_cpu_tensors(kind):
    """A layer without the parts that need a GPU: gradients everywhere, and token by token what one pass gives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ShortConvolution")
        layer = layer_of(kind, use_short_conv=False)
    layer.o_norm = Gate()
    x = torch.randn(2, 80, 256)
    with served():
        layer(x)[0].square().mean().backward()
        assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
        with torch.no_grad():
            layer.eval()
            cache, outputs = cache_of_layers(), []
            for part in x.split([70, *[1] * 10], 1):
                outputs.append(layer(part, past_key_values=cache, use_cache=True)[0])
            assert_close(torch.cat(outputs, 1), layer(x)[0].double(), 1e-5, "token by token")


def cache_of_layers():
    return importlib.import_module("fla.models.utils").Cache()


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, cuda):
    """A training step under autocast: output, and the gradients of the input and of all parameters."""

    def step():
        layer = layer_of(kind).to(cuda)
        x = torch.randn(2, 200, 256, device=cuda, requires_grad=True)
        with torch.autocast(cuda, torch.bfloat16):
            y = layer(x)[0]
        F.mse_loss(y.float(), torch.randn_like(x)).backward()
        gradients = ((name, p.grad) for name, p in layer.named_parameters() if p.grad is not None)
        return {"output": y.detach(), "input": x.grad, **dict(gradients)}

    expected = step()
    with served():
        actual = step()
    assert actual.keys() == expected.keys()
    for key, t in actual.items():
        assert_close(t, expected[key].double().cpu(), LOOSE, key)


@pytest.mark.parametrize("kind", LAYERS)
def test_decoding(kind, cuda):
    """A prompt and ten tokens one by one, by way of FLA's cache; the tokens equal one pass over everything."""
    x = torch.randn(2, 110, 256, generator=torch.Generator().manual_seed(3)).to(cuda, torch.bfloat16)

    @torch.no_grad()
    def decode():
        layer, cache = layer_of(kind).to(cuda, torch.bfloat16).eval(), cache_of_layers()
        outputs = [layer(x[:, :100], past_key_values=cache, use_cache=True)[0]]
        for i in range(100, 110):
            outputs.append(layer(x[:, i : i + 1], past_key_values=cache, use_cache=True)[0])
        return torch.cat(outputs, 1), layer(x)[0]

    expected = decode()
    with served():
        actual = decode()
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e.double().cpu(), TIGHT, "output")
    assert_close(actual[0], actual[1].double().cpu(), LOOSE, "token by token")
