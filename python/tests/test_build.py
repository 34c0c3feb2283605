"""What pip installs to build the wheel: nvcc where there is a GPU and no toolkit that fits."""

import importlib.util
import pathlib

import pytest

pytest.importorskip("scikit_build_core")
_FILE = pathlib.Path(__file__).parents[1] / "build_backend.py"
if not _FILE.exists():  # an installed package has none
    pytest.skip("not a clone", allow_module_level=True)
_spec = importlib.util.spec_from_file_location("build_backend", _FILE)
assert _spec is not None and _spec.loader is not None
backend = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(backend)


def program(folder, name, prints, fails=False):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {int(fails)}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without GPU and toolkit, in the clone, as pip calls the backend."""
    monkeypatch.chdir(_FILE.parents[1])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDACXX", raising=False)
    return tmp_path


def wants_nvcc(settings=None):
    found = backend.get_requires_for_build_wheel(settings)
    assert [r for r in found if "nvcc" in r] == [r for r in backend.get_requires_for_build_editable(settings) if "nvcc" in r]
    return any("nvcc" in requirement for requirement in found)


def test_no_gpu(machine):
    assert not wants_nvcc()
    assert wants_nvcc({"cmake.define.SATCHEL_CUDA": "ON"})


@pytest.mark.parametrize(("capability", "wanted"), [("8.0", True), ("12.0", True), ("7.5\n9.0", True), ("7.5", False)])
def test_gpu(machine, capability, wanted):
    program(machine / "bin", "nvidia-smi", capability)
    assert wants_nvcc() == wanted
    assert not wants_nvcc({"cmake.define.SATCHEL_CUDA": "OFF"})


def test_driver_that_fails(machine):
    program(machine / "bin", "nvidia-smi", "9.0", fails=True)
    assert not wants_nvcc()


@pytest.mark.parametrize(("version", "wanted"), [("release 13.0, V13.0.88", False), ("release 12.8, V12.8.1", True)])
@pytest.mark.parametrize("place", ["bin", "toolkit/bin"])
def test_toolkit(machine, place, version, wanted):
    program(machine / "bin", "nvidia-smi", "9.0")
    program(machine / place, "nvcc", f"Cuda compilation tools, {version}")
    assert wants_nvcc() == wanted


def test_compiler_given(machine, monkeypatch):
    program(machine / "bin", "nvidia-smi", "9.0")
    monkeypatch.setenv("CUDACXX", str(program(machine / "own", "nvcc-13", "release 13.2, V13.2.1")))
    assert not wants_nvcc()


def test_torch_is_always_there(machine):
    def torch():
        return [r for r in backend.get_requires_for_build_wheel() if r.startswith("torch")]

    assert torch() == ["torch>=2.10"]
    program(machine / "bin", "nvidia-smi", "9.0")
    assert torch() == ["torch==2.11.*"]  # the one whose CUDA libraries are of the pinned nvcc's version


def test_metadata_comes_without_a_compiler(machine):
    """Else pip compiles for minutes while it says "Preparing metadata"."""
    found = machine / "metadata" / backend.prepare_metadata_for_build_wheel(str(machine / "metadata"))
    assert "Name: satchel" in (found / "METADATA").read_text()
