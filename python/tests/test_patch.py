"""FLA's and transformers' functions replaced where they are bound, and put back.

A package that binds functions as FLA does stands for it where there is no GPU to run FLA on; with FLA itself, what must
agree is compared on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import rewy
import rewy.patch
from recurrence import FUNCTIONS, NAMES, Case, assert_same_bits, leaves, tensors

DOCUMENTATION = Path(__file__).parents[2] / "docs/pytorch.md"
# Each function as FLA 0.6 defines it: arguments in their order, a result that says who gave it and what came.
DEFINITION = """
import torch

@torch.compiler.disable
def {name}({tensors}, {options}, **kwargs):
    given = dict(locals())
    return "theirs", {{**given.pop("kwargs"), **given}}
"""
COMMON = "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False"
OFFSETS = "cu_seqlens=None, cu_seqlens_cpu=None"
LAST = "safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False"
STRENGTH = "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False"
SIGNATURES = {
    "delta_rule": ("chunk_delta_rule", "q, k, v, beta", f"{COMMON}, {OFFSETS}"),
    "gated_delta_rule": (
        "chunk_gated_delta_rule",
        "q, k, v, g, beta",
        f"{COMMON}, {STRENGTH}, state_v_first=False, {OFFSETS}, chunk_indices=None, cp_context=None",
    ),
    "kda": (
        "chunk_kda",
        "q, k, v, g, beta",
        f"{COMMON}, use_gate_in_kernel=False, {STRENGTH}, {LAST}, state_v_first=False, {OFFSETS}, cp_context=None, "
        "use_graph=False, max_num_seqs=None",
    ),
    "gdn2": (
        "chunk_gdn2",
        "q, k, v, g, b, w",
        f"{COMMON}, use_gate_in_kernel=False, {OFFSETS}, {LAST}, state_v_first=False, cp_context=None",
    ),
}
OPS = dict(zip(SIGNATURES, FUNCTIONS, strict=True))  # by FLA's name of the package: ours of the operator
LAYER = """
from fla.ops.kda import chunk_kda

def attend(*args, **kwargs):
    return chunk_kda(*args, **kwargs)
