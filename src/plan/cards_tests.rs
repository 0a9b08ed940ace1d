use super::*;

fn name(text: &str) -> String {
    find(text).unwrap().card.unwrap().name.clone()
}

#[test]
fn every_row_is_complete() {
    assert!(all().len() > 20);
    for card in all() {
        assert!(card.memory_source.len() > 20 && !card.source.is_empty(), "{}", card.name);
        assert_eq!(card.context_mib.is_some(), card.context_source.is_some(), "{}", card.name);
        assert!(card.fp32 > 0.0 && card.half >= card.fp32 && card.bandwidth > 100.0, "{}", card.name);
        assert!(card.tf32.is_none_or(|tf32| tf32 <= card.half && tf32 >= card.fp32), "{}", card.name);
        assert_eq!(card.bf16, card.capability >= (8, 0), "{}", card.name);
        assert!(card.cuda_mib.is_none_or(|mib| mib < card.smi_mib), "{}", card.name);
        assert!(card.total_bytes() < card.smi_mib * MIB && card.smi_mib * MIB <= card.marketing_bytes());
        assert!(card.aliases.iter().all(|alias| compact(alias) == *alias), "{}", card.name);
    }
}

#[test]
fn the_driver_loss_covers_every_card_without_ecc() {
    for card in all().iter().filter(|card| card.smi_mib * 100 > u64::from(card.gb) * 1024 * 97) {
        assert!(after_driver(f64::from(card.gb)) <= card.total_bytes(), "{}", card.name);
    }
}

#[test]
fn cards_are_found_in_the_usual_spellings() {
    for text in
        ["RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "geforce-rtx-4090", "RTX 4090 24GB", "4090 24g"]
    {
        assert_eq!(name(text), "RTX 4090", "{text}");
    }
    for text in ["a100-80", "A100 80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "a10080gb"] {
        assert_eq!(name(text), "A100 80GB", "{text}");
    }
    for (text, card) in [
        ("a100-40", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 80GB", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("h100-pcie-80gb", "H100 PCIe"),
        ("H100 80GB PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla V100-PCIE-32GB", "V100 32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("l4", "L4"),
        ("L40S", "L40S"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("rtx 4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
    ] {
        assert_eq!(name(text), card, "{text}");
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
fn other_models_are_not_taken_for_listed_ones() {
    for text in ["RTX 4090 Laptop", "RTX 4080 SUPER", "Quadro RTX 6000", "H100 NVL", "NVIDIA A10G", "V100S", "rtx 6000"]
    {
        assert!(matches!(find(text), Err(NotFound::Unknown { .. })), "{text}");
    }
}

#[test]
fn an_unknown_card_names_the_nearest() {
    let error = find("rtx 4091").unwrap_err();
    assert!(matches!(&error, NotFound::Unknown { nearest, .. } if nearest[0] == "RTX 4090" && nearest.len() == 3));
    assert_eq!(error.to_string(), "`rtx 4091` is neither a known card nor a size such as `24gb`");
    assert!(error.hint().starts_with("did you mean `RTX 4090`, "));
    assert!(find("H100 NVL").unwrap_err().hint().contains("`H100`"));
    for text in ["", "gb", "-3gb", "0gb", "nangb", "4091 gb"] {
        assert!(matches!(find(text), Err(NotFound::Unknown { .. })), "{text}");
    }
}

#[test]
fn an_unsupported_card_says_why() {
    for text in ["MI300X", "AMD Instinct MI300X", "mi250", "mi325x"] {
        let error = find(text).unwrap_err();
        assert!(error.to_string().contains("ROCm"), "{error}");
    }
}

#[test]
fn a_bare_size_is_the_least_that_a_card_of_it_offers() {
    for text in ["24gb", "24 GB", "24gib", "24GiB", "24g", "24", "24.0 gb"] {
        let budget = find(text).unwrap();
        assert_eq!((budget.card, budget.total_bytes), (None, 22_562 * MIB), "{text}");
        assert_eq!(budget.capability, (8, 9));
    }
    assert_eq!(find("141gb").unwrap().total_bytes, 143_068 * MIB);
    assert_eq!(find("11gb").unwrap().total_bytes, (11 * 1024 - 352 - 110) * MIB);
    assert_eq!(find("16gb").unwrap().total_bytes, 15_944 * MIB);
    assert_eq!(find_with("16gb", Needs { bf16: false }).unwrap().total_bytes, 14_909 * MIB);
    assert!(find("23gb").unwrap().note.contains("L4"));
}

#[test]
fn a_larger_size_never_offers_less_and_is_never_slower() {
    let budgets: Vec<Budget> = (2..=200).map(|gb| find(&format!("{gb}gb")).unwrap()).collect();
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
fn a_slice_has_its_share() {
    let slice = find("NVIDIA A100 80GB PCIe MIG 1g.10gb").unwrap();
    assert_eq!(slice.total_bytes / MIB, 9_728);
    assert!((slice.rates.half - 312e12 / 7.0).abs() < 1e6);
    assert!((slice.rates.bandwidth - 1935e9 / 8.0).abs() < 1e6);
    assert_eq!(find("H100 MIG 1c.3g.40gb").unwrap().marketing_bytes, 40 * GIB);
    assert!(find("A100 MIG banana").is_err());
}
