"""Colours of those who hold memory, the same on the page and in figures."""

from __future__ import annotations

from collections.abc import Mapping

COLOURS: Mapping[str, tuple[str, str]] = {
    "parameters": ("#5b6b82", "#7587a0"),
    "optimizer state": ("#8797ad", "#56667d"),
    "inputs": ("#b8c4d3", "#3d4b60"),
    "gathered weights": ("#8b5cf6", "#a78bfa"),
    "saved activations": ("#2563eb", "#5b9bff"),
    "outputs": ("#0d9488", "#2dd4bf"),
    "recomputed": ("#ea8a0c", "#fbbf24"),
    "gradients": ("#16a34a", "#4ade80"),
    "temporaries": ("#db5c9c", "#f08bbd"),
}
"""On a light and on a dark ground: what is alive throughout in greys, what AC decides in blue and orange."""