"""


def forget(monkeypatch, *packages):
    """Modules of these packages are imported anew, and the present ones come back at the end."""
    for name in list(sys.modules):
        if name.split(".")[0] in packages:
            monkeypatch.delitem(sys.modules, name)


def write(root, files):
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for parent in file.parents:
            if parent == root:
                break
            (parent / "__init__.py").touch()


@pytest.fixture
def fla(tmp_path, monkeypatch):
    """A package of FLA's shape."""
    files = {"fla/layers/kda.py": LAYER, "fla/layers/late.py": LAYER, "transformers_modules/x/modeling.py": LAYER}
    for package, (name, arguments, options) in SIGNATURES.items():
        text = DEFINITION.format(name=name, tensors=arguments, options=options)
        if package == "gated_delta_rule":
            text += "\nchunk_gdn = chunk_gated_delta_rule\n"
        files[f"fla/ops/{package}/chunk.py"] = text
        files[f"fla/ops/{package}/__init__.py"] = f"from .chunk import *\nfrom .chunk import {name}\n"
    files["fla/ops/__init__.py"] = "".join(f"from .{package} import *\n" for package in SIGNATURES)
    forget(monkeypatch, "fla", "transformers_modules")
    write(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("fla.ops")
    rewy.unpatch_fla()
    for name in list(sys.modules):
        if name.split(".")[0] in ("fla", "transformers_modules"):
            del sys.modules[name]


def theirs(package, name=None):
    return getattr(sys.modules[f"fla.ops.{package}.chunk"], name or SIGNATURES[package][0])


def bindings():
    return {
        (module, name): value
        for module in list(sys.modules)
        if module.split(".")[0] in ("fla", "transformers_modules")
        for name, value in vars(sys.modules[module]).items()
        if inspect.isfunction(value)
    }


@pytest.fixture
def no_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rewy does not serve")
        yield


# ---- the bindings --------------------------------------------------------------------------------------------------


def test_every_binding_is_replaced_and_restored(fla):
    for module in ("fla.layers.kda", "transformers_modules.x.modeling"):
        importlib.import_module(module)
    before = bindings()
    originals = {theirs(package) for package in SIGNATURES}
    rewy.patch_fla()
    during = bindings()
    assert before.keys() == during.keys()
    replaced = {place for place in before if during[place] is not before[place]}
    assert replaced == {place for place, value in before.items() if value in originals}
    assert ("fla.layers.kda", "chunk_kda") in replaced and ("fla.ops.gated_delta_rule", "chunk_gdn") in replaced
    assert ("transformers_modules.x.modeling", "chunk_kda") in replaced
    for place in replaced:
        assert inspect.signature(during[place]) == inspect.signature(before[place])
        assert during[place].__name__ == before[place].__name__
    rewy.unpatch_fla()
    assert bindings() == before


def test_modules_imported_later(fla, no_fallback):
    inputs = tensors("kda", Case())
    with rewy.patch_fla():
        late = importlib.import_module("fla.layers.late")
        assert_same_bits([late.attend(*inputs)[0]], [rewy.chunk_kda(*inputs)[0]])
    assert late.chunk_kda is theirs("kda")
    assert late.attend(*inputs)[0] == "theirs"


def test_blocks_and_repetition(fla):
    original = theirs("kda")
    with rewy.patch_fla():
        replacement = theirs("kda")
        assert replacement is not original
        with rewy.patch_fla():
            rewy.patch_fla()
            assert theirs("kda") is replacement
        assert theirs("kda") is replacement
    assert theirs("kda") is original
    with pytest.raises(KeyError), rewy.patch_fla():
        raise KeyError
    assert theirs("kda") is original
    rewy.patch_fla()
    with rewy.patch_fla():
        rewy.unpatch_fla()
        assert theirs("kda") is original
    assert theirs("kda") is original
    rewy.unpatch_fla()


def test_a_block_undoes_what_it_began(fla):
    original = theirs("kda")
    first = rewy.patch_fla()
    rewy.unpatch_fla()
    with pytest.raises(RuntimeError, match="has been undone"), first:
        pass
    rewy.patch_fla()
    with first:  # whose own patch has ended: the other one stays
        assert theirs("kda") is not original
    assert theirs("kda") is not original
    rewy.unpatch_fla()
    with rewy.patch_fla() as block:
        assert isinstance(block, type(first))
    with pytest.raises(RuntimeError, match="has been undone"), block:
        pass
    assert theirs("kda") is original


def test_a_kept_replacement_does_what_theirs_does(fla):
    inputs = tensors("kda", Case())
    with rewy.patch_fla():
        kept = fla.chunk_kda
        assert torch.is_tensor(kept(*inputs)[0])
    assert kept(*inputs)[0] == "theirs"
    with rewy.patch_fla():
        assert kept is fla.chunk_kda and torch.is_tensor(kept(*inputs)[0])


def test_nothing_is_imported_before_it_is_needed():
    program = "import sys, rewy; print(*({'fla', 'transformers', 'triton', 'torch._dynamo'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_missing_packages(monkeypatch):
    forget(monkeypatch, "fla", "transformers")
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"^rewy.patch_fla: .*pip install flash-linear-attention$"):
        rewy.patch_fla()
    with pytest.raises(ImportError, match=r"^rewy.patch_transformers: .*pip install transformers$"):
        rewy.patch_transformers()
    rewy.unpatch_fla()
    rewy.unpatch_transformers()


# ---- calls that are served -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", SIGNATURES)
def test_results_and_gradients(package, fla, device, dtype, no_fallback):
    op = OPS[package]
    expected_inputs, inputs = (leaves(tensors(op, Case(B=2, T=70), device, dtype)) for _ in range(2))
    expected = FUNCTIONS[op](*expected_inputs, output_final_state=True)
    with rewy.patch_fla():
        actual = theirs(package)(*inputs, output_final_state=True)
    for results in (expected, actual):
        (results[0].float().sum() + results[1].sum()).backward()
    assert isinstance(actual, tuple) and len(actual) == 2
    assert_same_bits(list(actual), list(expected))
    assert_same_bits([t.grad for t in inputs], [t.grad for t in expected_inputs])
    with rewy.patch_fla():
        assert theirs(package)(*inputs)[1] is None


