use super::*;
use crate::tensor::{Device, Kind as Dtype};

/// Stable Diffusion's noise schedule with the default spacing of DPM++.
fn linspace() -> SchedulerConfig {
    SchedulerConfig { timestep_spacing: None, steps_offset: 0, ..SchedulerConfig::stable_diffusion() }
}

fn sampler(kind: SamplerKind, config: &SchedulerConfig, steps: usize) -> Sampler {
    Sampler::new(kind, config, steps).unwrap()
}

/// A run with the model `0.3·x + 0.05·sin(t/100)`, from evenly spaced latents.
fn run(sampler: &Sampler) -> Vec<f64> {
    let mut xs = Tensor::linspace(-1.0, 1.0, 8, (Dtype::Float, Device::Cpu)) * sampler.init_noise_scale;
    let mut history = History::default();
    for (i, t) in sampler.timesteps.iter().enumerate() {
        let output = sampler.scale_model_input(&xs, i) * 0.3 + 0.05 * (t / 100.0).sin();
        xs = sampler.step(i, &output, &xs, &mut history);
    }
    Vec::<f64>::try_from(xs.to_kind(Dtype::Double)).unwrap()
}

fn assert_close(what: &str, got: &[f64], want: &[f64], allowed: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= allowed, "{what}: {got} instead of {want}");
    }
}

#[test]
fn alphas_cumprod_of_stable_diffusion() {
    let schedule = NoiseSchedule::new(&SchedulerConfig::stable_diffusion());
    let alphas = &schedule.alphas_cumprod;
    let want = [0.998_296, 0.894_223_2, 0.673_792_3, 0.276_332_5, 0.056_169_8, 0.004_660_1];
    let got: Vec<f64> = [1, 100, 250, 500, 750, 999].iter().map(|&t| f64::from(alphas[t])).collect();
    assert_close("ᾱ", &got, &want, 1e-7);
    assert_close("ᾱ[0]", &[f64::from(alphas[0])], &[0.99915], 1e-7);
    let sigmas = schedule.sigmas();
    assert_close("σ", &[f64::from(sigmas[0]), f64::from(sigmas[999])], &[0.029_167_5, 14.614_646_6], 1e-6);
}

#[test]
fn timesteps_of_every_spacing() {
    let sd = SchedulerConfig::stable_diffusion();
    let times = |kind, config: &SchedulerConfig, n| sampler(kind, config, n).timesteps;
    for kind in [SamplerKind::Euler, SamplerKind::Ddim] {
        let fifty = times(kind, &sd, 50);
        assert_eq!((fifty[0], fifty[1], fifty[48], fifty[49]), (981.0, 961.0, 21.0, 1.0));
        let thirty = times(kind, &sd, 30);
        assert_eq!((thirty[0], thirty[1], thirty[28], thirty[29]), (958.0, 925.0, 34.0, 1.0));
        assert_eq!(times(kind, &sd, 4), [751.0, 501.0, 251.0, 1.0]);
    }
    let dpm = times(SamplerKind::DpmPlusPlus2M, &linspace(), 20);
    assert_eq!(dpm[..4], [999.0, 949.0, 899.0, 849.0]);
    assert_eq!(dpm[18..], [100.0, 50.0]);
    let dpm = times(SamplerKind::DpmPlusPlus2M, &sd, 20);
    assert_eq!((&dpm[..3], &dpm[18..]), (&[941.0, 894.0, 847.0][..], &[95.0, 48.0][..]));
    let trailing = SchedulerConfig { timestep_spacing: Some(TimestepSpacing::Trailing), ..sd };
    assert_eq!(times(SamplerKind::Euler, &trailing, 4), [999.0, 749.0, 499.0, 249.0]);
    for n in 1..1000 {
        assert_eq!(times(SamplerKind::Ddim, &trailing, n).len(), n);
    }
    assert_eq!(times(SamplerKind::Euler, &linspace(), 3), [999.0, 499.5, 0.0]);
    assert_eq!(times(SamplerKind::Ddim, &linspace(), 4), [751.0, 501.0, 251.0, 1.0].map(|t| t - 1.0));
}

#[test]
fn initial_noise_scale() {
    let sd = SchedulerConfig::stable_diffusion();
    for (n, sigma, scale) in [(30, 11.476_851, 11.520_334), (50, 13.120_416, 13.158_469)] {
        let sampler = sampler(SamplerKind::Euler, &sd, n);
        assert_close("σ", &[f64::from(sampler.sigmas[0])], &[sigma], 1e-5);
        assert_close("scale", &[sampler.init_noise_scale], &[scale], 1e-5);
    }
    assert_close("linspace", &[sampler(SamplerKind::Euler, &linspace(), 30).init_noise_scale], &[14.614_646_6], 1e-5);
    assert_eq!(sampler(SamplerKind::Ddim, &sd, 30).init_noise_scale, 1.0);
}

