use super::*;

#[test]
fn an_answer_is_right_if_it_names_the_labels_location() {
    assert_eq!(is_right("the polyp lies in the center left part of the image", "center left"), Some(true));
    assert_eq!(is_right("the polyp lies in the center left part of the image", "center"), Some(false));
    assert_eq!(is_right("no idea", "upper left"), Some(false));
    assert_eq!(is_right("upper left", "liver"), None);
}

fn summary() -> EvalSummary {
    let mut sums = EvalSums::default();
    let truth = [true, true, false, false];
    sums.group("skin").add_mask(&[1.0, 1.0, 0.0, 0.0], &truth, (2, 2)).unwrap();
    sums.group("skin").add_mask(&[1.0, 0.0, 0.0, 0.0], &truth, (2, 2)).unwrap();
    for _question in 0..2 {
        sums.group("skin").add_image(Path::new("a.png"));
    }
    sums.group("lung_CT").add_mask(&[0.0, 0.0, 0.0, 1.0], &truth, (2, 2)).unwrap();
    let reference = "The lesion lies in the upper left part of the image.";
    sums.group("skin").add_answer(reference, reference, Some("upper left"));
    sums.group("skin").add_answer("It lies at the bottom.", reference, Some("upper left"));
    sums.summary(Protocol::default())
}

#[test]
fn means_are_over_groups_and_over_samples() {
    let summary = summary();
    let dice = |row: &EvalRow| row.segmentation.unwrap().dice;
    let names: Vec<&str> = summary.modalities.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["lung_CT", "skin"]);
    assert!((dice(&summary.modalities[1]) - 5.0 / 6.0).abs() < 1e-12);
    assert!((dice(&summary.macro_mean) - 5.0 / 12.0).abs() < 1e-12);
    assert!((dice(&summary.all_images) - 5.0 / 9.0).abs() < 1e-12);
    assert!((summary.pooled.dice - 6.0 / 10.0).abs() < 1e-12, "{:?}", summary.pooled);
    assert_eq!((summary.modalities[1].questions, summary.modalities[1].images), (2, 1), "two questions, one image");
    assert_eq!(summary.modalities[1].position_accuracy, Some(0.5));
    assert_eq!(summary.modalities[0].text, None);
    let reference = "The lesion lies in the upper left part of the image.";
    let [a, b] = [reference, "It lies at the bottom."].map(|answer| TextScores::of(answer, reference));
    let text = summary.modalities[1].text.unwrap();
    for (mean, a, b) in [
        (text.bleu, a.bleu, b.bleu),
        (text.rouge1, a.rouge1, b.rouge1),
        (text.meteor_exact_stem, a.meteor_exact_stem, b.meteor_exact_stem),
    ] {
        assert!((mean - f64::midpoint(a, b)).abs() < 1e-12, "{text:?}");
    }
    assert_eq!(summary.macro_mean.position_accuracy, Some(0.5), "a modality without answers does not count");
}

#[test]
fn words_and_masks_have_a_score_each_and_a_base_rate() {
    let mut sums = EvalSums::default();
    // four questions at `center`, two at `upper left`; the words always say `center`, once nothing
    for (i, label) in ["center", "center", "center", "upper left", "center", "upper left"].into_iter().enumerate() {
        let group = sums.group(if i < 3 { "a" } else { "b" });
        let answer = if i == 0 { "a lesion" } else { "It is in the center." };
        group.add_answer(answer, "", Some(label));
        let agrees = (i > 0).then_some(label == "center");
        group.add_mask_position(Some(i != 5), agrees, agrees == Some(false));
    }
    // an absent target has no location
    sums.group("b").add_answer("It is in the center.", "There is no lesion.", None);
    sums.group("b").add_mask_position(None, None, true);
    let summary = sums.summary(Protocol::default());
    let of = |row: &EvalRow| {
        let EvalRow { position_accuracy, mask_position_accuracy, position_agreement, position_base_rate, .. } = row;
        [position_accuracy, mask_position_accuracy, position_agreement, position_base_rate].map(|value| value.unwrap())
    };
    assert_eq!(of(&summary.all_images), [3.0 / 6.0, 5.0 / 6.0, 3.0 / 5.0, 4.0 / 6.0]);
    assert_eq!(of(&summary.modalities[0]), [2.0 / 3.0, 1.0, 1.0, 1.0]);
    assert_eq!(of(&summary.modalities[1]), [1.0 / 3.0, 2.0 / 3.0, 1.0 / 3.0, 2.0 / 3.0]);
    assert!((summary.macro_mean.position_base_rate.unwrap() - 5.0 / 6.0).abs() < 1e-12);
    assert!(summary.doubts_words());
    assert_eq!(
        summary.positions().unwrap(),
        "positions: right in 0.50 of the answers and 0.83 of the masks; words and mask agree in 0.60 where both have a \
         location; answers that contradict their mask: 3; always naming `center` would be right in 0.67, so \
         the words are no better"
    );
    assert!(!EvalSums::default().summary(Protocol::default()).doubts_words());
}

