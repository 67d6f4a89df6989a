#!/usr/bin/env python3
"""FLA's language models on an NVIDIA GPU with FLA's operators and with this library's, to results/models_<gpu>.json.

    PYTHONPATH=<fla-core and flash-linear-attention> bench/models.py [--models kda,gdn2] [--parts time,gradients,curves]
    bench/models.py --render results/models_h200.json --write docs/performance.md   # no GPU: tables and charts

The models are FLA's for KDA, Gated DeltaNet and DeltaNet, and its KDA model with the GDN2 layer in place of KDA's: 24
layers, hidden 2048, MLP 5632, 16 heads of 128, vocabulary 32,000, FP32 parameters, BF16 autocast, one sequence, no
checkpointing, and whatever loss FLA's configuration takes by itself. Both sides are one model object with one batch:
what differs is `with rewy.patch_fla():` around it.

time       forward (with the loss) and whole backward (loss.backward(), nothing else). `graph`: both captured in CUDA
           graphs and replayed, so that the host has no part in it; `eager`: as a training loop runs them. The two sides
           alternate, who goes first too; medians. The gain is FLA's time / this library's - 1, over several lengths
           from the geometric mean of the quotients.
operator   the same for one attention operator alone, with the arguments that a layer in the middle gave it, its fused
           normalisation and gates included. Times the layers it is the operator's share of the model.
gradients  of all parameters, one step, same weights and batch: the relative difference of each, in the L2 norm, for
           the whole depth and for --shallow layers. What BF16 rounds differently in one layer grows in those that
           follow, so that the difference alone says little in a deep model: both sides are also compared with a step
           in which the operator runs on the CPU in FP32, and FLA with itself where all weights are changed by a
           relative 2^-12, less than BF16 tells apart. FLA's second run says what is not reproducible.
layers     the same of each attention layer by itself: its input and its output's gradient are those of a step with
           FLA's operators, so that nothing of the layers around it differs.
curves     losses of some AdamW updates from the same weights on the same text, one side after the other, and of FLA
           from weights changed like that; of a model with --curve-layers.

FLA tunes its kernels at first use; bench/tune_fla.py does that beforehand. FLA refuses GDN's backward on Hopper with
Triton 3.4.0 to 3.7.0; --fla-times-only: bench/time_fla.py says what it does. Gradients and curves are then left out.

The file is written after each row. Rows that are there already and are not measured again stay, unless they are of
another machine or other versions.
"""

import argparse
import contextlib
import datetime
import gc
import importlib
import json
import pathlib
import re
import statistics
import sys
import time
import warnings

import render_models
import time_fla
from run_cuda import ROOT, command_line, commit_of_tree, driver, file_name, geometric_mean

LAYERS, HIDDEN, MLP, HEADS, WIDTH, VOCABULARY = 24, 2048, 5632, 16, 128, 32000
LENGTHS = (2048, 8192)
SIDES = ("fla", "rewy")
PARTS = ("time", "operator", "gradients", "layers", "curves")
OPERATORS = {  # the function that a layer calls, where the layer looks it up
    "kda": ("fla.layers.kda", "chunk_kda"),
    "gdn": ("fla.layers.gated_deltanet", "chunk_gated_delta_rule"),
    "deltanet": ("fla.layers.delta_net", "chunk_delta_rule"),
    "gdn2": ("fla.layers.gdn2", "chunk_gdn2"),
}
DEVICE = "cuda"


# The models.

