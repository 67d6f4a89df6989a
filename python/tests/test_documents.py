"""The measured tables of docs/performance.md are what the benchmark programs make of results/: nothing by hand."""

from __future__ import annotations

import json
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


def test_readme_s_figures_are_of_results():
    readme = " ".join((ROOT / "README.md").read_text().split())
    summary = json.loads((ROOT / "results/compare_fla_h200.json").read_text())["summary"]
    spans = []
    for direction in ("forward", "backward"):
        times = [forms["recompute"][direction] for forms in summary.values()]
        spans.append(f"{min(times):.1f} to {max(times):.1f} times")
    assert f"the forward is {spans[0]} and the recomputing backward {spans[1]} as fast" in readme
    kda, gdn2 = (summary[op]["recompute, safe_gate"]["backward"] for op in ("kda", "gdn2"))
    assert f"the backward of KDA and GDN2 {kda:.2f} and {gdn2:.2f} times" in readme
    gains = json.loads((ROOT / "results/models_h200.json").read_text())["summary"]
    text = "{kda:.0f}% (KDA), {gdn2:.0f}% (GDN2, its layer in the KDA model), {gdn:.0f}% (GDN) and {deltanet:.0f}% "
    assert text.format(**gains) in readme