#[test]
fn each_column_shows_the_score_of_its_header() {
    let row = EvalRow {
        name: "skin".into(),
        questions: 101,
        images: 102,
        patients: 0,
        estimates: Estimates::new(),
        segmentation: Some(SegmentationMeans { dice: 0.01, iou: 0.02, soft_dice: 0.03 }),
        thresholds: Some(ThresholdScores {
            mean_dic: 0.04,
            max_dic: 0.05,
            mean_iou: 0.06,
            max_iou: 0.07,
            mean_sen: 0.08,
            mean_spe: 0.09,
            mean_em: 0.10,
            max_em: 0.11,
            sm: 0.12,
            weighted_fm: Some(0.13),
            mae: 0.14,
        }),
        position_accuracy: Some(0.15),
        mask_position_accuracy: Some(0.151),
        position_agreement: Some(0.152),
        contradictions: 3,
        position_base_rate: Some(0.153),
        most_common_position: None,
        text: Some(TextScores { bleu: 0.16, rouge1: 0.17, meteor_exact_stem: 0.18 }),
        corpus_bleu: Some(0.19),
    };
    let shown: Vec<(&str, String)> = HEADER.into_iter().zip(row.cells()).collect();
    let expected = [
        ("modality", "skin"),
        ("questions", "101"),
        ("images", "102"),
        ("Dice", "0.0100"),
        ("IoU", "0.0200"),
        ("meanDic", "0.0400"),
        ("meanIoU", "0.0600"),
        ("position", "0.1500"),
        ("base", "0.1530"),
        ("BLEU", "0.1600"),
    ];
    assert_eq!(shown, expected.map(|(name, cell)| (name, cell.to_owned())));
}

#[test]
fn corpus_bleu_and_the_mean_of_bleu_are_different_columns() {
    let mut sums = EvalSums::default();
    let long = "The lesion is in the upper left part of the image.";
    sums.group("a").add_answer(long, long, None);
    sums.group("a").add_answer("upper left", "upper left", None);
    sums.group("b").add_answer("no words of it", long, None);
    let summary = sums.summary(Protocol::default());
    let of = |row: &EvalRow| (row.text.unwrap().bleu, row.corpus_bleu.unwrap());
    // an answer of two tokens has no 4-gram; in the corpus its shorter n-grams count
    let (mean, corpus) = of(&summary.modalities[0]);
    assert!((mean - 0.5).abs() < 1e-9 && (corpus - 1.0).abs() < 1e-9, "{mean} {corpus}");
    assert_eq!(of(&summary.modalities[1]), (0.0, 0.0));
    assert!((of(&summary.macro_mean).1 - 0.5).abs() < 1e-9, "the mean over modalities");
    assert!((of(&summary.all_images).0 - 1.0 / 3.0).abs() < 1e-9);
    let all = of(&summary.all_images).1;
    // 15 of 18 tokens, 12 of 15 pairs, 10 of 12 triples and 9 of 10 quadruples match; the references have 26 tokens
    let precisions: f64 = [15.0 / 18.0, 12.0 / 15.0, 10.0 / 12.0, 9.0 / 10.0_f64].iter().map(|p| p.ln()).sum();
    let expected = (precisions / 4.0).exp() * (1.0 - 26.0 / 18.0_f64).exp();
    assert!((all - expected).abs() < 1e-9, "{all} {expected}");
}

#[test]
fn the_summary_can_be_written_and_read_as_json() {
    let text = serde_json::to_string(&summary()).unwrap();
    assert!(text.contains("\"meanDic\"") && text.contains("\"macro_mean\""));
    assert_eq!(serde_json::from_str::<EvalSummary>(&text).unwrap().to_string(), summary().to_string());
}

#[test]
fn columns_are_aligned() {
    let table = summary().to_string();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 2 + 2 + 1 + 2 + 4, "{table}");
    let end_of_dice = lines[0].find("Dice").unwrap() + 4;
    for line in [lines[2], lines[3], lines[5], lines[6]] {
        let cell = &line[..end_of_dice];
        assert!(cell.ends_with(|c: char| c.is_ascii_digit()) && !cell.ends_with(' '), "{table}");
    }
    assert!(
        EvalSums::default().summary(Protocol::default()).to_string().contains("macro mean"),
        "an empty evaluation has a table"
    );
}

#[test]
fn a_number_of_trained_images_that_is_not_known_is_null_with_a_reason() {
    let of = |images, patients, unknown: Option<&str>| {
        let trained_on = TrainedOn { images, patients, unknown: unknown.map(str::to_owned) };
        let json = serde_json::to_value(Protocol { trained_on: trained_on.clone(), ..Protocol::default() }).unwrap();
        let [a, b, c] = ["trained_on", "trained_on_patients", "trained_on_unknown"].map(|key| json[key].clone());
        (a, b, c, trained_on.notes())
    };
    let null = serde_json::Value::Null;
    assert_eq!(of(0, None, None), (0.into(), null.clone(), null.clone(), Vec::new()));
    let (images, patients, unknown, notes) = of(3, Some(2), None);
    assert_eq!((images, patients, unknown), (3.into(), 2.into(), null.clone()));
    assert!(
        notes[0].contains("images of 3 of these questions") && notes[1].starts_with("2 more questions"),
        "{notes:?}"
    );
    let (images, patients, unknown, notes) = of(0, Some(0), Some("it is old"));
    assert_eq!((images, patients, unknown), (null.clone(), null.clone(), "it is old".into()));
    assert_eq!(notes, ["it is unknown whether these images are new to the run: it is old"]);
    let (images, _, unknown, notes) = of(4, None, Some("it is old"));
    assert_eq!(
        (images, unknown),
        (null, "it is old; at least 4 of these questions are about its training images".into())
    );
    assert!(notes[0].contains("images of at least 4 of"), "{notes:?}");
    // of an earlier version
    let old = r#"{"length":"px","tolerance":2.0,"presence_threshold":null,"temperature":null,"unknown_classes":[]}"#;
    assert_eq!(serde_json::from_str::<Protocol>(old).unwrap().trained_on, TrainedOn::default());
}
