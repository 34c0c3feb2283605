# Satchel's front door: every target sets the machine up, builds what it needs, and runs. A second call does no work twice.
# PYTHON=/path/to/python3 uses that Python's torch and downloads nothing.
SHELL := /bin/bash
PYTHON ?=
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
export PYTHON JOBS

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-cuda bench bench-cuda sanitize lint format install clean

help: ## this list
	@echo "make TARGET [PYTHON=/path/to/python3] [JOBS=n]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 14

demo: ## pack a tensor with every preset and print one table
	@scripts/build.sh release satchel_tool
	@build/bin/satchel demo

test: ## every test: the torch-free rooms under ASan + UBSan, then all rooms as released
	@scripts/build.sh core-sanitized
	@scripts/test.sh core-sanitized
	@scripts/build.sh release
	@scripts/test.sh release

test-cuda: ## the tests that need a GPU
	@scripts/with_gpu.sh scripts/build.sh cuda test_cuda
	@scripts/test.sh cuda

bench: ## time the codec on the CPU
	@scripts/build.sh release satchel_tool
	@build/bin/satchel bench codec

bench-cuda: ## time the codec on the GPU
	@scripts/with_gpu.sh scripts/build.sh cuda satchel_tool
	@build/bin/satchel bench codec --device cuda

sanitize: ## every test of every room under ASan + UBSan
	@scripts/build.sh dev
	@scripts/test.sh dev

lint: ## clang-format and clang-tidy
	@scripts/lint.sh

format: ## clang-format every source in place
	@scripts/lint.sh --fix

install: ## headers, library, tool and CMake package into PREFIX (default /usr/local)
	@scripts/build.sh release
	@scripts/install.sh "$(PREFIX)"

clean: ## remove what was built; .venv stays
	@rm -rf build