def build(name, layers=LAYERS, seed=1):
    """FLA's language model with FP32 parameters on the device, in training mode."""
    import torch
    from fla.models import (DeltaNetConfig, DeltaNetForCausalLM, GatedDeltaNetConfig, GatedDeltaNetForCausalLM,
                            KDAConfig, KDAForCausalLM)
    shell = {"num_hidden_layers": layers, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_heads": HEADS,
             "vocab_size": VOCABULARY}
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        if name == "deltanet":
            model = DeltaNetForCausalLM(DeltaNetConfig(**shell))
        elif name == "gdn":
            model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**shell, head_dim=WIDTH, expand_v=1))
        else:
            model = KDAForCausalLM(KDAConfig(**shell, head_dim=WIDTH))
        if name == "gdn2":
            from fla.layers.gdn2 import GatedDeltaNet2
            for i, block in enumerate(model.model.layers):
                block.attn = GatedDeltaNet2(hidden_size=HIDDEN, head_dim=WIDTH, num_heads=HEADS, layer_idx=i,
                                            norm_eps=model.config.norm_eps)
                block.attn.apply(model._init_weights)
    return model.train()


class Trial:
    """A model with a batch of tokens, on a stream of its own."""

    def __init__(self, name, layers, seed=1):
        import torch
        self.torch, self.name, self.layers = torch, name, layers
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.model = build(name, layers, seed)
        self.tokens = None  # [1, T]

    def draw(self, length, seed=2):
        """Synthetic tokens for what is timed."""
        torch = self.torch
        make = torch.Generator(device=DEVICE).manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (1, length), device=DEVICE, generator=make)

    def loss(self):
        torch = self.torch
        with torch.autocast(DEVICE, torch.bfloat16):
            return self.model(input_ids=self.tokens, labels=self.tokens).loss

    def clear(self):
        self.model.zero_grad(set_to_none=True)

    def step(self):
        self.clear()
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def parameters(self):
        return sum(p.numel() for p in self.model.parameters())


def side(name):
    """Whose operators the layers call inside this context."""
    if name == "fla":
        return contextlib.nullcontext()
    import rewy
    return rewy.patch_fla()


