"""PRS-Med's losses on logits: the mask loss as published and as intended, and the language-model loss."""

import torch.nn.functional as F


def border_weight(mask):
    """`1 + 5 |average over 31x31 - mask|`; the average includes the zero padding."""
    return 1 + 5 * (F.avg_pool2d(mask, 31, stride=1, padding=15) - mask).abs()


def weighted_iou(logits, mask, weight):
    """Weighted IoU loss, one value for each sample and channel."""
    probability = logits.sigmoid()
    inter = (probability * mask * weight).sum((2, 3))
    union = ((probability + mask) * weight).sum((2, 3))
    return 1 - (inter + 1) / (union - inter + 1)


def structure_parts(logits, mask, semantics):
    """BCE (a scalar in `reference`, one value for each sample in `corrected`) and weighted IoU."""
    weight = border_weight(mask)
    if semantics == "reference":
        # The published code's legacy argument turns the weighted BCE into a plain mean.
        bce = F.binary_cross_entropy_with_logits(logits, mask)
    else:
        pixels = F.binary_cross_entropy_with_logits(logits, mask, reduction="none")
        bce = (weight * pixels).sum((2, 3)) / weight.sum((2, 3))
    return bce, weighted_iou(logits, mask, weight)


def structure_loss(logits, mask, semantics="reference"):
    bce, iou = structure_parts(logits, mask, semantics)
    return (bce + iou).mean()


def causal_loss(logits, labels):
    """Mean cross-entropy of the next token over all positions whose label is not -100."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
