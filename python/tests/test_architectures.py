"""Five unmodified architectures, narrow forms of them: two steps and the mean of many draws, by packing() and by the compiled pass.

bench/architectures.py has these and 28 more; here are the quick ones of each kind: batch norms and concatenation, windows of attention, mixing of
tokens, a language model with dropout, and one with gates and rotary positions.
"""

import argparse
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import architectures

OPTIONS = argparse.Namespace(small=True, device="cpu", dtype="fp32", inductor=False)


@pytest.mark.parametrize("way", ["packing", "compile"])
@pytest.mark.parametrize("name, package, least", [
    ("densenet", "torchvision", (9, 6.5)), ("swin", "torchvision", (7.5, 5)), ("mixer", "timm", (9, 7.5)), ("gpt2", "transformers", (7.5, 5)),
    ("llama", "transformers", (6.5, 5.5)),
])  # fmt: skip
def test_architecture(name, package, least, way, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.setattr(architectures, "DRAWS", 32)
    torch._dynamo.reset()
    result = getattr(architectures.Run(name, OPTIONS), way)()
    assert architectures.passed(result), result
    assert result["before"] > least[way == "compile"] * result["after"], result


def test_attach_trains_a_detector():
    """Boxes are chosen by the data: shapes change, and much is indexed."""
    pytest.importorskip("torchvision")
    result = architectures.Run("retinanet", OPTIONS).attach()
    assert result["before"] > 4 * result["after"], result