#[test]
fn karras_noise_levels() {
    let config = SchedulerConfig { use_karras_sigmas: true, ..linspace() };
    let want = [14.61465, 9.10294, 5.47840, 3.16861, 1.74942, 0.91408, 0.44692, 0.20140, 0.08191, 0.02917, 0.0];
    for kind in [SamplerKind::Euler, SamplerKind::DpmPlusPlus2M] {
        let levels: Vec<f64> = sampler(kind, &config, 10).sigmas.iter().map(|&sigma| f64::from(sigma)).collect();
        assert_close("Karras", &levels, &want, 1e-5);
    }
}

#[test]
fn whole_runs_have_the_values_of_diffusers() {
    let sd = SchedulerConfig::stable_diffusion();
    let velocity = SchedulerConfig { prediction_type: PredictionType::Velocity, ..sd.clone() };
    let karras = SchedulerConfig { use_karras_sigmas: true, ..linspace() };
    // a run is affine in the latents, so the end values suffice; `tests/parity` checks the values between
    for (what, sampler, first, last) in [
        ("euler", sampler(SamplerKind::Euler, &sd, 10), -3.983_360_3, 3.786_444_7),
        ("euler v", sampler(SamplerKind::Euler, &velocity, 10), -0.574_420_6, 0.543_775_3),
        ("ddim", sampler(SamplerKind::Ddim, &sd, 10), -4.016_900_1, 3.818_354_8),
        ("ddim v", sampler(SamplerKind::Ddim, &velocity, 10), -0.579_949_5, 0.549_038_2),
        ("dpm 10", sampler(SamplerKind::DpmPlusPlus2M, &linspace(), 10), -5.485_279_6, 5.350_124_4),
        ("dpm 20", sampler(SamplerKind::DpmPlusPlus2M, &linspace(), 20), -5.418_244_4, 5.262_784_5),
        ("dpm karras", sampler(SamplerKind::DpmPlusPlus2M, &karras, 10), -5.242_497_9, 5.085_587_6),
    ] {
        let got = run(&sampler);
        assert_close(what, &[got[0], got[7]], &[first, last], 1e-5);
    }
    let got = run(&sampler(SamplerKind::DpmPlusPlus2M, &linspace(), 20));
    let want =
        [-5.418_244_4, -3.892_384_1, -2.366_522_8, -0.840_660_5, 0.685_200_2, 2.211_061_0, 3.736_922_5, 5.262_784_5];
    assert_close("dpm 20", &got, &want, 1e-5);
}

#[test]
fn a_preserved_original_is_clean_at_the_end() {
    for kind in [SamplerKind::Euler, SamplerKind::Ddim, SamplerKind::DpmPlusPlus2M] {
        let sampler = sampler(kind, &SchedulerConfig::stable_diffusion(), 5);
        let (one, two) = (Tensor::from_slice(&[1_f32]), Tensor::from_slice(&[2_f32]));
        let held: Vec<f64> = (0..=5).map(|i| sampler.add_noise(&one, &two, i).double_value(&[0])).collect();
        assert_eq!(held[5], 1.0);
        assert!(held[..5].iter().all(|&value| (value - 1.0).abs() > 0.01), "{held:?}");
    }
    // a perfect model of one image: every sampler ends with this image, from any noise
    for kind in [SamplerKind::Euler, SamplerKind::DpmPlusPlus2M] {
        let sampler = sampler(kind, &SchedulerConfig::stable_diffusion(), 7);
        let (clean, noise) = (Tensor::from_slice(&[0.3_f32, -1.2]), Tensor::from_slice(&[1.1_f32, 0.4]));
        let (mut xs, mut history) = (sampler.add_noise(&clean, &noise, 2), History::default());
        for i in 2..7 {
            xs = sampler.step(i, &noise, &xs, &mut history);
            let held = sampler.add_noise(&clean, &noise, i + 1);
            assert!((&xs - held).abs().max().double_value(&[]) < 1e-4, "{kind} step {i}");
        }
    }
}

#[test]
fn strength_gives_the_fraction_of_steps() {
    let sampler = sampler(SamplerKind::Euler, &SchedulerConfig::stable_diffusion(), 30);
    for (strength, start) in [(0.0, 30), (0.01, 30), (0.5, 15), (0.6, 12), (1.0, 0), (7.0, 0)] {
        assert_eq!(sampler.start_index(strength), start, "{strength}");
    }
}

#[test]
fn zero_terminal_snr_ends_in_noise() {
    let text = r#"{"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "trained_betas": null,
        "prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": true}"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scheduler_config.json");
    std::fs::write(&path, text).unwrap();
    let config = SchedulerConfig::open(&path).unwrap();
    let schedule = NoiseSchedule::new(&config);
    assert_eq!(schedule.alphas_cumprod[999], 0.0);
    assert_close("ᾱ[0]", &[f64::from(schedule.alphas_cumprod[0])], &[0.99915], 1e-6);
    let sampler = sampler(SamplerKind::Euler, &config, 10);
    assert_close("scale", &[sampler.init_noise_scale], &[4096.0], 1e-3);
}

