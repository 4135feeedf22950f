"""Activation checkpointing on its own: a backend of `torch.compile` for a single-device model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any, Literal

import torch

from . import _torch_compile as private
from ._torch_trace import artifact
from .annotate import REGION_PREFIX, ReadsHints
from .capture.joint import Port
from .capture.trace import differentiate
from .config import ACConfig, CompileConfig, ac_config
from .documented import takes_fields
from .errors import ConfigError, UsageError
from .graph.devices import DeviceSpec, described_gpu, find_device
from .lowering.compile import compile_local, decompositions, partition_by
from .lowering.hooks import run_user_passes, user_passes_done
from .recompute.hints import resolve_hints
from .recompute.pipeline import plan_recompute
from .report.build import ACReport, build_report
from .runtime.opaque import is_compiled_already
from .sharding.apply import apply_plan, unsharded

log = logging.getLogger("autop_ac")

Lowered = Callable[..., Any]


class ACBackend(ReadsHints):
    """What `backend` gives: hand it to ``torch.compile(model, backend=...)``."""

    def __init__(self, ac: ACConfig, compile: CompileConfig, device: DeviceSpec | None) -> None:
        super().__init__()
        self.ac = ac
        self.compile = compile
        self.device = device
        self._reports: list[Callable[[], ACReport]] = []

    @property
    def reports(self) -> tuple[ACReport, ...]:
        """One for each graph that was compiled with a backward, in order."""
        return tuple(made() for made in self._reports)

    @property
    def ac_report(self) -> ACReport:
        """Of the graph that was compiled last.

        Raises:
            UsageError: none was compiled with a backward yet.
        """
        if not self._reports:
            raise UsageError(
                "there is no report yet: call the compiled model on inputs, with gradients enabled"
            )
        return self._reports[-1]()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Lowered:
        """Compile one graph of Dynamo's; PyTorch calls this."""
        if is_compiled_already(gm):
            if _has_hints(gm):
                warnings.warn(
                    "this graph calls a parallel module, which is compiled already, and runs as it is: the "
                    "hints beside that call are not read. Compile the code that they stand in by itself",
                    UserWarning,
                    stacklevel=2,
                )
            return gm.forward
        if not _has_backward(gm):
            if self.compile.backend == "eager":
                return gm.forward
            compiled: Lowered = private.compile_fx(gm, example_inputs)
            return compiled
        joint = differentiate(gm, _ports(gm))
        backend = self.compile.backend
        local = apply_plan(joint, unsharded(joint), None, decompositions(joint, backend))
        local = run_user_passes(local, joint, backend)
        device = self.device or _device_of(gm)
        recompute = plan_recompute(
            local,
            resolve_hints(joint.module, joint.placeholders, joint.module_prefix),
            self.ac,
            device,
            {},
            reshard_after_forward=True,
        )
        with user_passes_done():
            made = compile_local(joint, local.module, partition_by(recompute), backend)
        report = cache(lambda: build_report(recompute, None, device=device, config=self.ac))
        self._reports.append(report)
        artifact("report", lambda: report().to_json(), "json")
        for note in recompute.plan.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        log.info("compiled a graph of %d nodes", len(local.module.graph.nodes))
        return made


@takes_fields(ACConfig)
def backend(
    config: ACConfig | None = None,
    /,
    *,
    compile: Literal["eager", "inductor"] = "inductor",
    device: str | DeviceSpec | None = None,
    **settings: Any,
) -> ACBackend:
    """A backend of `torch.compile` with the hints, rules, stages, budgets and report of autop_ac::

        ac = autop_ac.backend(stage_size="auto")
        model = torch.compile(model, backend=ac)
        model(x).sum().backward()
        print(ac.ac_report)

    Make one for each model: a changed policy is another backend, and compiles again.

    Args:
        config: an `ACConfig` in place of its fields as keywords.
        compile: Inductor, or the two graphs run node by node.
        device: what the model runs on, for predicted times; None for the device of its inputs.

    Raises:
        ConfigError: a setting is out of range.
    """
    described = None if device is None else find_device(device)
    return ACBackend(ac_config(config, settings), CompileConfig(compile), described)


def autoparallel_backend(
    *,
    enable_ac: bool = True,
    ac_stage_size_in_GiB: float | str | None = "auto",
    overlap_scheduling: bool = True,
) -> ACBackend:
    """`backend` under the name and keywords that the public AutoParallel project gives it.

    Args:
        enable_ac: as ``enable`` of `ACConfig`.
        ac_stage_size_in_GiB: as ``stage_size``, a number of GiB; ``"auto"`` and None are both ``"auto"``.
        overlap_scheduling: accepted, and read by nothing: a single device has no collectives, and those of
            a parallel module are ordered where it is made, by ``configure_comm``.

    Raises:
        ConfigError: a setting is out of range.
    """
    if not isinstance(overlap_scheduling, bool):
        raise ConfigError(f"overlap_scheduling={overlap_scheduling!r}: allowed are True and False")
    size: Any = "auto" if ac_stage_size_in_GiB is None else ac_stage_size_in_GiB
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        size = f"{Decimal(repr(size)):f} GiB"  # exactly as written: 0.1 is a tenth
    return backend(enable=enable_ac, stage_size=size)


def _has_hints(gm: torch.fx.GraphModule) -> bool:
    return any(
        str(node.target).startswith("autop_ac.mark")
        or any(key.startswith(REGION_PREFIX) for key in node.meta.get("custom") or {})
        for node in gm.graph.nodes
    )


def _has_backward(gm: torch.fx.GraphModule) -> bool:
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    results = gm.graph.output_node().all_input_nodes
    given = [n.meta.get("example_value") for n in results]
    differentiable = any(isinstance(v, torch.Tensor) and v.requires_grad for v in given)
    return torch.is_grad_enabled() and differentiable and any(v.requires_grad for v in tensors)


def _ports(gm: torch.fx.GraphModule) -> list[Port]:
    ports = []
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta["example_value"]
        if isinstance(value, torch.nn.Parameter):
            ports.append(Port("parameter", node.name, i))
        else:
            static = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
            ports.append(Port("buffer" if static else "input", node.name, i))
    return ports


def _device_of(gm: torch.fx.GraphModule) -> DeviceSpec:
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    types = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return described_gpu(torch.cuda.get_device_name()) if "cuda" in types else find_device("cpu")
