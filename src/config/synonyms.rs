//! Names of settings in other trainers: PyTorch examples, Hugging Face's `Trainer`, diffusers' scripts.

use crate::setting::Setting;

/// Name in another trainer, setting of this program.
const SYNONYMS: [(&str, &str); 71] = [
    ("batch_size", "train.micro_batch"),
    ("micro_batch_size", "train.micro_batch"),
    ("train_batch_size", "train.micro_batch"),
    ("per_device_train_batch_size", "train.micro_batch"),
    ("gradient_accumulation", "train.accumulation"),
    ("gradient_accumulation_steps", "train.accumulation"),
    ("grad_accum", "train.accumulation"),
    ("grad_accum_steps", "train.accumulation"),
    ("accumulate_grad_batches", "train.accumulation"),
    ("accumulation_steps", "train.accumulation"),
    ("num_epochs", "train.epochs"),
    ("n_epochs", "train.epochs"),
    ("max_epochs", "train.epochs"),
    ("num_train_epochs", "train.epochs"),
    ("steps", "train.max_steps"),
    ("num_steps", "train.max_steps"),
    ("max_train_steps", "train.max_steps"),
    ("lr", "train.learning_rate"),
    ("min_lr", "train.min_learning_rate"),
    ("lr_min", "train.min_learning_rate"),
    ("eta_min", "train.min_learning_rate"),
    ("warmup", "train.warmup_frac"),
    ("warmup_ratio", "train.warmup_frac"),
    ("warmup_steps", "train.warmup_frac"),
    ("lr_warmup_steps", "train.warmup_frac"),
    ("wd", "train.weight_decay"),
    ("adam_beta1", "train.beta1"),
    ("adam_beta2", "train.beta2"),
    ("eps", "train.epsilon"),
    ("adam_epsilon", "train.epsilon"),
    ("max_grad_norm", "train.clip_norm"),
    ("grad_clip", "train.clip_norm"),
    ("grad_clip_norm", "train.clip_norm"),
    ("gradient_clip_val", "train.clip_norm"),
    ("amp", "train.precision"),
    ("bf16", "train.precision"),
    ("fp16", "train.precision"),
    ("dtype", "train.precision"),
    ("torch_dtype", "train.precision"),
    ("mixed_precision", "train.precision"),
    ("optim", "train.optimizer"),
    ("gradient_checkpointing", "train.checkpointing"),
    ("activation_checkpointing", "train.checkpointing"),
    ("ema", "train.ema_decay"),
    ("random_seed", "train.seed"),
    ("save_steps", "train.checkpoint_every_steps"),
    ("eval_every", "train.validate_every_epochs"),
    ("early_stopping_patience", "train.patience"),
    ("cuda_graph", "train.graph"),
    ("cuda_graphs", "train.graph"),
    ("num_workers", "data.workers"),
    ("dataloader_num_workers", "data.workers"),
    ("prefetch_factor", "data.prefetch"),
    ("val_split", "data.val_frac"),
    ("augmentation", "data.augment"),
    ("r", "lora.rank"),
    ("lora_r", "lora.rank"),
    ("lora_alpha", "lora.alpha"),
    ("lora_dropout", "lora.dropout"),
    ("load_in_4bit", "model.quantization"),
    ("model_name_or_path", "model.base"),
    ("resolution", "model.image_size"),
    ("batch_size_per_gpu", "train.micro_batch"),
    ("compute_every_n_epochs", "train.validate_every_epochs"),
    ("enable_cpu_offload", "train.offload_optimizer"),
    ("training_method", "finetune.method"),
    ("snr_gamma", "finetune.min_snr_gamma"),
    ("proportion_empty_prompts", "finetune.caption_dropout"),
    ("eval_num_examples", "finetune.samples"),
    ("eval_mmd_samples", "finetune.samples"),
    ("eval_batch_size", "finetune.sample_batch"),
];

/// The setting that `key` (`train.batch_size`, `lr`) means, by its name in other trainers.
pub(super) fn synonym(key: &str) -> Option<&'static str> {
    let name = key.rsplit('.').next().unwrap_or(key).to_lowercase().replace('-', "_");
    SYNONYMS.iter().find(|(other, _)| *other == name).map(|(_, own)| *own)
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
        for (other, own) in SYNONYMS {
            assert!(keys.contains(&own), "`{own}` is no setting");
            let (section, _) = own.split_once('.').expect("a dotted key");
            assert!(!keys.contains(&format!("{section}.{other}").as_str()), "`{other}` is a setting");
        }
    }
}
