# Satchel's front door: every target sets the machine up, builds what it needs, and runs. A second call does no work twice.
# PYTHON=/path/to/python3 uses that Python's torch and downloads nothing.
SHELL := /bin/bash
PYTHON ?=
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
RELEASE ?=
LIMIT ?= 3600
export PYTHON JOBS RELEASE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check check-gpu test-cuda sanitize-cuda test-python test-wheel notebooks wheel bench bench-cuda sanitize fuzz lint format docs install clean

help: ## this list
	@echo "make TARGET [PYTHON=/path/to/python3] [JOBS=n]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 18

demo: ## train GraphSAGE on a generated graph with four methods and print one table
	@scripts/build.sh release satchel_tool
	@build/bin/satchel train --data synthetic:arxiv,scale=0.1 --method fp32,exact,blockwise,satchel --epochs 60 --eval-every 5

test: ## every test: the torch-free rooms under ASan + UBSan, all rooms as released
	@scripts/build.sh core-sanitized
	@scripts/test.sh core-sanitized
	@scripts/build.sh release
	@scripts/test.sh release

test-python: ## the tests of the Python package; all of torch comes into .venv-python
	@scripts/test_python.sh

test-wheel: ## one wheel under torch 2.10 and the newest; 5 GB a version, for as long as its tests run
	@scripts/test_wheel.sh

notebooks: ## run the notebooks of examples/notebooks, a minute each; all of torch comes into .venv-python
	@scripts/notebooks.sh

wheel: ## the Python wheel into build/dist, with CUDA kernels where a GPU is present; RELEASE=yes: for every GPU since Ampere
	@scripts/wheel.sh

check: ## what takes longer: the Python package and its notebooks, CUDA kernels and their tests compiled, GPU or not, and the way on CUDA emulated on the CPU, runs killed and resumed, the fuzzers for a minute
	@scripts/build.sh cuda-compile satchel_tool test_cuda satchel_stable
	@scripts/build.sh release satchel_tool test_emulation test_emulated_cuda
	@scripts/test_emulated.sh
	@python3 scripts/kill_test.py 12
	@scripts/test_python.sh
	@scripts/notebooks.sh
	@$(MAKE) --no-print-directory fuzz

check-gpu: ## what only a GPU can show, each part with a limit: tests, compute-sanitizer, the measurements behind the figures; LIMIT=3600 seconds in all
	@scripts/with_gpu.sh scripts/build.sh cuda test_cuda satchel_tool satchel_stable
	@source scripts/setup.sh && all_of_torch requirements-python.txt && "$$TORCH_PYTHON" scripts/check_gpu.py --seconds $(LIMIT)

test-cuda: ## the tests that need a GPU
	@scripts/with_gpu.sh scripts/build.sh cuda test_cuda
	@scripts/test.sh cuda

sanitize-cuda: ## the CUDA kernels' tests under racecheck, memcheck and synccheck; logs in build/sanitize
	@scripts/with_gpu.sh scripts/build.sh cuda test_cuda
	@scripts/sanitize_cuda.sh

bench: ## time the codec and a training step on the CPU
	@scripts/build.sh release satchel_tool
	@build/bin/satchel bench codec
	@build/bin/satchel bench graph

bench-cuda: ## time codec, A·x and training on the GPU beside PyTorch's own ways: JSON, table and pictures in build/bench
	@scripts/with_gpu.sh scripts/build.sh cuda satchel_tool
	@bench/run_cuda.sh

sanitize: ## every test of every room under ASan + UBSan
	@scripts/build.sh dev
	@scripts/test.sh dev

fuzz: ## every parser with made-up input under libFuzzer, ASan + UBSan; FUZZ_SECONDS=60 in all
	@scripts/fuzz.sh

lint: ## clang-format and clang-tidy
	@scripts/lint.sh

format: ## clang-format every source in place
	@scripts/lint.sh --fix

docs: ## the documentation as pages into build/site; MkDocs comes into .venv-docs
	@scripts/docs.sh

install: ## headers, library, tool and CMake package into PREFIX (default /usr/local)
	@scripts/build.sh release
	@scripts/install.sh "$(PREFIX)"

clean: ## remove what was built; .venv stays
	@rm -rf build
