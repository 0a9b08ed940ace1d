"""PRS-Med's prompted mask decoder, versions v5 and v6, with PyTorch's own attention modules; parameters named as in
`mask_decoder.pth`."""

import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    """The 1x1 convolution has padding 1, so the map grows by a border (bias only), which the last convolution removes.
    """

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inputs, 3, padding=1)
        self.bn1 = nn.InstanceNorm2d(inputs, affine=True)
        self.conv2 = nn.Conv2d(inputs, outputs, 1, padding=1)
        self.bn2 = nn.InstanceNorm2d(outputs, affine=True)
        self.conv3 = nn.Conv2d(outputs, outputs, 3)

    def forward(self, xs):
        ys = F.relu(self.bn1(self.conv1(xs))) + xs
        return self.conv3(self.bn2(self.conv2(ys)))


class FeedForward(nn.Module):
    """`norm1` exists in the checkpoint and is never used."""

    def __init__(self, dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm, self.norm1 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, xs):
        return self.norm(F.relu(self.fc2(F.relu(self.fc1(xs)) + xs)))


class MaskDecoder(nn.Module):
    """Image `[B, C, H, W]` and prompt states `[B, T, prompt_dim]` to logits `[B, 1, 16H, 16W]`."""

    def __init__(self, version="v5", prompt_dim=4096, image_dim=256, hidden_dim=512, heads=(8, 16), encoder_ff_dim=512,
                 dropout=0.1):
        super().__init__()
        self.version = version
        self.prompt_projection = nn.Sequential(
            nn.Linear(prompt_dim, hidden_dim), nn.LayerNorm(hidden_dim), nn.ReLU(),
            nn.Linear(hidden_dim, image_dim), nn.LayerNorm(image_dim), nn.ReLU(),
        )
        self.attn = nn.MultiheadAttention(image_dim, heads[0], batch_first=True)
        self.norm1 = nn.LayerNorm(image_dim)
        self.ffn = FeedForward(image_dim)
        self.encoder_layer = nn.TransformerEncoderLayer(image_dim, heads[1], encoder_ff_dim, dropout, batch_first=True)
        widths = [image_dim, image_dim, image_dim // 2, image_dim // 4]
        self.mask_generation = nn.Sequential(*[BasicBlock(i, o) for i, o in zip(widths, widths[1:])])
        self.out_dec = nn.Conv2d(widths[-1], 1, 1)
        if version == "v5":
            self.image_norm, self.prompt_norm = nn.LayerNorm(image_dim), nn.LayerNorm(image_dim)

    def forward(self, image, prompt, prompt_keep=None):
        """`prompt_keep` (bool `[B, T]`, true = attend) is an addition: the published code masks nothing."""
        b, c, h, w = image.shape
        prompt = self.prompt_projection(prompt)
        tokens = image.flatten(2).transpose(1, 2)
        if self.version == "v5":
            tokens, prompt = self.image_norm(tokens), self.prompt_norm(prompt)
        ignore = None if prompt_keep is None else ~prompt_keep
        # The averaged attention weights are computed and not used, as in the published code.
        fused, _ = self.attn(tokens, prompt, prompt, key_padding_mask=ignore, need_weights=True)
        fused = self.norm1(fused + tokens if self.version == "v5" else fused)
        fused = self.ffn(self.encoder_layer(fused))
        maps = fused.transpose(1, 2).reshape(b, c, h, w) + image
        logits = self.out_dec(self.mask_generation(maps))
        return F.interpolate(logits, scale_factor=16, mode="bilinear", align_corners=True)
