"""A Llama as a plain module: grouped-query attention, rotary positions, RMS norm, SwiGLU."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes; the defaults are those of Llama 3 8B."""

    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    layers: int = 32
    sequence: int = 8192
    rope_theta: float = 500000.0


class RMSNorm(torch.nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).type_as(x) * self.weight


def rotate(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).type_as(x)


class Attention(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.size = config.dim // config.heads
        self.wq = torch.nn.Linear(config.dim, config.heads * self.size, bias=False)
        self.wk = torch.nn.Linear(config.dim, config.kv_heads * self.size, bias=False)
        self.wv = torch.nn.Linear(config.dim, config.kv_heads * self.size, bias=False)
        self.wo = torch.nn.Linear(config.heads * self.size, config.dim, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k = k.repeat_interleave(groups, 1) if groups > 1 else k
        v = v.repeat_interleave(groups, 1) if groups > 1 else v
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = torch.nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = torch.nn.Linear(config.ffn, config.dim, bias=False)
        self.w3 = torch.nn.Linear(config.dim, config.ffn, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tok_embeddings = torch.nn.Embedding(config.vocab, config.dim)
        self.layers = torch.nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = torch.nn.Linear(config.dim, config.vocab, bias=False)
        half = config.dim // config.heads // 2
        inverse = config.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(config.sequence, dtype=torch.float32), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))
