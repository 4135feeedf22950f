"""Small models of the kinds that people train, each with every operator of its kind.

`MODELS` has, by name, a function that gives a model and its inputs in global shapes. Widths are small
and divide by four; dropout is off, so that gradients can be compared.
"""

import math

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.nn import functional as F

from tests.benchmarks.llama import Llama, LlamaConfig, RMSNorm

BATCH, LENGTH, DIM, HEADS, VOCAB = 8, 16, 16, 4, 32


def heads_of(x, heads=HEADS):
    batch, length, dim = x.shape
    return x.view(batch, length, heads, dim // heads).transpose(1, 2)


def flat(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def tokens(high=VOCAB):
    return torch.randint(0, high, (BATCH, LENGTH))


# ------------------------------------------------------------- GPT-2


class Conv1D(nn.Module):
    """A linear layer with its weight transposed, as GPT-2 has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.size()[:-1], self.bias.numel())


class GPT2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.c_attn, self.c_proj = Conv1D(DIM, 3 * DIM), Conv1D(DIM, DIM)
        self.c_fc, self.mlp_proj = Conv1D(DIM, 4 * DIM), Conv1D(4 * DIM, DIM)

    def forward(self, x):
        q, k, v = map(heads_of, self.c_attn(self.ln_1(x)).split(DIM, dim=2))
        x = x + self.c_proj(flat(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.h = nn.ModuleList(GPT2Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.wte(ids) + self.wpe(places)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# ------------------------------------------------------------- T5


def relative_buckets(queries, keys, buckets=8, farthest=16, both_ways=True):
    """Distances in buckets that grow with the distance."""
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    found = torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        found = found + (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -torch.min(distance, torch.zeros_like(distance))
    exact = buckets // 2
    far = exact + (
        torch.log(distance.clamp(min=1).float() / exact)
        / math.log(farthest / exact)
        * (buckets - exact)
    )
    far = torch.min(far.long(), torch.full_like(distance, buckets - 1))
    return found + torch.where(distance < exact, distance, far)


class T5Attention(nn.Module):
    def __init__(self, causal=False, biased=False):
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.bias = nn.Embedding(8, HEADS) if biased else None

    def forward(self, x, other=None, bias=None):
        other = x if other is None else other
        q, k, v = heads_of(self.q(x)), heads_of(self.k(other)), heads_of(self.v(other))
        if self.bias is not None:
            table = self.bias(relative_buckets(q.shape[2], k.shape[2], both_ways=not self.causal))
            bias = table.permute(2, 0, 1).unsqueeze(0)
        scores = torch.matmul(q, k.transpose(3, 2))
        if bias is not None:
            scores = scores + bias
        if self.causal:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -1e9)
        weights = F.softmax(scores, dim=-1).type_as(scores)
        return self.o(flat(torch.matmul(weights, v))), bias


class T5Layer(nn.Module):
    def __init__(self, causal, biased):
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(DIM) for _ in range(3 if causal else 2))
        self.own = T5Attention(causal, biased)
        self.cross = T5Attention() if causal else None
        self.wi_0, self.wi_1 = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.wo = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x, bias, encoded=None):
        attended, bias = self.own(self.norms[0](x), bias=bias)
        x = x + attended
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), encoded)[0]
        y = self.norms[-1](x)
        return x + self.wo(F.gelu(self.wi_0(y), approximate="tanh") * self.wi_1(y)), bias


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.ModuleList(T5Layer(False, i == 0) for i in range(2))
        self.decoder = nn.ModuleList(T5Layer(True, i == 0) for i in range(2))
        self.encoder_norm, self.decoder_norm = RMSNorm(DIM), RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, source, target):
        x, bias = self.shared(source), None
        for layer in self.encoder:
            x, bias = layer(x, bias)
        encoded, bias = self.encoder_norm(x), None
        # what the decoder reads is the target, one place later
        shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
        y = self.shared(shifted)
        for layer in self.decoder:
            y, bias = layer(y, bias, encoded)
        return self.lm_head(self.decoder_norm(y) * DIM**-0.5)


# ------------------------------------------------------------- BERT


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(DIM, DIM) for _ in range(4))
        self.intermediate, self.output = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x, mask):
        q, k, v = heads_of(self.query(x)), heads_of(self.key(x)), heads_of(self.value(x))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm_1(x + self.dense(flat(attended)))
        return self.norm_2(x + self.output(F.gelu(self.intermediate(x))))


class Bert(nn.Module):
    """With padding: a mask of the shape that Hugging Face gives it; a pooler and a language head."""

    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Embedding(LENGTH, DIM)
        self.kind = nn.Embedding(2, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(BertLayer() for _ in range(2))
        self.pooler = nn.Linear(DIM, DIM)
        self.head, self.bias = nn.Linear(DIM, VOCAB, bias=False), nn.Parameter(torch.zeros(VOCAB))
        self.register_buffer("ids", torch.arange(LENGTH).expand(1, -1), persistent=False)

    def forward(self, ids, kinds, mask):
        x = self.word(ids) + self.place(self.ids[:, : ids.shape[1]]) + self.kind(kinds)
        x = self.norm(x)
        wide = mask[:, None, None, :].to(x.dtype).expand(-1, 1, ids.shape[1], -1)
        wide = (1.0 - wide) * -1e4
        for layer in self.layers:
            x = layer(x, wide)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return self.head(x) + self.bias, pooled


def bert_inputs():
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    mask = (torch.arange(LENGTH)[None] < lengths).long()
    return tokens() * mask, tokens(2), mask


# ------------------------------------------------------------- ViT


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))
        self.place = nn.Parameter(torch.randn(1, 17, DIM))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                DIM, HEADS, 4 * DIM, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 8)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


# ------------------------------------------------------------- Mixtral


class Experts(nn.Module):
    """Two of eight experts for each token; every expert computes every token, weighted."""

    def __init__(self, experts=8, top=2):
        super().__init__()
        self.experts, self.top = experts, top
        self.gate = nn.Linear(DIM, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, DIM, 2 * DIM) / DIM**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * DIM, DIM) / DIM**0.5)
        self.w3 = nn.Parameter(torch.randn(experts, DIM, 2 * DIM) / DIM**0.5)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        logits = self.gate(rows)
        weights, chosen = F.softmax(logits, dim=-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = self.mixed(rows, weights, chosen, logits)
        share = F.one_hot(chosen, self.experts).sum(1).to(x.dtype).mean(0)
        return mixed.view_as(x), (share * logits.softmax(-1).mean(0)).sum() * self.experts

    def mixed(self, rows, weights, chosen, logits):
        dense = torch.zeros_like(logits).scatter(1, chosen, weights)
        hidden = F.silu(torch.einsum("td,edf->etf", rows, self.w1))
        hidden = hidden * torch.einsum("td,edf->etf", rows, self.w3)
        out = torch.bmm(hidden, self.w2)
        return torch.einsum("etd,te->td", out, dense)


class DispatchedExperts(Experts):
    """The same, tokens sent to the devices that have their experts and back, by hand.

    On one mesh axis each device has the tokens of its part of the batch and some experts; along the other
    axes it has copies of these experts and other tokens.
    """

    def __init__(self, mesh, experts=8):
        super().__init__(experts)
        self.mesh = mesh
        others = mesh.ndim - 1
        tokens, parts = (Shard(0),) * mesh.ndim, (Replicate(),) * others + (Shard(0),)
        self.dispatched = local_map(
            self.dispatch, (tokens,), (tokens,) * 3 + (parts,) * 3,
            redistribute_inputs=True, device_mesh=mesh,
        )  # fmt: skip

    def dispatch(self, rows, weights, chosen, w1, w2, w3):
        group = self.mesh.get_group(self.mesh.ndim - 1)
        count, width = rows.shape
        # every expert has room for every token that this device has: none is left out
        places = F.one_hot(chosen.flatten(), self.experts).cumsum(0)
        place = places.gather(1, chosen.view(-1, 1)).flatten() - 1
        slot = chosen.flatten() * (count * self.top) + place
        sent = rows.repeat_interleave(self.top, 0)
        room = rows.new_zeros(self.experts * count * self.top, width)
        room = room.index_put((slot,), sent)
        here = funcol.all_to_all_single(room, None, None, group)
        # from each device, for each expert that is here
        own = w1.shape[0]
        here = here.view(-1, own, count * self.top, width)
        hidden = F.silu(torch.einsum("secd,edf->secf", here, w1))
        hidden = hidden * torch.einsum("secd,edf->secf", here, w3)
        out = torch.einsum("secf,efd->secd", hidden, w2).reshape(room.shape)
        back = funcol.all_to_all_single(out, None, None, group)
        return (back[slot].view(count, self.top, width) * weights.unsqueeze(-1)).sum(1)

    def mixed(self, rows, weights, chosen, logits):
        return self.dispatched(rows, weights, chosen, self.w1, self.w2, self.w3)


class MixtralLayer(nn.Module):
    def __init__(self, mesh=None):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(DIM), RMSNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.experts = Experts() if mesh is None else DispatchedExperts(mesh)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).split([DIM, DIM // 2, DIM // 2], -1)
        q, k, v = heads_of(q), heads_of(k, 2), heads_of(v, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(flat(y))
        mixed, balance = self.experts(self.norm_2(x))
        return x + mixed, balance


class Mixtral(nn.Module):
    """With a mesh, its experts are dispatched by hand for it."""

    def __init__(self, mesh=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(MixtralLayer(mesh) for _ in range(2))
        self.norm, self.head = RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x, balances = self.embed(ids), []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).sum()


# ------------------------------------------------------------- state space


class StateSpace(nn.Module):
    """A selective state space: a causal convolution of each channel, decays, a scan in chunks."""

    def __init__(self, inner=2 * DIM, heads=4, states=8, chunk=4):
        super().__init__()
        self.inner, self.heads, self.states, self.chunk = inner, heads, states, chunk
        self.wide = nn.Linear(DIM, 2 * inner + 2 * states + heads, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.decay, self.skip = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.ones(heads))
        self.step = nn.Parameter(torch.zeros(heads))
        self.norm, self.out = RMSNorm(inner), nn.Linear(inner, DIM, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        sizes = [self.inner, self.inner, self.states, self.states, self.heads]
        z, u, b, c, dt = self.wide(x).split(sizes, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length]).transpose(1, 2)
        dt = F.softplus(dt + self.step)
        a = -torch.exp(self.decay) * dt
        u = u.reshape(batch, length, self.heads, -1)
        y = self.scan(u * dt.unsqueeze(-1), a, b, c) + u * self.skip[:, None]
        return self.out(self.norm(y.reshape(batch, length, -1) * F.silu(z)))

    def scan(self, u, a, b, c):
        batch, length, heads, width = u.shape
        shape = (batch, length // self.chunk, self.chunk)
        u, a = u.reshape(*shape, heads, width), a.reshape(*shape, heads).permute(0, 3, 1, 2)
        b, c = b.reshape(*shape, -1), c.reshape(*shape, -1)
        total = a.cumsum(-1)
        later = torch.ones(self.chunk, self.chunk, dtype=torch.bool).tril()
        within = (total[..., :, None] - total[..., None, :]).masked_fill(~later, -torch.inf).exp()
        inside = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, within, u)
        last = torch.exp(total[..., -1:] - total)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, last, u)
        held, before = torch.zeros_like(states[:, 0]), []
        for i in range(shape[1]):
            before.append(held)
            held = held * total[:, :, i, -1].exp()[..., None, None] + states[:, i]
        across = torch.einsum("bcln,bchpn,bhcl->bclhp", c, torch.stack(before, 1), torch.exp(total))
        return (inside + across).reshape(batch, length, heads, width)


class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(RMSNorm(DIM) for _ in range(2))
        self.layers = nn.ModuleList(StateSpace() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


# ------------------------------------------------------------- ResNet


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.down = None
        if stride > 1:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.fc = nn.Linear(16, 8)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


# ------------------------------------------------------------- U-Net


class TimeBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(DIM, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class CrossBlock(nn.Module):
    """Pixels attend to pixels, and to a text."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.enter = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.own, self.cross = (
            nn.MultiheadAttention(channels, HEADS, batch_first=True, kdim=k, vdim=k)
            for k in (channels, DIM)
        )
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(2 * channels, channels)
        self.leave = nn.Conv2d(channels, channels, 1)

    def forward(self, x, text):
        batch, channels, height, width = x.shape
        y = self.enter(self.norm(x)).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        z = self.norms[0](y)
        y = y + self.own(z, z, z, need_weights=False)[0]
        y = y + self.cross(self.norms[1](y), text, text, need_weights=False)[0]
        value, gate = self.up(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(value * F.gelu(gate))
        return x + self.leave(y.reshape(batch, height, width, channels).permute(0, 3, 1, 2))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.enter = nn.Conv2d(4, 8, 3, padding=1)
        self.down1, self.shrink = TimeBlock(8, 8), nn.Conv2d(8, 8, 3, 2, 1)
        self.down2, self.attend = TimeBlock(8, 16), CrossBlock(16)
        self.middle = TimeBlock(16, 16)
        self.grow = nn.Conv2d(16, 16, 3, padding=1)
        self.raise_, self.up1 = nn.ConvTranspose2d(16, 8, 2, 2), TimeBlock(16, 8)
        self.norm, self.leave = nn.GroupNorm(4, 8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, steps, text):
        half = DIM // 2
        rates = torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        angles = steps[:, None] * rates[None].to(x.dtype)
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        first = self.down1(self.enter(x), time)
        y = self.attend(self.down2(self.shrink(first), time), text)
        small = self.middle(F.avg_pool2d(y, 2), time)
        y = y + self.grow(F.interpolate(small, scale_factor=2.0, mode="nearest"))
        y = y + F.interpolate(small, scale_factor=2.0, mode="bilinear")
        y = self.up1(torch.cat([self.raise_(y), first], 1), time)
        return self.leave(F.silu(self.norm(y)))


def unet_inputs():
    x, text = torch.randn(BATCH, 4, 8, 8), torch.randn(BATCH, 8, DIM)
    return x, torch.rand(BATCH) * 100, text


def llama():
    return Llama(LlamaConfig(DIM, HEADS, 2, 2 * DIM, VOCAB, 2, LENGTH))


class OnMesh:
    """A model that is made for a mesh; made for none it is the one of a single process."""

    def __init__(self, make):
        self.make = make

    def __call__(self, mesh=None):
        return self.make(mesh)


MODELS = {
    "gpt2": (GPT2, lambda: (tokens(),)),
    "llama": (llama, lambda: (tokens(),)),
    "t5": (T5, lambda: (tokens(), tokens())),
    "bert": (Bert, bert_inputs),
    "vit": (ViT, lambda: (torch.randn(BATCH, 3, 16, 16),)),
    "mixtral": (Mixtral, lambda: (tokens(),)),
    "mixtral_dispatched": (OnMesh(Mixtral), lambda: (tokens(),)),
    "state_space": (Mamba, lambda: (tokens(),)),
    "resnet": (ResNet, lambda: (torch.randn(BATCH, 3, 16, 16),)),
    "unet": (UNet, unet_inputs),
}
