"""Where the tests run: on CPU tensors, and on CUDA tensors too where there is a GPU that the package serves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rewy
from recurrence import Case, tensors

torch.set_num_threads(1)  # for tensors this small, threads mostly wait for each other; one test is about them


def serves_cuda() -> bool:
    if not torch.cuda.is_available():
        return False
    q, k, v, beta = tensors("deltanet", Case(), "cuda", torch.bfloat16)
    return "cuda serves it" in rewy.explain(rewy.chunk_delta_rule, q, k, v, beta)


DEVICES = ["cpu", *(["cuda"] if serves_cuda() else [])]


def pytest_report_header() -> str:
    return f"rewy {rewy.__version__} on torch {torch.__version__}, tensors on {' and '.join(DEVICES)}"


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cuda() -> str:
    if "cuda" not in DEVICES:
        pytest.skip("no GPU that the package serves")
    return "cuda"


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """The widest type of q, k and v on that device."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def compile_anew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """PyTorch keeps compiled programs over runs, and would take those of a package with other shape rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
