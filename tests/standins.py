"""Small models with the shape of code that users bring: Hugging Face's, and modules in wrappers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autop_ac import MATMUL, ac_region, checkpoint_name

aten = torch.ops.aten
WIDTH = 8


@dataclass
class Output:
    """Several outputs by name, of which some may be missing, as ModelOutput has them."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None


torch.export.register_dataclass(Output)


class Conv1D(nn.Module):
    """A linear layer with its weight transposed: `addmm` on a flat view, and a view of that."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.bias.numel())


class Attention(nn.Module):
    def __init__(self, linear) -> None:
        super().__init__()
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)

    def forward(self, x):
        qkv = checkpoint_name(self.qkv(x), "qkv")
        query, key, value = qkv.split(WIDTH, dim=-1)
        scores = (query @ key.transpose(-1, -2) / math.sqrt(WIDTH)).softmax(-1)
        return checkpoint_name(self.out(scores @ value), "attention_out")


class Mlp(nn.Module):
    def __init__(self, linear) -> None:
        super().__init__()
        self.up = linear(WIDTH, 2 * WIDTH)
        self.down = linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(checkpoint_name(self.up(x), "up").tanh())


class Layer(nn.Module):
    """Recomputed as a whole where the model says so, in its `__call__`, as a layer of theirs is."""

    gradient_checkpointing = False

    def __init__(self, linear, region) -> None:
        super().__init__()
        self.attention = Attention(linear)
        self.mlp = Mlp(linear)
        self.region = region

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self.checkpoint(partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)

    def forward(self, x, scale=1.0):
        if self.region is None:
            x = x + self.attention(x)
            return x + scale * self.mlp(x)
        with ac_region("layer", **self.region):
            x = x + self.attention(x)
            return x + scale * self.mlp(x)


class Model(nn.Module):
    """Two layers and a head; `region` are the settings of an `ac_region` in each layer."""

    def __init__(self, linear=Conv1D, region=None, layers=2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(linear, region) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        settings = {"use_reentrant": True} | (gradient_checkpointing_kwargs or {})
        for layer in self.layers:
            layer.gradient_checkpointing = True
            layer.checkpoint = partial(checkpoint, **settings)

    def forward(self, x):
        x = self.embed(x)
        hidden = (x,)
        for layer in self.layers:
            x = layer(x, scale=0.5)
            hidden = (*hidden, x)
        return Output(logits=self.head(x), hidden=hidden)


BIASED = nn.Linear
UNBIASED = partial(nn.Linear, bias=False)
MATMULS = {"save": [MATMUL]}
