"""TinyViT as SAM's `vit_t` builds it (MobileSAM, TinySAM): own module, parameters named as in those checkpoints.

Differences from timm's `TinyVit`: names, the last patch merging has stride 1, and a convolutional neck follows the last
stage. The unused classifier (`norm_head`, `head`) is left out.
"""

import torch
import torch.nn.functional as F
from torch import nn


class ConvBn(nn.Module):
    """A convolution without bias and its batch norm, under the checkpoint's names `c` and `bn`."""

    def __init__(self, inputs, outputs, kernel=1, stride=1, padding=0, groups=1):
        super().__init__()
        self.c = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, xs):
        return self.bn(self.c(xs))


class PatchEmbed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.seq = nn.Sequential(ConvBn(3, dim // 2, 3, 2, 1), nn.GELU(), ConvBn(dim // 2, dim, 3, 2, 1))

    def forward(self, xs):
        return self.seq(xs)


class MbConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv1 = ConvBn(dim, 4 * dim)
        self.conv2 = ConvBn(4 * dim, 4 * dim, 3, 1, 1, groups=4 * dim)
        self.conv3 = ConvBn(4 * dim, dim)

    def forward(self, xs):
        ys = F.gelu(self.conv2(F.gelu(self.conv1(xs))))
        return F.gelu(self.conv3(ys) + xs)


class PatchMerging(nn.Module):
    def __init__(self, dim, outputs, stride):
        super().__init__()
        self.conv1 = ConvBn(dim, outputs)
        self.conv2 = ConvBn(outputs, outputs, 3, stride, 1, groups=outputs)
        self.conv3 = ConvBn(outputs, outputs)

    def forward(self, xs):
        return self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(xs)))))


class Attention(nn.Module):
    """Window attention; the rows of `qkv` are (q, k, v) for each head in turn, the bias depends on absolute offsets."""

    def __init__(self, dim, num_heads, window):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.attention_biases = nn.Parameter(torch.zeros(num_heads, window * window))
        row, col = torch.arange(window * window) // window, torch.arange(window * window) % window
        index = (row[:, None] - row[None]).abs() * window + (col[:, None] - col[None]).abs()
        self.register_buffer("bias_index", index, persistent=False)

    def forward(self, xs):
        b, n, d = xs.shape
        qkv = self.qkv(self.norm(xs)).view(b, n, self.num_heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        bias = self.attention_biases[:, self.bias_index]
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, xs):
        return self.fc2(F.gelu(self.fc1(self.norm(xs))))


class Block(nn.Module):
    def __init__(self, dim, num_heads, window):
        super().__init__()
        self.window = window
        self.attn = Attention(dim, num_heads, window)
        self.mlp = Mlp(dim)
        self.local_conv = ConvBn(dim, dim, 3, 1, 1, groups=dim)

    def windows(self, xs):
        """Attention inside windows; the zero padding is added before the norm and is not masked."""
        b, d, h, w = xs.shape
        side = self.window
        xs = F.pad(xs.permute(0, 2, 3, 1), (0, 0, 0, -w % side, 0, -h % side))
        rows, cols = xs.shape[1] // side, xs.shape[2] // side
        xs = xs.view(b, rows, side, cols, side, d).transpose(2, 3).reshape(-1, side * side, d)
        xs = self.attn(xs).view(b, rows, cols, side, side, d).transpose(2, 3)
        return xs.reshape(b, rows * side, cols * side, d)[:, :h, :w].permute(0, 3, 1, 2)

    def forward(self, xs):
        xs = self.local_conv(xs + self.windows(xs))
        return xs + self.mlp(xs.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Stage(nn.Module):
    def __init__(self, blocks, downsample):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.downsample = downsample if downsample is not None else nn.Identity()

    def forward(self, xs):
        return self.downsample(self.blocks(xs))


class LayerNorm2d(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, xs):
        centred = xs - xs.mean(1, keepdim=True)
        xs = centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * xs + self.bias[:, None, None]


def neck(dim, outputs):
    """The neck of SAM's image encoders: 1x1 and 3x3 convolution without bias, each followed by a channel norm."""
    first, second = nn.Conv2d(dim, outputs, 1, bias=False), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(first, LayerNorm2d(outputs), second, LayerNorm2d(outputs))


class TinyVit(nn.Module):
    """Image `[B, 3, S, S]` (normalised) to `[B, neck_dim, S/16, S/16]`."""

    def __init__(self, embed_dims, depths, num_heads, window_sizes, neck_dim=256):
        super().__init__()
        self.patch_embed = PatchEmbed(embed_dims[0])
        self.layers = nn.Sequential()
        for i, (dim, depth, heads, window) in enumerate(zip(embed_dims, depths, num_heads, window_sizes)):
            blocks = [MbConv(dim) if i == 0 else Block(dim, heads, window) for _ in range(depth)]
            merge = PatchMerging(dim, embed_dims[i + 1], stride=2 if i < 2 else 1) if i < 3 else None
            self.layers.append(Stage(blocks, merge))
        self.neck = neck(embed_dims[-1], neck_dim)

    def forward(self, xs):
        return self.neck(self.layers(self.patch_embed(xs)))
