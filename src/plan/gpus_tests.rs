use super::*;

fn name(text: &str) -> String {
    find(text).unwrap().gpu.unwrap().name.clone()
}

#[test]
fn every_row_is_complete() {
    assert!(all().len() > 20);
    for gpu in all() {
        assert!(gpu.memory_source.len() > 20 && !gpu.source.is_empty(), "{}", gpu.name);
        assert_eq!(gpu.context_mib.is_some(), gpu.context_source.is_some(), "{}", gpu.name);
        if let Some(rates) = gpu.rates() {
            assert!(rates.fp32 > 1e12 && rates.half >= rates.fp32 && rates.bandwidth > 1e11, "{}", gpu.name);
            assert!(rates.tf32.is_none_or(|tf32| tf32 <= rates.half && tf32 >= rates.fp32), "{}", gpu.name);
            assert!(rates.products < rates.half, "{}", gpu.name);
        } else {
            assert!(gpu.half.or(gpu.fp32).or(gpu.bandwidth).is_none() && !gpu.stands_for_size, "{}", gpu.name);
        }
        assert!(gpu.cuda_mib.is_none_or(|mib| mib < gpu.smi_mib), "{}", gpu.name);
        assert!(gpu.total_bytes() < gpu.smi_mib * MIB, "{}", gpu.name);
        assert!(gpu.smi_mib * MIB <= gpu.marketing_bytes(), "{}", gpu.name);
        assert!(gpu.aliases.iter().all(|alias| compact(alias) == *alias), "{}", gpu.name);
    }
}

#[test]
fn the_driver_loss_is_an_upper_bound_for_gpus_without_ecc() {
    for gpu in all().iter().filter(|gpu| gpu.smi_mib * 100 > u64::from(gpu.gb) * 1024 * 97) {
        assert!(after_driver(f64::from(gpu.gb)) <= gpu.total_bytes(), "{}", gpu.name);
    }
}

