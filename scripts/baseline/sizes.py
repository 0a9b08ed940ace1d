"""Reads the model sizes of a `prsmed` config file for the PyTorch baseline."""

import tomllib


def load(path):
    """`clip`, `llm`, `tiny_vit`, `decoder` and `sam_image_size` of a TOML file that states `model.sizes`."""
    model = tomllib.loads(path.read_text())["model"]
    sizes = model["sizes"]
    llm, encoder = dict(sizes["llm"]), dict(sizes["encoder"])
    out_dim = encoder.pop("out_dim")
    llm |= {
        "head_dim": llm["hidden_size"] // llm["num_attention_heads"], "vocab_size": sizes["vocab_size"],
        "sliding_window": None,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }
    return {
        "clip": {**sizes["clip"], "hidden_act": "quick_gelu"},
        "llm": llm,
        "tiny_vit": encoder,
        "decoder": {
            "image_dim": out_dim, "hidden_dim": sizes["decoder_hidden_dim"], "heads": tuple(sizes["decoder_heads"]),
            "encoder_ff_dim": 2 * out_dim,
        },
        "sam_image_size": model["image_size"],
    }