def check_served(trial):
    """Raises unless a forward calls this library's operators in every layer if patched, and never otherwise."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "rewy" and "backward" not in function._opname:
                Count.calls += 1
            return function(*args, **(kwargs or {}))

    for name in SIDES:
        Count.calls = 0
        with warnings.catch_warnings(record=True) as caught, trial.torch.cuda.stream(trial.stream):
            warnings.simplefilter("always")
            with side(name), Count():
                trial.loss()  # with gradients: a call whose backward is not served falls back
        served = Count.calls >= trial.layers if name == "rewy" else Count.calls == 0
        if not served:
            said = "; ".join(dict.fromkeys(str(w.message) for w in caught if "rewy" in str(w.message)))
            raise RuntimeError(f"{trial.name}: {Count.calls} calls of rewy's operators in {trial.layers} layers on the "
                               f"side of {name}" + (f": {said}" if said else ""))


# Time.

def microseconds(times):
    return {"median_us": statistics.median(times) * 1e6, "min_us": min(times) * 1e6, "max_us": max(times) * 1e6}


def alternate(work, repeats):
    """{side: [results of work[side]()]}, the sides in turn, who goes first in turn too."""
    out = {name: [] for name in work}
    for i in range(repeats):
        for name in list(work)[::-1 if i % 2 else 1]:
            out[name].append(work[name]())
    return out


def timed_row(times, repeats):
    """From {side: [{"forward": s, "backward": s}]}."""
    row = {"observations": repeats}
    for name, observed in times.items():
        row[name] = {part: microseconds([one[part] for one in observed]) for part in observed[0]}
    for part in row["fla"]:
        gain = row["fla"][part]["median_us"] / row["rewy"][part]["median_us"] - 1
        row[f"{part}_gain_percent"] = 100 * gain
    return row


def eager_row(trial, repeats):
    cuda = trial.torch.cuda
    peaks = {}

    def once(name):
        marks = [cuda.Event(enable_timing=True) for _ in range(3)]
        with cuda.stream(trial.stream), side(name):
            trial.step()  # a training loop does not change sides at each step
            trial.clear()
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            marks[0].record()
            loss = trial.loss()
            marks[1].record()
            loss.backward()
            marks[2].record()
            marks[2].synchronize()
        peaks[name] = cuda.max_memory_allocated() / 2**30
        return {"forward": marks[0].elapsed_time(marks[1]) * 1e-3, "backward": marks[1].elapsed_time(marks[2]) * 1e-3}

    work = {name: (lambda name=name: once(name)) for name in SIDES}
    alternate(work, 1)
    row = timed_row(alternate(work, repeats), repeats)
    for name in SIDES:
        row[name]["peak_gib"] = peaks[name]
    trial.clear()
    return row


def capture(trial, name, pool):
    """(forward, backward, the loss that a replay leaves): two graphs, to be replayed in this order."""
    cuda = trial.torch.cuda
    forward, backward = cuda.CUDAGraph(), cuda.CUDAGraph()
    with cuda.stream(trial.stream), side(name):
        trial.step()
        trial.clear()
        with cuda.graph(forward, pool=pool, stream=trial.stream):
            loss = trial.loss()
            value = loss.detach()
        with cuda.graph(backward, pool=pool, stream=trial.stream):
            loss.backward()
        trial.clear()
    return forward, backward, value


def graph_row(trial, repeats):
    """Both sides share the graphs' memory: each replay of a forward is followed by its backward before the next one."""
    torch, cuda = trial.torch, trial.torch.cuda
    losses = {}
    for name in SIDES:
        with cuda.stream(trial.stream), side(name):
            losses[name] = trial.step().item()
    trial.clear()
    pool = cuda.graph_pool_handle()
    graphs = {name: capture(trial, name, pool) for name in SIDES}

    def once(name):
        forward, backward, _ = graphs[name]
        marks = [cuda.Event(enable_timing=True) for _ in range(3)]
        with cuda.stream(trial.stream):
            marks[0].record()
            forward.replay()
            marks[1].record()
            backward.replay()
            marks[2].record()
            marks[2].synchronize()
        return {"forward": marks[0].elapsed_time(marks[1]) * 1e-3, "backward": marks[1].elapsed_time(marks[2]) * 1e-3}

    for name in SIDES:  # a replay computes what the call computed
        once(name)
        replayed = graphs[name][2].item()
        if not abs(replayed - losses[name]) <= 1e-3 * abs(losses[name]):
            raise RuntimeError(f"{trial.name}, {name}: loss {losses[name]} in the call, {replayed} in its graph")
    work = {name: (lambda name=name: once(name)) for name in SIDES}
    alternate(work, 3)
    row = timed_row(alternate(work, repeats), repeats)
    for name in SIDES:
        row[name]["loss"] = losses[name]
    graphs.clear()
    torch.cuda.synchronize()
    return row


