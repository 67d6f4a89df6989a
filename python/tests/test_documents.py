"""The measured tables of docs/performance.md are what the benchmark programs make of results/: nothing by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/performance.md"
PROGRAMS = {
    "run_cuda.py": "h200.json",
    "models.py": "models_h200.json",
    "compare_fla.py": "compare_fla_h200.json",
    "profile_torch.py": "profile_h200.json",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_tables_are_rendered_from_results(program, tmp_path):
    results = ROOT / "results" / PROGRAMS[program]
    folder = tmp_path / "docs"  # figures are named relative to the document
    folder.mkdir()
    copy = folder / DOCUMENT.name
    copy.write_text(DOCUMENT.read_text())
    command = [sys.executable, ROOT / "bench" / program, "--render", results, "--write", copy]
    if program in ("run_cuda.py", "models.py"):
        command += ["--figures", folder / "figures"]
    subprocess.run(command, check=True, capture_output=True)
    assert copy.read_text() == DOCUMENT.read_text()
    for figure in folder.glob("figures/*"):
        assert figure.read_text() == (ROOT / "docs/figures" / figure.name).read_text()
