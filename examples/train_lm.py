"""Trains a small byte-level language model on any text, then lets it write.

    pip install '.[examples]'                    # this package with tqdm, matplotlib and numpy, or those by themselves
    python examples/train_lm.py                  # two minutes on two CPU cores; a larger model on a GPU
    python examples/train_lm.py --text book.txt --operator gdn --save book.pt

The text is the source of Python's standard library unless --text names another; its last 2% are held out. Losses are in
bits per byte: 8 for a model that knows nothing.
"""

from __future__ import annotations

import argparse
import math
import pickle
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewy

# By chunks of tokens, for training and prompts; and token by token, for decoding. Equal within rounding.
OPERATORS = {
    "deltanet": (rewy.chunk_delta_rule, rewy.fused_recurrent_delta_rule),
    "gdn": (rewy.chunk_gated_delta_rule, rewy.fused_recurrent_gated_delta_rule),
    "kda": (rewy.chunk_kda, rewy.fused_recurrent_kda),
    "gdn2": (rewy.chunk_gdn2, rewy.fused_recurrent_gdn2),
}
CONVOLUTION = 4  # tokens that the short convolution sees, the current one included

# By device. On a GPU the model also runs in BF16 autocast.
DEFAULTS = {
    "cpu": {"width": 128, "layers": 3, "heads": 2, "batch": 4, "length": 256, "steps": 1200, "lr": 6e-3},
    "cuda": {"width": 512, "layers": 6, "heads": 8, "batch": 16, "length": 1024, "steps": 1500, "lr": 2e-3},
}

# Of a mixer: the convolution's last inputs [B, CONVOLUTION - 1, 3 width] and the delta rule's state [B, H, K, V].
State = tuple[Tensor, Tensor]


class Mixer(nn.Module):
    """The delta rule behind a short causal convolution, and a gate on its output. K = V = width / heads.

    Raw projections go into the delta rule: it normalises queries and keys itself, and turns the projections of the gate
    and the strength into a log decay and a number in (0, 1).
    """

    def __init__(self, operator: str, width: int, heads: int) -> None:
        super().__init__()
        self.operator, self.heads, self.K = operator, heads, width // heads
        self.by_chunks, self.by_tokens = OPERATORS[operator]
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.convolution = nn.Conv1d(3 * width, 3 * width, CONVOLUTION, groups=3 * width, bias=False)
        # One strength a head, or with GDN2 one for each feature that is erased and one for each that is written.
        self.strength = nn.Linear(width, 2 * width if operator == "gdn2" else heads, bias=False)
        if operator != "deltanet":
            decays = heads if operator == "gdn" else width  # one a head, or one for each of its features
            self.decay = nn.Linear(width, decays, bias=False)
            # A token's log decay is -exp(A_log) softplus(projection + dt_bias), where softplus begins at 0.001 to 0.1.
            self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
            dt = torch.empty(decays).uniform_(math.log(0.001), math.log(0.1)).exp()
            self.dt_bias = nn.Parameter(dt.expm1().log())
        self.gate = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(self.K, eps=1e-6)
        self.out = nn.Linear(width, width, bias=False)

    def empty_state(self, batch: int) -> State:
        """The state before the first token."""
        weight = self.qkv.weight
        inputs = weight.new_zeros(batch, CONVOLUTION - 1, 3 * weight.shape[1])
        return inputs, weight.new_zeros(batch, self.heads, self.K, self.K)

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """x [B, T, width] -> y [B, T, width], and the state after its last token if one was given."""
        T = x.shape[1]
        inputs, S = (None, None) if state is None else state
        raw = self.qkv(x)
        raw = F.pad(raw, (0, 0, CONVOLUTION - 1, 0)) if inputs is None else torch.cat([inputs.to(raw.dtype), raw], 1)
        mixed = F.silu(self.convolution(raw.transpose(1, 2))).transpose(1, 2).contiguous()  # [B, T, 3 width]
        q, k, v = mixed.unflatten(-1, (3 * self.heads, self.K)).chunk(3, dim=2)  # [B, T, H, K] each

        options = {"use_qk_l2norm_in_kernel": True, "initial_state": S, "output_final_state": state is not None}
        if self.operator != "deltanet":
            g = self.decay(x)  # [B, T, H] as it is, otherwise [B, T, H, K]
            options["g"] = g if self.operator == "gdn" else g.unflatten(-1, (self.heads, self.K))
            options |= {"use_gate_in_kernel": True, "A_log": self.A_log, "dt_bias": self.dt_bias}
        if self.operator == "gdn2":
            strengths = self.strength(x).sigmoid().unflatten(-1, (2 * self.heads, self.K))
            options["b"], options["w"] = strengths.chunk(2, dim=2)  # [B, T, H, K] each
        else:
            options |= {"beta": self.strength(x), "use_beta_sigmoid_in_kernel": True}  # [B, T, H]
        delta_rule = self.by_chunks if state is None or T > 1 else self.by_tokens
        o, S = delta_rule(q, k, v, **options)  # [B, T, H, V], [B, H, K, V]

        y = self.out((self.norm(o.float()) * F.silu(self.gate(x)).view_as(o)).flatten(2))
        return y, None if state is None else (raw[:, T:], S)