def operator_arguments(trial, name):
    """(function, arguments) of the operator's call in the layer in the middle."""
    module = importlib.import_module(OPERATORS[trial.name][0])
    attribute = OPERATORS[trial.name][1]
    calls = []
    with trial.torch.cuda.stream(trial.stream), side(name):
        function = getattr(module, attribute)

        def record(*args, **kwargs):
            if args:
                raise RuntimeError(f"{attribute}: the layer passes arguments by position")
            calls.append(kwargs if len(calls) == trial.layers // 2 else None)
            return function(*args, **kwargs)

        setattr(module, attribute, record)
        try:
            loss = trial.loss()
        finally:
            setattr(module, attribute, function)
    kwargs = {key: value.detach().requires_grad_(value.requires_grad) if hasattr(value, "requires_grad") else value
              for key, value in calls[trial.layers // 2].items()}
    del loss
    return function, kwargs


def operator_row(trial, repeats):
    torch = trial.torch
    work, kept = {}, []
    for name in SIDES:
        function, kwargs = operator_arguments(trial, name)
        inputs = [value for value in kwargs.values() if hasattr(value, "requires_grad") and value.requires_grad]

        def call(function=function, kwargs=kwargs):
            with torch.autocast(DEVICE, torch.bfloat16):
                return function(**kwargs)[0]

        def alone(call=call):
            with torch.no_grad():
                call()

        with side(name), torch.cuda.stream(trial.stream):
            output = call()
            d_o = torch.randn_like(output)
            for _ in range(2):  # compiles
                torch.autograd.grad(output, inputs, d_o, retain_graph=True)
                alone()

        def backward(output=output, inputs=inputs, d_o=d_o):
            torch.autograd.grad(output, inputs, d_o, retain_graph=True)

        with side(name):
            replays = time_fla.captured(alone, trial.stream), time_fla.captured(backward, trial.stream)
        kept.append((kwargs, output, d_o))  # what the graphs read
        work[name] = lambda replays=replays: {"forward": replays[0](), "backward": replays[1]()}
    return timed_row(alternate(work, repeats), repeats)


# Gradients.

def kind_of(name):
    """A parameter's name without the number of its layer."""
    return re.sub(r"^(model\.layers\.)?\d+\.", "", name)


def relative(other, one):
    """||other - one|| / ||one||, 0 where both are 0."""
    difference, norm = (other.double() - one.double()).norm().item(), one.double().norm().item()
    return difference / norm if norm else (float("inf") if difference else 0.0)


@contextlib.contextmanager
def exact(trial):
    """Inside, the layers' operator runs on the CPU in FP32, which is exact beside the roundings of BF16."""
    import rewy
    torch = trial.torch
    where, attribute = OPERATORS[trial.name]
    module = importlib.import_module(where)
    with rewy.patch_fla():
        function = getattr(module, attribute)

        def on_cpu(**kwargs):
            q = kwargs["q"]
            moved = {key: value.float().cpu() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                     for key, value in kwargs.items()}
            with torch.autocast(DEVICE, enabled=False):
                o, state = function(**moved)
            return o.to(q.device, q.dtype), state

        setattr(module, attribute, on_cpu)
        try:
            yield
        finally:
            setattr(module, attribute, function)


@contextlib.contextmanager
def nudged(trial, size=2.0**-12, seed=4):
    """Inside, each weight w is w (1 + size n), n from a normal distribution: an eighth of what BF16 rounds by at most.

    What changes then is the noise of the computation: no two programs that round differently can be closer.
    """
    torch = trial.torch
    make = torch.Generator(device=DEVICE).manual_seed(seed)
    weights = [p.detach().clone() for p in trial.model.parameters()]
    with torch.no_grad():
        for p in trial.model.parameters():
            p.mul_(1 + size * torch.randn(p.shape, device=DEVICE, generator=make))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(trial.model.parameters(), weights):
                p.copy_(before)


def compared(others, ones):
    """How far gradients are from others, by parameter."""
    errors = {key: relative(others[key], ones[key]) for key in ones}
    whole = (sum((others[key].double() - ones[key].double()).norm().item() ** 2 for key in errors)
             / sum(ones[key].double().norm().item() ** 2 for key in errors)) ** 0.5
    worst = max(errors, key=errors.get)
    return errors, {"max": errors[worst], "worst": worst, "median": statistics.median(errors.values()), "whole": whole}


def about_differences(ours, fla, truth, bar):
    """What a row says of both sides' gradients and the exact ones."""
    errors, between = compared(ours, fla)
    kinds = {}
    for key, error in errors.items():
        kinds[kind_of(key)] = max(error, kinds.get(kind_of(key), 0))
    return {"compared": len(errors), "bar": bar, "difference": between,
            "off_exact": {"fla": compared(fla, truth)[1], "rewy": compared(ours, truth)[1]},
            "above_bar": sorted(key for key, error in errors.items() if not error <= bar),
            "by_kind": dict(sorted(kinds.items(), key=lambda item: -item[1]))}


def layers_row(trial, bar):
    torch = trial.torch
    layers = [block.attn for block in trial.model.model.layers]
    calls, d_outputs, hooks = {}, {}, []
    for i, layer in enumerate(layers):
        def before(_, args, kwargs, i=i):
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            calls[i] = x.detach().clone(), {key: value for key, value in kwargs.items() if key != "hidden_states"}

        def after(_, args, output, i=i):
            output[0].register_hook(lambda d_output: d_outputs.__setitem__(i, d_output.detach().clone()))

        hooks += [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    with torch.cuda.stream(trial.stream), side("fla"):
        trial.step()
    trial.clear()
    for hook in hooks:
        hook.remove()

    def gradients(inside):
        out = {}
        with torch.cuda.stream(trial.stream), inside:
            for i, layer in enumerate(layers):
                x = calls[i][0].requires_grad_()
                with torch.autocast(DEVICE, torch.bfloat16):
                    y = layer(hidden_states=x, **calls[i][1])[0]
                y.backward(d_outputs[i])
                out |= {f"{i}.{key}": p.grad for key, p in layer.named_parameters() if p.grad is not None}
                out[f"{i}.input"] = x.grad
                x.grad = None
            trial.clear()
        return out

    with torch.cuda.stream(trial.stream):
        return about_differences(gradients(side("rewy")), gradients(side("fla")), gradients(exact(trial)), bar)


def gradients_row(trial, bar):
    torch = trial.torch

    def gradients(inside):
        with torch.cuda.stream(trial.stream), inside:
            loss = trial.step().item()
        out = {key: p.grad for key, p in trial.model.named_parameters() if p.grad is not None}
        trial.clear()
        return loss, out

    with torch.cuda.stream(trial.stream):
        loss, fla = gradients(side("fla"))
        _, again = gradients(side("fla"))
        itself = max(relative(again[key], fla[key]) for key in fla)
        del again
        rewy_loss, ours = gradients(side("rewy"))
        if fla.keys() != ours.keys():
            raise RuntimeError(f"gradients of one side only: {', '.join(sorted(fla.keys() ^ ours.keys())[:5])}")
        exact_loss, truth = gradients(exact(trial))
        row = about_differences(ours, fla, truth, bar)
        del ours, truth
        with nudged(trial):
            _, other = gradients(side("fla"))
        return {"loss": {"fla": loss, "rewy": rewy_loss, "exact": exact_loss}, "fla_against_itself": itself, **row,
                "fla_nudged": compared(other, fla)[1]}


# Loss curves.

def text_of_repository():
    """The bytes of this repository's documents and sources, in the order of their names."""
    folders = ("docs", "include", "src", "python", "tests", "tools")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")
             if path.suffix in (".md", ".h", ".cpp", ".cu", ".cuh", ".py", ".txt")]
    return b"".join(path.read_bytes() for path in sorted(paths))


def curve_row(trial, length, updates, rate=1e-4, warmup=20):
    torch = trial.torch
    text = torch.frombuffer(bytearray(text_of_repository()), dtype=torch.uint8).long()
    starts = torch.randint(0, len(text) - length, (updates,), generator=torch.Generator().manual_seed(3))
    batches = torch.stack([text[i:i + length] for i in starts.tolist()]).to(DEVICE)
    losses = {}

    def train(name):
        optimizer = torch.optim.AdamW(trial.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1, (update + 1) / warmup))
        observed = []
        with side(name):
            for batch in batches:
                trial.tokens = batch[None]
                observed.append(trial.step())
                torch.nn.utils.clip_grad_norm_(trial.model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        trial.clear()
        return torch.stack(observed).tolist()

    with torch.cuda.stream(trial.stream):
        for name in SIDES:
            with nudged(trial, size=0.0):  # the same weights for all
                losses[name] = train(name)
        with nudged(trial):
            losses["fla_nudged"] = train("fla")

    def apart(name):
        differences = [abs(a - b) for a, b in zip(losses["fla"], losses[name])]
        at = max(range(updates), key=differences.__getitem__)
        return {"max": differences[at], "at": at + 1, "mean": statistics.mean(differences)}

    return {"updates": updates, "text": f"{len(text)} bytes of this repository's documents and sources",
            "optimizer": f"AdamW, rate {rate:g} after {warmup} updates of warm-up, betas 0.9 and 0.95, weight decay 0.1, "
                         "gradients clipped to norm 1",
            "loss": losses, "rewy_against_fla": apart("rewy"), "fla_nudged_against_fla": apart("fla_nudged")}


# The run.

def versions():
    import transformers
    import rewy
    return time_fla.versions() | {"transformers": transformers.__version__, "rewy": rewy.__version__}


KEY = ("model", "part", "mode", "T", "layers")


def earlier(target, results):
    """What an earlier run left in the file; nothing if it had another machine or other versions."""
    old = json.loads(target.read_text()) if target.exists() else {}
    return old if all(old.get(key) == results[key] for key in ("machine", "versions")) else {}


def renewed(old, new, key):
    """Those of the old rows that were not measured anew, and the new ones."""
    key_of = lambda row: tuple(row.get(name) for name in key)
    measured = {key_of(row) for row in new}
    return [row for row in old if key_of(row) not in measured] + new


def summarise(rows):
    """{model: whole-model backward gain in percent}, from the graphs at all lengths."""
    summary = {}
    for name in OPERATORS:
        ratios = [row["fla"]["backward"]["median_us"] / row["rewy"]["backward"]["median_us"] for row in rows
                  if row["model"] == name and row["part"] == "time" and row["mode"] == "graph"
                  and row["layers"] == LAYERS and "failed" not in row]
        summary[name] = 100 * (geometric_mean(ratios) - 1) if ratios else None
    return summary


def measure(a, parts, names, lengths, save):
    import torch
    start = time.monotonic()
    repeats, updates = (5, 5) if a.quick else (a.repeats, a.updates)

    def row(about, work):
        if time.monotonic() - start > a.seconds:
            print(f"[{time.monotonic() - start:5.0f} s] no time left for {about}", flush=True)
            return
        try:
            found = {**about, **work()}
        except Exception as error:  # FLA's and Triton's are of many kinds; what was measured so far stays
            found = {**about, "failed": time_fla.one_line(error)}
        save(found)
        shown = found.get("failed") or ", ".join(f"{key} {value:.4g}" for key, value in found.items()
                                                if isinstance(value, float))
        print(f"[{time.monotonic() - start:5.0f} s] {' '.join(str(v) for v in about.values())}: {shown}", flush=True)

    for name in names:
        unchecked = a.fla_times_only and name == "gdn"
        trial = Trial(name, a.layers)
        print(f"[{time.monotonic() - start:5.0f} s] {name}: {trial.parameters() / 1e9:.3f} billion parameters",
              flush=True)
        about = {"model": name, "layers": a.layers, "parameters": trial.parameters()}
        if unchecked:
            about["unchecked"] = True
        trial.draw(lengths[0])
        try:
            check_served(trial)
        except Exception as error:
            save({**about, "part": "served", "T": lengths[0], "failed": time_fla.one_line(error)})
            print(f"[{time.monotonic() - start:5.0f} s] {name}: not measured: {error}", flush=True)
            continue
        if "gradients" in parts and not unchecked:
            row({**about, "part": "gradients", "T": lengths[0]}, lambda: gradients_row(trial, a.bar))
            shallow = Trial(name, a.shallow)
            shallow.draw(lengths[0])
            row({**about, "layers": a.shallow, "parameters": shallow.parameters(), "part": "gradients",
                 "T": lengths[0]}, lambda: gradients_row(shallow, a.bar))
            del shallow
        if "layers" in parts and not unchecked:
            row({**about, "part": "layers", "T": lengths[0]}, lambda: layers_row(trial, a.bar))
        for length in lengths:
            trial.draw(length)
            if "time" in parts:
                row({**about, "part": "time", "mode": "eager", "T": length}, lambda: eager_row(trial, repeats // 3 + 1))
                gc.collect()
                torch.cuda.empty_cache()
                row({**about, "part": "time", "mode": "graph", "T": length}, lambda: graph_row(trial, repeats))
            if "operator" in parts:
                row({**about, "part": "operator", "mode": "graph", "T": length}, lambda: operator_row(trial, repeats))
            trial.clear()
            gc.collect()
            torch.cuda.empty_cache()
        del trial
        if "curves" in parts and not unchecked:
            learner = Trial(name, a.curve_layers)
            row({**about, "layers": a.curve_layers, "parameters": learner.parameters(), "part": "curves",
                 "T": lengths[0]}, lambda: curve_row(learner, lengths[0], updates))
            del learner
        gc.collect()
        torch.cuda.empty_cache()


def listed(choices, convert=str):
    def parse(text):
        words = [convert(word) for word in text.split(",")]
        if choices and not set(words) <= set(choices):
            raise argparse.ArgumentTypeError(f"of {', '.join(map(str, choices))}, separated by commas")
        return words
    return parse


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=listed(OPERATORS), default=list(OPERATORS),
                        help="default: " + ",".join(OPERATORS))
    parser.add_argument("--lengths", type=listed(None, int), default=list(LENGTHS),
                        help="default: 2048,8192; gradients and curves take the first")
    parser.add_argument("--parts", type=listed(PARTS), default=list(PARTS), help="default: " + ",".join(PARTS))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--shallow", type=int, default=2, help="layers of the second comparison of gradients")
    parser.add_argument("--curve-layers", type=int, default=LAYERS, help="layers of the models of the loss curves")
    parser.add_argument("--repeats", type=int, default=20, help="observations a side; a third of them in eager mode")
    parser.add_argument("--updates", type=int, default=50, help="of a loss curve")
    parser.add_argument("--bar", type=float, default=0.02,
                        help="for the gradients' relative difference; what is above is named")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after this long")
    parser.add_argument("--fla-times-only", action="store_true", help="time GDN where FLA refuses to compute it")
    parser.add_argument("--quick", action="store_true", help="five observations and updates, to try the script")
    parser.add_argument("--out", help="instead of results/models_<gpu>.json")
    parser.add_argument("--commit", help="what was built, where this is no git checkout")
    parser.add_argument("--render", metavar="JSON", help="measure nothing: the tables of this file")
    parser.add_argument("--write", help="document that takes the tables between its markers; writes the charts too")
    parser.add_argument("--figures", default=str(ROOT / "docs/figures"), help="folder of the charts")
    a = parser.parse_args()
    if a.render:
        results = json.loads(pathlib.Path(a.render).read_text())
    else:
        import torch
        if a.fla_times_only:
            time_fla.accept_triton()
        target = pathlib.Path(a.out or ROOT / "results" / f"models_{file_name(torch.cuda.get_device_name())}")
        new = []
        results = {"date": datetime.date.today().isoformat(), "commit": a.commit or commit_of_tree(),
                   "command": command_line("bench/models.py", ("--models", "--lengths", "--parts", "--layers",
                                                               "--shallow", "--curve-layers", "--repeats",
                                                               "--updates", "--seconds"),
                                           ("--fla-times-only", "--quick")),
                   "machine": {"gpu": torch.cuda.get_device_name(), "driver": driver()}, "versions": versions(),
                   "setup": {"layers": LAYERS, "hidden": HIDDEN, "mlp": MLP, "heads": HEADS, "width": WIDTH,
                             "vocabulary": VOCABULARY, "batch": 1, "autocast": "BF16"}}

        old = [row for row in earlier(target, results).get("rows", []) if row["part"] != "served"]

        def save(row):
            new.append({**row, "commit": results["commit"]})
            results["rows"] = renewed(old, new, KEY)
            results["summary"] = summarise(results["rows"])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(results, indent=1) + "\n")

        measure(a, a.parts, a.models, a.lengths, save)
        if not new:
            raise SystemExit("nothing was measured")
        print("wrote", target)
    text, figures = render_models.render(results)
    print(text)
    if a.write:
        render_models.write(text, figures, pathlib.Path(a.write), pathlib.Path(a.figures))


if __name__ == "__main__":
    sys.exit(main())
