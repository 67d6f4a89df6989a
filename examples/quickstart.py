"""One KDA layer's core: forward, all gradients, and a sequence continued from its state. Usage: quickstart.py [cuda]"""

import sys

import torch
import torch.nn.functional as F

import rewy

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
B, T, H, K = 2, 256, 4, 64
q, k, v, raw = (torch.randn(B, T, H, K, device=device) for _ in range(4))
q, k, v = F.normalize(q, dim=-1).to(dtype), F.normalize(k, dim=-1).to(dtype), v.to(dtype)
inputs = [t.requires_grad_() for t in (q, k, v, F.logsigmoid(raw), torch.rand(B, T, H, device=device))]

print(rewy.explain(rewy.chunk_kda, *inputs), end="")
o, state = rewy.chunk_kda(*inputs, output_final_state=True)
o.float().square().mean().backward()
print("gradients", [f"{t.grad.norm().item():.2e}" for t in inputs])

_, half = rewy.chunk_kda(*(t[:, :128] for t in inputs), output_final_state=True)
_, whole = rewy.chunk_kda(*(t[:, 128:] for t in inputs), initial_state=half, output_final_state=True)
print("the same state in two calls:", torch.equal(whole, state))