class Block(nn.Module):
    """A mixer and a SwiGLU network, each behind a norm and beside a residual connection."""

    def __init__(self, operator: str, width: int, heads: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 16 * 16
        self.mixer_norm, self.mixer = nn.RMSNorm(width, eps=1e-6), Mixer(operator, width, heads)
        self.mlp_norm, self.up = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        mixed, state = self.mixer(self.mixer_norm(x), state)
        x = x + mixed
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value), state


class LanguageModel(nn.Module):
    """Bytes in, logits of the byte that follows each of them out."""

    def __init__(self, operator: str, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(operator, width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 256, bias=False)

    def empty_state(self, batch: int) -> list[State]:
        return [block.mixer.empty_state(batch) for block in self.blocks]

    def forward(self, tokens: Tensor, states: list[State] | None = None) -> tuple[Tensor, list[State | None]]:
        """tokens [B, T] -> logits [B, T, 256], and the states after the last token if states were given."""
        x, after = self.embedding(tokens), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state)
            after.append(state)
        return self.head(self.norm(x)), after


def bits_per_byte(model: nn.Module, windows: Tensor) -> Tensor:
    """Of windows [B, T + 1]: the mean loss of predicting all bytes but each window's first."""
    windows = windows.long()
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        logits, _ = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()) / math.log(2)


