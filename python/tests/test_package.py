"""The installed package: what is in it, and that what is written about it is so."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rewy
from recurrence import FUNCTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_installed_not_read_from_the_source():
    assert not Path(rewy.__file__).is_relative_to(ROOT / "python")


def test_imports_by_itself():
    subprocess.run([sys.executable, "-c", "import rewy; rewy.chunk_kda"], check=True)


def test_version_stands_once():
    header = (ROOT / "include/rewy/version.h").read_text()
    assert f'define REWY_VERSION "{rewy.__version__}"' in header
    assert importlib.metadata.version("rewy") == rewy.__version__


def test_one_build_for_every_python():
    wheel = importlib.metadata.distribution("rewy").read_text("WHEEL")
    assert "Tag: cp310-abi3-linux" in wheel
    assert Path(rewy._C.__file__).name == "_C.abi3.so"


def test_needs_no_other_library_of_pytorch_s():
    text = subprocess.run(["readelf", "-d", rewy._C.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", text)
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if name.startswith(("libtorch_python", "libc10", "libtorch_cuda", "libpython"))]


def test_one_pool_of_threads():
    """PyTorch and the library share an OpenMP runtime: two would spin against each other."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len({Path(path).resolve() for path in loaded}) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_documented(name):
    function = FUNCTIONS[name]
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"\b{argument}\b", function.__doc__), argument


def test_readme_s_table_is_the_signatures():
    rows = re.findall(r"^\| (`.*`.*) \| (.*) \|$", README.split("argument of FLA 0.6")[1].split("\n\n")[0], re.M)
    listed = {word: answer for names, answer in rows for word in re.findall(r"\w+", names)}
    accepted = set().union(*(inspect.signature(function).parameters for function in FUNCTIONS.values()))
    assert accepted == {name for name, answer in listed.items() if "TypeError" not in answer} - {"or"}
    for function in FUNCTIONS.values():
        options = [p for p in inspect.signature(function).parameters.values() if p.default is not p.empty]
        assert all(p.kind == p.KEYWORD_ONLY for p in options)


def test_quickstart(device):
    run = [sys.executable, str(ROOT / "examples/quickstart.py"), device]
    text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert f"kda backward: {device} serves it" in text
    assert text.endswith("the same state in two calls: True\n")
