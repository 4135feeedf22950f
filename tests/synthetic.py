"""Joint graphs of repeated layers as facts, of any size, without torch: forward and its derivative."""

from __future__ import annotations

from autop_ac.graph.facts import Facts, Value


class Tape:
    """Forward operators in order; `facts` adds backward in the opposite order."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.sizes: list[int] = []
        self.tape: list[tuple[int, tuple[int, ...], tuple[int, ...], float]] = []

    def _add(self, op, side, inputs, nbytes, time_s=0.0, **more) -> int:
        index = len(self.values)
        self.sizes.append(nbytes)
        self.values.append(
            Value(index, f"v{index}", op, side, tuple(dict.fromkeys(inputs)), bytes=nbytes,
                  storages=(len(self.sizes) - 1,), time_s=time_s, **more)
        )  # fmt: skip
        return index

    def input(self, nbytes, role="input") -> int:
        return self._add("placeholder", "input", (), nbytes, role=role)

    def op(self, name, inputs, nbytes, time_s, reads, module="") -> int:
        """One operator; its derivative reads `reads` (None stands for the result itself)."""
        made = self._add(f"aten.{name}.default", "forward", inputs, nbytes, time_s, module=module)
        read = tuple(made if r is None else r for r in reads)
        self.tape.append((made, tuple(inputs), read, time_s))
        return made

    def view(self, source, module="") -> int:
        index = len(self.values)
        held = self.values[source].storages
        self.values.append(
            Value(index, f"v{index}", "aten.view.default", "forward", (source,), storages=held,
                  follows=source, module=module)
        )  # fmt: skip
        self.tape.append((index, (source,), (), 0.0))
        return index

    def facts(self, output) -> Facts:
        gradient = {
            output: self._add("placeholder", "input", (), self.sizes_of(output), role="tangent")
        }
        for made, inputs, read, time_s in reversed(self.tape):
            if made not in gradient:
                continue
            for source in inputs:
                if self.values[source].role == "input":
                    continue
                new = self._add("aten.grad.default", "backward", (gradient[made], *read),
                                self.sizes_of(source), time_s, module=self.values[made].module)  # fmt: skip
                if source in gradient:
                    new = self._add("aten.add.Tensor", "backward", (gradient[source], new),
                                    self.sizes_of(source))  # fmt: skip
                gradient[source] = new
        parameters = [v.index for v in self.values if v.role == "parameter"]
        results = tuple(gradient[p] for p in parameters if p in gradient)
        return Facts(
            tuple(self.values), (output,), results, tuple(self.sizes),
            sum(self.values[p].bytes for p in parameters),
        )  # fmt: skip

    def sizes_of(self, index) -> int:
        return sum(self.sizes[s] for s in self.values[index].storages)


def transformer(layers, width=64, tokens=96, weight=12, head=True, named=True) -> Facts:
    """Residual layers with norms, attention and a gated product; sizes in small integers.

    Args:
        layers: how many.  width: of the residual stream.  tokens: rows.
        weight: parameter bytes of each product; large ones make gradients hold the peak.
        head: a wide product at the end, whose result holds the peak.
    """
    tape = Tape()
    x = tape.input(tokens * 8)
    table = tape.input(weight, "parameter")
    small = tokens * width
    x = tape.op("embedding", (table, x), small, small / 1e6, ())
    weights = [[tape.input(weight, "parameter") for _ in range(6)] for _ in range(layers)]
    last = tape.input(weight, "parameter")

    def product(source, w, nbytes, module):
        read = tape.view(source, module)
        cost = tokens * width * nbytes / tokens / 1e5
        return tape.op("mm", (read, w), nbytes, cost, (read, w), module)

    def norm(source, module):
        wide = tape.op("_to_copy", (source,), 2 * small, small / 1e6, (), module)
        scale = tape.op("rsqrt", (wide,), tokens * 4, small / 1e6, (wide, None), module)
        return tape.op("mul", (wide, scale), small, small / 1e6, (wide, scale), module)

    for k, (qkv, out, gate, up, down, _) in enumerate(weights):
        module = f"layers.{k}" if named else ""
        read = norm(x, module)
        heads = product(read, qkv, 3 * small, module)
        mixed = tape.op(
            "attention", (heads,), small, 4 * small * tokens / 1e6, (heads, None), module
        )
        x = tape.op("add", (x, product(mixed, out, small, module)), small, small / 1e6, (), module)
        read = norm(x, module)
        one, two = product(read, gate, 4 * small, module), product(read, up, 4 * small, module)
        gated = tape.op("silu", (one,), 4 * small, 4 * small / 1e6, (one,), module)
        both = tape.op("mul", (gated, two), 4 * small, 8 * small / 1e6, (gated, two), module)
        x = tape.op("add", (x, product(both, down, small, module)), small, small / 1e6, (), module)
    if head:
        x = product(norm(x, ""), last, 40 * small, "")
        x = tape.op("loss", (x,), 4, small / 1e4, (x,))
    return tape.facts(x)
