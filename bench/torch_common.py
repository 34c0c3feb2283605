"""What graph_torch.py and image_torch.py share: memory, attempts that may fail, and arguments."""
import argparse
import gc

import torch


class Meter:
    """Memory of torch's caching allocator; on the CPU there is none to ask, and all is 0."""

    def __init__(self, device):
        self.cuda = device == "cuda"

    def allocated(self):
        return torch.cuda.memory_allocated() if self.cuda else 0

    def requested(self):
        """Bytes that tensors asked for: as satchel::MemoryMeter's, without what blocks exceed them by."""
        if not self.cuda:
            return 0
        stats = torch.cuda.memory_stats()
        requested, active, allocated = (stats.get(f"{name}_bytes.all.current", 0) for name in ("requested", "active", "allocated"))
        return requested - (active - allocated) if requested else allocated

    def reset_peak(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()


def attempt(what):
    """What it returns, or why not; all it held is free again."""
    try:
        return what(), None
    except torch.OutOfMemoryError:
        return None, "out of memory"
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except Exception as error:  # a baseline that fails is a result too
        return None, f"{type(error).__name__}: {error}".split("\n")[0][:300]
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def at_least(least, kind=int):
    def parse(text):
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value
    return parse
