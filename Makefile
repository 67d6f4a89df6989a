# The plain front of the CMake build. `make demo` and `make test` are all a newcomer needs; they install what is missing
# on Debian and Ubuntu. PRESET names a preset of CMakePresets.json that builds into build/; CMAKE_FLAGS go to `build`.
PRESET ?= release
CMAKE_FLAGS ?=
JOBS ?= $(shell nproc)

PACKAGES = g++ make cmake libhwy-dev libdlpack-dev libcli11-dev nlohmann-json3-dev libgtest-dev
BENCH_PACKAGES = python3 libbenchmark-dev libopenblas-dev
SOURCES = git -c safe.directory='*' ls-files '*.cpp' '*.h' '*.cu' '*.cuh'
# The Python package is tested in an environment of its own, with PyTorch from PyPI: some gigabytes, once. It is built
# without CUDA, which takes minutes, unless PYTHON_CUDA=ON.
PYTHON ?= python3
PYTHON_CUDA ?= OFF
PYTHON_PACKAGES = python3 python3-venv python3-dev
VENV = build/venv/bin/python -m
RUFF = build/ruff/bin/ruff
# Tests that use threads take turns on the cores instead of spinning on them.
CTEST = OMP_WAIT_POLICY=passive ctest --output-on-failure

.PHONY: build cuda demo test python test-python asan consumers bench-build bench-cpu bench-cuda format format-check sanitize-cuda tidy neon clean

build:
	@cmake/install-packages $(PACKAGES)
	cmake --preset $(PRESET) -DREWY_BENCH=OFF $(CMAKE_FLAGS)
	cmake --build build -j $(JOBS) --target rewy_cli

# As `build`, where the CUDA backend must be part of it. `build` takes it along wherever there is a CUDA compiler.
cuda:
	@cmake/install-packages $(PACKAGES)
	cmake --preset $(PRESET) -DREWY_BENCH=OFF -DREWY_CUDA=ON
	cmake --build build -j $(JOBS)

demo: build
	build/rewy grad examples/layers/*.safetensors --verify

test: build
	cmake --build build -j $(JOBS)
	build/rewy check
	$(CTEST) --test-dir build
	@$(MAKE) --no-print-directory test-python

# The wheel of the Python package, in build/wheel/.
python: build/venv/ready
	@cmake/install-packages $(PACKAGES)
	rm -rf build/wheel
	$(VENV) pip wheel -q --no-build-isolation --no-deps -w build/wheel --config-settings=build-dir=build/python \
	  --config-settings=cmake.define.REWY_CUDA=$(PYTHON_CUDA) .

test-python: python
	$(VENV) pip install -q --force-reinstall --no-deps build/wheel/*.whl
	build/venv/bin/python -c "import fla, matplotlib, tqdm, transformers"  # else tests of them would be left out
	OMP_WAIT_POLICY=passive $(VENV) pytest -q python/tests

# numpy is what PyTorch warns without, tqdm and matplotlib what examples/train_lm.py needs, FLA and transformers what the
# package is patched into; the rest builds and tests.
build/venv/ready:
	@cmake/install-packages $(PYTHON_PACKAGES)
	$(PYTHON) -m venv build/venv
	$(VENV) pip install -q --disable-pip-version-check torch numpy tqdm matplotlib pytest 'scikit-build-core>=0.10' \
	  flash-linear-attention==0.6.0 transformers==5.24.0
	touch $@

build/ruff/ready:
	@cmake/install-packages $(PYTHON_PACKAGES)
	$(PYTHON) -m venv build/ruff
	build/ruff/bin/python -m pip install -q --disable-pip-version-check ruff==0.17.6
	touch $@

asan:
	@cmake/install-packages $(PACKAGES)
	cmake --preset asan
	cmake --build build-asan -j $(JOBS)
	$(CTEST) --test-dir build-asan -LE '^slow$$'

# compute-sanitizer over a short case list; needs a GPU.
sanitize-cuda: cuda
	tests/cuda/sanitize

# Projects that use the installed library, and the library as a subdirectory. Part of `make test` too.
consumers: build
	cmake --build build -j $(JOBS)
	$(CTEST) --test-dir build -L '^package$$'

bench-build:
	@cmake/install-packages $(PACKAGES) $(BENCH_PACKAGES)
	cmake --preset $(PRESET) -DREWY_BENCH=ON
	cmake --build build -j $(JOBS)

bench-cpu: bench-build
	bench/run_cpu.py --build build

# On a machine with an NVIDIA GPU; what else it takes, and BENCH_CUDA's options, is in docs/performance.md.
bench-cuda: cuda
	bench/run_cuda.py --rewy build/rewy $(BENCH_CUDA)

# The version of clang-format that Debian 12 has: another one breaks lines elsewhere. Ruff formats and checks the Python
# package.
format: build/ruff/ready
	@cmake/install-packages git clang-format-14
	$(SOURCES) | xargs clang-format-14 -i
	$(RUFF) check -q --fix
	$(RUFF) format -q

format-check: build/ruff/ready
	@cmake/install-packages git clang-format-14
	$(SOURCES) | xargs clang-format-14 --dry-run -Werror
	$(RUFF) format -q --check
	$(RUFF) check -q

tidy: build
	@cmake/install-packages git clang-tidy libomp-dev
	$(SOURCES) | grep -E '^(src/(common|cpu|reference)|tools)/.*\.cpp$$' | xargs -n 1 -P $(JOBS) \
	  clang-tidy -p build --quiet --extra-arg=-Wno-unknown-warning-option

# The library compiles for 64-bit Arm. Only Highway's headers are lent to the cross compiler, not the host's C library.
neon:
	@cmake/install-packages libhwy-dev g++-aarch64-linux-gnu
	mkdir -p build/neon/include
	ln -sfn /usr/include/hwy build/neon/include/hwy
	for source in src/common/*.cpp src/cpu/*.cpp src/reference/*.cpp; do \
	  echo "aarch64 $$source"; \
	  aarch64-linux-gnu-g++ -std=c++20 -O2 -fopenmp -Wall -Wextra -Iinclude -Isrc -isystem build/neon/include \
	    -c $$source -o build/neon/$$(basename $$source).o || exit 1; \
	done

clean:
	rm -rf build build-asan build-dev
