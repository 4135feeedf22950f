"""Predicted peak against the bytes alive while a training step really runs, node by node on CPU.

One process: gloo's own threads let go of gathered weights at a time of their choosing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autop_ac import AutoParallel, launch, measure_memory
from tests.benchmarks.llama import Llama, LlamaConfig
from tests.gpt import GPT, GPTConfig

VOCABULARY, BATCH, LENGTH = 2048, 8, 128
BLOCKS = {"gpt": "blocks", "llama": "layers"}
POLICIES: dict[str, dict[str, Any]] = {
    "off": {"enable": False},
    "staged, auto": {},
    "staged, 64 MiB": {"stage_size": "64 MiB"},
    "matmuls kept": {"stage_size": None, "rules": ["BLOCKS.*::MATMUL=save", "BLOCKS.*=recompute"]},
    "full per block": {"stage_size": None, "rules": ["BLOCKS.*=recompute"]},
    "budget, 0.7": {"memory_budget": 0.7},
    "budget, 0.5": {"memory_budget": 0.5},
}


def _model(name: str) -> torch.nn.Module:
    if name == "gpt":
        return GPT(GPTConfig(VOCABULARY, dim=256, heads=8, layers=4, context=LENGTH))
    return Llama(
        LlamaConfig(
            dim=256, heads=8, kv_heads=2, ffn=768, vocab=VOCABULARY, layers=4, sequence=LENGTH
        )
    )


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _measured() -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    rows = []
    for name, blocks in BLOCKS.items():
        for policy, settings in POLICIES.items():
            ac = {
                **settings,
                "rules": [r.replace("BLOCKS", blocks) for r in settings.get("rules", ())],
            }
            rows.append({"kind": "peak", "model": name, "policy": policy, **_step(name, ac, mesh)})
    return rows


def _step(name: str, ac: dict[str, Any], mesh: Any) -> dict[str, Any]:
    def inputs():
        return tuple(torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(2))

    ap = AutoParallel(_model(name), inputs, mesh, loss_fn=_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rules that leave biased linears out are meant so
        with ap.configure_ac(**ac).configure_compile("eager"):
            parallel = ap.apply_placement(ap.optimize_placement())
    given = inputs()
    with measure_memory() as measured:
        parallel(*given).backward()
    tensors = (*parallel.parameters(), *parallel.buffers(), *given)
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    held = sum(t.numel() * t.element_size() for t in local)
    peak = held + measured.peak_bytes
    predicted = ap.ac_report.peak_bytes
    return {
        "predicted_bytes": predicted,
        "measured_bytes": peak,
        "off_by": round(predicted / peak - 1, 4),
    }


def peak() -> Iterator[dict[str, Any]]:
    """A row for each model and policy."""
    (rows,) = launch(_measured, 1)
    yield from rows
