//! Names of settings in other trainers: PyTorch examples, Hugging Face's `Trainer`, diffusers' scripts.

use crate::setting::Setting;

/// Settings of this program, and their names in other trainers.
const SYNONYMS: [(&str, &[&str]); 37] = [
    (
        "train.micro_batch",
        &["batch_size", "micro_batch_size", "train_batch_size", "per_device_train_batch_size", "batch_size_per_gpu"],
    ),
    (
        "train.accumulation",
        &[
            "gradient_accumulation",
            "gradient_accumulation_steps",
            "grad_accum",
            "grad_accum_steps",
            "accumulate_grad_batches",
            "accumulation_steps",
        ],
    ),
    ("train.epochs", &["num_epochs", "n_epochs", "max_epochs", "num_train_epochs"]),
    ("train.max_steps", &["steps", "num_steps", "max_train_steps"]),
    ("train.learning_rate", &["lr"]),
    ("train.min_learning_rate", &["min_lr", "lr_min", "eta_min"]),
    ("train.warmup_frac", &["warmup", "warmup_ratio", "warmup_steps", "lr_warmup_steps"]),
    ("train.weight_decay", &["wd"]),
    ("train.beta1", &["adam_beta1"]),
    ("train.beta2", &["adam_beta2"]),
    ("train.epsilon", &["eps", "adam_epsilon"]),
    ("train.clip_norm", &["max_grad_norm", "grad_clip", "grad_clip_norm", "gradient_clip_val"]),
    ("train.precision", &["amp", "bf16", "fp16", "dtype", "torch_dtype", "mixed_precision"]),
    ("train.optimizer", &["optim"]),
    ("train.checkpointing", &["gradient_checkpointing", "activation_checkpointing"]),
    ("train.ema_decay", &["ema"]),
    ("train.seed", &["random_seed"]),
    ("train.checkpoint_every_steps", &["save_steps"]),
    ("train.validate_every_epochs", &["eval_every", "compute_every_n_epochs"]),
    ("train.patience", &["early_stopping_patience"]),
    ("train.graph", &["cuda_graph", "cuda_graphs"]),
    ("data.workers", &["num_workers", "dataloader_num_workers"]),
    ("data.prefetch", &["prefetch_factor"]),
    ("data.val_frac", &["val_split"]),
    ("data.augment", &["augmentation"]),
    ("lora.rank", &["r", "lora_r"]),
    ("lora.alpha", &["lora_alpha"]),
    ("lora.dropout", &["lora_dropout"]),
    ("model.quantization", &["load_in_4bit"]),
    ("model.base", &["model_name_or_path"]),
    ("model.image_size", &["resolution"]),
    ("train.offload_optimizer", &["enable_cpu_offload"]),
    ("finetune.method", &["training_method"]),
    ("finetune.min_snr_gamma", &["snr_gamma"]),
    ("finetune.caption_dropout", &["proportion_empty_prompts"]),
    ("finetune.samples", &["eval_num_examples", "eval_mmd_samples"]),
    ("finetune.sample_batch", &["eval_batch_size"]),
];

/// The setting that `key` (`train.batch_size`, `lr`) means, by its name in other trainers.
pub(super) fn synonym(key: &str) -> Option<&'static str> {
    let name = key.rsplit('.').next().unwrap_or(key).to_lowercase().replace('-', "_");
    SYNONYMS.iter().find(|(_, others)| others.contains(&name.as_str())).map(|(own, _)| *own)
}

/// The setting that a flag (`epochs`, `batch-size`) means: by the last part of its key, the sections in their order, or
/// by its name in other trainers.
pub fn setting_named(flag: &str, settings: &[Setting]) -> Option<&'static str> {
    let name = flag.to_lowercase().replace('-', "_");
    let is_named = |key: &&str| key.rsplit('.').next() == Some(name.as_str());
    let keys = || settings.iter().map(|setting| setting.key);
    // `train` first: sections may share a name
    let own = keys().filter(|key| key.starts_with("train.")).find(is_named).or_else(|| keys().find(is_named));
    own.or_else(|| synonym(&name).filter(|own| keys().any(|key| key == *own)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{FinetuneRun, RunConfig, Settings as _};

    #[test]
    fn names_of_other_trainers_are_understood() {
        assert_eq!(synonym("train.batch_size"), Some("train.micro_batch"));
        assert_eq!(synonym("lr"), Some("train.learning_rate"));
        assert_eq!(synonym("num-workers"), Some("data.workers"));
        assert_eq!(synonym("train.colour"), None);
    }

    #[test]
    fn every_synonym_leads_to_a_setting_and_is_none_itself() {
        let keys: Vec<&str> =
            [RunConfig::settings(), FinetuneRun::settings()].concat().into_iter().map(|setting| setting.key).collect();
        for (own, other) in SYNONYMS.iter().flat_map(|(own, others)| others.iter().map(move |other| (*own, *other))) {
            assert!(keys.contains(&own), "`{own}` is no setting");
            let (section, _) = own.split_once('.').expect("a dotted key");
            assert!(!keys.contains(&format!("{section}.{other}").as_str()), "`{other}` is a setting");
        }
    }
}