#[test]
fn gpus_are_found_in_the_usual_spellings() {
    for text in
        ["RTX 4090", "rtx4090", "4090 card", "NVIDIA GeForce RTX 4090", "geforce-rtx-4090", "RTX 4090 24GB", "4090 24g"]
    {
        assert_eq!(name(text), "RTX 4090", "{text}");
    }
    for text in ["a100-80", "A100 80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "a10080gb"] {
        assert_eq!(name(text), "A100 80GB", "{text}");
    }
    for (text, gpu) in [
        ("a100-40", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 80GB", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("h100-pcie-80gb", "H100 PCIe"),
        ("H100 80GB PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("l4", "L4"),
        ("L40S", "L40S"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("rtx 4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("2080ti", "RTX 2080 Ti"),
        ("Quadro RTX 8000", "Quadro RTX 8000"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("RTX 4070 Mobile", "RTX 4070 Laptop"),
        ("RTX 4080 SUPER", "RTX 4080 SUPER"),
        ("NVIDIA GeForce GTX 1650", "GTX 1650"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A16", "A16"),
        ("A2", "A2"),
    ] {
        assert_eq!(name(text), gpu, "{text}");
    }
}

#[test]
fn a_name_of_several_sizes_means_the_smallest_and_says_so() {
    let budget = find("RTX 4060 Ti").unwrap();
    assert_eq!(budget.marketing_bytes, 8 * GIB);
    assert!(budget.note.contains("16 GB and 8 GB") && budget.note.contains("smallest"), "{}", budget.note);
    assert!(!find("a100-80").unwrap().note.contains("smallest is taken"));
    assert!(find("t4").unwrap().note.ends_with("no bf16"));
}

#[test]
fn several_gpus_are_named_with_their_number() {
    for (text, flags) in
        [("2x RTX 4090", "arguments `gpu=\"RTX 4090\" gpus=2`"), ("8 x A100", "arguments `gpu=\"A100\" gpus=8`")]
    {
        let hint = find(text).unwrap_err().hint();
        assert!(hint.ends_with(flags), "{hint}");
    }
}

#[test]
fn unlisted_models_are_not_matched_to_listed_ones() {
    for text in ["RTX 4095 Laptop", "RTX 4080 ULTRA", "H100 XYZ", "rtx 6000"] {
        assert!(matches!(find(text), Err(NotFound::Unknown { .. })), "{text}");
    }
}

#[test]
fn the_error_for_an_unknown_gpu_names_similar_ones() {
    let error = find("rtx 4091").unwrap_err();
    assert!(matches!(&error, NotFound::Unknown { nearest, .. } if nearest[0] == "RTX 4090" && nearest.len() == 3));
    assert_eq!(error.to_string(), "`rtx 4091` is neither a known GPU nor a size such as `24gb`");
    assert!(error.hint().starts_with("did you mean `RTX 4090`, "));
    for text in ["", "gb", "-3gb", "0gb", "nangb", "gpu gb"] {
        assert!(matches!(find(text), Err(NotFound::Unknown { .. })), "{text}");
    }
}

#[test]
fn an_unlisted_name_with_a_size_has_its_memory_and_no_times() {
    for (text, name, mib, capability) in [
        ("RTX 3060 8gb", "RTX 3060 8 GB", 8 * 1024 - 352 - 80, (8, 6)),
        ("RTX 6090 48gb", "RTX 6090 48 GB", 45_467, (8, 9)),
        ("CMP 170HX 10 GB", "CMP 170HX 10 GB", 9_875, (8, 6)),
    ] {
        let budget = find(text).expect(text);
        assert_eq!((budget.name.as_deref(), budget.gpu, budget.has_own_rates), (Some(name), None, false), "{text}");
        assert_eq!((budget.total_bytes / MIB, budget.capability), (mib, capability), "{text}");
        assert!(budget.note.contains("is not in the table of GPUs"), "{}", budget.note);
    }
    let laptop = find("RTX 4090 Laptop").unwrap();
    assert_eq!((laptop.has_own_rates, laptop.has_bf16(), laptop.marketing_bytes / GIB), (false, true, 16));
    assert!(!find("RTX 2080 Ti").unwrap().has_bf16() && !find("RTX 2080 Ti 22gb").unwrap().has_bf16());
}

/// TFLOPS of large half-precision products in torch or cuBLAS, as published: see [`Gpu::products`] and the table.
const MEASURED: [(&str, f64); 7] = [
    ("T4", 24.0),
    ("RTX 3060", 27.0),
    ("RTX 2080 Ti", 45.0),
    ("RTX 3090 Ti", 66.0),
    ("RTX 3090", 76.0),
    ("RTX 4090", 168.0),
    ("A100 40GB", 247.0),
];

#[test]
fn products_of_a_training_are_near_their_published_measurements() {
    for (name, measured) in MEASURED {
        let products = by_name(name).and_then(Gpu::products).expect(name);
        let ratio = products / (LARGE_PRODUCTS * measured);
        assert!((0.9..1.25).contains(&ratio), "{name}: {ratio:.2}");
    }
}

#[test]
fn a_gpu_is_slower_than_those_that_are_known_to_be_faster() {
    let products = |name: &str| by_name(name).and_then(Gpu::products).expect(name);
    for ranked in [
        &["T4", "RTX 3060", "RTX 2080 Ti", "RTX 3090", "RTX 4090", "A100 40GB", "H100 PCIe", "H100", "B200"][..],
        // four transformers in fp16 on one GPU, geometric mean of the ratios: lambdal/deeplearning-benchmark
        &[
            "A10", "Quadro RTX 8000", "RTX 3090", "RTX A6000", "RTX 6000 Ada", "RTX 4090", "A100 40GB", "H100 PCIe",
            "H100",
        ],
        &["RTX 3050", "RTX 3060", "RTX 3060 Ti", "RTX 3070", "RTX 3080", "RTX 3080 Ti", "RTX 3090 Ti"],
        &["RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4070 Ti", "RTX 4080", "RTX 4090", "RTX 5090"],
        &["A2", "T4", "A10G", "A40", "L40", "L40S"],
    ] {
        for pair in ranked.windows(2) {
            assert!(products(pair[0]) < products(pair[1]), "{} and {}", pair[0], pair[1]);
        }
    }
}

#[test]
fn a_bare_size_offers_the_least_memory_of_gpus_of_that_size() {
    for text in ["24gb", "24 GB", "24gib", "24GiB", "24g", "24", "24.0 gb", "24576MiB", "24576 mb"] {
        let budget = find(text).unwrap();
        assert_eq!((budget.gpu, budget.total_bytes), (None, 22_562 * MIB), "{text}");
        assert_eq!(budget.capability, (8, 9));
    }
    assert_eq!(find("141gb").unwrap().total_bytes, 143_068 * MIB);
    assert_eq!(find("11gb").unwrap().total_bytes, (11 * 1024 - 352 - 110) * MIB);
    assert_eq!(find("16gb").unwrap().total_bytes, 15_944 * MIB);
    assert!(find("23gb").unwrap().note.contains("L4"));
}

#[test]
fn a_larger_size_never_offers_less_and_is_never_slower() {
    let budgets: Vec<GpuBudget> = (2..=200).map(|gb| find(&format!("{gb}gb")).unwrap()).collect();
    for (small, large) in budgets.iter().zip(&budgets[1..]) {
        assert!(large.total_bytes >= small.total_bytes, "{} {}", small.note, large.note);
        assert!(large.rates.half >= small.rates.half && large.rates.bandwidth >= small.rates.bandwidth);
        assert!(large.rates.fp32 >= small.rates.fp32 && large.rates.tf32 >= small.rates.tf32);
        assert!(small.total_bytes < small.marketing_bytes && small.rates.half.is_finite());
    }
    assert_eq!(find("24gb").unwrap().rates.half, 71.2e12);
    assert_eq!(find("24gb").unwrap().rates.bandwidth, 300e9);
    assert_eq!(find("180gb").unwrap().rates.bandwidth, 4800e9);
}

#[test]
fn a_mig_slice_has_its_share_of_memory_and_rates() {
    let slice = find("NVIDIA A100 80GB PCIe MIG 1g.10gb").unwrap();
    assert_eq!(slice.total_bytes / MIB, 9_728);
    assert!((slice.rates.half - 312e12 / 7.0).abs() < 1e6);
    assert!((slice.rates.bandwidth - 1935e9 / 8.0).abs() < 1e6);
    assert_eq!(find("H100 MIG 1c.3g.40gb").unwrap().marketing_bytes, 40 * GIB);
    assert!(find("A100 MIG banana").is_err());
}

#[test]
fn a_device_of_torch_is_no_name_of_a_gpu() {
    let hint = find("cuda:0").unwrap_err().hint();
    assert!(hint.starts_with("leave it out to plan for the GPU of this machine"), "{hint}");
}
