"""examples/train_lm.py, with a model small enough to train in a test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/train_lm.py"
OPERATORS = ("deltanet", "gdn", "kda", "gdn2")


@pytest.fixture(scope="module")
def train_lm():
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(device) -> torch.Tensor:
    return torch.tensor(list((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("operator", OPERATORS)
def test_loss_falls(train_lm, operator, text):
    torch.manual_seed(0)
    model = train_lm.LanguageModel(operator, width=32, layers=1, heads=2).to(text.device)
    windows = text.unfold(0, 65, 64)
    before = train_lm.evaluate(model, windows, batch=16)
    losses = list(train_lm.train(model, text, batch=8, length=64, steps=40, lr=1e-2))
    after = train_lm.evaluate(model, windows, batch=16)
    assert 7.5 < before < 9.5  # knows nothing
    assert len(losses) == 40 and after < 4.2  # without any context it could not fall below 4.43
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_states_are_the_past(train_lm, operator, text):
    """A text read in pieces, down to single bytes, gives the logits of the text read at once."""
    torch.manual_seed(0)
    model = train_lm.LanguageModel(operator, width=32, layers=2, heads=2).to(text.device)
    tokens = text[:300].view(3, 100).long()
    with torch.no_grad(), torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
        whole, none = model(tokens)
        pieces, states = [], model.empty_state(3)
        for piece in tokens.split([2, 70, *[1] * 28], dim=1):
            logits, states = model(piece, states)
            pieces.append(logits)
    assert none == [None, None]
    error = (torch.cat(pieces, 1) - whole).float().norm() / whole.float().norm()
    assert error < (2e-2 if text.is_cuda else 1e-5)


def test_generates_from_the_prompt(train_lm, device):
    torch.manual_seed(0)
    model = train_lm.LanguageModel("kda", width=32, layers=1, heads=2).to(device)
    samples = train_lm.generate(model, b"import ", count=5, samples=2)
    assert [len(sample) for sample in samples] == [12, 12] and all(s.startswith(b"import ") for s in samples)
    assert samples[0] != samples[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--heads 0", "--heads 0 is too small"),
        ("--length 0", "--length 0 is too small"),
        ("--heads 3", "--width 128 is not a multiple of --heads 3"),
        ("--text {empty}", "0 bytes of text are too few for a --length of 256"),
        ("--width 64 --load {empty}", "{empty} has no weights of this operator and these sizes"),
    ],
)
def test_command_refuses(options, text, train_lm, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    empty = tmp_path / "empty"
    empty.touch()
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--device", "cpu", *options.format(empty=empty).split()])
    with pytest.raises(SystemExit) as caught:
        train_lm.main()
    said = capsys.readouterr().err if caught.value.code == 2 else str(caught.value)
    assert text.format(empty=empty) in said


def test_command(train_lm, device, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    sizes = f"--device {device} --width 32 --layers 1 --heads 2 --batch 2 --length 32 --text {ROOT / 'LICENSE'}"
    reports = []
    for options in ("--steps 3 --save weights.pt", "--steps 0 --load weights.pt"):
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *sizes.split(), *options.split()])
        train_lm.main()
        reports.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("held-out text:")])
    assert len(reports[0]) == 1 and reports[0] == reports[1]  # the same weights say the same
    for name in ("weights.png", "train_lm.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
