"""Models of transformers, patched and unpatched, where transformers is installed."""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path

import pytest
import torch

import rewy
import rewy.patch
from recurrence import assert_close

transformers = pytest.importorskip("transformers", minversion="5.17")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
KDA = {
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse"],
}
MODELS = {
    "qwen3_next": {**COMMON, **GDN, **EXPERTS},
    "qwen3_5_text": {**COMMON, **GDN},
    "qwen3_5_moe_text": {**COMMON, **GDN, **EXPERTS},
    "olmo_hybrid": {**COMMON, **GDN},
    "kimi_linear": {**COMMON, **KDA},
}


def run(model, tokens):
    """(logits, gradients by name, six more tokens) of a model."""
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        generated = model.generate(tokens[:1, :20], max_new_tokens=6, do_sample=False)
    return out.logits.detach(), gradients, generated


# FP32: roundings. BF16: twice what the two ways to compute differ by on a CPU.
@pytest.mark.parametrize("name", MODELS)
def test_models(name, device, dtype, monkeypatch):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    tokens = torch.randint(3, 64, (2, 70), device=device)
    module = sys.modules[type(model).__module__]
    places = [place for place in rewy.patch._TRANSFORMERS_FUNCTIONS if hasattr(module, place)]
    with monkeypatch.context() as plain:  # in PyTorch, where transformers would take FLA's too
        for place in places:
            plain.setattr(module, place, inspect.unwrap(getattr(module, place)))
        expected = run(model, tokens)
    before = {place: getattr(module, place) for place in places}
    with rewy.patch_transformers(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="rewy does not serve")
        actual = run(model, tokens)
    assert before == {place: getattr(module, place) for place in places}
    tight, loose = (1e-5, 1e-4) if dtype == torch.float32 else (1e-2, 3e-2)
    assert_close(actual[0], expected[0].double().cpu(), tight, "logits")
    assert actual[1].keys() == expected[1].keys()
    if dtype != torch.float32 and any("expert" in key for key in MODELS[name]):
        loose *= 5  # a token may go to another expert where two are nearly as good
    for parameter, gradient in actual[1].items():
        assert_close(gradient, expected[1][parameter].double().cpu(), loose, parameter)
    if dtype == torch.float32:
        assert torch.equal(actual[2], expected[2])


def test_every_model_with_such_layers_is_known():
    """A model that transformers has and this package's list has not would be patched only once it is imported."""
    root = Path(transformers.__file__).parent / "models"
    having = {
        file.parent.name
        for file in root.glob("*/modeling_*.py")
        if any(f"def {name}(" in file.read_text() for name in rewy.patch._TRANSFORMERS_FUNCTIONS)
    }
    assert len(having) >= 5
    assert having <= set(rewy.patch._TRANSFORMERS_MODELS)