PACKED = torch.tensor([0, 3, 64])
STATE = torch.ones(1, 2, 24, 32)
OPTIONS = {  # as given and as understood
    "scale": ({"scale": 0.5}, {"scale": 0.5}),
    "state": (
        {"initial_state": STATE, "output_final_state": 1, "state_v_first": True},
        {"initial_state": STATE, "output_final_state": True, "state_v_first": True},
    ),
    "packed": ({"cu_seqlens": PACKED, "cu_seqlens_cpu": PACKED}, {"cu_seqlens": PACKED}),
    "no state asked for": ({"output_final_state": None}, {}),
    "an activation that is not asked for": (
        {"A_log": torch.ones(2), "dt_bias": torch.ones(9), "lower_bound": -5.0},
        {},
    ),
    "how to compute": ({"safe_gate": True, "disable_recompute": True, "chunk_size": 64}, {"disable_recompute": True}),
    "nothing": ({"cp_context": None, "use_graph": False, "max_num_seqs": None}, {}),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, fla, no_fallback):
    given, expected = OPTIONS[options]
    inputs = tensors("kda", Case())
    with rewy.patch_fla():
        actual = fla.chunk_kda(*inputs, **given)
    assert_same_bits(list(actual), list(rewy.chunk_kda(*inputs, **expected)))