def train(model: nn.Module, text: Tensor, batch: int, length: int, steps: int, lr: float) -> Iterator[float]:
    """Trains on random windows of text [bytes], a step each time the loss of the next step is asked for."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    warmup, half_turn = max(1, steps // 20), math.pi / max(1, steps)  # then a cosine, down to a tenth
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(half_turn * step))
    )
    span = torch.arange(length + 1, device=text.device)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1), device=text.device)
        loss = bits_per_byte(model, text[starts + span])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int) -> float:
    """Bits per byte of windows [N, T + 1]; each is predicted without what stands before it."""
    losses = [bits_per_byte(model, part).item() * len(part) for part in windows.split(batch)]
    return sum(losses) / len(windows)


@torch.no_grad()
def generate(model: LanguageModel, prompt: bytes, count: int, samples: int, temperature: float = 0.8) -> list[bytes]:
    """Continues the prompt by `count` bytes: the prompt in one call, then each byte in one, from the states it left."""
    device = model.head.weight.device
    tokens = torch.tensor(list(prompt), device=device).expand(samples, -1)
    text, states = [tokens], model.empty_state(samples)
    for _ in range(count):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits, states = model(tokens, states)
        tokens = torch.multinomial((logits[:, -1].float() / temperature).softmax(-1), 1)
        text.append(tokens)
    return [bytes(row) for row in torch.cat(text, 1).tolist()]


def plot(path: Path, title: str, losses: list[float], held_out: dict[int, float]) -> None:
    """Writes a PNG: the loss of every step, and of the held-out text by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.6, label="training")
    axes.plot(list(held_out), list(held_out.values()), "o-", label="held-out text")
    axes.set(title=title, xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's standard library")
    parser.add_argument("--operator", choices=OPERATORS, default="kda")
    parser.add_argument("--device", choices=DEFAULTS, default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in DEFAULTS["cpu"].items():
        on_gpu = DEFAULTS["cuda"][name]
        parser.add_argument(f"--{name}", type=type(value), metavar="N", help=f"default {value}, on a GPU {on_gpu}")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--compile", action="store_true", help="train and evaluate through torch.compile")
    parser.add_argument("--load", type=Path, metavar="FILE", help="begin with the weights of a model of these sizes")
    parser.add_argument("--save", type=Path, metavar="FILE", help="for the weights; the plot goes beside them")
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="what the samples continue; default a new line")
    args = parser.parse_args()
    for path in (args.text, args.load):
        if path is not None and (not path.exists() or path.is_dir()):
            parser.error(f"{path} is no file")
    if args.save is not None and not args.save.parent.is_dir():
        parser.error(f"{args.save.parent} is no folder")
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if getattr(args, name) < 0 or (getattr(args, name) == 0 and name != "steps"):
            parser.error(f"--{name} {getattr(args, name)} is too small")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


def main() -> None:
    args = arguments()
    import matplotlib  # noqa: F401  # if it is missing, that is said before the training and not after
    from tqdm import tqdm

    torch.manual_seed(args.seed)
    sources = [args.text] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = bytearray(b"".join(path.read_bytes() for path in sources))
    if len(data) - len(data) * 49 // 50 <= args.length:
        raise SystemExit(f"{len(data)} bytes of text are too few for a --length of {args.length}")
    text, held_out = torch.frombuffer(data, dtype=torch.uint8).to(args.device).tensor_split([len(data) * 49 // 50])
    windows = held_out.unfold(0, args.length + 1, args.length)

    model = LanguageModel(args.operator, args.width, args.layers, args.heads).to(args.device)
    if args.load:
        try:
            model.load_state_dict(torch.load(args.load, map_location=args.device, weights_only=True))
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise SystemExit(f"{args.load} has no weights of this operator and these sizes: {error}") from None
    title = f"{args.operator}, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters"
    print(f"{title}; {len(text)} bytes of text, {len(held_out)} held out; on {args.device}")
    runner = torch.compile(model) if args.compile else model
    losses, curve = [], {}
    bar = tqdm(train(runner, text, args.batch, args.length, args.steps, args.lr), total=args.steps, unit="step")
    for step, loss in enumerate(bar, 1):
        losses.append(loss)
        bar.set_postfix_str(f"{loss:.3f} bits per byte")
        if step < args.steps and step * 8 // args.steps > (step - 1) * 8 // args.steps:
            curve[step] = evaluate(runner, windows[:: len(windows) // 64 + 1], args.batch)  # 64 or fewer, spread out
    curve[args.steps] = evaluate(runner, windows, args.batch)
    print(f"held-out text: {curve[args.steps]:.3f} bits per byte")

    if args.save:
        torch.save(model.state_dict(), args.save)
    picture = (args.save or Path("train_lm")).with_suffix(".png")
    plot(picture, title, losses, curve)
    for sample in generate(model, args.prompt.encode() or b"\n", count=400, samples=2):
        print("-" * 80, sample.decode(errors="replace"), sep="\n")
    print("-" * 80, f"losses: {picture}", sep="\n")


if __name__ == "__main__":
    main()
