"""PRS-Med assembled from transformers (CLIP, Mistral), peft (LoRA) and the modules of this folder, with random weights.

It follows the published training code where that affects time: the language model and CLIP run once for the hidden
states and once more for the loss (`passes=2`), there are logits at every position, every position is a prompt token of
the decoder, and CLIP and projector are frozen.
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, MistralConfig, MistralForCausalLM

from .losses import structure_loss
from .mask_decoder import MaskDecoder
from .tiny_vit import TinyVit

IMAGE_TOKEN, BOS = -200, 1


class PrsMed(nn.Module):
    """`sizes` as `scripts/baseline/sizes.py` reads them; `dropout` switches LoRA's and the decoder's (both 0.1)."""

    def __init__(self, sizes, dropout=True):
        super().__init__()
        rate = 0.1 if dropout else 0.0
        decoder = {"image_dim": 256, "hidden_dim": 512, **sizes.get("decoder", {})}
        lora = {"r": 16, "lora_alpha": 16, **sizes.get("lora", {})}
        clip, llm = CLIPVisionConfig(**sizes["clip"]), MistralConfig(**sizes["llm"])
        self.vision_tower = CLIPVisionModel(clip).requires_grad_(False)
        self.mm_projector = nn.Sequential(
            nn.Linear(clip.hidden_size, llm.hidden_size), nn.GELU(), nn.Linear(llm.hidden_size, llm.hidden_size)
        ).requires_grad_(False)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        adapter = LoraConfig(**lora, lora_dropout=rate, target_modules=targets, bias="none", task_type="CAUSAL_LM")
        self.llm = get_peft_model(MistralForCausalLM(llm), adapter)
        self.image_encoder = TinyVit(**sizes["tiny_vit"], neck_dim=decoder["image_dim"])
        self.mask_decoder = MaskDecoder("v5", prompt_dim=llm.hidden_size, dropout=rate, **decoder)
        self.cls = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                 nn.Linear(decoder["image_dim"], sizes.get("classes", 6)))

    def trained(self):
        return [p for p in self.parameters() if p.requires_grad]

    def splice(self, ids, keep, clip_image):
        """Embeddings, mask and labels with the image tokens in place of `IMAGE_TOKEN` (at index 1 of every row)."""
        with torch.no_grad():
            patches = self.vision_tower(clip_image, output_hidden_states=True).hidden_states[-2][:, 1:]
            image = self.mm_projector(patches)
        embed = self.llm.get_input_embeddings()
        text = embed(ids.clamp_min(0)) * keep[..., None]
        whole = lambda row, image_part: torch.cat([row[:, :1], image_part, row[:, 2:]], dim=1)
        ones = image.new_ones(image.shape[:2], dtype=torch.bool)
        labels = ids.masked_fill(~keep, -100)
        labels[:, 0] = -100
        return whole(text, image.to(text.dtype)), whole(keep, ones), whole(labels,
                                                                           torch.full_like(ones, -100,
                                                                                           dtype=torch.long))

    def language(self, ids, keep, clip_image, with_loss):
        embeds, mask, labels = self.splice(ids, keep, clip_image)
        return self.llm(inputs_embeds=embeds, attention_mask=mask.long(), labels=labels if with_loss else None,
                        use_cache=False,
                        output_hidden_states=True)

    def forward(self, batch, passes=2):
        """Hidden states, embedding, mask and class logits, text loss."""
        text = (batch["text_ids"], batch["text_mask"], batch["clip_image"])
        first = self.language(*text, with_loss=passes == 1)
        hidden = first.hidden_states[-1]
        embedding = self.image_encoder(batch["sam_image"])
        outputs = {
            "llm_last_hidden": hidden,
            "image_embedding": embedding,
            "mask_logits": self.mask_decoder(embedding.float(), hidden.float()),
            "class_logits": self.cls(embedding),
        }
        second = first if passes == 1 else self.language(*text, with_loss=True)
        return {**outputs, "loss.text": second.loss}

    @torch.no_grad()
    def predict(self, batch, new_tokens):
        """As published: generate with a KV cache, encode the image, then a full pass for the hidden states."""
        ids, keep = batch["text_ids"], batch["text_mask"]
        embeds, mask, _ = self.splice(ids, keep, batch["clip_image"])
        answer = self.llm.generate(inputs_embeds=embeds, attention_mask=mask.long(), max_new_tokens=new_tokens,
                                   min_new_tokens=new_tokens,
                                   do_sample=False, use_cache=True, pad_token_id=0)
        embedding = self.image_encoder(batch["sam_image"])
        hidden = self.language(ids, keep, batch["clip_image"], with_loss=False).hidden_states[-1]
        return answer, self.mask_decoder(embedding.float(), hidden.float()).sigmoid()


def losses(outputs, batch):
    """The four values of a step; the class loss weighs 0.5 as in the first five epochs."""
    text = outputs["loss.text"]
    mask = structure_loss(outputs["mask_logits"].float(), batch["mask"], "reference")
    classes = F.cross_entropy(outputs["class_logits"].float(), batch["class_label"])
    return {"loss.text": text, "loss.mask": mask, "loss.class": classes, "loss.total": mask + 0.5 * classes + text}


def random_batch(sizes, num_images, questions, text_tokens, seed=0):
    """Random images with `questions` random texts each, in separate rows that repeat the image, like the published data
    loader. `text_tokens` counts the image placeholder once, as in the sequence length `text_tokens + patches - 1`."""
    rng = torch.Generator().manual_seed(seed)
    b, n, side = num_images * questions, text_tokens, sizes["sam_image_size"]
    repeated = lambda channels, side: torch.randn(num_images, channels, side, side,
                                                  generator=rng).repeat_interleave(questions, 0)
    clip_side = sizes["clip"]["image_size"]
    ids = torch.randint(3, sizes["llm"]["vocab_size"], (b, n), generator=rng)
    ids[:, 0], ids[:, 1] = BOS, IMAGE_TOKEN
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    disc = ((y - side / 3) ** 2 + (x - side / 2) ** 2 < (side / 6) ** 2).float()
    return {
        "text_ids": ids,
        "text_mask": torch.ones_like(ids, dtype=torch.bool),
        "clip_image": repeated(3, clip_side),
        "sam_image": repeated(3, side),
        "mask": disc.expand(b, 1, side, side).contiguous(),
        "class_label": torch.randint(0, sizes.get("classes", 6), (b,), generator=rng),
    }