ACTIVATIONS = {
    "gate": {"A_log": torch.rand(1, 1, 2, 1).bfloat16(), "dt_bias": torch.rand(2, 32)},
    "strength": {"A_log": torch.rand(2), "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "bounded": {"A_log": torch.rand(2), "dt_bias": torch.rand(64), "lower_bound": -3.0},
    "bounded without A_log": {"lower_bound": -5.0, "safe_gate": True, "use_qk_l2norm_in_kernel": True},
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, fla, device, dtype, no_fallback):
    options = {k: t.to(device) if torch.is_tensor(t) else t for k, t in ACTIVATIONS[activation].items()}
    inputs = tensors("kda", Case(), device, dtype)
    expected = rewy.chunk_kda(*inputs, use_gate_in_kernel=True, **options)
    with rewy.patch_fla():
        actual = fla.chunk_kda(*inputs, use_gate_in_kernel=True, **options)
    assert_same_bits(list(actual), list(expected))
    assert not torch.equal(actual[0], rewy.chunk_kda(*inputs)[0])


def test_positional_options(fla, no_fallback):
    q, k, v, g, beta = tensors("kda", Case())
    state = torch.ones(1, 2, 32, 24)
    expected = rewy.chunk_kda(q, k, v, g, beta, scale=0.5, initial_state=state, output_final_state=True)
    with rewy.patch_fla():
        assert_same_bits(list(fla.chunk_kda(q, k, v, g, beta, 0.5, state, True)), list(expected))
        assert_same_bits(list(fla.chunk_kda(beta=beta, g=g, v=v, k=k, q=q)), list(rewy.chunk_kda(q, k, v, g, beta)))


def test_indices_of_chunks_are_not_needed(fla, no_fallback):
    inputs = tensors("gdn", Case())
    expected = rewy.chunk_gated_delta_rule(*inputs, cu_seqlens=PACKED)
    with rewy.patch_fla():
        actual = fla.chunk_gated_delta_rule(*inputs, cu_seqlens=PACKED, chunk_indices=torch.tensor([[0, 0], [1, 0]]))
    assert_same_bits(list(actual), list(expected))


def test_the_old_name_of_the_state_s_layout(fla):
    inputs = tensors("kda", Case())
    expected = rewy.chunk_kda(*inputs, initial_state=STATE, state_v_first=True)
    with rewy.patch_fla(), pytest.warns(DeprecationWarning, match="`transpose_state_layout` is now `state_v_first`"):
        assert_same_bits(list(fla.chunk_kda(*inputs, initial_state=STATE, transpose_state_layout=True)), list(expected))


def test_types_stay_under_autocast(fla, device, no_fallback):
    """FLA's functions compute in the types they are given; the functions of this package cast."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    inputs = tensors("kda", Case(), device, dtype)
    expected = rewy.chunk_kda(*inputs)
    with rewy.patch_fla(), torch.autocast(device, torch.bfloat16):
        assert_same_bits(list(fla.chunk_kda(*inputs)), list(expected))


def test_rows_that_a_gpu_does_not_take_are_copied(fla, cuda, no_fallback):
    inputs = tensors("kda", Case(), cuda, torch.bfloat16)
    expected = rewy.chunk_kda(*inputs)
    q, k, v, g, beta = inputs
    odd = [torch.cat([t, t[..., :1]], -1)[..., :-1] for t in (q, k)]
    shifted = torch.cat([v.flatten()[:1], v.flatten()])[1:].view(v.shape)
    transposed = g.transpose(1, 3).contiguous().transpose(1, 3)
    with rewy.patch_fla():
        assert_same_bits(list(fla.chunk_kda(*odd, shifted, transposed, beta)), list(expected))


def test_wrong_arguments_are_refused(fla):
    q, k, v, g, beta = tensors("gdn", Case(B=2))
    with rewy.patch_fla():
        with pytest.raises(ValueError, match=r"^gdn forward: argument 'beta': expected shape"):
            fla.chunk_gated_delta_rule(q, k, v, g, beta[:, :, :1])
        with pytest.raises(ValueError, match="argument 'B': expected 1 with packed sequences, got 2"):
            fla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 64]))
        with pytest.raises(ValueError, match="argument 'q': expected 4 axes, got 3"):
            fla.chunk_gated_delta_rule(q[0], k, v, g, beta)
        with pytest.raises(TypeError, match="argument 'beta': expected a tensor, got list"):
            fla.chunk_gated_delta_rule(q, k, v, g, [1.0])
        for wrong in ({"q": q}, {"scale": 1, "initial_state": None}):  # twice; FLA's own
            with pytest.raises(TypeError, match="multiple values for argument"):
                fla.chunk_gated_delta_rule(q, k, v, g, beta, 1.0, **wrong)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            fla.chunk_gated_delta_rule(q, k, v, g)


# ---- calls that are not --------------------------------------------------------------------------------------------

GATE = {"use_gate_in_kernel": True}
BOUNDED = {**GATE, "A_log": torch.ones(2), "lower_bound": -1.0}
BOTH_LAYOUTS = {"transpose_state_layout": True, "state_v_first": True}
UNSERVED = {
    "context parallelism": ("kda", {"cp_context": object()}, "argument 'cp_context'"),
    "states of chunks": ("kda", {"return_intermediate_states": True}, "argument 'return_intermediate_states'"),
    "graphs": ("kda", {"use_graph": True}, "argument 'use_graph'"),
    "size of chunks": ("gated_delta_rule", {"chunk_size": 32}, "argument 'chunk_size'"),
    "a keyword of tomorrow": ("kda", {"sharpness": 3}, "argument 'sharpness'"),
    "a keyword that FLA ignores": ("delta_rule", {"state_v_first": True}, "argument 'state_v_first'"),
    "another that FLA ignores": ("gated_delta_rule", BOUNDED, "argument 'lower_bound'"),
    "one that FLA refuses": ("delta_rule", {"head_first": False}, "argument 'head_first'"),
    "both names of a layout": ("kda", BOTH_LAYOUTS, "transpose_state_layout and state_v_first are both given"),
    "a switch that is none": ("kda", {"output_final_state": [1]}, "argument 'output_final_state' is list, not bool"),
    "no A_log": ("kda", GATE, "use_gate_in_kernel is set and A_log is not"),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_what_is_not_served_runs_as_before(case, fla):
    package, options, reason = UNSERVED[case]
    inputs = tensors(OPS[package], Case())
    expected = theirs(package)(*inputs, **options)
    rewy.patch_fla()
    name = f"fla.ops.{package}.chunk.{SIGNATURES[package][0]}"
    with pytest.warns(UserWarning) as caught:
        actual = theirs(package)(*inputs, **options)
    assert [str(w.message) for w in caught] == [
        f"rewy does not serve a call of {name}, which runs as without it: {reason}"
    ]
    assert actual == expected and actual[0] == "theirs"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs(package)(*inputs, **options)  # told once
    rewy.unpatch_fla()
    with rewy.patch_fla(), pytest.warns(UserWarning):
        theirs(package)(*inputs, **options)


def test_a_type_that_is_not_served(fla):
    inputs = [t.int() for t in tensors("kda", Case())]
    with (
        rewy.patch_fla(),
        pytest.warns(UserWarning, match="argument 'q': expected dtype f64, f32, bf16 or f16, got i32"),
    ):
        assert fla.chunk_kda(*inputs)[0] == "theirs"


@pytest.mark.parametrize(("package", "name"), [("kda", "k"), ("gated_delta_rule", "v"), ("gdn2", "w")])
def test_types_that_are_mixed(package, name, fla):
    """Kernels that widen whatever they load take them; a layer that worked so far does not fail."""
    given = dict(zip(NAMES[OPS[package]], tensors(OPS[package], Case()), strict=True))
    given[name] = given[name].bfloat16()
    with rewy.patch_fla(), pytest.warns(UserWarning, match=f"argument '{name}': expected dtype f32, got bf16$"):
        assert theirs(package)(**given)[0] == "theirs"


def test_a_backward_that_is_not_served(fla, monkeypatch):
    answers = "kda forward: cuda serves it\nkda backward: cuda declines: too small\nkda backward: cpu declines: serves "
    text = answers + "cpu tensors only\nkda backward: no backend serves it\n"
    monkeypatch.setattr(rewy.patch, "explain", lambda *_, **__: text)
    inputs = tensors("kda", Case())
    with rewy.patch_fla():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.is_tensor(fla.chunk_kda(*inputs)[0])
            with torch.no_grad():
                assert torch.is_tensor(fla.chunk_kda(*leaves(inputs))[0])
        with pytest.warns(UserWarning, match=r"which runs as without it: kda backward: cuda declines: too small$"):
            assert fla.chunk_kda(*leaves(inputs))[0] == "theirs"


def test_what_a_gpu_does_not_take(fla, cuda):
    with rewy.patch_fla():
        with pytest.warns(UserWarning, match="cuda declines: dtype f32 is neither bf16 nor f16"):
            assert fla.chunk_kda(*tensors("kda", Case(), cuda, torch.float32))[0] == "theirs"
        with pytest.warns(UserWarning, match="cuda declines: K = 12 is not a multiple of 8"):
            assert fla.chunk_kda(*tensors("kda", Case(K=12), cuda, torch.bfloat16))[0] == "theirs"


def test_the_documented_table_has_every_argument(fla):
    table = DOCUMENTATION.read_text().split("| argument | served |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.*`.*`.*) \| (.*) \|$", table, re.M)
    served = {name: answer for names, answer in rows for name in re.findall(r"\w+", names)}
    for package, (name, *_) in SIGNATURES.items():
        named = set(inspect.signature(theirs(package)).parameters) - {"kwargs"}
        assert named.union(rewy.patch._FLA_FUNCTIONS[name][1]) <= served.keys()
    for name in ("cp_context", "return_intermediate_states", "use_graph", "max_num_seqs", "head_first", "gk"):
        assert served[name].startswith("falls back")


# ---- tracing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(fla, dynamic, device, dtype, no_fallback):
    def call(q, k, v, g, beta):
        o, final = fla.chunk_kda(q, k, v, g, beta, output_final_state=True, lower_bound=-5.0, safe_gate=True)
        return 2 * o, final

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    with rewy.patch_fla():
        for length in (70, 130):
            inputs, expected_inputs = (leaves(tensors("kda", Case(T=length), device, dtype)) for _ in range(2))
            actual, expected = compiled(*inputs), call(*expected_inputs)
            for results in (actual, expected):
                (results[0].float().sum() + results[1].sum()).backward()
            assert_same_bits(list(actual), list(expected))
            assert_same_bits([t.grad for t in inputs], [t.grad for t in expected_inputs])


def test_traced_without_memory(fla, device, dtype, no_fallback):
    """By torch.export, make_fx and FakeTensorMode, and with shapes alone: whether a call is served is no operation."""

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return fla.chunk_kda(*inputs)[0]

    inputs = tensors("kda", Case(), device, dtype)
    with rewy.patch_fla():
        expected = Module()(*inputs)
    for tracer in (lambda: torch.export.export(Module(), tuple(inputs), strict=False).module(),
                   lambda: make_fx(Module(), tracing_mode="real")(*inputs)):  # fmt: skip
        with rewy.patch_fla():  # asks anew
            program = tracer()
        assert torch.equal(program(*inputs), expected)
        called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert called == {"rewy.forward.default", "<built-in function getitem>"}
    with rewy.patch_fla(), FakeTensorMode() as mode:
        assert Module()(*(mode.from_tensor(t) for t in inputs)).shape == expected.shape
    with rewy.patch_fla():
        assert Module()(*(t.to("meta") for t in inputs)).shape == expected.shape


def test_compiled_without_being_served(fla):
    def call(q, k, v, g, beta):
        return fla.chunk_kda(q, k, v, g, beta, use_graph=True)[0], q + 1

    inputs = tensors("kda", Case())
    with rewy.patch_fla(), pytest.warns(UserWarning, match="argument 'use_graph'"):
        assert torch.compile(call)(*inputs)[0] == "theirs"  # in which FLA breaks the graph


def test_compiled_before_unpatching(fla, no_fallback):
    def call(q, k, v, g, beta):
        return kept(q, k, v, g, beta)[0]

    inputs = tensors("kda", Case())
    compiled = torch.compile(call)
    with rewy.patch_fla():
        kept = fla.chunk_kda
        assert torch.is_tensor(compiled(*inputs))
    assert compiled(*inputs) == "theirs"


# ---- transformers --------------------------------------------------------------------------------------------------

OWN = """
def torch_chunk_gated_delta_rule(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):
    return "theirs", kwargs
"""
# Names looked up by each call, as since 5.17; functions kept by the layer, as before.
LOOKED_UP = """
class Layer(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return torch_chunk_gated_delta_rule(*args, **kwargs)
"""
KEPT = """
try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:
    chunk_gated_delta_rule = None

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.chunk_gated_delta_rule = chunk_gated_delta_rule or torch_chunk_gated_delta_rule

    def forward(self, *args, **kwargs):
        return self.chunk_gated_delta_rule(*args, **kwargs)
"""


@pytest.fixture(params=[LOOKED_UP, KEPT], ids=["looked up", "kept"])
def layers(request, tmp_path, monkeypatch):
    """Makes a layer of Qwen3-Next; that of OLMo Hybrid is there to be imported later."""
    forget(monkeypatch, "fla", "transformers")
    text = "import torch\n" + OWN + request.param
    models = ("qwen3_next", "olmo_hybrid")
    write(tmp_path, {f"transformers/models/{name}/modeling_{name}.py": text for name in models})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "fla", None)
    yield lambda name: importlib.import_module(f"transformers.models.{name}.modeling_{name}").Layer()
    rewy.unpatch_transformers()
    for name in list(sys.modules):
        if name.split(".")[0] == "transformers":
            del sys.modules[name]


def test_layers_of_transformers(layers, no_fallback):
    q, k, v, g, beta = tensors("gdn", Case())
    expected = rewy.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=PACKED, output_final_state=True)
    options = {"g": g, "beta": beta, "cu_seqlens": PACKED, "output_final_state": True, "position_ids": 3}
    before = layers("qwen3_next")
    model = torch.nn.Sequential(before)
    with rewy.patch_transformers(model):
        for layer in (before, layers("qwen3_next"), layers("olmo_hybrid")):
            assert_same_bits(list(layer(q, k, v, **options)), list(expected))
        assert_same_bits(list(layer(q, k, v, chunk_size=32, **options)), list(expected))
    for kept in (before, layer, layers("qwen3_next")):
        assert kept(q, k, v, **options) == ("theirs", {"cu_seqlens": PACKED, "position_ids": 3})
    own = sys.modules[type(before).__module__].torch_chunk_gated_delta_rule
    assert not hasattr(own, "__wrapped__")
    assert vars(before).get("chunk_gated_delta_rule", own) is own


def test_what_transformers_keeps(layers):
    q, k, v, g, beta = tensors("gdn", Case())
    with rewy.patch_transformers():
        with pytest.warns(
            UserWarning, match=r"modeling_qwen3_next.torch_chunk_gated_delta_rule, .*argument 'cp_context'"
        ):
            assert layers("qwen3_next")(q, k, v, g=g, beta=beta, cp_context=3)[0] == "theirs"


def test_exported_programs_have_transformers_own_operations(layers, monkeypatch):
    layer = layers("qwen3_next")
    own = lambda query, key, value, g, beta, **_: (query + value.sum(), None)  # noqa: E731
    monkeypatch.setattr(sys.modules[type(layer).__module__], "torch_chunk_gated_delta_rule", own)
    if hasattr(layer, "chunk_gated_delta_rule"):
        layer.chunk_gated_delta_rule = own
    with rewy.patch_transformers(layer):
        program = torch.export.export(layer, tuple(tensors("gdn", Case())))
    assert not [node for node in program.graph.nodes if "rewy" in str(node.target)]


@pytest.mark.parametrize("layers", [KEPT], indirect=True, ids=["kept"])
def test_fla_s_functions_in_layers_of_transformers(layers, fla, no_fallback):
    """With FLA, what such a layer keeps is FLA's: patching either package reaches it."""
    inputs = tensors("gdn", Case())
    expected = rewy.chunk_gated_delta_rule(*inputs)
    before = layers("qwen3_next")
    with rewy.patch_fla():
        later = layers("olmo_hybrid")
        assert_same_bits(list(later(*inputs)), list(expected))
        assert before(*inputs)[0] == "theirs"
        with rewy.patch_transformers(before, later):
            for layer in (before, later):
                assert_same_bits(list(layer(*inputs)), list(expected))
    for layer in (before, later):
        assert layer(*inputs)[0] == "theirs"
