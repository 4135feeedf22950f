"""A small GPT for tests and benchmarks: SDPA, layer norm, embeddings, biased linears."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from autop_ac import MATMUL, ac_region


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 64
    dim: int = 32
    heads: int = 4
    layers: int = 2
    context: int = 16
    dropout: float = 0.0
    tied: bool = True
    bias: bool = True


class Attention(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = torch.nn.Linear(config.dim, 3 * config.dim, config.bias)
        self.project = torch.nn.Linear(config.dim, config.dim, config.bias)

    def forward(self, x):
        batch, length, dim = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.project(out.transpose(1, 2).reshape(batch, length, dim))
        return F.dropout(out, self.dropout, self.training)


class Block(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = torch.nn.LayerNorm(config.dim)
        self.up = torch.nn.Linear(config.dim, 4 * config.dim, config.bias)
        self.down = torch.nn.Linear(4 * config.dim, config.dim, config.bias)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    def __init__(self, config=GPTConfig()):
        super().__init__()
        self.config = config
        self.tokens = torch.nn.Embedding(config.vocab_size, config.dim)
        self.positions = torch.nn.Embedding(config.context, config.dim)
        self.blocks = torch.nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = torch.nn.LayerNorm(config.dim)
        self.unembed = torch.nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.unembed.weight = self.tokens.weight

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                torch.nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                torch.nn.init.zeros_(module.bias)
            if isinstance(module, torch.nn.LayerNorm):
                module.reset_parameters()

    def embed(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(places)

    def head(self, x):
        return self.unembed(self.norm(x))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HintedGPT(GPT):
    """The same with a region around each block that keeps what `save` selects."""

    save = (MATMUL,)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            with ac_region("block", save=self.save):
                x = block(x)
        return self.head(x)


class RecomputedGPT(GPT):
    """Everything in the blocks is recomputed."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            with ac_region():
                x = block(x)
        return self.head(x)


def mean_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
