"""The fake process group of torch's tests. Seen in torch 2.13.0; no public replacement yet."""

from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore"]
