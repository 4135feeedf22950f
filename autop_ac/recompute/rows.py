"""The rows of memory of the budget's linear program, one step at a time; `relax` states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .columns import Columns
from .program import Part, Writer, add

Step = tuple[Literal["forward", "backward"], int]
_CHAINS, _LINKS = 4, 6
_PENDING = 64  # values of a row whose early recomputation is followed


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRow:
    """The row of one step, and the rows that its own columns need.

    Attributes:
        constant: bytes alive whatever is decided.
        part: the rows; the right hand side of the last is less what of the room is taken for sure.
    """

    constant: int
    part: Part

    def within(self, room: float) -> Part:
        """The rows where `room`, in units of bytes, is left."""
        right = self.part.right.copy()
        right[-1] += room
        return Part(
            self.part.shared,
            self.part.own,
            self.part.lengths,
            self.part.index,
            self.part.value,
            right,
        )


def memory_row(columns: Columns, step: Step) -> MemoryRow:
    """The row of memory at a step."""
    side, at = step
    row = _forward_row(columns, at) if side == "forward" else _backward_row(columns, at)
    program = Writer(len(columns.low))
    terms: dict[int, float] = {}
    taken = 0.0
    for i, size in row.terms.items():
        taken += columns.kept(i, size / columns.byte_unit, terms)
    _early(columns, row, program, _Memory(program, terms, columns))
    program.row(terms, -taken)
    return MemoryRow(row.constant, program.part())


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of memory.

    Attributes:
        constant: bytes alive whatever is decided.
        terms: bytes by kept value.
        pending: bytes by value that also counts where it is computed again by then.
        follow: (reader, value, whether backward reads the reader by then): a reader computed again
            by then brings the value.
        chains: (value, readers between, reader): a value that backward does not read itself, and
            one that it reads after the step.
        sizes: bytes of the storages of all readers in `chains` that are not in `constant`.
    """

    constant: int
    terms: dict[int, int]
    pending: dict[int, int]
    follow: tuple[tuple[int, int, bool], ...]
    chains: tuple[tuple[int, tuple[int, ...], int], ...]
    sizes: dict[int, int]


class _Memory:
    """Columns of one row of memory; tied values share theirs, and each counts its own bytes once."""

    def __init__(self, program: Writer, terms: dict[int, float], columns: Columns) -> None:
        self.program, self.terms, self.of = program, terms, columns
        self.known: dict[tuple[str, int, int], int] = {}
        self.counted: set[tuple[str, int, int]] = set()

    def column(self, what: str, i: int, size: int, which: int = 0) -> int:
        """The column that says so of a value, or of one of its storages, of `size` bytes."""
        key = what, self.of.tied.get(i, i), which
        if key not in self.known:
            self.known[key] = self.program.column()
        if (what, i, which) not in self.counted:
            self.counted.add((what, i, which))
            add(self.terms, self.known[key], size / self.of.byte_unit)
        return self.known[key]


def _forward_row(columns: Columns, at: int) -> _Row:
    ev = columns.ev
    alive = (ev.forward_birth <= at) & (ev.forward_death >= at)
    constant = ev.base + int(ev.sizes[alive].sum())
    terms: dict[int, int] = {}
    for s, i in columns.owner.items():
        if i <= at and not alive[s] and ev.sizes[s]:
            terms[i] = terms.get(i, 0) + int(ev.sizes[s])
    return _Row(constant, terms, {}, (), (), {})


def _backward_row(columns: Columns, at: int) -> _Row:
    ev = columns.ev
    key = at * ev.stride + ev.stride - 1
    alive = (ev.birth <= key) & (ev.death >= key)
    for s, spans in columns.intervals.items():
        if any(first <= at <= last for first, last in spans):
            alive[s] = True
    constant = ev.base + int(ev.sizes[alive].sum())
    terms: dict[int, int] = {}
    for s, i in columns.owner.items():
        if columns.hold[i] >= at and not alive[s] and ev.sizes[s]:
            terms[i] = terms.get(i, 0) + int(ev.sizes[s])
    # values read after this step that are computed again before it
    soon = sorted((ev.first[i], -i) for i in terms if at < ev.first[i] <= ev.end)
    pending = {-i: terms[-i] for _, i in soon[:_PENDING]}
    early = ev.earliest()
    follow: list[tuple[int, int, bool]] = []
    made: set[int] = set()
    lowest = min(pending, default=0)
    for i in reversed(columns.values):
        if i < lowest:
            break
        if ev.always_saved(i) or early[i] > at:
            continue
        is_read = ev.first[i] <= at
        if not is_read and i not in made:
            continue
        for u in ev.parents[i]:
            if u >= lowest and ev.first[u] > at and not ev.always_saved(u):
                made.add(u)
                follow.append((i, u, is_read))
    chains = [
        (i, *chain)
        for i in columns.values
        if ev.first[i] > ev.end and not ev.never_saved(i)
        if i not in terms and not any(alive[s] for s in ev.held[i])
        for chain in _chains(columns, i, at)
    ]
    sizes = {
        s: 0 if alive[s] else int(ev.sizes[s])
        for _, between, reader in chains
        for i in (*between, reader)
        for s in ev.held[i]
    }
    return _Row(constant, terms, pending, tuple(follow), tuple(chains), sizes)


def _chains(columns: Columns, start: int, at: int) -> list[tuple[tuple[int, ...], int]]:
    """Ways from a value that backward does not read down to values that it reads after `at`."""
    ev = columns.ev
    found: list[tuple[tuple[int, ...], int]] = []
    own = set(ev.held[start])
    stack: list[tuple[int, tuple[int, ...]]] = [(start, ())]
    while stack and len(found) < _CHAINS:
        i, between = stack.pop()
        for reader in columns.readers[i]:
            if own and own.issuperset(ev.held[reader]) and ev.held[reader]:
                stack.append((reader, between))
            elif at < ev.first[reader] <= ev.end:
                found.append((between, reader))
            elif ev.first[reader] > ev.end and len(between) < _LINKS:
                stack.append((reader, (*between, reader)))
    return found


def _early(columns: Columns, row: _Row, program: Writer, memory: _Memory) -> None:
    """What is computed again by the step of a row, and what is kept until that is done."""

    def again(i: int) -> int:
        return memory.column("again", i, row.pending.get(i, 0))

    def computed(i: int) -> int:
        s = min(columns.ev.held[i], default=-1)
        owner = columns.owner.get(s, -1)
        if owner in row.pending:
            return again(owner)
        holder = columns.holder.get(s, i)
        which = columns.ev.held[holder].index(s) if s >= 0 else 0
        return memory.column("storage", holder, row.sizes.get(s, 0), which)

    for reader, i, is_read in row.follow:
        # y_i >= r_reader or y_reader, less s_i
        source = columns.r[reader] if is_read else again(reader)
        assert source is not None
        bound = {source: 1.0}
        add(bound, again(i), -1.0)
        program.row(bound, -columns.kept(i, -1.0, bound))
    for i, between, reader in row.chains:
        # a kept value that backward does not read itself is alive until what it reads is computed
        last, own = columns.r[reader], columns.r[i]
        assert last is not None
        bound = {last: 1.0}
        add(bound, memory.column("alive", i, columns.ev.bytes_of(i)), -1.0)
        if own is not None:
            add(bound, own, -1.0)
        constant = sum(columns.kept(link, -1.0, bound) for link in between)
        bound |= dict.fromkeys(map(computed, (*between, reader)), -1.0)
        program.row(bound, -constant)