#[test]
fn defaults_and_spellings_of_diffusers_are_read() {
    let config = SchedulerConfig::parse(r#"{"lambda_min_clipped": -Infinity, "use_karras_sigmas": null}"#).unwrap();
    assert_eq!(config, SchedulerConfig::default());
    assert!(Sampler::new(SamplerKind::DpmPlusPlus2M, &config, 20).is_ok());
}

#[test]
fn an_unsupported_option_is_an_error_with_its_name() {
    for (text, word) in [
        (r#"{"beta_schedule": "squaredcos_cap_v2"}"#, "squaredcos_cap_v2"),
        (r#"{"prediction_type": "sample"}"#, "sample"),
        (r#"{"_class_name": "FlowMatchEulerDiscreteScheduler"}"#, "FlowMatch"),
        (r#"{"rescale_betas_zero_snr": true}"#, "v_prediction"),
        (r#"{"beta_end": 2}"#, "beta_end"),
        (r#"{"beta_start": "0.1"}"#, "`beta_start` is \"0.1\""),
        (r#"{"beta_schedule": "sigmoid"}"#, "`beta_schedule` is \"sigmoid\""),
        (r#"{"timestep_spacing": 3}"#, "`timestep_spacing` is 3"),
        (r#"{"num_train_timesteps": 1}"#, "num_train_timesteps"),
        (r#"{"num_train_timesteps": 100000000000}"#, "num_train_timesteps"),
        (r#"{"num_train_timesteps": -1000}"#, "`num_train_timesteps` is -1000"),
        (r#"{"_class_name": "EDMEulerScheduler"}"#, "EDMEuler"),
        (r#"{"_class_name": "LCMScheduler"}"#, "LCMScheduler"),
        (r#"{"_class_name": "CogVideoXDDIMScheduler"}"#, "CogVideoX"),
        // what changes the training, or every sampler
        (r#"{"trained_betas": [0.1]}"#, "`trained_betas` is [0.1]"),
        (r#"{"snr_shift_scale": 3.0}"#, "`snr_shift_scale` is 3.0"),
        (r#"{"thresholding": true}"#, "`thresholding` is true"),
        (r#"{"variance_type": "learned_range"}"#, "`variance_type`"),
        (r#"{"use_flow_sigmas": true}"#, "`use_flow_sigmas`"),
        (r#"{"final_sigmas_type": "sigma_min"}"#, "`final_sigmas_type`"),
        (r#"{"sigma_max": 80.0}"#, "`sigma_max`"),
        (r#"{"use_new_sigmas": true}"#, "`use_new_sigmas` is true, and this program does not know"),
        (r#"{"new_factor": 1.5}"#, "`new_factor` is 1.5"),
        ("[]", "object"),
    ] {
        let reason = SchedulerConfig::parse(text).unwrap_err();
        assert!(reason.contains(word), "{reason}");
    }
    for (text, kind, unsupported) in [
        (r#"{"clip_sample": true}"#, SamplerKind::Ddim, true),
        (r#"{"clip_sample": true}"#, SamplerKind::Euler, false),
        (r#"{"solver_order": 3}"#, SamplerKind::DpmPlusPlus2M, true),
        (r#"{"solver_order": 3}"#, SamplerKind::Euler, false),
        (r#"{"interpolation_type": "log_linear"}"#, SamplerKind::Euler, true),
        (r#"{"timestep_type": "continuous"}"#, SamplerKind::Euler, true),
        (r#"{"use_lu_lambdas": true}"#, SamplerKind::DpmPlusPlus2M, true),
        (r#"{"algorithm_type": "sde-dpmsolver++"}"#, SamplerKind::DpmPlusPlus2M, true),
        (r#"{"algorithm_type": "sde-dpmsolver++"}"#, SamplerKind::Ddim, false),
        (r#"{"solver_type": "bh2", "algorithm_type": "deis"}"#, SamplerKind::DpmPlusPlus2M, false),
        (r#"{"solver_type": "heun"}"#, SamplerKind::DpmPlusPlus2M, true),
        (r#"{"lambda_min_clipped": -5.1}"#, SamplerKind::DpmPlusPlus2M, true),
        (r#"{"variance_type": "fixed_small"}"#, SamplerKind::DpmPlusPlus2M, false),
        (
            r#"{"skip_prk_steps": false, "use_new_sigmas": false, "lower_order_final": false}"#,
            SamplerKind::Euler,
            false,
        ),
    ] {
        let config = SchedulerConfig::parse(text).unwrap();
        assert_eq!(Sampler::new(kind, &config, 10).is_err(), unsupported, "{text} {kind}");
    }
    let sd = SchedulerConfig::stable_diffusion();
    for steps in [0, 1000, 4000] {
        assert!(matches!(Sampler::new(SamplerKind::Ddim, &sd, steps), Err(Error::Config { .. })), "{steps}");
    }
}
