"""KDA on a layer's raw projections: forward, all gradients, a sequence continued from its state. Args: [cpu | cuda]"""

import sys

import torch

import rewy

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
B, T, H, K = 2, 256, 4, 64
q, k, v, g = (torch.randn(B, T, H, K, device=device, dtype=dtype) for _ in range(4))
beta = torch.randn(B, T, H, device=device, dtype=dtype)
A_log, dt_bias = torch.zeros(H, device=device), torch.zeros(H * K, device=device)
variables = [t.requires_grad_() for t in (q, k, v, g, beta, A_log, dt_bias)]
options = {"A_log": A_log, "dt_bias": dt_bias, "output_final_state": True, "use_qk_l2norm_in_kernel": True,
           "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}  # fmt: skip

print(rewy.explain(rewy.chunk_kda, q, k, v, g, beta, **options), end="")
o, state = rewy.chunk_kda(q, k, v, g, beta, **options)
o.float().square().mean().backward()
print("gradients", [f"{t.grad.norm().item():.2e}" for t in variables])

_, half = rewy.chunk_kda(*(t[:, :128] for t in (q, k, v, g, beta)), **options)
_, whole = rewy.chunk_kda(*(t[:, 128:] for t in (q, k, v, g, beta)), initial_state=half, **options)
print("the same state in two calls:", torch.equal(whole, state))
